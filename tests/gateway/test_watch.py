"""Replicas that come, go, restart and report, and the URLs they are given by."""

import asyncio
import json
import socket

import pytest

from chunkattn.errors import ConfigError
from chunkattn.gateway import http_replicas
from chunkattn.gateway.http_replicas import HttpReplicas
from chunkattn.gateway.options import GatewayOptions
from chunkattn.gateway.policy import Policy
from chunkattn.gateway.replica_reports import read_metrics
from chunkattn.gateway.replicas import Report
from chunkattn.gateway.text_measure import TextMeasure
from chunkattn.gateway.watch import Watch
from chunkattn.schema.piece_keys import Keys, keys_of
from tests.gateway.rig import COMPLETE, Replica, answered_by, ask, rig, run, until

DOCUMENTS = [f"document {number} " * 60 for number in range(6)]


def test_the_same_documents_in_another_order_go_to_the_same_replica():
    async def case():
        a, b, c = Replica("a"), Replica("b"), Replica("c")
        async with rig(a, b, c) as made:

            async def port(documents):
                return answered_by(await made.http.post(COMPLETE, json=ask(documents)))

            for start in range(3):
                listed = [*DOCUMENTS[start * 2 : start * 2 + 2], f"own {start} " * 80]
                first = await port(listed)
                assert {await port(listed[::-1]), await port(listed[1:] + listed[:1]), await port(listed)} == {first}

    run(case)


def test_queued_work_sends_others_elsewhere():
    async def case():
        a, b = Replica("a"), Replica("b")
        go = asyncio.Event()

        async def wait(call):
            await go.wait()
            await call.reply()

        async with rig(a, b) as made:
            first = answered_by(await made.http.post(COMPLETE, json=ask(DOCUMENTS[:1])))
            a.answer = b.answer = wait
            kept = next(replica for replica in (a, b) if replica.port == first)
            asking = [asyncio.create_task(made.http.post(COMPLETE, json=ask([f"{n} " * 2000]))) for n in range(2)]
            await until(lambda: len(a.calls) + len(b.calls) == 3)
            assert min(len(a.calls), len(b.calls)) == 1, "both at one replica"
            asking.append(asyncio.create_task(made.http.post(COMPLETE, json=ask(DOCUMENTS[:1], "Who?"))))
            await until(lambda: len(a.calls) + len(b.calls) == 4)
            assert json.loads(kept.calls[-1].body)["chunks"]["question"] == "Who?", "its document is there"
            go.set()
            await asyncio.gather(*asking)
            assert made.queued == 0

    run(case)


def test_a_new_generation_clears_the_record():
    async def case():
        a, b = Replica("a"), Replica("b")
        a.report = b.report = {**a.report, "capacity": 10_000}
        async with rig(a, b) as made:
            changed = []
            made.gateway.watch.on_change.append(lambda names: changed.extend(names))
            answer = await made.http.post(COMPLETE, json=ask(DOCUMENTS))
            kept = next(replica for replica in (a, b) if replica.port == answered_by(answer))
            pieces = made.gateway.policy.num_pieces
            assert pieces(kept.url) == len(DOCUMENTS) + 1
            kept.report = {**kept.report, "generation": "2"}
            await until(lambda: pieces(kept.url) == 0)
            await until(lambda: changed == [kept.url])

    run(case)


def test_reports_tell_what_other_gateways_have_sent():
    async def case():
        a, b = Replica("a"), Replica("b")
        a.report = {**a.report, "capacity": 10_000}
        keys = keys_of(COMPLETE, ask(DOCUMENTS)).pieces
        async with rig(a, b) as made:

            def pieces():
                return made.gateway.policy.num_pieces(a.url)

            a.report = {**a.report, "held": [list(piece) for piece in reversed(keys)]}
            await until(lambda: pieces() == len(keys))
            assert answered_by(await made.http.post(COMPLETE, json=ask(DOCUMENTS))) == a.port
            a.report = {**a.report, "capacity": 500, "held": [[7, 100]]}  # tokens, of 4 bytes
            await until(lambda: pieces() == 4)  # the piece of the report, the prefix and the first documents
            assert made.gateway.policy.missing(a.url, Keys((*keys[:3], (7, 100)))) == 0

    run(case)


@pytest.mark.parametrize(
    "report",
    [
        *(b"", b"[]", b"{}", b'{"generation": 1}', b'{"generation": "1", "ready": true, "held": [1]}'),
        *(b'{"generation": "1", "ready": true, "held": [["x", 1]]}', b'{"generation": "1", "ready": true, "capacity": "x"}'),
    ],
)
def test_a_report_that_cannot_be_read_takes_the_replica_away(report):
    async def case():
        a, b = Replica("a"), Replica("b")
        async with rig(a, b) as made:
            a.texts["/v1/cache/report"] = report
            await made.ready(b)
            a.texts.clear()
            await made.ready(a, b)

    run(case)


def test_a_replica_that_is_not_ready_gets_nothing_and_comes_back():
    async def case():
        a, b = Replica("a"), Replica("b")
        async with rig(a, b) as made:
            a.report = {**a.report, "ready": False}
            await made.ready(b)
            for number in range(4):
                assert answered_by(await made.http.post(COMPLETE, json=ask([str(number) * 100]))) == b.port
            assert (await made.http.get("/health")).status_code == 200
            b.report = {**b.report, "ready": False}
            await made.ready()
            health = await made.http.get("/health")
            assert health.status_code == 503
            assert {name: state["ready"] for name, state in health.json()["replicas"].items()} == {a.url: False, b.url: False}
            a.report = b.report = {**a.report, "ready": True}
            await made.ready(a, b)

    run(case)


@pytest.mark.parametrize("reports", [True, False], ids=["report", "health"])
def test_a_replica_in_a_long_step_gets_what_no_other_takes(reports):
    async def case():
        a, b = Replica("a"), Replica("b")

        def tell(replica, responsive):
            if reports:
                replica.report = {**Replica().report, "responsive": responsive}
            else:
                replica.report = None
                replica.texts["/health"] = json.dumps({"status": "ready" if responsive else "unresponsive"}).encode()
                replica.statuses["/health"] = 200 if responsive else 503

        tell(a, False), tell(b, True)
        async with rig(a, b, wait=False) as made:
            await made.ready(b)
            await until(lambda: made.gateway.watch.states[a.url].is_ready)
            for number in range(4):
                assert answered_by(await made.http.post(COMPLETE, json=ask([str(number) * 100]))) == b.port
            b.answer = lambda call: call.refuse(503, "engine_not_ready")
            assert answered_by(await made.http.post(COMPLETE, json=ask())) == a.port
            tell(b, False)
            await made.ready()
            assert (await made.http.get("/health")).status_code == 200
            assert answered_by(await made.http.post(COMPLETE, json=ask())) == a.port
            tell(a, True)
            await made.ready(a)

    run(case)


def test_a_killed_replica_comes_back():
    async def case():
        a, b = Replica("a"), Replica("b")
        async with rig(a, b) as made:
            a.kill()
            answers = [await made.http.post(COMPLETE, json=ask([str(number) * 100])) for number in range(6)]
            assert {answered_by(answer) for answer in answers} == {b.port}
            await a.open()
            await made.ready(a, b)

    run(case)


def test_pinned_documents_hear_of_a_replica_that_stays_away():
    async def case():
        a, b = Replica("a"), Replica("b")
        async with rig(a, b, hang_timeout_s=0.2) as made:
            told = []
            made.gateway.watch.on_change.append(told.extend)
            a.kill()
            async with asyncio.timeout(30):
                while a.url not in told:
                    await asyncio.sleep(0.01)
            assert b.url not in told

    run(case)


def test_the_only_replica_is_asked_although_a_connection_has_failed():
    """The report that tells whether it lives is still on its way."""

    async def case():
        a = Replica()
        async with rig(a, report_period_s=60) as made:
            a.reporting.clear()
            made.gateway.watch.note_lost(a.url)
            assert made.gateway.watch.ready() == []
            assert (await made.http.post(COMPLETE, json=ask())).status_code == 200
            a.reporting.set()
            assert await made.gateway.watch.until(made.gateway.watch.ready, 30) == [a.url]
            made.gateway.watch.note_lost(a.url)  # before the task that asked has been put away
            await made.ready(a)
            a.kill()
            answers = [await made.http.post(COMPLETE, json=ask()) for _ in range(2)]
            assert [answer.json()["error"]["code"] for answer in answers] == ["engine_not_ready", "no_replica"]

    run(case)


def test_a_plain_replica_is_read_by_its_health_and_metrics():
    async def case():
        a = Replica()
        a.report = None
        labels = 'block_size="16",num_gpu_blocks="50",other="a,b=\\"x\\"}"'
        a.texts = {
            "/health": b"{}",
            "/metrics": f"process_start_time_seconds 1.5e+09\nvllm:cache_config_info{{{labels}}} 1.0\n".encode(),
            "/v1/models": b'{"data": [{"id": "base"}, {"id": "a", "parent": "base", "decide_method": "head"}]}',
        }
        async with rig(a) as made:
            report = made.gateway.watch.states[a.url].report
            assert (report.ready, report.capacity, report.adapters, report.decide_method) == (True, 800, ("a",), "head")
            assert "1.5e+09" in report.generation
            await until(lambda: a.asked.count("/health") > 3)
            assert a.asked.count("/metrics") == 1, "its metrics are long"

    run(case)


def test_ours_without_reports_is_read_by_its_metrics():
    assert read_metrics(
        'chunkattn_pages{state="used"} 3.0\nchunkattn_pages{state="free"} 5.0\nchunkattn_block_size 16.0\n'
    ) == ("", 128)


def test_one_late_report_is_forgiven_and_two_are_not():
    class Late:
        late = 0

        def names(self):
            return ["a"]

        async def report(self, name):
            if self.late:
                self.late -= 1
                raise TimeoutError
            return Report("1", True)

    async def case():
        replicas, seen, candidates = Late(), [], []
        made = Watch(replicas, Policy(), GatewayOptions(report_period_s=60))
        await made.open()
        for late in (0, 1, 2):
            replicas.late = late
            for _ in range(max(late, 1)):
                await made._hear("a")
            seen.append(bool(made.ready()))
            candidates.append(made.candidates())
        made.states["a"].heard = -1e9
        replicas.late = 1
        await made._hear("a")
        candidates.append(made.candidates())
        await made.close()
        assert seen == [True, True, False]
        assert candidates == [["a"], ["a"], ["a"], []], "a busy replica is better than none, a hung one is not"

    run(case)


def test_bytes_per_token_are_measured_at_a_replica():
    async def case():
        a = Replica()
        a.bytes_per_token = 2.5
        async with rig(a, report_period_s=0.02) as made:
            for number in range(6):
                await made.http.post(COMPLETE, json=ask([f"{number} " + "word " * 640]))
            await until(lambda: made.gateway.watch.bytes_per_token != 4.0)
            assert 2.4 < made.gateway.watch.bytes_per_token <= 2.5  # pages are filled up

    run(case)


def test_a_measure_without_counts_is_none():
    async def case():
        async def unknown(text):
            return None

        measure = TextMeasure(unknown)
        for text in ["short", 7, None, "x" * 30_000, *("y" * 300 for _ in range(100))]:
            measure.offer(text)
        assert measure.num_samples <= 16
        assert await measure.bytes_per_token() is None

    run(case)


def test_names_are_resolved_again(monkeypatch):
    """Every address is a replica; they come and go, and stay while the name cannot be looked up."""

    async def case():
        found: list[str] | None = ["127.0.0.1"]
        looked_up = asyncio.get_running_loop().getaddrinfo

        async def lookup(host, port, **options):
            if host != "replicas.example":
                return await looked_up(host, port, **options)
            if found is None:
                raise socket.gaierror(socket.EAI_AGAIN, "no answer")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
        monkeypatch.setattr(http_replicas, "_RESOLVE_S", 0.02)
        a = Replica()
        await a.open()
        async with rig(urls=[f"http://replicas.example:{a.port}"], resolve=True) as made:
            states, ready = made.gateway.watch.states, made.gateway.watch.ready
            await until(lambda: ready() == [a.url])
            assert (await made.http.post(COMPLETE, json=ask())).status_code == 200
            found = ["127.0.0.1", "127.0.0.2"]  # nothing listens there: another port would
            await until(lambda: set(states) == {a.url, f"http://127.0.0.2:{a.port}"})
            found = None
            await asyncio.sleep(0.1)
            assert len(states) == 2
            assert ready() == [a.url]
            found = []
            await until(lambda: not states)
            assert (await made.http.post(COMPLETE, json=ask())).json()["error"]["code"] == "no_replica"
            found = ["127.0.0.1"]
            await until(lambda: ready() == [a.url])
        a.kill()

    run(case)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "at least one replica"),
        (["localhost:8000"], "http://host:port"),
        (["ftp://a:1"], "http://host:port"),
        (["http://"], "http://host:port"),
        (["http://a b:1"], "http://host:port"),
        (["http://a:1/\n"], "http://host:port"),
        (["http://a:99999"], "is no URL"),
        (["http://a:x"], "is no URL"),
        (["http://[::1"], "is no URL"),
        (["http://u:p@a:1"], "--replica-key"),
        (["http://a:1/?x=1"], "query"),
        (["http://a:1#x"], "fragment"),
        (["http://a:1", "http://a:1/"], "given twice"),
        (["http://a", "http://A:80"], "given twice"),
    ],
)
def test_urls_that_are_refused(urls, message):
    with pytest.raises(ConfigError, match=message):
        HttpReplicas(urls)


def test_an_https_name_cannot_be_resolved_into_addresses():
    with pytest.raises(ConfigError, match="certificate"):
        HttpReplicas(["https://a:1"], resolve=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, "the only one is document"),
        ({"max_tries": 0}, "max_tries must be at least 1"),
        ({"report_period_s": 0}, "report_period_s must be above 0"),
        ({"hang_timeout_s": float("inf")}, "hang_timeout_s"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s"),
        ({"replica_wait_s": -1}, "replica_wait_s must be at least 0"),
        ({"replica_key": ""}, "replica_key must not be empty"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        GatewayOptions(**options)
