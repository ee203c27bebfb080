"""Compiled programs over several devices: collectives, donation, memory and the number of programs."""

import jax
import jax.monitoring
import numpy as np
import pytest

from chunkattn import SamplingParams, make_layout
from chunkattn.engine.plan import Chip, plan
from chunkattn.engine.sampling import READ_BUCKETS
from chunkattn.models.shards import Shards
from tests.checkpoints import Oracle
from tests.parallel.answers import DRAWN, GREEDY, Answers, prompts
from tests.parallel.programs import buffers, bytes_by_device, collectives, compiled_readouts, compiled_step

MODEL = {"intermediate_size": 512, "hidden_size": 256, "num_key_value_heads": 2}
"""Sizes at which the norms, which every device holds, are few of the weights."""


@pytest.fixture(scope="module")
def llm(wide, start_for_module):
    """An engine over four devices, two of which share a KV head."""
    return start_for_module(wide("qwen3-64", **MODEL), 4, attention_backend="cpu")


def check_step(llm):
    """Two sums a layer and one for the embedding, nothing gathered, and the pool of every device donated."""
    step = compiled_step(llm, 8)
    assert collectives(step) == {"all-reduce": 2 * llm.core.runner.spec.num_layers + 1}
    pool = bytes_by_device(llm.core.runner.pool.caches)
    assert [step.memory_analysis().alias_size_in_bytes] * llm.config.tensor_parallel_size == pool


def test_a_step_adds_up_twice_a_layer_and_once_for_the_embedding(llm):
    check_step(llm)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("backend", "dtype", "size"),
    [("cpu", "bfloat16", 2), ("xla", "float32", 8), pytest.param("xla", "bfloat16", 8, marks=pytest.mark.slow)],
)
def test_sums_of_other_steps(wide, start, backend, dtype, size):
    """In bfloat16, native calls multiply few rows."""
    check_step(start(wide("llama-bias", **MODEL), size, attention_backend=backend, dtype=dtype))


@pytest.mark.ci
def test_readouts_gather_the_logits_once(llm):
    for name, program in compiled_readouts(llm, READ_BUCKETS[0]).items():
        assert collectives(program) == {"all-gather": 1}, name


def test_the_pool_stays_where_it_is(llm, wide):
    before, core = buffers(llm), llm.core
    assert len(before) == 4 * 2 * core.runner.spec.num_layers
    old = jax.tree.leaves(core.runner.pool.caches)
    prompt, params = prompts()[1], SamplingParams(temperature=0, max_tokens=3, logprobs=0)
    sample = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    core.runner.pool.copy_pages([(0, 1)])
    core.runner.pool.write_pages([2], core.runner.pool.read_pages([1])())
    assert buffers(llm) == before
    assert all(array.is_deleted() for array in old)
    layout = make_layout(prompt.prefix, prompt.chunks, prompt.question)
    logits = Oracle(wide("qwen3-64", **MODEL)).chunked(layout, sample.token_ids)[-4:-1]
    assert sample.token_ids == logits.argmax(-1).tolist()
    found = [at[token].logprob for at, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    np.testing.assert_allclose(found, jax.nn.log_softmax(logits).max(-1), atol=1e-4)


def test_a_device_holds_its_share(llm):
    runner = llm.core.runner
    ideal = 0.0
    for name, shape in runner.spec.parameters().items():
        holders = {"k_proj": 2, "v_proj": 2}.get(name.split(".")[-2], 1 if len(shape) == 1 else 4)
        ideal += np.prod(shape) * runner.dtype.itemsize / holders
    held = bytes_by_device(runner._params)
    assert len(held) == 4
    assert ideal <= max(held) <= 1.03 * ideal
    assert max(held) < 0.3 * runner.weight_bytes
    page = 2 * runner.spec.num_layers * llm.limits.block_size * runner.spec.heads[2] * 4  # K and V of one head
    assert bytes_by_device(runner.pool.caches) == [llm.limits.num_pages * page] * 4
    assert llm.limits.num_pages == llm.config.kv_cache_memory_bytes // page
    assert llm.limits.page_bytes == 2 * page  # of both heads
    planned = plan(llm.config, runner.spec, runner.dtype, Chip("a chip", 1 << 30), 4)
    assert (planned.weight_bytes, planned.page_bytes) == (max(held), page)
    assert planned.num_pages == llm.limits.num_pages


@pytest.mark.ci
def test_no_program_compiles_after_the_warm_up(wide, start, tmp_path):
    compiled = []
    llm = start(wide("qwen3"), 4, warmup=True, kv_store=str(tmp_path), max_num_batched_tokens=32, max_model_len=64)
    assert llm.core.warm_ups.is_warm
    programs = llm.core.runner.compiles.total()
    alone = start(wide("qwen3"), 1, warmup=True, kv_store=str(tmp_path), max_num_batched_tokens=32, max_model_len=64)
    assert programs == alone.core.runner.compiles.total()
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    short = [{"prompt_token_ids": p} for p in ([5, 6, 7], list(range(2, 42)))]
    edited = SamplingParams(temperature=0, max_tokens=3, logit_bias={5: 2.0}, repetition_penalty=1.2, logprobs=1)
    for params in (GREEDY, DRAWN, edited):
        llm.generate(short, params, use_tqdm=False)
    llm.generate([{"prompt_token_ids": [3, 4]}], SamplingParams(n=3, temperature=1.0, max_tokens=4, seed=1), use_tqdm=False)
    for labels in ([7], [7, 8, 9], list(range(100))):
        llm.score([3, 4, 5], [[6], [7, 8]], label_token_ids=labels, algorithm="prefill_extend", use_tqdm=False)
    llm.reset_prefix_cache()
    llm.generate(short, GREEDY, use_tqdm=False)  # from disk
    assert llm.core.warm_ups.late_compiles == 0
    assert not compiled


@pytest.mark.ci
def test_a_missing_sum_would_be_noticed(wide, start, monkeypatch):
    alone = Answers(start(wide("llama"), attention_backend="xla"), ())
    monkeypatch.setattr(Shards, "total", lambda self, x: x)
    with pytest.raises(AssertionError):
        Answers(start(wide("llama"), 2, attention_backend="xla"), ()).check(alone)
