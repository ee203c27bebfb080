"""The application of Ray Serve: `build` for `serve run` and `serve deploy`, `local_application` for one machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from chunkattn.integrations.ray.exposure import check_http, http_host
from chunkattn.integrations.ray.gateway import Ingress, Listening
from chunkattn.integrations.ray.options import CHANNEL, AppOptions
from chunkattn.integrations.ray.replica import Replica
from chunkattn.web.options import ServerConfig

_GATEWAY_REQUESTS = 100_000
"""Requests at once that Ray sends to a gateway, in effect all: the gateway's and the replicas' own limits apply."""
_COMMON: dict[str, Any] = {
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 10.0,
    "graceful_shutdown_wait_loop_s": 0.2,
    "logging_config": {"enable_access_log": False},  # the server's application logs its requests itself
}


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application of a Serve configuration file, whose `args` these are.

    Args:
        args: see `chunkattn.integrations.ray.options.AppOptions`.

    Raises:
        ConfigError: an option is unknown or invalid, or everybody could use the model.
    """
    options = AppOptions.of(args)
    check_http(options.server_config, http_host(), allowed=options.allow_unauthenticated)
    gateway = _gateway(Ingress, options.graceful_shutdown_timeout_s, options.gateways)
    return gateway.bind(_engines(options), args)


def local_application(options: AppOptions, config: ServerConfig) -> serve.Application:
    """Return the application for one machine, whose gateway listens itself.

    Args:
        options: options of the application.
        config: options of the server: address and limits of the gateway.
    """
    return _gateway(Listening, 5.0).bind(_engines(options), asdict(options), config)


def _gateway(kind: type, shutdown_timeout_s: float, replicas: int = 1) -> Any:
    """Return the deployment of a class of gateways."""
    return serve.deployment(kind).options(
        name="Gateway",
        num_replicas=replicas,
        max_ongoing_requests=_GATEWAY_REQUESTS,
        graceful_shutdown_timeout_s=shutdown_timeout_s,
        ray_actor_options={"num_cpus": 0},
        **_COMMON,
    )


def _engines(options: AppOptions) -> serve.Application:
    scale: dict[str, Any] = {"num_replicas": options.replicas}
    if isinstance(options.replicas, Mapping):
        scale = {"autoscaling_config": dict(options.replicas)}
    deployment = serve.deployment(Replica).options(
        name="Engine",
        max_ongoing_requests=options.max_ongoing_requests,
        graceful_shutdown_timeout_s=options.graceful_shutdown_timeout_s,
        ray_actor_options=dict(options.ray_actor_options),
        request_router_config=RequestRouterConfig(
            request_router_class="chunkattn.integrations.ray.router:NamedRouter", request_router_kwargs={"channel": CHANNEL}
        ),
        **_COMMON,
        **scale,
    )
    return deployment.bind(dict(options.engine), dict(options.server))
