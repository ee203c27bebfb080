"""Exact chunk-aware LLM inference in JAX: many independent pieces behind one shared prefix."""

from importlib.metadata import version

from chunkattn.backends import AttentionBackend, chunk_attention, register_backend
from chunkattn.config import EngineConfig, SamplingParams
from chunkattn.layout import ChunkLayout
from chunkattn.llm import LLM
from chunkattn.outputs import CompletionOutput, Logprob, RequestOutput, ScoreOutput
from chunkattn.parsers import ChunkedPrompt
from chunkattn.rope.positions import make_layout

__version__ = version("chunkattn")

__all__ = [
    "LLM",
    "AttentionBackend",
    "ChunkLayout",
    "ChunkedPrompt",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "chunk_attention",
    "make_layout",
    "register_backend",
]
