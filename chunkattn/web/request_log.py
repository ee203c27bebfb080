"""The line that the log has for each request, and the headers that tell the client the same."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from chunkattn.request_record import RequestRecord, RequestSummary

TOKENS_HEADER = "X-Chunkattn-Tokens"
TIMING_HEADER = "Server-Timing"
_TOKENS = ("prompt_tokens", "cached_tokens", "computed_tokens", "document_tokens", "cached_document_tokens")
_TIMES = ("prepare_s", "queue_s", "compile_s", "first_token_s")
_UNKNOWN_AT_FIRST = (
    "cached_tokens",
    "computed_tokens",
    "cached_document_tokens",
    "queue_s",
    "completion_tokens",
    "preemptions",
)
"""Values that nobody knows before the engine's first output."""


def fields_of(record: RequestRecord, summary: RequestSummary | None, seconds: float, slow_s: float) -> dict[str, Any]:
    """Return the fields of the log line about the engine or the replica, in the order of the line.

    Args:
        record: record of the request.
        summary: summary of the record; None for a request that the engine has no part in.
        seconds: seconds of the whole request.
        slow_s: seconds from which a request is slow; 0 for none.
    """
    fields: dict[str, Any] = record.route | {"prepare_s": record.upload_s} if record.route else {}
    if summary is not None:
        fields |= {name: value for name, value in asdict(summary).items() if value is not None}
        del fields["last_s"], fields["answered"]
        if not summary.answered:
            fields = {name: value for name, value in fields.items() if name not in _UNKNOWN_AT_FIRST}
    if slow_s and seconds >= slow_s:
        fields["slow"] = _slowest(record, seconds) if summary is None else summary.slowest(seconds)
    return fields


def _slowest(record: RequestRecord, seconds: float) -> str:
    """Return the part of a request without an engine that took the most time, one of `PARTS`."""
    parts = {"prepare": record.upload_s, "wait": record.route.get("wait_s", 0.0)}
    parts["replica" if "tries" in record.route else "answer"] = seconds - sum(parts.values())
    return max(parts, key=parts.__getitem__)


def text_of(fields: dict[str, Any]) -> str:
    """Return fields as `name=value`, in one line."""
    return " ".join(f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}" for name, value in fields.items())


def timing_header(summary: RequestSummary, seconds: float) -> str:
    """Return the value of `Server-Timing` (W3C), durations in milliseconds.

    Args:
        summary: summary of the request so far.
        seconds: seconds of the request so far.
    """
    times = {name.removesuffix("_s").replace("_", "-"): getattr(summary, name) for name in _TIMES} | {"total": seconds}
    return ", ".join(f"{name};dur={value * 1000:.1f}" for name, value in times.items() if value is not None)


def tokens_header(summary: RequestSummary) -> str:
    """Return the value of `X-Chunkattn-Tokens`.

    Args:
        summary: summary of the request so far.
    """
    return ", ".join(f"{name.removesuffix('_tokens').replace('_', '-')}={getattr(summary, name)}" for name in _TOKENS)
