"""Versions of installed distributions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(*names: str) -> str | None:
    """Return the version of the first of some distributions that is installed; None if none is.

    Args:
        *names: names of the distributions.
    """
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
