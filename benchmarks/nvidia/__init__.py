"""Compilation for NVIDIA GPUs on machines without one, and measurements on machines with one."""
