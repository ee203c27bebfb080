"""Reports of commands that ask a server: shown at the end, and after a failure with what was measured before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

from chunkattn.errors import ChunkAttnError


@contextmanager
def reporting(report: Any, measured: Sized, show: Callable[[], None]) -> Iterator[None]:
    """Show a report after a block. A block that fails puts its reason into `report.error`.

    Args:
        report: report with a field `error`.
        measured: results of the report; a failure before the first one shows nothing.
        show: shows the report.
    """
    try:
        yield
    except (ChunkAttnError, KeyboardInterrupt) as error:
        report.error = " ".join(str(error).split()) or "interrupted"
        if measured:
            show()
        raise
    show()
