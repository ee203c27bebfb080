"""The order of a comparison: first answers, then every condition, then all questions under load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from chunkattn.errors import ChunkAttnError, ConfigError
from chunkattn.tools.flips.questions import Ask, FlipPlan, Generation, Kind, Scoring
from chunkattn.tools.flips.replies import Tally
from chunkattn.tools.load.client import Client, MissingRoute, RefusedRequest
from chunkattn.tools.load.workloads import Texts

FIRST = "the first answers"
_PAUSE_S = 0.1
"""Time before a background request follows one that failed."""


async def measure(
    client: Client, plan: FlipPlan, texts: Texts, progress: Callable[[str], None], note: Callable[[str], None]
) -> AsyncIterator[Tally]:
    """Yield the comparison of every condition with the first answers.

    Args:
        client: client of the server.
        plan: questions and conditions.
        texts: maker of texts.
        progress: receives a line for each step.
        note: receives what a reader of the figures must know: kinds of questions that are left out, failures of the load.

    Raises:
        ConfigError: the server has none of the routes, or refuses a request.
        EngineError: the server fails, or gives an answer that cannot be read.
    """
    ask = partial(client.json, timeout_s=plan.timeout_s)
    chosen: list[Kind] = [Scoring(ask, plan, texts)] if plan.scoring else []
    chosen += [Generation(ask, plan, texts)] if plan.generation else []
    kinds, missing = [], []
    for kind in chosen:
        progress(f"{kind.name}: {FIRST}")
        try:
            await _named(kind, FIRST, kind.first())
            kinds.append(kind)
        except MissingRoute as error:
            missing.append(f"{error}; choose another {kind.option}")
    if not kinds:
        raise ConfigError(" | ".join(missing))
    for line in missing:
        note(f"left out: {line}")
    for kind in kinds:
        for condition, ask_round in kind.conditions():
            tally = Tally(kind.name, condition)
            for _ in range(plan.rounds):
                await _named(kind, condition, ask_round(tally))
            yield tally
    tallies = [Tally(kind.name, "under load") for kind in kinds]
    async with _loaded(ask, kinds, plan, note):
        for _ in range(plan.rounds):
            for kind, tally in zip(kinds, tallies, strict=True):
                await _named(kind, tally.condition, kind.loaded(tally))
    for tally in tallies:
        yield tally


async def _named(kind: Kind, condition: str, work: Awaitable[None]) -> None:
    """Await a step. Its error names the kind of question, the condition and the option to change."""
    try:
        await work
    except ChunkAttnError as error:
        advice = ""
        if isinstance(error, RefusedRequest):
            choose = f"choose another {kind.option}, or none"
            advice = f"; {choose}" if condition == FIRST else f"; lower --company or --load, or {choose}"
        raise type(error)(f"{kind.name}, {condition}: {error}{advice}") from None


@asynccontextmanager
async def _loaded(ask: Ask, kinds: Sequence[Kind], plan: FlipPlan, note: Callable[[str], None]) -> AsyncIterator[None]:
    """Keep `plan.load` other requests under way. The block begins when one was answered or has failed."""
    began, answered, failures = asyncio.Event(), 0, []

    async def work(number: int) -> None:
        nonlocal answered
        rng = random.Random(f"{plan.seed} load {number}")
        while True:
            try:
                await ask(*rng.choice(kinds).other(rng))
                answered += 1
            except ChunkAttnError as error:
                failures.append(str(error))
                await asyncio.sleep(_PAUSE_S)
            finally:
                began.set()

    tasks = [asyncio.create_task(work(number)) for number in range(plan.load)]
    try:
        await began.wait()
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failures:
        note(f"{len(failures)} of {len(failures) + answered} requests of the load failed, first: {failures[0]}")
