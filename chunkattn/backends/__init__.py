"""Chunk-aware attention: the interface, the registry and the implementations."""

from chunkattn.backends.attention import chunk_attention
from chunkattn.backends.base import AttentionBackend, AttentionBatch, AttentionSpec
from chunkattn.backends.registry import available_backends, get_backend, make_backend, register_backend

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionSpec",
    "available_backends",
    "chunk_attention",
    "get_backend",
    "make_backend",
    "register_backend",
]
