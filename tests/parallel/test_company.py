"""Over several devices, too, the bits of a result depend on its request alone."""

import logging

import jax.numpy as jnp
import pytest

from chunkattn.engine.invariance import rows_agree
from tests.engine.test_same_bits import ALGORITHMS, QUERY, Party, steps_of
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
    party = Party(llm, 1, QUERY["qwen3"])
    alone, answers = party.scores("serial"), [party.answer(p, s) for p in party.prompts for s in party.sampling]
    for company, tokens, guests in ((1, 97, 6), (40, 512, 6)):
        for algorithm in ALGORITHMS:
            with steps_of(llm, tokens), party.crowd(guests):
                assert party.scores(algorithm, min(company, 4) if algorithm == "serial" else company) == alone, algorithm
    for company, tokens in ((5, 512), (3, 61)):
        with steps_of(llm, tokens), party.crowd(3):
            assert party.answers(company) == answers, (company, tokens)
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
