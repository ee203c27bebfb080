"""Regular expressions for generated texts whose allowed tokens are known without a grammar's library."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chunkattn.structured_outputs import StructuredOutputsParams
from tests.fuzz.rig import VOCABULARY

_FREE = [f"w{i}" for i in range(2, 10)] + ["A", "B", "C", "D", "yes", "no", "#"]
"""Words that begin with no other word of the vocabulary, and that no longer word is needed to end."""


@dataclass(frozen=True)
class Pattern:
    """Texts of a number of words, each of the words of its place; the places repeat.

    Attributes:
        words: words of each place.
        least: fewest words.
        most: most words.
    """

    words: tuple[tuple[str, ...], ...]
    least: int
    most: int

    @property
    def shape(self) -> StructuredOutputsParams:
        """Return the shape of the texts."""
        places = [f"({'|'.join(self.words[n % len(self.words)])})" for n in range(self.most)]
        regex = "".join(places[: self.least])
        rest = ""
        for place in reversed(places[self.least :]):
            rest = f"({place}{rest})?"
        return StructuredOutputsParams(regex=regex + rest)

    def allowed(self, length: int) -> np.ndarray:
        """Return which tokens the first `length` places allow, bool `[length, V]`."""
        found = np.zeros((length, len(VOCABULARY)), bool)
        for place in range(length):
            found[place, [VOCABULARY.index(word) for word in self.words[place % len(self.words)]]] = True
        return found


_MADE: dict[StructuredOutputsParams, Pattern] = {}


def draw(rng: np.random.Generator, most: int) -> StructuredOutputsParams:
    """Return a random shape of texts of at most about `most` words."""
    words = [
        tuple(sorted(rng.choice(_FREE, int(rng.integers(1, 6)), replace=False).tolist())) for _ in range(rng.integers(1, 4))
    ]
    longest = int(rng.integers(1, min(most, 20) + 4))
    made = Pattern(tuple(words), int(rng.integers(1, longest + 1)), longest)
    _MADE[made.shape] = made
    return made.shape


def pattern_of(shape: StructuredOutputsParams) -> Pattern:
    """Return the pattern of a shape from `draw`."""
    return _MADE[shape]
