"""Request bodies of `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from chunkattn.parsers import ChunkedPrompt
from chunkattn.parsers.prompt import Prompt
from chunkattn.server.protocol.base import Entry, Sampling, Strict, TemplateOptions, Texts, TokenIds, TokenLists


class Chunks(Strict):
    """Prompt in parts, all text or all token ids. The server never splits a part, so a document cannot forge a boundary."""

    prefix: str | TokenIds = ""
    documents: Texts | TokenLists
    question: str | TokenIds

    def prompt(self) -> ChunkedPrompt:
        """Return the prompt; an absent prefix is empty text or empty ids, as the question is."""
        prefix: str | TokenIds = self.prefix or ("" if isinstance(self.question, str) else [])
        return ChunkedPrompt(prefix, self.documents, self.question)


class CompletionBody(Sampling):
    """Request body of `/v1/completions`."""

    prompt: Annotated[
        str | TokenIds | Texts | TokenLists,
        Field(description="Text or token ids, or a list of either; split at the separator if chunk_aware."),
    ] = ""
    chunks: Annotated[Chunks | None, Field(description="The prompt in parts; instead of prompt.")] = None
    chunk_aware: Annotated[
        bool | None, Field(description="Split prompts at the separator; by default the engine's enable_chunk_aware.")
    ] = None
    max_tokens: int = 16
    echo: Annotated[bool, Field(description="Return the prompt before the text, with its log-probabilities if asked.")] = False
    logprobs: Annotated[int | None, Field(description="Number of likeliest tokens to report per token.")] = None
    suffix: None = None

    @model_validator(mode="after")
    def _check(self) -> CompletionBody:
        if self.chunks is not None and self.prompt:
            raise ValueError("prompt and chunks exclude each other; leave prompt out or empty")
        if self.max_tokens == 0 and not (self.echo or self.prompt_logprobs is not None):
            raise ValueError("max_tokens 0 generates nothing; it needs echo or prompt_logprobs")
        if self.echo and self.logprobs is not None and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are part of logprobs under echo; ask for one of them")
        return self

    def prompts(self) -> list[Prompt]:
        """Return every prompt of the request."""
        if self.chunks is not None:
            return [self.chunks.prompt()]
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [{"prompt_token_ids": self.prompt}]
        return [p if isinstance(p, str) else {"prompt_token_ids": p} for p in self.prompt]


MAX_MESSAGES = 4096


class ContentPart(Entry):
    """Part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """Message of a conversation."""

    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]
    name: str | None = None
    type: Literal["text"] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message for the chat template, with its content as one text."""
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)
        return {"role": self.role, "content": text, **({"name": self.name} if self.name is not None else {})}


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class Document(Entry):
    """Document as an object. The title becomes the line before the text."""

    id: str | None = None
    title: str | None = None
    text: str

    def plain(self) -> str:
        """Return the text of the document's chunk."""
        return self.text if self.title is None else f"{self.title}\n{self.text}"


class TextFormat(Strict):
    """Response format; only text is supported."""

    type: Literal["text"]


class ChatBody(Sampling):
    """Request body of `/v1/chat/completions`."""

    messages: Messages
    documents: Annotated[list[str | Document] | None, Field(fail_fast=True, description="Chunks of the prompt.")] = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: TextFormat | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateOptions

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: true")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self

    @property
    def limit(self) -> int | None:
        """Return the number of tokens to generate at most; None generates as many as fit."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def chunks(self) -> list[str] | None:
        """Return the text of each document, or None without documents."""
        return None if self.documents is None else [d if isinstance(d, str) else d.plain() for d in self.documents]

    def template_options(self) -> dict[str, Any]:
        """Return the variables of the chat template."""
        return {"add_generation_prompt": self.add_generation_prompt, **self.chat_template_kwargs}
