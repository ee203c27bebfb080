"""Routing keys of a request: a 64-bit key for each piece whose K/V a replica may hold, from the JSON body alone.

The K/V of a document depends on API key, cache salt, adapter, prefix and document, and on nothing else of the
request. A key is a hash of these, so equal keys stand for equal K/V, whatever the order and the company of the documents.
Documents that are joined in one chunk have one key together. What
has to be read from the beginning (prefixes, plain prompts, conversations, states) becomes a chain of pieces: the key of each
piece covers all text before it, so equal beginnings have equal keys. No tokenizer is needed; sizes are bytes of text.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from chunkattn.adapter_salt import salted
from chunkattn.schema.parts import MALFORMED, Prompt, Value, listed, route_of

_FIRST_BLOCK = 512
"""Bytes of the first piece of a long text. Each further piece ends at twice the bytes, so a text has few pieces."""
MAX_PIECES = 4096
"""Pieces of one request, as many as the chunks that an engine takes by default. A request with more has no keys: to hash and to
record them would hold up all other requests."""
_SMALLEST = 64
"""Bytes below which a message of a conversation shares the piece of the next one."""


class Keys(NamedTuple):
    """Pieces of a request, with their sizes in bytes of text.

    Attributes:
        pieces: key and size of each distinct piece that a replica may have cached, in the request's order: the prefix before
            the documents.
        rest: size of what no replica can have cached, such as the question.
    """

    pieces: tuple[tuple[int, int], ...] = ()
    rest: int = 0


def keys_of(
    path: str, body: Any, authorization: str = "", *, separator: str | None = None, adapters: Collection[str] = ()
) -> Keys:
    """Return the routing keys of a request.

    A malformed body has no keys; the replica answers with the proper error. A document named by id contributes nothing unless
    its text has taken the place of the id.

    Args:
        path: path of the request, with or without the `root_path` of the replicas.
        body: decoded JSON body.
        authorization: Authorization header, since API keys with names share no cache.
        separator: separator at which the replicas split text prompts; None if they split none. A body with
            `chunk_aware: false` is not split.
        adapters: names of the replicas' adapters; a body names one as its `model`.
    """
    route = route_of(path)
    if route is None or not route.is_cached or not isinstance(body, Mapping):
        return Keys()
    try:
        parts = route.parts(body, separator)
        model = body.get("model")
        adapter = model if isinstance(model, str) and model in adapters else None
        pieces = _Pieces([authorization, salted(adapter, parts.salt)])
        for prompt in parts.prompts:
            pieces.add(prompt)
        return Keys(tuple(pieces.sizes.items()), sum(len(_bytes(part)) for part in parts.question))
    except MALFORMED:
        return Keys()


class _Pieces:
    """Pieces of one request.

    Args:
        scope: what the K/V depends on beside the prompts, as JSON.

    Attributes:
        sizes: size of each piece by its key.
    """

    def __init__(self, scope: list[Any]) -> None:
        self._scope = scope
        self.sizes: dict[int, int] = {}

    def add(self, prompt: Prompt) -> None:
        """Add the pieces of a prompt."""
        start = self._chain(prompt.kind, prompt.prefix)
        if prompt.documents or prompt.behind:
            behind = self._documents(start, prompt)
            self._chain(behind.hex(), prompt.behind)

    def _chain(self, kind: Any, parts: Iterable[Any]) -> bytes:
        """Add the pieces of parts that are read from the beginning. Each part ends a piece if there are bytes enough.

        Returns:
            Digest of all parts, which begins the keys of the documents behind them.
        """
        state, size = blake2b(_json([*self._scope, kind]), digest_size=16), 0
        for part in parts:
            content, start, end = _bytes(part), 0, _FIRST_BLOCK
            state.update(b"\0" if isinstance(part, Value) else b"")  # no message begins with a zero
            while start < len(content):
                block = content[start:end]
                state.update(block)
                size += len(block)
                if len(content) >= end:
                    size = self._add(state.digest(), size)
                start, end = end, 2 * end
            state.update(len(content).to_bytes(8, "big"))
            if size >= _SMALLEST:
                size = self._add(state.digest(), size)
        if size:
            self._add(state.digest(), size)
        return state.digest()

    def _documents(self, start: bytes, prompt: Prompt) -> bytes:
        """Add the documents of a prompt, as one piece where they are joined.

        Args:
            start: digest of the prefix.
            prompt: the prompt.

        Returns:
            Digest of prefix and documents in any order, which begins the keys of what is read behind them.
        """
        keys, text = list[bytes](), b"document" if prompt.in_template else b"chunk"
        size = 0
        for document in prompt.documents:
            if content := _bytes(document):
                key = blake2b(content, digest_size=8, key=start, person=text if isinstance(document, str) else b"ids").digest()
                keys.append(key)
                size += len(content)
                if not prompt.is_joined:
                    self._add(key, len(content))
        if prompt.is_joined and keys:  # one document is the same chunk in both modes
            listed = b"".join(sorted(keys))
            keys = keys if len(keys) == 1 else [blake2b(listed, digest_size=8, key=start, person=b"joined").digest()]
            self._add(keys[0], size)
        return blake2b(b"".join(sorted(set(keys))), digest_size=16, key=start).digest()

    def _add(self, digest: bytes, size: int) -> int:
        """Add a piece, and return the size of the next one, which is empty.

        Raises:
            ValueError: there are too many pieces.
        """
        self.sizes[int.from_bytes(digest[:8], "big")] = size
        if len(self.sizes) > MAX_PIECES:
            raise ValueError("too many pieces")
        return 0


def _bytes(part: Any) -> bytes:
    """Return a part of a body as bytes: a text in UTF-8, token ids in 4 bytes each, as many as their text, others as JSON."""
    if isinstance(part, Value):
        part = part.content
        if not isinstance(part, str):
            part = json.dumps(part, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if isinstance(part, str):
        return part.encode("utf-8", "surrogatepass")
    return _json(part) if isinstance(part, Mapping) else array("i", listed(part)).tobytes()


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
