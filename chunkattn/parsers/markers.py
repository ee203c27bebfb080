"""Markers of documents: the text at a document's beginning that an answer cites it by, and the pattern of such answers."""

from __future__ import annotations

import re
from array import array
from base64 import b32encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from chunkattn.citations import REQUIRED, Citations, Document
from chunkattn.errors import RequestError
from chunkattn.layout import Names
from chunkattn.parsers.encode import any_of
from chunkattn.structured_outputs import StructuredOutputsParams

OPEN, CLOSE = "[doc:", "]"
"""Beginning and end of every marker. No pattern of an answer holds the beginning without a marker of the prompt."""
MARKER = rf"{re.escape(OPEN)}[^\[\]]*{re.escape(CLOSE)}"
"""Pattern of a marker of any document."""
BEHIND_MARKER = "\n"
"""Text between a marker and its document."""
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.:@-#"
"""Characters between beginning and end of a marker."""
_WORD_CHARS = 32
"""Characters of a word that may end before a citation that is due."""
_PLAIN_ID = re.compile(r"[\w.:@-]{1,64}", re.ASCII)
_HASH_BYTES = 5
"""Bytes of a hash in a marker, in 8 characters. Two of 4,096 documents have one hash with a chance of 8 in a million."""


def marker_of(document: Document) -> str:
    """Return the marker of a document: a function of the document alone.

    An id of 1 to 64 ASCII letters, digits or any of `_.:@-` stands in the marker as it is. Another id, and the content of a
    document without an id, is named by `#` and a hash in 8 letters and digits.

    Args:
        document: the document.
    """
    name, content = document.id, document.content
    if name is not None and _PLAIN_ID.fullmatch(name):
        return f"{OPEN}{name}{CLOSE}"
    value, person = (content, b"text") if name is None else (name, b"id")
    if not isinstance(value, str):
        return f"{OPEN}{_hash(array('i', value).tobytes(), b'ids')}{CLOSE}"
    return f"{OPEN}{_hash(value.encode('utf-8', 'surrogatepass'), person)}{CLOSE}"


def _hash(value: bytes, person: bytes) -> str:
    return "#" + b32encode(blake2b(value, digest_size=_HASH_BYTES, person=person).digest()).decode().lower()


def name_of(marker: str) -> str:
    """Return the id or the hash in a marker."""
    return marker[len(OPEN) : -len(CLOSE)]


@dataclass(frozen=True)
class Cited:
    """Documents that an answer may cite.

    Attributes:
        options: how the answer cites.
        markers: marker of each document in the caller's order; None for an empty one, which cannot be cited.
        ids: id of each document; None for a document without one.
        around: function from the shape of the cited text to that of the whole answer; None for an answer that is all text.
        not_first: character that does not begin an answer with required citations; empty for none.
    """

    options: Citations
    markers: tuple[str | None, ...]
    ids: tuple[str | None, ...]
    around: Callable[[StructuredOutputsParams], StructuredOutputsParams] | None = None
    not_first: str = ""

    @property
    def instruction(self) -> str:
        """Return the text before the question; it is empty if there is no document to cite."""
        return self.options.instruction if any(self.markers) else ""

    def numbers(self, shown: Iterable[int] | None = None) -> dict[str, int]:
        """Return the numbers of documents by their markers, sorted.

        Args:
            shown: numbers of the documents that the prompt shows; None for all.
        """
        listed = range(len(self.markers)) if shown is None else shown
        return dict(sorted((marker, number) for number in listed if (marker := self.markers[number]) is not None))

    def pattern(self, shown: Iterable[int] | None = None) -> str:
        """Return the regular expression of the answers that cite documents of the prompt alone; see `answer_pattern`.

        Args:
            shown: see `numbers`.

        Raises:
            RequestError: citations are required, and there is no document to cite.
        """
        markers = [*self.numbers(shown)]
        if self.options.mode == REQUIRED and not markers:
            raise RequestError("citations are required, and the prompt has no document to cite", param="citations")
        return answer_pattern(markers, self.options.within if self.options.mode == REQUIRED else None, self.not_first)

    def shape(self, shown: Iterable[int] | None = None) -> StructuredOutputsParams:
        """Return the shape of the answers that cite documents of the prompt alone; see `pattern`."""
        shape = StructuredOutputsParams(regex=self.pattern(shown))
        return shape if self.around is None else self.around(shape)


def cited_documents(documents: Sequence[Document], options: Citations, names: Names) -> Cited:
    """Return the documents of a prompt that its answer may cite.

    Args:
        documents: the documents.
        options: how the answer cites.
        names: the caller's names of the documents, for errors.

    Raises:
        RequestError: an id is no text, or two documents have one marker.
    """
    markers, seen = list[str | None](), dict[str, int]()
    for number, document in enumerate(documents):
        if document.id is not None and not isinstance(document.id, str):
            kind = type(document.id).__name__
            raise RequestError(f" has an id that is no text but {kind}", param=names.chunks, part=names.of(number))
        marker = marker_of(document) if len(document.content) else None
        markers.append(marker)
        if marker is not None and (first := seen.setdefault(marker, number)) < number:
            reason = f"{names.of(number)} {_reason(documents[first], document)}, so a citation could not tell them apart"
            text = f" and {reason}; send one of them, or give each an id of its own"
            raise RequestError(text, param=names.chunks, part=names.of(first))
    return Cited(options, tuple(markers), tuple(document.id for document in documents))


def _reason(one: Document, other: Document) -> str:
    """Return why two documents have one marker."""
    if one.id is not None and one.id == other.id:
        return f"have the id {one.id[:128]!r}"
    same = one.id is other.id is None and [*one.content] == [*other.content]
    return "have equal contents and no ids" if same else "have markers that are equal by chance"


def answer_pattern(markers: Sequence[str], within: int | None = None, not_first: str = "") -> str:
    """Return the regular expression of the answers whose markers are some of those given.

    It holds every text in which each `OPEN` begins one of the markers, and no other text. The pattern spells out the automaton
    that looks for `OPEN`, whose first character stands in it once, so no look-around and no complement is needed.

    Args:
        markers: markers of the documents.
        within: characters behind which the first marker follows the next word at the latest. Up to it the text then holds no
            other `[`. None needs no marker.
        not_first: character that does not begin a text up to its first marker; empty for none.
    """
    first, *others = (re.escape(character) for character in OPEN)
    rest = ""
    for character in reversed(others):
        rest = rf"(?:[^\[{character}][^\[]*|{character}{rest})?" if rest else rf"(?:[^\[{character}][^\[]*)?"
    free = rf"[^\[]*(?:{first}{rest})*"
    if not markers:
        return free
    marker = any_of(sorted(markers))
    if within is None:
        return f"{free}(?:{marker}{free})*"
    begin = rf"[^\[]{{0,{within}}}"
    if not_first:
        begin = rf"(?:[^\[{re.escape(not_first)}][^\[]{{0,{within - 1}}})?" if within else ""
    return rf"{begin}\w{{0,{_WORD_CHARS}}}[.!?]? ?(?:{marker}{free})+"
