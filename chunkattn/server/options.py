"""Options of the HTTP server, beside the engine's."""

from __future__ import annotations

from dataclasses import dataclass, fields

from chunkattn.errors import ConfigError

LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How to listen, to whom, and what one request may ask for.

    Attributes:
        host: address to listen on; only this machine can reach the default.
        port: to listen on; 0 takes a free one.
        api_key: what clients must send as bearer token, or as the password of HTTP Basic; None lets everybody in.
        served_model_name: in `/v1/models`, answers and requests; None is the model's path or id.
        request_timeout_s: seconds until a request is aborted and answered with 504.
        max_body_bytes: longest request body; longer ones are answered with 413.
        max_prompts_per_request: longest list of prompts, and of queries, in one request.
        max_cached_documents: documents of `/v1/cache/documents` that are remembered at once.
        priority_range: clients may send priorities from minus this to this; 0 allows the default alone.
        allow_packed_dense: take `algorithm: "packed_dense"`, a baseline whose every pack holds all other requests up.
        drain_timeout_s: seconds that requests get to end after SIGTERM.
        log_format: "text" or "json", for the engine's process too; one line a request either way.
        api_key_file: file of named API keys, one `name:key` a line, read again at SIGHUP. Clients of different names share no
            cache and no documents, and each name has its quotas; None leaves `api_key` alone.
        max_queue_share: share of `max_queued_requests` that the requests of one API key of the file may hold; without a file,
            one request.
        max_pinned_share: share of the KV pool's pages that pinned documents may hold, those of all keys together.
        max_pinned_share_per_key: the same for each API key of the file.
        max_cached_documents_per_key: documents that are remembered for each API key of the file.
        max_connections: connections at once; further ones are answered with 503. Lowered where the file limit is too low.
        header_timeout_s: seconds for the headers of a request, from its first byte or the connection's beginning.
        body_timeout_s: seconds in which a body must go on, by 256 bytes for each of them; else it is answered with 408.
        max_answer_values: numbers that one answer may hold: queries x items x labels, or prompts x samples x tokens x
            log-probabilities.
        write_timeout_s: seconds in which a client must read on, by 256 bytes for each of them; else it is cut off.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    request_timeout_s: float = 600.0
    max_body_bytes: int = 8 << 20
    max_prompts_per_request: int = 128
    max_cached_documents: int = 10_000
    priority_range: int = 0
    allow_packed_dense: bool = False
    drain_timeout_s: float = 30.0
    log_format: str = "text"
    api_key_file: str | None = None
    max_queue_share: float = 0.5
    max_pinned_share: float = 0.5
    max_pinned_share_per_key: float = 0.25
    max_cached_documents_per_key: int = 2500
    max_connections: int = 2048
    header_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    max_answer_values: int = 1_000_000

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        for name in ("api_key", "served_model_name", "api_key_file"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty; leave it out instead")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"log_format {self.log_format!r} is unknown; choose one of {', '.join(LOG_FORMATS)}")
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name == "priority_range" and value < 0:
                raise ConfigError(f"priority_range must be at least 0, got {value}")
            counts = option.type in ("int", "float") and option.name not in ("port", "priority_range")
            if counts and not 0 < value < float("inf"):
                raise ConfigError(f"{option.name} must be above 0, got {value}")
            if "_share" in option.name and value > 1:
                raise ConfigError(f"{option.name} must be at most 1, got {value}")
