"""`FocusJob`: chooses among the documents of prompts by their questions, and composes the prompts that show the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chunkattn.calls.focus_scores import Candidates, get_score
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.job import JobsInTurn
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import GenerateRequest
from chunkattn.errors import CapacityError, RequestError
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.choice import answered, candidates_of, longest


class FocusJob(JobsInTurn):
    """Job that chooses documents for several prompts; see `chunkattn.calls.job.Job`.

    Args:
        frontend: frontend of the engine.
        prompts: parsed prompts. Those without a focus stay as they are.
        salts: salt of each prompt.
        priorities: rank of each prompt.
        weighing: see `GenerateRequest`.
        private: whether each prompt bypasses the cache; None for none.

    Attributes:
        tokens: tokens of all prompts that are scored, cached or not.

    Raises:
        RequestError: a score cannot judge a prompt, or the engine's positions are not `shared`.
        CapacityError: a document with the question cannot fit.
    """

    unit = "documents"

    def __init__(
        self,
        frontend: Frontend,
        prompts: Sequence[ParsedPrompt],
        salts: Sequence[str | None],
        priorities: Sequence[int],
        weighing: tuple[float, float] | None = None,
        private: Sequence[bool] | None = None,
    ) -> None:
        self._prompts, self._gap = prompts, frontend.config.calibration.chunk_position_gap
        by_score: dict[str, list[int]] = {}
        self._listed: dict[int, Candidates] = {}
        for place, prompt in enumerate(prompts):
            if prompt.focus is None:
                continue
            if (strategy := frontend.config.position_strategy) != "shared":
                text = f"focus needs position_strategy 'shared', this engine has {strategy!r}: its documents fit one place only"
                raise RequestError(text, param="focus")
            numbers = candidates_of(prompt.layout)
            alone = private is not None and private[place]
            self._listed[place] = Candidates(prompt, numbers, self._gap, salts[place], priorities[place], weighing, alone)
            by_score.setdefault(prompt.focus.score, []).append(place)
        self._places = list(by_score.values())
        jobs = [get_score(name)(frontend, [self._listed[p] for p in places]) for name, places in by_score.items()]
        super().__init__(jobs)
        self.tokens = sum(job.tokens for job in jobs)

    def result(self) -> list[ParsedPrompt]:
        """Return the prompts, each with the layout that shows its choice, and the choice."""
        found = list(self._prompts)
        for places, job in zip(self._places, self._jobs, strict=True):
            for place, scored in zip(places, job.result(), strict=True):
                numbers = self._listed[place].numbers
                found[place] = answered(self._prompts[place], numbers, scored.values, scored.computed, self._gap)
        return found


def check_longest(limits: EngineLimits, request: GenerateRequest, prompt: ParsedPrompt, gap: int) -> GenerateRequest:
    """Check a request against every limit and return it, with the longest layout that the prompt's focus can compose.

    Args:
        limits: limits of the engine.
        request: request with the prompt's own layout.
        prompt: parsed prompt.
        gap: positions left free between prefix and documents.

    Raises:
        RequestError: as `EngineLimits.check`.
        CapacityError: the prompt can never fit, or fits without the documents that focus reads again.
    """
    focus = prompt.focus
    if focus is None or focus.mode != "only":
        limits.check(request, prompt.names)
    if focus is None:
        return request
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
