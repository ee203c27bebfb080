"""`StoredRows`: the rows of a stored tensor that are a parameter of the decoder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chunkattn.models.spec import DecoderSpec


@dataclass(frozen=True)
class StoredRows:
    """Rows of a stored tensor that are a parameter. The tensor consists of turns, and has some rows of each part in every turn.

    Attributes:
        name: name of the stored tensor.
        first: first row of the part in a turn.
        count: rows of the part in a turn.
        size: rows of a turn.
        turns: number of turns, 1 for parts that follow one another.
    """

    name: str
    first: int
    count: int
    size: int
    turns: int

    @property
    def stored(self) -> int:
        """Return the number of rows of the stored tensor."""
        return self.turns * self.size

    def slices(self, rows: slice) -> list[slice]:
        """Return the rows of the stored tensor that hold rows of the parameter, one slice a turn.

        Args:
            rows: rows of the parameter.
        """
        begin, end, _ = rows.indices(self.turns * self.count)
        found = []
        for turn in range(begin // self.count, -(-end // self.count)):
            inside = max(begin - turn * self.count, 0), min(end - turn * self.count, self.count)
            found.append(slice(*(turn * self.size + self.first + row for row in inside)))
        return found or [slice(self.first, self.first)]

    def of(self, values: np.ndarray) -> np.ndarray:
        """Return the part of all rows of a stored tensor.

        Args:
            values: array whose axis 0 is that of the stored tensor.
        """
        turns = values.reshape(self.turns, self.size, *values.shape[1:])
        return turns[:, self.first : self.first + self.count].reshape(-1, *values.shape[1:])


def stored_rows(spec: DecoderSpec) -> dict[str, StoredRows]:
    """Return the rows of every parameter in the tensor that holds the parameter if modules are stored fused.

    Args:
        spec: shape of the decoder.
    """
    turns, shapes = dict(spec.interleaved), spec.parameters()
    places: dict[str, tuple[str, int, int, int]] = {}
    sizes: dict[str, int] = {}
    for parameter, (rows, *_) in shapes.items():
        module, _, leaf = parameter.rpartition(".")
        stored = spec.stored_module(module)
        name = f"{stored}.{leaf}"
        number = next((count for end, count in turns.items() if stored.endswith(f".{end}")), 1)
        first, count = sizes.get(name, 0), rows // number
        places[parameter] = name, first, count, number
        sizes[name] = first + count
    return {parameter: StoredRows(*place[:3], sizes[place[0]], place[3]) for parameter, place in places.items()}
