"""Parser of conversations, and of the beginnings of prompts that are cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, cast

import numpy as np

from chunkattn.citations import CitationsLike, Document, read_citations
from chunkattn.errors import RequestError
from chunkattn.focus import FocusLike, read_focus
from chunkattn.layout import Names
from chunkattn.parsers.arguments import check_template_options
from chunkattn.parsers.chat import TRUSTED_ROLES, ChatPieces, split_chat, text_of
from chunkattn.parsers.chat_template import texts_of
from chunkattn.parsers.document_encoder import Marked
from chunkattn.parsers.part_parser import NO_DOCUMENTS, PartParser, check_list
from chunkattn.parsers.prompt import DOCUMENT_NAMES, DocumentLike, ParsedPrompt, Prefix, TokenIds

_CHAT_NAMES = DOCUMENT_NAMES._replace(prefix="messages", question="messages")


class ChatParser(PartParser):
    """Parser of chat messages, which the tokenizer's chat template renders, with documents before the first user message."""

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
            raise RequestError(f"focus {NO_DOCUMENTS}; give them as documents", param="focus")
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
        check_list(documents, "documents", names.chunks)
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
