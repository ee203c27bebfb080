"""Options of the application, and the environment variables that it needs of Ray Serve."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from chunkattn.config import EngineConfig, make_config
from chunkattn.errors import ConfigError
from chunkattn.gateway.options import GatewayOptions
from chunkattn.options import options_of
from chunkattn.web.options import ServerConfig

CHANNEL = "chunkattn"
"""Name that the router and the transport share in the gateway's process."""
ELSEWHERE = {
    "host": "set http_options.host of the Serve configuration",
    "port": "set http_options.port of the Serve configuration",
    "drain_timeout_s": "a replica that is being stopped finishes its requests",
    "document_store": "the gateway stores documents: set gateway.document_store",
    "report_documents": "replicas always report",
}
"""Options of the server that mean nothing to a replica, and what takes their place."""
_NOT_HERE = {
    "replica_key": "the gateway asks the replicas without HTTP",
    "resolve": "Ray Serve tells the gateway the replicas",
    "connect_timeout_s": "Ray Serve connects to the replicas",
}
"""Options of the gateway that concern replicas by URL."""
_MARGIN_S = 60.0
"""Seconds that a replica being stopped has beyond its longest request."""
_MESSAGE_OVERHEAD = 1 << 20
"""Bytes of a gRPC message beyond the body: path, headers and framing."""


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """Options of the application: the `args` of a Serve configuration file.

    Attributes:
        engine: options of `AsyncLLM`, including `model`.
        server: options of `ServerConfig` for every replica, without `host`, `port` and `drain_timeout_s`.
        gateway: options of `chunkattn.gateway.options.GatewayOptions`.
        replicas: number of replicas, or a mapping with the fields of Ray Serve's `autoscaling_config`.
        gateways: number of gateways.
        ray_actor_options: resources of one replica, such as `{"num_gpus": 1}`.
        allow_unauthenticated: start without an API key although the HTTP port is open to other machines.
    """

    engine: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
    gateway: Mapping[str, Any] = field(default_factory=dict)
    replicas: int | Mapping[str, Any] = 2
    gateways: int = 1
    ray_actor_options: Mapping[str, Any] = field(default_factory=lambda: {"num_cpus": 1})
    allow_unauthenticated: bool = False

    def __post_init__(self) -> None:
        for name in ("engine", "server", "gateway", "ray_actor_options"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"{name} must be a mapping of options, got {getattr(self, name)!r}")
        if not isinstance(self.replicas, Mapping):
            _check_count("replicas", self.replicas)
        _check_count("gateways", self.gateways)
        if not isinstance(self.allow_unauthenticated, bool):
            raise ConfigError(f"allow_unauthenticated must be true or false, got {self.allow_unauthenticated!r}")
        for part, cls, elsewhere in (("server", ServerConfig, ELSEWHERE), ("gateway", GatewayOptions, _NOT_HERE)):
            values = getattr(self, part)
            for name in values.keys() & elsewhere.keys():
                raise ConfigError(f"{part}.{name} has no effect on Ray Serve; {elsewhere[name]}")
            _check_names(values, [name for name in options_of(cls) if name not in elsewhere], f"{part}.")
        if self.gateways > 1 and self.gateway_options.document_store is not None:
            raise ConfigError("gateway.document_store needs gateways 1: several gateways store no documents by id")
        _ = self.engine_config, self.server_config

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> AppOptions:
        """Return the options of `args`.

        Args:
            args: mapping of the fields' names.

        Raises:
            ConfigError: an option is unknown or invalid.
        """
        _check_names(args, list(cls.__dataclass_fields__))
        return cls(**args)

    @property
    def engine_config(self) -> EngineConfig:
        """Return the options of the engines."""
        return make_config(self.engine.get("model"), {k: v for k, v in self.engine.items() if k != "model"})

    @property
    def server_config(self) -> ServerConfig:
        """Return the options of the replicas' applications."""
        return ServerConfig(**self.server)

    @property
    def gateway_options(self) -> GatewayOptions:
        """Return the options of the gateways. They split texts at the engines' separator."""
        separator = self.engine_config.chunk_separator if self.engine_config.enable_chunk_aware else None
        return GatewayOptions(**{"chunk_separator": separator, **self.gateway})

    @property
    def max_ongoing_requests(self) -> int:
        """Return how many requests Ray sends to a replica at once: more than the engine queues, so that it answers 429."""
        return 2 * self.engine_config.max_queued_requests + 64

    @property
    def graceful_shutdown_timeout_s(self) -> float:
        """Return the seconds that a replica being stopped has for its running requests."""
        return self.server_config.request_timeout_s + _MARGIN_S

    @property
    def max_message_bytes(self) -> int:
        """Return the size of the longest gRPC message."""
        return self.server_config.max_body_bytes + _MESSAGE_OVERHEAD


def _check_names(values: Mapping[str, Any], known: Sequence[str], part: str = "") -> None:
    if unknown := sorted(map(str, values.keys() - {*known})):
        raise ConfigError(f"unknown option {part}{unknown[0]}; options are {', '.join(known)}")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")


_SINGLE_LOOP = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
"""Ray Serve's settings for throughput, without those that need HAProxy."""
_NEEDED = tuple(_SINGLE_LOOP)[:3]
"""Settings without which the application fails."""
_PORTS = {
    "HAPROXY_STATS_PORT": 0,
    "HAPROXY_METRICS_PORT": 1,
    "FALLBACK_PROXY_HTTP_PORT": 2,
    "FALLBACK_PROXY_GRPC_PORT": 3,
    "DIRECT_INGRESS_MIN_HTTP_PORT": 8,
    "DIRECT_INGRESS_MAX_HTTP_PORT": 63,
}
"""Variables of ports, after `RAY_SERVE_`, each with its distance from the first port."""
_FILES = {
    "CONFIG_FILE_LOC": "haproxy.cfg",
    "SOCKET_PATH": "admin.sock",
    "SERVER_STATE_BASE": "",
    "SERVER_STATE_FILE": "server-state",
    "METRICS_SOCKET_PATH": "metrics.sock",
}
"""Variables of HAProxy's files, after `RAY_SERVE_HAPROXY_`, each with its path in their folder."""
_MESSAGE = "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
_HARD_STOP = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
"""Seconds that a former HAProxy process has for its running requests when a new process takes over, at every update."""


def environment(
    max_body_bytes: int = ServerConfig.max_body_bytes,
    *,
    haproxy: bool = True,
    request_timeout_s: float = ServerConfig.request_timeout_s,
    run_folder: str | None = None,
    first_port: int = 8400,
    drain_s: float = 5.0,
) -> dict[str, str]:
    """Return the environment variables that every node needs before Ray starts there. The token itself is not among them.

    Args:
        max_body_bytes: the server's option.
        haproxy: whether HAProxy receives the requests; without it, the gateway listens itself.
        request_timeout_s: the server's option.
        run_folder: folder of HAProxy's files, one per node; None takes `/tmp/haproxy-serve`, Ray's own default.
        first_port: first of the 64 ports that HAProxy, its statistics and the gateways use on a node.
        drain_s: seconds that a gateway being stopped stays reachable, so that HAProxy's processes learn of it.
    """
    variables = {
        **_SINGLE_LOOP,
        _MESSAGE: str(max_body_bytes + _MESSAGE_OVERHEAD),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
    }
    if not haproxy:
        return variables | {_HAPROXY: "0", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
    folder = Path(run_folder or "/tmp/haproxy-serve")
    return {
        **variables,
        _HAPROXY: "1",
        _HARD_STOP: str(ceil(request_timeout_s + _MARGIN_S)),
        **{f"RAY_SERVE_{name}": str(first_port + number) for name, number in _PORTS.items()},
        **{f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in _FILES.items()},
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(1 << 17),  # longer heads get HAProxy's 400; the gateway refuses those over 64 KiB
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": f"{drain_s:g}",
    }


def check_environment(options: AppOptions) -> None:
    """Check that the process of a gateway or of a replica has the variables without which the application fails.

    Args:
        options: options of the application.

    Raises:
        ConfigError: a variable is missing or wrong.
    """
    wrong = [name for name in _NEEDED if os.environ.get(name) != _SINGLE_LOOP[name]]
    least: dict[str, float] = {_MESSAGE: options.max_message_bytes}
    if os.environ.get(_HAPROXY) == "1":
        least[_HARD_STOP] = options.graceful_shutdown_timeout_s
    for name, number in least.items():
        value = os.environ.get(name, "")
        if not value.isdecimal() or int(value) < number:
            wrong.append(name)
    if wrong:
        text = "set the variables of `python -m chunkattn.integrations.ray` before Ray starts on every node"
        raise ConfigError(f"the environment variable {wrong[0]} is missing or wrong ({os.environ.get(wrong[0])!r}); {text}")
