"""What a store writes down: the name of an entry, and its metadata."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

FORMAT = 2
"""Version of the records. Version 1 may hold K/V of scored items under the name of a chunk."""
KEY_BYTES = 32
TAG_BYTES = 8


class Damage(Exception):
    """An entry cannot be used; says why."""


def model_tag(fingerprint: bytes) -> bytes:
    """The first 8 bytes of every key of the model with this fingerprint."""
    return hashlib.blake2b(fingerprint, digest_size=TAG_BYTES, person=b"chunkattn-model").digest()


def entry_key(
    fingerprint: bytes, salt: str | None, prefix_ids: np.ndarray, chunk_ids: np.ndarray | None, start_position: int
) -> bytes:
    """32 bytes that name an entry: the model's tag, then a digest of everything its K/V depend on.

    Args:
        fingerprint: of weights, dtypes and everything else that K/V depend on besides the prompt.
        salt: keeps entries of different owners apart; None differs from "".
        prefix_ids: token ids `[P]`, any integer dtype.
        chunk_ids: token ids `[C]` of the chunk; None for the prefix's own entry.
        start_position: the first token's.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES - TAG_BYTES, person=b"chunkattn-entry")
    parts: list[bytes | None] = [fingerprint, None if salt is None else salt.encode("utf-8", "surrogatepass")]
    parts += [None if ids is None else np.asarray(ids, "<i8").tobytes() for ids in (prefix_ids, chunk_ids)]
    for part in parts:
        digest.update(b"\0" if part is None else b"\1" + struct.pack("<Q", len(part)) + part)
    digest.update(struct.pack("<q", start_position))
    return model_tag(fingerprint) + digest.digest()


@dataclass(frozen=True)
class StoreEntry:
    """What a store knows of one entry.

    Attributes:
        key: 32 bytes.
        model: the model's tag in hex.
        kind: "prefix" or "chunk".
        tokens: how many the K/V are of.
        num_bytes: of the arrays.
        created: seconds since the epoch.
        last_used: likewise.
    """

    key: bytes
    model: str
    kind: str
    tokens: int
    num_bytes: int
    created: float
    last_used: float


class Meta(msgspec.Struct, frozen=True):
    """Metadata of an entry.

    Attributes:
        arrays: signature of each.
        num_bytes: of the arrays.
        segments: they are cut into.
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
        """A checksum over the key and what follows, and the record in msgpack."""
        payload = msgspec.msgpack.encode(self)
        return xxhash.xxh3_128_digest(key + payload) + payload

    @staticmethod
    def decode(key: bytes, record: bytes) -> Meta:
        """From what `encode` made.

        Raises:
            Damage: it did not make this.
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
    """What `Meta.arrays` says of an array."""
    return f"{dtype.str} {dtype.name}", list(shape)  # the name tells bfloat16 from other two-byte voids
