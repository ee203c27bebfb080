"""A pytest plugin: `AsyncLLM` over an engine that computes nothing and remembers what it was told."""

import asyncio

import pytest

from chunkattn.async_llm import AsyncLLM
from chunkattn.engine.messages import CachedTokens, PrecomputeRequest, PrecomputeResult
from chunkattn.remote.messages import CacheQuery, Reply, Unpin


class Engine:
    """An engine's process that answers at once, or after `answer` where `held`, and remembers what it was told."""

    def __init__(self, client):
        self.client, self.told, self.held, self.waiting = client, [], False, []

    def send(self, messages):
        for message in messages:
            if isinstance(message, PrecomputeRequest):
                self.told.append("compute")
                self._reply(PrecomputeResult(message.request_id, CachedTokens(0, (0,), 0)))
            elif isinstance(message, Unpin):
                self.told.append("unpin")
            elif isinstance(message, CacheQuery):
                self.told.append("forget" if message.forget else "look up")
                self._reply(Reply(message.query_id, tuple(CachedTokens(0, (0,), 0) for _ in message.requests)))

    def answer(self):
        self.held = False
        while self.waiting:
            self._reply(self.waiting.pop(0))

    def _reply(self, message):
        if self.held:
            self.waiting.append(message)
            return
        asyncio.get_running_loop().call_soon(self.client._take, message)


@pytest.fixture
def llm(demo):
    """The demo model's front, over an engine that computes nothing."""
    made = AsyncLLM(enable_chunk_aware=True)
    made._frontend = demo.frontend
    made.client.limits, made.client.state = demo.frontend.limits, "ready"
    made.client._worker = Engine(made.client)
    return made
