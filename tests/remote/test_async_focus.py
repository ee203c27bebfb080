"""`focus` under `AsyncLLM`: the answers of `LLM`, and steps that fail and engines that die while documents are chosen."""

import asyncio
import os
import signal

import pytest

from chunkattn import DocumentPrompt, Focus, SamplingParams
from chunkattn.async_llm import AsyncLLM
from chunkattn.errors import EngineDeadError, EngineError
from tests.async_helpers import GREEDY, MANY, OPTIONS, choosing, idle, last, until

pytest_plugins = ["tests.async_faults"]
pytestmark = pytest.mark.ci

TEXTS = ["Ana lives in Oslo.", "Ben lives in Rome.", "", "Figs are sweet.", "Ben lives in Rome."]
FOCUSES = [Focus(1), Focus(2, "only"), Focus(2, "reread", "relevance"), Focus(9, "only", "relevance")]


@pytest.fixture(scope="module")
def llm(loop, fault_file):
    made = loop.run(AsyncLLM.start(**OPTIONS))
    yield made
    loop.run(made.close())


def prompt_of(focus, documents=TEXTS):
    return DocumentPrompt("Read.", documents, "Where does Ana live?", focus)


def test_answers_equal_the_batch_api_in_any_company(loop, llm, demo):
    """All at once, with different choices and prompts without a choice: to the bit."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    prompts = [*map(prompt_of, FOCUSES), *(prompt_of(own, TEXTS[::-1]) for own in FOCUSES), prompt_of(None), "Ana lives in"]
    expected = [demo.generate(prompt, params)[0] for prompt in prompts]

    async def everything():
        return await asyncio.gather(*(last(llm.generate(prompt, params)) for prompt in prompts))

    for own, other in zip(loop.run(everything()), expected, strict=True):
        assert own.outputs == other.outputs
        assert own.prompt_token_ids == other.prompt_token_ids
        assert (own.focus and (own.focus.documents, own.focus.scores)) == (
            other.focus and (other.focus.documents, other.focus.scores)
        )
    loop.run(until(lambda: idle(llm)))


def test_a_step_that_fails_while_documents_are_chosen(loop, llm, fault):
    expected = loop.run(last(llm.generate(prompt_of(1), GREEDY)))

    async def fail():
        await llm.reset_prefix_cache()
        fault.write_text("raise always")
        with pytest.raises(EngineError, match="injected") as caught:
            await last(llm.generate(prompt_of(1), GREEDY))
        fault.unlink()
        assert not isinstance(caught.value, EngineDeadError)
        assert llm.client.restarts == 0
        await until(lambda: idle(llm))
        return await last(llm.generate(prompt_of(1), GREEDY))

    again = loop.run(fail())
    assert again.outputs == expected.outputs
    assert again.focus.scores == expected.focus.scores


def test_an_engine_that_dies_while_documents_are_chosen(loop, llm, fault):
    """The caller learns of it, and the next engine answers."""
    fault.write_text("slow")

    async def die():
        task = asyncio.ensure_future(last(llm.generate(prompt_of(1, MANY), GREEDY, request_id="mine")))
        await until(lambda: choosing(llm))
        os.kill(llm.client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await task
        fault.unlink()
        await until(lambda: llm.is_ready)
        return await last(llm.generate(prompt_of(1, MANY), GREEDY))

    assert loop.run(die()).focus.documents
