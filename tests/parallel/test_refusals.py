"""Refusals of models and backends that cannot be divided, with the numbers."""

import jax
import jax.numpy as jnp
import pytest

from chunkattn import LLM
from chunkattn.backends import registry
from chunkattn.backends.reference import ReferenceBackend
from chunkattn.errors import BackendError, ConfigError
from chunkattn.models.weights import SafetensorsFolder
from tests.parallel.answers import OPTIONS


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "8 attention heads cannot be divided by tensor_parallel_size=3; use 1, 2, 4 or 8"),
        (8, {"intermediate_size": 100}, "100 columns of the MLP cannot be divided by tensor_parallel_size=8; use 1, 2 or 4"),
        (4, {"moe_intermediate_size": 34}, "34 columns of an expert cannot be divided by tensor_parallel_size=4; use 1 or 2"),
        (
            4,
            {"num_attention_heads": 24, "num_key_value_heads": 6, "hidden_size": 96},
            "6 KV heads can be neither divided nor shared equally by tensor_parallel_size=4; use 1, 2, 3, 6, 12 or 24",
        ),
        (16, {}, "tensor_parallel_size=16 needs as many devices, and JAX sees 8 cpu devices; use 1, 2, 4 or 8"),
        (0, {}, "tensor_parallel_size must be at least 1, got 0"),
    ],
)
def test_indivisible(wide, monkeypatch, size, changes, message):
    """The weights are not read."""
    folder = str(wide("qwen3-moe" if "moe_intermediate_size" in changes else "llama", **changes))
    monkeypatch.delattr(SafetensorsFolder, "read")
    with pytest.raises(ConfigError, match=message):
        LLM(folder, tensor_parallel_size=size, **OPTIONS)


def test_a_backend_whose_cache_has_no_axis_of_heads(wide, monkeypatch):
    class Padded(ReferenceBackend):
        """Keeps a multiple of eight heads."""

        def allocate(self, num_pages):
            return jax.tree.map(
                lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % 8), (0, 0))), super().allocate(num_pages)
            )

    monkeypatch.setitem(registry._REGISTERED, "padded", Padded)
    monkeypatch.setattr(Padded, "name", "padded")
    with pytest.raises(BackendError, match=r"'padded'.* cannot be divided by KV heads; use tensor_parallel_size=1"):
        LLM(str(wide("llama")), tensor_parallel_size=2, attention_backend="padded", **OPTIONS)
