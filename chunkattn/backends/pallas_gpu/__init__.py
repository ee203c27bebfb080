"""Chunk attention for NVIDIA Hopper GPUs, in Pallas Mosaic GPU."""
