"""Read and write tokens of vLLM's paged KV cache, whatever the attention backend's layout.

vLLM shows each layer's cache as `[B, H, N, 2D]`: blocks, KV heads, tokens per block, key and value channels. Writes go through
the backend's own writer. Reads undo the order that this writer uses inside a block: on a GPU it is the shown one; on x86 a
head's keys lie as `[D, N]` before its values. The order is learnt once, by writing numbers and reading them back.
"""

from __future__ import annotations

from typing import Any

import torch

_BITS = 6  # integers below 64 are exact in every cache type
_PASSES = 4


class BlockLayout:
    """Tokens of one layer kind's cache.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._order: torch.Tensor | None = None

    def slots(self, block_ids: list[int], start: int, end: int) -> torch.Tensor:
        """Return the cache slots of a request's tokens `[start, end)`: int64 `[end - start]`."""
        index = torch.arange(start, end)
        return torch.tensor(block_ids)[index // self._block_size] * self._block_size + index % self._block_size

    def write(self, layer: Any, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write contiguous keys and values `[T, H, D]` into slots `[T]` of a layer's cache `[B, H, N, 2D]`."""
        layer.impl.do_kv_cache_update(layer, key, value, cache, slots)

    def read(self, layer: Any, cache: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
        """Return all tokens of some blocks: `[len(block_ids) * N, H, 2D]`, keys first."""
        num_blocks, (_, heads, tokens, width) = len(block_ids), cache.shape
        raw = cache[torch.tensor(block_ids, device=cache.device)].reshape(num_blocks, heads, -1)
        raw = raw[:, :, self._learn(layer, cache)].view(num_blocks, heads, tokens, width)
        return raw.transpose(1, 2).reshape(num_blocks * tokens, heads, width)

    def _learn(self, layer: Any, cache: torch.Tensor) -> torch.Tensor:
        """Return the place of each of a head's `N * 2D` elements in its block, for all heads alike: int64 `[N * 2D]`.

        The writer is ready at the first use only, after vLLM has run the model once.

        Raises:
            NotImplementedError: the writer does not store every element once, or not in one order for all heads.
        """
        if self._order is None:
            _, heads, tokens, width = cache.shape
            numbers = torch.arange(tokens * width).view(tokens, width)
            seen = torch.zeros(heads, tokens * width, dtype=torch.long)
            slots = self.slots([0], 0, tokens).to(cache.device)
            for shift in range(0, _BITS * _PASSES, _BITS):
                probe = torch.empty_like(cache[:1]).zero_()
                digits = ((numbers >> shift) & ((1 << _BITS) - 1)).to(cache.dtype)
                data = digits[:, None].expand(-1, heads, -1).to(cache.device)
                # Some writers take the heads of a token to lie side by side, whatever the strides.
                key, value = (part.contiguous() for part in data.chunk(2, -1))
                self.write(layer, probe, key, value, slots)
                seen += probe[0].reshape(heads, -1).long().cpu() << shift
            order = seen[0].argsort()
            if not torch.equal(seen[:, order], numbers.view(1, -1).expand(heads, -1)):
                raise NotImplementedError("the attention backend's KV cache is not one permutation of keys and values")
            self._order = order.to(cache.device)
        return self._order
