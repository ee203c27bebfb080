"""Ports of a cluster that are open to strangers: `check_http` refuses HTTP, `warn_of_open_ports` tells of Ray's own."""

from __future__ import annotations

import logging
import os

from chunkattn.addresses import is_loopback
from chunkattn.errors import ConfigError
from chunkattn.web.options import ServerConfig

logger = logging.getLogger(__name__)

ANY = "0.0.0.0"
"""Address of all interfaces, on which Serve's proxies listen by default."""


def http_host() -> str | None:
    """Return the address on which the HTTP proxies of the running Serve listen; None where no Serve runs yet."""
    import ray
    from ray.serve.context import _get_global_client

    if not ray.is_initialized():
        return None
    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config.host or ANY


def check_http(config: ServerConfig, host: str | None, *, allowed: bool) -> None:
    """Check that the HTTP port is not open to everybody.

    Args:
        config: options of the server.
        host: address on which the HTTP proxies listen; None where it is not known.
        allowed: whether the port may be open.

    Raises:
        ConfigError: everybody who reaches the port could use the model.
    """
    if allowed or host is None or is_loopback(host) or config.api_key is not None or config.api_key_file is not None:
        return
    text = f"http_options.host {host} lets everybody who reaches the port use the model, because no API key is set"
    ways = "set server.api_key_file, or http_options.host 127.0.0.1, or allow_unauthenticated: true behind a proxy with keys"
    raise ConfigError(f"{text}; {ways}")


def warn_of_open_ports(address: str) -> None:
    """Log one line about Ray's own ports unless they ask for a token or strangers cannot reach them.

    Args:
        address: address of this node.
    """
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" or is_loopback(address):
        return
    logger.warning(
        "Ray's own ports on %s (dashboard, GCS, workers) run code of everybody who reaches them: set RAY_AUTH_MODE=token and "
        "one RAY_AUTH_TOKEN on every node before `ray start`, or close all ports but that of http_options to other machines",
        address,
    )
