"""Choice among the documents of prompts by their questions, before the prompts that show the choice are answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chunkattn.calls.focus_scores import Candidates, get_score
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.job import Flow
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import GenerateRequest
from chunkattn.errors import CapacityError, RequestError
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.choice import answered, candidates_of, longest


def choose_documents(
    frontend: Frontend,
    prompts: Sequence[ParsedPrompt],
    salts: Sequence[str | None],
    priorities: Sequence[int],
    weighing: tuple[float, float] | None,
    private: Sequence[bool],
) -> tuple[int, Flow[list[ParsedPrompt]]]:
    """Check the prompts that choose documents, and return the tokens that are scored, cached or not, with the flow.

    The flow returns the prompts, each with the layout that shows its choice, and the choice.

    Args:
        frontend: frontend of the engine.
        prompts: parsed prompts. Those without a focus stay as they are.
        salts: salt of each prompt.
        priorities: rank of each prompt.
        weighing: see `GenerateRequest`.
        private: whether each prompt bypasses the cache.

    Raises:
        RequestError: a score cannot judge a prompt, or the engine's positions are not `shared`.
        CapacityError: a document with the question cannot fit.
    """
    by_score: dict[str, dict[int, Candidates]] = {}
    for place, prompt in enumerate(prompts):
        if prompt.focus is None:
            continue
        if (strategy := frontend.config.position_strategy) != "shared":
            text = f"focus needs position_strategy 'shared', this engine has {strategy!r}: its documents fit one place only"
            raise RequestError(text, param="focus")
        listed, numbers = by_score.setdefault(prompt.focus.score, {}), candidates_of(prompt.layout)
        how = salts[place], priorities[place], weighing, private[place]
        listed[place] = Candidates(prompt, numbers, frontend.gap, *how)
    jobs = [(listed, get_score(name)(frontend, list(listed.values()))) for name, listed in by_score.items()]

    def flow() -> Flow[list[ParsedPrompt]]:
        shown = list(prompts)
        for listed, job in jobs:
            scores = yield from job.flow()
            for (place, own), scored in zip(listed.items(), scores, strict=True):
                shown[place] = answered(own.prompt, own.numbers, scored.values, scored.computed, frontend.gap)
        return shown

    return sum(job.tokens for _, job in jobs), flow()


def check_longest(limits: EngineLimits, request: GenerateRequest, prompt: ParsedPrompt, gap: int) -> GenerateRequest:
    """Check a request against every limit and return it, with the longest layout that the prompt's focus can compose.

    Args:
        limits: limits of the engine.
        request: request with the prompt's own layout.
        prompt: parsed prompt with a focus.
        gap: positions left free between prefix and documents.

    Raises:
        RequestError: as `EngineLimits.check`.
        CapacityError: the prompt can never fit, or fits without the documents that focus reads again.
    """
    focus = prompt.focus
    assert focus is not None
    if focus.mode != "only":
        limits.check(request, prompt.names)
    shown = longest(prompt, gap)
    composed = replace(request, layout=shown.layout)
    try:
        limits.check(composed, shown.names)
    except CapacityError as error:
        if focus.mode == "only":
            raise
        count = min(focus.top_n, len(candidates_of(prompt.layout)))
        documents = f"{count} {prompt.names.chunk}{'s' * (count > 1)}"
        text = f"focus reads up to {documents} again: {error}; choose fewer or take the mode 'only'"
        raise CapacityError(text, param="focus") from None
    return composed
