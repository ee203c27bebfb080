"""Cross-encoders in the form of sentence-transformers: the prompt, the labels and the activation that their files describe.

Source: https://sbert.net/docs/cross_encoder/usage/custom_models.html
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkattn.errors import ModelError
from chunkattn.local_files import is_present, read_object, read_present
from chunkattn.models.activation import activation_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_MODULES, _MODEL, _TRANSFORMER = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
_QUERY, _DOCUMENT, _INSTRUCTION = (f"{name}{'zqx'}{name}" for name in ("query", "document", "instruction"))
"""Texts that stand for the users' while a chat template is rendered."""


def read_cross_encoder(folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """Return the fields of `chunkattn.models.reranker.RerankerTraits` that a folder's files set; none for another model.

    A folder without `modules.json` may still name an activation in its `config.json`. The template holds all special tokens,
    the leading ones included.

    Args:
        folder: local folder of the checkpoint.
        config: configuration of the checkpoint.
        tokenizer: tokenizer of the model, or None.

    Raises:
        ModelError: a file cannot be read, or asks for something that is not supported.
    """
    model = read_present(folder / _MODEL)
    modules = _modules(folder / _MODULES) if is_present(folder / _MODULES) else []
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if not modules or (model.get("model_type") != "CrossEncoder" and "LogitScore" not in kinds):
        return {"activation": _configured(folder, config)}
    if kinds not in (["Transformer"], ["Transformer", "LogitScore"]):
        raise ModelError(
            f"{folder / _MODULES}: a cross-encoder of the modules {', '.join(kinds)} is not supported; supported is "
            "Transformer, alone or with LogitScore"
        )
    activation = activation_of(model.get("activation_fn"), f"{folder / _MODEL}: activation_fn") or _configured(folder, config)
    traits = {"activation": activation, **({} if tokenizer is None else _prompt(folder, model, tokenizer))}
    if len(modules) > 1:
        place = str(modules[1].get("path"))
        if Path(place).name != place:
            raise ModelError(f"{folder / _MODULES}: the path {place!r} must be the name of a folder beside the file")
        traits["labels"] = _labels(folder / place / "config.json")
    return traits


def _configured(folder: Path, config: PretrainedConfig) -> str | None:
    """Return the activation in `config.json`, under the key of today or that of versions before 4."""
    section = getattr(config, "sentence_transformers", None)
    if isinstance(section, Mapping) and "activation_fn" in section:
        return activation_of(section["activation_fn"], f"{folder / 'config.json'}: sentence_transformers.activation_fn")
    key = "sbert_ce_default_activation_function"
    return activation_of(getattr(config, key, None), f"{folder / 'config.json'}: {key}")


def _modules(file: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}; get it again") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{file} must be a list of objects; get it again")
    return modules


def _labels(file: Path) -> tuple[int, ...]:
    """Return the token ids of a `LogitScore` module."""
    fields = read_object(file)
    labels = [label for name in ("true_token_id", "false_token_id") if (label := fields.get(name)) is not None]
    if fields.get("true_token_id") is None or not all(type(label) is int and label >= 0 for label in labels):
        raise ModelError(f"{file}: true_token_id must be a token id, and false_token_id a token id or null; got {fields}")
    return tuple(labels)


def _prompt(folder: Path, model: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the traits of the prompt; none if the template does not tell it."""
    settings = read_present(folder / _TRANSFORMER)
    if settings.get("do_lower_case"):
        raise ModelError(f"{folder / _TRANSFORMER}: do_lower_case is not supported; texts are read as they are")
    prompts, name = model.get("prompts"), model.get("default_prompt_name")
    default = prompts.get(name) if isinstance(prompts, Mapping) and isinstance(name, str) else None
    if default is not None and not isinstance(default, str):
        raise ModelError(f"{folder / _MODEL}: the prompt {name!r} must be a text, got {default!r}")
    modalities = settings.get("modality_config")
    chats = "message" in modalities if isinstance(modalities, Mapping) else bool(getattr(tokenizer, "chat_template", None))
    if chats:
        form = modalities.get("message") if isinstance(modalities, Mapping) else None
        options = settings.get("processing_kwargs")
        chat = _Chat(
            tokenizer,
            structured=_is_structured(form, tokenizer),
            options={**(options.get("chat_template") or {})} if isinstance(options, Mapping) else {},
        )
        if (plain := chat.render(default)) is None:
            logger.warning("%s: its chat template does not show a query and then a document, so the prompt is unknown", folder)
            return {}
        template, instruction = chat.with_instruction(plain, default)
    else:
        template, instruction = _pair(tokenizer, default)
    return {"template": template, "instruction": instruction, "is_whole": True}


def _is_structured(form: Any, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the contents of messages are lists of parts: what the files say, else what the template reads."""
    named = form.get("format", "auto") if isinstance(form, Mapping) else "auto"
    if named != "auto":
        return bool(named == "structured")
    template = str(getattr(tokenizer, "chat_template", ""))
    return any(mark in template for mark in ("content[0]", ".type", "'type'", '"type"', "message.content["))


class _Chat:
    """Chat template of a cross-encoder: an instruction as the system message, then the roles `query` and `document`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, structured: bool, options: dict[str, Any]) -> None:
        self._tokenizer, self._structured = tokenizer, structured
        self._options = {name: value for name, value in options.items() if name != "restore_suffix"}

    def render(self, instruction: str | None) -> str | None:
        """Return the text with `{query}` and `{document}`; None if the template does not hold both, once and in this order."""
        system = [("system", instruction)] if instruction else []
        messages = [self._message(*message) for message in [*system, ("query", _QUERY), ("document", _DOCUMENT)]]
        try:
            text = self._tokenizer.apply_chat_template(messages, **{**self._options, "tokenize": False})
        except Exception as error:  # the template raises what it likes
            logger.debug("the chat template of the cross-encoder cannot be rendered: %s", error)
            return None
        if text.count(_QUERY) != 1 or text.count(_DOCUMENT) != 1 or text.index(_QUERY) > text.index(_DOCUMENT):
            return None
        return str(text).replace(_QUERY, "{query}").replace(_DOCUMENT, "{document}")

    def with_instruction(self, plain: str, default: str | None) -> tuple[str, str | None]:
        """Return the text with a place for the instruction, and its default, or `plain` and None if it has no such place.

        Args:
            plain: text with the default instruction, or with what the template says without one.
            default: the default instruction, or None.
        """
        before, mark, after = (self.render(_INSTRUCTION) or "").partition(_INSTRUCTION)
        fits = plain.startswith(before) and plain.endswith(after) and len(plain) >= len(before) + len(after)
        if not mark or _INSTRUCTION in after or not fits or "{document}" not in after:
            return plain, None
        shown = plain[len(before) : len(plain) - len(after)]
        return f"{before}{{instruction}}{after}", default if default and default.strip() == shown else shown

    def _message(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if self._structured else text}


def _pair(tokenizer: PreTrainedTokenizerBase, default: str | None) -> tuple[str, str | None]:
    """Return the text of a pair without a chat template: the tokenizer's special tokens around query and document."""
    encoding = tokenizer("a", "a")
    ids, numbers = encoding["input_ids"], encoding.sequence_ids()
    first, last = numbers.index(0), len(numbers) - 1 - numbers[::-1].index(1)
    sides = ids[:first], [i for i, n in zip(ids[first:last], numbers[first:last], strict=True) if n is None], ids[last + 1 :]
    before, between, after = ("".join(tokenizer.convert_ids_to_tokens(side)) for side in sides)
    place = "" if default is None else "{instruction}"
    return f"{before}{place}{{query}}{between}{{document}}{after}", default
