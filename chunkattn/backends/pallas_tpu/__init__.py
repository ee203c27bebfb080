"""Chunk attention for TPUs, in Pallas."""
