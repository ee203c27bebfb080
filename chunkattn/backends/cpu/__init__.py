"""Chunk-aware attention on CPUs as one native call a layer."""
