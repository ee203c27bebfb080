"""`AsyncLLM`: the same answers as `LLM`, and what callers and failing steps do to it."""

import asyncio
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest

from chunkattn import ChunkedPrompt, DocumentPrompt, Focus, SamplingParams
from chunkattn.async_llm import AsyncLLM
from chunkattn.errors import CapacityError, DeadlineExceededError, EngineDeadError, EngineError, QueueFullError, RequestError
from tests.async_helpers import GREEDY, LONG, MANY, OPTIONS, PROMPT, choosing, ended, idle, last, until

pytest_plugins = ["tests.async_faults"]


@pytest.fixture(scope="module")
def llm(loop, fault_file):
    """One engine for all tests that leave it alive."""
    made = loop.run(AsyncLLM.start(**OPTIONS, max_queued_requests=16))
    yield made
    loop.run(made.close())


# The same answers


def comparable(output):
    """All of an output but what depends on its company."""
    found = asdict(replace(output, request_id="", num_cached_tokens=0, num_cached_chunk_tokens=()))

    def rounded(value):
        if isinstance(value, float):
            return pytest.approx(value, abs=1e-4)
        if isinstance(value, dict):
            return {k: rounded(v) for k, v in value.items()}
        return [rounded(v) for v in value] if isinstance(value, list) else value

    return rounded(found)


def test_eight_at_once_equal_the_batch_api(loop, llm, demo):
    params = [
        GREEDY,
        SamplingParams(seed=5, max_tokens=20),
        SamplingParams(temperature=0, max_tokens=9, n=3, logprobs=2, ignore_eos=True),
        SamplingParams(seed=2**63 - 1, top_k=20, presence_penalty=0.5, stop_token_ids=[*range(0, 704, 3)], min_tokens=4),
        SamplingParams(temperature=0, prompt_logprobs=3, max_tokens=4),
        SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, stop=["e"], min_tokens=3),
        SamplingParams(seed=1, n=2, max_tokens=60, ignore_eos=True, stop=["a", "o"], include_stop_str_in_output=True),
        LONG,
    ]
    prompts = [
        PROMPT,
        "Ana lives in",
        ChunkedPrompt("Read.", ["One.", "Two."], "How many?"),
        {"prompt_token_ids": [5, 6, 7]},
    ] * 2

    async def stream(prompt, param):
        seen = [output async for output in llm.generate(prompt, param)]
        for before, after in pairwise(seen):
            for a, b in zip(before.outputs, after.outputs, strict=True):
                assert b.text.startswith(a.text)
                assert b.token_ids[: len(a.token_ids)] == a.token_ids
        return seen

    async def whole(prompt, param):
        (output,) = [output async for output in llm.generate(prompt, param, final_only=True)]
        return [output]

    async def everything(way):
        return await asyncio.gather(*map(way, prompts, params))

    streams = loop.run(everything(stream))
    expected = demo.generate(prompts, params)
    for seen, want in zip(streams + loop.run(everything(whole)), expected * 2, strict=True):
        assert asdict(replace(seen[-1], request_id="", num_cached_tokens=0, num_cached_chunk_tokens=())) == comparable(want)
    assert len(streams[7]) > 20, "outputs come one by one"
    loop.run(until(lambda: idle(llm)))


def test_scores_chat_and_cache_equal_the_batch_api(loop, llm, demo):
    conversation = [{"role": "user", "content": "Where does Ana live?"}]
    documents = ["Ana lives in Oslo.", "Ben lives in Rome."]

    async def scores():
        calls = [
            llm.score("Ana", documents, label_token_ids=[5, 6], algorithm=name, item_first=name == "serial")
            for name in ("packed_segment", "serial")
        ]
        return await asyncio.gather(*calls, llm.score("Ana", [], label_token_ids=[5]))

    found = loop.run(scores())
    for number, name in enumerate(("packed_segment", "serial")):
        want = demo.score("Ana", documents, label_token_ids=[5, 6], algorithm=name, item_first=name == "serial")
        assert found[number].algorithm == want.algorithm
        np.testing.assert_allclose(found[number].logprobs, want.logprobs, atol=1e-4)
        assert found[number].usage == want.usage
    assert found[2].scores == []
    answer = loop.run(last(llm.chat(conversation, GREEDY, documents=documents)))
    assert answer.outputs == demo.chat(conversation, GREEDY, documents=documents)[0].outputs

    async def cache():
        await llm.reset_prefix_cache()
        report = await llm.precompute("Read.", documents, pin=True)
        assert 'chunkattn_pages{state="pinned"} 0.0' not in await llm.metrics()
        warm = await last(llm.generate(ChunkedPrompt("Read.", documents, "Who?"), GREEDY))
        await llm.unpin(report)
        assert 'chunkattn_pages{state="pinned"} 0.0' in await llm.metrics()
        assert await llm.reset_prefix_cache()
        return report, warm

    report, warm = loop.run(cache())
    want = demo.precompute("Read.", documents)
    assert [d.tokens for d in report.documents] == [d.tokens for d in want.documents]
    assert all(d.done for d in report.documents)
    assert warm.num_cached_chunk_tokens == tuple(d.tokens for d in report.documents)
    with pytest.raises(CapacityError, match="cannot all be pinned"):
        loop.run(llm.precompute("Read.", [f"word {n} " * 30 for n in range(200)], pin=True))


# Ends that callers choose


def test_a_slow_caller_gets_the_latest_and_the_last(loop, llm):
    async def slow():
        seen = []
        async for output in llm.generate(PROMPT, LONG):
            seen.append(output)
            await asyncio.sleep(0.3)
        return seen

    seen = loop.run(slow())
    assert len(seen) < 60
    assert len(seen[-1].outputs[0].token_ids) == 300
    assert len(seen[0].outputs[0].token_ids) < 300, "what a caller holds does not change"


@pytest.mark.parametrize("way", ["aclose", "break", "cancel", "abort", "timeout"])
def test_who_leaves_frees_the_pages(loop, llm, fault, way):
    fault.write_text("slow")

    async def leave():
        error, before = None, await ended(llm, "aborted")
        timeout = 1.0 if way == "timeout" else None
        outputs = llm.generate(PROMPT, LONG, request_id="mine", timeout=timeout)
        if way == "cancel":
            task = asyncio.ensure_future(last(outputs))
            await asyncio.sleep(0.5)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
        elif way == "break":
            async for _ in outputs:
                break
            del outputs
        else:
            try:
                async for output in outputs:
                    final = output
                    if way == "aclose":
                        await outputs.aclose()
                    elif way == "abort":
                        await llm.abort("mine")
            except DeadlineExceededError as caught:
                error = caught
            if way == "abort":
                assert final.outputs[0].finish_reason == "abort"
        await until(lambda: idle(llm))
        assert await ended(llm, "aborted") == before + 1
        assert (error is not None) == (way == "timeout")

    loop.run(leave())
    assert loop.run(last(llm.generate("Ana", GREEDY, request_id="mine"))).request_id == "mine"


@pytest.mark.parametrize("score", ["likelihood", pytest.param("relevance", marks=pytest.mark.ci)])
@pytest.mark.parametrize(
    "way", [pytest.param("cancel", marks=pytest.mark.ci), "abort", pytest.param("timeout", marks=pytest.mark.ci)]
)
def test_who_leaves_while_documents_are_chosen_frees_the_pages(loop, llm, fault, way, score):
    """No output comes, and nothing is left."""
    fault.write_text("slow")

    async def leave():
        await llm.reset_prefix_cache()
        before = await ended(llm, "aborted")
        timeout = 0.3 if way == "timeout" else None
        prompt = DocumentPrompt("Read.", MANY, "Where does Ana live?", Focus(2, "reread", score))

        async def read():
            return [output async for output in llm.generate(prompt, GREEDY, request_id="mine", timeout=timeout)]

        task = asyncio.ensure_future(read())
        await until(lambda: choosing(llm))
        if way == "cancel":
            task.cancel()
        elif way == "abort":
            await llm.abort("mine")
        await asyncio.wait({task}, timeout=30)
        if way == "timeout":
            assert isinstance(task.exception(), DeadlineExceededError)
        elif way == "abort":
            assert task.result() == []
        else:
            assert task.cancelled()
        await until(lambda: idle(llm))
        assert way == "timeout" or await ended(llm, "aborted") > before
        assert not llm._generations

    loop.run(leave())


@pytest.mark.parametrize("way", ["timeout", "cancel"])
@pytest.mark.parametrize(
    ("options", "requests"), [({"item_first": True}, 120), ({"algorithm": "prefill_extend"}, 13)], ids=["serial", "extend"]
)
def test_a_scoring_call_ends_as_a_whole(loop, llm, fault, options, requests, way):
    """In the middle of its stages, when it has several; and the next one is none the worse."""
    query, items = [1] * 50, [[i] * 50 for i in range(120)]

    async def leave():
        finished = await ended(llm, "finished")
        fault.write_text("slow")
        call = llm.score(query, items, label_token_ids=[5], timeout=0.4 if way == "timeout" else None, **options)
        if way == "timeout":
            with pytest.raises(DeadlineExceededError, match=r"0\.4 s"):
                await call
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 0.4)
        await until(lambda: idle(llm))
        assert await ended(llm, "finished") < finished + requests
        fault.unlink()
        again, expected = [
            await llm.score(query, items[:3], label_token_ids=[5], **kind)
            for kind in (options, {**options, "algorithm": "serial"})
        ]
        np.testing.assert_allclose(again.logprobs, expected.logprobs, atol=1e-4)

    loop.run(leave())


def test_a_query_evicted_between_two_stages_is_computed_again(loop, llm, fault):
    async def score():
        query, items = list(range(2, 102)), [[i] * 40 for i in range(60)]
        expected = await llm.score(query, items, label_token_ids=[5], algorithm="serial")
        fault.write_text("slow")
        call = asyncio.ensure_future(llm.score(query, items, label_token_ids=[5], algorithm="prefill_extend"))
        while not call.done():
            await llm.reset_prefix_cache()
            await asyncio.sleep(0.03)
        np.testing.assert_allclose(call.result().logprobs, expected.logprobs, atol=1e-4)
        await until(lambda: idle(llm))

    loop.run(score())


def test_invalid_requests_are_never_sent(loop, llm, monkeypatch):
    def refuse(*_):
        raise AssertionError("sent")

    monkeypatch.setattr(llm.client, "send_requests", refuse)
    wrong = [
        lambda: last(llm.generate("")),
        lambda: last(llm.generate(["two", "prompts"])),
        lambda: last(llm.generate(PROMPT, SamplingParams(max_tokens=10_000))),
        lambda: last(llm.generate(PROMPT, timeout=0)),
        lambda: last(llm.generate(PROMPT, request_id=7)),
        lambda: last(llm.chat("hello")),
        lambda: last(llm.chat([])),
        lambda: llm.score("a", ["b"], label_token_ids=[]),
        lambda: llm.score("a", ["b"], label_token_ids=[10**6]),
        lambda: llm.score("a", ["b"], label_token_ids=[1], priority="high"),
        lambda: last(llm.generate(PROMPT, priority=1.5)),
        lambda: llm.precompute("", []),
        lambda: llm.precompute("a", ["b"], pin=1),
    ]
    for call in wrong:
        with pytest.raises(RequestError):
            loop.run(call())
    monkeypatch.undo()
    for options, text in (({"priority": 2**70}, "64 bits"), ({"cache_salt": "\ud800"}, "no valid Unicode")):
        with pytest.raises(RequestError, match=text):
            loop.run(last(llm.generate(PROMPT, GREEDY, **options)))


def test_one_id_one_request_and_no_more_than_the_queue_holds(loop, llm, fault):
    fault.write_text("slow")

    async def flood():
        tasks = [asyncio.ensure_future(last(llm.generate("Ana", LONG, request_id=f"r{i}"))) for i in range(16)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="max_queued_requests is 16"):
            await llm.score("a", ["b"], label_token_ids=[5])
        tasks.pop().cancel()
        await until(lambda: all(job for _, job in llm._generations.values()))  # one aborted before it begins has no output
        with pytest.raises(RequestError, match="request_id"):
            await last(llm.generate("Ana", GREEDY, request_id="r0"))
        for number in range(15):
            await llm.abort(f"r{number}")
        await asyncio.wait(tasks, timeout=60)
        assert all(t.result().outputs[0].finish_reason == "abort" for t in tasks)
        await until(lambda: idle(llm))

    loop.run(flood())


# A step fails


def test_a_failed_step_fails_its_requests_alone(loop, llm, fault):
    expected = loop.run(last(llm.generate(PROMPT, GREEDY))).outputs[0].token_ids

    async def fail():
        fault.write_text("raise")
        with pytest.raises(EngineError, match="injected") as caught:
            await last(llm.generate(PROMPT, GREEDY))
        assert not isinstance(caught.value, EngineDeadError)
        scores = (await llm.score([1, 2], [[3], [4]], label_token_ids=[5], item_first=True)).scores
        fault.write_text("raise")  # once: each of the two requests passes when it runs again alone
        again = await llm.score([1, 2], [[3], [4]], label_token_ids=[5], item_first=True, cache_salt="again")
        assert again.scores == scores
        assert llm.client.restarts == 0
        await until(lambda: idle(llm))
        return await last(llm.generate(PROMPT, GREEDY))

    assert loop.run(fail()).outputs[0].token_ids == expected
