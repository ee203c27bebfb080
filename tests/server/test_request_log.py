"""The log line of a request, its headers and its span, over engines that compute nothing."""

import asyncio
import hashlib
import json
import logging
from dataclasses import replace
from itertools import pairwise

import httpx
import pytest

from chunkattn.engine.compile_clock import CompileClock
from chunkattn.engine.messages import (
    CachedTokens,
    GenerateRequest,
    PrecomputeRequest,
    PrecomputeResult,
    RequestFailed,
    ScoreRequest,
    ScoreResult,
    StepRates,
    TokenOutput,
)
from chunkattn.gateway import app as gateway
from chunkattn.logs import JsonFormatter
from chunkattn.remote import messages as wire
from chunkattn.request_record import PARTS, CallRecord, RequestRecord, RequestStats, RequestSummary
from chunkattn.server.app import create_app
from chunkattn.server.routes import scoring
from chunkattn.web import tracing
from chunkattn.web.options import ServerConfig
from chunkattn.web.paths import RERANK_PATHS
from chunkattn.web.request_log import fields_of

pytest_plugins = ["tests.told_engine"]

COMPLETION, CHAT, SCORE, RERANK, CACHE = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/score",
    "/v1/rerank",
    "/v1/cache/documents",
)
PROMPT = {"chunks": {"prefix": "Read.", "documents": ["Ana lives in Oslo.", "Bo."], "question": "Where?"}, "max_tokens": 2}
STATS = RequestStats(queue_s=0.25, first_token_s=2.0, compile_s=1.5, preemptions=1, cached_tokens=4, cached_chunk_tokens=3)
SCORED = replace(STATS, first_token_s=None, cached_tokens=0, cached_chunk_tokens=0)
ASKED = {"type": "predicate", "instructions": "Is it Ana?"}
BODIES = {
    COMPLETION: PROMPT,
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    SCORE: {"query": "Find.", "items": ["Ana.", "Bo."], "labels": ["yes", "no"]},
    "/generative_scoring": {"query": "Find.", "items": ["Cy.", "Di."], "label_token_ids": [5, 6]},
    RERANK: {"query": "Where?", "documents": ["Ana lives.", "Bo."]},
    "/v1/decisions": {"input": "Ana lives.", "questions": [ASKED]},
    "/v1/systemone": {"state": "Ana works.", "questions": {"a": {"type": "noul", "instructions": "Is it Ana?"}}},
    CACHE: {"prefix": "Read.", "documents": ["Ana lives in Oslo."]},
}


class Telling:
    """An engine that answers at once with the same stats, fails, or never answers."""

    def __init__(self, client, kind):
        self.client, self.kind, self.sent = client, kind, []

    def send(self, messages):
        self.sent += messages
        for message in messages:
            if self.kind != "silent" and isinstance(message, (GenerateRequest, ScoreRequest, PrecomputeRequest)):
                for output in self._outputs(message):
                    asyncio.get_running_loop().call_soon(self.client._take, output)

    def _outputs(self, message):
        name, layout = message.request_id, message.layout
        cached = CachedTokens(1, (0,) * layout.num_chunks, 0)
        if self.kind == "failing":
            return [RequestFailed(name, "it is broken", stats=STATS)]
        if isinstance(message, PrecomputeRequest):
            return [PrecomputeResult(name, cached, STATS)]
        if isinstance(message, ScoreRequest):
            width = max(map(len, message.label_token_ids))
            return [ScoreResult(name, logprobs(len(message.rows), width), StepRates(0, 0, 0), len(layout), SCORED)]
        ends = [None, "length"]
        return [TokenOutput(name, 0, (7,), None, end, None, cached, STATS if end is None else None) for end in ends]


def logprobs(rows, width):
    import numpy as np

    return np.full((rows, width), -1.0, np.float32)


@pytest.fixture
def exchange(llm, caplog):
    """A POST, and the answer with the fields of its log line and the line."""
    caplog.set_level("INFO", "chunkattn.server.access")

    def call(path, body, kind="telling", headers=None, leave_after=None, beat=None, **options):
        llm.client._worker = Telling(llm.client, kind)
        llm.frontend.scores.forget_cached()  # another test may have asked the same

        async def once():
            transport = httpx.ASGITransport(create_app(llm, ServerConfig(**options)))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                if beat is not None:
                    llm.client._beat = beat
                return await client.post(path, json=body, headers=headers or {})

        answer = asyncio.run(once())
        line = [record for record in caplog.records if record.name == "chunkattn.server.access"][-1]
        return answer, line.request, line.getMessage()

    return call


@pytest.mark.parametrize("path", BODIES)
def test_every_route_of_the_engine_has_one_line_with_tokens_and_times(exchange, caplog, path):
    answer, fields, text = exchange(path, BODIES[path], headers={"X-Request-Id": "mine"})
    assert answer.status_code == 200, answer.text
    assert len([record for record in caplog.records if record.name == "chunkattn.server.access"]) == 1
    assert (fields["id"], fields["route"], fields["status"], fields["method"]) == ("mine", path, 200, "POST")
    usage = answer.json().get("usage", {})
    assert fields["prompt_tokens"] > 0
    if path in (COMPLETION, CHAT, CACHE):
        assert fields["prompt_tokens"] == fields["cached_tokens"] + fields["computed_tokens"]
    elif "computed_tokens" in usage:
        assert fields["computed_tokens"] == usage["computed_tokens"]
    assert (fields["queue_s"] / 0.25, fields["compile_s"] / 1.5) in ((1.0, 1.0), (2.0, 2.0))  # in one stage or two
    assert fields["prepare_s"] >= 0
    assert usage.get("prompt_tokens", usage.get("input_tokens", fields["prompt_tokens"])) == fields["prompt_tokens"]
    assert text.startswith(f"POST {path} 200 in ")
    for name in ("prompt_tokens", "cached_tokens", "computed_tokens", "document_tokens", "queue_s", "compile_s"):
        assert f" {name}=" in text
    assert "slow" not in fields


def test_a_completion_has_its_documents_and_its_first_token(exchange):
    _, fields, _ = exchange(COMPLETION, PROMPT)
    assert (fields["cached_tokens"], fields["cached_document_tokens"]) == (4, 3)
    assert (fields["completion_tokens"], fields["preemptions"], fields["engine_requests"]) == (2, 1, 1)
    assert fields["first_token_s"] == pytest.approx(fields["prepare_s"] + 2.0)


def test_prompts_of_one_request_add_up(exchange):
    _, one, _ = exchange(COMPLETION, {"prompt": "Ana lives.", "max_tokens": 2})
    _, three, _ = exchange(COMPLETION, {"prompt": ["Ana lives."] * 3, "max_tokens": 2})
    assert [three[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "engine_requests")] == [
        3 * one[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "engine_requests")
    ]
    assert three["queue_s"] == one["queue_s"]  # the longest


def test_the_line_of_a_stream_comes_at_its_end(exchange):
    answer, fields, _ = exchange(COMPLETION, PROMPT | {"stream": True}, timing_headers=True)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert fields["completion_tokens"] == 2
    assert "first-token;dur=" in answer.headers["server-timing"]


def test_failures_have_a_line(exchange):
    _, fields, _ = exchange(COMPLETION, PROMPT, kind="failing")
    assert (fields["status"], fields["queue_s"], fields["cached_tokens"]) == (500, 0.25, 4)
    _, fields, _ = exchange(COMPLETION, {"prompt": "x" * 100_000})
    assert fields["status"] == 400
    assert "prompt_tokens" not in fields


def test_a_request_that_the_engine_has_not_answered_tells_what_the_engine_did(exchange):
    beat = wire.Heartbeat(30.0, "compiling")
    answer, fields, _ = exchange(COMPLETION, PROMPT, kind="silent", beat=beat, request_timeout_s=0.6, slow_request_s=0.01)
    assert answer.status_code == 504
    assert 0 < fields["compile_s"] < 2.0  # what it has waited, not the whole compilation
    assert fields["slow"] == "compile"
    assert "queue_s" not in fields
    assert "cached_tokens" not in fields


def test_headers_tell_the_same_by_option(exchange):
    answer, fields, _ = exchange(COMPLETION, PROMPT, timing_headers=True)
    tokens = {
        name: int(value) for name, value in (part.split("=") for part in answer.headers["x-chunkattn-tokens"].split(", "))
    }
    assert tokens == {
        "prompt": fields["prompt_tokens"],
        "cached": 4,
        "computed": fields["prompt_tokens"] - 4,
        "document": fields["document_tokens"],
        "cached-document": 3,
    }
    times = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert list(times) == ["prepare", "queue", "compile", "first-token", "total"]
    assert (times["queue"], times["compile"]) == ("250.0", "1500.0")
    answer, _, _ = exchange(COMPLETION, PROMPT)
    assert "server-timing" not in answer.headers
    assert "x-chunkattn-tokens" not in answer.headers


def test_the_line_names_the_key(exchange, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("team-a:secret\n")
    headers = {"Authorization": "Bearer secret"}
    _, fields, text = exchange(COMPLETION, PROMPT, headers=headers, api_key_file=str(keys))
    assert fields["key"] == "team-a"
    assert " key=team-a " in text
    assert "secret" not in text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("keys", ["", "team-a:secret\n"])
def test_the_line_has_a_digest_of_the_salt(exchange, tmp_path, path, keys):
    given = {}
    if keys:
        (tmp_path / "keys").write_text(keys)
        given = {"headers": {"Authorization": "Bearer secret"}, "api_key_file": str(tmp_path / "keys")}
    _, fields, text = exchange(path, BODIES[path] | {"cache_salt": "team-b"}, **given)
    assert fields["salt"] == hashlib.sha256(b"team-b").hexdigest()[:8]
    assert f" salt={fields['salt']} " in text
    assert "team-b" not in text
    _, fields, _ = exchange(path, BODIES[path], **given)
    assert "salt" not in fields


def test_a_line_of_json_has_the_fields(exchange, caplog):
    _, fields, _ = exchange(COMPLETION, PROMPT)
    record = [record for record in caplog.records if record.name == "chunkattn.server.access"][-1]
    assert json.loads(JsonFormatter().format(record))["request"] == fields


def summary(**given):
    values = dict.fromkeys(RequestSummary.__annotations__, 0) | {"answered": True, "first_token_s": None}
    return RequestSummary(**(values | given))


@pytest.mark.parametrize(
    ("given", "seconds", "part"),
    [
        ({"prepare_s": 3.0, "last_s": 4.0}, 4.0, "prepare"),
        ({"queue_s": 3.0, "last_s": 4.0}, 4.0, "queue"),
        ({"queue_s": 3.0, "compile_s": 2.0, "last_s": 4.0}, 4.0, "compile"),
        ({"first_token_s": 3.0, "last_s": 4.0}, 4.0, "prompt"),
        ({"first_token_s": 1.0, "last_s": 4.0}, 4.0, "generate"),
        ({"last_s": 1.0}, 4.0, "answer"),
        ({"answered": False}, 4.0, "engine"),
        ({"answered": False, "compile_s": 3.0}, 4.0, "compile"),
        ({"answered": False, "prepare_s": 3.0}, 4.0, "prepare"),
    ],
)
def test_the_slowest_part(given, seconds, part):
    assert summary(**given).slowest(seconds) == part
    assert part in PARTS


@pytest.mark.parametrize(
    ("upload_s", "route", "part"),
    [
        (0.1, {}, "answer"),
        (3.0, {}, "prepare"),
        (3.0, {"wait_s": 0.5, "tries": 1}, "prepare"),
        (0.1, {"wait_s": 3.0, "tries": 1}, "wait"),
        (0.1, {"wait_s": 3.0}, "wait"),
        (0.1, {"wait_s": 1.0, "tries": 2}, "replica"),
    ],
)
def test_the_slowest_part_without_an_engine(upload_s, route, part):
    record = RequestRecord(0.0)
    record.upload_s, record.route = upload_s, route
    fields = fields_of(record, None, 4.0, 1.0)
    assert fields["slow"] == part
    assert part in PARTS
    assert fields.get("prepare_s") == (upload_s if route else None)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "cut"])
def test_a_slow_upload_is_the_slowest_part(llm, caplog, whole):
    async def parts():
        yield b'{"prompt": '
        await asyncio.sleep(0.2)
        yield b"7" if whole else b""
        if not whole:
            await asyncio.sleep(1000)

    async def once():
        config = ServerConfig(slow_request_s=0.01, request_timeout_s=0.3)
        transport = httpx.ASGITransport(create_app(llm, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.post(COMPLETION, content=parts(), headers={"Content-Type": "application/json"})

    caplog.set_level("INFO", "chunkattn.server.access")
    asyncio.run(once())
    line = [record for record in caplog.records if record.name == "chunkattn.server.access"][-1]
    assert line.request["slow"] == "prepare"


def test_stages_add_up_and_requests_of_one_stage_wait_together():
    call = CallRecord()
    for waits in ((1.0, 2.0), (3.0,)):
        call.begin(0.0)
        for number, wait in enumerate(waits):
            call.add(str(number), 10, 4)
            call.take(str(number), RequestStats(wait, None, 0.5, 0, 2, 1))
    seen = call.so_far()
    assert (seen.queue_s, seen.compile_s) == (5.0, 1.0)
    assert (seen.prompt_tokens, seen.cached_tokens, seen.computed_tokens, seen.chunk_tokens) == (30, 6, 24, 12)
    assert RequestRecord(0.0).summary() is None


def test_the_clock_of_compilations_counts_what_overlaps(monkeypatch):
    clock, now = CompileClock(), [0.0]
    monkeypatch.setattr("chunkattn.engine.compile_clock.time.perf_counter", lambda: now[0])
    for began, ended in ((1.0, 2.0), (5.0, 8.0)):
        now[0] = began
        with clock.compiling():
            clock.enter()  # within the other
            now[0] = ended
            clock.leave()
    assert [clock.seconds(since) for since in (0.0, 1.5, 6.0, 9.0)] == [4.0, 3.5, 2.0, 0.0]
    assert clock.count == 2
    clock.enter()  # an exception ends it
    clock.settle()
    now[0] = 10.0
    with clock.compiling():
        now[0] = 11.0
    assert clock.seconds(9.0) == 1.0


# Spans


class Span:
    def __init__(self, name, context, kind, start_time=None):
        self.name, self.context, self.kind, self.began, self.attributes, self.status = name, context, kind, start_time, {}, None
        self.ended = None

    def is_recording(self):
        return True

    def get_span_context(self):
        from opentelemetry.trace import SpanContext, TraceFlags

        return SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1))

    def update_name(self, name):
        self.name = name

    def set_attributes(self, attributes):
        self.attributes |= attributes

    def set_attribute(self, name, value):
        self.attributes[name] = value

    def set_status(self, status):
        self.status = status

    def end(self, time):
        self.ended = time


@pytest.fixture
def spans(monkeypatch):
    made = []

    class Tracer:
        def start_span(self, name, context=None, kind=None, start_time=None):
            made.append(Span(name, context, kind, start_time))
            return made[-1]

    monkeypatch.setattr(tracing.trace, "get_tracer", lambda name: Tracer())
    return made


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_request_has_a_span_with_its_parts(exchange, spans):
    from opentelemetry import trace

    _, fields, _ = exchange(COMPLETION, PROMPT, headers={"traceparent": TRACEPARENT})
    whole, *parts = spans
    assert trace.get_current_span(whole.context).get_span_context().trace_id == int(TRACEPARENT.split("-")[1], 16)
    assert whole.name == f"POST {COMPLETION}"
    assert whole.kind is trace.SpanKind.SERVER
    told = whole.attributes
    assert told["http.response.status_code"] == 200
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.request.id"] == fields["id"]
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (fields["prompt_tokens"], 2)
    assert (told["gen_ai.usage.cache_read.input_tokens"], told["gen_ai.latency.time_in_queue"]) == (4, 0.25)
    assert [part.name for part in parts] == ["prepare", "queue", "prompt"]
    for before, part in pairwise(parts):
        assert before.ended == part.began


def test_every_path_of_the_engine_has_an_operation_and_a_label_at_the_gateway():
    paths = {route.path for route in scoring.router.routes if route.name == "rerank"}
    assert paths == {*RERANK_PATHS}
    assert {tracing._OPERATIONS.get(path) for path in paths} == {"rerank"}
    assert tracing._OPERATIONS.keys() <= {*gateway._KNOWN}


def test_a_failed_request_has_a_failed_span(exchange, spans):
    exchange(COMPLETION, PROMPT, kind="failing")
    assert spans[0].attributes["error.type"] == "500"
    assert spans[0].status is not None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, None),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, None),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, "no spans: OTEL_EXPORTER_OTLP_ENDPOINT is set, but"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "no spans: OTEL_TRACES_EXPORTER is set, but"),
    ],
)
def test_without_the_sdk_one_line_says_what_is_missing(monkeypatch, caplog, environment, said):
    import sys

    for name in ("OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", *tracing._ENDPOINTS, "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    tracing.set_up_tracing("chunkattn")
    assert [record.levelno for record in caplog.records] == ([] if said is None else [logging.WARNING])
    assert said is None or caplog.records[0].getMessage().startswith(said)
