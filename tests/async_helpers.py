"""Prompts, parameters and waits that the tests of `AsyncLLM` share."""

import asyncio
import re
from contextlib import aclosing

from chunkattn import SamplingParams
from tests.patience import PATIENCE_S

OPTIONS = {"enable_chunk_aware": True, "kv_cache_memory_bytes": 32 << 20, "max_num_batched_tokens": 512, "warmup": False}
PROMPT = "Read the notes. # # Ana lives in Oslo. # # Ben lives in Rome. # # Where does Ana live?"
GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
MANY = [f"{name} lives in a city of {number} figs. " * 4 for name in ("Ana", "Ben", "Cleo") for number in range(20)]
"""Documents that take several steps to score."""


async def last(outputs):
    """The final output."""
    async with aclosing(outputs):
        async for output in outputs:
            found = output
    return found


async def until(condition, seconds=PATIENCE_S):
    """Wait for a condition, plain or awaitable."""
    async with asyncio.timeout(seconds):
        while not (await found if asyncio.iscoroutine(found := condition()) else found):
            await asyncio.sleep(0.01)


async def idle(llm):
    """Return whether the engine holds nothing for anybody."""
    text = await llm.metrics()
    used = [r'chunkattn_pages{state="used"}', *(f'chunkattn_requests_now{{state="{s}"}}' for s in ("waiting", "running"))]
    return all(f"{name} 0.0" in text for name in used)


async def ended(llm, outcome):
    """Requests that have ended in the engine so, "aborted" because nobody waits for them."""
    found = re.search(rf'^chunkattn_requests_total{{outcome="{outcome}"}} (\S+)$', await llm.metrics(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def choosing(llm):
    """Return whether the request "mine" waits for scores."""
    call, job = llm._generations.get("mine", (None, None))
    return call is not None and job is None and call._outstanding
