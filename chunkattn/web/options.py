"""Options of the HTTP server. `chunkattn.config` has the engine options."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from chunkattn.addresses import origin
from chunkattn.errors import ConfigError
from chunkattn.options import options_of, take_paths

LOG_FORMATS = ("text", "json")
_FROM_ZERO = ("priority_range", "stream_heartbeat_s", "min_label_mass", "slow_request_s")
_ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server: address, access, and limits on requests.

    Attributes:
        host: address to listen on. The default accepts connections from this machine only.
        port: port to listen on; 0 picks a free port.
        api_key: key that clients must send as bearer token, or as the password of HTTP Basic. A server without
            any key accepts every client.
        served_model_name: names of the model in `/v1/models` and in requests; answers carry the first. By default the hub id,
            or the path's last part.
        request_timeout_s: time limit of a request in seconds; a longer request is aborted and answered with 504.
        max_body_bytes: size limit of a request body in bytes; a longer body is answered with 413.
        max_body_bytes_per_client: bytes of large request bodies (over 64 KiB) and of large answers that one client may hold in
            memory at once; further requests of the client wait. A client is a named API key or, without a key file, an address.
        max_prompts_per_request: number of prompts, or of queries, that one request may hold.
        max_cached_documents: number of documents that `/v1/cache/documents` stores at once.
        priority_range: largest absolute priority that a request may set; 0 allows only the default priority.
        drain_timeout_s: time in seconds that running requests have to finish after SIGTERM.
        root_path: path below which a proxy serves this server, such as "/llm". Requests may come with or without it.
        ready_when_warm: report readiness, in `/readyz`, `/health` and the output, only once every program is compiled. Requests
            are accepted before that.
        unresponsive_after_s: time in seconds without a sign of life of the engine, or in an unusually long step, after which
            `/readyz` and `/health` answer 503 with the status `unresponsive`. A step is unusually long from 15 s and three
            times the longest step before, or from half of `engine_hang_timeout_s` if that is less. Compilations do not count.
        slow_request_s: time in seconds from which the log marks a request with `slow` and the part that took the most time; 0
            marks none.
        timing_headers: send the headers `Server-Timing`, with the times of the request, and `X-Chunkattn-Tokens`, with its
            prompt, cached and computed tokens. A stream has those up to its first token.
        log_format: format of the log, "text" or "json", for the engine process too; one line per request in both formats.
        api_key_file: file of named API keys, one `name:key` per line, read again at SIGHUP. Clients of different names share no
            cache and no documents, and each name has its quotas. Without a key file, only `api_key` is accepted.
        metrics_key: key that opens `/metrics` and no other route; API keys do not open `/metrics` then.
        max_queue_share: share of `max_queued_requests` that the requests of one named API key may hold; without a key file,
            the share of one request.
        max_pinned_share: share of the KV pool's pages, and of states, that pinned documents of all keys together may hold.
        max_pinned_share_per_key: share of the KV pool's pages, and of states, that those of one named API key may hold.
        max_cached_documents_per_key: number of stored documents of one named API key.
        max_connections: number of open connections; further connections are answered with 503. Connections that have not
            brought a valid key, or without keys no request, may be three quarters of them: a further one takes the place of
            the oldest idle one. Health probes always find a place. The process's limit on open files may lower this number.
        header_timeout_s: time limit in seconds for the headers of a request, from its first byte or from the opening of the
            connection.
        body_timeout_s: period in seconds in which a client must send 256 bytes of the body per second on average; a slower
            client is answered with 408.
        max_answer_values: number of values that one answer may hold: queries x items x labels, or prompts x samples x tokens
            x log-probabilities.
        min_label_mass: label mass below which `/v1/decisions` answers a question with a refusal; 0 refuses none.
        stream_heartbeat_s: time in seconds after which a silent stream gets a comment line, so that proxies keep it open; 0
            sends none. An error within that time of a request's start has its HTTP status, a later error is an event.
        timeout_keep_alive: time in seconds after which an idle connection is closed. Choose it longer than the pools of clients
            and proxies keep one, such as 620 behind Google Cloud's load balancers.
        write_timeout_s: period in seconds in which a client must read 256 bytes of its answer per second on average; a slower
            client is disconnected.
        allowed_origins: origins whose pages may call the server from a browser (CORS), such as `https://app.example`; `*` for
            every page, `null` for files. By default no page of another origin may.
        allowed_methods: methods that such pages may use.
        allowed_headers: request headers that such pages may send.
        document_store: file in which the documents of `/v1/cache/documents` survive a restart of the server, made when absent.
            It holds their texts. Each server needs a file of its own.
        report_documents: answer `/v1/cache/report`, from which a gateway reads which documents the KV cache holds.
        tool_call_parser: form in which the model writes calls of tools, by its name in vLLM: `hermes`, `qwen3_coder`,
            `llama3_json`, `pythonic`, `mistral`, `functiongemma` or `gemma4`; `auto` chooses by the chat template, `none`
            refuses tools.
        reasoning_parser: form in which the model marks its reasoning, by its name in vLLM: `qwen3`, `deepseek_r1`, `mistral` or
            `gemma4`; `auto` chooses by the chat template, `none` leaves it in the text.
        allow_credentials: let such pages send the credentials that the browser keeps for the server. Needs origins by name.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: tuple[str, ...] = ()
    request_timeout_s: float = 600.0
    max_body_bytes: int = 8 << 20
    max_body_bytes_per_client: int = 64 << 20
    max_prompts_per_request: int = 128
    max_cached_documents: int = 10_000
    priority_range: int = 0
    drain_timeout_s: float = 30.0
    root_path: str = ""
    ready_when_warm: bool = False
    unresponsive_after_s: float = 5.0
    slow_request_s: float = 10.0
    timing_headers: bool = False
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
    timeout_keep_alive: float = 120.0
    write_timeout_s: float = 60.0
    max_answer_values: int = 1_000_000
    min_label_mass: float = 0.0
    stream_heartbeat_s: float = 0.0
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    document_store: str | None = None
    report_documents: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    allow_credentials: bool = False

    def __post_init__(self) -> None:
        take_paths(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        options = options_of(type(self)).values()
        for option in options:
            if option.kind is tuple:
                object.__setattr__(self, option.name, _texts(option.name, getattr(self, option.name)))
        object.__setattr__(self, "allowed_origins", tuple(dict.fromkeys(map(origin, self.allowed_origins))))
        object.__setattr__(self, "allowed_methods", tuple(method.upper() for method in self.allowed_methods))
        if self.allow_credentials and "*" in self.allowed_origins:
            text = "allow_credentials with allowed_origins * would let every web page use the credentials of its visitors"
            raise ConfigError(f"{text}; name the origins")
        for name in ("api_key", "api_key_file", "metrics_key", "document_store"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty; leave it out instead")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(f"root_path must begin with / and not end with it, such as '/llm', got {self.root_path!r}")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"log_format {self.log_format!r} is unknown; choose one of {', '.join(LOG_FORMATS)}")
        for option in options:
            value = getattr(self, option.name)
            if option.name in _FROM_ZERO and not 0 <= value < float("inf"):
                raise ConfigError(f"{option.name} must be at least 0, got {value}")
            counts = option.kind in (int, float) and option.name not in ("port", *_FROM_ZERO)
            if counts and not 0 < value < float("inf"):
                raise ConfigError(f"{option.name} must be above 0, got {value}")
            if ("_share" in option.name or option.name == "min_label_mass") and value > 1:
                raise ConfigError(f"{option.name} must be at most 1, got {value}")


def _texts(name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """Return the entries of an option that holds several texts.

    Args:
        name: name of the option.
        value: a text or a list of texts. A text may be a JSON list, the form that vLLM's flags take.

    Raises:
        ConfigError: an entry is not a text, or empty.
    """
    texts: list[str] = []
    for entry in [value] if isinstance(value, str) else value:
        try:
            texts += json.loads(entry) if isinstance(entry, str) and entry.startswith("[") else [entry]
        except ValueError as error:
            raise ConfigError(f"{name} {entry!r} is not a JSON list: {error}") from None
    if not all(isinstance(entry, str) for entry in texts):
        raise ConfigError(f"{name} must hold texts, got {texts!r}")
    if "" in texts:
        raise ConfigError(f"{name} must not be empty; leave it out instead")
    return tuple(texts)
