"""API keys and their holders, the reading of the key file while the server runs, and the queue places of each holder."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from chunkattn.adapter_salt import salted, split
from chunkattn.errors import ConfigError
from chunkattn.fair_shares import FairShares
from chunkattn.fair_threads import FairThreads
from chunkattn.web.errors import ApiError
from chunkattn.web.key_file import read_key_file

logger = logging.getLogger(__name__)

DEFAULT_NAME = "default"
API_KEY_HEADER = "x-api-key"
"""Header in which Anthropic's clients send their key."""
Headers = Iterable[tuple[bytes, bytes]]
"""Names in lower case, and values."""


class KeyHolder(NamedTuple):
    """Holder of an API key.

    Attributes:
        name: name of the key.
        tag: digest of the key, which tells a key from an earlier or later key of the same name.
    """

    name: str
    tag: str

    @property
    def salt(self) -> str:
        """Return the cache salt of the holder's requests without a salt of their own."""
        return f"{self.name}:{self.tag}"  # unambiguous: neither holds a colon


class Keys:
    """API keys of a server.

    Args:
        api_key: key of the name "default"; None leaves the name without a key.
        file: path of a file with one `name:key` per line. Blank lines and lines that begin with # are skipped.
        metrics_key: the only key that opens `/metrics`, and nothing else; None opens it to every API key.

    Raises:
        ConfigError: the file cannot be read, or a line is malformed.
    """

    def __init__(self, api_key: str | None, file: str | None, metrics_key: str | None = None) -> None:
        self.file = file
        self._api_key = api_key
        self._metrics_key = None if metrics_key is None else _digest(metrics_key)
        self._names = self._read()

    def _read(self) -> dict[bytes, str]:
        """Return names by the digests of their keys, so the time of a lookup reveals nothing about a key."""
        name_of = {} if self._api_key is None else {_digest(self._api_key): DEFAULT_NAME}
        if self._metrics_key in name_of:
            raise ConfigError("metrics_key is the api_key; give /metrics a key of its own")
        if self.file is None:
            return name_of
        names = set(name_of.values())
        for where, name, key in read_key_file(self.file):
            digest = _digest(key)
            if name in names:
                raise ConfigError(f"{where}: the name {name!r} is taken; give every key a name of its own")
            if digest in name_of:
                raise ConfigError(f"{where}: {name!r} has the key of {name_of[digest]!r}; give every name a key of its own")
            if digest == self._metrics_key:
                raise ConfigError(f"{where}: {name!r} has the metrics_key; give /metrics a key of its own")
            name_of[digest] = name
            names.add(name)
        if not name_of:
            raise ConfigError(f"api_key_file {self.file} holds no key, so every request would be refused; add a name:key line")
        return name_of

    @property
    def needed(self) -> bool:
        """Return whether a request must bring a key."""
        return bool(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def reload(self) -> Set[KeyHolder]:
        """Read the key file again. Return the holders whose keys are no longer valid.

        The caller may run this in a thread: requests see either the earlier keys or the new keys.

        Raises:
            ConfigError: the file is invalid or missing; the present keys stay valid.
        """
        before, now = self._names, self._read()
        self._names = now
        return {_holder(name, digest) for digest, name in before.items() if now.get(digest) != name}

    def holder(self, authorization: str) -> KeyHolder | None:
        """Return the holder of the key in an Authorization header, or None if the key is unknown.

        Args:
            authorization: a bearer token, or HTTP Basic with the key as password.
        """
        digest = _given(authorization)
        name = None if digest is None else self._names.get(digest)
        return None if digest is None or name is None else _holder(name, digest)

    @property
    def salts(self) -> Set[str]:
        """Return the cache salts of all holders."""
        return {_holder(name, digest).salt for digest, name in self._names.items()}

    def salt_of(self, name: str) -> str:
        """Return the cache salt of the requests of a name that give no salt.

        Args:
            name: name of an API key.

        Raises:
            ConfigError: no key has this name.
        """
        for digest, known in self._names.items():
            if known == name:
                return _holder(name, digest).salt
        raise ConfigError(f"no key of api_key_file {self.file} has the name {name!r}")

    def open_metrics(self, authorization: str) -> bool:
        """Return whether an Authorization header opens `/metrics`.

        Args:
            authorization: see `holder`.
        """
        if self._metrics_key is not None:
            return _given(authorization) == self._metrics_key
        return not self.needed or self.holder(authorization) is not None


class KeyReloader:
    """Reads the key file again when asked, and deletes the documents of keys that are no longer valid.

    One read runs at a time, so the keys are those of the last read. A call of `ask` during a read causes one more read.

    Args:
        keys: API keys of the server.
        delete_owned: deletes the documents of holders, which are named by their salts, and returns the number of documents.
    """

    def __init__(self, keys: Keys, delete_owned: Callable[[Set[str]], int]) -> None:
        self._keys, self._delete_owned = keys, delete_owned
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Ask for one read of the key file."""
        if self._keys.file is None:
            logger.warning("SIGHUP is ignored: there is no api_key_file to read again")
        else:
            self._asked.set()

    async def run(self) -> None:
        """Serve the calls of `ask` until cancelled."""
        thread = FairThreads(1)  # clients can fill the shared threads
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                await self._reload(thread)
        finally:
            thread.close()

    async def _reload(self, thread: FairThreads) -> None:
        try:
            removed = await thread.run(self._keys.reload)
        except ConfigError as error:
            logger.error("the API keys stay as they are: %s", error)
            return
        except Exception:
            logger.exception("the API keys stay as they are")
            return
        count = self._delete_owned({holder.salt for holder in removed})
        logger.warning(
            "api_key_file is read again: %d keys; %d are no longer valid, and %d documents of theirs are deleted",
            *(len(self._keys), len(removed), count),
        )


def with_bearer(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return headers with the key of Anthropic's header as a bearer token; as they are if they hold an Authorization header.

    Of several keys none is taken.

    Args:
        headers: headers of a request.
    """
    listed, name = [*headers], API_KEY_HEADER.encode()
    keys = [value for key, value in listed if key == name]
    if len(keys) != 1 or any(key == b"authorization" for key, _ in listed):
        return listed
    return [(key, value) for key, value in listed if key != name] + [(b"authorization", b"Bearer " + keys[0])]


def authorization_of(headers: Headers) -> str:
    """Return the Authorization header of a request, or that which `with_bearer` gives it; the empty text without a key."""
    return dict(with_bearer(headers)).get(b"authorization", b"").decode("latin-1")


def _given(authorization: str) -> bytes | None:
    """Return the digest of the key in an Authorization header, or None if it holds none."""
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "basic":  # browsers prompt for it
        try:
            key = base64.b64decode(key, validate=True).decode().partition(":")[2]
        except ValueError:
            return None
    elif scheme.lower() != "bearer":
        return None
    return _digest(key.strip())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _holder(name: str, digest: bytes) -> KeyHolder:
    return KeyHolder(name, hashlib.blake2b(digest, digest_size=16, person=b"salt").hexdigest())


@dataclass
class Shares:
    """Queue places and bytes of bodies held by each name.

    Attributes:
        most: number of places that one name may hold at once; without names, the limit of one request.
        bodies: bytes of bodies held by each client.
        held: places held now, by name.
    """

    most: int
    bodies: FairShares
    held: Counter[str] = field(default_factory=Counter)

    def no_room(self) -> ApiError:
        """Return the refusal of a body for which its client has no room. The rest of the body is left unread."""
        text = (
            f"the request bodies of one client may hold {self.bodies.most_each} bytes at once (max_body_bytes_per_client); "
            "send fewer large bodies at once, or try again"
        )
        return ApiError(429, text, code="body_share_exceeded", Connection="close")


@dataclass
class Caller:
    """Client of one HTTP request: the name of its key, and what it holds until the answer ends.

    Attributes:
        name: name of the API key; None for a server without a key file.
        shares: queue places and bytes of all clients.
        owner: client for whom the request's work is done: the name, or the address of a client without one.
        places: number of queue places that this request holds.
        num_bytes: number of bytes of its body that this request holds.
        tag: digest of the API key.
        salt_mark: short digest of the request's own cache salt, for the log; None without one.
        adapter: name of the adapter that the request names as its model; None for the base model.
    """

    name: str | None
    shares: Shares
    owner: str | None = None
    places: int = 0
    num_bytes: int = 0
    tag: str = ""
    salt_mark: str | None = None
    adapter: str | None = None

    @property
    def document_owner(self) -> str | None:
        """Return the owner of the documents that the request stores; None for a server that does not tell clients apart."""
        return None if self.name is None else KeyHolder(self.name, self.tag).salt

    def salt(self, request_salt: str | None) -> str | None:
        """Return the engine's cache salt: unique to the name, the key, the adapter and the given salt.

        Args:
            request_salt: salt from the request.

        Raises:
            ApiError: 400, the salt has the form of one that names an adapter.
        """
        if split(request_salt)[0] is not None:
            text = "cache_salt must not name an adapter; name it as model"
            raise ApiError(400, text, param="cache_salt", code="invalid_value")
        return salted(self.adapter, self._salt(request_salt))

    def _salt(self, request_salt: str | None) -> str | None:
        as_bytes = None if request_salt is None else request_salt.encode("utf-8", "surrogatepass")
        if as_bytes is not None:
            self.salt_mark = hashlib.sha256(as_bytes).hexdigest()[:8]
        if self.name is None:
            return request_salt
        holder_salt = KeyHolder(self.name, self.tag).salt
        if as_bytes is None:
            return holder_salt
        return f"{holder_salt}:{hashlib.blake2b(as_bytes, digest_size=16).hexdigest()}"

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
            raise ApiError(429, text, code="queue_share_exceeded")
        self.places += places
        if self.name is not None:
            self.shares.held[self.name] += places

    async def hold_bytes(self, size: int, timeout: float) -> None:
        """Wait until this request may hold bytes of its body or answer, instead of those held before; `leave` gives them back.

        Args:
            size: number of bytes.
            timeout: limit on the wait in seconds.

        Raises:
            ApiError: 429, other bodies of this client take the room until the timeout.
        """
        self.keep_bytes(0)
        try:
            async with asyncio.timeout(timeout):
                await self.shares.bodies.take(self.owner, size)
        except TimeoutError:
            raise self.shares.no_room() from None
        self.num_bytes = size

    def keep_bytes(self, size: int) -> None:
        """Give back all but some of the bytes that this request holds.

        Args:
            size: number of bytes to keep at most.
        """
        if self.num_bytes > size:
            self.shares.bodies.give(self.owner, self.num_bytes - size)
            self.num_bytes = size

    def leave(self) -> None:
        """Return all queue places and bytes of this request."""
        self.keep_bytes(0)
        if self.name is not None:
            self.shares.held[self.name] -= self.places
            if not self.shares.held[self.name]:
                del self.shares.held[self.name]
        self.places = 0
