"""Options of the connector: `kv_connector_extra_config` of vLLM's KV transfer configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_CLIENT = (
    "chunk_calibration chunk_separator document_template enable_chunk_aware max_chunk_len max_chunks_per_prompt "
    "position_strategy special_tokens_in_documents special_tokens_in_prompts"
)
CLIENT_OPTIONS = frozenset(_CLIENT.split())
"""Options that a server's front end keeps beside the connector's. The connector ignores them."""


@dataclass(frozen=True)
class ConnectorOptions:
    """Options of one engine.

    Attributes:
        max_store_bytes: bound of the stored K/V in bytes of RAM, over all ranks of the engine.
        chunk_position_gap: positions left free between prefix and chunks under `shared` positions.
    """

    max_store_bytes: int = 4 << 30
    chunk_position_gap: int = 0

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> ConnectorOptions:
        """Return the options that a configuration holds.

        Raises:
            ValueError: an option is unknown, not an integer, or negative.
        """
        names = {field.name for field in fields(cls)}
        if unknown := sorted(config.keys() - names - CLIENT_OPTIONS):
            raise ValueError(f"unknown kv_connector_extra_config {unknown}; choose of {sorted(names | CLIENT_OPTIONS)}")
        values = {name: value for name, value in config.items() if name in names}
        for name, value in values.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
        return cls(**values)
