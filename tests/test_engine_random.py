"""Random operations on an engine whose pool is always too small, against a large one that caches nothing."""

import logging

import numpy as np
import pytest

from chunkattn import LLM, ChunkedPrompt, SamplingParams, make_layout
from chunkattn.engine.messages import (
    GenerateRequest,
    PrecomputeRequest,
    PromptLogprobsOutput,
    RequestFailed,
    ScoreRequest,
    ScoreResult,
    TokenOutput,
)
from tests.test_cache import part


class Thrash:
    """Adds, aborts, preempts, evicts, pins, fails and steps; remembers what every request was given."""

    def __init__(self, llm, seed, strategy):
        self.core, self.rng, self.strategy = llm.core, np.random.default_rng(seed), strategy
        self.prefixes = [part(self.rng, n) for n in (0, 7, 16, 20)]
        self.documents = [part(self.rng, n) for n in (3, 16, 17, 30, 40, 9)] + [[]]
        self.documents.append(self.documents[4][:16])
        self.history = []  # parts of prompts with their answers, to be followed up
        self.asked, self.tokens, self.logprobs, self.results, self.cached = {}, {}, {}, {}, {}
        self.failed, self.number, self.operations = set(), 0, 0

    def random_parts(self):
        rng = self.rng
        if self.history and rng.random() < 0.3:
            prefix, chunks, question = self.history[rng.integers(len(self.history))]
            order = rng.permutation(len(chunks)) if self.strategy == "shared" else range(len(chunks))
            return prefix, [chunks[i] for i in order], question[:50] + part(rng, int(rng.integers(1, 5)))
        chosen = [self.documents[i] for i in rng.integers(0, len(self.documents), rng.integers(0, 5))]
        question = part(rng, int(rng.integers(1, 40)))
        return (self.prefixes[rng.integers(4)], chosen, question) if chosen else ([], [], question)

    def add(self):
        rng, parts = self.rng, self.random_parts()
        self.number += 1
        name, salt, priority = str(self.number), rng.choice([None, "s"]), int(rng.choice([0, 0, 0, 1, -1]))
        kind = rng.random()
        context = make_layout(parts[0], parts[1], [], self.strategy)
        if kind < 0.1 and len(context):
            self.core.add(PrecomputeRequest(name, context, salt, bool(rng.random() < 0.3), priority=priority))
        elif kind < 0.2 and parts[0] and parts[1] and self.strategy == "shared":
            algorithm = str(rng.choice(["packed_segment", "prefill_extend", "packed_dense"]))
            shared = algorithm == "prefill_extend"
            # A prefix in the cache has no logits.
            rows = np.unique([s.end - 1 for s in context.segments[shared:-1] if s.end > s.start or not shared])
            if not len(rows):
                return
            request = ScoreRequest(name, context, rows, (1, 2, 3), shared, algorithm, salt, priority)
            self.core.add(request)
            self.asked[name] = request
        else:
            sampling = SamplingParams(
                n=int(rng.choice([1, 1, 1, 2, 3])),
                seed=int(rng.integers(1 << 30)),
                temperature=float(rng.choice([0, 1])),
                max_tokens=int(rng.integers(1, 30)),
                ignore_eos=True,
                logprobs=0,
                prompt_logprobs=0 if rng.random() < 0.1 else None,
                skip_reading_prefix_cache=bool(rng.random() < 0.1),
            )
            self.core.add(GenerateRequest(name, make_layout(*parts, self.strategy), sampling, (), salt, priority))
            self.asked[name] = (parts, sampling)

    def step(self):
        for event in self.core.step():
            name = event.request_id
            if isinstance(event, TokenOutput):
                self.tokens.setdefault(name, {}).setdefault(event.sample, []).extend(event.token_ids)
                self.logprobs.setdefault(name, {}).setdefault(event.sample, []).append(float(event.logprobs.target[0]))
                if event.cached is not None:
                    self.cached[name] = event.cached
                if event.finish_reason and self.rng.random() < 0.5:
                    prefix, chunks, question = self.asked[name][0]
                    self.history.append((prefix, chunks, question + self.tokens[name][event.sample]))
            elif isinstance(event, RequestFailed):
                assert "injected" in event.reason or "pinned" in event.reason, event.reason
                self.failed.add(name)
            elif isinstance(event, (ScoreResult, PromptLogprobsOutput)):
                self.results[name] = event
        self.check()

    def check(self):
        self.core.scheduler.check()
        assert all(b.planned == b.filled for b in self.core.scheduler.trie.blocks())

    def operate(self, monkeypatch):
        core, rng, action = self.core, self.rng, self.rng.random()
        self.operations += 1
        if action < 0.25 and len(core.requests) < 12:
            self.add()
        elif action < 0.29 and core.requests:
            name = str(rng.choice(list(core.requests)))
            core.abort(name)
            self.failed.add(name)
        elif action < 0.31 and core.scheduler.running:
            core.scheduler.preempt(core.scheduler.running[int(rng.integers(len(core.scheduler.running)))])
        elif action < 0.32:
            core.scheduler.trie.evict_all()
        elif action < 0.33:
            core.unpin(core.pins)
        elif action < 0.34:
            prefix, chunks, _ = self.random_parts()
            context = make_layout(prefix, chunks, [], self.strategy)
            if len(context):
                asked = PrecomputeRequest("", context, rng.choice([None, "s"]))
                before = core.look_up(asked, forget=bool(rng.random() < 0.7))
                assert before.total <= len(context)
        elif action < 0.345:
            stage = str(rng.choice(["forward", "sample", "copy_pages"]))
            original = getattr(core.runner, stage)

            def failing(*args):
                original(*args)
                raise RuntimeError("injected")

            with monkeypatch.context() as patch:
                patch.setattr(core.runner, stage, failing)
                self.step()
        else:
            self.step()
        self.check()

    def finish(self):
        self.core.unpin(self.core.pins)
        while self.core.has_work:
            self.step()
            self.core.unpin(self.core.pins)
        assert self.core.scheduler.trie.num_available == self.core.limits.num_pages


def compare(run, whole):
    """Everything that ended well is what an engine gives that has room and caches nothing. Returns how much that was."""
    good = [name for name in run.asked if name not in run.failed]
    for name in good:
        asked = run.asked[name]
        if isinstance(asked, ScoreRequest):
            whole.core.add(ScoreRequest("w" + name, asked.layout, asked.rows, asked.label_token_ids))
            (expected,) = [event for _ in range(9) for event in whole.core.step()]
            np.testing.assert_allclose(run.results[name].logprobs, expected.logprobs, atol=1e-4)
            continue
        (prefix, chunks, question), sampling = asked
        prompt = ChunkedPrompt(prefix, chunks, question) if chunks else {"prompt_token_ids": question}
        expected = whole.generate(prompt, sampling, use_tqdm=False)[0]
        assert [run.tokens[name][i] for i in range(sampling.n)] == [o.token_ids for o in expected.outputs]
        for sample, output in enumerate(expected.outputs):
            logprobs = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
            np.testing.assert_allclose(run.logprobs[name][sample], logprobs, atol=1e-4)
        if sampling.prompt_logprobs is not None and (found := run.results.get(name)):
            ids = expected.prompt_token_ids
            assert found.known.tolist() == [entry is not None for entry in expected.prompt_logprobs]
            wanted = [entry[i].logprob for i, entry in zip(ids, expected.prompt_logprobs, strict=True) if entry]
            np.testing.assert_allclose(found.logprobs.target[found.known], wanted, atol=1e-4)
        hits = run.cached[name]
        lengths = [len(prefix), *map(len, chunks), len(question)]
        assert all(0 <= hit <= n for hit, n in zip([hits.prefix, *hits.chunks, hits.question], lengths, strict=True))
    return len(good)


@pytest.mark.parametrize(
    ("seed", "operations", "strategy", "disk"),
    [
        (0, 500, "shared", False),
        (1, 500, "offset", False),
        (2, 500, "shared", True),
        pytest.param(3, 4000, "shared", False, marks=pytest.mark.slow),
        pytest.param(4, 2000, "offset", True, marks=pytest.mark.slow),
    ],
)
def test_random_operations(engine, checkpoint, monkeypatch, tmp_path, seed, operations, strategy, disk):
    logging.disable(logging.ERROR)  # the injected failures
    options = {"position_strategy": strategy, "max_num_batched_tokens": 48, "max_num_seqs": 6, "max_logprobs": 20}
    pages = 26 * engine("qwen3").limits.page_bytes
    if disk:
        options |= {"kv_store": str(tmp_path / "kv"), "kv_store_max_bytes": 8 << 20}
    small = LLM(str(checkpoint("qwen3")), skip_tokenizer_init=True, kv_cache_memory_bytes=pages, **options)
    try:
        run = Thrash(small, seed, strategy)
        for _ in range(operations):
            run.operate(monkeypatch)
        run.finish()
        assert small.core.scheduler.preemptions > 0
        assert small.core.scheduler.trie.evictions > 0
        assert not disk or small.core.disk.counts["hit"] > 0
        whole = engine("qwen3", enable_prefix_caching=False, position_strategy=strategy)
        assert compare(run, whole) > operations / 40
        assert small.reset_prefix_cache()
    finally:
        small.close()
        logging.disable(logging.NOTSET)
