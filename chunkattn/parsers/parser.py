"""Parser of every form of prompt into a `ChunkLayout`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from chunkattn.citations import Citations, CitationsLike, read_citations
from chunkattn.errors import ConfigError, RequestError
from chunkattn.focus import Focus, FocusLike, read_focus
from chunkattn.layout import Names
from chunkattn.parsers.arguments import check_ids, check_salt
from chunkattn.parsers.chat_parser import ChatParser
from chunkattn.parsers.document_encoder import DEFAULT_TEMPLATE
from chunkattn.parsers.part_parser import NO_DOCUMENTS, Encoded, check_list
from chunkattn.parsers.prompt import DOCUMENT_NAMES, PROMPT_NAMES, ChunkedPrompt, DocumentPrompt, ParsedPrompt, Prompt, TokenIds
from chunkattn.parsers.separator import find_ids, split_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptParser(ChatParser):
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
        super().__init__(
            tokenizer,
            strategy=strategy,
            gap=gap,
            document_template=document_template,
            special_tokens_in_documents=special_tokens_in_documents,
            special_tokens_in_prompts=special_tokens_in_prompts,
            max_chunks=max_chunks,
        )
        self.separator, self.chunk_aware = separator, chunk_aware
        self._separator_ids = self.encode(separator) if tokenizer is not None else []

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
            raise RequestError(f"focus {NO_DOCUMENTS}; enable chunk_aware and separate them", param="focus")
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
        check_list(prompt.chunks, "chunks", "prompt")
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
