"""Text that users wrote, tokenized as text alone: what looks like a special token in it does not become one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from chunkattn.errors import RequestError
from chunkattn.parsers.encode import PartEncoder


class PlainEncoder:
    """Tokenizes users' text, alone or inside a template's.

    Added tokens count as special whether or not the tokenizer says so (`<think>` of Qwen3 is not), those of white space
    alone excepted.

    Attributes:
        control_ids: id of every added token, by its text.

    Raises:
        RequestError: the engine was started without a tokenizer.
    """

    def __init__(self, encode: PartEncoder) -> None:
        if encode.tokenizer is None:
            raise RequestError("text needs a tokenizer and this engine has none", param="query")
        self._encode, self._tokenizer = encode, encode.tokenizer
        added = {str(token): int(i) for i, token in self._tokenizer.added_tokens_decoder.items()}
        self.control_ids = {text: i for text, i in added.items() if text.strip()}
        self._control = frozenset(self.control_ids.values())
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def __call__(self, text: str, name: str = "the text", param: str = "query") -> list[int]:
        """Token ids of a user's text, none of them a control token. Arguments are those of `PartEncoder`.

        Raises:
            RequestError: no valid Unicode, or the tokenizer knows no way to take it as text.
        """
        ids = self._encode(text, name, param)
        if self._control.isdisjoint(ids):
            return ids
        ids = self._without_added_tokens(text)
        if left := self._control.intersection(ids) - {self._tokenizer.unk_token_id}:
            tokens = self._tokenizer.convert_ids_to_tokens(sorted(left))
            raise RequestError(f"{name} holds {tokens}, which this tokenizer cannot take as plain text", param=param)
        return ids

    def fill(self, pieces: Sequence[str]) -> list[int]:
        """Token ids of a template that is filled in: its own text at even places, in which added tokens count, users' at odd.

        Text between two control tokens is tokenized in one piece, as if the template had been written out.

        Raises:
            RequestError: as for one text.
        """
        ids: list[int] = []
        run = ""
        for place, piece in enumerate(pieces):
            start = 0
            for match in () if place % 2 else self._controls.finditer(piece):
                ids += [*self(run + piece[start : match.start()]), self.control_ids[match[0]]]
                run, start = "", match.end()
            run += piece[start:]
        return ids + self(run)

    def _without_added_tokens(self, text: str) -> list[int]:
        """The tokenizer's pipeline without its search for added tokens, which changes nothing of the tokenizer itself."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text] if backend.pre_tokenizer is None else [w for w, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]
