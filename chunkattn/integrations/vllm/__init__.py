"""Chunk-aware prompts in vLLM, through its KV connector interface."""
