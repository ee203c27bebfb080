"""`FocusJob`: chooses among the documents of prompts by their questions, and composes the prompts that show the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chunkattn.calls.focus_scores import Candidates, Scored, get_score
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.job import JobsInTurn
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import GenerateRequest
from chunkattn.errors import CapacityError, RequestError
from chunkattn.layout import ChunkLayout
from chunkattn.outputs import FocusOutput
from chunkattn.parsers import ParsedPrompt
from chunkattn.rope.positions import make_layout


def candidates_of(layout: ChunkLayout) -> list[int]:
    """Return the numbers of the documents to choose from: the first of each content, none empty.

    Args:
        layout: layout of the prompt.
    """
    return [number for number, length in enumerate(layout.chunk_lens) if length and number not in layout.repeats]


def choose(layout: ChunkLayout, numbers: Sequence[int], scores: Sequence[float], top_n: int) -> list[int]:
    """Return the numbers of the documents with the highest scores, the best first.

    Of equal scores, the document with the lower hash of its content comes first, so that the caller's order has no influence.

    Args:
        layout: layout of the prompt.
        numbers: numbers of the documents to choose from.
        scores: score of each of them.
        top_n: number of documents to choose.
    """
    by_number = dict(zip(numbers, scores, strict=True))
    return sorted(numbers, key=lambda number: (-by_number[number], layout.chunk_digests[number]))[:top_n]


def compose(layout: ChunkLayout, chosen: Sequence[int], mode: str, gap: int) -> ChunkLayout:
    """Return the layout of a prompt that shows a choice of its documents, under `shared` positions.

    `"reread"` keeps all documents and puts the chosen ones before the question, as the beginning of its part, in canonical
    order. `"only"` keeps the chosen documents alone, in the caller's order, which has no influence on the answer.

    Args:
        layout: layout of the prompt.
        chosen: numbers of the chosen documents; none returns the layout.
        mode: one of `chunkattn.focus.MODES`.
        gap: positions left free between prefix and documents.
    """
    if not chosen:
        return layout
    prefix, *chunks, question = (layout.part(segment).tolist() for segment in layout.segments)
    if mode == "only":
        return make_layout(prefix, [chunks[number] for number in sorted(chosen)], question, "shared", gap)
    again = [token for number in _canonical(layout, chosen) for token in chunks[number]]
    return make_layout(prefix, chunks, [*again, *question], "shared", gap)


class FocusJob(JobsInTurn):
    """Job that chooses documents for several prompts; see `chunkattn.calls.job.Job`.

    Args:
        frontend: frontend of the engine.
        prompts: parsed prompts. Those without a focus stay as they are.
        salts: salt of each prompt.
        priorities: rank of each prompt.
        weighing: see `GenerateRequest`.

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
            self._listed[place] = Candidates(prompt, numbers, self._gap, salts[place], priorities[place], weighing)
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
                found[place] = self._composed(self._listed[place], scored)
        return found

    def _composed(self, listed: Candidates, scored: Scored) -> ParsedPrompt:
        prompt, layout, focus = listed.prompt, listed.prompt.layout, listed.prompt.focus
        assert focus is not None
        chosen = choose(layout, listed.numbers, scored.values, focus.top_n)
        by_number: dict[int, float] = dict(zip(listed.numbers, scored.values, strict=True))
        first = {layout.chunk_digests[number]: number for number in listed.numbers}
        scores = [by_number.get(first.get(digest, -1)) for digest in layout.chunk_digests]
        shown = sorted(chosen) if focus.mode == "only" else _canonical(layout, chosen)
        output = FocusOutput(chosen, scores, focus.mode, focus.score, scored.computed, shown)
        return replace(_shown(prompt, chosen, self._gap), chosen=output)


def longest(prompt: ParsedPrompt, gap: int) -> ParsedPrompt:
    """Return a prompt with the longest layout that its focus can compose; a prompt without focus as it is.

    Args:
        prompt: parsed prompt.
        gap: positions left free between prefix and documents.
    """
    return _of_lengths(prompt, gap, descending=True)


def shortest(prompt: ParsedPrompt, gap: int) -> ParsedPrompt:
    """Return a prompt with the shortest layout that its focus can compose; a prompt without focus as it is.

    Args:
        prompt: parsed prompt.
        gap: positions left free between prefix and documents.
    """
    return _of_lengths(prompt, gap, descending=False)


def _of_lengths(prompt: ParsedPrompt, gap: int, *, descending: bool) -> ParsedPrompt:
    if prompt.focus is None:
        return prompt
    numbers = sorted(candidates_of(prompt.layout), key=prompt.layout.chunk_lens.__getitem__, reverse=descending)
    return _shown(prompt, numbers[: prompt.focus.top_n], gap)


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


def _shown(prompt: ParsedPrompt, chosen: Sequence[int], gap: int) -> ParsedPrompt:
    """Return the prompt that shows a choice, with its layout, its texts and its names."""
    assert prompt.focus is not None
    layout, texts, names, mode = prompt.layout, prompt.texts, prompt.names, prompt.focus.mode
    if not chosen:
        return prompt
    if mode == "only":
        kept = sorted(chosen)
        names = names._replace(listed=[names.of(number) for number in kept])
        if texts is not None:
            texts = (texts[0], *(texts[1 + number] for number in kept), texts[-1])
    else:
        again = _canonical(layout, chosen)
        names = names._replace(last=f"the {names.last} behind them")
        if texts is not None:
            texts = (*texts[:-1], "".join([*(texts[1 + number] for number in again), texts[-1]]))
    return replace(prompt, layout=compose(layout, chosen, mode, gap), texts=texts, names=names)


def _canonical(layout: ChunkLayout, chosen: Sequence[int]) -> list[int]:
    """Return the numbers of chosen documents, sorted by a hash of their contents."""
    return sorted(chosen, key=layout.chunk_digests.__getitem__)
