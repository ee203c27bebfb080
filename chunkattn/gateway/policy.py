"""`Policy`: chooses the replica of a request. It knows no network and no engine, so gateway and simulator share it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chunkattn.gateway.holdings import Holdings
from chunkattn.schema.piece_keys import Keys

_FEW = 16
"""Replicas up to which all are compared. Of more, a decision compares holders, owners and a sample."""
_MOST_COMPARED = 64
"""Replicas that a decision compares at most."""
_MOST_READ = 256
"""Pieces that a decision reads at most, the largest ones."""
_MOST_OWNERS = 1 << 17
"""Owners kept from earlier decisions."""
_REQUEST = 256
"""Work of a request beside its pieces, in bytes of text: an answer is about as long."""
_QUEUED = 0.25
"""Weight of queued work against missing bytes. Below 1, because an engine computes queued requests together."""


class Work(NamedTuple):
    """Work that a request added to the queue of a replica; `Policy.done` takes it off.

    Attributes:
        size: bytes of text to compute.
        serial: record to which the work was added; -1 for none.
        new: keys of the pieces that the replica did not hold.
        sent: time of the request.
    """

    size: int = 0
    serial: int = -1
    new: tuple[int, ...] = ()
    sent: float = 0.0


class Policy:
    """Record of what replicas hold and do, and the rule that ranks them for a request.

    A request goes where the least is to do: the missing bytes of its pieces, and a quarter of the bytes queued there. Among
    equal replicas, the owner of most bytes of the pieces that no replica holds comes first, then a random one.

    All times are of one clock of the caller. Time and memory are bounded: a decision compares at most 64 replicas by at most
    256 pieces, and the record has at most `most_pieces` pieces.

    Args:
        most_pieces: limit on the pieces recorded for all replicas together, of about 450 bytes of memory each.
        seed: seed of random choices.
    """

    def __init__(self, most_pieces: int = 1 << 21, seed: int = 0) -> None:
        self._most_pieces = most_pieces
        self._random = random.Random(seed)
        self._replicas: dict[str, Holdings] = {}
        self._where: dict[int, dict[str, None]] = {}
        self._owners: dict[int, str] = {}
        self._names: list[str] = []
        self._seeds = np.zeros(0, np.uint64)

    # Replicas

    def set_replicas(self, names: Iterable[str]) -> None:
        """Set the replicas that exist. A new one begins empty, and so does one that left and comes back.

        Args:
            names: names of all replicas, ready or not.
        """
        given = dict.fromkeys(names)
        if given.keys() == self._replicas.keys():
            return
        self._owners.clear()
        for name in self._replicas.keys() - given.keys():
            self._replicas.pop(name).clear()
        most = self._most_pieces // max(len(given), 1)
        for name in given:
            holdings = self._replicas.setdefault(name, Holdings(name, self._where, most))
            holdings.most_pieces = most
            holdings.shrink()
        self._names = list(given)
        self._seeds = np.array([_seed(name) for name in given], np.uint64)

    def set_capacity(self, name: str, size_bytes: float) -> None:
        """Set the bytes of text that the cache of a replica holds. Until it is set, no piece is taken for evicted.

        Args:
            name: the replica; unknown names have no effect, here and below.
            size_bytes: bytes of text.
        """
        if (holdings := self._replicas.get(name)) is not None:
            holdings.capacity = size_bytes
            holdings.shrink()

    def owner(self, key: int) -> str:
        """Return the replica that owns a piece by rendezvous hashing: gateways that share nothing agree on it.

        Args:
            key: key of the piece.

        Raises:
            LookupError: there is no replica.
        """
        if not self._names:
            raise LookupError("there is no replica")
        owner = self._owners.get(key)
        if owner is None:
            if len(self._owners) >= _MOST_OWNERS:
                self._owners.clear()
            owner = self._owners[key] = self._names[int(_weights(self._seeds, key).argmax())]
        return owner

    # Requests

    def rank(self, keys: Keys, names: Sequence[str]) -> list[str]:
        """Return replicas for a request, the best first: at least three, if there are as many.

        Args:
            keys: keys of the request.
            names: distinct names of the replicas to choose from; of unknown ones, nothing is held and nothing is queued.
        """
        pieces = keys.pieces
        if len(pieces) > _MOST_READ:
            pieces = tuple(nlargest(_MOST_READ, pieces, key=lambda piece: piece[1]))
        votes: dict[str, int] = {}
        for key, size in pieces if self._names else ():
            if key not in self._where:
                owner = self.owner(key)
                votes[owner] = votes.get(owner, 0) + size
        if len(names) > _FEW:
            held = sorted((key for key, _ in pieces if key in self._where), key=lambda key: len(self._where[key]))
            owners = nlargest(_FEW, votes, key=votes.__getitem__)
            names = self._holders(held, names, [*owners, *self._sample(names)])
        total = sum([size for _, size in pieces])

        def cost(name: str) -> tuple[float, int, float]:
            holdings = self._replicas.get(name)
            to_do = total if holdings is None else holdings.missing(pieces) + _QUEUED * holdings.work
            return to_do, -votes.get(name, 0), self._random.random()

        return sorted(names, key=cost)

    def sent(self, name: str, keys: Keys, now: float) -> Work:
        """Record that a request goes to a replica, and return its work.

        Args:
            name: the replica.
            keys: keys of the request.
            now: time.
        """
        holdings = self._replicas.get(name)
        if holdings is None:
            return Work()
        new = [(key, size) for key, size in keys.pieces if key not in holdings]
        work = Work(_REQUEST + keys.rest + sum([size for _, size in new]), holdings.serial, tuple([k for k, _ in new]), now)
        holdings.add(reversed(keys.pieces), now)  # engines evict what comes last first
        holdings.work += work.size
        return work

    def done(self, name: str, work: Work, *, computed: bool = True) -> None:
        """Record that a request has ended.

        Args:
            name: the replica.
            work: result of `sent`.
            computed: whether the replica has taken the request; otherwise its new pieces are dropped.
        """
        holdings = self._replicas.get(name)
        if holdings is None or holdings.serial != work.serial:
            return
        holdings.work -= work.size
        if not computed:
            for key in work.new:
                holdings.forget(key, unless_after=work.sent)

    # Corrections

    def note(self, name: str, pieces: Iterable[tuple[int, int]], now: float) -> None:
        """Record what all gateways have sent to a replica.

        Args:
            name: the replica.
            pieces: key and size of each piece, the one to be evicted last at the end.
            now: time.
        """
        if (holdings := self._replicas.get(name)) is not None:
            holdings.add(pieces, now)

    def clear(self, name: str) -> None:
        """Drop what a replica held: its engine has restarted. Its queue stays, until `done` is called for each request.

        Args:
            name: the replica.
        """
        if (holdings := self._replicas.get(name)) is not None:
            holdings.clear()

    def forget(self, keys: Iterable[int]) -> None:
        """Drop pieces from the records of all replicas: a document was deleted.

        Args:
            keys: keys of the pieces.
        """
        for key in keys:
            for name in list(self._where.get(key, ())):
                self._replicas[name].forget(key)

    # Views

    def missing(self, name: str, keys: Keys) -> int:
        """Return the bytes of a request's pieces that a replica does not hold.

        Args:
            name: the replica.
            keys: keys of the request.
        """
        holdings = self._replicas.get(name)
        return sum([size for _, size in keys.pieces]) if holdings is None else holdings.missing(keys.pieces)

    def queued(self, name: str) -> int:
        """Return the bytes of text queued at a replica.

        Args:
            name: the replica.
        """
        holdings = self._replicas.get(name)
        return 0 if holdings is None else holdings.work

    def num_pieces(self, name: str) -> int:
        """Return the number of pieces recorded for a replica.

        Args:
            name: the replica.
        """
        holdings = self._replicas.get(name)
        return 0 if holdings is None else len(holdings)

    # Replicas to compare

    def _sample(self, names: Sequence[str]) -> list[str]:
        """Return a random sample of replicas; all of a few."""
        return self._random.sample(names, min(len(names), _FEW // 2))

    def _holders(self, keys: Iterable[int], names: Sequence[str], others: Iterable[str]) -> list[str]:
        """Return a bounded number of replicas to compare: some others, and holders of pieces as long as there is room.

        Args:
            keys: keys of pieces, the most telling first. Of each, the holders that were sent it least recently are taken.
            names: replicas to choose from.
            others: replicas to compare in any case, if they are among `names`.
        """
        allowed = set(names)
        found = {name: None for name in others if name in allowed}
        for key in keys:
            if len(found) >= _MOST_COMPARED:
                break
            found.update((name, None) for name in islice(self._where.get(key, ()), _FEW) if name in allowed)
        return list(islice(found, _MOST_COMPARED))


def _seed(name: str) -> int:
    """Return the 64 bits that stand for a replica in `_weights`."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _weights(seeds: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Return the rendezvous weights of replicas for a piece `[replicas]`: SplitMix64's finalizer of both."""
    mixed = seeds ^ np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
