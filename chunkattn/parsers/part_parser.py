"""Parser of the parts of a prompt: their token ids, and the layout of all parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Self, cast

from chunkattn.errors import CapacityError, RequestError
from chunkattn.focus import Focus
from chunkattn.layout import ChunkLayout, Names
from chunkattn.parsers.arguments import check_ids
from chunkattn.parsers.document_encoder import DocumentEncoder
from chunkattn.parsers.encode import PartEncoder, PlainEncoder
from chunkattn.parsers.prompt import DOCUMENT_NAMES, PROMPT_NAMES, ParsedPrompt, TokenIds
from chunkattn.rope.positions import get_strategy, make_layout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoded = tuple[list[int], str | None]
"""Token ids of a part, and its text; None for a part given as token ids."""

NO_DOCUMENTS = "chooses among documents, and the prompt has none"
"""Reason why a focus is refused, for error messages."""


class PartParser:
    """Parser of the parts of a prompt under one tokenizer and position strategy.

    Args:
        tokenizer: tokenizer of the model; None for an engine without one.
        strategy: name of the position strategy.
        gap: positions left free between prefix and chunks, under `shared` positions.
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
        ConfigError: the strategy is unknown, or the template is malformed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        strategy: str,
        gap: int,
        document_template: str,
        special_tokens_in_documents: bool,
        special_tokens_in_prompts: bool,
        max_chunks: int | None,
    ) -> None:
        self.encode = PartEncoder(tokenizer)
        self._leading = self.encode.leading_ids
        self._in_documents, self._in_prompts = special_tokens_in_documents, special_tokens_in_prompts
        self._plain = PlainEncoder(self.encode, self.encode.special)
        self.prompts = self.encode if special_tokens_in_prompts else self._plain
        self._chunks = self.encode if special_tokens_in_documents else self._plain
        self.documents = DocumentEncoder(document_template, self._chunks)
        get_strategy(strategy)
        self.strategy, self.gap = strategy, gap
        self.max_chunks = max_chunks
        self.max_tokens: int | None = None

    def bound(self, part_tokens: int, prompt_tokens: int, *, name: str = "max_model_len") -> None:
        """Set the sizes that no prompt of an engine may exceed, so that longer text is refused before it is tokenized whole.

        Args:
            part_tokens: limit on the tokens of one part.
            prompt_tokens: limit on the tokens of all parts together.
            name: name of the limit on a part, for error messages.
        """
        self.encode.limit, self.encode.limit_name, self.max_tokens = part_tokens, name, prompt_tokens

    def without_leading(self) -> Self:
        """Return a parser that puts no special tokens before a text."""
        parser = copy(self)
        parser._leading = []
        return parser

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

    def _check_documents(self, documents: Any) -> None:
        """Check the type and the number of documents.

        Raises:
            RequestError: the documents are not a list, or there are more than `max_chunks`.
        """
        check_list(documents, "documents", "documents")
        self._check_count(len(documents), "documents")

    def _check_count(self, chunks: int, param: str) -> None:
        """Check the number of chunks before any work per chunk.

        Raises:
            RequestError: the prompt has more than `max_chunks` chunks.
        """
        if self.max_chunks is not None and chunks > self.max_chunks:
            text = f"the prompt has {chunks} chunks, max_chunks_per_prompt is {self.max_chunks}; send fewer or longer chunks"
            raise RequestError(text, param=param)

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


def check_list(parts: Any, name: str, param: str) -> None:
    """Check that chunks or documents of a caller are a list.

    Args:
        parts: argument of the caller.
        name: name of the parts, for error messages.
        param: name of the argument that holds them.

    Raises:
        RequestError: they are no sequence, or one text or mapping.
    """
    if isinstance(parts, (str, Mapping)) or not isinstance(parts, Sequence):
        raise RequestError(f"{name} must be a list of strings or token ids, got {type(parts).__name__}", param=param)
