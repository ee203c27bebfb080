"""`Membership`: the replicas that a router in this process sees, shared with the transport that names them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

from chunkattn.gateway.replicas import NotSentError


class Ticket:
    """A call to a named replica that the replica has not accepted yet."""

    def __init__(self, name: str, future: Any) -> None:
        self.name, self.gone = name, future

    def fail(self) -> None:
        """Tell the caller that the replica is gone. The router may run in a thread of its own."""
        loop = self.gone.get_loop()

        def tell() -> None:
            if not self.gone.done():
                self.gone.set_exception(NotSentError(f"the replica {self.name} is gone"))
                self.gone.exception()  # marks the exception as retrieved: the caller may have left

        loop.call_soon_threadsafe(tell)


class Membership:
    """Names of the replicas of one deployment, and the calls that wait for one of them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._names: tuple[str, ...] = ()
        self._waiting: dict[str, dict[int, Ticket]] = defaultdict(dict)

    @property
    def names(self) -> Sequence[str]:
        """Return the names, sorted."""
        return self._names

    def update(self, names: Iterable[str]) -> None:
        """Take the present names, and fail the calls that wait for another."""
        with self._lock:
            self._names = tuple(sorted(names))
            lost = [t for name in set(self._waiting) - set(self._names) for t in self._waiting.pop(name).values()]
        for ticket in lost:
            ticket.fail()

    def remove(self, name: str) -> None:
        """Take one name off."""
        self.update(n for n in self._names if n != name)

    def wait(self, number: int, ticket: Ticket) -> None:
        """Note a call that waits for a replica.

        Raises:
            NotSentError: the replica is gone already.
        """
        with self._lock:
            if ticket.name not in self._names:
                raise NotSentError(f"the replica {ticket.name} is gone")
            self._waiting[ticket.name][number] = ticket

    def settle(self, name: str, number: int) -> None:
        """Forget a call, which its replica has accepted or which has ended."""
        with self._lock:
            waiting = self._waiting.get(name, {})
            waiting.pop(number, None)
            if not waiting:
                self._waiting.pop(name, None)


_MEMBERSHIPS: dict[str, Membership] = {}
_MAKING = Lock()


def membership(channel: str) -> Membership:
    """Return the membership of a channel in this process.

    Args:
        channel: name that the options of the router and the transport share.
    """
    with _MAKING:
        return _MEMBERSHIPS.setdefault(channel, Membership())
