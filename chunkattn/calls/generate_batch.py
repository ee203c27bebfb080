"""`generate_batch`: the job of many prompts. Those with a focus are answered before later documents evict theirs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

from chunkattn.calls.frontend import Frontend, check_priorities
from chunkattn.calls.generate import COST, GenerateJob, generate_job
from chunkattn.calls.job import Job, JobsInTurn
from chunkattn.config import SamplingParams
from chunkattn.engine.limits import EngineLimits
from chunkattn.outputs import RequestOutput
from chunkattn.parsers import ParsedPrompt

_POOL_SHARE = 0.75
"""Share of the KV pool that the prompts of one group may take; the rest is for the reads of their questions."""


class GroupsInTurn(JobsInTurn):
    """Job that runs groups of prompts one after another; see `chunkattn.calls.job.Job`.

    Args:
        jobs: job of each group.
        groups: places of each group's prompts in the call.
    """

    unit = "prompts"

    def __init__(self, jobs: Sequence[GenerateJob], groups: Sequence[Sequence[int]]) -> None:
        super().__init__(jobs)
        self._groups = groups

    def result(self) -> list[RequestOutput]:
        """Return one output for each prompt, in the order of the call."""
        places = [place for group in self._groups for place in group]
        outputs = dict(zip(places, (output for job in self._jobs for output in job.result()), strict=True))
        return [outputs[place] for place in range(len(places))]


def generate_batch(
    frontend: Frontend,
    prompts: Sequence[ParsedPrompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    priority: int | Sequence[int] = 0,
    *,
    cache_salt: str | None = None,
) -> Job[list[RequestOutput]]:
    """Check the arguments of `generate`, and return the job of all prompts.

    A focus scores all documents of a prompt before it answers. If the documents of all prompts exceed the KV pool, prompts run
    in groups that fit, so that an answer finds its documents in the cache.

    Args:
        frontend: frontend of the engine.
        prompts: parsed prompts.
        params: see `generate_job`.
        priority: see `generate_job`.
        cache_salt: see `generate_job`.

    Raises:
        RequestError: as `generate_job`.
        CapacityError: as `generate_job`.
    """
    if all(prompt.focus is None for prompt in prompts):
        return generate_job(frontend, prompts, params, priority, cache_salt=cache_salt)
    listed = frontend.sampling(params, len(prompts))
    ranks = check_priorities(priority, len(prompts))
    order = sorted(range(len(prompts)), key=ranks.__getitem__)
    groups = list(_groups(prompts, order, frontend.limits))
    jobs = [
        generate_job(
            frontend,
            [prompts[n] for n in group],
            None if params is None else [listed[n] for n in group],
            [ranks[n] for n in group],
            cache_salt=cache_salt,
        )
        for group in groups
    ]
    tokens, whole = sum(job.tokens for job in jobs), prompts[0].names.whole(prompts[0].layout)
    frontend.limits.check_tokens(tokens, f"{COST}, with all that focus scores,", whole)
    return GroupsInTurn(jobs, groups)


def _groups(prompts: Sequence[ParsedPrompt], order: Iterable[int], limits: EngineLimits) -> Iterator[list[int]]:
    """Yield groups of prompts whose parts fit `_POOL_SHARE` of the pool together; a longer prompt is a group of its own."""
    room = _POOL_SHARE * limits.num_pages
    group: list[int] = []
    held: set[Hashable] = set()
    used = 0
    for place in order:
        parts = _parts(prompts[place], place)
        new = sum(-(-parts[part] // limits.block_size) for part in parts.keys() - held)
        if group and used + new > room:
            yield group
            group, held = [], set()
            used, new = 0, sum(-(-length // limits.block_size) for length in parts.values())
        group.append(place)
        held |= parts.keys()
        used += new
    yield group


def _parts(prompt: ParsedPrompt, place: int) -> dict[Hashable, int]:
    """Return the tokens of each part that the scores of a prompt leave in the cache for its answer, by what shares them."""
    if prompt.focus is None:
        return {}
    layout = prompt.layout
    prefix = (prompt.cache_salt, layout.part(layout.segments[0]).tobytes())
    parts: dict[Hashable, int] = {prefix: layout.prefix_len, place: layout.question_len}
    parts.update(((prefix, digest), length) for digest, length in zip(layout.chunk_digests, layout.chunk_lens, strict=True))
    return parts
