"""Backends of the `tokenizers` library that give the ids of SentencePiece."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Kinds of pieces, in SentencePiece and in `tokenizer.ggml.token_type`."""
_SPACE = "\u2581"
"""SentencePiece's spelling of a space."""


@dataclass(frozen=True)
class Pieces:
    """Vocabulary of a SentencePiece model and its treatment of spaces.

    Attributes:
        texts: text of each piece.
        scores: score of each piece; the highest is merged first.
        kinds: kind of each piece.
        mergeable: kinds of pieces that a merge may make.
        dummy_prefix: where a space is put before a text: never, before the whole text, or before every text between control
            tokens.
        squeeze_spaces: whether leading, trailing and double spaces are removed.
        isolated: pieces that are taken whole wherever they occur in a text, after the dummy prefix.
        unigram: whether the model is a unigram model rather than BPE.
    """

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    mergeable: frozenset[int] = frozenset({NORMAL})
    dummy_prefix: Literal["never", "first", "always"] = "always"
    squeeze_spaces: bool = False
    isolated: Sequence[str] = ()
    unigram: bool = False

    @property
    def unknown_id(self) -> int | None:
        """Return the id of the unknown token, or None."""
        return next((i for i, kind in enumerate(self.kinds) if kind == UNKNOWN), None)


def sentencepiece_backend(pieces: Pieces) -> Tokenizer:
    """Return a tokenizer without added tokens and without a post-processor.

    Args:
        pieces: the vocabulary.

    Raises:
        ValueError: the `tokenizers` library has no tokenizer with the same ids.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = pieces.unknown_id
    byte_fallback = {"<0x00>", "<0xFF>"} <= set(pieces.texts)
    if pieces.unigram:
        scored = list(zip(pieces.texts, pieces.scores, strict=True))
        tokenizer = Tokenizer(models.Unigram(scored, unk_id=unknown, byte_fallback=byte_fallback))
    else:
        tokenizer = Tokenizer(
            models.BPE(
                vocab={text: i for i, text in enumerate(pieces.texts)},
                merges=list(_merges(pieces)),
                unk_token=None if unknown is None else pieces.texts[unknown],
                fuse_unk=True,
                byte_fallback=byte_fallback,
                ignore_merges=bool(pieces.isolated),  # no merge makes an isolated piece
            )
        )
    prefix = pieces.dummy_prefix != "never"
    rules: list[normalizers.Normalizer] = []
    if pieces.squeeze_spaces:
        rules.append(normalizers.Replace(Regex(r"\A +"), " " if prefix else ""))
        rules.append(normalizers.Replace(Regex(" {2,}"), " "))
        rules.append(normalizers.Replace(Regex(f"[ {_SPACE}]+\\z"), ""))
    else:
        rules.append(normalizers.Replace(" ", _SPACE))
    splits: list[pre_tokenizers.PreTokenizer] = []
    if prefix:
        # `Metaspace` puts no prefix before a text that begins with its replacement. A squeezed text may begin with a space,
        # which is the prefix then. In other texts no space is left here, so the first `Metaspace` always puts one.
        splits.append(pre_tokenizers.Metaspace(" ", prepend_scheme=pieces.dummy_prefix, split=False))
    splits.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=False))
    if pieces.isolated:
        longest_first = sorted(pieces.isolated, key=len, reverse=True)
        splits.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Sequence(rules), pre_tokenizers.Sequence(splits)
    ends: list[decoders.Decoder] = [decoders.Strip(" ", left=1)] if prefix or pieces.squeeze_spaces else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return tokenizer


def _merges(pieces: Pieces) -> Iterator[tuple[str, str]]:
    """Yield the merges of a BPE model, the first to be made first.

    Raises:
        ValueError: SentencePiece makes merges that no ordered list of pairs of pieces makes.
    """
    known = set(pieces.texts)
    made: list[tuple[float, int, str, str]] = []
    for i, (text, score, kind) in enumerate(zip(pieces.texts, pieces.scores, pieces.kinds, strict=True)):
        if kind not in pieces.mergeable:
            continue
        pairs = [(text[:place], text[place:]) for place in range(1, len(text))]
        merges = [pair for pair in pairs if known.issuperset(pair)]
        made += [(-score, i, *pair) for pair in merges]
        if not merges and any(all(len(part) == 1 or part in known for part in pair) for pair in pairs):
            raise ValueError(f"token {text!r} is in the vocabulary, its characters are not")
    made.sort()
    _check_ties(made)
    for _, _, left, right in made:
        yield left, right


def _check_ties(made: Sequence[tuple[float, int, str, str]]) -> None:
    """Raise ValueError if merges of equal scores overlap.

    SentencePiece makes the leftmost of them first, and a list of merges the first in the list.
    """
    for score, group in groupby(made, key=lambda merge: merge[0]):
        merges = list(group)
        if merges[0][1] == merges[-1][1]:
            continue
        begins = {left: i for _, i, left, _ in merges}
        for _, i, left, right in merges:
            if begins.get(right, i) != i:
                other = next(a + b for _, j, a, b in merges if a == right and j != i)
                raise ValueError(f"tokens {left + right!r} and {other!r} overlap and have the same score, {-score:g}")
