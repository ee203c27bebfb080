"""Transfers: the server's reading of a request's `kv_transfer_params`.

A client of vLLM's HTTP server can send any JSON here, so every field is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeGuard

from chunkattn.integrations.vllm.requests import PARAMS_KEY, POSITIONS, Positions, effective_gap, segment_keys

__all__ = ["RequestRefused", "StoredSegment", "Transfer", "parse_transfer"]

_KeysOf = Callable[..., tuple[str, tuple[str, ...]]]
"""`segment_keys` of one request: its function of a prefix and chunks."""


class RequestRefused(Exception):
    """A request that must not be computed.

    Attributes:
        reason: label of the metric: `malformed`, `unsupported` or `missing`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class StoredSegment:
    """Prefix or chunk of one request, as it is stored.

    Attributes:
        key: content key of the K/V.
        start: index of its first token in the request.
        end: index after its last token in the request.
        origin: position at which the stored key of the first token was computed.
        shift: positions by which a load moves the keys.
    """

    key: str
    start: int
    end: int
    origin: int
    shift: int = 0


@dataclass(frozen=True)
class Transfer:
    """Loads and saves of one request.

    Attributes:
        loads: segments to load. They cover the tokens `[0, load_end)` without holes.
        saves: segments to save once the whole prompt is computed.
        layout: values that decide what the request's K/V means, beside its tokens: None if the K/V is that of a plain prompt.
        computed: content keys whose K/V other requests computed for the same prompt.
        reads: whether the log-probabilities of the question are read, so that all of it must be computed.
    """

    loads: tuple[StoredSegment, ...] = ()
    saves: tuple[StoredSegment, ...] = ()
    layout: tuple[Any, ...] | None = None
    computed: frozenset[str] = frozenset()
    reads: bool = False

    @property
    def load_end(self) -> int:
        """Return the number of leading tokens that are loaded."""
        return self.loads[-1].end if self.loads else 0

    @property
    def save_end(self) -> int:
        """Return the number of leading tokens that must be computed before the save."""
        return self.saves[-1].end if self.saves else 0

    def segments_after(self, start: int) -> list[StoredSegment]:
        """Return the segments that a load from token `start` on needs."""
        return [segment for segment in self.loads if segment.end > start]


def parse_transfer(
    fields: object, token_ids: Sequence[int], *, gap: int, cache_salt: str | None, adapter: str | None
) -> Transfer:
    """Return the transfer of a request.

    Args:
        fields: `kv_transfer_params[PARAMS_KEY]` of the request, as the client sent it.
        token_ids: the request's prompt.
        gap: the engine's chunk gap.
        cache_salt: the tenant's salt.
        adapter: `adapter_key` of the request's LoRA adapter.

    Raises:
        RequestRefused: the parameters are malformed.
    """
    if not isinstance(fields, dict):
        raise _malformed(f"must be an object, got {type(fields).__name__}")
    positions = fields.get("positions")
    if not isinstance(positions, str) or positions not in POSITIONS:
        raise _malformed(f"positions must be one of {', '.join(POSITIONS)}")
    gap = effective_gap(positions, gap)
    keys_of = partial(segment_keys, gap=gap, cache_salt=cache_salt, adapter=adapter)
    computed, reads = fields.get("computed", []), fields.get("read", False)
    kind = fields.keys() - ({"positions", "computed", "read"} if "bounds" in fields else {"positions"})
    if kind == {"save"}:
        return _save_transfer(fields["save"], token_ids, gap, keys_of)
    if kind == {"bounds"}:
        transfer = _composed_transfer(fields["bounds"], positions, token_ids, gap, keys_of)
        if (
            not isinstance(computed, list)
            or len(computed) > len(transfer.loads)
            or not all(isinstance(k, str) for k in computed)
        ):
            raise _malformed(f"computed must be a list of at most {len(transfer.loads)} keys")
        if not isinstance(reads, bool):
            raise _malformed("read must be true or false")
        return replace(transfer, computed=frozenset(computed), reads=reads)
    raise _malformed("must hold positions and either save or bounds")


def _save_transfer(prefix_len: object, token_ids: Sequence[int], gap: int, keys_of: _KeysOf) -> Transfer:
    total = len(token_ids)
    if not _is_index(prefix_len, total):
        raise _malformed(f"save must be a number of tokens from 0 to {total}")
    prefix, chunk = token_ids[:prefix_len], token_ids[prefix_len:]
    prefix_key, (key,) = keys_of(prefix, [chunk])
    prefixes = [StoredSegment(prefix_key, 0, prefix_len, 0)] if prefix else []
    if not chunk:
        return Transfer(saves=tuple(prefixes))
    chunks = [StoredSegment(key, prefix_len, total, prefix_len)]
    if not prefix or not gap:
        return Transfer(saves=(*prefixes, *chunks))
    # The chunk's tokens keep their indices as positions, so the gap moves the prefix back.
    moved = StoredSegment(prefix_key, 0, prefix_len, 0, -gap)
    return Transfer(loads=(moved,), saves=tuple(chunks), layout=("save", prefix_len, gap))


def _composed_transfer(bounds: object, positions: Positions, token_ids: Sequence[int], gap: int, keys_of: _KeysOf) -> Transfer:
    if not isinstance(bounds, list) or not bounds or len(bounds) > len(token_ids):
        raise _malformed(f"bounds must be a list of 1 to {len(token_ids)} numbers")
    if not all(_is_index(bound, len(token_ids) - 1) for bound in bounds) or any(a >= b for a, b in pairwise(bounds)):
        raise _malformed("bounds must increase and leave at least one token for the question")
    prefix_len, total = bounds[0], bounds[-1]
    if not total:
        raise _malformed("bounds must hold at least one token")
    spans = list(pairwise(bounds))
    prefix_key, keys = keys_of(token_ids[:prefix_len], [token_ids[a:b] for a, b in spans])
    if positions == "reordered":
        prefix_shift, shifts = 0, [start - prefix_len for start, _ in spans]
    else:
        # The question's positions are its indices, so all keys move up by the positions that side-by-side chunks leave unused.
        unused = total - prefix_len - max((end - start for start, end in spans), default=0)
        prefix_shift, shifts = unused - gap, [unused] * len(spans)
    loads = [StoredSegment(prefix_key, 0, prefix_len, 0, prefix_shift)] if prefix_len else []
    loads += [StoredSegment(key, a, b, prefix_len, shift) for key, (a, b), shift in zip(keys, spans, shifts)]
    return Transfer(loads=tuple(loads), layout=("composed", positions, gap, *bounds))


def _is_index(value: object, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _malformed(message: str) -> RequestRefused:
    return RequestRefused("malformed", f"kv_transfer_params[{PARAMS_KEY!r}] {message}")
