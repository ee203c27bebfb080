"""The records of a store: keys and metadata of entries."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash
from jaxtyping import Integer

FORMAT = 2
"""Version of the records. Version 1 may hold K/V of scored items under the key of a chunk."""
KEY_BYTES = 32
TAG_BYTES = 8


class Damage(Exception):
    """A reason why an entry or a file is unusable."""


def model_tag(fingerprint: bytes) -> bytes:
    """Return the first 8 bytes of every key of the model with this fingerprint."""
    return hashlib.blake2b(fingerprint, digest_size=TAG_BYTES, person=b"chunkattn-model").digest()


def entry_key(
    fingerprint: bytes,
    salt: str | None,
    prefix_ids: Integer[np.ndarray, " P"],
    chunk_ids: Integer[np.ndarray, " C"] | None,
    start_position: int,
) -> bytes:
    """Return the 32-byte key of an entry: the model's tag, then a digest of everything the K/V depend on.

    Args:
        fingerprint: digest of weights, dtypes and everything else that K/V depend on besides the prompt.
        salt: separates entries of different owners; None differs from "".
        prefix_ids: token ids of the prefix.
        chunk_ids: token ids of the chunk; None for the prefix's own entry.
        start_position: position of the entry's first token.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES - TAG_BYTES, person=b"chunkattn-entry")
    parts: list[bytes | None] = [fingerprint, None if salt is None else salt.encode("utf-8", "surrogatepass")]
    parts += [None if ids is None else np.asarray(ids, "<i8").tobytes() for ids in (prefix_ids, chunk_ids)]
    for part in parts:
        digest.update(b"\0" if part is None else b"\1" + struct.pack("<Q", len(part)) + part)
    digest.update(struct.pack("<q", start_position))
    return model_tag(fingerprint) + digest.digest()


def state_key(key: bytes) -> bytes:
    """Return the key of the state of recurrent layers at the end of a part.

    Args:
        key: key of the part's K/V.
    """
    digest = hashlib.blake2b(key, digest_size=KEY_BYTES - TAG_BYTES, person=b"chunkattn-state")
    return key[:TAG_BYTES] + digest.digest()


@dataclass(frozen=True)
class StoreEntry:
    """Metadata of one stored entry.

    Attributes:
        key: 32 bytes.
        model: the model's tag in hex.
        kind: "prefix", "chunk", or "state" of recurrent layers at the end of either.
        tokens: number of tokens whose K/V, or whose state, the entry holds.
        num_bytes: bytes of the arrays.
        created: seconds since the epoch.
        last_used: seconds since the epoch.
    """

    key: bytes
    model: str
    kind: str
    tokens: int
    num_bytes: int
    created: float
    last_used: float


class Meta(msgspec.Struct, frozen=True):
    """Record of an entry's metadata.

    Attributes:
        arrays: signature of each array.
        num_bytes: bytes of the arrays.
        segments: number of segments the arrays are cut into.
        checksum: xxh3_128 over the arrays' bytes.
    """

    format: int
    kind: str
    tokens: int
    created: float
    arrays: list[tuple[str, list[int]]]
    num_bytes: int
    segments: int
    checksum: bytes

    def encode(self, key: bytes) -> bytes:
        """Return a checksum over the key and the record, followed by the record in msgpack."""
        payload = msgspec.msgpack.encode(self)
        return xxhash.xxh3_128_digest(key + payload) + payload

    @staticmethod
    def decode(key: bytes, record: bytes) -> Meta:
        """Decode a record made by `encode`.

        Args:
            key: key of the entry.
            record: the encoded record.

        Raises:
            Damage: the checksum, the msgpack form or the format version is wrong.
        """
        if xxhash.xxh3_128_digest(key + record[16:]) != record[:16]:
            raise Damage("wrong checksum of the metadata")
        try:
            meta = msgspec.msgpack.decode(record[16:], type=Meta)
        except msgspec.MsgspecError as error:
            raise Damage(f"unreadable metadata: {error}") from error
        if meta.format != FORMAT:
            raise Damage(f"format {meta.format}, not {FORMAT}")
        return meta


def signature(shape: Sequence[int], dtype: np.dtype) -> tuple[str, list[int]]:
    """Return the entry of `Meta.arrays` for an array.

    Args:
        shape: shape of the array.
        dtype: dtype of the array.
    """
    return f"{dtype.str} {dtype.name}", list(shape)  # the name distinguishes bfloat16 from other 2-byte void types
