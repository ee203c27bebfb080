"""Policies of other routers, to compare the gateway's with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from heapq import nsmallest

from chunkattn.gateway.policy import Policy, Work
from chunkattn.schema.piece_keys import Keys

_MOST_READ = 256
_MOST_NAMED = 16


class PrefixPolicy(Policy):
    """Sends a request to the replica that was sent the longest equal beginning.

    Among equal replicas, the one with the fewest bytes queued comes first. A document behind other documents is another piece.
    """

    def rank(self, keys: Keys, names: Sequence[str]) -> list[str]:
        """Return replicas, the best first; see `Policy.rank`."""
        chain = [key for key, _ in _chained(keys).pieces[:_MOST_READ]]
        if len(names) > _MOST_NAMED:
            names = self._holders(reversed(chain), names, self._sample(names))

        def cost(name: str) -> tuple[int, int, float]:
            holdings = self._replicas.get(name)
            if holdings is None:
                return 0, 0, self._random.random()
            longest = next((place for place, key in enumerate(chain) if key not in holdings), len(chain))
            return -longest, holdings.work, self._random.random()

        return sorted(names, key=cost)

    def sent(self, name: str, keys: Keys, now: float) -> Work:
        """Record that a request goes to a replica; see `Policy.sent`."""
        return super().sent(name, _chained(keys), now)

    def missing(self, name: str, keys: Keys) -> int:
        """Return the bytes that a replica does not hold; see `Policy.missing`."""
        return super().missing(name, _chained(keys))


def _chained(keys: Keys) -> Keys:
    """Return the keys of pieces that depend on all pieces before them."""
    made, before = [], b""
    for key, size in keys.pieces:
        before = blake2b(key.to_bytes(8, "big") + before, digest_size=8).digest()
        made.append((int.from_bytes(before, "big"), size))
    return Keys(tuple(made), keys.rest)


class RoundRobinPolicy(Policy):
    """Sends requests to one replica after the other."""

    _turn = -1

    def rank(self, keys: Keys, names: Sequence[str]) -> list[str]:
        """Return replicas, the best first; see `Policy.rank`."""
        if not names:
            return []
        self._turn = (self._turn + 1) % len(names)
        return [names[(self._turn + place) % len(names)] for place in range(min(len(names), _MOST_NAMED))]


class PowerOfTwoPolicy(Policy):
    """Sends a request to the replica of two random ones that has fewer requests queued."""

    def __init__(self, most_pieces: int = 1 << 21, seed: int = 0) -> None:
        super().__init__(most_pieces, seed)
        self._running: Counter[str] = Counter()

    def rank(self, keys: Keys, names: Sequence[str]) -> list[str]:
        """Return replicas, the best first; see `Policy.rank`."""
        first = self._sample(names)
        return nsmallest(2, first[:2], key=self._running.__getitem__) + first[2:]

    def sent(self, name: str, keys: Keys, now: float) -> Work:
        """Record that a request goes to a replica; see `Policy.sent`."""
        self._running[name] += 1
        return super().sent(name, keys, now)

    def done(self, name: str, work: Work, *, computed: bool = True) -> None:
        """Record that a request has ended; see `Policy.done`."""
        self._running[name] -= 1
        super().done(name, work, computed=computed)


POLICIES: dict[str, type[Policy]] = {
    "document": Policy,
    "prefix": PrefixPolicy,
    "round_robin": RoundRobinPolicy,
    "power_of_two": PowerOfTwoPolicy,
}
"""Policies by name, the gateway's own first."""
