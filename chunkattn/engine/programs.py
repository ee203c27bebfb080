"""`ProgramCounts`: numbers of compiled programs, which tell the user when an engine begins to compile."""

from __future__ import annotations

import logging
import sys
from collections import Counter

logger = logging.getLogger(__name__)

_TEXT = "the first call compiles its programs or loads them from disk, which takes seconds; later calls reuse them"


class ProgramCounts(Counter[str]):
    """Number of programs traced so far, by name. The first trace of an engine is announced, because its caller waits for it.

    The announcement is a line in the log at INFO. A terminal shows it without a log too.
    """

    def __setitem__(self, name: str, count: int) -> None:
        if not self:
            if logger.hasHandlers() or not sys.stderr.isatty():
                logger.info(_TEXT)
            else:
                print(f"chunkattn: {_TEXT}", file=sys.stderr, flush=True)
        super().__setitem__(name, count)
