"""A pytest plugin: `AsyncLLM` and its server over engines that compute nothing and remember what they were told."""

import asyncio

import httpx
import numpy as np
import pytest

from chunkattn.async_llm import AsyncLLM
from chunkattn.engine.grammars import Grammars
from chunkattn.engine.messages import (
    CachedTokens,
    GenerateRequest,
    PrecomputeRequest,
    PrecomputeResult,
    PromptLogprobsOutput,
    TokenLogprobs,
    TokenOutput,
)
from chunkattn.remote.messages import Abort, CacheQuery, Reply, Unpin
from chunkattn.server.app import create_app
from chunkattn.web.options import ServerConfig


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


class Writer:
    """An engine that answers every request with the same tokens, `delay` seconds later."""

    def __init__(self, client):
        self.client = client
        self.requests, self.aborted, self.delay, self.tasks, self.token_ids = [], [], 0.0, set(), (7, 8)
        self.reason = "length"

    def send(self, messages):
        for message in messages:
            if isinstance(message, GenerateRequest):
                self.requests.append(message)
                task = asyncio.create_task(self._write(message))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            elif isinstance(message, Abort):
                self.aborted.append(message.request_id)

    def _reply(self, message):
        asyncio.get_running_loop().call_soon(self.client._take, message)

    async def _write(self, request):
        params = request.sampling
        if params.prompt_logprobs is not None:
            known = np.arange(len(request.layout)) > 0
            values = logprobs(len(request.layout), params.prompt_logprobs)
            self._reply(PromptLogprobsOutput(request.request_id, values, known))
        await asyncio.sleep(self.delay)
        for sample in range(params.n):
            ids = () if request.prompt_only else self.token_ids[: params.max_tokens]
            told = None if params.logprobs is None else logprobs(len(ids), params.logprobs)
            self._reply(TokenOutput(request.request_id, sample, ids, told, self.reason, None, CachedTokens(0, (), 0)))


def logprobs(rows, count):
    tops = np.tile(np.arange(9, 9 + count, dtype=np.int32), (rows, 1))
    values = np.full((rows, count), -0.5, np.float32)
    return TokenLogprobs(np.full(rows, -1.0, np.float32), np.full(rows, 50, np.int32), tops, values)


@pytest.fixture
def writer(llm):
    llm.client._worker = Writer(llm.client)
    return llm.client._worker


@pytest.fixture
def post(llm, writer):
    """A call of the app in a loop of its own."""

    def call(path, body, **options):
        async def once():
            transport = httpx.ASGITransport(create_app(llm, ServerConfig(**options)))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                answer = await client.post(path, json=body)
            await asyncio.gather(*writer.tasks)
            return answer

        return asyncio.run(once())

    return call


@pytest.fixture
def compiled(llm, monkeypatch):
    """Compile grammars in this process: the engine that computes nothing has no vocabulary."""

    async def check(shape, vocabulary):
        Grammars(vocabulary).compile(shape)

    monkeypatch.setattr(llm.client, "check_shape", check)


@pytest.fixture
def says(writer, demo):
    """A function that sets the text of all answers; they end by themselves."""

    def set_text(text, reason="stop"):
        writer.token_ids = (*demo.tokenizer(text, add_special_tokens=False).input_ids, 2)[: None if reason == "stop" else -1]
        writer.reason = reason

    return set_text
