"""Reports, lists of models and metrics that replicas answer with."""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec

from chunkattn.gateway.replicas import ReplicaGoneError, Report

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_report(body: bytes) -> tuple[Report, int]:
    """Return the report that `/v1/cache/report` answers with, and its version.

    Args:
        body: body of the answer.

    Raises:
        ReplicaGoneError: it is malformed.
    """
    try:
        fields = msgspec.json.decode(body)
        held = {int(key): int(size) for key, size in fields.get("held") or ()}
        capacity = None if fields.get("capacity") is None else int(fields["capacity"])
        ready, responsive = bool(fields["ready"]), bool(fields.get("responsive", True))
        adapters = tuple(map(str, fields.get("adapters") or ()))
        method = fields.get("decide_method") and str(fields["decide_method"])
        report = Report(str(fields["generation"]), ready, capacity, held, responsive, adapters, method)
        return report, int(fields.get("version", 0))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReplicaGoneError(f"its report cannot be read: {type(error).__name__}") from None


def read_models(body: bytes) -> tuple[tuple[str, ...], str | None]:
    """Return the names of the adapters in a list of models, those with a `parent`, and the method of decisions by default.

    Args:
        body: body of the answer of `/v1/models`; a malformed one has no names.
    """
    with suppress(msgspec.DecodeError, TypeError, AttributeError, KeyError):
        models = msgspec.json.decode(body)["data"]
        methods = [str(model["decide_method"]) for model in models if model.get("decide_method")]
        return tuple(str(model["id"]) for model in models if model.get("parent")), next(iter(methods), None)
    return (), None


def read_metrics(text: str) -> tuple[str, int | None]:
    """Return the start time of a process and the tokens of its KV cache, from the metrics of chunkattn or vLLM.

    Args:
        text: metrics in Prometheus' text format.
    """
    started, pages, block_size, capacity = "", 0.0, None, None
    for name, labels, value in _SAMPLE.findall(text):
        if name == "process_start_time_seconds":
            started = value
        elif name == "chunkattn_pages":
            pages += float(value)
        elif name == "chunkattn_block_size":
            block_size = float(value)
        elif name == "vllm:cache_config_info":
            values = dict(_LABEL.findall(labels))
            with suppress(KeyError, ValueError):
                capacity = int(values["num_gpu_blocks"]) * int(values["block_size"])
    if block_size is not None and pages:
        capacity = int(pages * block_size)
    return started, capacity
