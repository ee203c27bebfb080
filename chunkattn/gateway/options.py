"""Options of the gateway beside those of its HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from chunkattn.errors import ConfigError
from chunkattn.options import take_paths


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """Options of the gateway: how it chooses, asks and watches replicas.

    Attributes:
        policy: rule that chooses the replica of a request: `document`, the only one, sends it where the fewest bytes of its
            documents are missing.
        chunk_separator: separator at which the replicas split text prompts; None if they split none.
        replica_key: API key of the gateway's own requests to the replicas. Requests of clients keep their own key.
        resolve: take every address of a host name as a replica of its own, and look the names up again every 5 s, as for a
            headless service of Kubernetes.
        max_tries: replicas that may begin with one request, as long as no byte of an answer was sent to the client.
        replica_wait_s: time in seconds that a request waits for a replica while none takes requests, as during a restart;
            0 refuses it at once.
        report_period_s: period in seconds in which the gateway asks each replica for its state.
        report_timeout_s: time in seconds within which a replica must tell its state.
        hang_timeout_s: time in seconds after which a replica that does not tell its state loses its running requests and its
            pinned documents.
        connect_timeout_s: time limit of a connection to a replica in seconds.
        document_store: file of the documents stored by id; without one they are lost when the gateway ends.
    """

    policy: str = "document"
    chunk_separator: str | None = None
    replica_key: str | None = None
    resolve: bool = False
    max_tries: int = 3
    replica_wait_s: float = 30.0
    report_period_s: float = 1.0
    report_timeout_s: float = 2.0
    hang_timeout_s: float = 20.0
    connect_timeout_s: float = 3.0
    document_store: str | None = None

    def __post_init__(self) -> None:
        take_paths(self)
        if self.policy != "document":
            raise ConfigError(f"policy {self.policy!r} is unknown; the only one is document")
        if self.max_tries < 1:
            raise ConfigError(f"max_tries must be at least 1, got {self.max_tries}")
        for name in ("report_period_s", "report_timeout_s", "hang_timeout_s", "connect_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.replica_wait_s < float("inf"):
            raise ConfigError(f"replica_wait_s must be at least 0, got {self.replica_wait_s}")
        for name in ("replica_key", "chunk_separator", "document_store"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty; leave it out instead")
