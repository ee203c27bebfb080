"""Parser of every form of prompt into a `ChunkLayout`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from chunkattn.citations import Citations, CitationsLike, Document, read_citations
from chunkattn.errors import CapacityError, ConfigError, RequestError
from chunkattn.focus import Focus, FocusLike, read_focus
from chunkattn.layout import ChunkLayout, Names
from chunkattn.parsers.arguments import check_ids, check_salt, check_template_options
from chunkattn.parsers.chat import TRUSTED_ROLES, ChatPieces, split_chat, text_of
from chunkattn.parsers.chat_template import texts_of
from chunkattn.parsers.document_encoder import DEFAULT_TEMPLATE, DocumentEncoder, Marked
from chunkattn.parsers.encode import PartEncoder, PlainEncoder
from chunkattn.parsers.prompt import (
    DOCUMENT_NAMES,
    PROMPT_NAMES,
    ChunkedPrompt,
    DocumentLike,
    DocumentPrompt,
    ParsedPrompt,
    Prefix,
    Prompt,
    TokenIds,
)
from chunkattn.parsers.separator import find_ids, split_ids
from chunkattn.rope.positions import get_strategy, make_layout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoded = tuple[list[int], str | None]
"""Token ids of a part, and its text; None for a part given as token ids."""

_CHAT_NAMES = DOCUMENT_NAMES._replace(prefix="messages", question="messages")
_NO_DOCUMENTS = "chooses among documents, and the prompt has none"


class PromptParser:
    """Parser of every form of prompt under one tokenizer, separator and position strategy.

    Args:
        tokenizer: tokenizer of the model; None for an engine without one.
        separator: text between parts.
        strategy: name of the position strategy.
        gap: positions left free between prefix and chunks, under `shared` positions.
        chunk_aware: whether to split text and ids at the separator.
        document_template: text around every document given as text.
        special_tokens_in_documents: whether chunk texts and contents of user and tool messages may become special tokens.
        special_tokens_in_prompts: whether prefix, question, plain text and other messages may become special tokens.
        max_chunks: number of chunks that a prompt may have; None sets no limit.

    Attributes:
        encode: tokenizer that keeps special tokens.
        prompts: tokenizer of text that the caller vouches for.
        documents: tokenizer of documents, with their template.
        max_tokens: limit on the tokens of all parts of a prompt; None for no limit.

    Raises:
        ConfigError: the separator is empty, the strategy is unknown, or the template is malformed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        separator: str,
        strategy: str,
        gap: int = 0,
        chunk_aware: bool,
        document_template: str = DEFAULT_TEMPLATE,
        special_tokens_in_documents: bool = False,
        special_tokens_in_prompts: bool = True,
        max_chunks: int | None = None,
    ) -> None:
        if not separator:
            raise ConfigError("chunk_separator must not be empty")
        self.encode = PartEncoder(tokenizer)
        self._leading = self.encode.leading_ids
        self._in_documents, self._in_prompts = special_tokens_in_documents, special_tokens_in_prompts
        self._plain = PlainEncoder(self.encode, self.encode.special)
        self.prompts = self.encode if special_tokens_in_prompts else self._plain
        self._chunks = self.encode if special_tokens_in_documents else self._plain
        self.documents = DocumentEncoder(document_template, self._chunks)
        self.separator = separator
        get_strategy(strategy)
        self.strategy, self.gap = strategy, gap
        self.chunk_aware = chunk_aware
        self.max_chunks = max_chunks
        self.max_tokens: int | None = None
        self._separator_ids = self.encode(separator) if tokenizer is not None else []

    def bound(self, part_tokens: int, prompt_tokens: int, *, name: str = "max_model_len") -> None:
        """Set the sizes that no prompt of an engine may exceed, so that longer text is refused before it is tokenized whole.

        Args:
            part_tokens: limit on the tokens of one part.
            prompt_tokens: limit on the tokens of all parts together.
            name: name of the limit on a part, for error messages.
        """
        self.encode.limit, self.encode.limit_name, self.max_tokens = part_tokens, name, prompt_tokens

    def without_leading(self) -> PromptParser:
        """Return a parser that puts no special tokens before a text."""
        parser = copy(self)
        parser._leading = []
        return parser

    def parse(
        self,
        prompt: Prompt,
        chunk_aware: bool | None = None,
        focus: FocusLike | None = None,
        citations: CitationsLike | None = None,
    ) -> ParsedPrompt:
        """Parse one prompt.

        Args:
            prompt: prompt in any form of `Prompt`.
            chunk_aware: whether to split text and ids at the separator; None for the parser's default.
            focus: choice among the chunks of a prompt that has none of its own.
            citations: how the answer cites the documents of a `DocumentPrompt`; None for no citations.

        Raises:
            RequestError: the form is unknown, the question is empty, there are more than `max_chunks` chunks, a text or token
                ids hold no chunks to choose from, or there are no documents that can be cited (see `DocumentEncoder.cited`).
            CapacityError: the chunks given as text have more tokens than a prompt may have. Under a focus of mode `"only"`
                they may, for the prompt shows the chosen ones alone.
        """
        default = read_focus(focus)
        choice = (read_focus(prompt.focus) if isinstance(prompt, DocumentPrompt) else None) or default
        citing = read_citations(citations)
        if citing is not None and not isinstance(prompt, DocumentPrompt):
            raise RequestError("citations name documents; send a DocumentPrompt, over HTTP chunks", param="citations")
        parsed = self._parse(prompt, chunk_aware, choice, citing)
        if default is not None and not parsed.layout.num_chunks and isinstance(prompt, (str, Mapping)):
            raise RequestError(f"focus {_NO_DOCUMENTS}; enable chunk_aware and separate them", param="focus")
        return replace(parsed, focus=choice)

    def _parse(self, prompt: Prompt, chunk_aware: bool | None, focus: Focus | None, citing: Citations | None) -> ParsedPrompt:
        split = self.chunk_aware if chunk_aware is None else chunk_aware
        if isinstance(prompt, str):
            return self._text(prompt, split, focus)
        if isinstance(prompt, ChunkedPrompt):
            if isinstance(prompt.chunks, Sequence):
                self._check_count(len(prompt.chunks), "prompt")
            return self._chunked(prompt, focus)
        if isinstance(prompt, DocumentPrompt):
            self._check_documents(prompt.documents)
            documents, cited = self.documents.cited(prompt.documents, citing, DOCUMENT_NAMES)
            question = prompt.question
            if cited is not None and isinstance(question, str) and question:
                question = cited.instruction + question
            parsed = self._in_parts(prompt.prefix, documents, question, self.documents, DOCUMENT_NAMES, focus)
            query = prompt.question if isinstance(prompt.question, str) else None
            return replace(parsed, sources=prompt.documents, query=query, cited=cited)
        if isinstance(prompt, Mapping):
            return self._dict(prompt, split, focus)
        raise RequestError(
            f"a prompt is a string, a dict, a ChunkedPrompt or a DocumentPrompt, got {type(prompt).__name__}; "
            'token ids go into {"prompt_token_ids": [...]}',
            param="prompt",
        )

    def parse_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        documents: Sequence[DocumentLike] | None = None,
        focus: FocusLike | None = None,
        citations: CitationsLike | None = None,
        **template_options: Any,
    ) -> ParsedPrompt:
        """Parse chat messages. Contents are not split at separators.

        Args:
            messages: messages of the conversation.
            documents: texts or token ids that become the chunks, texts in the document template.
            focus: choice among the documents.
            citations: how the answer cites the documents; None for no citations.
            **template_options: variables of the chat template.

        Raises:
            RequestError: the messages are unusable (see `chunkattn.parsers.chat.split_chat`), there are more than
                `max_chunks` documents, or none to choose from or to cite (see `DocumentEncoder.cited`).
            CapacityError: as `parse`.
        """
        choice = read_focus(focus)
        if choice is not None and documents is None:
            raise RequestError(f"focus {_NO_DOCUMENTS}; give them as documents", param="focus")
        if (citing := read_citations(citations)) is not None and documents is None:
            raise RequestError("citations name documents, and the prompt has none; give them as documents", param="citations")
        if documents is not None:
            self._check_documents(documents)
        # Without documents there is nothing to put in front of the first user message, and it may be missing.
        is_cut = documents is not None and (len(documents) > 0 or _has_user(messages))
        pieces = self._pieces(messages, template_options, "messages", is_cut=is_cut, with_history=choice is not None)
        marked, cited = self.documents.cited(documents or (), citing, _CHAT_NAMES)
        if cited is not None and is_cut:
            pieces = pieces.with_instruction(cited.instruction, is_trusted=self._in_prompts)
        fill = partial(self._plain.fill, name="messages", param="messages")
        if documents is None or not is_cut:
            layout = self._layout([], [], fill(pieces.question), _CHAT_NAMES)
            return ParsedPrompt(layout, ("".join(pieces.question),), names=_CHAT_NAMES, cited=cited)
        chunks = self._encoded(marked, self.documents, _CHAT_NAMES, choice)
        first, last = ((fill(p), "".join(p)) for p in (pieces.prefix, pieces.question))
        earlier = fill(pieces.history) if pieces.history else []
        # The last token of a text may change with what follows.
        history = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(earlier, last[0])))
        question = next(m for m in reversed(messages) if m["role"] == "user")
        parsed = self._joined(first, chunks, last, _CHAT_NAMES)
        query = "".join(texts_of(question)) or None
        return replace(parsed, query=query, history_len=history, sources=documents, focus=choice, cited=cited)

    def _pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_options: Mapping[str, Any],
        param: str,
        *,
        is_cut: bool = True,
        with_history: bool = False,
    ) -> ChatPieces:
        """Return the pieces of a conversation before and after its cut, see `split_chat`."""
        if self.encode.tokenizer is None:
            raise RequestError("chat needs a tokenizer and this engine has none", param="messages")
        _check_unicode(messages)
        self.encode.check_length(text_of(messages), "the text of all messages", param)
        if tools := template_options.get("tools"):
            self.encode.check_length(text_of(tools), "the text of all tools", "tools")
        tokenizer, special, how = self.encode.tokenizer, self.encode.special, {"is_cut": is_cut, "with_history": with_history}
        return split_chat(tokenizer, messages, special, self._is_trusted, template_options, **how)

    def _is_trusted(self, role: Any) -> bool:
        """Return whether contents of this role may become special tokens."""
        return self._in_prompts if role in TRUSTED_ROLES else self._in_documents

    def parse_cache(
        self,
        prefix: Prefix,
        documents: Sequence[DocumentLike | Marked],
        template_options: Mapping[str, Any] | None = None,
        names: Names = DOCUMENT_NAMES,
        citations: CitationsLike | None = None,
    ) -> tuple[list[int], list[list[int]]]:
        """Return the token ids of a prefix and of documents, as prompts will contain them.

        Args:
            prefix: text, token ids, or the chat messages before the first user message. An empty list before texts stands for
                a chat that begins with the user message.
            documents: all text or all token ids, as the prefix is; either after messages. Texts get the document template.
            template_options: variables of the chat template.
            names: the caller's names of prefix and documents.
            citations: how answers cite the documents; None for documents without markers, except for `Marked` ones.

        Raises:
            RequestError: an argument is malformed, text and token ids are mixed, or as `DocumentEncoder.cited`.
        """
        _check_list(documents, "documents", names.chunks)
        marked, _ = self.documents.cited(documents, read_citations(citations), names)
        documents = [d.content if isinstance(d, (Document, Marked)) else d for d in documents]
        if not isinstance(prefix, (str, Sequence, np.ndarray)):
            text = f"the prefix must be text, token ids or messages, got {type(prefix).__name__}"
            raise RequestError(text, param=names.prefix)
        template_options = check_template_options(template_options)
        has_texts = any(isinstance(document, str) for document in documents)
        if not isinstance(prefix, str) and (isinstance(prefix[0], Mapping) if len(prefix) else has_texts):
            chat = [*cast("Sequence[Mapping[str, Any]]", prefix), {"role": "user", "content": "?"}]
            before = self._pieces(chat, template_options or {}, names.prefix).prefix
            first = self._plain.fill(before, "the prefix", names.prefix)
        elif any(isinstance(document, str) != isinstance(prefix, str) for document in documents):
            raise RequestError("prefix and documents must be all text or all token ids", param=names.chunks)
        else:
            first, _ = self._part(self.text, cast("str | TokenIds", prefix), "the prefix", names.prefix)
        return first, [self.documents(d, names.of(number), names.chunks)[0] for number, d in enumerate(marked)]

    def read_documents(self, documents: Sequence[str | TokenIds], names: Names = DOCUMENT_NAMES) -> list[list[int]]:
        """Return the token ids of documents as chunks of one prompt. Texts get the document template.

        Args:
            documents: texts or token ids.
            names: the caller's names of the documents.

        Raises:
            RequestError: a document is malformed, or there are more than `max_chunks`.
            CapacityError: the documents have more tokens than a prompt may have.
        """
        self._check_documents(documents)
        return [ids for ids, _ in self._encoded(documents, self.documents, names)]

    def text(self, text: str, name: str = "the text", param: str = "prompt") -> list[int]:
        """Return the token ids of a text that begins a prompt, after the tokenizer's leading special tokens.

        Args:
            text: text that the caller vouches for.
            name: name of the text, for error messages.
            param: name of the argument that holds the text.

        Raises:
            RequestError: the text cannot be tokenized (see `PartEncoder`).
        """
        return [*self._leading, *self.prompts(text, name, param)]

    def _dict(self, prompt: Mapping[str, Any], split: bool, focus: Focus | None) -> ParsedPrompt:
        forms = [k for k in ("prompt", "prompt_token_ids") if prompt.get(k) is not None]
        if len(forms) != 1 or set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}:
            raise RequestError(
                f"a prompt dict holds 'prompt' or 'prompt_token_ids', and perhaps a 'cache_salt', got keys {list(prompt)}",
                param="prompt",
            )
        if forms == ["prompt_token_ids"]:
            parsed = self._ids(prompt["prompt_token_ids"], split)
        elif isinstance(prompt["prompt"], str):
            parsed = self._text(prompt["prompt"], split, focus)
        else:
            raise RequestError(f"'prompt' must be a string, got {type(prompt['prompt']).__name__}", param="prompt")
        return replace(parsed, cache_salt=check_salt(prompt.get("cache_salt")))

    def _check_documents(self, documents: Any) -> None:
        """Check the type and the number of documents.

        Raises:
            RequestError: the documents are not a list, or there are more than `max_chunks`.
        """
        _check_list(documents, "documents", "documents")
        self._check_count(len(documents), "documents")

    def _check_count(self, chunks: int, param: str) -> None:
        """Check the number of chunks before any work per chunk.

        Raises:
            RequestError: the prompt has more than `max_chunks` chunks.
        """
        if self.max_chunks is not None and chunks > self.max_chunks:
            text = f"the prompt has {chunks} chunks, max_chunks_per_prompt is {self.max_chunks}; send fewer or longer chunks"
            raise RequestError(text, param=param)

    def _text(self, text: str, split: bool, focus: Focus | None) -> ParsedPrompt:
        if split:
            self._check_count(text.count(self.separator) - 1, "prompt")
        texts = text.split(self.separator) if split else [text]
        if len(texts) < 3:
            if not text:
                raise RequestError("the prompt is empty", param="prompt")
            return ParsedPrompt(self._layout([], [], self.text(text)), (text,))
        return self._chunked(ChunkedPrompt(texts[0], texts[1:-1], texts[-1]), focus)

    def _ids(self, ids: TokenIds, split: bool) -> ParsedPrompt:
        ids = check_ids(ids, "prompt_token_ids", most=self.max_tokens)
        if not ids:
            raise RequestError("the prompt is empty", param="prompt")
        if split and not self._separator_ids:
            raise RequestError("splitting token ids at the separator needs a tokenizer; send a ChunkedPrompt", param="prompt")
        if split:
            self._check_count(sum(1 for _ in find_ids(ids, self._separator_ids)) - 1, "prompt")
        parts = split_ids(ids, self._separator_ids) if split else [ids]
        first, *chunks, last = [[], ids] if len(parts) < 3 else parts
        return ParsedPrompt(self._layout(first, chunks, last), None)

    def _chunked(self, prompt: ChunkedPrompt, focus: Focus | None) -> ParsedPrompt:
        """Parse a prompt in parts."""
        _check_list(prompt.chunks, "chunks", "prompt")
        if len({isinstance(part, str) for part in (prompt.prefix, *prompt.chunks, prompt.question)}) > 1:
            raise RequestError("the parts of a ChunkedPrompt must be all text or all token ids", param="prompt")
        encode = partial(self._part, self._chunks)
        return self._in_parts(prompt.prefix, prompt.chunks, prompt.question, encode, PROMPT_NAMES, focus)

    def _in_parts(
        self,
        prefix: str | TokenIds,
        chunks: Sequence[Any],
        question: str | TokenIds,
        encode: Callable[[Any, str, str], Encoded],
        names: Names,
        focus: Focus | None,
    ) -> ParsedPrompt:
        """Parse a prompt whose chunks are encoded by `encode`, from the chunk, its name and its argument."""
        if isinstance(prefix, str) != isinstance(question, str):
            raise RequestError("prefix and question must be both text or both token ids", param=names.question)
        encoded = self._encoded(chunks, encode, names, focus)
        last = self._part(self.prompts, question, "the question", names.question)
        parsed = self._joined(self._part(self.text, prefix, "the prefix", names.prefix), encoded, last, names)
        return replace(parsed, query=last[1])

    def _part(self, encode: Callable[[str, str, str], list[int]], part: str | TokenIds, name: str, param: str) -> Encoded:
        """Return the token ids and the text of a part, which `encode` tokenizes, from the text, its name and its argument."""
        if isinstance(part, str):
            return encode(part, name, param), part
        return check_ids(part, name.removeprefix("the "), param, most=self.max_tokens), None

    def _encoded(
        self,
        chunks: Sequence[Any],
        encode: Callable[[Any, str, str], Encoded],
        names: Names,
        focus: Focus | None = None,
    ) -> list[Encoded]:
        """Return the token ids and the text of each chunk.

        Raises:
            CapacityError: the texts have more tokens than a prompt may have; the remaining texts are not tokenized.
        """
        most = None if focus is not None and focus.mode == "only" else self.max_tokens
        encoded, tokens = [], 0
        for number, chunk in enumerate(chunks):
            ids, text = encode(chunk, names.of(number), names.chunks)
            encoded.append((ids, text))
            tokens += 0 if text is None else len(ids)
            if most is not None and tokens > most:
                raise CapacityError(
                    f"the first {number + 1} {names.chunk}s have {tokens} tokens, a prompt of this engine has at most "
                    f"{most}; send less or raise kv_cache_memory_bytes",
                    param=names.chunks,
                )
        return encoded

    def _joined(self, prefix: Encoded, chunks: Sequence[Encoded], question: Encoded, names: Names) -> ParsedPrompt:
        layout = self._layout(prefix[0], [ids for ids, _ in chunks], question[0], names)
        texts = [text for _, text in (prefix, *chunks, question)]
        return ParsedPrompt(layout, None if None in texts else tuple(cast("list[str]", texts)), names=names)

    def _layout(
        self, prefix: TokenIds, chunks: Sequence[TokenIds], question: TokenIds, names: Names = PROMPT_NAMES
    ) -> ChunkLayout:
        if not question:
            raise RequestError("the question is empty", param=names.question)
        return make_layout(prefix, chunks, question, self.strategy, self.gap)


def _check_list(parts: Any, name: str, param: str) -> None:
    if isinstance(parts, (str, Mapping)) or not isinstance(parts, Sequence):
        raise RequestError(f"{name} must be a list of strings or token ids, got {type(parts).__name__}", param=param)


def _has_user(messages: Sequence[Any]) -> bool:
    return any(isinstance(message, Mapping) and message.get("role") == "user" for message in messages)


def _check_unicode(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check the contents that are text.

    Raises:
        RequestError: a content is not valid Unicode; the error names the message.
    """
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str):
            continue
        try:
            content.encode()
        except UnicodeError:  # a lone surrogate from undecodable bytes
            text = f"message {number} {content[:40]!r} cannot be tokenized; is it valid Unicode?"
            raise RequestError(text, param="messages") from None
