"""A row has the same bits in any company: every backend that runs here, judged by `check_backend`."""

import numpy as np
import pytest

from chunkattn.backends import get_backend
from chunkattn.backends.cpu import library
from chunkattn.testing import check_backend
from tests.tiled_backend import FromSlotZero, Tiled

OPTIONS = [
    {},
    {"window": 100},
    {"weighs": True, "dtype": "bfloat16"},
    {"dtype": "float16", "num_heads": 14, "num_kv_heads": 2, "head_dim": 64},
    {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"},
    {"num_heads": 16, "num_kv_heads": 8, "head_dim": 32},
]


@pytest.mark.parametrize("backend", ["xla", pytest.param("reference", marks=pytest.mark.slow), "cpu"])
@pytest.mark.parametrize("options", [OPTIONS[0], *(pytest.param(o, marks=pytest.mark.slow) for o in OPTIONS[1:])], ids=str)
def test_bits_do_not_depend_on_the_company(backend, options):
    if backend == "cpu" and library.refusal():
        pytest.skip(library.refusal())
    check_backend(backend, cases=1, scale=4, bits=True, **options)


@pytest.mark.ci
@pytest.mark.parametrize("options", [{}, pytest.param({"weighs": True}, marks=pytest.mark.slow)], ids=str)
def test_parts_as_own_sequences_keep_bits(options, monkeypatch):
    monkeypatch.setattr("chunkattn.testing.TOLERANCE", {"float32": 10.0})  # the judge of bits alone
    check_backend(Tiled, cases=1, scale=4, bits=True, **options)


class ByTheStep(get_backend("xla")):  # type: ignore[misc]
    """Rounds the scores of small steps otherwise."""

    def forward(self, q, k, v, cache, metadata, *, scale, **options):
        scale = scale if len(q) > 16 else float(np.nextafter(np.float32(scale), np.float32(1)))
        return super().forward(q, k, v, cache, metadata, scale=scale, **options)


@pytest.mark.parametrize("backend", [FromSlotZero, ByTheStep])
def test_check_backend_notices_bits_that_depend_on_the_company(backend, monkeypatch):
    monkeypatch.setattr("chunkattn.testing.TOLERANCE", {"float32": 10.0})  # the judge of bits alone
    with pytest.raises(AssertionError, match=r"bits of case .* differs by"):
        check_backend(backend, cases=1, scale=4, bits=True)
