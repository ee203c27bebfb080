"""Reading of the key file while the server runs."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from chunkattn.errors import ConfigError
from chunkattn.server.document_store import Documents
from chunkattn.server.keys import Keys

logger = logging.getLogger(__name__)


class KeyReloader:
    """Reads the key file again when asked, and deletes the documents of keys that are no longer valid.

    One read runs at a time, so the keys are those of the last read. A call of `ask` during a read causes one more read.

    Args:
        keys: API keys of the server.
        documents: stored documents of the server.
    """

    def __init__(self, keys: Keys, documents: Documents) -> None:
        self._keys, self._documents = keys, documents
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Ask for one read of the key file."""
        if self._keys.file is None:
            logger.warning("SIGHUP is ignored: there is no api_key_file to read again")
        else:
            self._asked.set()

    async def run(self) -> None:
        """Serve the calls of `ask` until cancelled."""
        thread = ThreadPoolExecutor(1, "api-keys")  # clients can fill the shared threads
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                await self._reload(thread)
        finally:
            thread.shutdown(wait=False)

    async def _reload(self, thread: ThreadPoolExecutor) -> None:
        try:
            removed = await asyncio.get_running_loop().run_in_executor(thread, self._keys.reload)
        except ConfigError as error:
            logger.error("the API keys stay as they are: %s", error)
            return
        except Exception:
            logger.exception("the API keys stay as they are")
            return
        count = self._documents.delete_owned({holder.salt for holder in removed})
        logger.warning(
            "api_key_file is read again: %d keys; %d are no longer valid, and %d documents of theirs are deleted",
            *(len(self._keys), len(removed), count),
        )
