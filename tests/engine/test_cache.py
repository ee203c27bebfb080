"""Cached K/V equals K/V computed anew, in every company."""

from operator import attrgetter

import numpy as np
import pytest

from chunkattn import ChunkedPrompt, SamplingParams, make_layout
from chunkattn.engine.messages import GenerateRequest, RequestFailed, ScoreRequest, TokenOutput
from chunkattn.errors import CapacityError, EngineError, RequestError
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
    assert off.core.scheduler.trie.num_free == off.limits.num_pages
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
    with pytest.raises(CapacityError, match="pinned documents leave too few"):
        llm.generate({"prompt_token_ids": part(rng, 200)}, SamplingParams(n=8, max_tokens=28))
    llm.unpin(report)
    run(llm, {"prompt_token_ids": part(rng, 230)})
    assert llm.reset_prefix_cache()


def test_requests_without_room_beside_pins_are_capacity_errors(engine):
    rng = np.random.default_rng(11)
    llm = engine("qwen3", kv_cache_memory_bytes=20 * engine("qwen3").limits.page_bytes)
    report = llm.precompute(part(rng, 20), [part(rng, 30) for _ in range(6)], pin=True)
    for algorithm in ("serial", "prefill_extend"):
        with pytest.raises(CapacityError, match="pinned documents leave too few"):
            llm.score(part(rng, 120), [part(rng, 20)], label_token_ids=[1], algorithm=algorithm)
    with pytest.raises(CapacityError, match="pinned documents leave too few"):
        llm.precompute(part(rng, 120), [])
    llm.core.scheduler.check()
    llm.unpin(report)
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
                    tokens[event.request_id] += event.token_ids
                core.scheduler.check()
                if steps == after and aborted:
                    core.abort(aborted)
            for name, question in (("a", 1), ("b", 2)):
                if name != aborted:
                    assert tokens[name] == expected[question]
            # 116 shared tokens once, and one of each question that lived to see it.
            assert 117 <= computed(llm) - before <= 118


def test_a_refusal_does_not_outlast_its_reason(engine):
    """Pinning ends a running request: what was refused beside it must be tried again, not failed."""
    rng = np.random.default_rng(12)
    llm = engine("qwen3", kv_cache_memory_bytes=10 * engine("qwen3").limits.page_bytes)
    report = llm.precompute(part(rng, 16), [part(rng, 16) for _ in range(9)], pin=True)
    assert report.fits == 9
    assert llm.core.scheduler.trie.num_available == 0
    llm.unpin(report)
    assert llm.reset_prefix_cache()


def test_repeated_chunks_take_no_room(engine):
    llm = engine("qwen3", kv_cache_memory_bytes=26 * engine("qwen3").limits.page_bytes)
    document = part(np.random.default_rng(13), 16)
    prompt = ChunkedPrompt([1], [document] * 30, [2])
    warm = run(llm, prompt)
    assert sum(warm[0].num_cached_chunk_tokens) == 29 * 16
    check_same(warm, run(engine("qwen3", enable_prefix_caching=False), prompt))
    with pytest.raises(CapacityError, match="42 entries of a page table, which has 32"):
        llm.generate(ChunkedPrompt([1], [document] * 40, [2]), GREEDY)


def test_precompute_needs_a_cache_and_sound_input(engine):
    llm = engine("qwen3", enable_prefix_caching=False)
    with pytest.raises(RequestError, match="has no cache"):
        llm.precompute([1], [[2]])
    llm = engine("qwen3")
    for prefix, documents in ((5, [[1]]), ([1], 5), ([1], ["text"])):
        with pytest.raises(RequestError):
            llm.precompute(prefix, documents)
    for pin in (1, "yes"):
        with pytest.raises(RequestError, match="pin must be True or False"):
            llm.precompute([1], [[2]], pin=pin)
    with pytest.raises(RequestError, match=f"document 1: token id {VOCAB}"):
        llm.precompute([1], [[2], [VOCAB]])
    report = llm.precompute([], [[], [3, 4]])  # an empty document is no harm
    assert [(d.tokens, d.done) for d in report.documents] == [(0, True), (2, True)]
    # One that comes again takes no pages of its own.
    pages = llm.limits.num_pages
    report = llm.precompute([1], [[7] * 200] * pages, pin=True)
    assert report.fits == pages
    llm.unpin(report)


def test_arguments_are_checked(engine):
    llm, prompt = engine("qwen3"), {"prompt_token_ids": [1]}
    for priority in ("high", 1.5, None, True, [1.5]):
        with pytest.raises(RequestError, match="priority must be an integer"):
            llm.generate(prompt, priority=priority)
        with pytest.raises(RequestError, match="priority must be an integer"):
            llm.score([1], [[2]], label_token_ids=[1], priority=priority)
    assert llm.generate(prompt, GREEDY, priority=np.int64(3))
    for salt in ("", 5):
        with pytest.raises(RequestError, match="cache_salt"):
            llm.generate(prompt, cache_salt=salt)
    with pytest.raises(RequestError, match="0 sampling_params for 1 prompts"):
        llm.generate(prompt, [])


def test_pins_of_a_failed_step_are_let_go_with_unpin(engine, monkeypatch):
    llm = engine("qwen3")
    report = llm.precompute([1, 2], [[3] * 20], pin=True)
    with monkeypatch.context() as patch:
        patch.setattr(llm.core.runner, "forward", lambda batch: 1 / 0)
        with pytest.raises(EngineError):
            llm.generate({"prompt_token_ids": [5]})
    assert llm.core.has_work  # the pinned wait to be computed again
    llm.unpin(report)
    assert not llm.core.has_work
    run(llm, {"prompt_token_ids": [5]})
    assert llm.core.pins == []
    # One that fails itself is given up, or it would fail for ever.
    llm.precompute([1, 2], [[3] * 20], pin=True)
    with monkeypatch.context() as patch:
        patch.setattr(llm.core.runner, "forward", lambda batch: 1 / 0)
        for _ in range(3):  # the prompt alone, the prompt beside the pinned, the pinned alone
            with pytest.raises(EngineError):
                llm.generate({"prompt_token_ids": [5]})
    assert not llm.core.has_work
    assert llm.reset_prefix_cache()


STAGES = {
    "builder": ["build"],
    "runner": ["forward", "sample", "label_logprobs"],
    "runner.pool": ["copy_pages"],
    "scheduler": ["admit", "plan"],
    "scheduler.fills": ["commit"],
    "metrics": ["count_cached"],
}


@pytest.mark.parametrize(("owner", "stage"), [(o, s) for o, stages in STAGES.items() for s in stages])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whatever_raises_in_a_step_nobody_is_forgotten(engine, monkeypatch, owner, stage, error):
    """At any stage: every request in the step is answered or failed, the others go on, no page is lost."""
    rng = np.random.default_rng(14)
    llm = engine("qwen3", max_num_batched_tokens=64)
    core = llm.core
    llm.reset_prefix_cache()
    prompts = {name: part(rng, 30) for name in ("a", "b", "late")}
    sampling = SamplingParams(temperature=0, max_tokens=6, n=2)
    expected = {
        name: [o.token_ids for o in llm.generate({"prompt_token_ids": ids}, sampling)[0].outputs]
        for name, ids in prompts.items()
    }
    score = ScoreRequest("score", make_layout([], [], [1, 2, 3]), np.asarray([2]), ((5,),))
    for name in ("a", "b"):
        core.add(GenerateRequest(name, make_layout([], [], prompts[name]), sampling))
    core.add(score)
    target, calls = attrgetter(owner)(core), []
    original = getattr(target, stage)

    def failing(*args):
        calls.append(args)
        result = original(*args)
        if len(calls) == 1:
            raise error("injected")
        return result

    monkeypatch.setattr(target, stage, failing)
    tokens, ended = {}, set()
    for step in range(60):
        if step == 1:
            core.add(GenerateRequest("late", make_layout([], [], prompts["late"]), sampling))
        try:
            events = core.step()
        except KeyboardInterrupt:
            assert error is KeyboardInterrupt
            events = []
        for event in events:
            if isinstance(event, TokenOutput):
                tokens.setdefault(event.request_id, {}).setdefault(event.sample, []).extend(event.token_ids)
            else:
                assert event.request_id not in ended, "answered twice"
                ended.add(event.request_id)
                failed = isinstance(event, RequestFailed)
                assert failed or event.request_id == "score"
                tokens.pop(event.request_id if failed else "", None)
        core.scheduler.check()
        if step and not core.has_work:
            break
    assert calls
    assert not core.has_work
    finished = {name for name in tokens if name not in ended}
    assert finished | ended == {"a", "b", "late", "score"}, "a request got no answer"
    assert "late" in finished
    for name in finished:
        assert [tokens[name][i] for i in range(2)] == expected[name]
    monkeypatch.undo()
    assert llm.reset_prefix_cache()
