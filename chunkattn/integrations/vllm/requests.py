"""Requests that make vLLM answer a chunked prompt: the client's side of the protocol.

vLLM receives three kinds of requests, marked in `kv_transfer_params[PARAMS_KEY]`:

- A *prefix request* computes the prefix and saves its K/V. It is needed only under a chunk gap.
- A *save request* computes prefix + chunk and saves the chunk's K/V. Without a gap it saves the prefix, too.
- A *composed request* holds prefix + chunks + question. It loads the K/V of prefix and chunks, and computes the question. Its
  list `computed` has the keys whose K/V other requests computed for this prompt: loads of these are no hits of the store. With
  `read`, vLLM's prefix cache answers for no part of it, so that the log-probabilities of the question can be read.

All of them carry the tenant's own `cache_salt`. The engine derives the keys of stored K/V from the requests that it computes,
so a client cannot name foreign K/V. This module imports neither vLLM nor PyTorch: any HTTP client can use it.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

PARAMS_KEY = "chunkattn"
"""Key of this protocol inside `kv_transfer_params`."""

Positions = Literal["shared", "reordered"]
POSITIONS: tuple[Positions, ...] = ("shared", "reordered")
"""Position strategies of a composed request.

`shared`: all chunks start at one position, and the question follows the longest chunk. `reordered`: positions are consecutive
in the caller's order, as in an ordinary prompt, and there is no gap.
"""

_KEY_VERSION = b"chunkattn-kv-1"


def effective_gap(positions: Positions, gap: int) -> int:
    """Return the positions left free between prefix and chunks: `gap` under `shared` positions, else 0."""
    return gap if positions == "shared" else 0


def adapter_key(lora_request: Any) -> str | None:
    """Return the `adapter` of `segment_keys` for a request's `LoRARequest`, or None without one.

    It holds name and path, as vLLM's own block hashes do: a server can load another adapter under a name that it has used.
    """
    return None if lora_request is None else json.dumps([lora_request.lora_name, lora_request.lora_path])


def segment_keys(
    prefix: Sequence[int],
    chunks: Sequence[Sequence[int]],
    *,
    gap: int = 0,
    cache_salt: str | None = None,
    adapter: str | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Return the content keys under which the engine stores K/V.

    Two segments have one key only if their K/V is the same. The time is linear in the number of tokens.

    Args:
        prefix: token ids of the prefix.
        chunks: token ids of every chunk.
        gap: positions left free between prefix and chunks. The key of the prefix, or of a chunk without prefix, does not depend
            on it.
        cache_salt: the tenant's salt.
        adapter: `adapter_key` of the LoRA adapter that computes the K/V.

    Returns:
        The prefix's key and the key of every chunk: 64 hexadecimal digits each.
    """
    digest = hashlib.sha256(_KEY_VERSION)
    for text in (cache_salt, adapter):
        data = b"" if text is None else text.encode("utf-8", "surrogatepass")
        digest.update((-1 if text is None else len(data)).to_bytes(8, "little", signed=True) + data)
    digest.update(len(prefix).to_bytes(8, "little") + array("q", prefix).tobytes())
    keys = []
    for chunk in chunks:
        one = digest.copy()
        one.update((gap if prefix else 0).to_bytes(8, "little") + array("q", chunk).tobytes())
        keys.append(one.hexdigest())
    return digest.hexdigest(), tuple(keys)


@dataclass(frozen=True)
class EngineRequest:
    """One request to vLLM.

    Attributes:
        token_ids: the prompt.
        cache_salt: the tenant's salt; None if it has none.
        kv_transfer_params: value of the request's field of that name; None for a plain request.
        keys: content keys of the K/V that a prefix or save request saves, or that a composed request loads.
    """

    token_ids: list[int]
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None
    keys: tuple[str, ...] = ()

    @property
    def save_start(self) -> int:
        """Return the length of the prefix of a prefix or save request."""
        assert self.kv_transfer_params is not None
        return int(self.kv_transfer_params[PARAMS_KEY]["save"])

    def after(self, computed: Collection[str]) -> EngineRequest:
        """Return this composed request, with the keys whose K/V other requests computed for its prompt."""
        if self.kv_transfer_params is None or not computed:
            return self
        return self._with(computed=sorted(computed))

    def read(self) -> EngineRequest:
        """Return this composed request, with all of its question computed, for `prompt_logprobs`.

        They hold the tokens behind the question's first. vLLM leaves the entries of tokens that it loads undefined.
        """
        return self._with(read=True)

    def _with(self, **fields: Any) -> EngineRequest:
        assert self.kv_transfer_params is not None
        return replace(self, kv_transfer_params={PARAMS_KEY: {**self.kv_transfer_params[PARAMS_KEY], **fields}})


@dataclass(frozen=True)
class PromptPlan:
    """Requests that answer one chunked prompt.

    Attributes:
        prefix: the prefix request; None if no save request needs it. It ends before the save requests start.
        saves: one save request per distinct chunk, each to be sent with `max_tokens=1`.
        composed: the request whose output answers the prompt.
        order: `order[j]` is the caller's number of the `j`-th chunk in the composed request. Empty chunks are left out.
    """

    prefix: EngineRequest | None
    saves: tuple[EngineRequest, ...]
    composed: EngineRequest
    order: tuple[int, ...]

    def missing(self, held: Container[str]) -> list[list[EngineRequest]]:
        """Return the requests to send before the composed one, in stages.

        The requests of a stage may run together. A client that submits all stages and the composed request in this order to one
        engine needs no wait between them: the engine makes each wait for what it needs.

        Args:
            held: content keys that the engine is believed to hold.
        """
        saves = [save for save in self.saves if any(key not in held for key in save.keys)]
        prefix = [self.prefix] if self.prefix and any(key not in held for key in self.prefix.keys) else []
        return [stage for stage in (prefix, saves) if stage]


def plan_prompt(
    prefix: Sequence[int],
    chunks: Sequence[Sequence[int]],
    question: Sequence[int],
    *,
    positions: Positions = "shared",
    gap: int = 0,
    cache_salt: str | None = None,
    adapter: str | None = None,
) -> PromptPlan:
    """Return the requests that answer `prefix + chunks + question`.

    Under `shared` positions the composed request holds the chunks in the order of their keys. The answer then does not depend
    on the caller's order, and vLLM's prefix cache answers for every order. Under `reordered` it keeps the caller's order.

    Args:
        prefix: token ids of the prefix.
        chunks: token ids of every chunk, possibly empty or repeated.
        question: token ids of the question.
        positions: position strategy.
        gap: the engine's `chunk_position_gap`.
        cache_salt: the tenant's salt.
        adapter: `adapter_key` of the LoRA adapter that answers the request.

    Raises:
        ValueError: the question is empty, the strategy is unknown or the gap is negative.
    """
    if not question:
        raise ValueError("the question is empty")
    if positions not in POSITIONS:
        raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, got {positions!r}")
    if gap < 0:
        raise ValueError(f"gap must be at least 0, got {gap}")
    prefix, question = list(prefix), list(question)
    gap = effective_gap(positions, gap) if chunks else 0
    prefix_key, keys = segment_keys(prefix, chunks, gap=gap, cache_salt=cache_salt, adapter=adapter)
    order = [number for number, chunk in enumerate(chunks) if len(chunk)]
    if positions == "shared":
        order.sort(key=lambda number: keys[number])

    needs_prefix = bool(prefix) and gap > 0
    token_ids = prefix + [token for number in order for token in chunks[number]] + question
    if not order and not needs_prefix:
        return PromptPlan(None, (), EngineRequest(token_ids, cache_salt, None), ())

    def request(token_ids: list[int], params: dict[str, Any], keys: Sequence[str]) -> EngineRequest:
        return EngineRequest(token_ids, cache_salt, {PARAMS_KEY: {**params, "positions": positions}}, tuple(keys))

    prefix_keys = [prefix_key] if prefix else []
    distinct = {keys[number]: list(chunks[number]) for number in order}
    bounds = list(accumulate((len(chunks[number]) for number in order), initial=len(prefix)))
    return PromptPlan(
        prefix=request(prefix, {"save": len(prefix)}, prefix_keys) if needs_prefix else None,
        saves=tuple(
            request(prefix + chunk, {"save": len(prefix)}, [key] if needs_prefix else [*prefix_keys, key])
            for key, chunk in distinct.items()
        ),
        composed=request(token_ids, {"bounds": bounds}, [*prefix_keys, *distinct]),
        order=tuple(order),
    )
