"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import gc

_YOUNG, _OLDER = 20_000, 20
"""Objects before a collection, and collections of a generation before one of the next; Python 3.11 itself has 700 and 10."""


def settle() -> None:
    """Leave alone for good what is here, and look for cycles less often.

    To be called when everything is imported and built: a full collection that walks through that takes as long as many steps.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _OLDER, _OLDER)
