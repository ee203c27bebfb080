"""Traits of rerankers: which rerank template a checkpoint calls for, and the names of a classifier's classes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from chunkattn.models.cross_encoder import read_cross_encoder
from chunkattn.models.gguf_file import GGUFFile
from chunkattn.models.spec import DecoderSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_QWEN3, _MXBAI = "qwen3-reranker", "mxbai-rerank-v2"
_SENTENCES = {
    _QWEN3: "Judge whether the Document meets the requirements based on the Query and the Instruct provided",
    _MXBAI: "You are a search relevance expert who evaluates how well documents match search queries",
}
"""Templates by name, each with a sentence that only a chat template of such a reranker has."""
_NAMES = {_QWEN3: re.compile("qwen3-reranker"), _MXBAI: re.compile(r"mxbai-rerank-[a-z]+-v2")}
"""Templates by name, each with a pattern of the names of the models it is for."""
_CARD = re.compile(r"^(?:# +|<h1[^>]*> *|base_model:)((?:[^<\n]+)?(?:\n[ \t]*- .*)*)", re.MULTILINE)
"""Names of models in a model card: its title, and the base models in its metadata."""


class RerankerTraits(NamedTuple):
    """Properties of a checkpoint that tell how it ranks.

    Attributes:
        template: name of a rerank template, or its text with `{query}` and `{document}`; None if nothing tells.
        class_names: names of the classes of a sequence classifier, in order; empty for a language model.
        instruction: default of the template's `{instruction}`; None for the template's own.
        labels: token ids of the answers for relevant and not relevant, instead of the template's; empty for the template's.
        activation: name in `chunkattn.models.activation.ACTIVATIONS` of the function of logits; None for sigmoid and softmax.
        is_whole: whether `template` is a text that holds the leading special tokens.
    """

    template: str | None = None
    class_names: tuple[str, ...] = ()
    instruction: str | None = None
    labels: tuple[int, ...] = ()
    activation: str | None = None
    is_whole: bool = False


def traits_of_folder(
    folder: Path,
    model: str | None,
    config: PretrainedConfig,
    spec: DecoderSpec,
    tokenizer: PreTrainedTokenizerBase | None,
) -> RerankerTraits:
    """Return the traits of a Hugging Face checkpoint.

    Args:
        folder: local folder of the checkpoint.
        model: folder or hub id that the user gave.
        config: configuration of the checkpoint.
        spec: shape of its decoder.
        tokenizer: tokenizer of the model, or None.

    Raises:
        ModelError: as `read_cross_encoder`.
    """
    chat_template = str(getattr(tokenizer, "chat_template", None) or "")  # a text, or texts by name
    traits = _traits(config, spec, chat_template, _names_of_folder(folder, model))
    return traits._replace(**read_cross_encoder(folder, config, tokenizer))


def traits_of_gguf(
    file: GGUFFile, config: PretrainedConfig, spec: DecoderSpec, chat_template: str | None = None
) -> RerankerTraits:
    """Return the traits of a GGUF file.

    Args:
        file: opened GGUF file.
        config: `config_from_gguf` of the file.
        spec: `spec_from_gguf` of the file.
        chat_template: chat template in place of the file's own; None for its own.

    Raises:
        ModelError: a value of the metadata has the wrong type.
    """
    template = file.get("tokenizer.chat_template.rerank", str, "")
    keys = ("general.name", "general.basename", "general.base_model.0.name")
    names = iter([*(file.get(key, str, "") for key in keys), _end_of(file.path), _end_of(file.path.resolve())])
    traits = _traits(config, spec, chat_template or file.get("tokenizer.chat_template", str, ""), names)
    return traits._replace(template=template) if "{query}" in template and "{document}" in template else traits


def _traits(config: PretrainedConfig, spec: DecoderSpec, chat_template: str, names: Iterator[str]) -> RerankerTraits:
    classes = tuple(str(config.id2label.get(number) or f"LABEL_{number}") for number in range(spec.num_labels or 0))
    return RerankerTraits(
        next((name for name, sentence in _SENTENCES.items() if sentence in chat_template), None)
        or _template_of_head(config, spec.architecture, classes)
        or next(filter(None, map(_template_of_name, names)), None),
        classes,
    )


def _template_of_head(config: PretrainedConfig, architecture: str, classes: tuple[str, ...]) -> str | None:
    """Return the template that the head calls for: one class, or "yes" and "no", of a Qwen3, or vLLM's labels of a head."""
    if architecture.startswith("Qwen3") and classes:
        return _QWEN3 if len(classes) == 1 or {name.lower() for name in classes} == {"yes", "no"} else None
    if getattr(config, "is_original_qwen3_reranker", False):
        return _QWEN3
    labels = getattr(config, "classifier_from_token", None)
    if architecture.startswith("Qwen3") and labels == ["no", "yes"]:
        return _QWEN3
    return _MXBAI if architecture.startswith("Qwen2") and labels == ["0", "1"] else None


def _template_of_name(name: str) -> str | None:
    plain = re.sub(r"[ _.]+", "-", name.lower())
    return next((template for template, pattern in _NAMES.items() if pattern.search(plain)), None)


def _names_of_folder(folder: Path, model: str | None) -> Iterator[str]:
    """Yield the names of a checkpoint and of its base models: the configuration's, the model card's and the folder's."""
    try:
        yield str(json.loads((folder / "config.json").read_text()).get("_name_or_path") or "")
        yield from _CARD.findall((folder / "README.md").read_text(errors="replace"))
    except (OSError, ValueError):  # a missing model card; the configuration was read before
        pass
    yield from (_end_of(Path(model or "")), _end_of(folder), _end_of(folder.resolve()))


def _end_of(path: Path) -> str:
    """Return the parts of a path that name a model: owner and name of a hub id, folder and name of a file or of a snapshot."""
    return "/".join(path.parts[-3:] if "snapshots" in path.parts[-2:-1] else path.parts[-2:])
