"""Documents as chunks: the template around a document's text, and documents given as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from chunkattn.citations import PARAM, Citations, Document
from chunkattn.config import split_document_template
from chunkattn.errors import ConfigError, RequestError
from chunkattn.layout import Names
from chunkattn.parsers.arguments import document_of
from chunkattn.parsers.encode import PartEncoder, PlainEncoder
from chunkattn.parsers.markers import ALPHABET, BEHIND_MARKER, CLOSE, OPEN, Cited, cited_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_TEMPLATE = "Document: {document}\n\n"
"""Template of models whose checkpoint has none."""


def pick_template(option: str | None, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the template of an engine: the option, or the checkpoint's own, or the default.

    Args:
        option: engine option `document_template`.
        tokenizer: tokenizer, whose `tokenizer_config.json` may hold a `document_template`.

    Raises:
        ConfigError: the checkpoint's template is malformed.
    """
    if option is not None:
        return option
    template = getattr(tokenizer, "init_kwargs", {}).get("document_template")
    if template is None:
        return DEFAULT_TEMPLATE
    try:
        if not isinstance(template, str):
            raise ConfigError(f"document_template must be a text, got {template!r}")
        split_document_template(template)
    except ConfigError as error:
        raise ConfigError(f"the checkpoint's tokenizer_config.json: {error}; set the option document_template") from None
    return template


class Marked(NamedTuple):
    """Document whose chunk begins with a marker.

    Attributes:
        content: text or token ids.
        marker: marker of the document; None for a document without one.
    """

    content: Any
    marker: str | None


class DocumentEncoder:
    """Tokenizer of documents: a text stands in the template and is tokenized with it, token ids are taken as they are.

    The template's text may become special tokens, as a chat template's may. An empty text is an empty chunk, without the
    template.

    Args:
        template: text with `{document}` once.
        encode: tokenizer of the documents' texts. A `PlainEncoder` makes no special tokens of them.

    Raises:
        ConfigError: the template is malformed.
    """

    def __init__(self, template: str, encode: PartEncoder | PlainEncoder) -> None:
        self.before, self.after = split_document_template(template)
        self._encode = encode

    @property
    def template(self) -> str:
        """Return the template, with `{document}` where the document's text goes."""
        return f"{self.before}{{document}}{self.after}"

    @property
    def size(self) -> int:
        """Return the number of characters that the template adds to a document."""
        return len(self.before) + len(self.after)

    def __call__(self, document: Any, name: str, param: str = "documents") -> tuple[list[int], str | None]:
        """Return the token ids and the text of a document's chunk; the text is None for token ids.

        The marker of a `Marked` document stands on a line before its text, inside the template, or before its token ids.

        Args:
            document: text or token ids, a `Document`, or a `Marked` document.
            name: name of the document, for error messages.
            param: name of the argument that holds the document.

        Raises:
            RequestError: the document is neither text nor token ids, it cannot be tokenized, or the tokenizer cannot write its
                marker.
        """
        content, marker = document if isinstance(document, Marked) else (document, None)
        content = document_of(content, name, param)
        if marker is not None and not self._writes_markers:
            text = "citations need a tokenizer that writes letters, digits and punctuation as they are; this engine has none"
            raise RequestError(text, param=PARAM)
        before = "" if marker is None else f"{marker}{BEHIND_MARKER}"
        if not isinstance(content, str):
            return [*self._encode(before, name, param), *content] if before else content, None
        if not content:
            return [], ""
        content = before + content
        whole = f"{self.before}{content}{self.after}"
        if isinstance(self._encode, PlainEncoder) and whole != content:
            return self._encode.fill([self.before, content, self.after], name, param), whole
        return self._encode(whole, name, param), whole

    def cited(self, documents: Sequence[Any], options: Citations | None, names: Names) -> tuple[Sequence[Any], Cited | None]:
        """Return documents with their markers, and what an answer may cite; without citations, the documents and None.

        Args:
            documents: documents of one prompt.
            options: how the answer cites.
            names: the caller's names of the documents, for errors.

        Raises:
            RequestError: a document is malformed, or as `cited_documents`.
        """
        if options is None:
            return documents, None
        listed = [
            document if isinstance(document, Document) else Document(document_of(document, names.of(number), names.chunks))
            for number, document in enumerate(documents)
        ]
        cited = cited_documents(listed, options, names)
        return [*map(Marked, [document.content for document in listed], cited.markers)], cited

    @cached_property
    def _writes_markers(self) -> bool:
        """Return whether the tokenizer gives every character of a marker back."""
        encode = self._encode if isinstance(self._encode, PartEncoder) else self._encode.encode
        sample = f"{OPEN}{ALPHABET}{CLOSE}{BEHIND_MARKER}"
        return encode.tokenizer is not None and sample in str(encode.tokenizer.decode(self._encode(sample)))
