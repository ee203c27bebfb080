"""Tokenization of parts: trusted text by `PartEncoder`, untrusted text by `PlainEncoder`, without `ControlTokens`.

Each part is tokenized alone; leading special tokens stand before the first part only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from tokenizers import AddedToken, Tokenizer

from chunkattn.errors import CapacityError, RequestError
from chunkattn.fair_threads import check_wanted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PIECE = 1 << 14
"""Characters of a long text that are tokenized at once to measure the text."""
_CHARS_PER_TOKEN = 4
"""Characters per token of most texts. A text that has more for each token of the limit is measured before it is tokenized."""
_MARGIN = 1024
"""Tokens that cutting a text into pieces may add to it, beside a quarter of the limit."""


class PartEncoder:
    """Tokenizer of prompt parts. Without a tokenizer every text is an error.

    Attributes:
        tokenizer: tokenizer of the model, or None.
        leading_ids: special tokens that the tokenizer puts before a text.
        limit: number of tokens above which a text can never be served; None for no limit.
        limit_name: name of the limit, for error messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.leading_ids = _leading_ids(tokenizer) if tokenizer is not None else []
        self.limit: int | None = None
        self.limit_name = "max_model_len"

    def __call__(self, text: str, name: str = "the text", param: str = "prompt") -> list[int]:
        """Return the token ids of one part, without special tokens.

        Args:
            text: text of the part.
            name: name of the part, for error messages.
            param: name of the argument that holds the part.

        Raises:
            RequestError: the engine has no tokenizer, or the text is not valid Unicode.
            CapacityError: the text has far more tokens than `limit`.
            AbandonedError: the caller has left.
        """
        check_wanted()
        if self.tokenizer is None:
            raise RequestError("text needs a tokenizer and this engine has none; send token ids", param=param)
        try:
            self.check_length(text, name, param)
            return self._ids(text)
        except (TypeError, UnicodeError) as error:  # a lone surrogate from undecodable bytes
            message = f" {text[:40]!r} cannot be tokenized; is it valid Unicode?"
            raise RequestError(message, param=param, part=name) from error

    def _ids(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def check_length(self, text: str, name: str, param: str) -> None:
        """Check that a text is not far too long, without tokenizing the whole text.

        Args:
            text: text of the part.
            name: name of the part, for error messages.
            param: name of the argument that holds the part.

        Raises:
            CapacityError: the text has far more tokens than `limit`.
            AbandonedError: the caller has left.
        """
        if self.limit is None or (end := self._far_end(text, self.limit)) is None:
            return
        tokens = f" of {len(text)} characters has more than {self.limit} tokens in its first {end}"
        raise CapacityError(f"{tokens}, {self.limit_name} is {self.limit}; shorten it", param=param, part=name)

    def head(self, text: str) -> str:
        """Return a text without its far end, for a caller that keeps at most `limit` tokens.

        Args:
            text: text that the caller cuts to its first tokens.
        """
        return text if self.limit is None else text[: self._far_end(text, self.limit)]

    def _far_end(self, text: str, limit: int) -> int | None:
        """Return a number of characters that surely have more than `limit` tokens; None if the text may be shorter.

        No bound on characters per token holds for all tokenizers: some drop or merge characters without limit. The text is
        therefore tokenized in pieces until the tokens are more than the cuts between the pieces can explain.
        """
        if self.tokenizer is None or len(text) <= max(_PIECE, _CHARS_PER_TOKEN * limit):
            return None
        tokens = 0
        for start in range(0, len(text), _PIECE):
            check_wanted()
            tokens += len(self._ids(text[start : start + _PIECE]))
            if tokens > limit + limit // 4 + _MARGIN:
                return start + _PIECE
        return None

    @cached_property
    def special(self) -> ControlTokens:
        """Return the tokens that the tokenizer marks as special."""
        marked = {str(token): i for i, token in self._added.items() if getattr(token, "special", False)}
        named = zip(getattr(self.tokenizer, "all_special_tokens", ()), getattr(self.tokenizer, "all_special_ids", ()))
        return ControlTokens(self.tokenizer, {**marked, **{str(token): int(i) for token, i in named}})

    @cached_property
    def added(self) -> ControlTokens:
        """Return all added tokens except white space. Some are not special, as Qwen3's `<think>`."""
        return ControlTokens(self.tokenizer, {str(token): i for i, token in self._added.items() if str(token).strip()})

    @property
    def _added(self) -> dict[int, Any]:
        decoder = getattr(self.tokenizer, "added_tokens_decoder", None)
        return {int(i): token for i, token in decoder.items()} if isinstance(decoder, Mapping) else {}


class PlainEncoder:
    """Tokenizer of untrusted text without control tokens, alone or inside trusted text.

    Args:
        encode: tokenizer of parts.
        control: tokens that untrusted text must not become; None for `encode.added`.
    """

    def __init__(self, encode: PartEncoder, control: ControlTokens | None = None) -> None:
        self.encode = encode
        self.control = encode.added if control is None else control

    def __call__(self, text: str, name: str = "the text", param: str = "query") -> list[int]:
        """Return the token ids of an untrusted text, without control tokens. See `PartEncoder` for the arguments.

        Raises:
            RequestError: the engine has no tokenizer, the text is not valid Unicode, or the tokenizer has no other tokens for
                the text of a control token.
        """
        ids = self.encode(text, name, param)
        return ids if self.control.is_clean(text, ids) else self._without(["", text], name, param)

    def fill(self, pieces: Sequence[str], name: str = "the text", param: str = "query") -> list[int]:
        """Return the token ids of joined pieces: trusted text at even places, untrusted text at odd places.

        Trusted text may contain control tokens. A control token must lie within one piece, so neighbouring pieces cannot form
        a control token together. If untrusted text has no control tokens, the ids equal the ids of the whole text.

        Args:
            pieces: texts, alternately trusted and untrusted.
            name: name of the text, for error messages.
            param: name of the argument that holds the text.

        Raises:
            RequestError: the pieces cannot be tokenized, for a reason of `__call__`.
        """
        whole = "".join(pieces)
        self.encode.check_length(whole, name, param)
        trusted = [token for piece in pieces[::2] for token in self.control.find(piece)]
        if trusted == self.control.find(whole):
            ids = self.encode(whole, name, param)
            if self.control.follows(ids, trusted):
                return ids
        return self._without(pieces, name, param)

    def _without(self, pieces: Sequence[str], name: str, param: str) -> list[int]:
        try:
            return self.control.encode(pieces)
        except ControlTokenError as error:
            reason = f"{name} holds {error.tokens}, which this tokenizer cannot take as plain text"
            raise RequestError(reason, param=param) from error
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"{name} cannot be tokenized; is it valid Unicode?", param=param) from error


class ControlTokens:
    """Set of a tokenizer's added tokens that untrusted text must not become.

    Attributes:
        ids: token id of each control token, by its text.
        forbidden: ids of the control tokens, except the unknown token: a character outside the vocabulary has no other id.
        starts: pattern of a character that begins the text of a control token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, ids: Mapping[str, int]) -> None:
        self.ids = {text: token for text, token in ids.items() if text}
        self._tokenizer: Any = tokenizer
        self._unknown = _unknown_id(tokenizer)
        self._all = frozenset(self.ids.values())
        self.forbidden = self._all - {self._unknown}
        self._unknown_texts = [text for text, token in self.ids.items() if token == self._unknown]
        self._texts = re.compile(any_of(list(self.ids)) if self.ids else "(?!)")
        first = "".join(sorted({re.escape(text[0]) for text in self.ids}))
        self.starts = re.compile(f"[{first}]" if first else "(?!)")

    def find(self, text: str) -> list[str]:
        """Return the texts of the control tokens in a text, leftmost and longest first."""
        return self._texts.findall(text)

    def is_clean(self, text: str, ids: Sequence[int]) -> bool:
        """Return whether `ids`, the tokenizer's output for `text`, hold no control token.

        Args:
            text: text that was tokenized.
            ids: token ids of the text.
        """
        return self.forbidden.isdisjoint(ids) and not any(unknown in text for unknown in self._unknown_texts)

    def follows(self, ids: Sequence[int], texts: Sequence[str]) -> bool:
        """Return whether the control tokens in `ids` are a subsequence of `texts`.

        Args:
            ids: token ids to check.
            texts: texts of control tokens.
        """
        left = iter([self.ids[text] for text in texts])
        return all(token in left for token in ids if token in self.forbidden)

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Return the token ids of joined pieces. Control tokens are recognised only within a piece at an even place.

        Elsewhere the ids equal the ids of a tokenizer without the control tokens.

        Args:
            pieces: texts, alternately trusted (even places) and untrusted (odd places).

        Raises:
            ControlTokenError: the tokenizer has no other tokens for the text of a control token.
        """
        if self._renamed is None:
            return self._encode_runs(pieces)
        names = self._renamed.names
        text = "".join(
            piece if place % 2 else self._texts.sub(lambda match: names[match[0]], piece) for place, piece in enumerate(pieces)
        )
        return self._renamed.encode(text, self._all, self._unknown)

    def _encode_runs(self, pieces: Sequence[str]) -> list[int]:
        """Encode with a tokenizer written in Python: text between two control tokens is tokenized in one piece."""
        ids: list[int] = []
        run = ""
        for place, piece in enumerate(pieces):
            start = 0
            for match in () if place % 2 else self._texts.finditer(piece):
                ids += [*self._encode_run(run + piece[start : match.start()]), self.ids[match[0]]]
                run, start = "", match.end()
            run += piece[start:]
        return ids + self._encode_run(run)

    def _encode_run(self, text: str) -> list[int]:
        if not text:
            return []
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if self.is_clean(text, ids):
            return ids
        ids = list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        if left := self.forbidden.intersection(ids):
            raise ControlTokenError(self._tokenizer.convert_ids_to_tokens(sorted(left)))
        return ids

    @cached_property
    def _renamed(self) -> _Renamed | None:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return _Renamed.of(backend, self.ids) if isinstance(backend, Tokenizer) else None


class ControlTokenError(ValueError):
    """Error: the tokenizer has no other tokens for the text of a control token.

    Attributes:
        tokens: texts of the control tokens.
    """

    def __init__(self, tokens: list[str]) -> None:
        super().__init__(f"{tokens} cannot be taken as plain text")
        self.tokens = tokens


class _Renamed(NamedTuple):
    """Copy of a tokenizer that shares the model and gives control tokens random names, so no user text can contain them.

    Attributes:
        tokenizer: the copy.
        names: random name of each control token, by its text.
        real: original id of each added token, by its id in the copy.
    """

    tokenizer: Tokenizer
    names: dict[str, str]
    real: dict[int, int]

    @classmethod
    def of(cls, backend: Tokenizer, control: Mapping[str, int]) -> _Renamed:
        copy = Tokenizer(backend.model)
        if backend.normalizer is not None:
            copy.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            copy.pre_tokenizer = backend.pre_tokenizer
        added = {token.content: (number, token) for number, token in sorted(backend.get_added_tokens_decoder().items())}
        kept = {text: entry for text, entry in added.items() if text not in control}
        copy.add_tokens([token for _, token in kept.values()])
        names = {text: uuid4().hex for text in control}
        flags = {text: added[text][1] if text in added else AddedToken(text) for text in control}
        # Neither normalized nor bound to word ends, so the copy finds every name.
        renamed = [AddedToken(names[t], lstrip=f.lstrip, rstrip=f.rstrip, normalized=False) for t, f in flags.items()]
        copy.add_tokens(renamed)
        numbers = {**{text: number for text, (number, _) in kept.items()}, **{names[text]: i for text, i in control.items()}}
        here = {text: copy.token_to_id(text) for text in numbers}
        return cls(copy, names, {token: numbers[text] for text, token in here.items() if token is not None})

    def encode(self, text: str, control: frozenset[int], unknown: int | None) -> list[int]:
        """Return the original's token ids of a text that contains random names.

        Args:
            text: text with random names in place of the control tokens that count.
            control: ids of all control tokens.
            unknown: id of the unknown token, or None.

        Raises:
            ControlTokenError: the model forms a control token from the text and from its single characters.
        """
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=False)  # `encode` would hold the GIL
        formed = control - self.real.keys()
        if formed.isdisjoint(encoding.ids):
            return [self.real.get(token, token) for token in encoding.ids]
        # The vocabulary holds a control token's text as a word (Unigram models), so tokenize its characters one by one.
        ids: list[int] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            word = self.tokenizer.id_to_token(token) or ""
            if token not in formed or (token == unknown and text[start:end] != word):
                ids.append(self.real.get(token, token))
                continue
            parts = [part.id for character in word for part in self.tokenizer.model.tokenize(character)]
            if not (control - {unknown}).isdisjoint(parts):
                raise ControlTokenError([word])
            ids += parts
        return ids


def num_shared(sequences: Sequence[Any]) -> int:
    """Return the length of the longest beginning that texts, or lists of token ids, have in common."""
    low, high = min(sequences), max(sequences)
    return next((place for place, (a, b) in enumerate(zip(low, high)) if a != b), len(low))


def any_of(texts: Sequence[str]) -> str:
    """Return a pattern that matches the longest of some texts, in time independent of their number."""
    prefix = texts[0][: num_shared(texts)]
    rests = sorted({text[len(prefix) :] for text in texts} - {""})
    if not rests:
        return re.escape(prefix)
    branches = "|".join(any_of(list(group)) for _, group in groupby(rests, key=lambda rest: rest[0]))
    return f"{re.escape(prefix)}(?:{branches}){'?' if prefix in texts else ''}"


def _unknown_id(tokenizer: Any) -> int | None:
    """Return the id of characters outside the vocabulary: the declared id, or the model's id of such a character."""
    declared = getattr(tokenizer, "unk_token_id", None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if declared is not None or backend is None:
        return declared
    try:
        made = backend.model.tokenize("\U0010fffd")
    except Exception:  # the model has no such id
        return None
    return made[0].id if len(made) == 1 else None


def _leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text (BOS), without the special tokens after the text."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []
