"""The hosts of one model: how their engines find each other, and the connections that carry calls and tell who is gone.

Every other host says `Hello` to the first one, at the address that the option `coordinator` gives, and names a port for calls.
Once all are there, the first host connects to these ports and answers `Join` with the port of JAX's coordinator. These ports
are new in every start, so that no process of an earlier start can take part. ZeroMQ's heartbeats close the connection of a
host that stands still.

ZeroMQ's CURVE authenticates and encrypts every connection. The key of the first host's port follows from the group's secret.
The key of a port for calls is new in every start, and only the first host learns it, so that this port has one peer.
The ports of JAX's coordinator and of its collectives take no credentials. They belong on a private network.
"""

from __future__ import annotations

import jax

from chunkattn.config import EngineConfig

CONNECT_S = 10.0
"""Seconds within which the connections for calls must stand."""
REPORT_S = 10.0
"""Seconds between two log lines about hosts that are missing."""
KEY_BYTES = 40
"""Length of a public key of CURVE in Z85."""
_START_TIMEOUT_S = 300


def initialize(config: EngineConfig, coordinator: str, bind: str | None = None) -> None:
    """Start JAX on the devices of all hosts.

    Args:
        config: options of the engine.
        coordinator: address of JAX's coordinator, on the first host.
        bind: address that JAX's coordinator listens on; by default every address of the first host.
    """
    jax.distributed.initialize(
        coordinator,
        config.num_hosts,
        config.host_index,
        initialization_timeout=_START_TIMEOUT_S,
        coordinator_bind_address=bind,
    )
