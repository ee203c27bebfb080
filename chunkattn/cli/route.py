"""Command `chunkattn route`: the gateway in front of servers by URL."""

from __future__ import annotations

from typing import Any

from chunkattn.gateway.options import GatewayOptions
from chunkattn.options import options_of
from chunkattn.terminal.commands import app, command
from chunkattn.terminal.flags import check_keys, with_options
from chunkattn.web.options import ServerConfig

_SERVER = (
    "host port api_key api_key_file metrics_key request_timeout_s max_body_bytes max_body_bytes_per_client drain_timeout_s "
    "max_cached_documents max_cached_documents_per_key "
    "max_connections header_timeout_s body_timeout_s write_timeout_s timeout_keep_alive slow_request_s log_format "
    "allowed_origins allowed_methods allowed_headers allow_credentials"
)


@command(app)
@with_options(
    (GatewayOptions, "Gateway", " ".join(options_of(GatewayOptions))),
    (ServerConfig, "Server", _SERVER),
    from_environment=True,
)
def route(urls: list[str], **options: Any) -> None:
    """Route requests to the server that has their documents in its cache.

    The gateway has the HTTP interface of the servers behind it.

    Args:
        urls: URLs of the replicas: servers of chunkattn, or of vLLM with its plugin.
        **options: fields of `GatewayOptions` and `ServerConfig`.
    """
    from chunkattn.gateway.run import route as run

    check_keys(options, "api_key", "api_key_file", "metrics_key", "replica_key")
    server = ServerConfig(**{name: options.pop(name) for name in _SERVER.split()})
    run(urls, GatewayOptions(**options), server)
