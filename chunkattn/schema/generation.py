"""Request bodies of `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from chunkattn.answer_parsers.tools import Tools
from chunkattn.citations import Document as NamedDocument
from chunkattn.focus import Focus
from chunkattn.parsers import DocumentPrompt
from chunkattn.parsers.prompt import Prompt
from chunkattn.schema.accepted import (
    AN_OBJECT,
    ChatNoEffect,
    CompletionNoEffect,
    MessageNoEffect,
    ShallowObject,
    no_effect,
)
from chunkattn.schema.base import Body, E, Entry, FastList, Sampling, Strict, Texts, TokenIds, TokenLists
from chunkattn.schema.citations import CitationsField
from chunkattn.schema.parts import chat_message, titled
from chunkattn.schema.rendered import Rendered
from chunkattn.schema.shapes import SHAPE_FIELDS
from chunkattn.schema.tool_choice import AllowedChoice, FunctionChoice, NamedChoice
from chunkattn.structured_outputs import PARAM
from chunkattn.web.errors import ApiError, renamed


class Document(Entry):
    """Document as an object. The title becomes the line before the text."""

    id: str | None = None
    title: str | None = None
    text: str
    cite_as: str | None = None
    """Id that citations name the document by, in place of its own."""

    def plain(self) -> str:
        """Return the text of the document."""
        return titled(self.title, self.text)


class DocumentOrId(Entry):
    """Document as an object: a text, perhaps with a title for the line before it, or the id of a stored document alone."""

    id: str | None = None
    title: str | None = None
    text: str | None = None

    def plain(self) -> str:
        """Return the text of the document."""
        return titled(self.title, self.text or "")


def check_documents(documents: list[Any]) -> list[Any]:
    """Check that every object has a text, or an id alone.

    Args:
        documents: documents of a request.

    Raises:
        ValueError: an object has neither, or a title without a text.
    """
    for number, document in enumerate(documents):
        if isinstance(document, DocumentOrId) and document.text is None and (document.id is None or document.title is not None):
            raise ValueError(f"entry {number} needs a text, or the id of a stored document and nothing else")
    return documents


def named_documents(documents: Sequence[Any] | None) -> dict[int, str]:
    """Return the ids of the documents that a request names by id, by their place.

    Args:
        documents: documents of a request.
    """
    numbered = enumerate(documents or ())
    return {number: d.id for number, d in numbered if isinstance(d, DocumentOrId) and d.text is None and d.id is not None}


def with_stored(documents: Sequence[Any], stored: Mapping[int, Any], *, named: bool = False) -> list[Any]:
    """Return the texts and token ids of a request's documents.

    Args:
        documents: documents of a request.
        stored: contents of the documents named by id, by their place.
        named: whether a text with an id becomes a `chunkattn.Document`.
    """
    numbered = enumerate(documents)
    return [stored[n] if n in stored else _content(d, named) if isinstance(d, DocumentOrId) else d for n, d in numbered]


def _content(document: DocumentOrId, named: bool) -> str | NamedDocument:
    return NamedDocument(document.plain(), document.id) if named and document.id is not None else document.plain()


ChunkMode = Literal["isolated", "joined"]
"""Mode of chunks: every document is one, or all documents together."""

PromptDocuments = Annotated[FastList[str | TokenIds | DocumentOrId], AfterValidator(check_documents)]


Count = Annotated[int, Field(ge=1, description="Number of documents to choose.")]


class FocusOptions(Strict):
    """Choice among the documents by the question; see `chunkattn.Focus`."""

    top_n: Count
    mode: Literal["reread", "only"] = "only"
    """Repeat the chosen documents before the question, or leave the other documents out."""
    score: str = "likelihood"
    """Score by which documents are chosen: likelihood or relevance."""


FocusField = Annotated[
    Count | FocusOptions | None,
    Field(description="Number of documents to choose by the question, or `{top_n, mode, score}`; by default none is chosen."),
]


def focus_of(value: int | FocusOptions | None) -> Focus | None:
    """Return the focus of a request, or None without one. The engine checks the name of the score.

    Args:
        value: value of the field `focus`.
    """
    if value is None or isinstance(value, FocusOptions):
        return None if value is None else Focus(value.top_n, value.mode, value.score)
    return Focus(value)


class Chunks(Strict):
    """Prompt in parts. The server never splits a part, so a document cannot forge a boundary.

    Prefix and question are both text or both token ids. A document is a text, an object, or token ids.
    """

    prefix: str | TokenIds = ""
    documents: PromptDocuments
    question: str | TokenIds

    def prompt(self, stored: Mapping[int, Any]) -> DocumentPrompt:
        """Return the prompt; an absent prefix is empty text or empty ids, as the question is.

        Args:
            stored: token ids of the documents named by id, by their place.
        """
        prefix: str | TokenIds = self.prefix or ("" if isinstance(self.question, str) else [])
        return DocumentPrompt(prefix, with_stored(self.documents, stored, named=True), self.question)


def prompts_of(prompt: str | Sequence[Any]) -> list[Prompt]:
    """Return the prompts of a completion.

    Args:
        prompt: text or token ids, or a list of either.
    """
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [{"prompt_token_ids": prompt}]
    return [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompt]


class PromptBody(Body):
    """Fields of a prompt: text, token ids, or parts."""

    prompt: str | TokenIds | Texts | TokenLists = ""
    """Text or token ids, or a list of either; split at the separator if chunk_aware."""
    chunks: Chunks | None = None
    """The prompt in parts; instead of prompt."""
    chunk_aware: bool | None = None
    """Split prompts at the separator; by default the engine's enable_chunk_aware."""
    chunk_mode: ChunkMode = "isolated"
    """Documents as `isolated` chunks, or one `joined` chunk."""
    add_special_tokens: bool = True
    """Begin prompts given as text with the tokenizer's leading special tokens."""

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if self.chunks is not None and self.prompt:
            raise ValueError("prompt and chunks exclude each other; leave prompt out or empty")
        if self.chunks is None and "prompt" not in self.model_fields_set:
            text = "prompt is missing; give prompt or chunks"
            raise ApiError(400, text, param="prompt", code="missing_required_parameter")
        return self

    def named(self) -> dict[int, str]:
        """Return the ids of the documents named by id, by their place."""
        return {} if self.chunks is None else named_documents(self.chunks.documents)

    def prompts(self, stored: Mapping[int, Any]) -> list[Prompt]:
        """Return every prompt of the request.

        Args:
            stored: token ids of the documents named by id, by their place.
        """
        if self.chunks is not None:
            return [self.chunks.prompt(stored)]
        return prompts_of(self.prompt)


class CompletionBody(Sampling, PromptBody, CompletionNoEffect):
    """Request body of `/v1/completions`."""

    fields_of: ClassVar = {"prompt": ("chunks", "prompt"), **SHAPE_FIELDS}

    focus: FocusField = None
    citations: CitationsField = None
    max_tokens: int = 16
    echo: bool = False
    """Return the prompt before the text, with its log-probabilities if asked."""
    logprobs: int | None = None
    """Number of likeliest tokens to report per token."""

    @model_validator(mode="after")
    def _check(self) -> CompletionBody:
        if self.max_tokens == 0 and not (self.echo or self.prompt_logprobs is not None):
            raise ValueError("max_tokens 0 generates nothing; it needs echo or prompt_logprobs")
        if self.echo and self.logprobs is not None and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are part of logprobs under echo; ask for one of them")
        if self.best_of not in (None, self.n):
            text = f"best_of is not supported by this server; leave it out, or send the value of n, {self.n}"
            raise ApiError(400, text, param="best_of", code="unsupported_parameter")
        return self


MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 128
"""Limit on the calls of one message, as OpenAI's limit on tools."""


class ContentPart(Entry):
    """Part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str
    cache_control: Annotated[ShallowObject, no_effect(AN_OBJECT, "caching is automatic")] = None
    prompt_cache_breakpoint: Annotated[ShallowObject, no_effect(AN_OBJECT, "caching is automatic")] = None


class CalledFunction(Entry):
    """Function that an assistant called, with its arguments as the text of a JSON object or as an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Entry):
    """Call of a tool by an assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(MessageNoEffect):
    """Message of a conversation."""

    role: str
    content: str | FastList[ContentPart] | None = None
    name: str | None = None
    type: Literal["text"] | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[FastList[ToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def size(self) -> int:
        """Return the number of characters of the content."""
        return len(self.text)

    @property
    def text(self) -> str:
        """Return the content as one text."""
        return "".join(p.text for p in self.content) if isinstance(self.content, list) else self.content or ""

    def plain(self) -> dict[str, Any]:
        """Return the message for the chat template; see `chat_message`."""
        return chat_message(self.model_dump())


Messages = Annotated[FastList[Message], Field(max_length=MAX_MESSAGES)]


class WithDocuments(Body):
    """Fields of the documents of a conversation."""

    documents: PromptDocuments | None = None
    """Chunks of the prompt: texts, token ids, objects with a text, or `{"id"}` of a stored document."""
    chunk_mode: ChunkMode = "isolated"
    """Documents as `isolated` chunks, or one `joined` chunk."""
    focus: FocusField = None
    citations: CitationsField = None


class ChatBody(Sampling, Rendered, WithDocuments, ChatNoEffect):
    """Request body of `/v1/chat/completions`."""

    fields_of: ClassVar = {
        "prompt": ("messages",),
        "max_tokens": ("max_tokens", "max_completion_tokens"),
        "logprobs": ("top_logprobs", "logprobs"),
        PARAM: (*SHAPE_FIELDS[PARAM], "tools"),
    }

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    """Choice of the answer: it may call tools (`auto`, the default with tools), may not (`none`), must (`required`), calls the
    one that is named, or may or must call those of `allowed_tools`. The prompt shows all tools in each case."""
    parallel_tool_calls: bool = True
    """Allow several calls in one answer."""
    include_reasoning: bool = True
    """Return the reasoning as `reasoning_content`, in a model whose chat template marks it."""
    echo: bool = False
    """Begin the answer with the text of the last message, if that is an assistant's."""

    _names: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: true")
        self.check_same("max_tokens", "max_completion_tokens")
        self._check_choice()
        return self

    def _check_choice(self) -> None:
        """Check the choice of tools.

        Raises:
            ApiError: 400, it needs tools, or names none of them.
        """
        choice, names = self.tool_choice, [tool.function.name for tool in self.tools or ()]
        named = [choice] if isinstance(choice, NamedChoice) else []
        named += choice.allowed_tools.tools if isinstance(choice, AllowedChoice) else []
        unknown = next((one.function.name for one in named if one.function.name not in names), None)
        if unknown is not None:
            text = f"tool_choice names {unknown[:160]!r}, which is none of the tools"
            raise ApiError(400, text, param="tool_choice", code="invalid_value")
        if choice == "required" and not names:
            raise ApiError(400, "tool_choice required needs tools", param="tool_choice", code="invalid_value")

    def tools_of(self) -> Tools | None:
        """Return the tools with the choice among them, or None without tools."""
        choice, functions = self.tool_choice or "auto", self.functions_of_tools
        if not functions:
            return None
        if isinstance(choice, NamedChoice):
            return Tools(functions, "required", choice.function.name, self.parallel_tool_calls)
        if isinstance(choice, AllowedChoice):
            allowed = frozenset(one.function.name for one in choice.allowed_tools.tools)
            return Tools(functions, choice.allowed_tools.mode, None, self.parallel_tool_calls, allowed)
        return Tools(functions, choice, None, self.parallel_tool_calls)

    def name_as(self, names: Mapping[str, str]) -> None:
        """Have errors name the fields of another body, whose translation this body is.

        Args:
            names: names in the other body, by the names in this one.
        """
        self._names = names

    def own_error(self, error: E) -> E:
        """Return an error of the engine's call under the names of the body that the client sent."""
        return cast("E", renamed(super().own_error(error), self._names))

    def named(self) -> dict[int, str]:
        """Return the ids of the documents named by id, by their place."""
        return named_documents(self.documents)

    def chunks(self, stored: Mapping[int, Any]) -> list[Any] | None:
        """Return the text or the token ids of each document, with its id if it has one, or None without documents.

        Args:
            stored: token ids of the documents named by id, by their place.
        """
        return None if self.documents is None else with_stored(self.documents, stored, named=True)

    @property
    def echoed(self) -> str:
        """Return the text before the generated text of every answer: that of an assistant's last message under `echo`."""
        last = self.messages[-1] if self.echo and self.messages else None
        return last.text if last is not None and last.role == "assistant" else ""
