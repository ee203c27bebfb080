"""Messages between `EngineClient` and its worker, besides requests and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import jax.numpy as jnp

from chunkattn.config import EngineConfig
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import CachedTokens, EngineOutput, Message, PrecomputeRequest
from chunkattn.engine.vocabulary import Vocabulary
from chunkattn.models.loader import ModelFiles
from chunkattn.models.spec import DecoderSpec
from chunkattn.remote.frames import Frames

# To the worker


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as a worker needs it. The client reads the configuration once, so that no worker imports transformers."""

    path: str
    spec: DecoderSpec
    dtype: str
    adapter: str | None = None
    adapters: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(files: ModelFiles) -> Checkpoint:
        """Return the checkpoint of opened files."""
        adapter = None if files.adapter is None else str(files.adapter)
        adapters = {name: str(folder) for name, folder in files.adapters.items()}
        return Checkpoint(str(files.path), files.spec, files.dtype.name, adapter, adapters)

    def files(self) -> ModelFiles:
        """Return the opened files, without the tokenizer and the other parts that only front ends need."""
        adapter = None if self.adapter is None else Path(self.adapter)
        adapters = {name: Path(folder) for name, folder in self.adapters.items()}
        return ModelFiles(Path(self.path), self.spec, jnp.dtype(self.dtype), None, (), adapter=adapter, adapters=adapters)


@dataclass(frozen=True)
class Start:
    """The first message: build the engine, then answer `Ready` or `Failed`.

    Attributes:
        config: the engine's configuration.
        checkpoint: the checkpoint to load.
        log_level: level of the `chunkattn` logger.
        heartbeat_s: seconds between heartbeats.
    """

    config: EngineConfig
    checkpoint: Checkpoint
    log_level: int
    heartbeat_s: float


@dataclass(frozen=True)
class Sent:
    """Time at which the requests behind it in a frame were sent. A frame waits while the engine computes or compiles.

    Attributes:
        at: time on the clock of `time.perf_counter`, which all processes of a machine share.
    """

    at: float


@dataclass(frozen=True)
class Abort:
    """Order to abort a request; its pages are free before the next step begins."""

    request_id: str


@dataclass(frozen=True)
class Stop:
    """Order to end one sample of a request."""

    request_id: str
    sample: int


@dataclass(frozen=True)
class Unpin:
    """Order to let the cache evict the blocks that these precompute requests pinned."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class ResetCache:
    """Order to empty the cache; answered by `Reply`."""

    query_id: int


@dataclass(frozen=True)
class CacheQuery:
    """Query for the cached tokens of requests; answered by `Reply`.

    Attributes:
        query_id: id of the query.
        requests: see `EngineCore.look_up`.
        forget: see `EngineCore.look_up`.
    """

    query_id: int
    requests: tuple[PrecomputeRequest, ...]
    forget: bool = False


@dataclass(frozen=True)
class LoadAdapter:
    """Order to load an adapter, see `EngineCore.load_adapter`; answered by `Reply`."""

    query_id: int
    name: str
    folder: str


@dataclass(frozen=True)
class LoadVocabulary:
    """Order to take the vocabulary of the model, for the shapes of texts; answered by `Reply`."""

    query_id: int
    vocabulary: Vocabulary


@dataclass(frozen=True)
class MetricsQuery:
    """Query for the metrics; answered by `Reply`."""

    query_id: int


@dataclass(frozen=True)
class Shutdown:
    """Order to write everything that waits for the KV store, then exit."""


# From the worker


@dataclass(frozen=True)
class Heartbeat:
    """Periodic sign of life, sent from a thread of its own.

    Attributes:
        step_running_s: seconds since the current step or work began; 0 while the worker waits for work.
        busy: work that may take long: `"loading"`, `"compiling"`, `"writing"` or `"closing"`; None in a step.
    """

    step_running_s: float
    busy: str | None


@dataclass(frozen=True)
class WarmupProgress:
    """Number of parts of the warm-up that are done, and the total; see `WarmUp`."""

    done: int
    total: int


@dataclass(frozen=True)
class Snapshot:
    """Metrics of the engine, sent unasked where it will soon be busy for long.

    Attributes:
        metrics: metrics in Prometheus' text format.
    """

    metrics: str


@dataclass(frozen=True)
class Ready:
    """Notice that the engine takes requests.

    Attributes:
        limits: the engine's limits.
        import_s: seconds that the worker's imports took.
    """

    limits: EngineLimits
    import_s: float


@dataclass(frozen=True)
class Failed:
    """Notice that the worker is about to exit.

    Attributes:
        error_type: class name of the exception.
        text: message of the exception.
    """

    error_type: str
    text: str

    def __str__(self) -> str:
        return f"{self.error_type}: {self.text}"


@dataclass(frozen=True)
class Ended:
    """Notice that the worker is about to exit in order, and that another start is no repair.

    Attributes:
        reason: why the worker ends.
    """

    reason: str


@dataclass(frozen=True)
class Reply:
    """Answer to a query.

    Attributes:
        query_id: id of the query.
        value: of `ResetCache`, whether every page is free; of `CacheQuery`, the tokens of each request that were cached in
            memory; of `MetricsQuery`, the metrics in Prometheus' text format; of `LoadAdapter`, why it is refused, or ""; of
            `LoadVocabulary`, True.
    """

    query_id: int
    value: bool | tuple[CachedTokens, ...] | str


Query = ResetCache | CacheQuery | LoadAdapter | LoadVocabulary | MetricsQuery
ToWorker = Message | Start | Sent | Abort | Stop | Unpin | Query | Shutdown
FromWorker = EngineOutput | Snapshot | Heartbeat | WarmupProgress | Ready | Failed | Ended | Reply

_FRAMES = Frames(get_args(ToWorker | FromWorker))
encode, decode = _FRAMES.encode, _FRAMES.decode
