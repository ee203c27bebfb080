"""`chunkattn bench serve`: its schedule, its clock on virtual time, its figures, and what it sends and understands."""

import asyncio
import json
import math
import random
import re
import statistics
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, islice, pairwise, repeat

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.random_model import name_all_ids
from chunkattn.cli import app
from chunkattn.models.loader import load_tokenizer
from chunkattn.schema.generation import ChatBody, CompletionBody
from chunkattn.schema.scoring import GenerativeScoringBody, RerankBody, ScoreBody
from chunkattn.tools.load.answers import Sender
from chunkattn.tools.load.client import Client
from chunkattn.tools.load.open_loop import OK, LoadRun, Record, poisson, run
from chunkattn.tools.load.summary import Objective, Spread, summarize
from chunkattn.tools.load.workloads import WORDS, Source, Texts, WireForm, Workload
from tests.virtual_time import VirtualLoop, run_virtually

# The schedule


def test_arrivals_are_a_poisson_process():
    rate, seconds = 50.0, 400.0
    times = poisson(rate, seconds, seed=3)
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < seconds
    number = len(times)
    assert abs(number - rate * seconds) < 4 * math.sqrt(rate * seconds)
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert abs(statistics.mean(gaps) * rate - 1) < 4 / math.sqrt(number)
    for beyond in (0.1, 0.5, 1.0, 2.0, 4.0):  # the share of longer gaps is exp(-t), with a binomial's error
        share, expected = sum(gap * rate > beyond for gap in gaps) / number, math.exp(-beyond)
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / number), beyond
    windows = Counter(int(time) for time in times)
    held = [windows[second] for second in range(int(seconds))]
    assert 0.75 < statistics.variance(held) / statistics.mean(held) < 1.25
    mean = statistics.mean(gaps)
    together = sum((a - mean) * (b - mean) for a, b in pairwise(gaps)) / sum((gap - mean) ** 2 for gap in gaps)
    assert abs(together) < 4 / math.sqrt(number)


def test_arrivals_of_a_seed_are_the_same_at_every_rate():
    slow, fast = poisson(2.0, 60.0, seed=1), poisson(8.0, 15.0, seed=1)
    assert slow == poisson(2.0, 60.0, seed=1)
    assert slow != poisson(2.0, 60.0, seed=2)
    assert fast == pytest.approx([time / 4 for time in slow])
    assert poisson(2.0, 60.0, seed=1, most=5) == slow[:5]
    assert poisson(1e-9, 1.0, seed=1) == []


# The clock, against servers of known delays


def observe(arrivals, ask, *, max_in_flight=1000, drain_s=60.0):
    """The run of a server that is `ask(loop, record)`, on virtual time."""

    async def work(loop):
        async def call(body, record):
            await ask(loop, record)

        return await run(arrivals, repeat(b""), call, max_in_flight=max_in_flight, drain_s=drain_s, clock=loop.time)

    return run_virtually(work)


def figures(observed, *, streamed=False, objective=None, max_lag_ms=50.0):
    return summarize(observed, "w", 1.0, streamed, objective or Objective(), max_lag_ms)


def test_latency_counts_from_the_scheduled_arrival():
    arrivals = poisson(10.0, 20.0, seed=0)

    async def answer(loop, record):
        await asyncio.sleep(0.25)
        record.status = OK

    observed = observe(arrivals, answer)
    assert [r.due for r in observed.records] == arrivals
    assert [r.sent for r in observed.records] == pytest.approx(arrivals)
    assert [r.ended - r.due for r in observed.records] == pytest.approx([0.25] * len(arrivals))
    found = figures(observed)
    assert found.latency_ms.p50 == pytest.approx(250)
    assert found.latency_ms.p99 == pytest.approx(250)
    assert found.seconds == pytest.approx(arrivals[-1] + 0.25)
    assert found.achieved_rate == pytest.approx(len(arrivals) / found.seconds)
    assert (found.scheduled, found.sent, found.succeeded, found.statuses) == (*[len(arrivals)] * 3, {"200": len(arrivals)})
    assert found.lag_ms.max == pytest.approx(0)
    assert not found.is_overloaded
    assert found.notes == ()


def test_no_request_is_sent_before_its_time():
    class Coarse(VirtualLoop):
        """Counts whole milliseconds, as uvloop does."""

        def time(self):
            return math.floor(1000 * self.now) / 1000

    async def answer(body, record):
        record.status = OK

    async def work(loop):
        return await run(poisson(300.0, 1.0, seed=0), repeat(b""), answer, max_in_flight=9, drain_s=1, clock=lambda: loop.now)

    observed = run_virtually(work, Coarse)
    assert len(observed.records) > 200
    assert all(0 <= r.sent - r.due <= r.ended - r.due for r in observed.records)


def test_a_stall_of_the_server_meets_every_request_that_arrives_meanwhile():
    arrivals = [0.1 * number for number in range(400)]
    service = [0.02] * len(arrivals)
    service[100] = 5.0  # one stall, behind which others queue

    async def work(loop):
        one_by_one, order = asyncio.Lock(), iter(service)

        async def ask(body, record):
            async with one_by_one:
                await asyncio.sleep(next(order))
            record.status = OK

        return await run(arrivals, repeat(b""), ask, max_in_flight=1000, drain_s=60, clock=loop.time)

    observed = run_virtually(work)
    assert [r.sent for r in observed.records] == pytest.approx(arrivals)  # arrivals went on
    expected, free = [], 0.0  # a queue with one server
    for due, needed in zip(arrivals, service):
        free = max(free, due) + needed
        expected.append(free - due)
    assert [r.ended - r.due for r in observed.records] == pytest.approx(expected)
    found = figures(observed)
    assert found.latency_ms.p50 == pytest.approx(20)
    assert found.latency_ms.p99 == pytest.approx(1000 * sorted(expected)[math.ceil(0.99 * 400) - 1])
    assert found.latency_ms.p99 > 4000
    # A client that waits for each answer would have seen one slow request of 400, and a quick 99th percentile.
    assert sorted(service)[math.ceil(0.99 * 400) - 1] == 0.02


def test_a_client_that_falls_behind_says_so():
    arrivals = [0.1 * number for number in range(1, 21)]

    async def answer(loop, record):
        if record.due == arrivals[4]:
            loop.now += 0.45  # the client's own work, during which nothing else runs
        await asyncio.sleep(0.01)
        record.tokens.append(loop.time())
        record.status = OK

    observed = observe(arrivals, answer)
    late = [r.sent - r.due for r in observed.records]
    assert late == pytest.approx([0.0] * 5 + [0.35, 0.25, 0.15, 0.05] + [0.0] * 11, abs=1e-6)
    assert observed.records[5].ended - observed.records[5].due == pytest.approx(0.36)
    found = figures(observed, streamed=True, max_lag_ms=400)
    assert found.latency_ms == found.ttft_ms == Spread(*map(pytest.approx, (10, 260, 460, 460)))  # 15 of 20 have 10 ms
    assert found.lag_ms.max == pytest.approx(350)
    assert 429 < found.loop_lag_ms < 451  # the last sample was at most one interval before
    assert any("fell behind" in note for note in found.notes)
    assert not any("fell behind" in note for note in figures(observed, max_lag_ms=451).notes)


def test_a_full_queue_ends_the_arrivals():
    async def never(loop, record):
        await asyncio.Event().wait()

    observed = observe([float(number) for number in range(100)], never, max_in_flight=7, drain_s=10)
    assert len(observed.records) == 7
    assert observed.ended == pytest.approx(7 + 10)
    found = figures(observed)
    assert (found.scheduled, found.sent, found.succeeded, found.in_flight) == (100, 7, 0, 7)
    assert found.statuses == {"unanswered": 7}
    assert found.is_overloaded
    assert "after 7 of 100 requests" in found.notes[0]
    assert found.latency_ms == Spread(None, None, None, None)


def test_the_wait_for_answers_ends():
    async def answer(loop, record):
        await asyncio.sleep(0.5 if record.due < 95 else math.inf if record.due == 95 else 3.0)
        record.status = OK

    observed = observe([float(number) for number in range(100)], answer, drain_s=2.5)
    found = figures(observed)
    assert observed.ended == pytest.approx(99 + 2.5)
    assert found.statuses == {"200": 98, "unanswered": 2}  # the last one took longer than the wait
    assert found.latency_ms.p50 == pytest.approx(500)
    assert found.latency_ms.p90 == pytest.approx(500)
    assert found.latency_ms.p99 is None
    assert "2 requests had no answer" in found.notes[0]


def test_errors_are_counted_and_have_no_latency():
    kinds = {0: OK, 1: "429", 2: "connection", 3: None}

    async def answer(loop, record):
        kind = kinds[round(record.due) % 4]
        await asyncio.sleep(0.2 if kind == OK else 0.001)
        if kind is None:
            raise KeyError("a defect")
        record.status, record.message = kind, "" if kind == OK else f"about\n{kind}"

    found = figures(observe([float(number) for number in range(40)], answer), objective=Objective(latency_ms=1000))
    assert found.statuses == {"200": 10, "429": 10, "connection": 10, "KeyError": 10}
    assert found.succeeded == 10
    assert found.latency_ms.p50 == pytest.approx(200)
    assert found.goodput == pytest.approx(10 / found.seconds)
    assert "first answer of 429: about 429" in found.notes
    assert "first answer of KeyError: 'a defect'" in found.notes


def test_tokens_of_a_stream():
    async def stream(loop, record):
        for pause in (0.3, 0.01, 0.02, 0.06):
            await asyncio.sleep(pause)
            record.tokens.append(loop.time())
        await asyncio.sleep(0.5)
        record.status, record.prompt_tokens, record.completion_tokens = OK, 100 + int(record.due), 4

    observed = observe([0.0, 1.0], stream)
    found = figures(observed, streamed=True)
    assert found.ttft_ms.p50 == pytest.approx(300)
    assert found.tpot_ms.max == pytest.approx(30)
    assert found.gap_ms == Spread(*map(pytest.approx, (20, 60, 60, 60)))
    assert found.latency_ms.max == pytest.approx(890)
    assert (found.prompt_tokens, found.completion_tokens) == (100.5, 4)


@pytest.mark.parametrize(
    ("objective", "good"),
    [
        ({}, None),
        ({"latency_ms": 300}, 2),
        ({"ttft_ms": 200}, 1),
        ({"ttft_ms": 400, "tpot_ms": 50}, 2),
        ({"latency_ms": 300, "ttft_ms": 200, "tpot_ms": 50}, 0),
    ],
)
def test_goodput_counts_requests_within_the_objective(objective, good):
    def request(first, second, end):
        return Record(0.0, 0.0, end, [first, second], OK, completion_tokens=2)

    records = [request(0.25, 0.28, 0.29), request(0.1, 0.2, 0.2), request(0.35, 0.36, 0.5), Record(0.0, 0.0, 0.01, [], "500")]
    found = figures(LoadRun(4, 0.0, 2.0, records), streamed=True, objective=Objective(**objective))
    assert found.goodput == (None if good is None else good / 2)


def test_an_objective_of_tokens_does_not_judge_scores():
    done = LoadRun(1, 0.0, 1.0, [Record(0.0, 0.0, 0.5, [], OK)])
    assert figures(done, objective=Objective(ttft_ms=1.0)).goodput is None


def test_percentiles_are_those_of_their_definition():
    rng = random.Random(0)
    for number in (*range(1, 12), *range(50, 302, 10), 199, 201, 299, 301):
        values = [rng.expovariate(1.0) for _ in range(number)]
        found = Spread.of(values)
        for percent, name in ((50, "p50"), (90, "p90"), (99, "p99"), (100, "max")):
            # The smallest value that at least `percent` of a hundred values do not exceed, in whole numbers.
            expected = next(v for v in sorted(values) if 100 * sum(w <= v for w in values) >= percent * number)
            assert getattr(found, name) == pytest.approx(1000 * expected), (number, percent)
        lower, upper = np.percentile(values, 99, method="lower"), np.percentile(values, 99, method="higher")
        assert 1000 * lower * (1 - 1e-12) <= found.p99 <= 1000 * upper * (1 + 1e-12) or number < 3
    assert Spread.of([]) is None
    assert Spread.of([1.0] * 98 + [math.inf] * 2).p99 is None
    assert Spread.of([1.0] * 99 + [math.inf]) == Spread(1000, 1000, 1000, None)


# Requests


TOKENS = {word: 1 + len(word) % 3 for word in WORDS.split()}
TEXTS = Texts(TOKENS)
FORM = WireForm("m", "chunks", "rerank", 12, 9, 5, 7, 10, True, (3, 4))


def tokens_of(text):
    return sum(TOKENS[word] for word in text.split())


def bodies(name, number, seed=0, **changes):
    source = Source(Workload.parse(name), WireForm(**{**vars(FORM), **changes}), TEXTS, seed)
    return [json.loads(body) for body in islice(source, number)]


@pytest.mark.parametrize("generation", ["chunks", "prompt", "chat"])
def test_generations_are_bodies_of_the_server(generation):
    found = bodies("rag-4x30", 3, generation=generation)
    for body in found:
        (ChatBody if generation == "chat" else CompletionBody).model_validate(body)
        assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("m", 5, True, True)
    texts = [json.dumps(body) for body in found]
    assert len(set(texts)) == 3
    if generation == "chunks":
        for body in found:
            chunks = body["chunks"]
            assert [*map(tokens_of, (chunks["prefix"], *chunks["documents"], chunks["question"]))] == [12, *[30] * 4, 9]
        assert len({body["chunks"]["prefix"] for body in found}) == 1
        assert len({body["chunks"]["question"] for body in found}) == 3
    elif generation == "prompt":
        assert found[0]["prompt"].count("Document: ") == 4
    assert "ignore_eos" not in bodies("rag-4x30", 1, generation=generation, ignore_eos=False)[0]


@pytest.mark.parametrize(
    ("scoring", "model", "query", "items"),
    [
        ("rerank", RerankBody, "query", "documents"),
        ("score", ScoreBody, "query", "items"),
        ("pairs", ScoreBody, "text_1", "text_2"),
        ("generative_scoring", GenerativeScoringBody, "query", "items"),
    ],
)
def test_scorings_are_bodies_of_the_server(scoring, model, query, items):
    first, second = bodies("rerank-10x300", 2, scoring=scoring)
    model.model_validate(first)
    assert tokens_of(first[query]) == 300
    assert [*map(tokens_of, first[items])] == [7] * 10
    assert first[query] != second[query]
    assert ("label_token_ids" in first) == (scoring in ("score", "generative_scoring"))


def test_documents_come_from_a_pool_that_the_warm_up_covers():
    source = Source(Workload.parse("rag-4x30"), FORM, TEXTS, 0)
    warmed = [json.loads(body)["chunks"]["documents"] for body in source.warm_up()]
    assert [len(documents) for documents in warmed] == [4, 4, 4]
    pool = {document for documents in warmed for document in documents}
    assert len(pool) == 10
    drawn = [json.loads(body)["chunks"]["documents"] for body in islice(source, 50)]
    assert {document for documents in drawn for document in documents} == pool
    assert len({tuple(documents) for documents in drawn}) > 40
    assert all(len(set(documents)) == 4 for documents in drawn)
    fresh = bodies("rag-4x30", 2, document_pool=0)
    assert not set(fresh[0]["chunks"]["documents"]) & set(fresh[1]["chunks"]["documents"])
    assert len([*Source(Workload.parse("rerank-2x9"), FORM, TEXTS, 0).warm_up()]) == 2


def test_texts_depend_on_the_seed_alone():
    assert bodies("rag-4x30", 3, seed=5) == bodies("rag-4x30", 3, seed=5)
    assert bodies("rag-4x30", 3, seed=5) != bodies("rag-4x30", 3, seed=6)


def test_texts_have_the_tokens_of_a_real_tokenizer(demo):
    async def tokens(text):
        return demo.tokenizer(text, add_special_tokens=False).input_ids

    texts, rng = asyncio.run(Texts.measured(tokens)), random.Random(0)
    for wanted in (5, 20, 100, 300):
        found = len(demo.tokenizer(texts.draw(rng, wanted), add_special_tokens=False).input_ids)
        assert abs(found - wanted) <= 2


def test_a_random_model_has_a_text_for_every_id(demo, tmp_path):
    demo.tokenizer.save_pretrained(tmp_path)
    name_all_ids(tmp_path / "tokenizer.json", 2000)
    named = load_tokenizer(str(tmp_path))
    assert len(named) == 2000
    assert all(named.decode([number]) for number in range(len(demo.tokenizer), 2000))
    for text in (WORDS, "Nila lives in Tunise. <id 1999>"):
        assert named(text).input_ids == demo.tokenizer(text).input_ids


# Answers over HTTP


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunked(*pieces):
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b""))


def whole(status, body, *headers):
    lines = (f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


TEXT_A, TEXT_B = event(choices=[{"text": "a"}]), event(choices=[{"delta": {"content": "b"}}])
ROLE = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12})
GOOD = HEAD + chunked(ROLE, b": wait\n\n", TEXT_A, TEXT_B + TEXT_A, USAGE, DONE)


def exchange(*answers, items=None, requests=None, piece=1 << 20):
    """Records of requests to a server that sends bytes as they stand, and the number of its connections.

    An answer of None closes the connection.
    """

    async def work():
        left, connections = iter(answers), count()

        async def serve(reader, writer):
            next(connections)
            while True:
                try:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                except asyncio.IncompleteReadError:
                    break
                await reader.readexactly(int(re.search(r"Content-Length: (\d+)", head)[1]))
                answer = next(left)
                for at in range(0, len(answer or b""), piece):
                    writer.write(answer[at : at + piece])
                    await writer.drain()
                    await asyncio.sleep(0)
                if answer is None or (b"Content-Length" not in answer and not answer.endswith(b"0\r\n\r\n")):
                    break
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "key")
        caller, records = Sender(client, "/x", items), []
        for _ in range(requests or len(answers)):
            records.append(Record(0.0))
            await caller(b"{}", records[-1])
        client.close()
        server.close()
        return records, next(connections)

    return asyncio.run(work())


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_a_stream_in_any_pieces(piece):
    (first, second), connections = exchange(GOOD, GOOD, piece=piece)
    for record in (first, second):
        assert (record.status, record.message) == (OK, "")
        assert len(record.tokens) == 3  # an event without text is no token
        assert record.tokens == sorted(record.tokens)
        assert (record.prompt_tokens, record.completion_tokens) == (9, 3)
    assert connections == 1


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (whole(429, b'{"error": {"message": "full"}}'), "429", "full"),
        (whole(500, b'{\n "error": "pretty"\n}\n'), "500", "pretty"),
        (HEAD + chunked(TEXT_A), "wrong answer", "without [DONE]"),
        (HEAD + chunked(TEXT_A, event(error={"message": "broke"}), DONE), "wrong answer", "broke"),
        (HEAD + chunked(b"data: {no json\n\n", DONE), "wrong answer", "cannot be read"),
        (HEAD + chunked(TEXT_A)[:-5], "connection", "closed"),
        (b"SSH-2.0-server\r\n", "connection", "no HTTP"),
        (None, "connection", "closed"),
    ],
    ids=["429", "500", "cut", "error event", "no json", "lost", "ssh", "closed"],
)
def test_failed_streams_are_told_apart(answer, status, message):
    (record,), _ = exchange(answer)
    assert record.status == status
    assert message in record.message


def test_scores_are_counted():
    good = [
        whole(200, json.dumps({**answer, "usage": {"prompt_tokens": 8}}).encode())
        for answer in ({"scores": [[0.1, 0.9]] * 3}, {"data": [{"score": 1}] * 3}, {"results": [{"index": 0}] * 3})
    ]
    records, _ = exchange(*good, whole(200, b'{"scores": [[1], [2]]}'), whole(200, b"[1, 2, 3]"), items=3)
    assert [r.status for r in records] == [OK, OK, OK, "wrong answer", "wrong answer"]
    assert [r.prompt_tokens for r in records[:3]] == [8, 8, 8]
    assert records[3].message == "2 scores for 3 items"


def test_connections_are_opened_again():
    closing = whole(200, b'{"scores": [1]}', "Connection: close")
    until_the_end = b'HTTP/1.0 200 OK\r\n\r\n{"scores": [1]}'
    records, connections = exchange(closing, until_the_end, closing, items=1)
    assert [(r.status, r.message) for r in records] == [(OK, "")] * 3
    assert connections == 3
    # A connection that the server closes while it is idle is no failed request.
    (first, second), connections = exchange(
        whole(200, b'{"scores": [1]}'), None, whole(200, b'{"scores": [1]}'), items=1, requests=2
    )
    assert (first.status, second.status, connections) == (OK, OK, 2)


def test_an_abandoned_request_closes_its_connection():
    async def work():
        arrived, left = asyncio.Event(), asyncio.Event()

        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n{}")
            writer.write(HEAD + b"%x\r\n%s\r\n" % (len(TEXT_A), TEXT_A))
            arrived.set()
            await reader.read()  # until the client leaves
            left.set()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            caller, record = Sender(Client(f"http://127.0.0.1:{port}"), "/x", None), Record(0.0)
            task = asyncio.create_task(caller(b"{}", record))
            await arrived.wait()
            while not record.tokens:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait_for(left.wait(), 30)
            return record

    record = asyncio.run(work())
    assert (record.status, len(record.tokens)) == ("unanswered", 1)


def test_no_server_is_a_failed_request():
    async def work():
        record = Record(0.0)
        await Sender(Client("http://127.0.0.1:9"), "/x", None)(b"{}", record)
        return record

    assert asyncio.run(work()).status == "connection"


# The command


class Handler(BaseHTTPRequestHandler):
    """A server of words that reranks."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def do_GET(self):
        self.answer(200, {"data": [{"id": "words"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != "Bearer secret":
            self.answer(401, {"error": {"message": "wrong key"}})
        elif self.path == "/base/tokenize":
            self.answer(200, {"tokens": [*range(len(body["prompt"].split()))]})
        else:
            self.server.asked.append((self.path, body))
            is_good = len(self.server.asked) <= self.server.good
            scores = [{"index": i, "relevance_score": 0.5} for i in range(len(body["documents"]))]
            self.answer(200, {"results": scores}) if is_good else self.answer(503, {"error": "gone"})

    def answer(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def fake_server(good=1 << 30):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.asked, server.good = True, [], good
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}/base"
    finally:
        server.shutdown()
        server.server_close()


def invoke(url, *options):
    common = ["--url", url, "--workload", "rerank-3x20", "--seconds", "5", "--requests", "6", "--seed", "1"]
    return CliRunner().invoke(app, ["bench", "serve", *common, *options])


def test_a_sweep(tmp_path):
    with fake_server() as (server, url):
        file = tmp_path / "runs.json"
        result = invoke(
            f"{url}/v1/", "--api-key", "secret", "--rates", "200,400", "--slo-latency-ms", "60000", "--json", str(file)
        )
    assert result.exit_code == 0, result.output
    assert len(server.asked) == 2 + (1 + 6) * 2  # warm-up, and one more before each rate
    assert {path for path, _ in server.asked} == {"/base/v1/rerank"}
    assert all(body["model"] == "words" and len(body["query"].split()) == 20 for _, body in server.asked)
    assert len({body["query"] for _, body in server.asked}) == len(server.asked)
    report = json.loads(file.read_text())
    assert [(r["workload"], r["rate"], r["succeeded"]) for r in report["runs"]] == [
        ("rerank-3x20", 200, 6),
        ("rerank-3x20", 400, 6),
    ]
    for made in report["runs"]:
        assert made["goodput"] == made["achieved_rate"]
        assert made["ttft_ms"] is None
        assert 0 < made["latency_ms"]["p50"] <= made["latency_ms"]["p90"] <= made["latency_ms"]["p99"]
    assert report["plan"]["seed"] == 1
    assert report["error"] is None
    assert "secret" not in file.read_text()
    for text in ("rerank-3x20: ", "6 x 200", "model: words", "rerank-3x20 at 400/s: 6 of 6"):
        assert text in result.output


def test_a_sweep_that_ends_early_reports_what_it_has(tmp_path):
    with fake_server(good=2 + 1 + 6) as (_, url):
        file = tmp_path / "runs.json"
        result = invoke(url, "--api-key", "secret", "--rates", "200,400", "--json", str(file))
    assert result.exit_code == 2
    assert 'error: rerank-3x20: a request alone failed, 503: {"error": "gone"}' in result.stderr
    report = json.loads(file.read_text())
    assert [made["rate"] for made in report["runs"]] == [200]
    assert "503" in report["error"]


def test_json_alone_and_progress_on_stderr():
    with fake_server() as (_, url):
        result = invoke(url, "--api-key", "secret", "--rates", "300", "--json", "-")
    assert [made["sent"] for made in json.loads(result.stdout)["runs"]] == [6]
    assert "rerank-3x20 at 300/s: 6 requests" in result.stderr


def test_a_wrong_key_is_told():
    with fake_server() as (_, url):
        result = invoke(url)
    assert result.exit_code == 2
    assert "POST /tokenize answered 401" in result.stderr
    assert "wrong key" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rates", "1,x"], "--rates must be numbers above 0"),
        (["--rates", "0"], "--rates must be numbers above 0"),
        (["--rates", "inf"], "--rates must be numbers above 0"),
        (["--rates", ""], "--rates must be numbers above 0"),
        (["--seconds", "0"], "--seconds must be a finite number above 0"),
        (["--drain-s", "nan"], "--drain-s must be a finite number above 0"),
        (["--slo-ttft-ms", "-1"], "--slo-ttft-ms must be a finite number above 0"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--max-in-flight", "0"], "--max-in-flight must be at least 1"),
        (["--output-tokens", "0"], "--output-tokens must be at least 1"),
        (["--workload", "rag"], "unknown workload 'rag'; give rag-DOCUMENTSxTOKENS"),
        (["--workload", "rerank-0x9"], "unknown workload"),
        (["--workload", "rag-9x9", "--document-pool", "8"], "at least the 9 of a request"),
        (["--document-pool", "-1"], "--document-pool must be 0"),
        (["--generation", "text"], "choose one of chunks, prompt, chat"),
        (["--scoring", "tei"], "choose one of rerank, score, pairs, generative_scoring"),
        (["--geometry", "large"], "choose one of qwen3-0.6b, qwen3-30b-a3b, qwen3.5-0.8b, small"),
        (["--geometry", "small", "--model", "x"], "not both"),
        (["--api-key", "k"], "--api-key belongs to the server at --url"),
        (["--server-option", "demo"], "--server-option takes one option"),
        (["--url", "http://localhost", "--server-option=--no-warmup"], "leave out --url"),
        (["--url", "localhost:8000"], "--url must be like http://localhost:8000"),
        (["--url", "http://me:secret@localhost"], "--url takes no credentials"),
        (["--url", "http://localhost:99999"], "is no URL"),
        (["--url", "http://localhost", "--api-key", "a\nb"], "--api-key must be printable ASCII"),
        (["--url", "http://127.0.0.1:9"], "GET /v1/models failed"),
        (["--json", "no/such/folder.json"], "is not a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options(options, message):
    result = CliRunner().invoke(app, ["bench", "serve", *options])
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_a_queue_beyond_the_limit_on_open_files(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 1024))
    result = CliRunner().invoke(app, ["bench", "serve", "--url", "http://localhost"])
    assert result.exit_code == 2
    assert "--max-in-flight 512 needs 576 open files, and this process may have 256" in result.stderr


@pytest.mark.ci
def test_a_server_of_its_own():
    sizes = ["--workload", "rag-2x10", "--workload", "rerank-3x20", "--output-tokens", "4", "--document-pool", "4"]
    server = ["--enable-chunk-aware", "--max-num-batched-tokens=512", f"--kv-cache-memory-bytes={32 << 20}", "--no-warmup"]
    options = [*sizes, "--rates", "10", "--requests", "3", *(f"--server-option={option}" for option in server), "--json", "-"]
    result = CliRunner().invoke(app, ["bench", "serve", *options])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [(made["workload"], made["succeeded"]) for made in report["runs"]] == [("rag-2x10", 3), ("rerank-3x20", 3)]
    assert report["facts"]["model"] == "chunkattn-demo"
