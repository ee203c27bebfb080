"""Sweep over workloads and rates against one server."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from chunkattn.errors import ChunkAttnError, ConfigError, EngineError
from chunkattn.tools.load.answers import Sender
from chunkattn.tools.load.client import Client
from chunkattn.tools.load.open_loop import OK, Ask, Record, poisson, run
from chunkattn.tools.load.summary import Objective, Summary, summarize
from chunkattn.tools.load.workloads import LABELLED, LABELS, Source, Texts, WireForm, Workload


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """Workloads, rates and limits of a sweep.

    Attributes:
        workloads: workloads, one after the other.
        rates: offered requests per second, for each workload.
        seconds: length of the arrivals at one rate in seconds.
        requests: limit on the requests at one rate; by default none.
        seed: seed of arrivals and texts. By default random: a server has the texts of a seed it has seen cached.
        max_in_flight: requests without an answer that end the arrivals.
        drain_s: longest wait in seconds for answers after the last arrival.
        warm_up_s: longest wait in seconds for a request before the measurement.
        max_lag_ms: delay of this client in milliseconds beyond which a note says so.
        objective: bounds on a good request.
    """

    workloads: tuple[Workload, ...]
    rates: tuple[float, ...]
    seconds: float = 30.0
    requests: int | None = None
    seed: int | None = None
    max_in_flight: int = 512
    drain_s: float = 60.0
    warm_up_s: float = 300.0
    max_lag_ms: float = 50.0
    objective: Objective


async def served_model(client: Client) -> str:
    """Return the first model that the server lists.

    Raises:
        ConfigError: the server refuses, or lists none.
        EngineError: the server cannot be reached, or fails.
    """
    try:
        return str((await client.json("/v1/models"))["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ConfigError("GET /v1/models lists no model; name one with --model") from None


async def is_ours(client: Client) -> bool:
    """Return whether the server lists a model of this project's."""
    try:
        return any(model.get("owned_by") == "chunkattn" for model in (await client.json("/v1/models"))["data"])
    except (ChunkAttnError, KeyError, TypeError, AttributeError):
        return False


async def tokenize(client: Client, model: str, text: str) -> list[int]:
    """Return the token ids of a text, without special tokens, by the server's `/tokenize`.

    Raises:
        ConfigError: the server cannot be reached or has no such route.
    """
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    answer = await client.json("/tokenize", body, advice="; name the model's tokenizer with --tokenizer")
    try:
        return [int(token) for token in answer["tokens"]]
    except (KeyError, TypeError, ValueError):
        raise ConfigError("POST /tokenize gave no tokens; name the model's tokenizer with --tokenizer") from None


async def tokenizer_of(client: Client, model: str, name: str | None) -> Callable[[str], Awaitable[list[int]]]:
    """Return a function from a text to its token ids, without special tokens.

    Args:
        client: client of the server, whose `/tokenize` is asked where no tokenizer is named.
        model: name of the served model.
        name: folder, GGUF file or hub id of a tokenizer; None asks the server.
    """
    if name is None:
        return partial(tokenize, client, model)
    from chunkattn.models.loader import load_model_tokenizer

    local = await asyncio.to_thread(load_model_tokenizer, name)

    async def tokens(text: str) -> list[int]:
        return list(local(text, add_special_tokens=False).input_ids)

    return tokens


async def label_ids(tokens: Callable[[str], Awaitable[list[int]]]) -> tuple[int, ...]:
    """Return one token id for each of `LABELS`, the last of its text."""
    ids_of_labels = tuple([ids[-1] for label in LABELS if (ids := await tokens(label))])
    if len(set(ids_of_labels)) != len(LABELS):
        raise ConfigError(f"the tokenizer does not tell {' and '.join(LABELS)} apart; choose another --scoring")
    return ids_of_labels


async def sweep(
    client: Client,
    plan: LoadPlan,
    form: WireForm,
    tokens: Callable[[str], Awaitable[list[int]]],
    progress: Callable[[str], None],
) -> AsyncIterator[Summary]:
    """Yield the figures of every workload at every rate.

    Before each workload, requests that are not measured cover its documents. Before each rate, one more shows that the
    server has recovered.

    Args:
        client: client of the server.
        plan: workloads, rates and limits.
        form: wire format, without the labels' ids.
        tokens: returns the token ids of a text.
        progress: receives a line for each step.

    Raises:
        ConfigError: the server refuses a request, or its tokenizer cannot be asked.
        EngineError: the server gives no right answer before the first measurement.
    """
    progress("measuring the tokens of words")
    texts = await Texts.measured(tokens)
    if form.scoring in LABELLED and any(workload.is_rerank for workload in plan.workloads):
        form = replace(form, label_ids=await label_ids(tokens))
    for workload in plan.workloads:
        source = Source(workload, form, texts, plan.seed)
        ask = Sender(client, form.path(workload), workload.count if workload.is_rerank else None)
        progress(f"{workload.name}: warming up")
        for body in source.warm_up():
            await _warm_up(ask, body, workload, plan.warm_up_s)
        for rate in plan.rates:
            arrivals = poisson(rate, plan.seconds, plan.seed, plan.requests)
            progress(f"{workload.name} at {rate:g}/s: {len(arrivals)} requests in {arrivals[-1] if arrivals else 0:.0f} s")
            await _warm_up(ask, next(source), workload, plan.warm_up_s)
            made = await run(arrivals, source, ask, max_in_flight=plan.max_in_flight, drain_s=plan.drain_s)
            yield summarize(made, workload.name, rate, not workload.is_rerank, plan.objective, plan.max_lag_ms)


async def _warm_up(ask: Ask, body: bytes, workload: Workload, seconds: float) -> None:
    record = Record(time.perf_counter())
    try:
        async with asyncio.timeout(seconds):
            await ask(body, record)
    except TimeoutError:
        raise EngineError(f"{workload.name}: a request alone had no answer within {seconds:g} s (--warm-up-s)") from None
    if record.status != OK:
        raise ConfigError(f"{workload.name}: a request alone failed, {record.status}: {record.message}")


def random_seed() -> int:
    """Return a new seed: a server that has seen a seed's texts has them cached."""
    return random.SystemRandom().randrange(1 << 31)
