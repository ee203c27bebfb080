"""`read_decision`: the head, labels and prompt of a decision model, from the files beside its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import SafetensorError, safe_open

from chunkattn.errors import ModelError
from chunkattn.local_files import cause_of, is_present, read_object, read_present, read_small
from chunkattn.models.decision_heads import POINTER, LinearHead, PointerHead, checked, make_pointer
from chunkattn.models.decision_prompts import DECIDERS, KINDS, Write, decider, generic, judge
from chunkattn.models.torch_file import read_torch

_CODES, _JUDGE, _SETTINGS, _CALIBRATION = "decision_config.json", "judge_config.json", "decision.json", "calibration.json"
_TEMPLATE, _HEAD, _READOUT, _TORCH = "decision_template.jinja", "head.safetensors", "readout.safetensors", "head.pt"
_JOINT = "joint_head_config.json", "joint_head.safetensors"
DECISION_FILES = (_CODES, _JUDGE, _SETTINGS, _TEMPLATE, _HEAD, _READOUT, _TORCH, *_JOINT)
"""Files any of which makes a folder a decision model."""
_SEES = "its questions see each other, and here every question is answered as if it were asked alone"
_ENVIRONMENT = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
Form = Literal["kev", "template", "text", "chat"]
"""Form of a prompt: kev's segments of tokens, a Jinja template, a text, or a user message in the chat template."""


@dataclass(frozen=True, eq=False)
class DecisionModel:
    """Head, prompt and settings of a decision model, beside its weights.

    Attributes:
        head: head that reads hidden states; None reads the logits of the labels.
        form: form of the prompt.
        template: text of the Jinja template; empty for the other forms.
        write: writer of the text or of the message; None for the other forms.
        labels: labels by kind of question; empty for those of transformers: `Yes` and `No`, or letters.
        temperature: divisor of the scores by kind of question; a kind that is not there has 1.
        noul_options: order of the options of a noul.
        sanitizes: whether the user's texts never become control tokens.
        adapter: folder of the adapter that belongs to the head; None for none.
    """

    head: LinearHead | PointerHead | None
    form: Form
    template: str = ""
    write: Write | None = None
    labels: Mapping[str, list[str]] = field(default_factory=dict)
    temperature: Mapping[str, float] = field(default_factory=dict)
    noul_options: tuple[str, str] = ("true", "false")
    sanitizes: bool = True
    adapter: Path | None = None

    @property
    def digest(self) -> bytes:
        """Return 16 bytes that differ between heads and settings."""
        digest = xxhash.xxh3_128(repr((self.form, self.template, self.labels, self.temperature, self.noul_options)).encode())
        for name, value in vars(self.head).items() if self.head is not None else ():
            parts = value if isinstance(value, tuple) else (value,)
            for part in parts:
                digest.update(part.tobytes() if isinstance(part, np.ndarray) else f"{name}{part}".encode())
        return digest.digest()


def read_decision(folder: Path, hidden: int, kind: str) -> DecisionModel | None:
    """Return the decision model of a folder; None for another model.

    Args:
        folder: folder with the files of the head, that of an adapter included.
        hidden: size of the hidden states.
        kind: `model_type` of the decoder.

    Raises:
        ModelError: a file cannot be read, or the head is of a kind that is not supported.
    """
    if not any(is_present(folder / name) for name in DECISION_FILES):
        return None
    if any(is_present(folder / name) for name in _JOINT):
        raise ModelError(f"{folder}: the joint head of Clef is not supported: {_SEES}")
    codes = read_present(folder / _CODES)
    if "codes" in codes:
        return _read_codes(folder, codes, hidden)
    if is_present(folder / _JUDGE):
        return _read_judge(folder, hidden, kind)
    settings = _Settings(folder / _SETTINGS)
    template, head = settings.template, _read_pointer(folder, hidden)
    if head is not None:
        pointer, temperature = head
        return DecisionModel(
            pointer,
            "template" if template else "kev",
            template,
            labels=settings.labels,
            temperature=settings.temperature or temperature,
            noul_options=settings.noul_options or ("false", "true"),
            sanitizes=settings.sanitizes,
            adapter=settings.adapter,
        )
    if not template and not is_present(folder / _SETTINGS):
        names = ", ".join(name for name in DECISION_FILES if is_present(folder / name))
        raise ModelError(f"{folder}: {names} without codes in {_CODES}, {_JUDGE} or {_SETTINGS}; get the folder again")
    return DecisionModel(
        None,
        "template" if template else "chat",
        template,
        None if template else generic,
        settings.labels,
        settings.temperature,
        settings.noul_options or ("true", "false"),
        settings.sanitizes,
        settings.adapter,
    )


class _Settings:
    """Settings of a `decision.json`, with transformers' defaults.

    Args:
        file: the file, which may be missing. Unknown settings are ignored, as in transformers.

    Raises:
        ModelError: a setting is malformed.
    """

    def __init__(self, file: Path) -> None:
        fields = read_present(file)
        labels, options = fields.get("labels") or {}, fields.get("noul_options")
        if not isinstance(labels, dict) or not all(isinstance(entry, list) for entry in labels.values()):
            raise ModelError(f"{file}: labels must be lists of texts by kind of question, got {labels!r}")
        self.labels = {kind: _texts(entry, f"{file}: labels.{kind}") for kind, entry in labels.items() if entry}
        own, field = _read_template(file.with_name(_TEMPLATE)), fields.get("chat_template") or ""
        self.template = _checked_template(own or field, str(file.with_name(_TEMPLATE)) if own else f"{file}: chat_template")
        self.temperature = temperatures(fields.get("temperature") or {}, f"{file}: temperature")
        if options is not None and (not isinstance(options, list) or sorted(map(str, options)) != ["false", "true"]):
            raise ModelError(f'{file}: noul_options must order "true" and "false", got {options!r}')
        self.noul_options: tuple[str, str] | None = None if options is None else (options[0], options[1])
        self.sanitizes = fields.get("sanitize_control_tokens", True) is not False
        self.adapter = _adapter(file, "adapter", fields.get("adapter"))


def _read_codes(folder: Path, fields: Mapping[str, Any], hidden: int) -> DecisionModel:
    """Return a model of vLLM's format: a readout with one row for each code."""
    file = folder / _CODES
    if (mode := fields.get("attention_mode", "causal")) != "causal":
        reason = "tokens would see those behind them, so no state could be computed before its questions"
        raise ModelError(f"{file}: attention_mode {mode!r} is not supported, only 'causal': {reason}")
    if (pooling := fields.get("pooling", "last")) != "last":
        raise ModelError(f"{file}: pooling {pooling!r} is not supported, only 'last'")
    if (name := fields.get("prompt", "pplx")) not in DECIDERS:
        raise ModelError(f"{file}: prompt {name!r} is not supported; known are {', '.join(DECIDERS)}")
    codes = _texts(fields["codes"], f"{file}: codes")
    tensors = _read_tensors(folder / _READOUT)
    weight = tensors.get("weight", tensors.get("proj.weight"))
    if weight is None:
        raise ModelError(f"{folder / _READOUT} lacks 'weight'; get the file again")
    rows = weight.shape[0] if weight.ndim else 0
    if rows < len(codes):
        raise ModelError(f"{folder / _READOUT} has {rows} rows for the {len(codes)} codes in {file}; get the files again")
    bias = tensors.get("bias", tensors.get("proj.bias"))
    head = LinearHead(
        checked(weight, (rows, hidden), f"{folder / _READOUT}: 'weight'"),
        None if bias is None else checked(bias, (rows,), f"{folder / _READOUT}: 'bias'"),
        dict.fromkeys(KINDS, 0),
    )
    shared = temperatures(dict.fromkeys(KINDS, fields.get("temperature", 1.0)), f"{file}: temperature")
    return DecisionModel(
        head,
        "text",
        write=decider(name),
        labels=dict.fromkeys(KINDS, codes),
        temperature=shared,
        noul_options=("false", "true"),
    )


def _read_judge(folder: Path, hidden: int, kind: str) -> DecisionModel:
    """Return a model of JEV's format: a head with rows of its own for each kind of question."""
    file, fields = folder / _JUDGE, read_object(folder / _JUDGE)
    slots, cap = fields.get("slots"), fields.get("softcap")
    try:
        names = _texts(slots["verbalizers"], f"{file}: slots.verbalizers")  # type: ignore[index]
        ranges = {str(kind): (int(start), int(end)) for kind, (start, end) in slots["ranges"].items()}  # type: ignore[index]
        count = int(slots["num_slots"])  # type: ignore[index]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ModelError(f"{file}: slots must have num_slots, verbalizers and ranges, got {str(slots)[:200]}") from None
    if {*ranges} != {*KINDS} or not all(0 <= start < end <= min(count, len(names)) for start, end in ranges.values()):
        raise ModelError(f"{file}: slots.ranges must give {', '.join(KINDS)} each a part of {count} slots, got {ranges}")
    if cap is not None and (type(cap) not in (int, float) or not 0 < cap < math.inf):
        raise ModelError(f"{file}: softcap must be a positive number or null, got {cap!r}")
    tensors = _read_tensors(folder / _HEAD)
    if not {"proj.weight", "proj.bias"} <= tensors.keys():
        raise ModelError(f"{folder / _HEAD} lacks 'proj.weight' or 'proj.bias'; get the file again")
    weight = checked(tensors["proj.weight"], (count, hidden), f"{folder / _HEAD}: 'proj.weight'")
    bias = checked(tensors["proj.bias"], (count,), f"{folder / _HEAD}: 'proj.bias'")
    starts = {kind: start for kind, (start, _) in ranges.items()}
    return DecisionModel(
        LinearHead(weight, bias, starts, cap),
        "text",
        write=judge("<bos>" if "gemma" in kind else ""),
        labels={kind: names[start:end] for kind, (start, end) in ranges.items()},
        temperature=temperatures(read_object(folder / _CALIBRATION).get("per_kind"), f"{folder / _CALIBRATION}: per_kind"),
        noul_options=("false", "true"),
        adapter=_adapter(file, "adapter_subfolder", fields.get("adapter_subfolder", "adapter")),
    )


def _adapter(file: Path, key: str, name: Any) -> Path | None:
    """Return the folder of the adapter that a setting names.

    Args:
        file: file of the setting.
        key: name of the setting.
        name: folder beside the file; None for no adapter.

    Raises:
        ModelError: the name is no folder beside the file.
    """
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name or not (folder := file.parent / name).is_dir():
        raise ModelError(f"{file}: {key} {name!r} must name a folder beside the file; get the folder again")
    return folder


def _read_pointer(folder: Path, hidden: int) -> tuple[PointerHead, dict[str, float]] | None:
    """Return the pointer head of a folder and its temperatures; None without one. `head.safetensors` counts first."""
    file = folder / _HEAD
    if is_present(file):
        tensors, facts = _read_tensors(file), _metadata(file)
        tensors = {name.removeprefix("head."): tensor for name, tensor in tensors.items()}
        if not {*tensors} & {*POINTER}:
            found = ", ".join(sorted(tensors)[:4])
            raise ModelError(f"{file}: a head of the tensors {found} is not supported without {_CODES} or {_JUDGE}")
        temperature: Any = facts.get("temperature", 1.0)
    elif is_present(folder / _TORCH):
        file, facts = folder / _TORCH, read_torch(folder / _TORCH)
        if not isinstance(facts, dict) or not isinstance(head := facts.get("head"), dict):
            raise ModelError(f"{file} holds no head; supported is kev's file, with the tensors under 'head'")
        if not all(isinstance(tensor, np.ndarray) for tensor in head.values()):
            raise ModelError(f"{file}: the head must hold tensors alone")
        tensors, temperature = head, facts.get("temperature", 1.0)
    else:
        return None
    if facts.get("option_isolation") not in (None, False, "false", "False"):
        reason = "its options do not see each other, which needs attention of another kind"
        raise ModelError(f"{file}: option_isolation is not supported: {reason}")
    if (calibration := read_present(folder / _CALIBRATION)) and (stored := calibration.get("temperature")) is not None:
        temperature = stored
    try:
        temperature = float(temperature)
    except (TypeError, ValueError):
        raise ModelError(f"{file}: temperature must be a positive number, got {temperature!r}") from None
    return make_pointer(tensors, hidden, str(file)), temperatures(dict.fromkeys(KINDS, temperature), f"{file}: temperature")


def temperatures(values: Any, place: str) -> dict[str, float]:
    """Return temperatures by kind of question.

    Args:
        values: positive numbers by kind.
        place: file and name of the values, for error messages.

    Raises:
        ModelError: a value is no positive number.
    """
    if not isinstance(values, dict):
        raise ModelError(f"{place} must be numbers by kind of question, got {values!r}")
    for kind, value in values.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ModelError(f"{place}: {kind} must be a positive number, got {value!r}")
    return {str(kind): float(value) for kind, value in values.items()}


def _texts(values: Any, place: str) -> list[str]:
    if not isinstance(values, list) or not values or not all(isinstance(value, str) and value for value in values):
        raise ModelError(f"{place} must be a list of texts, got {str(values)[:200]}")
    if len({*values}) != len(values):
        raise ModelError(f"{place} has a text twice; get the file again")
    return values


def _read_template(file: Path) -> str:
    """Return the text of a decision template; an empty one where there is no file.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        return read_small(file) if is_present(file) else ""
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None


def _checked_template(text: Any, place: str) -> str:
    """Return the text of a decision template; an empty one for none.

    Raises:
        ModelError: the text has a fault, or asks all questions in one prompt.
    """
    try:
        names = meta.find_undeclared_variables(_ENVIRONMENT.parse(text)) if text else {"state", "question"}
    except (TypeError, TemplateError, RecursionError) as error:
        raise ModelError(f"{place} cannot be read: {error}") from None
    if "questions" in names:
        raise ModelError(f"{place} writes all questions into one prompt, which is not supported: {_SEES}")
    if not {"state", "question"} <= names:
        raise ModelError(f"{place} must read state and question, and reads {', '.join(sorted(names)) or 'nothing'}")
    return str(text)


def _read_tensors(file: Path) -> dict[str, np.ndarray]:
    if not is_present(file):
        raise ModelError(f"{file} is missing; get the folder again")
    try:
        with safe_open(file, framework="np") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no __iter__
    except (SafetensorError, OSError, TypeError) as error:
        raise ModelError(f"{file}: not a readable safetensors file ({cause_of(file, error)}); get it again") from error


def _metadata(file: Path) -> dict[str, str]:
    with safe_open(file, framework="np") as opened:
        return dict(opened.metadata() or {})
