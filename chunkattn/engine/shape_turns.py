"""Turns of the texts whose grammars are slow: a step has room for some of them, and the others wait for a later step."""

from __future__ import annotations

from collections.abc import Iterable

from chunkattn.engine.request import Sample

FAST_S = 0.001
"""Seconds for a token of a text that never waits for its turn."""
STEP_S = 0.05
"""Seconds of a step for the grammars of texts that are not fast."""


def held_back(decoding: Iterable[Sample]) -> set[Sample]:
    """Return the samples whose grammars leave no room for them in a step.

    The text that has taken the least time so far goes first, and one goes in any case. Waiting changes no token of a text.

    Args:
        decoding: samples that a step may decode.
    """
    slow = [(s.matcher.spent_s, s.number, s) for s in decoding if s.matcher is not None and s.matcher.token_s > FAST_S]
    slow.sort(key=lambda entry: entry[:2])
    left, held = STEP_S, set[Sample]()
    for place, (*_, sample) in enumerate(slow):
        assert sample.matcher is not None
        left -= sample.matcher.token_s
        if place and left < 0:
            held.add(sample)
    return held
