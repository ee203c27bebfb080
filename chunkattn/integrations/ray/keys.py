"""`ReloadsKeys`: deployments that read the key file again while they serve, and `reload_everywhere`, which asks them to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set
from typing import Any

from chunkattn.web.keys import KeyReloader, Keys

logger = logging.getLogger(__name__)

_RELOAD_S = 5.0
"""Seconds within which the replicas of a deployment must answer."""


async def reload_everywhere(*deployments: Any) -> None:
    """Have every replica of some deployments read the key file again. A failure is logged.

    Args:
        *deployments: handles of the deployments.
    """
    for handle in deployments:
        try:
            await handle.broadcast("reload_keys").results_async(timeout_s=_RELOAD_S)
        except Exception:
            logger.exception("the keys are not read again at every replica")


class ReloadsKeys:
    """Methods of a deployment that has API keys. Call `start_reloading` in the constructor and `stop_reloading` at the end."""

    def start_reloading(self, keys: Keys, delete_owned: Callable[[Set[str]], int]) -> None:
        """Start to wait for requests to read the key file again.

        Args:
            keys: the API keys.
            delete_owned: see `KeyReloader`.
        """
        self._reloader = KeyReloader(keys, delete_owned)
        self._reloading = asyncio.create_task(self._reloader.run())

    def stop_reloading(self) -> None:
        """Stop to wait."""
        self._reloading.cancel()

    async def reload_keys(self) -> None:
        """Read the key file again, as SIGHUP does for a server."""
        self._reloader.ask()

    async def reconfigure(self, user_config: Any) -> None:
        """Read the key file again. Ray calls this method at the start, unless the value is null, and for every change.

        Args:
            user_config: any mapping; a changed value, such as a date, triggers the call.
        """
        await self.reload_keys()
