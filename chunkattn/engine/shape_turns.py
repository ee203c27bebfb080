"""Turns of the texts with slow grammars: a step decodes some of them and delays the rest."""

from __future__ import annotations

from collections.abc import Iterable

from chunkattn.engine.request import Sample

STEP_S = 0.05
"""Seconds of a step for the grammars of texts that are not fast."""


def held_back(decoding: Iterable[Sample]) -> set[Sample]:
    """Return the samples whose grammars leave no room for them in a step.

    The text that has waited longest is decoded first, and at least one text is. A delay changes no token of a text.

    Args:
        decoding: samples that a step may decode.
    """
    slow = [(s.last_token_at, s.number, s) for s in decoding if s.matcher is not None and s.matcher.is_slow]
    slow.sort(key=lambda entry: entry[:2])
    left, held = STEP_S, set[Sample]()
    for place, (*_, sample) in enumerate(slow):
        assert sample.matcher is not None
        left -= sample.matcher.token_s
        if place and left < 0:
            held.add(sample)
    return held
