"""Named API keys, and the queue places that each name holds."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from chunkattn.errors import ConfigError
from chunkattn.server.body_shares import BodyShares
from chunkattn.server.errors import ApiError

logger = logging.getLogger(__name__)

DEFAULT_NAME = "default"
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_KEY = re.compile(r"[\x21-\x7e]+")


class Keys:
    """API keys of a server.

    Args:
        api_key: key of the name "default"; None leaves the name without a key.
        file: path of a file with one `name:key` per line. Blank lines and lines that begin with # are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is malformed.
    """

    def __init__(self, api_key: str | None, file: str | None) -> None:
        self._api_key, self._file = api_key, file
        self._names = self._read()

    def _read(self) -> dict[bytes, str]:
        """Return names by the digests of their keys, so the time of a lookup reveals nothing about a key."""
        found = {} if self._api_key is None else {_digest(self._api_key): DEFAULT_NAME}
        if self._file is None:
            return found
        try:
            lines = Path(self._file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file {self._file} cannot be read: {error}") from None
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            name, _, key = line.partition(":")
            where = f"api_key_file {self._file}, line {number}"  # the line may hold a key, so errors leave it out
            if not _NAME.fullmatch(name) or not _KEY.fullmatch(key):
                raise ConfigError(
                    f"{where} must be name:key, the name of 1 to 64 letters, digits or _.@-, the key without spaces"
                )
            if name in found.values():
                raise ConfigError(f"{where}: the name {name!r} is taken; give every key a name of its own")
            if _digest(key) in found:
                raise ConfigError(f"{where}: {name!r} has the key of {found[_digest(key)]!r}; give every name a key of its own")
            found[_digest(key)] = name
        if not found:
            raise ConfigError(f"api_key_file {self._file} holds no key, so every request would be refused; add a name:key line")
        return found

    @property
    def needed(self) -> bool:
        """Return whether a request must bring a key."""
        return bool(self._names)

    def reload(self) -> None:
        """Read the key file again; keep the present keys if the file is invalid or missing."""
        if self._file is None:
            logger.warning("SIGHUP is ignored: there is no api_key_file to read again")
            return
        try:
            self._names = self._read()
        except ConfigError as error:
            logger.error("the API keys stay as they are: %s", error)
        else:
            logger.warning("api_key_file is read again: %d keys", len(self._names))

    def name_of(self, authorization: str) -> str | None:
        """Return the name of the key in an Authorization header, or None if the key is unknown.

        Args:
            authorization: a bearer token, or HTTP Basic with the key as password.
        """
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "basic":  # browsers prompt for it
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except ValueError:
                return None
        elif scheme.lower() != "bearer":
            return None
        return self._names.get(_digest(given.strip()))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass
class Shares:
    """Queue places and bytes of bodies held by each name.

    Attributes:
        most: number of places that one name may hold at once; without names, the limit of one request.
        bodies: bytes of bodies held by each client.
        held: places held now, by name.
    """

    most: int
    bodies: BodyShares
    held: Counter[str] = field(default_factory=Counter)


@dataclass
class Caller:
    """Client of one HTTP request: the name of its key, and what it holds until the answer ends.

    Attributes:
        name: name of the API key; None for a server without a key file.
        shares: queue places and bytes of all clients.
        owner: client for whom the request's work is done: the name, or the address of a client without one.
        places: number of queue places that this request holds.
        num_bytes: number of bytes of its body that this request holds.
    """

    name: str | None
    shares: Shares
    owner: str | None = None
    places: int = 0
    num_bytes: int = 0

    def salt(self, given: str | None) -> str | None:
        """Return the engine's cache salt: unique to the name of the key and the given salt.

        Args:
            given: salt from the request.
        """
        if self.name is None:
            return given
        if given is None:
            return self.name
        digest = hashlib.blake2b(given.encode("utf-8", "surrogatepass"), digest_size=16)
        return f"{self.name}:{digest.hexdigest()}"  # unambiguous: a name holds no colon

    def take(self, places: int) -> None:
        """Take queue places; `leave` returns them.

        Args:
            places: number of places.

        Raises:
            ApiError: 429, the name would exceed its share of the queue.
        """
        held = self.places if self.name is None else self.shares.held[self.name]
        if held + places > self.shares.most:
            whose = "one request" if self.name is None else "the requests of one API key"
            text = (
                f"{whose} may hold {self.shares.most} places of the queue (max_queue_share); send fewer at once, or try again"
            )
            raise ApiError(429, text, code="queue_share_exceeded", **{"Retry-After": "1"})
        self.places += places
        if self.name is not None:
            self.shares.held[self.name] += places

    async def hold_bytes(self, size: int, timeout: float) -> None:
        """Wait until this request's body may be held in memory, instead of the body held before; `leave` gives it back.

        Args:
            size: number of bytes.
            timeout: limit on the wait in seconds.

        Raises:
            ApiError: 429, other bodies of this client take the room until the timeout.
        """
        self._give_bytes()
        bodies = self.shares.bodies
        try:
            async with asyncio.timeout(timeout):
                await bodies.take(self.owner, size)
        except TimeoutError:
            text = (
                f"the request bodies of one client may hold {bodies.most} bytes at once (max_body_bytes_per_client); "
                "send fewer large bodies at once, or try again"
            )
            raise ApiError(429, text, code="queue_share_exceeded", **{"Retry-After": "1"}) from None
        self.num_bytes = size

    def _give_bytes(self) -> None:
        if self.num_bytes:
            self.shares.bodies.give(self.owner, self.num_bytes)
        self.num_bytes = 0

    def leave(self) -> None:
        """Return all queue places and bytes of this request."""
        self._give_bytes()
        if self.name is not None:
            self.shares.held[self.name] -= self.places
            if not self.shares.held[self.name]:
                del self.shares.held[self.name]
        self.places = 0
