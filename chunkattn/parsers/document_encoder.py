"""Documents as chunks: the template around a document's text, and documents given as token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chunkattn.config import split_document_template
from chunkattn.errors import ConfigError
from chunkattn.parsers.arguments import document_of
from chunkattn.parsers.encode import PartEncoder, PlainEncoder

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

        Args:
            document: text or token ids.
            name: name of the document, for error messages.
            param: name of the argument that holds the document.

        Raises:
            RequestError: the document is neither text nor token ids, or cannot be tokenized.
        """
        content = document_of(document, name, param)
        if not isinstance(content, str):
            return content, None
        if not content:
            return [], ""
        whole = f"{self.before}{content}{self.after}"
        if isinstance(self._encode, PlainEncoder) and whole != content:
            return self._encode.fill([self.before, content, self.after], name, param), whole
        return self._encode(whole, name, param), whole
