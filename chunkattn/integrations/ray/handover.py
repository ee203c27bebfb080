"""Handover of the file of stored documents from a gateway that is being stopped to its successor."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from chunkattn.documents.records import DocumentRecords, RecordsInUseError
from chunkattn.errors import ConfigError

_OPEN_S = 30.0
"""Seconds that a new gateway waits for the file."""
_POLL_S = 0.2
_UNWANTED_S = 7.0
"""Seconds without a health check after which a gateway is being stopped; Ray checks every 2 s until then."""


class Handover:
    """Gives up the file of records when this gateway is being stopped and another gateway waits for the file.

    A stopped gateway finishes its running requests, which can take as long as `request_timeout_s`, and it needs the texts of
    the documents until then. A new gateway waits for the file from its start. Call `start` once, and `stop` at the end.

    Args:
        records: the records of this gateway.
    """

    def __init__(self, records: DocumentRecords) -> None:
        self._records, self._wanted = records, time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def note_wanted(self) -> None:
        """Note a health check, which Ray makes of the gateways that it does not stop."""
        self._wanted = time.monotonic()

    def start(self) -> None:
        """Start to look for a waiting gateway."""
        if self._records.path is not None:
            self._task = asyncio.create_task(self._run(_sign(self._records.path)))

    def stop(self) -> None:
        """Stop to look."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, sign: Path) -> None:
        while time.monotonic() - self._wanted < _UNWANTED_S or not await asyncio.to_thread(sign.exists):
            await asyncio.sleep(_POLL_S)
        self._records.hand_over()


async def open_records(path: str | None) -> DocumentRecords:
    """Open the records of stored documents, when the predecessor of this gateway has given up their file.

    Args:
        path: file of the records; None keeps them in memory.

    Raises:
        ConfigError: the file cannot be opened.
    """
    if path is None:
        return DocumentRecords()
    until = time.monotonic() + _OPEN_S
    sign = _sign(Path(path))
    try:
        while True:
            try:
                return await asyncio.to_thread(DocumentRecords, path)
            except RecordsInUseError:
                if time.monotonic() > until:
                    raise
                await asyncio.to_thread(_touch, sign)
            await asyncio.sleep(_POLL_S)
    finally:
        await asyncio.to_thread(sign.unlink, missing_ok=True)


def _sign(path: Path) -> Path:
    """Return the file whose existence says that a gateway waits for the records."""
    return path.with_name(f"{path.name}.wanted")


def _touch(sign: Path) -> None:
    try:
        sign.touch()
    except OSError as error:
        raise ConfigError(f"{sign} cannot be written: {error}; the folder must exist and be writable") from None
