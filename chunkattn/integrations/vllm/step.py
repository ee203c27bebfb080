"""Work of one engine step, sent by the scheduler to every worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from chunkattn.integrations.vllm.transfers import StoredSegment


@dataclass
class Load:
    """Segments to write into a request's blocks before the forward pass.

    Attributes:
        block_ids: the request's blocks, from its first token on.
        start: tokens before this index are in the blocks already. It is a multiple of the block size.
        end: index after the last token to load.
        segments: segments that end after `start`, in order.
    """

    block_ids: list[int]
    start: int
    end: int
    segments: tuple[StoredSegment, ...]


@dataclass
class Save:
    """Segments to copy from a request's blocks after the forward pass.

    Attributes:
        block_ids: the request's blocks, from its first token on.
        segments: segments to save.
    """

    block_ids: list[int]
    segments: tuple[StoredSegment, ...]


@dataclass
class StepWork(KVConnectorMetadata):
    """Loads, evictions and saves of one step. Workers run them in this order.

    Attributes:
        loads: loads before the forward pass.
        evicted: keys to drop after it.
        saves: saves after the evictions.
        failed_loads: ids of refused requests, whose loads are reported as failed.
    """

    loads: list[Load] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    failed_loads: list[str] = field(default_factory=list)
