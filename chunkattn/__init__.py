"""Exact chunk-aware LLM inference in JAX: many independent pieces after one shared prefix."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from chunkattn.logs import hide_pytorch_advice  # starts its clock before the slow imports

if TYPE_CHECKING:
    from chunkattn.adapter_salt import LoRARequest
    from chunkattn.async_llm import AsyncLLM
    from chunkattn.backends import AttentionBackend, chunk_attention, register_backend
    from chunkattn.calls.rerank_template import RerankTemplate
    from chunkattn.citations import Citations, Document
    from chunkattn.config import EngineConfig
    from chunkattn.decisions import (
        Choice,
        ChoiceAnswer,
        DecisionOutput,
        Level,
        Option,
        Predicate,
        PredicateAnswer,
        Rating,
        RatingAnswer,
    )
    from chunkattn.focus import Focus
    from chunkattn.layout import ChunkLayout
    from chunkattn.llm import LLM
    from chunkattn.outputs import (
        CacheReport,
        Citation,
        CitationSource,
        CompletionOutput,
        FocusOutput,
        Logprob,
        RequestOutput,
        RerankOutput,
        RerankResult,
        ScoreOutput,
    )
    from chunkattn.parsers import ChunkedPrompt, DocumentPrompt
    from chunkattn.rope.positions import make_layout
    from chunkattn.sampling_params import SamplingParams
    from chunkattn.structured_outputs import StructuredOutputsParams

__version__ = version("chunkattn")

hide_pytorch_advice()  # before any module imports transformers

# Public names of each module, imported at first use: tools that need no JAX start without it.
_NAMES = {
    "adapter_salt": "LoRARequest",
    "async_llm": "AsyncLLM",
    "backends": "AttentionBackend chunk_attention register_backend",
    "calls.rerank_template": "RerankTemplate",
    "config": "EngineConfig",
    "citations": "Citations Document",
    "decisions": "Choice ChoiceAnswer DecisionOutput Level Option Predicate PredicateAnswer Rating RatingAnswer",
    "focus": "Focus",
    "layout": "ChunkLayout",
    "llm": "LLM",
    "outputs": "CacheReport Citation CitationSource CompletionOutput FocusOutput Logprob RequestOutput RerankOutput "
    "RerankResult ScoreOutput",
    "parsers": "ChunkedPrompt DocumentPrompt",
    "rope.positions": "make_layout",
    "sampling_params": "SamplingParams",
    "structured_outputs": "StructuredOutputsParams",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "LLM",
    "AsyncLLM",
    "AttentionBackend",
    "CacheReport",
    "Choice",
    "ChoiceAnswer",
    "ChunkLayout",
    "ChunkedPrompt",
    "Citation",
    "CitationSource",
    "Citations",
    "CompletionOutput",
    "DecisionOutput",
    "Document",
    "DocumentPrompt",
    "EngineConfig",
    "Focus",
    "FocusOutput",
    "Level",
    "LoRARequest",
    "Logprob",
    "Option",
    "Predicate",
    "PredicateAnswer",
    "Rating",
    "RatingAnswer",
    "RequestOutput",
    "RerankOutput",
    "RerankResult",
    "RerankTemplate",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "chunk_attention",
    "make_layout",
    "register_backend",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
