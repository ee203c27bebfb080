"""Tests of the GPU kernels, without a GPU: `pytest --confcutdir=tests/gpu tests/gpu`, in the environment of `install.py`."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # the CUDA plugin is installed, and there may be no GPU
os.environ.setdefault("HF_HUB_OFFLINE", "1")
