"""What the cache gives back equals what computing anew gives, in every company."""

import numpy as np
import pytest

from chunkattn import ChunkedPrompt, SamplingParams, make_layout
from chunkattn.engine.messages import GenerateRequest, PrecomputeRequest, RequestFailed, TokenOutput
from chunkattn.errors import CapacityError
from tests.checkpoints import VOCAB

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=VOCAB)
COLD = SamplingParams(temperature=0, max_tokens=12, logprobs=VOCAB, skip_reading_prefix_cache=True)


def part(rng, length):
    return rng.integers(0, VOCAB, length).tolist()


def run(llm, prompts, params=GREEDY, **options):
    """Outputs of prompts sent together, after the run's invariants are checked."""
    outs = llm.generate(prompts, params, use_tqdm=False, **options)
    llm.core.scheduler.check()
    assert llm.core.scheduler.trie.num_available == llm.limits.num_pages
    return outs


def check_same(outs, expected):
    """Equal greedy tokens and log-probabilities of the whole vocabulary within 1e-5."""
    for out, other in zip(outs, expected, strict=True):
        assert out.outputs[0].token_ids == other.outputs[0].token_ids
        for step, (mine, theirs) in enumerate(zip(out.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)):
            assert mine.keys() == theirs.keys()
            diff = max(abs(mine[t].logprob - theirs[t].logprob) for t in mine)
            assert diff < 1e-5, f"step {step}: {diff}"


@pytest.mark.parametrize("strategy", ["shared", "offset"])
def test_warm_equals_cold(engine, strategy):
    """Random documents in random order, subset and company, mixed with plain prompts, on one warm engine."""
    rng = np.random.default_rng(0)
    llm = engine("qwen3", position_strategy=strategy)
    llm.reset_prefix_cache()
    prefixes = [part(rng, n) for n in (0, 5, 16, 37)]
    prefixes.append(prefixes[-1][:20] + part(rng, 9))  # shares its first page with another
    documents = [part(rng, n) for n in (1, 7, 15, 16, 17, 32, 40, 3)]
    questions = [part(rng, n) for n in (1, 16, 17, 40)]
    hits = 0
    for _ in range(12):
        prompts = []
        for _ in range(int(rng.integers(1, 5))):
            chosen = [documents[i] for i in rng.integers(0, len(documents), rng.integers(0, 5))]
            prefix, question = prefixes[rng.integers(len(prefixes))], questions[rng.integers(len(questions))]
            plain = {"prompt_token_ids": prefix + question}
            prompts.append(ChunkedPrompt(prefix, chosen, question) if chosen else plain)
        warm = run(llm, prompts)
        check_same(warm, run(llm, prompts, COLD))
        hits += sum(out.num_cached_tokens for out in warm)
    assert hits > 500


def computed(llm):
    """Prompt rows run so far."""
    llm.core.metrics_text()
    return llm.core.metrics.value("tokens_total", kind="prefill")


def test_num_cached_tokens_is_what_was_not_computed(engine):
    """Over random batches: prompt tokens less cached ones are exactly the rows that ran, in flight sharing included."""
    rng = np.random.default_rng(1)
    llm = engine("qwen3")
    llm.reset_prefix_cache()
    documents = [part(rng, n) for n in (9, 16, 33, 20)]
    for _ in range(8):
        prompts = [
            ChunkedPrompt(documents[0][:7], [documents[i] for i in rng.integers(0, 4, 3)], part(rng, int(rng.integers(1, 40))))
            for _ in range(4)
        ]
        before = computed(llm)
        outs = run(llm, prompts, SamplingParams(temperature=0, max_tokens=1))
        assert sum(len(o.prompt_token_ids) - o.num_cached_tokens for o in outs) == computed(llm) - before
        for prompt, out in zip(prompts, outs, strict=True):
            lengths = [len(c) for c in prompt.chunks]
            assert all(0 <= hit <= length for hit, length in zip(out.num_cached_chunk_tokens, lengths, strict=True))


def test_a_question_computes_itself_alone(engine):
    """All documents warm, in another order and as a subset: only the new question's tokens run."""
    rng = np.random.default_rng(2)
    llm = engine("qwen3")
    prefix, documents = part(rng, 21), [part(rng, int(n)) for n in rng.integers(20, 50, 6)]
    llm.reset_prefix_cache()
    run(llm, ChunkedPrompt(prefix, documents, part(rng, 5)))
    for chosen in (documents[::-1], documents[2:5], [documents[4], documents[0]]):
        before = computed(llm)
        out = run(llm, ChunkedPrompt(prefix, chosen, part(rng, 11)), SamplingParams(max_tokens=1))[0]
        assert computed(llm) - before == 11
        assert out.num_cached_chunk_tokens == tuple(map(len, chosen))
        assert out.num_cached_tokens == len(prefix) + sum(map(len, chosen))
    # Another prefix that begins the same shares its full page, and no document.
    out = run(llm, ChunkedPrompt([*prefix[:20], 0], documents, [1, 2]), SamplingParams(max_tokens=1))[0]
    assert out.num_cached_tokens == 16


def test_a_follow_up_hits_all_but_the_new_turn(engine):
    """Question path: the earlier turns over the same documents, in any order, and the answer in between."""
    rng = np.random.default_rng(3)
    llm = engine("qwen3")
    llm.reset_prefix_cache()
    prefix, documents, question = part(rng, 10), [part(rng, 20), part(rng, 30)], part(rng, 40)
    first = run(llm, ChunkedPrompt(prefix, documents, question), SamplingParams(temperature=0, max_tokens=30))[0]
    turns = question + first.outputs[0].token_ids
    second = run(llm, ChunkedPrompt(prefix, documents[::-1], turns + part(rng, 9)))[0]
    # 69 tokens of the first turn were computed (the last generated one never is): four full pages.
    assert second.num_cached_tokens == 60 + 64
    check_same([second], run(llm, ChunkedPrompt(prefix, documents[::-1], second.prompt_token_ids[60:]), COLD))


def test_plain_prompts_share_their_beginning(engine):
    rng = np.random.default_rng(4)
    llm = engine("qwen3")
    llm.reset_prefix_cache()
    ids = part(rng, 50)
    assert run(llm, {"prompt_token_ids": ids})[0].num_cached_tokens == 0
    assert run(llm, {"prompt_token_ids": ids})[0].num_cached_tokens == 48
    assert run(llm, {"prompt_token_ids": ids[:48]})[0].num_cached_tokens == 32  # the last token is computed
    assert run(llm, {"prompt_token_ids": ids[:40] + [0] * 9})[0].num_cached_tokens == 32
    # A prefix is a plain beginning too.
    assert run(llm, ChunkedPrompt(ids[:33], [[1, 2]], [3]))[0].num_cached_tokens == 32


def test_offset_positions_reuse_at_the_same_place_only(engine):
    rng = np.random.default_rng(5)
    llm = engine("qwen3", position_strategy="offset")
    llm.reset_prefix_cache()
    prefix, a, b = part(rng, 8), part(rng, 20), part(rng, 30)
    run(llm, ChunkedPrompt(prefix, [a, b], [1]))
    assert run(llm, ChunkedPrompt(prefix, [a, b], [2]))[0].num_cached_chunk_tokens == (20, 30)
    assert run(llm, ChunkedPrompt(prefix, [b, a], [2]))[0].num_cached_chunk_tokens == (0, 0)
    assert run(llm, ChunkedPrompt(prefix, [a], [2]))[0].num_cached_chunk_tokens == (20,)


def test_salts_and_switches(engine):
    rng = np.random.default_rng(6)
    llm = engine("qwen3")
    llm.reset_prefix_cache()
    prompt = ChunkedPrompt(part(rng, 20), [part(rng, 20)], part(rng, 20))
    cold = run(llm, prompt, cache_salt="a")
    assert [cold[0].num_cached_tokens] + [run(llm, prompt, cache_salt=s)[0].num_cached_tokens for s in ("b", None, "a")] == [
        *(0, 0, 0),
        56,
    ]
    assert run(llm, {"prompt_token_ids": [1] * 40, "cache_salt": "c"})[0].num_cached_tokens == 0
    assert run(llm, {"prompt_token_ids": [1] * 40})[0].num_cached_tokens == 0
    assert run(llm, {"prompt_token_ids": [1] * 40}, cache_salt="c")[0].num_cached_tokens == 32
    assert run(llm, prompt, COLD)[0].num_cached_tokens == 0
    logprobs = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    assert run(llm, prompt, logprobs)[0].num_cached_tokens == 0
    off = engine("qwen3", enable_prefix_caching=False)
    assert [run(off, prompt)[0].num_cached_tokens for _ in range(2)] == [0, 0]
    assert off.core.scheduler.trie.pool.num_free == off.limits.num_pages
    check_same(run(off, prompt), cold)
    # Nothing is kept of a salt once its last page is gone.
    llm.reset_prefix_cache()
    assert not llm.core.scheduler.trie._roots


def test_duplicate_chunks_are_computed_once_and_attended_twice(engine):
    rng = np.random.default_rng(7)
    llm = engine("qwen3")
    llm.reset_prefix_cache()
    document = part(rng, 20)
    prompt = ChunkedPrompt([1, 2], [document, document, document[:3]], part(rng, 4))
    warm = run(llm, prompt)
    assert sorted(warm[0].num_cached_chunk_tokens) == [0, 0, 20]
    check_same(warm, run(engine("qwen3", enable_prefix_caching=False), prompt))
    logprobs = run(llm, prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
    assert [i for i, entry in enumerate(logprobs) if entry is None] == [0, 2, 22, 42, 45]


def test_samples_share_the_prompt(engine):
    rng = np.random.default_rng(8)
    llm = engine("qwen3")
    for length in (16, 17, 30):
        prompt = ChunkedPrompt([1] * 5, [part(rng, 20)], part(rng, length))
        params = SamplingParams(n=4, seed=3, max_tokens=20)
        cold = SamplingParams(n=4, seed=3, max_tokens=20, skip_reading_prefix_cache=True)
        first = [o.token_ids for o in run(llm, prompt, params)[0].outputs]
        assert first == [o.token_ids for o in run(llm, prompt, params)[0].outputs]
        assert first == [o.token_ids for o in run(llm, prompt, cold)[0].outputs]


def test_precompute_and_pins(engine):
    rng = np.random.default_rng(9)
    llm = engine("qwen3", kv_cache_memory_bytes=40 * engine("qwen3").limits.page_bytes)
    assert llm.limits.num_pages == 40
    prefix, documents = part(rng, 20), [part(rng, 30) for _ in range(8)]
    report = llm.precompute(prefix, documents[:6], pin=True)
    assert [d.tokens for d in report.documents] == [30] * 6
    assert report.documents[0].num_bytes == 2 * llm.limits.page_bytes
    assert report.fits == 6
    assert not any(d.was_cached for d in report.documents)
    assert all(d.was_cached and d.done for d in llm.precompute(prefix, documents[:6]).documents)
    for _ in range(3):  # other prompts fill the pool again and again
        run_beside_pins(llm, {"prompt_token_ids": part(rng, 250)})
    out = run_beside_pins(llm, ChunkedPrompt(prefix, documents[5::-1], [1]))
    assert out.num_cached_tokens == 200
    with pytest.raises(CapacityError, match="bytes holds the first 19"):
        llm.precompute(prefix, [part(rng, 30) for _ in range(30)], pin=True)
    with pytest.raises(CapacityError, match="14 are pinned; unpin"):
        llm.generate({"prompt_token_ids": part(rng, 200)}, SamplingParams(n=8, max_tokens=28))
    llm.unpin(report)
    run(llm, {"prompt_token_ids": part(rng, 230)})
    assert llm.reset_prefix_cache()


def run_beside_pins(llm, prompt):
    out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)[0]
    llm.core.scheduler.check()
    return out


def test_pins_survive_a_failed_step(engine, monkeypatch):
    rng = np.random.default_rng(10)
    llm = engine("qwen3")
    documents = [part(rng, 30), part(rng, 10)]
    report = llm.precompute([1, 2], documents, pin=True)
    monkeypatch.setattr(llm.core.runner, "forward", lambda batch: 1 / 0)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        llm.generate({"prompt_token_ids": [5]})
    monkeypatch.undo()
    run_beside_pins(llm, {"prompt_token_ids": [5]})  # the pinned are computed again on the way
    assert llm.core.pins == list(report.pin_ids)
    assert run_beside_pins(llm, ChunkedPrompt([1, 2], documents, [1])).num_cached_tokens == 42
    llm.unpin(report)


def test_two_requests_share_in_flight_and_either_may_go(engine):
    """The second finds the first's half-computed document and goes on with it, whoever is aborted."""
    rng = np.random.default_rng(11)
    llm = engine("qwen3", max_num_batched_tokens=32, max_num_seqs=8)
    prefix, document = part(rng, 16), part(rng, 100)
    expected = {q: run(llm, ChunkedPrompt(prefix, [document], [q]), COLD)[0].outputs[0].token_ids for q in (1, 2)}
    for aborted in ("a", "b", None):
        for after in (1, 2, 3, 4):
            llm.reset_prefix_cache()
            core, tokens, before = llm.core, {"a": [], "b": []}, computed(llm)
            for name, question in (("a", 1), ("b", 2)):
                layout = make_layout(prefix, [document], [question])
                core.add(GenerateRequest(name, layout, SamplingParams(temperature=0, max_tokens=12)))
            steps = 0
            while core.has_work:
                steps += 1
                for event in core.step():
                    tokens[event.request_id].append(event.token_id)
                core.scheduler.check()
                if steps == after and aborted:
                    core.abort(aborted)
            for name, question in (("a", 1), ("b", 2)):
                if name != aborted:
                    assert tokens[name] == expected[question]
            # 116 shared tokens once, and one of each question that lived to see it.
            assert 117 <= computed(llm) - before <= 118


class Thrash:
    """A random run against an engine whose pool is always too small."""

    def __init__(self, llm, seed):
        self.core, self.rng = llm.core, np.random.default_rng(seed)
        self.prefixes = [part(self.rng, n) for n in (0, 7, 16, 20)]
        self.documents = [part(self.rng, n) for n in (3, 16, 17, 30, 40, 9)]
        self.tokens, self.prompts, self.done, self.failed, self.number = {}, {}, set(), set(), 0

    def add(self):
        rng = self.rng
        chosen = [self.documents[i] for i in rng.integers(0, 6, rng.integers(0, 5))]
        question = part(rng, int(rng.integers(1, 40)))
        parts = (self.prefixes[rng.integers(4)], chosen, question) if chosen else ([], [], question)
        sampling = SamplingParams(
            n=int(rng.choice([1, 1, 1, 2, 3])),
            seed=int(rng.integers(1 << 30)),
            temperature=float(rng.choice([0, 1])),
            max_tokens=int(rng.integers(1, 30)),
            ignore_eos=True,
            skip_reading_prefix_cache=bool(rng.random() < 0.2),
        )
        self.number += 1
        name, salt = str(self.number), rng.choice([None, "s"])
        request = GenerateRequest(name, make_layout(*parts), sampling, (), salt, int(rng.choice([0, 0, 0, 1, -1])))
        if rng.random() < 0.1 and chosen:
            request = PrecomputeRequest(name, make_layout(parts[0], chosen, []), salt)
        self.core.add(request)
        self.prompts[name] = (parts, sampling)
        self.tokens[name] = {}

    def step(self):
        for event in self.core.step():
            if isinstance(event, TokenOutput):
                self.tokens[event.request_id].setdefault(event.sample, []).append(event.token_id)
            elif isinstance(event, RequestFailed):
                assert "injected" in event.reason, event.reason
                self.failed.add(event.request_id)

    def operate(self, monkeypatch):
        core, rng = self.core, self.rng
        action = rng.random()
        if action < 0.25 and len(core.requests) < 12:
            self.add()
        elif action < 0.30 and core.requests:
            name = str(rng.choice(list(core.requests)))
            core.abort(name)
            self.failed.add(name)
        elif action < 0.32 and core.scheduler.running:
            core.scheduler.preempt(core.scheduler.running[int(rng.integers(len(core.scheduler.running)))])
        elif action < 0.33:
            core.scheduler.trie.evict_all()
        elif action < 0.34:
            original = core.runner.forward

            def failing(batch):
                original(batch)
                raise RuntimeError("injected")

            with monkeypatch.context() as patch:
                patch.setattr(core.runner, "forward", failing)
                self.step()
        else:
            self.step()
        core.scheduler.check()


def thrash(llm, whole, seed, operations, monkeypatch):
    """Random operations; every request that ended well must have given the tokens of a large, uncached engine."""
    run = Thrash(llm, seed)
    for _ in range(operations):
        run.operate(monkeypatch)
    while run.core.has_work:
        run.step()
        run.core.scheduler.check()
    trie = run.core.scheduler.trie
    assert trie.num_available == trie.num_pages
    assert run.core.scheduler.preemptions > 0
    assert trie.evictions > 0
    good = [n for n in run.tokens if n not in run.failed and run.tokens[n]]
    assert len(good) > operations / 40
    for name in good:
        parts, sampling = run.prompts[name]
        prompt = ChunkedPrompt(*parts) if parts[1] else {"prompt_token_ids": parts[2]}
        expected = whole.generate(prompt, sampling, use_tqdm=False)[0]
        assert [run.tokens[name][i] for i in range(sampling.n)] == [o.token_ids for o in expected.outputs]
    assert llm.reset_prefix_cache()
    assert trie.pool.num_free == trie.num_pages


@pytest.mark.parametrize(("seed", "operations"), [(0, 400), pytest.param(1, 2500, marks=pytest.mark.slow)])
def test_random_operations_on_a_thrashing_pool(engine, monkeypatch, seed, operations):
    page = engine("qwen3").limits.page_bytes
    small = engine("qwen3", kv_cache_memory_bytes=26 * page, max_num_batched_tokens=48, max_num_seqs=6)
    thrash(small, engine("qwen3", enable_prefix_caching=False), seed, operations, monkeypatch)
