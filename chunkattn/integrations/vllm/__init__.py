"""Chunk-aware prompts in vLLM, through its KV connector interface.

Importing this package imports neither JAX nor vLLM. It fails if the installed vLLM is not supported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chunkattn.integrations.vllm.versions import check_version, installed_version

if TYPE_CHECKING:
    from chunkattn.integrations.vllm.chunk_options import ChunkOptions
    from chunkattn.integrations.vllm.connector import ChunkConnector
    from chunkattn.integrations.vllm.endpoints import ChunkEndpoints
    from chunkattn.integrations.vllm.llm import ChunkLLM
    from chunkattn.integrations.vllm.requests import EngineRequest, PromptPlan, plan_prompt

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
