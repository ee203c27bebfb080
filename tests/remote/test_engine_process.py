"""The engine's process dies, hangs, does not start, and is closed."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from chunkattn.async_llm import AsyncLLM
from chunkattn.errors import BackendError, ConfigError, DeadlineExceededError, EngineDeadError, ModelError
from chunkattn.remote.messages import decode
from tests.async_helpers import GREEDY, LONG, OPTIONS, PROMPT, idle, last, until

pytest_plugins = ["tests.async_faults"]


@pytest.fixture(scope="module")
def doomed(loop, fault_file):
    """One engine to be killed again and again."""
    made = loop.run(AsyncLLM.start(**OPTIONS, engine_hang_timeout_s=4))
    yield made
    loop.run(made.close())


@pytest.mark.parametrize(
    "way", ["kill", *(pytest.param(way, marks=pytest.mark.ci) for way in ("hang", "stop", "error", "noise"))]
)
def test_death_reaches_every_caller_and_the_engine_comes_back(loop, doomed, fault, way, monkeypatch):
    expected = loop.run(last(doomed.generate(PROMPT, GREEDY))).outputs[0].token_ids
    restarts = doomed.client.restarts
    reasons = {"kill": "SIGKILL", "stop": "sign of life", "hang": "in one step", "error": "ZeroDivisionError: outside"}
    reasons["noise"] = "cannot be understood"

    async def die():
        fault.write_text("slow")
        calls = [last(doomed.generate(PROMPT, LONG)) for _ in range(8)]
        calls += [doomed.score([1] * 9, [[n] * 9 for n in range(50)], label_token_ids=[3], item_first=True)]
        tasks = [asyncio.ensure_future(c) for c in calls]
        await asyncio.sleep(0.3)
        if way == "hang":
            fault.write_text("hang")
            await until(lambda: fault.read_text() == "hanging")
        elif way == "error":
            fault.write_text("error")
        elif way == "noise":
            monkeypatch.setattr("chunkattn.remote.messages.decode", lambda frame: decode(frame[:-1]))
        else:
            os.kill(doomed.client.pid, signal.SIGKILL if way == "kill" else signal.SIGSTOP)
        tasks.append(asyncio.ensure_future(doomed.metrics()))  # and one that comes too late
        pid = doomed.client.pid
        if way in ("stop", "hang"):
            with pytest.raises(DeadlineExceededError):  # holds whatever the engine does
                await last(doomed.generate(PROMPT, GREEDY, timeout=0.5))
        await asyncio.wait(tasks, timeout=60)
        monkeypatch.undo()
        for task in tasks:
            assert isinstance(task.exception(), EngineDeadError)
            assert "started again" in str(task.exception())
            assert reasons[way] in str(task.exception())
        fault.unlink(missing_ok=True)
        assert doomed.state == "restarting"
        with pytest.raises(EngineDeadError, match="started again"):
            await last(doomed.generate(PROMPT, GREEDY))
        await until(lambda: doomed.is_ready)
        answer = await last(doomed.generate(PROMPT, GREEDY))
        assert doomed.client.restarts == restarts + 1
        assert not Path(f"/proc/{pid}").exists(), "a zombie"
        assert await idle(doomed)
        return answer

    assert loop.run(die()).outputs[0].token_ids == expected


@pytest.mark.ci
def test_an_engine_that_cannot_start_again_is_tried_again(loop, doomed, fault):
    async def fail():
        fault.write_text("exit")
        os.kill(doomed.client.pid, signal.SIGKILL)
        await until(lambda: doomed.state == "failed")
        with pytest.raises(EngineDeadError, match=r"status 3.*failed to start 3 times"):
            await doomed.score("a", ["b"], label_token_ids=[5])
        fault.unlink()
        await until(lambda: doomed.is_ready)
        return await last(doomed.generate(PROMPT, GREEDY))

    assert loop.run(fail()).outputs[0].finish_reason


def children():
    """The processes that this one has started."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # the thread has ended meanwhile
            found.update((task / "children").read_text().split())
    return found


def test_a_start_that_fails_says_why(loop, checkpoint, fault, tmp_path):
    before = children()
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text((checkpoint("qwen3") / "config.json").read_text())
    starts = [
        (ConfigError, {"no_such_option": 1}),
        (ConfigError, {"engine_hang_timeout_s": 0.5}),
        (ConfigError, {"engine_hang_timeout_s": float("nan")}),
        (BackendError, {"attention_backend": "none"}),
        (ModelError, {"model": str(folder), "skip_tokenizer_init": True}),
        (ModelError, {"model": str(folder / "missing")}),
    ]
    for kind, options in starts:
        with pytest.raises(kind):
            loop.run(AsyncLLM.start(**options))
    assert children() <= before


@pytest.mark.slow
def test_a_first_start_is_tried_three_times(loop, fault):
    fault.write_text("exit")
    with pytest.raises(EngineDeadError, match="exited with status 3"):
        loop.run(AsyncLLM.start(**OPTIONS))


@pytest.mark.ci
def test_closing_writes_to_the_kv_store(loop, fault, tmp_path):
    documents = ["Ana lives in Oslo.", "Ben lives in Rome."]

    async def once():
        async with AsyncLLM(**OPTIONS, kv_store=str(tmp_path)) as llm:
            before = await llm.metrics()
            report = await llm.precompute("Read.", documents)
            return before, await llm.metrics(), report

    _, after, _ = loop.run(once())
    assert 'chunkattn_kv_store_events_total{event="hit"} 0.0' in after
    _, after, _ = loop.run(once())
    assert 'chunkattn_kv_store_events_total{event="hit"} 0.0' not in after


@pytest.mark.ci
def test_closing_at_any_time(loop, fault):
    async def started(llm):
        await until(lambda: llm.client.pid is not None)
        return llm.client.pid

    async def close():
        llm = AsyncLLM(**OPTIONS)
        assert llm.state == "starting"
        with pytest.raises(EngineDeadError):
            await last(llm.generate(PROMPT))
        await llm.close()  # never started
        with pytest.raises(EngineDeadError, match="started once"):
            await llm.__aenter__()
        llm = AsyncLLM(**OPTIONS)
        starting = asyncio.ensure_future(llm.__aenter__())
        await asyncio.sleep(0.01)
        await llm.close()  # no process yet
        with pytest.raises(EngineDeadError):
            await starting
        for way in ("cancel", "close"):
            llm = AsyncLLM(**OPTIONS)
            starting = asyncio.ensure_future(llm.__aenter__())
            pid = await started(llm)
            starting.cancel() if way == "cancel" else await llm.close()
            with pytest.raises(asyncio.CancelledError if way == "cancel" else EngineDeadError):
                await starting
            assert llm.state == "closed"
            assert not Path(f"/proc/{pid}").exists()
        async with AsyncLLM(**OPTIONS) as llm:
            pid = llm.client.pid
            fault.write_text("slow")
            tasks = [asyncio.ensure_future(last(llm.generate(PROMPT, LONG))) for _ in range(4)]
            await asyncio.sleep(0.3)
            async with asyncio.timeout(60):
                await asyncio.gather(llm.close(grace_s=600), llm.close())  # it ends by itself
            for task in tasks:
                with pytest.raises(EngineDeadError, match="closed"):
                    await asyncio.wait_for(task, 1)
        assert llm.state == "closed"
        with pytest.raises(EngineDeadError, match="closed"):
            await llm.metrics()
        assert not Path(f"/proc/{pid}").exists()

    loop.run(close())


def test_the_engine_shares_the_session_and_no_signals_of_the_terminal(loop, doomed):
    """Linux would make the threads of an engine in a session of its own share half of the processors."""

    async def look():
        pid = doomed.client.pid
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid  # Ctrl-C reaches the foreground's group alone
        (mask,) = re.findall(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
            assert int(mask, 16) >> (ignored - 1) & 1

    loop.run(look())


@pytest.mark.parametrize("way", ["killed", pytest.param("forgetful", marks=pytest.mark.slow)])
def test_no_worker_outlives_its_parent(fault, way):
    """Killed, or leaving without `close`: the worker goes too, though nobody tells it."""
    code = (
        "import asyncio, os, sys\nfrom chunkattn.async_llm import AsyncLLM\n"
        f"async def main():\n    llm = await AsyncLLM.start(**{OPTIONS!r})\n    print(llm.client.pid, flush=True)\n"
        f"    {'await asyncio.sleep(99)' if way == 'killed' else 'return'}\nasyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(re.match(r"\d+", parent.stdout.readline())[0])
    if way == "killed":
        parent.kill()
    assert parent.wait(timeout=60) == (-9 if way == "killed" else 0)
    parent.stdout.close()
    for _ in range(500):
        if not _alive(pid):
            return
        time.sleep(0.01)
    raise AssertionError("the worker lives on")


def _alive(pid):
    """Return whether a process runs; a zombie that its new parent has not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
