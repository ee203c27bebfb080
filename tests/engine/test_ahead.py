"""Steps that are planned while the device computes are the steps that would have been planned afterwards."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.calls.generate import generate_job
from chunkattn.engine.ahead import Ahead
from chunkattn.engine.messages import PrecomputeRequest, ScoreRequest
from chunkattn.rope.positions import make_layout
from tests.checkpoints import VOCAB
from tests.engine.test_cache import part
from tests.flows import stages_of

OPTIONS = {
    "skip_tokenizer_init": True,
    "num_scheduler_steps": 1,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 6,
    "max_decode_gap_s": 1e-6,
}


@pytest.fixture
def taken(monkeypatch):
    """Counts of planned steps that were taken, dropped or not there."""
    counts, take = Counter(), Ahead.take

    def counted(self):
        planned, step = self._planned, take(self)
        counts["taken" if step else "dropped" if planned else "none"] += 1
        return step

    monkeypatch.setattr(Ahead, "take", counted)
    return counts


def plain(output):
    return repr({f.name: getattr(output, f.name) for f in dataclasses.fields(output) if f.name not in ("rates", "stats")})


def messages(llm, rng, count):
    """Requests of every kind, each with the step at which it comes."""
    made, parse, documents = [], llm.frontend.parse, [part(rng, n) for n in (20, 7, 33)]
    for number in range(count):
        if rng.random() < 0.3:
            length = int(rng.integers(5, 80))
            rows = np.sort(rng.choice(length, int(rng.integers(1, 4)), replace=False))
            layout = make_layout([], [], part(rng, length))
            backend = "packed_dense" if rng.random() < 0.2 else None
            made.append((int(rng.integers(0, 60)), ScoreRequest("s", layout, rows, ((5, 6),), backend=backend)))
            continue
        if rng.random() < 0.1:
            layout = make_layout(documents[0][:9], [documents[2], part(rng, 40)], [])
            made.append((int(rng.integers(0, 60)), PrecomputeRequest("p", layout, pin=bool(rng.integers(0, 2)))))
            continue
        prompt = ChunkedPrompt(documents[0][:9], [documents[i] for i in rng.permutation(3)[:2]], part(rng, 4))
        if rng.random() < 0.5:
            prompt = {"prompt_token_ids": part(rng, int(rng.integers(1, 70)))}
        params = SamplingParams(
            n=int(rng.integers(1, 3)),
            temperature=float(rng.integers(0, 2)),
            seed=number,
            max_tokens=int(rng.integers(1, 25)),
            stop_token_ids=rng.integers(0, VOCAB, 20).tolist(),
            logprobs=1 if rng.random() < 0.3 else None,
            prompt_logprobs=1 if rng.random() < 0.2 else None,
            repetition_penalty=float(rng.choice([1.0, 1.2])),
        )
        job = generate_job(llm.frontend, parse(prompt, None, None), params, int(rng.integers(0, 2)))
        made.append((int(rng.integers(0, 60)), next(stages_of(job))[0]))
    return made


def spoil(core, steps):
    """Make one row of some steps not finite."""
    forward, count = core.runner.forward, iter(range(10**6))

    def spoilt(arrays):
        hidden, finite = forward(arrays)
        if next(count) in steps:
            finite = finite.at[0].set(False)
        return hidden, finite

    core.runner.forward = spoilt


def run(llm, seed, *, ahead):
    """Outputs of every step. Some requests are aborted, and some samples are stopped, at fixed steps."""
    rng, core, events = np.random.default_rng(seed), llm.core, []
    if not ahead:
        core.ahead.plan = lambda *_: None
    spoil(core, {int(n) for n in rng.integers(5, 90, 3)})
    waiting = [
        (at, dataclasses.replace(message, request_id=f"{seed} {number}"))
        for number, (at, message) in enumerate(messages(llm, rng, 16))
    ]
    ends = {int(rng.integers(5, 80)): f"{seed} {rng.integers(0, 16)}" for _ in range(4)}
    for step in range(2000):
        for message in [m for at, m in waiting if at == step]:
            core.add(message)
        if (name := ends.get(step)) is not None:
            (core.abort if step % 2 else lambda name: core.stop(name, 0))(name)
        outputs = core.step()
        events.append([plain(output) for output in outputs])
        core.scheduler.check()
        if step > 80 and not core.has_work:
            break
    assert not core.has_work
    assert llm.reset_prefix_cache()
    return events, core.scheduler.preemptions


@pytest.mark.parametrize(
    ("seed", "pages"), [(2, 14), *(pytest.param(*case, marks=pytest.mark.ci) for case in ((0, 128), (1, 128), (3, 14)))]
)
def test_steps_are_the_same(checkpoint, taken, seed, pages):
    """With room for all, and in a pool so small that samples are preempted."""

    def start():
        return LLM(str(checkpoint("qwen3")), **OPTIONS, kv_cache_memory_bytes=pages * page)

    probe = LLM(str(checkpoint("qwen3")), **OPTIONS, kv_cache_memory_bytes=1 << 20)
    page = probe.limits.page_bytes
    events, preempted = run(start(), seed, ahead=True)
    counts = dict(taken)
    right, _ = run(start(), seed, ahead=False)
    assert events == right
    assert counts["taken"] > 10
    assert counts["dropped"] > 3
    assert pages > 100 or preempted
