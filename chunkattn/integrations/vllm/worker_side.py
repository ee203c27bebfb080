"""Worker's side of the connector: copies, rotates and keeps K/V."""

from __future__ import annotations

import time
from typing import Any

import torch

from chunkattn.integrations.vllm.block_layout import BlockLayout
from chunkattn.integrations.vllm.metrics import ConnectorStats
from chunkattn.integrations.vllm.rotation import KeyRotation, Turn
from chunkattn.integrations.vllm.step import Load, Save, StepWork


class WorkerSide:
    """Store of one rank: the keys and values of its layers and heads.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self.store: dict[str, torch.Tensor] = {}
        """K/V of every segment, in RAM: `[L, T, H, 2D]`, keys first, in the cache's type."""
        self._block_size = block_size
        self._layout = BlockLayout(block_size)
        self._layers: list[tuple[Any, torch.Tensor]] = []
        self._rotation: KeyRotation | None = None
        self._stats = ConnectorStats()

    def register(self, layers: list[tuple[Any, torch.Tensor]], rotation: KeyRotation) -> None:
        """Take the attention layers with their caches `[B, H, N, 2D]`, and the rotation of their keys."""
        self._layers = layers
        self._rotation = rotation

    def run_loads(self, work: StepWork) -> None:
        """Write the step's loads into the cache, before the forward pass."""
        began = time.perf_counter()
        for load in work.loads:
            self._load(load)
        if work.loads:
            self._stats.count(load_seconds=time.perf_counter() - began)

    def run_evictions_and_saves(self, work: StepWork) -> None:
        """Drop evicted segments, and copy the step's saves from the cache, after the forward pass."""
        for key in work.evicted:
            self.store.pop(key, None)
        began = time.perf_counter()
        for save in work.saves:
            self._save(save)
        if work.saves:
            self._stats.count(save_seconds=time.perf_counter() - began)

    def take_stats(self) -> ConnectorStats | None:
        """Return the statistics since the last call, None if nothing happened."""
        return self._stats.take()

    def _save(self, save: Save) -> None:
        if not save.segments:
            return
        first = save.segments[0].start // self._block_size
        offset = first * self._block_size
        _, heads, _, width = self._layers[0][1].shape
        dtype = self._layers[0][1].dtype
        parts = [torch.empty(len(self._layers), s.end - s.start, heads, width, dtype=dtype) for s in save.segments]
        # One layer at a time, so that the device holds one layer's copy of the tokens.
        for number, layer in enumerate(self._layers):
            kv = self._layout.read(*layer, save.block_ids[first:])
            for segment, part in zip(save.segments, parts):
                part[number] = kv[segment.start - offset : segment.end - offset]
        self.store |= {segment.key: part for segment, part in zip(save.segments, parts)}

    def _load(self, load: Load) -> None:
        parts = [self.store[s.key][:, max(0, load.start - s.start) :] for s in load.segments]
        device = self._layers[0][1].device
        slots = self._layout.slots(load.block_ids, load.start, load.end).to(device)
        turn = self._turn(load)
        # All layers share the buffers: fresh ones would cost more time than the copies.
        staging = torch.cat([part[0] for part in parts])
        key, value = (torch.empty_like(x, memory_format=torch.contiguous_format, device=device) for x in staging.chunk(2, -1))
        scratch = torch.empty(2, *key.shape[:2], turn.cos.shape[-1], dtype=torch.float32, device=device)
        assert self._rotation is not None
        for number, (layer, cache) in enumerate(self._layers):
            torch.cat([part[number] for part in parts], out=staging)
            stored_key, stored_value = staging.to(device).chunk(2, -1)
            self._rotation.apply(stored_key, turn, key, scratch)
            value.copy_(stored_value)
            self._layout.write(layer, cache, key, value, slots)

    def _turn(self, load: Load) -> Turn:
        source = torch.cat([torch.arange(max(0, load.start - s.start), s.end - s.start) + s.origin for s in load.segments])
        shift = torch.cat([torch.full((s.end - max(s.start, load.start),), s.shift) for s in load.segments])
        assert self._rotation is not None
        turn = self._rotation.turn(source, source + shift)
        device = self._layers[0][1].device
        return Turn(turn.cos.to(device), turn.sin.to(device))
