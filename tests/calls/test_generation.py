"""Generation: batches, budgets, samples, order independence, stops, log-probabilities, failures."""

import math
import pickle
from functools import partial

import jax
import numpy as np
import pytest
import torch

from chunkattn import ChunkedPrompt, SamplingParams, make_layout
from chunkattn.engine.messages import GenerateRequest
from chunkattn.errors import CapacityError, EngineError, RequestError
from tests.checkpoints import VOCAB, random_parts

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def tokens(outs):
    return [o.outputs[0].token_ids for o in outs]


def log_softmax(logits):
    return torch.log_softmax(torch.as_tensor(logits), -1).numpy()


@pytest.fixture(scope="module")
def prompts():
    """Chunk-aware and plain prompts of many lengths."""
    rng = np.random.default_rng(5)
    chunked = [ChunkedPrompt(*random_parts(rng, most_chunks=6, longest=40)) for _ in range(6)]
    plain = [{"prompt_token_ids": rng.integers(0, VOCAB, n).tolist()} for n in (1, 3, 60, 150)]
    return [p for pair in zip(chunked, [*plain, *plain[:2]], strict=True) for p in pair]


def test_generation_and_scoring_share_steps(engine, prompts):
    """Scoring requests among running generations change neither."""
    from chunkattn.engine.messages import ScoreRequest, ScoreResult, TokenOutput

    llm = engine("qwen3")
    expected = tokens(llm.generate(prompts, GREEDY))
    layout = make_layout([1, 2, 3, 4, 5], [[6, 7], [8], [9, 10, 11]], [])
    score = ScoreRequest("s", layout, np.array([6, 7, 10]), ((3, 4, 5),))
    requests = [GenerateRequest(f"g{i}", llm.parser.parse(p).layout, GREEDY) for i, p in enumerate(prompts)]
    for request in (*requests[:5], score, *requests[5:]):
        llm.core.add(request)
    found, scored, both = {f"g{i}": [] for i in range(len(prompts))}, None, False
    while llm.core.has_work:
        events = llm.core.step()
        for event in events:
            if isinstance(event, TokenOutput):
                found[event.request_id] += event.token_ids
            elif isinstance(event, ScoreResult):
                scored = event.logprobs
        both |= len({type(e) for e in events}) == 2
    assert both
    assert list(found.values()) == expected
    alone = llm.score([1, 2, 3, 4, 5], [[6, 7], [8], [9, 10, 11]], label_token_ids=[3, 4, 5], algorithm="serial")
    np.testing.assert_allclose(scored, alone.logprobs, atol=1e-4)


@pytest.mark.parametrize("chunked", [False, True])
def test_prompt_and_output_logprobs(engine, oracle, chunked):
    rng = np.random.default_rng(7)
    parts = ([1, 2, 3], [[4], [], rng.integers(0, VOCAB, 30).tolist()], [7, 8]) if chunked else ([], [], [5, 6, 7, 8])
    prompt = ChunkedPrompt(*parts) if chunked else {"prompt_token_ids": parts[2]}
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=4)
    out = engine("qwen3", max_num_batched_tokens=16).generate(prompt, params)[0]
    layout = make_layout(*parts)
    sample = out.outputs[0]
    expected = log_softmax(oracle("qwen3").chunked(layout, sample.token_ids))
    starts = {s.start for s in layout.segments if s.end > s.start}
    assert [i for i, e in enumerate(out.prompt_logprobs) if e is None] == sorted(starts)
    rows = [(i - 1, t, e, 4) for i, (t, e) in enumerate(zip(out.prompt_token_ids, out.prompt_logprobs, strict=True)) if e]
    rows += [(len(layout) - 1 + i, t, e, 3) for i, (t, e) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True))]
    for row, token, entry, k in rows:
        top = np.argsort(-expected[row])[:k]
        assert set(entry) == {token, *top}
        assert next(iter(entry)) == token
        for t, value in entry.items():
            assert value.logprob == pytest.approx(expected[row, t], abs=1e-4)
            assert value.rank == 1 + (expected[row] > expected[row, t]).sum()
    assert sample.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(sample.token_ids, sample.logprobs, strict=True))
    )


def test_a_one_token_prompt_has_no_prompt_logprobs(engine):
    out = engine("qwen3").generate({"prompt_token_ids": [3]}, SamplingParams(prompt_logprobs=2, max_tokens=1))[0]
    assert out.prompt_logprobs == [None]


def test_samples_are_independent_reproducible_and_the_same_in_any_company(engine, prompts):
    llm = engine("qwen3")
    params = SamplingParams(n=5, seed=11, max_tokens=9, temperature=1.0)
    alone = llm.generate(prompts[0], params)[0]
    samples = [o.token_ids for o in alone.outputs]
    assert len(set(map(tuple, samples))) == 5
    company = engine("qwen3", max_num_batched_tokens=24, max_num_seqs=7).generate(
        [prompts[2], prompts[0], prompts[1]], [GREEDY, params, SamplingParams(seed=3)]
    )
    assert [o.token_ids for o in company[1].outputs] == samples
    other = llm.generate(prompts[0], SamplingParams(n=5, seed=12, max_tokens=9))[0]
    assert [o.token_ids for o in other.outputs] != samples
    # Each sample is a plain continuation: greedy ones agree with n = 1.
    greedy = llm.generate(prompts[0], SamplingParams(n=3, temperature=0, max_tokens=9))[0]
    assert [o.token_ids for o in greedy.outputs] == [
        tokens(llm.generate(prompts[0], SamplingParams(temperature=0, max_tokens=9)))[0]
    ] * 3


def test_without_a_seed_samples_differ_but_programs_repeat(checkpoint):
    from chunkattn import LLM

    def run(seed):
        options = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 20, "max_num_batched_tokens": 64}
        llm = LLM(str(checkpoint("qwen3")), seed=seed, **options)
        prompt = {"prompt_token_ids": [1, 2, 3]}
        return tokens(llm.generate([prompt, prompt], SamplingParams(max_tokens=8)))

    first = run(0)
    assert first[0] != first[1]
    assert run(0) == first
    assert run(1) != first


def test_sampling_follows_the_model_s_distribution(engine, oracle):
    """4,000 first tokens at temperature 1.3 against softmax(logits / 1.3)."""
    ids = [5, 9, 2, 77]
    llm = engine("qwen3")
    params = [SamplingParams(n=16, seed=s, max_tokens=1, temperature=1.3) for s in range(250)]
    outs = llm.generate([{"prompt_token_ids": ids}] * 250, params)
    drawn = np.bincount([o.token_ids[0] for out in outs for o in out.outputs], minlength=VOCAB) / 4000
    expected = torch.softmax(torch.as_tensor(oracle("qwen3").logits(ids)[-1]) / 1.3, -1).numpy()
    error = np.abs(drawn - expected)
    assert (error <= 5 * np.sqrt(expected * (1 - expected) / 4000) + 1e-3).all()


def test_stops(engine):
    llm = engine("qwen3")
    prompt = {"prompt_token_ids": [1, 2, 3]}
    free = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
    assert (free.finish_reason, free.stop_reason, len(free.token_ids)) == ("length", None, 20)
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop]))[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (free.token_ids[: first + 1], "stop", stop)
    # min_tokens bans the stop token until enough is generated.
    out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20, min_tokens=12, stop_token_ids=[stop]))[0].outputs[0]
    assert len(out.token_ids) >= 12
    assert stop not in out.token_ids[:12]


def test_logit_bias_and_bans(engine):
    llm = engine("qwen3")
    prompt = {"prompt_token_ids": [1, 2, 3]}
    out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4, logit_bias={42: 100.0}))[0].outputs[0]
    assert out.token_ids == [42] * 4


BAD_PARAMS = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.5}, "min_p"),
    ({"n": 0}, "n must"),
    ({"n": True}, "n must"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 20}, "min_tokens"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"presence_penalty": math.nan}, "presence_penalty"),
    ({"frequency_penalty": 3.0}, "frequency_penalty"),
    ({"logprobs": -1}, "logprobs"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed must be an integer of 64 bits"),
    ({"seed": -(2**63) - 1}, "seed must be an integer of 64 bits"),
    ({"stop": [""]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": 3}, "stop_token_ids must be a list"),
    ({"stop_token_ids": [2**70]}, "stop_token_ids"),
    ({"logit_bias": {3: math.nan}}, "logit_bias"),
    ({"logit_bias": {2**70: 1.0}}, "logit_bias"),
    ({"logit_bias": [3]}, "logit_bias must map"),
    ({"temperature": 10**400}, "temperature"),
    ({"ignore_eos": "false"}, "ignore_eos"),
    ({"include_stop_str_in_output": 2}, "include_stop_str_in_output"),
]


@pytest.mark.parametrize(("options", "message"), BAD_PARAMS, ids=str)
def test_bad_sampling_params(options, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


def test_seeds_are_any_integers_of_64_bits(demo):
    """And -1 is none, as in vLLM."""
    texts = {}
    for seed in (0, 1, 2, -2, 2**63 - 1, -(2**63)):
        params = SamplingParams(temperature=5.0, max_tokens=8, seed=seed, ignore_eos=True)
        first, second = demo.generate(["Ana"] * 2, params)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        texts[seed] = tuple(first.outputs[0].token_ids)
    assert len({*texts.values()}) == len(texts)
    assert SamplingParams(seed=-1).seed is None


def test_requests_that_cannot_be_served_leave_nothing_behind(engine):
    llm = engine("llama", max_chunk_len=20, max_logprobs=5)
    pool = llm.core.scheduler.trie
    ok = {"prompt_token_ids": [1, 2]}
    bad = [
        ({"prompt_token_ids": [1, VOCAB]}, GREEDY, f"prompt: token id {VOCAB} at index 1 is outside the vocabulary of {VOCAB}"),
        (ChunkedPrompt([1], [[2], [3] * 21], [4]), GREEDY, "chunk 1 has 21 tokens, max_chunk_len is 20"),
        ({"prompt_token_ids": [1] * 257}, GREEDY, "prompt of 257 tokens reaches position 256, max_model_len 256 allows 255"),
        ({"prompt_token_ids": [1] * 250}, GREEDY, "max_tokens 12 would exceed max_model_len 256"),
        (ok, SamplingParams(n=17), "n 17 exceeds max_num_seqs 16"),
        (ok, SamplingParams(logprobs=6), "logprobs 6 exceeds max_logprobs 5"),
        (ok, SamplingParams(stop_token_ids=[VOCAB]), "stop_token_ids"),
        (ok, SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias"),
        (ok, SamplingParams(stop="x"), "stop strings need a tokenizer"),
        (ok, SamplingParams(max_tokens=None, min_tokens=5000), "min_tokens 5000 exceeds the 254 that fit"),
        ({"prompt_token_ids": [1] * 256}, SamplingParams(max_tokens=None), "one more token would exceed"),
        (ChunkedPrompt([1], [[2], [VOCAB + 1]], [3]), GREEDY, "chunk 1: token id 129 at index 0"),
        (ChunkedPrompt([1], [[i % 100, i // 100, 7] for i in range(1000)], [4]), GREEDY, "the pool has"),
        (ChunkedPrompt([1], [[2] * 20] * 2000, [4]), GREEDY, "entries of a page table"),
    ]
    for prompt, params, message in bad:
        with pytest.raises(RequestError, match=message):
            llm.generate([ok, prompt], [GREEDY, params])
        assert not llm.core.has_work
        assert pool.num_available == pool.num_pages
    with pytest.raises(RequestError, match="2 sampling_params for 1"):
        llm.generate([ok], [GREEDY, GREEDY])
    with pytest.raises(CapacityError):
        llm.generate(bad[3][0], GREEDY)
    assert len(tokens(llm.generate(ok, GREEDY))[0]) == 12


def test_numpy_numbers_and_none_are_as_good_as_any():
    params = SamplingParams(
        max_tokens=np.int64(4), temperature=np.float32(0.5), stop_token_ids=np.array([4]), stop=None, logit_bias=None
    )
    assert params == SamplingParams(max_tokens=4, temperature=0.5, stop_token_ids=[4])
    assert type(params.max_tokens) is int


def test_a_tiny_temperature_is_all_but_greedy(engine):
    prompt, llm = {"prompt_token_ids": [1, 2, 3]}, engine("qwen3")
    cold = llm.generate(prompt, SamplingParams(seed=1, temperature=1e-38, top_p=0.9))
    assert tokens(cold) == tokens(llm.generate(prompt, SamplingParams(temperature=0)))


def test_a_huge_top_k_is_all_tokens(engine):
    prompt, llm = {"prompt_token_ids": [1, 2, 3]}, engine("qwen3")
    one, other = (llm.generate(prompt, SamplingParams(seed=1, top_k=k)) for k in (2**40, 0))
    assert tokens(one) == tokens(other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(None), "prompts must be a list"),
        (lambda llm: llm.generate(5), "prompts must be a list"),
        (lambda llm: llm.generate({"prompt_token_ids": [1]}, {"temperature": 0}), "sampling_params must be"),
        (lambda llm: llm.generate([{"prompt_token_ids": [1]}], [None]), "sampling_params must be SamplingParams"),
        (lambda llm: llm.chat(None), "messages must be a list"),
        (lambda llm: llm.chat("hi"), "messages must be a list"),
        (lambda llm: llm.chat({"role": "user"}), "messages must be a list"),
        (lambda llm: llm.chat([["x"]]), "messages must be a list of"),
        (lambda llm: llm.chat([None]), "messages must be a list of"),
        (lambda llm: llm.chat([]), "messages are empty"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], documents="text"), "documents must be a list"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], documents=5), "documents must be a list"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], documents=[5]), "document 0 must be a string"),
        (lambda llm: llm.score([1], 5, label_token_ids=[1]), "items must be a list"),
        (lambda llm: llm.score([1], [[1]], label_token_ids=5), "label_token_ids must be a list"),
        (lambda llm: llm.score(5, [[1]], label_token_ids=[5]), "query must be a list"),
    ],
)
def test_arguments_of_the_wrong_shape(call, message, demo):
    with pytest.raises(RequestError, match=message):
        call(demo)


def test_a_prefix_without_chunks_under_a_sliding_window(engine, oracle):
    """No chunks, no holes: positions are token indices."""
    rng = np.random.default_rng(14)
    prefix, question = rng.integers(0, VOCAB, 5).tolist(), rng.integers(0, VOCAB, 20).tolist()
    out = engine("mistral-window").generate(ChunkedPrompt(prefix, [], question), SamplingParams(temperature=0, max_tokens=9))
    ids = prefix + question
    expected = oracle("mistral-window").logits(ids + tokens(out)[0])[len(ids) - 1 :]
    assert tokens(out)[0] == expected[:9].argmax(-1).tolist()


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_their_sample_and_free_its_pages(demo, include):
    """Through the whole engine, four samples at once: the text is the free one cut at the stop string."""
    prompt = "Read the documents and answer the question. Where does Rafinu live? Answer:"
    shared = {"n": 4, "seed": 5, "max_tokens": 24, "ignore_eos": True, "temperature": 1.5}
    free = demo.generate(prompt, SamplingParams(**shared))[0].outputs
    stops = ["a", "li"]
    cut = demo.generate(prompt, SamplingParams(**shared, stop=stops, include_stop_str_in_output=include))[0].outputs
    assert any(o.stop_reason for o in cut)
    for whole, short in zip(free, cut, strict=True):
        places = [(whole.text.find(s), s) for s in stops if s in whole.text]
        if not places:
            assert (short.text, short.finish_reason) == (whole.text, "length")
            continue
        place, stop = min(places)
        assert short.text == whole.text[: place + len(stop) * include]
        assert (short.finish_reason, short.stop_reason) == ("stop", stop)
        assert short.token_ids == whole.token_ids[: len(short.token_ids)]
        assert len(short.token_ids) < len(whole.token_ids)
    pool = demo.core.scheduler.trie
    assert pool.num_available == pool.num_pages


def test_ignore_eos_and_special_tokens(demo):
    prompt = "Read the documents and answer the question. # # Rafinu lives in Limuzo. # #  # # Where does Rafinu live? Answer:"
    eos = demo.tokenizer.eos_token_id
    ended = demo.generate(prompt, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    assert (ended.token_ids[-1], ended.finish_reason, ended.stop_reason) == (eos, "stop", None)
    on = demo.generate(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0]
    assert on.token_ids[: len(ended.token_ids)] == ended.token_ids
    assert len(on.token_ids) == 12
    shown = demo.generate(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, skip_special_tokens=False))
    assert "</s>" in shown[0].outputs[0].text
    assert "</s>" not in on.text


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_abort_frees_everything(engine, steps):
    core = engine("qwen3", max_num_batched_tokens=24, max_num_seqs=3).core
    core.add(GenerateRequest("a", make_layout([], [], [1] * 40), SamplingParams(n=2, max_tokens=20)))
    core.add(GenerateRequest("b", make_layout([], [], [2] * 4), SamplingParams(n=2, max_tokens=20)))  # waits
    for _ in range(steps):
        core.step()
    for name in ("a", "b", "unknown"):
        core.abort(name)
        core.scheduler.check()
    assert not core.has_work
    assert core.scheduler.trie.num_available == core.limits.num_pages


def test_an_interrupt_within_a_step_loses_nothing(engine, monkeypatch):
    llm = engine("qwen3")
    prompt = {"prompt_token_ids": [1, 2, 3]}
    expected = tokens(llm.generate(prompt, GREEDY))
    original = llm.core.runner.forward

    def interrupted(batch):
        original(batch)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.core.runner, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt, GREEDY)
    monkeypatch.undo()
    assert tokens(llm.generate(prompt, GREEDY)) == expected


def test_max_tokens_none_fills_the_positions(engine):
    out = engine("llama").generate({"prompt_token_ids": [1] * 230}, SamplingParams(temperature=0, max_tokens=None))[0]
    assert len(out.outputs[0].token_ids) == 256 - 230


def test_a_failing_step_fails_its_requests_only(engine, monkeypatch):
    """The donated pool is lost: requests in the step fail, later ones are right, no page leaks."""
    llm = engine("qwen3")
    prompt = {"prompt_token_ids": [1, 2, 3]}
    expected = tokens(llm.generate(prompt, GREEDY))
    calls = []

    def failing(original, *arguments, **options):
        calls.append(original)
        result = original(*arguments, **options)  # consumes the pool
        if len(calls) == 3:
            raise RuntimeError("injected")
        return result

    for name in ("forward", "decode"):  # a step, or a run of decodes
        monkeypatch.setattr(llm.core.runner, name, partial(failing, getattr(llm.core.runner, name)))
    with pytest.raises(EngineError, match="injected"):
        llm.generate(prompt, GREEDY)
    assert not llm.core.has_work
    assert llm.core.scheduler.trie.num_available == llm.core.runner.pool.num_pages
    assert tokens(llm.generate(prompt, GREEDY)) == expected


def test_others_start_over_after_a_failed_step(engine, monkeypatch):
    """A request that was running, but not in the failing step, is recomputed and ends the same."""
    from chunkattn.engine.messages import RequestFailed, TokenOutput

    llm = engine("qwen3")
    expected = tokens(llm.generate([{"prompt_token_ids": [4, 5]}], GREEDY))[0]
    core = llm.core
    for name, ids in (("a", [1, 2, 3]), ("b", [4, 5])):
        core.add(GenerateRequest(name, make_layout([], [], ids), GREEDY))
    found = []
    for step in range(40):
        if step == 5:
            core.ahead.drop()
            spans = core.scheduler.plan()
            monkeypatch.setattr(
                core.scheduler, "plan", lambda *_, spans=spans: [s for s in spans if s.sample.request.request_id == "a"]
            )
            monkeypatch.setattr(core.runner, "forward", lambda batch: 1 / 0)
        for event in core.step():
            if isinstance(event, TokenOutput) and event.request_id == "b":
                found += event.token_ids
            if isinstance(event, RequestFailed):
                assert event.request_id == "a"
                monkeypatch.undo()
    assert found == expected
    assert not core.has_work


def test_compiled_programs_are_few_and_do_not_grow(engine, prompts):
    llm = engine("qwen3")
    compiles = llm.core.runner.compiles
    llm.generate({"prompt_token_ids": [1] * 4}, GREEDY)
    samplers = compiles["sample"]
    for length in (12, 20, 40, 80, 160):
        llm.generate({"prompt_token_ids": [1] * length}, GREEDY)
    # Samplers are compiled for the number of rows, not for the tokens of a step.
    assert compiles["sample"] == samplers
    counts = []
    for salt in ("first", "second"):  # nothing is cached under either
        llm.generate(prompts, GREEDY, cache_salt=salt)
        llm.generate(prompts[::-1], GREEDY, cache_salt=salt)
        counts.append(sum(compiles.values()))
    assert counts[0] == counts[1]
    assert llm.core.runner.compiles["step"] <= len(llm.core.builder.token_buckets) * len(llm.core.builder.width_buckets)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_step_makes_no_copy_of_the_pool(dtype, checkpoint):
    """The compiled step writes the donated pool in place, and its temporaries are far smaller."""
    from chunkattn import LLM

    llm = LLM(str(checkpoint("qwen3")), dtype=dtype, skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20)
    core, runner = llm.core, llm.core.runner
    core.add(GenerateRequest("r", make_layout([], [], [1, 2, 3]), GREEDY))
    core.scheduler.admit()
    arrays = core.builder.build(core.scheduler.plan()).arrays
    compiled = runner.lower(arrays, runner.pool.num_pages).compile()
    memory, pool = compiled.memory_analysis(), sum(a.nbytes for layer in runner.pool.caches for a in layer)
    assert memory.alias_size_in_bytes >= pool > 60 << 20
    assert memory.temp_size_in_bytes < 4 << 20


def test_the_arrays_of_a_step_pass_a_wire(engine):
    """Without the step's samples and requests, they run as the step does."""
    core = engine("qwen3").core
    core.add(GenerateRequest("r", make_layout([], [], [1, 2, 3]), GREEDY))
    core.scheduler.admit()
    try:
        arrays = core.builder.build(core.scheduler.plan()).arrays
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(arrays))
        sent = pickle.loads(pickle.dumps(arrays))
        np.testing.assert_array_equal(*(core.runner.forward(given)[0][:3] for given in (arrays, sent)))
        core.scheduler.fills.commit()
    finally:
        core.abort("r")
