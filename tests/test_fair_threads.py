"""Threads shared by clients: turns, shares, and the end of work that nobody waits for."""

import asyncio
import gc
import threading
import time
import weakref

import pytest

from chunkattn.fair_shares import OWNER
from chunkattn.fair_threads import AbandonedError, FairThreads, check_wanted
from tests.server_helpers import wait_until


def run_as(threads, owner, function, *args):
    """Start a task of an owner."""

    async def work():
        OWNER.set(owner)
        return await threads.run(function, *args)

    return asyncio.create_task(work())


def test_an_owner_with_much_work_delays_only_itself():
    """Sixteen calls that block take half of the threads; another owner's call runs at once."""

    async def main():
        threads, held, ran = FairThreads(4), threading.Event(), []
        blocked = [run_as(threads, "a", lambda: ran.append(1) or held.wait(30)) for _ in range(16)]
        while len(ran) < 2:
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(run_as(threads, "b", lambda: "done"), 10) == "done"
        assert (len(ran), threads.busy) == (2, 2)
        held.set()
        await asyncio.gather(*blocked)
        assert (len(ran), threads.busy) == (16, 0)
        threads.close()

    asyncio.run(main())


def test_owners_take_turns():
    """With one thread, the calls of three owners alternate, whatever their order of arrival."""

    async def main():
        threads, ran, held = FairThreads(1), [], threading.Event()
        first = run_as(threads, "z", held.wait, 30)
        await asyncio.sleep(0)
        tasks = [run_as(threads, owner, ran.append, owner) for owner in "aaaabbc"]
        await asyncio.sleep(0.02)
        held.set()
        await asyncio.gather(first, *tasks)
        assert "".join(ran) == "abcabaa"
        threads.close()

    asyncio.run(main())


def test_work_without_a_caller_ends_early_or_never_begins():
    async def main():
        threads, began, ended, later = FairThreads(1), threading.Event(), [], []

        def long():
            began.set()
            try:
                for _ in range(1000):
                    time.sleep(0.01)
                    check_wanted()
            except AbandonedError:
                ended.append("early")
                raise

        running, waiting = run_as(threads, "a", long), run_as(threads, "a", later.append, 1)
        await asyncio.to_thread(began.wait, 10)
        waiting.cancel()
        running.cancel()
        results = await asyncio.gather(running, waiting, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert await asyncio.wait_for(run_as(threads, "a", lambda: 3), 5) == 3
        assert (ended, later, threads.busy) == (["early"], [], 0)
        threads.close()

    asyncio.run(main())


def test_errors_reach_the_caller_and_nothing_stays_alive():
    """Without the garbage collector: the arguments may be large."""

    class Large:
        pass

    def fail(_):
        raise KeyError("x")

    async def main():
        threads, given = FairThreads(2), Large()
        seen = weakref.ref(given)
        with pytest.raises(KeyError, match="x"):
            await threads.run(fail, given)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await threads.run(next, iter(()))
        assert await threads.run(lambda: OWNER.get()) is None
        gc.disable()
        try:
            del given
            await asyncio.to_thread(wait_until, lambda: seen() is None, 5)
        finally:
            gc.enable()
        threads.close()

    asyncio.run(main())


def test_idle_threads_end_with_the_owner():
    async def main():
        threads = FairThreads(3)
        await asyncio.gather(*(run_as(threads, str(n), time.sleep, 0.01) for n in range(3)))
        threads.close()

    before = threading.active_count()
    asyncio.run(main())
    wait_until(lambda: threading.active_count() <= before, 10)
