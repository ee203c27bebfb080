"""One model on two hosts: two processes of two virtual devices each, which meet over Gloo."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from chunkattn import LLM, AsyncLLM, ChunkedPrompt, SamplingParams
from chunkattn.errors import EngineDeadError
from tests.async_helpers import idle, last, until
from tests.parallel.answers import ALGORITHMS, OPTIONS
from tests.remote.strangers import GREETING, attack
from tests.shaped_texts import CHARACTERS, SHAPES, check, shaped, teach

pytest_plugins = ["tests.async_faults"]
pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]

LIMIT_S = 10.0
DEVICES = "--xla_force_host_platform_device_count=2 --xla_cpu_collective_call_terminate_timeout_seconds=600"
HOSTS = {"tensor_parallel_size": 4, "num_hosts": 2, "engine_hang_timeout_s": LIMIT_S}
CHUNKED = ChunkedPrompt([*range(2, 22)], [[*range(30, 67)], [*range(70, 88)], [9, 8, 7]], [5, 6, 7, 8])
PLAIN = {"prompt_token_ids": [*range(2, 62)]}
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=0)
EDITED = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=8, repetition_penalty=1.3, logit_bias={7: 1.5}, logprobs=0)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
QUERY, ITEMS = [*range(2, 32)], [[3, 4, 5], [6], [7, 8, 9, 10, 11]]


class Pair:
    """An `AsyncLLM` on host 0, and the process of host 1."""

    def __init__(self, llm, other, log):
        self.llm, self.other, self.log = llm, other, log

    def engine_of_other(self):
        """Process id of the engine on host 1."""
        return int(Path(f"/proc/{self.other.pid}/task/{self.other.pid}/children").read_text().split()[0])


@pytest.fixture(scope="module")
def folder(checkpoint):
    return str(checkpoint("qwen3"))


@pytest.fixture(scope="module")
def one(folder):
    """An engine on one device."""
    return LLM(folder, **OPTIONS)


@pytest.fixture(scope="module")
def pair(loop, folder, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        options = OPTIONS | HOSTS | {"coordinator": f"127.0.0.1:{free.getsockname()[1]}"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not True]
    patch = pytest.MonkeyPatch()
    patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}")
    log = tmp_path_factory.mktemp("host") / "log"
    cache = tmp_path_factory.mktemp("cache")
    command = [sys.executable, "-m", "chunkattn", "serve", folder, "--skip-tokenizer-init", "--host-index=1", *flags]
    with log.open("w") as output:
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
        other = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        llm = loop.run(AsyncLLM.start(folder, **options))
        yield Pair(llm, other, log)
        before = len(log.read_text())
        loop.run(llm.close())
        time.sleep(2)
        assert "host 0 has ended; the engine starts again and waits" in log.read_text()[before:]
        other.send_signal(signal.SIGTERM)
        assert other.wait(30) == 0
        assert " ERROR " not in log.read_text()[before:]
        assert any(cache.glob("jit__trace_counted*")), "a host that follows keeps its programs"
    finally:
        other.kill()
        patch.undo()
        sys.stderr.write(log.read_text())


async def answers(llm):
    """Tokens and log-probabilities of prompts and scores of every kind."""
    outputs = await asyncio.gather(*(last(llm.generate(p, s)) for p in (CHUNKED, PLAIN) for s in (GREEDY, EDITED)))
    scores = [await llm.score(QUERY, ITEMS, label_token_ids=[7, 8, 9], algorithm=name) for name in ALGORITHMS]
    return [[sample.token_ids for sample in o.outputs] for o in outputs], [*logprobs_of(outputs), *numbers(scores)]


def logprobs_of(outputs):
    for o in outputs:
        for sample in o.outputs:
            yield from (at[t].logprob for at, t in zip(sample.logprobs, sample.token_ids, strict=True))
        yield from (x.logprob for at in o.prompt_logprobs or () if at for x in at.values())


def numbers(scores):
    for score in scores:
        for row in score.logprobs:
            yield from row


def expected(one):
    outputs = [one.generate(p, s, use_tqdm=False)[0] for p in (CHUNKED, PLAIN) for s in (GREEDY, EDITED)]
    scores = [one.score(QUERY, ITEMS, label_token_ids=[7, 8, 9], algorithm=name, use_tqdm=False) for name in ALGORITHMS]
    return [[sample.token_ids for sample in o.outputs] for o in outputs], [*logprobs_of(outputs), *numbers(scores)]


def test_answers_are_those_of_one_device(loop, pair, one):
    tokens, logprobs = loop.run(answers(pair.llm))
    right_tokens, right_logprobs = expected(one)
    assert tokens == right_tokens
    assert logprobs == pytest.approx(right_logprobs, abs=1e-4)
    assert loop.run(idle(pair.llm))


def test_shaped_texts_are_those_of_one_device(loop, pair, one, monkeypatch):
    monkeypatch.setitem(pair.llm.frontend.__dict__, "vocabulary", CHARACTERS)
    teach(one, monkeypatch)
    asked = [(name, options) for name in SHAPES for options in ({"temperature": 0}, {"n": 2})]

    async def answer():
        return await asyncio.gather(*(last(pair.llm.generate(CHUNKED, shaped(name, **options))) for name, options in asked))

    found = loop.run(answer())
    for (name, options), output in zip(asked, found, strict=True):
        (right,) = one.generate(CHUNKED, shaped(name, **options), use_tqdm=False)
        assert [sample.token_ids for sample in output.outputs] == [sample.token_ids for sample in right.outputs]
        assert list(logprobs_of([output])) == pytest.approx(list(logprobs_of([right])), abs=1e-4)
        check(name, output.outputs)
    assert loop.run(idle(pair.llm))


def test_every_program_is_compiled_ahead_on_both(loop, pair):
    async def compiles():
        """Counts of compiled programs. The baseline `packed_dense` is compiled for its first request."""
        counts = re.findall(r'^chunkattn_compiles_total{program="(\w+)"} (\S+)$', await pair.llm.metrics(), re.MULTILINE)
        return {name: float(count) for name, count in counts if name != "packed_dense"}

    async def warm():
        await until(lambda: pair.llm.is_warm, 600)
        before = await compiles()
        await answers(pair.llm)
        return before, await compiles()

    before, after = loop.run(warm())
    assert before == after
    assert sum(before.values()) > 20


def test_strangers_at_every_port_change_nothing(loop, pair):
    """1,000 frames and streams to each port of ours: no answer changes, and no engine ends."""
    engines = pair.llm.client.pid, pair.engine_of_other()
    pids = *engines, os.getpid(), pair.other.pid
    ports: set[int] = set()
    for _ in range(60):  # collectives open ports for a moment
        if len(ports := {port for pid in pids for port in listening(pid) if greets(port)}) == 2:
            break
        time.sleep(0.5)
    assert len(ports) == 2, "the coordinator's and the one for calls"

    async def answer_meanwhile():
        tokens, logprobs = await answers(pair.llm)
        right = tokens, pytest.approx(logprobs, abs=1e-4)
        attacks = [asyncio.to_thread(attack, port, count=1000, seed=port) for port in ports]
        working = asyncio.gather(*attacks)
        while not working.done():
            assert await answers(pair.llm) == right
        await working
        assert await answers(pair.llm) == right

    loop.run(answer_meanwhile())
    assert (pair.llm.client.pid, pair.engine_of_other()) == engines
    assert pair.llm.client.restarts == 0


def listening(pid):
    """TCP ports on which a process listens."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    ports = {f"socket:[{line[9]}]": int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A"}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if (port := ports.get(os.readlink(descriptor))) is not None:
                yield port


def greets(port):
    """Return whether a port speaks ZeroMQ's protocol, or hangs up at once. JAX's own do neither."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            said = connection.recv(10)
    except ConnectionResetError:
        return True
    except OSError:
        return False
    return not said or (said[:1], said[9:]) == (GREETING[:1], GREETING[9:])


@pytest.mark.parametrize(
    "way",
    [
        "kill",
        "stop",
        "kill the first",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ["stop the first", *["kill", "stop"] * 9]),
    ],
)
def test_a_host_that_is_gone_ends_all_calls_and_comes_back(loop, pair, one, way):
    right = expected(one)

    async def die():
        await until(lambda: pair.llm.is_ready, 120)
        tasks = [asyncio.ensure_future(last(pair.llm.generate(CHUNKED, LONG))) for _ in range(8)]
        await asyncio.sleep(0.5)
        pid = pair.llm.client.pid if "first" in way else pair.engine_of_other()
        os.kill(pid, signal.SIGSTOP if "stop" in way else signal.SIGKILL)
        began = time.monotonic()
        await asyncio.wait(tasks, timeout=60)
        spent = time.monotonic() - began
        assert all(isinstance(task.exception(), EngineDeadError) for task in tasks if task.exception())
        assert any(task.exception() for task in tasks), "all had been answered before"
        await until(lambda: pair.llm.is_ready, 120)
        return spent, str(next(task.exception() for task in tasks if task.exception())), await answers(pair.llm)

    spent, reason, (tokens, logprobs) = loop.run(die())
    assert spent <= LIMIT_S + (1 if "first" in way else 0)  # the client itself waits for the whole limit
    assert {"kill the first": "SIGKILL", "stop the first": "sign of life"}.get(way, "host 1 of 2 is gone") in reason
    assert tokens == right[0]
    assert logprobs == pytest.approx(right[1], abs=1e-4)
