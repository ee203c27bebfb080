"""Options of the HTTP server. `chunkattn.config` has the engine options."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from chunkattn.errors import ConfigError

LOG_FORMATS = ("text", "json")
_ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server: address, access, and limits on requests.

    Attributes:
        host: address to listen on. The default accepts connections from this machine only.
        port: port to listen on; 0 picks a free port.
        api_key: key that clients must send as bearer token, or as the password of HTTP Basic. A server without
            any key accepts every client.
        served_model_name: model name in `/v1/models`, requests and answers; by default the hub id, or the path's last part.
        request_timeout_s: time limit of a request in seconds; a longer request is aborted and answered with 504.
        max_body_bytes: size limit of a request body in bytes; a longer body is answered with 413.
        max_prompts_per_request: number of prompts, or of queries, that one request may hold.
        max_cached_documents: number of documents that `/v1/cache/documents` stores at once.
        priority_range: largest absolute priority that a request may set; 0 allows only the default priority.
        allow_packed_dense: accept `algorithm: "packed_dense"`. The baseline is off by default, because each of its packs
            delays all other requests.
        drain_timeout_s: time in seconds that running requests have to finish after SIGTERM.
        root_path: path below which a proxy serves this server, such as "/llm". Requests may come with or without it.
        ready_when_warm: report readiness, in `/readyz`, `/health` and the output, only once every program is compiled. Requests
            are accepted before that.
        log_format: format of the log, "text" or "json", for the engine process too; one line per request in both formats.
        api_key_file: file of named API keys, one `name:key` per line, read again at SIGHUP. Clients of different names share no
            cache and no documents, and each name has its quotas. Without a key file, only `api_key` is accepted.
        metrics_key: key that opens `/metrics` and no other route; API keys do not open `/metrics` then.
        max_queue_share: share of `max_queued_requests` that the requests of one named API key may hold; without a key file,
            the share of one request.
        max_pinned_share: share of the KV pool's pages that the pinned documents of all keys together may hold.
        max_pinned_share_per_key: share of the KV pool's pages that the pinned documents of one named API key may hold.
        max_cached_documents_per_key: number of stored documents of one named API key.
        max_connections: number of open connections; further connections are answered with 503. The process's limit on open
            files may lower this number.
        header_timeout_s: time limit in seconds for the headers of a request, from its first byte or from the opening of the
            connection.
        body_timeout_s: period in seconds in which a client must send 256 bytes of the body per second on average; a slower
            client is answered with 408.
        max_answer_values: number of values that one answer may hold: queries x items x labels, or prompts x samples x tokens
            x log-probabilities.
        write_timeout_s: period in seconds in which a client must read 256 bytes of its answer per second on average; a slower
            client is disconnected.
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
    root_path: str = ""
    ready_when_warm: bool = False
    log_format: str = "text"
    api_key_file: str | None = None
    metrics_key: str | None = None
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
        for name in ("api_key", "served_model_name", "api_key_file", "metrics_key"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty; leave it out instead")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(f"root_path must begin with / and not end with it, such as '/llm', got {self.root_path!r}")
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
