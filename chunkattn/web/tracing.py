"""Spans of requests through OpenTelemetry's API, and the exporter that the environment asks for."""

from __future__ import annotations

import importlib
import logging
import os
import time
from typing import Any

from starlette.datastructures import Headers

from chunkattn.request_record import RequestSummary
from chunkattn.web.paths import MESSAGES_PATH, RERANK_PATHS, RESPONSES_PATH

try:
    from opentelemetry import propagate, trace
except ImportError:  # then no request has a span
    trace = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
"""Modules of OTLP's exporters by `OTEL_EXPORTER_OTLP_PROTOCOL`."""
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    RESPONSES_PATH: "chat",
    MESSAGES_PATH: "chat",
    "/v1/completions": "text_completion",
    "/v1/score": "score",
    "/score": "score",
    "/generative_scoring": "score",
    **dict.fromkeys(RERANK_PATHS, "rerank"),
    "/v1/decisions": "decide",
    "/v1/systemone": "decide",
}
"""`gen_ai.operation.name` of routes: the conventions' names where they have one."""
_NS = 1_000_000_000


def export_variable() -> str | None:
    """Return the name of the variable that asks for spans, or None."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    return next((name for name in ("OTEL_TRACES_EXPORTER", *_ENDPOINTS) if os.environ.get(name)), None)


def set_up_tracing(service: str) -> None:
    """Export spans if the environment asks for it, unless the process has a tracer provider already.

    The variables are OpenTelemetry's own. One line of the log says where spans go, or what is missing.

    Args:
        service: name of the service, if `OTEL_SERVICE_NAME` has none.
    """
    if (variable := export_variable()) is None:
        return
    if trace is not None and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        logger.info("spans go to the tracer provider that this process has")
        return
    kinds = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    os.environ.setdefault("OTEL_SERVICE_NAME", service)
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider()
        for kind in kinds.split(","):
            provider.add_span_processor(BatchSpanProcessor(_exporter(kind.strip())))
        trace.set_tracer_provider(provider)
    except (ImportError, ValueError) as error:
        text = 'no spans: %s is set, but %s; pip install "chunkattn[otel]" brings the SDK and OTLP over HTTP'
        logger.warning(text, variable, error)
        return
    logger.info("spans are exported as %s (%s)", kinds, next((n for n in _ENDPOINTS if os.environ.get(n)), "default endpoint"))


def _exporter(kind: str) -> Any:
    """Return the exporter of a name in `OTEL_TRACES_EXPORTER`.

    Raises:
        ImportError: its package is not installed.
        ValueError: the name or the protocol is unknown.
    """
    if kind == "console":
        return importlib.import_module("opentelemetry.sdk.trace.export").ConsoleSpanExporter()
    if kind != "otlp":
        raise ValueError(f"OTEL_TRACES_EXPORTER {kind!r} is neither otlp nor console")
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((value for name in variables if (value := os.environ.get(name))), "http/protobuf")
    if protocol not in _EXPORTERS:
        raise ValueError(f"the OTLP protocol {protocol!r} is neither {' nor '.join(_EXPORTERS)}")
    return importlib.import_module(_EXPORTERS[protocol]).OTLPSpanExporter()


class RequestSpan:
    """Span of one request, with a child for each part of its time. It costs little if nothing records spans.

    Args:
        headers: headers of the request, of which `traceparent` and `tracestate` name the caller's span.
        method: method of the request.
    """

    def __init__(self, headers: Headers, method: str) -> None:
        self._span: Any = None
        if trace is None:
            return
        self._began, self._tracer = time.time_ns(), trace.get_tracer("chunkattn")
        here = trace.get_current_span().is_recording()  # an instrumentation around this one has made a server's span
        context = None if here else propagate.extract(headers)
        kind = trace.SpanKind.INTERNAL if here else trace.SpanKind.SERVER
        span = self._tracer.start_span(method, context, kind, start_time=self._began)
        if span.is_recording():
            self._span = span

    def outgoing(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that name this span to a replica; none if the span is not recorded."""
        if self._span is None:
            return []
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span))
        return [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in carrier.items()]

    def end(self, fields: dict[str, Any], summary: RequestSummary | None, model: str | None) -> None:
        """End the span.

        Args:
            fields: fields of the request's line in the log.
            summary: summary of the request; None for one that the engine has no part in.
            model: name of the model; None if it is unknown.
        """
        if (span := self._span) is None:
            return
        route, status, seconds = fields["route"], fields["status"], fields["seconds"]
        span.update_name(f"{fields['method']} {route}")
        attributes = {
            "http.request.method": fields["method"],
            "http.route": route,
            "url.path": fields["path"],
            "http.response.status_code": status,
            "gen_ai.request.id": fields["id"],
            "gen_ai.request.model": model,
            "gen_ai.operation.name": _OPERATIONS.get(route) if summary or "replica" in fields else None,
            "chunkattn.key": fields.get("key"),
            "chunkattn.replica": fields.get("replica"),
            "chunkattn.slow": fields.get("slow"),
        }
        if summary is not None:
            attributes |= self._of_engine(summary, seconds)
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if status >= 500:
            span.set_status(trace.StatusCode.ERROR)
            span.set_attribute("error.type", str(status))
        span.end(self._began + int(seconds * _NS))

    def _of_engine(self, summary: RequestSummary, seconds: float) -> dict[str, Any]:
        """Make the spans of the parts, and return the attributes of the whole."""
        last = summary.last_s if summary.answered else seconds
        first = last if summary.first_token_s is None else summary.first_token_s
        times = {"prepare": (0.0, summary.prepare_s)}
        if summary.answered:
            admitted = summary.prepare_s + summary.queue_s
            times |= {"queue": (summary.prepare_s, admitted), "prompt": (admitted, first), "generate": (first, last)}
        context = trace.set_span_in_context(self._span)
        for name, (began, ended) in times.items():
            if ended > began:
                child = self._tracer.start_span(name, context, start_time=self._began + int(began * _NS))
                child.end(self._began + int(ended * _NS))
        attributes: dict[str, Any] = {
            "gen_ai.usage.input_tokens": summary.prompt_tokens,
            "gen_ai.usage.prompt_tokens": summary.prompt_tokens,
            "gen_ai.latency.e2e": seconds,
            "chunkattn.compile_s": summary.compile_s,
            "chunkattn.document_tokens": summary.document_tokens,
        }
        if summary.answered:
            attributes |= {
                "gen_ai.usage.output_tokens": summary.completion_tokens,
                "gen_ai.usage.completion_tokens": summary.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": summary.cached_tokens,
                "gen_ai.latency.time_in_queue": summary.queue_s,
                "gen_ai.latency.time_to_first_token": summary.first_token_s,
                "gen_ai.latency.time_in_model_prefill": max(first - summary.prepare_s - summary.queue_s, 0.0),
                "gen_ai.latency.time_in_model_decode": None if summary.first_token_s is None else last - first,
                "chunkattn.computed_tokens": summary.computed_tokens,
                "chunkattn.cached_document_tokens": summary.cached_document_tokens,
            }
        return attributes
