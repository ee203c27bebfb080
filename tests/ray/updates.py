"""A cluster that changes under load: fixtures' helpers of the tests of updates."""

from __future__ import annotations

import asyncio
import copy
import json
import time

import aiohttp

from tests.ray.requests import Answer
from tests.ray.test_answers import BODY

UPDATE_S = 240
"""Seconds that one change may take. A loaded machine needs a multiple of a quiet one's 30."""


def under_load(cluster, load, changes, *, clients=6, holds=True):
    """Run clients while changes take effect one after the other. Return the answer of a request that began before them.

    Args:
        cluster: the cluster.
        load: the requests.
        changes: pairs of a function that changes the cluster, and a function that returns a function that tells whether the
            change has taken effect; the latter is called before the change.
        clients: number of clients.
        holds: whether to hold a request during the changes, at most `request_timeout_s`.
    """

    async def main(session):
        tasks = [asyncio.create_task(load.client(session, seed)) for seed in range(clients)]

        async def until(count):
            while load.outcomes["complete"] < count:
                await asyncio.sleep(0.05)
                for task in tasks:
                    assert not task.done(), task.exception()

        await until(20)
        held, go = await hold(session) if holds else (None, None)
        for change, watch in changes:
            is_done = await asyncio.to_thread(watch)
            began = time.monotonic()
            await asyncio.to_thread(change)
            while not await asyncio.to_thread(is_done):
                assert time.monotonic() - began < UPDATE_S, load.outcomes
                await asyncio.sleep(0.2)
            print(f"took {time.monotonic() - began:.1f} s, {dict(load.outcomes)}", flush=True)
            await until(load.outcomes["complete"] + 20)
        load.stopped = True
        await asyncio.gather(*tasks)  # every request ends
        if holds:
            go.set()
            return (await asyncio.gather(held, return_exceptions=True))[0]
        return None

    answer = cluster.run(main)
    assert not load.wrong
    return answer


async def hold(session):
    """Send a request but for the end of its body. Return the task of its answer, and the event that ends the body."""
    body, go, begun = json.dumps(BODY).encode(), asyncio.Event(), asyncio.Event()

    async def parts():
        yield body[:9]
        begun.set()
        await go.wait()
        yield body[9:]

    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    timeout = aiohttp.ClientTimeout(total=10 * UPDATE_S)

    async def send():
        async with session.post("/v1/completions", data=parts(), headers=headers, timeout=timeout) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    task = asyncio.create_task(send())
    await begun.wait()
    return task, go


def with_deployments(config, options):
    """Return a configuration with options of deployments."""
    changed = copy.deepcopy(config)
    changed["applications"][0]["deployments"] = [{"name": name} | given for name, given in options.items()]
    return changed


def replaced(cluster, *deployments, may_fail=False):
    """Return a function that tells whether the deployments have new replicas alone, and everything serves.

    Args:
        cluster: the cluster.
        deployments: names of the deployments.
        may_fail: whether the update may have failed meanwhile, as Ray says when a replica dies.
    """
    before = {name: cluster.replicas_of(name) for name in deployments}

    def is_done():
        state = cluster.application()
        assert may_fail or state["status"] != "DEPLOY_FAILED", state["message"]
        new = {name: cluster.replicas_of(name) for name in before}
        return all(len(new[n]) == len(before[n]) and not new[n] & before[n] for n in before) and cluster.is_whole()

    return is_done
