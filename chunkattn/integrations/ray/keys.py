"""`ReloadsKeys`: deployments that read the key file again while they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from typing import Any

from chunkattn.web.keys import KeyReloader, Keys


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
