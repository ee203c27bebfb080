"""Warm-up compiles what steps need; metrics count what has happened."""

import threading

import jax
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.engine.messages import ScoreRequest
from chunkattn.engine.runner import Runner
from chunkattn.engine.sample_inputs import SAMPLE_BUCKETS
from chunkattn.engine.sampling import READ_BUCKETS
from chunkattn.engine.warmup import WarmUp
from chunkattn.rope.positions import make_layout
from tests.checkpoints import VOCAB
from tests.engine.test_cache import part


@pytest.fixture
def fresh(checkpoint):
    """An engine nothing has run on."""

    def get(**options):
        defaults = {
            "skip_tokenizer_init": True,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 20,
        }
        return LLM(str(checkpoint("qwen3")), **{**defaults, **options})

    return get


@pytest.mark.ci
def test_warm_up_compiles_every_step(fresh, rng):
    llm = fresh(warmup=True, dtype="bfloat16", max_num_seqs=64, kv_cache_memory_bytes=4 << 20)
    compiles = llm.core.runner.compiles
    buckets = llm.core.builder
    assert compiles["step"] == len(buckets.token_buckets) * len(buckets.width_buckets)
    before = dict(compiles)
    prompts = [{"prompt_token_ids": part(rng, n)} for n in (1, 30, 100, 200)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    llm.core.scheduler.check()
    assert llm.core.scheduler.trie.evictions == 0  # it wrote no page
    llm.generate(prompts, SamplingParams(seed=1, max_tokens=20))
    variants = [
        {"top_p": 0.5, "seed": 2},
        {"top_k": 3, "min_p": 0.1, "seed": 2, "logprobs": 3},
        {"logprobs": 2, "temperature": 0},
        {"prompt_logprobs": 1},
        {"n": 5, "seed": 1},
        {"logit_bias": {3: 1.0}},
        {"logit_bias": dict.fromkeys(range(VOCAB), 1.0), "logprobs": 0},
        {"repetition_penalty": 1.1, "temperature": 0},
        {"presence_penalty": 0.5, "seed": 1, "top_p": 0.9, "logprobs": 1},
        {"min_tokens": 3, "stop_token_ids": [*range(VOCAB - 1)]},
    ]
    crowds = [[{"prompt_token_ids": [token]} for token in range(count)] for count in (20, 64)]
    for options in variants:
        for some in (prompts, *crowds):
            llm.generate(some, SamplingParams(**{"max_tokens": 5, **options}))
    for labels in (1, 3, 9, VOCAB, 3 * VOCAB):
        for algorithm in ("serial", "packed_segment", "prefill_extend"):
            for items in ([[4], [5, 6]], [[item] for item in range(60)]):
                llm.score([1, 2, 3], items, label_token_ids=[7] * labels, algorithm=algorithm)
    for rows in ([9], [*range(10, 60)]):
        llm.core.add(ScoreRequest("raw", make_layout([], [], part(rng, 60)), np.asarray(rows), ((3, 4),), raw=True))
        while llm.core.has_work:
            llm.core.step()
    assert dict(compiles) == before
    llm.core.metrics_text()
    assert llm.core.metrics.value("warm") == 1
    assert llm.core.metrics.value("compiles_after_warmup_total") == 0
    llm.score([1], [[2]], label_token_ids=[7], algorithm="packed_dense")
    llm.core.metrics_text()
    assert llm.core.metrics.value("compiles_after_warmup_total") > 0


@pytest.mark.slow
def test_warm_up_compiles_what_moves_pages_to_disk(fresh, rng, tmp_path):
    llm = fresh(warmup=True, kv_store=tmp_path / "kv")
    before = dict(llm.core.runner.compiles)
    assert before["pages"] > 0
    prompt = ChunkedPrompt([], [part(rng, n) for n in (20, 200)], [1])
    llm.generate(prompt, SamplingParams(max_tokens=1))
    assert llm.core.disk.writer.flush(30)
    llm.reset_prefix_cache()
    assert llm.generate(prompt, SamplingParams(max_tokens=1))[0].num_cached_tokens == 220
    assert dict(llm.core.runner.compiles) == before
    llm.close()


@pytest.mark.ci
def test_warm_up_beside_requests_changes_nothing(fresh, rng):
    """One program between two steps, as an engine does that was started again; and a program that fails costs nothing."""
    llm, prompt = fresh(), {"prompt_token_ids": part(rng, 40)}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = llm.generate(prompt, params)[0].outputs[0].token_ids
    core, step = llm.core, llm.core.step
    core.step = lambda: (step(), core.warm_beside())[0]
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == expected
    core.step = step
    while core.warm_beside():
        pass
    assert core.runner.compiles["step"] == len(core.builder.token_buckets) * len(core.builder.width_buckets)
    assert not core.warm_beside()


@pytest.mark.ci
def test_the_likeliest_programs_are_compiled_first(fresh, rng, monkeypatch):
    llm, steps = fresh(), []
    core, forward = llm.core, llm.core.runner.forward
    monkeypatch.setattr(core.runner, "forward", lambda batch: (steps.append(len(batch.token_ids)), forward(batch))[1])
    for _ in range(core.warm_ups.first):
        core.warm_ups.advance()
    first = dict(core.runner.compiles)
    smallest = [size for size in core.builder.token_buckets if size <= 8]  # a backend may have decode steps of one row
    picks = len(smallest) * len({*SAMPLE_BUCKETS, *READ_BUCKETS})
    assert first == {"step": len(smallest), "gather": picks, "sample": 1, "decode": 1}
    llm.generate({"prompt_token_ids": part(rng, 5)}, SamplingParams(temperature=0, max_tokens=3))
    assert dict(core.runner.compiles) == first
    steps.clear()
    while core.warm_ups.advance():
        assert not core.warm_ups.is_warm
    assert list(dict.fromkeys(steps)) == [*smallest, 64, 16, 32]
    assert core.warm_ups.done == core.warm_ups.total
    assert core.warm_ups.is_warm


def test_a_program_that_cannot_be_compiled_ahead_stops_the_warm_up_alone(fresh, rng, monkeypatch):
    llm = fresh()
    monkeypatch.setattr(llm.core.runner, "warm_picks", lambda hidden: 1 / 0)
    assert not llm.core.warm_beside()
    assert not llm.core.warm_beside()
    assert not llm.core.warm_ups.is_warm
    assert llm.core.warm_ups.done == 0
    monkeypatch.undo()
    assert (
        len(
            llm.generate({"prompt_token_ids": part(rng, 5)}, SamplingParams(max_tokens=3, ignore_eos=True))[0]
            .outputs[0]
            .token_ids
        )
        == 3
    )


@pytest.mark.ci
def test_warm_up_reports_progress_and_changes_nothing(fresh, rng):
    llm, seen = fresh(), []
    prompt = {"prompt_token_ids": part(rng, 40)}
    expected = llm.generate(prompt, SamplingParams(temperature=0))[0].outputs[0].token_ids
    seconds = llm.core.warm_ups.run(lambda done, total: seen.append((done, total)))
    total = llm.core.warm_ups.total
    assert seen == [(done, total) for done in range(total + 1)]
    assert seconds > 0
    again = llm.generate(prompt, SamplingParams(temperature=0))[0]
    assert again.outputs[0].token_ids == expected
    assert again.num_cached_tokens == 32


def test_metrics_count_what_happened(fresh, rng):
    llm = fresh()
    prefix, documents = part(rng, 10), [part(rng, 20), part(rng, 30)]
    questions = [part(rng, 5), part(rng, 40)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for question in questions:
        llm.generate(ChunkedPrompt(prefix, documents, question), params)
    llm.score([1, 2, 3], [[4], [5, 6]], label_token_ids=[1], algorithm="packed_segment")
    with pytest.raises(ValueError, match="vocabulary"):
        llm.generate({"prompt_token_ids": [VOCAB]})
    families = {f.name: f for f in text_string_to_metric_families(llm.core.metrics_text())}

    def value(name, **labels):
        samples = families[name.removesuffix("_count")].samples
        (found,) = [s.value for s in samples if s.name in (name, name + "_total") and s.labels == labels]
        return found

    chunked = 10 + 50
    assert value("chunkattn_tokens", kind="prefill") == chunked + 5 + 40
    assert value("chunkattn_tokens", kind="decode") == 2 * 5
    assert value("chunkattn_tokens", kind="score") == 6
    for name, cached, total in (("prefix", 10, 20), ("chunk", 50, 100), ("question", 0, 45)):
        assert value("chunkattn_prompt_tokens", part=name) == total
        assert value("chunkattn_cached_tokens", part=name) == cached
    assert value("chunkattn_steps") == value("chunkattn_step_seconds_count") == value("chunkattn_step_host_seconds_count")
    assert value("chunkattn_requests", outcome="finished") == 3
    assert value("chunkattn_time_to_first_token_seconds_count") == 2
    assert value("chunkattn_inter_token_seconds_count") == 2 * 5
    assert value("chunkattn_request_seconds_count") == value("chunkattn_queue_seconds_count") == 3
    assert value("chunkattn_compiles", program="step") == llm.core.runner.compiles["step"]
    states = {s: value("chunkattn_pages", state=s) for s in ("free", "cached", "used", "pinned")}
    assert sum(states.values()) == llm.limits.num_pages
    assert states["used"] == states["pinned"] == 0
    # 1 + 2 + 2 pages of prefix and documents, and of the second question with its answer two full ones.
    assert states["cached"] == 7
    rows = sum(value("chunkattn_tokens", kind=k) for k in ("prefill", "decode", "score"))
    assert value("chunkattn_padding_rows") + rows >= 8 * value("chunkattn_steps")
    report = llm.precompute(prefix, documents, pin=True)
    llm.core.metrics_text()
    assert llm.core.metrics.value("pages", state="pinned") == 5
    llm.unpin(report)


@pytest.mark.ci
def test_preemptions_and_evictions_are_counted(fresh, rng):
    llm = fresh()
    page = llm.limits.page_bytes
    llm = fresh(kv_cache_memory_bytes=12 * page)
    llm.generate([{"prompt_token_ids": part(rng, 40)} for _ in range(3)], SamplingParams(max_tokens=60, ignore_eos=True))
    llm.core.metrics_text()
    assert llm.core.metrics.value("preemptions_total") == llm.core.scheduler.preemptions > 0
    assert llm.core.metrics.value("evictions_total") == llm.core.scheduler.trie.evictions > 0


@pytest.mark.parametrize("packs", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_threads_compile_what_the_steps_run(fresh, rng, monkeypatch, packs):
    """A program that a thread has compiled is not compiled again when the engine runs it."""
    monkeypatch.setattr(Runner, "_packs", lambda *_: packs)
    llm, compiled = fresh(), []
    warm_ups = WarmUp(llm.core.runner, llm.core.builder, llm.core.runs, llm.core.meter, with_store=False, threads=2)
    earlier = {thread for thread in threading.enumerate() if thread is not threading.current_thread()}  # of other engines

    def heard(event, seconds, fun_name="", **_):
        # Single operations, which JAX compiles where it makes a constant, are no programs of the engine.
        is_program = not hasattr(jax.lax, fun_name.removeprefix("jit(").removesuffix(")"))
        if event == "/jax/core/compile/backend_compile_duration" and is_program and threading.current_thread() not in earlier:
            compiled.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        warm_ups.run()
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    steps = len(llm.core.builder.token_buckets) * len(llm.core.builder.width_buckets)
    in_threads = [name for name in compiled if name.startswith("warm-up")]
    assert llm.core.runner.compiles["step"] == steps
    ahead = steps + llm.core.runner.compiles["decode"]
    assert len(in_threads) == ahead
    assert warm_ups.is_warm
    assert len(compiled) == sum(llm.core.runner.compiles.values())
    before = dict(llm.core.runner.compiles)
    llm.generate([{"prompt_token_ids": part(rng, n)} for n in (1, 100)], SamplingParams(temperature=0, max_tokens=4))
    assert dict(llm.core.runner.compiles) == before


def test_a_program_that_a_thread_cannot_compile_ends_the_warm_up_alone(fresh, rng, monkeypatch):
    llm = fresh()
    llm.core.warm_ups = WarmUp(llm.core.runner, llm.core.builder, llm.core.runs, llm.core.meter, with_store=False, threads=2)
    prompt = {"prompt_token_ids": part(rng, 40)}
    llm.generate(prompt, SamplingParams(max_tokens=1))
    monkeypatch.setattr(llm.core.runner, "lower", lambda *_: 1 / 0)
    assert not llm.core.warm_beside()
    assert not llm.core.warm_ups.is_warm
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    assert output.num_cached_tokens == 32  # nothing that was computed is lost


@pytest.mark.parametrize(
    ("tokens", "widths"), [(None, [32, 256]), (1, [32]), (512, [32]), (513, [32, 256]), (10**6, [32, 256])]
)
def test_warm_up_stops_at_the_longest_prompt(fresh, tokens, widths):
    llm = fresh(attention_backend="xla", kv_cache_memory_bytes=4 << 20, warmup_tokens=tokens)
    assert llm.core.builder.width_buckets == (32, 256)
    names = {part.name.split(",")[1].split()[0] for part in llm.core.warm_ups._parts if part.kind == "step"}
    assert sorted(map(int, names)) == widths


def test_seconds_of_the_warm_up_are_counted(fresh):
    llm = fresh()
    llm.core.warm_ups.run()
    llm.core.metrics_text()
    kinds = ("step", "decode", "readout", "copy", "timing")
    found = {kind: llm.core.metrics.value("warmup_seconds_total", kind=kind) for kind in kinds}
    assert all(found.values())
    assert sum(found.values()) == pytest.approx(sum(llm.core.warm_ups.seconds.values()))
