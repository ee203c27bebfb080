"""Over several devices, too, the bits of a result depend on its request alone."""

import logging

import jax.numpy as jnp
import pytest

from chunkattn.engine.invariance import rows_agree
from tests.calls.test_no_bit_moves import ROWS, alone, beside_others, company, moved, preempted, small_steps, warm
from tests.fuzz.alone import Alone
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.rig import SUBJECTS, Rig, make_model
from tests.fuzz.witness import ColdEngine

SUBJECT = SUBJECTS["auto"]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        pytest.param("float32", 2, marks=pytest.mark.ci),
        pytest.param("bfloat16", 4, marks=pytest.mark.ci),
        pytest.param("bfloat16", 8, marks=pytest.mark.slow),
        pytest.param("float16", 2, marks=pytest.mark.slow),
    ],
)
def test_results_in_company(wide, start, tmp_path, dtype, size):
    if not rows_agree(jnp.dtype(dtype), 2176, 131):
        pytest.skip("XLA's sums follow the number of rows on this machine")
    sizes = {"max_position_embeddings": 8192, "intermediate_size": 2176, "vocab_size": 131}
    options = {"max_model_len": 8192, "max_num_batched_tokens": 512, "max_num_seqs": 8, "kv_cache_memory_bytes": 4 << 20}
    llm = start(wide("qwen3-64", **sizes), size, dtype=dtype, kv_store=str(tmp_path), max_logprobs=4, **options)
    assert llm.limits.batch_invariant
    for name in ("generate", "sample", "packed_segment", "prefill_extend"):
        row = ROWS[name]
        expected = alone(llm, ROWS[row.same_as or name])
        for column in (warm, company, small_steps, preempted, beside_others):
            assert moved(llm, row, expected, column) == [], (name, column)
    assert llm.core.scheduler.preemptions


@pytest.mark.parametrize("operations", [pytest.param(300, marks=pytest.mark.ci), pytest.param(2000, marks=pytest.mark.slow)])
def test_the_fuzzer_finds_no_difference(tmp_path_factory, operations):
    logging.disable(logging.ERROR)  # hide the injected failures
    try:
        model = make_model(tmp_path_factory.mktemp("fuzz"), SUBJECT)
        halves = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": SUBJECT.options["kv_cache_memory_bytes"] // 2}
        rig, alone = Rig(model, SUBJECT, **halves), Alone(model, SUBJECT, **halves)
        fuzzer = Fuzzer(rig, ColdEngine(model, SUBJECT), None, 3, alone)
        fuzzer.run(operations)
    finally:
        logging.disable(logging.NOTSET)
    assert all(fuzzer.counts[name] for name in ("answers", "cached tokens", "preemptions", "evictions", "restored parts"))
