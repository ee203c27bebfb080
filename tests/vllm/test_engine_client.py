"""`ChunkEngineClient` over a client that computes nothing: retries, shared saves and aborts."""

import asyncio
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.exceptions import RetryableRequestError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind

from chunkattn.integrations.vllm.chunk_options import ChunkOptions
from chunkattn.integrations.vllm.composer import RETRIES
from chunkattn.integrations.vllm.engine_client import ChunkedInput, ChunkEngineClient
from chunkattn.parsers import ChunkedPrompt


class FakeClient:
    """Client whose requests take a moment. It records requests that start, end and are aborted.

    As vLLM does, it sends every sample in outputs of its own, or all samples in one output under `FINAL_ONLY`.

    Args:
        refusals: number of composed requests to refuse.
        tokens_first: tokens that a refused request sends before it is refused.
        wait: seconds before the first token.
    """

    model_config = SimpleNamespace(max_model_len=1000)

    def __init__(self, refusals=0, tokens_first=0, wait=0.02):
        self.refusals, self.tokens_first, self.wait = refusals, tokens_first, wait
        self.started, self.ended, self.aborted, self.priorities = [], [], [], []

    async def generate(self, prompt, params, request_id, **options):
        sent = (params.extra_args or {}).get("kv_transfer_params")
        kind = next(k for k in ("save", "bounds") if k in sent["chunkattn"]) if sent else "plain"
        self.started.append(kind)
        self.priorities.append(options.get("priority", 0))
        try:
            await asyncio.sleep(self.wait)
            refused = kind != "save" and self.refusals > 0
            self.refusals -= refused
            reason = "error" if refused else "length"
            if params.output_kind == RequestOutputKind.FINAL_ONLY:
                yield output(prompt, [completion(index, reason) for index in range(params.n)], finished=True)
            else:
                for token in range(self.tokens_first if refused else 2):
                    for index in range(params.n):
                        yield output(prompt, [completion(index, None, token)])
                for index in range(params.n):
                    yield output(prompt, [completion(index, reason)], finished=index == params.n - 1)
            self.ended.append(kind)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(kind)
            raise


def completion(index, reason, token=0):
    return SimpleNamespace(index=index, finish_reason=reason, token_ids=[token])


def output(prompt, completions, finished=False):
    ids = prompt["prompt_token_ids"]
    return SimpleNamespace(outputs=completions, num_cached_tokens=0, prompt_token_ids=ids, finished=finished)


OPTIONS = ChunkOptions()
PROMPT = ChunkedInput(OPTIONS.parser(None).parse(ChunkedPrompt([1], [[2, 3], [4]], [5])))


def chunked(client, prompt=PROMPT, **params):
    return client.generate(prompt, SamplingParams(**params), "id")


async def collect(outputs):
    return [output async for output in outputs]


def test_a_refused_prompt_is_sent_again_after_its_documents():
    inner = FakeClient(refusals=1)
    found = asyncio.run(collect(chunked(ChunkEngineClient(inner, OPTIONS))))
    assert inner.started == ["save", "save", "bounds"] * 2
    assert [o.outputs[0].finish_reason for o in found] == [None, None, "length"]
    assert all(o.prompt_token_ids == [1, 2, 3, 4, 5] for o in found), "the caller's order"


def test_a_prompt_that_is_always_refused_ends_with_the_reason():
    inner = FakeClient(refusals=100)
    with pytest.raises(RetryableRequestError, match="2 documents, 3 tokens"):
        asyncio.run(collect(chunked(ChunkEngineClient(inner, OPTIONS))))
    assert inner.started.count("bounds") == RETRIES + 1


def test_a_stream_with_tokens_is_not_started_over():
    inner = FakeClient(refusals=1, tokens_first=1)
    with pytest.raises(RetryableRequestError, match="while its answer was streamed"):
        asyncio.run(collect(chunked(ChunkEngineClient(inner, OPTIONS))))
    assert inner.started.count("bounds") == 1


def test_a_whole_answer_is_started_over_and_sent_once():
    inner = FakeClient(refusals=2, tokens_first=1)
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    (found,) = asyncio.run(collect(ChunkEngineClient(inner, OPTIONS).generate(PROMPT, params, "id")))
    assert found.outputs[0].finish_reason == "length"
    assert inner.started.count("bounds") == 3


@pytest.mark.parametrize("refusals", [0, 1])
def test_a_whole_answer_has_every_sample(refusals):
    inner = FakeClient(refusals)
    params = SamplingParams(n=3, output_kind=RequestOutputKind.FINAL_ONLY)
    (found,) = asyncio.run(collect(ChunkEngineClient(inner, OPTIONS).generate(PROMPT, params, "id")))
    assert [(o.index, o.finish_reason) for o in found.outputs] == [(n, "length") for n in range(3)]


def test_a_streamed_retry_has_every_sample():
    inner = FakeClient(refusals=1)
    found = asyncio.run(collect(chunked(ChunkEngineClient(inner, OPTIONS), n=2)))
    ended = [o.outputs[0].index for o in found if o.outputs[0].finish_reason == "length"]
    assert ended == [0, 1]


def test_an_error_of_a_prompt_without_chunks_is_the_engines_own():
    inner = FakeClient(refusals=1)
    prompt = ChunkedInput(OPTIONS.parser(None).parse(ChunkedPrompt([1], [[]], [5])))
    (found,) = asyncio.run(
        collect(chunked(ChunkEngineClient(inner, OPTIONS), prompt, output_kind=RequestOutputKind.FINAL_ONLY))
    )
    assert found.outputs[0].finish_reason == "error"
    assert inner.started == ["plain"]


def test_prompts_at_once_share_their_saves():
    inner = FakeClient()
    client = ChunkEngineClient(inner, OPTIONS)

    async def run():
        await asyncio.gather(*(collect(chunked(client)) for _ in range(3)))

    asyncio.run(run())
    assert sorted(inner.started) == ["bounds"] * 3 + ["save"] * 2
    assert not client._saves


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_save_ends_with_its_last_user(others):
    inner = FakeClient()
    client = ChunkEngineClient(inner, OPTIONS)

    async def run():
        first = asyncio.create_task(collect(chunked(client)))
        rest = [asyncio.create_task(collect(chunked(client))) for _ in range(others)]
        await asyncio.sleep(0.005)
        first.cancel()
        late = collect(chunked(client))  # joins before the cancelled saves have ended
        answers = await asyncio.gather(*rest, late)
        with pytest.raises(asyncio.CancelledError):
            await first
        return answers

    answers = asyncio.run(run())
    assert all(answer[-1].outputs[0].finish_reason == "length" for answer in answers)
    assert inner.ended.count("save") == 2
    assert inner.aborted == ([] if others else ["save", "save"])
    assert not client._saves


def test_a_more_urgent_prompt_starts_a_save_of_its_own():
    inner = FakeClient()
    client = ChunkEngineClient(inner, OPTIONS)

    async def run():
        async with asyncio.TaskGroup() as group:
            for priority in (3, 5, 1):
                group.create_task(collect(client.generate(PROMPT, SamplingParams(), "id", priority=priority)))
                await asyncio.sleep(0.002)

    asyncio.run(run())
    saves = [priority for kind, priority in zip(inner.started, inner.priorities) if kind == "save"]
    assert saves == [3, 3, 1, 1], "a less urgent prompt joins"
    assert not client._saves


def test_an_abandoned_save_is_aborted():
    inner = FakeClient()
    client = ChunkEngineClient(inner, OPTIONS)

    async def run():
        only = asyncio.create_task(collect(chunked(client)))
        await asyncio.sleep(0.005)
        only.cancel()
        await asyncio.sleep(0.005)

    asyncio.run(run())
    assert inner.aborted == ["save", "save"]
    assert not client._saves


def test_a_closed_stream_aborts_its_request():
    inner = FakeClient()

    async def run():
        outputs = chunked(ChunkEngineClient(inner, OPTIONS))
        await anext(outputs)
        await outputs.aclose()

    asyncio.run(run())
    assert inner.aborted == ["bounds"]


def test_parameters_of_the_connector_are_the_servers_own():
    client = ChunkEngineClient(FakeClient(), OPTIONS)
    refused = [
        ({"chunkattn": {"save": 1}}, "is set by the server"),
        ({"chunkattn": None}, "is set by the server"),
        ("text", "must be an object, got str"),
        (["chunkattn"], "must be an object, got list"),
    ]
    for prompt in (PROMPT, {"type": "token", "prompt_token_ids": [1]}):
        for written, message in refused:
            with pytest.raises(VLLMValidationError, match=message):
                client.generate(prompt, SamplingParams(extra_args={"kv_transfer_params": written}), "id")
    with pytest.raises(VLLMValidationError, match="prompt_logprobs"):
        chunked(client, prompt_logprobs=1)
