"""`PortableBackend`: what backends of plain JAX operations have in common."""

from __future__ import annotations

from functools import cache

import jax

from chunkattn.backends.base import AttentionBackend, AttentionSpec


@cache
def on_cpu() -> bool:
    """Return whether JAX computes on a CPU. The call initialises JAX's devices."""
    return jax.default_backend() == "cpu"


class PortableBackend(AttentionBackend):
    """A backend of plain JAX operations: it serves every spec on every platform, and keeps bits on CPUs."""

    weighs = True

    @property
    def keeps_bits(self) -> bool:
        """Return whether the platform is a CPU."""
        return on_cpu()

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return None: every spec is supported."""
        return None
