"""Messages between `EngineClient` and its worker beside requests and their outputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from chunkattn.config import EngineConfig
from chunkattn.engine.messages import CachedTokens, EngineLimits, PrecomputeRequest
from chunkattn.models.loader import ModelFiles
from chunkattn.models.spec import DecoderSpec

# To the worker


@dataclass(frozen=True)
class Checkpoint:
    """What a worker has to know of a checkpoint: read once, by the client, so that no worker imports transformers."""

    folder: str
    spec: DecoderSpec
    dtype: str

    @staticmethod
    def of(files: ModelFiles) -> Checkpoint:
        """Of opened files."""
        return Checkpoint(str(files.folder), files.spec, files.dtype.name)

    def files(self) -> ModelFiles:
        """The same files opened, without a tokenizer and what only front ends need."""
        return ModelFiles(Path(self.folder), self.spec, jnp.dtype(self.dtype), None, ())


@dataclass(frozen=True)
class Start:
    """The first message: build the engine, then answer `Ready` or `Failed`.

    Attributes:
        log_level: of the `chunkattn` logger.
        heartbeat_s: seconds between heartbeats.
        warm_beside: compile every program beside the requests instead of before `Ready`.
    """

    config: EngineConfig
    checkpoint: Checkpoint
    log_level: int
    heartbeat_s: float
    warm_beside: bool = False


@dataclass(frozen=True)
class Abort:
    """Forget a request; its pages are free before the next step begins."""

    request_id: str


@dataclass(frozen=True)
class Stop:
    """End one sample."""

    request_id: str
    sample: int


@dataclass(frozen=True)
class Unpin:
    """Let the cache evict what these precompute requests pinned."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class ResetCache:
    """Forget everything cached; answered by `ResetReply`."""

    query_id: int


@dataclass(frozen=True)
class CacheQuery:
    """Answered by `CacheReply`.

    Attributes:
        requests: see `EngineCore.look_up`.
        forget: see there.
    """

    query_id: int
    requests: tuple[PrecomputeRequest, ...]
    forget: bool = False


@dataclass(frozen=True)
class MetricsQuery:
    """Answered by `MetricsReply`."""

    query_id: int


@dataclass(frozen=True)
class Shutdown:
    """Leave in order: write what the KV store still waits for, then exit."""


ToWorker = Start | Abort | Stop | Unpin | ResetCache | CacheQuery | MetricsQuery | Shutdown

# From the worker


@dataclass(frozen=True)
class Heartbeat:
    """Sent all the time, from a thread of its own.

    Attributes:
        step_running_s: seconds the worker has been at one thing; 0 while it waits for work.
        busy: what may take long for good reason: `"loading"`, `"compiling"`, `"writing"` or `"closing"`; None in a step.
    """

    step_running_s: float
    busy: str | None


@dataclass(frozen=True)
class WarmupProgress:
    """Programs compiled of those the warm-up compiles."""

    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    """Requests are welcome."""

    limits: EngineLimits


@dataclass(frozen=True)
class Failed:
    """The worker is about to exit.

    Attributes:
        error_type: the exception's class name.
    """

    error_type: str
    text: str


@dataclass(frozen=True)
class ResetReply:
    """Whether every page is free now."""

    query_id: int
    all_free: bool


@dataclass(frozen=True)
class CacheReply:
    """What was in memory of each request."""

    query_id: int
    cached: tuple[CachedTokens, ...]


@dataclass(frozen=True)
class MetricsReply:
    """Metrics in Prometheus' text format."""

    query_id: int
    text: str


FromWorker = Heartbeat | WarmupProgress | Ready | Failed | ResetReply | CacheReply | MetricsReply
