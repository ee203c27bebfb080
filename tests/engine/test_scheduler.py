"""The scheduler alone, without a model: the rows of each step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkattn import EngineConfig, SamplingParams, make_layout
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import GenerateRequest, StepRates
from chunkattn.engine.request import Request
from chunkattn.engine.scheduler import EXTRA_SPANS, Scheduler
from chunkattn.engine.step_sizes import StepSizes, buckets
from chunkattn.errors import CapacityError


class Steps:
    """An engine without a model: every token it samples is 7."""

    def __init__(self, num_pages=1000, step_rows=256, **options):
        self.config = EngineConfig(**{"max_num_batched_tokens": 256, "max_num_seqs": 64, **options})
        sizes = StepSizes(buckets(8, self.config.max_num_batched_tokens, 2), step_rows)
        self.limits = EngineLimits(num_pages, 16, 1, 1 << 20, 20, 1000, StepRates(0, 0, 0), sizes, config=self.config)
        self.scheduler = Scheduler(self.limits)
        self.requests, self.finished = {}, {}
        self.beside_decodes = None

    def add(self, name, parts, max_tokens=1, **fields):
        layout = make_layout([], [], parts) if isinstance(parts, list) else make_layout(*parts)
        sampling = SamplingParams(max_tokens=max_tokens, n=fields.pop("n", 1))
        message = GenerateRequest(name, layout, sampling, **fields)
        self.limits.check(message)
        self.requests[name] = Request(message, self.limits, arrival=len(self.requests))
        self.scheduler.add(self.requests[name])

    def step(self):
        """Spans of one step as (name, start, end), after it has run."""
        while self.scheduler.admit():
            pass
        assert self.scheduler.stuck is None
        spans = self.scheduler.plan(self.beside_decodes)
        rows = sum(s.end - s.start for s in spans)
        assert rows <= self.config.max_num_batched_tokens
        assert len(spans) <= self.config.max_num_seqs + EXTRA_SPANS
        if spans:
            self.scheduler.fills.commit()
        for span in spans:
            sample, request = span.sample, span.sample.request
            if span.end == sample.num_tokens:
                if request.forks:
                    self.scheduler.placement.fork(request)
                    for other in request.samples[1:]:
                        other.output_ids.append(7)
                sample.output_ids.append(7)
        for request in list(self.scheduler.running):
            for sample in list(request.samples):
                if len(sample.output_ids) == request.max_tokens:
                    self.scheduler.finish(sample)
            if not request.samples:
                self.finished[request.request_id] = len(self.finished)
        self.scheduler.check()
        return [(s.sample.request.request_id, s.start, s.end) for s in spans]


def test_two_requests_in_three_steps():
    """The example of the extend-attention document: 250 and 300 tokens, a budget of 256, spans of 128."""
    steps = Steps(long_prefill_token_threshold=128)
    rng = np.random.default_rng(0)
    steps.add("1", rng.integers(0, 1000, 250).tolist())
    steps.add("2", rng.integers(0, 1000, 300).tolist())
    assert [steps.step() for _ in range(4)] == [
        [("1", 0, 128), ("2", 0, 128)],
        [("1", 128, 250), ("2", 128, 262)],  # what the first leaves of the budget, the second uses
        [("2", 262, 300)],
        [],
    ]


def test_decodes_and_spans_fill_the_budget():
    steps = Steps(max_num_seqs=70)
    for i in range(64):
        steps.add(f"d{i}", [i, 1, 2], max_tokens=50)
    steps.step()
    rng = np.random.default_rng(0)
    for name, length in (("p", 500), ("q", 500), ("r", 30)):
        steps.add(name, rng.integers(0, 1000, length).tolist())
    for _ in range(3):
        spans = steps.step()
        assert sum(end - start for _, start, end in spans) == 256
        assert [end - start for name, start, end in spans if name.startswith("d")] == [1] * 64


def test_a_short_prompt_is_not_kept_waiting_by_long_ones():
    """However many long prompts stand before it, half of the budget goes on to the next in line."""
    steps = Steps()
    rng = np.random.default_rng(1)
    steps.add("long", rng.integers(0, 1000, 2000).tolist())
    steps.step()
    steps.add("short", rng.integers(0, 1000, 100).tolist())
    assert ("short", 0, 100) in steps.step()
    for number in range(16):  # more keep coming
        steps.add(f"l{number}", rng.integers(0, 1000, 1000).tolist())
        steps.step()
    assert "long" in steps.finished


def test_priority_goes_first_and_may_preempt():
    steps = Steps(num_pages=40)
    steps.add("late", [1] * 300, max_tokens=100, priority=1)
    steps.step()
    steps.step()
    steps.add("soon", [2] * 400, priority=0)
    assert steps.step() == [("soon", 0, 256)]
    assert steps.scheduler.preemptions == 1
    while len(steps.finished) < 2:
        steps.step()
    assert steps.finished == {"soon": 0, "late": 1}


def test_the_youngest_is_preempted_and_everybody_ends():
    steps = Steps(num_pages=12)
    for i in range(3):
        steps.add(str(i), [i] * 40, max_tokens=60)
    for _ in range(400):
        steps.step()
    assert steps.finished == {"0": 0, "1": 1, "2": 2}
    assert steps.scheduler.preemptions > 0
    assert steps.scheduler.trie.num_available == 12


def test_what_can_never_fit_is_refused_at_the_door():
    steps = Steps(num_pages=10)
    steps.add("fits", [1] * 150, max_tokens=10)
    with pytest.raises(CapacityError, match="needs 11 KV pages"):
        steps.add("not", [1] * 150, max_tokens=12)
    while steps.scheduler.running or steps.scheduler.waiting:
        steps.step()
    assert "fits" in steps.finished


def test_several_spans_of_one_request_share_a_step():
    """Chunks found in the cache tear holes into a prompt; what is left around them runs together."""
    steps = Steps()
    a, b, c = ([int(t) for t in np.random.default_rng(s).integers(0, 1000, 40)] for s in (1, 2, 3))
    steps.add("first", ([1] * 16, [b], [9]))
    steps.step()
    steps.add("second", ([1] * 16, [a, b, c], [5, 6]))
    layout, spans = steps.requests["second"].layout, None
    spans = steps.step()
    place = next(s for s in layout.segments if layout.part(s).tolist() == b)
    covered = [i for _, start, end in spans for i in range(start, end)]
    assert covered == [*range(16, place.start), *range(place.end, len(layout))]


chunks = st.lists(st.sampled_from([[1] * 5, [2] * 16, [3] * 20, [4] * 33, [1] * 20]), max_size=4)
prompts = st.tuples(st.sampled_from([[], [8] * 7, [8] * 16, [8] * 20]), chunks, st.sampled_from([[9], [9] * 16, [6] * 40]))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(prompts, st.integers(1, 40), st.integers(1, 3), st.integers(-1, 1)), min_size=1, max_size=10),
    st.sampled_from([17, 20, 40]),
    st.sampled_from([4, 30, 300]),
)
def test_everybody_ends_with_every_token_computed_once(requests, num_pages, budget):
    """Random prompts on a small pool: all end, and no token is computed twice but after a preemption."""
    steps = Steps(num_pages, max_num_batched_tokens=budget, max_num_seqs=4)
    added = 0
    for number, (parts, max_tokens, n, priority) in enumerate(requests):
        try:
            steps.add(str(number), parts if parts[1] else parts[2], max_tokens, n=n, priority=priority)
            added += 1
        except CapacityError:
            continue
    seen = 0
    for _ in range(5000):
        if not (steps.scheduler.running or steps.scheduler.waiting):
            break
        spans = steps.step()
        assert spans, "a step of nothing: nobody would ever end"
        seen += sum(end - start for _, start, end in spans)
    assert len(steps.finished) == added
    assert steps.scheduler.trie.num_available == num_pages
    if not steps.scheduler.preemptions:
        prompt = sum(int(r.computed.sum()) for r in steps.requests.values() if r.request_id in steps.finished)
        generated = sum(r.num_samples * (r.max_tokens - 1) for r in steps.requests.values() if r.request_id in steps.finished)
        assert seen == prompt + generated


@pytest.mark.parametrize("sizes", [buckets(8, 512, 2), (1, *buckets(8, 700, 2)), (64,)], ids=str)
@pytest.mark.parametrize("step_rows", [1, 32, 256])
def test_steps_are_cut_where_that_costs_least(sizes, step_rows):
    """Against the least cost of all ways to cut the tokens into buckets."""
    steps, least = StepSizes(sizes, step_rows), [0]
    for tokens in range(1, sizes[-1] + 1):
        least.append(min(size + step_rows + least[max(tokens - size, 0)] for size in sizes))
    for tokens in range(1, sizes[-1] + 1):
        cut = steps.cut(tokens)
        assert sum(cut) >= tokens
        assert sum(cut) + step_rows * len(cut) == least[tokens], tokens


@pytest.mark.parametrize(("step_rows", "decodes", "tokens"), [(1, 35, 2), (32, 63, 16), (32, 60, 20)])
def test_a_prompt_does_not_creep_beside_decodes(step_rows, decodes, tokens):
    """The decodes are computed again in every step, so the cheapest cut of prompts alone is not the cheapest."""
    steps = Steps(step_rows=step_rows, max_num_batched_tokens=128)
    for number in range(decodes):
        steps.add(str(number), [number + 1] * 3, max_tokens=60)
    steps.step()
    while not all(sample.output_ids for request in steps.scheduler.running for sample in request.samples):
        steps.step()
    steps.add("late", [99] * tokens)
    assert ("late", 0, tokens) in steps.step()


def test_steps_that_text_waits_for_are_short():
    """As short as asked for, to a bucket; the least there is where nothing is short enough; full where nobody waits."""
    steps = Steps(max_num_batched_tokens=2048)
    steps.beside_decodes = lambda: 1

    def rows():
        return sum(end - start for _, start, end in steps.step())

    steps.add("alone", [1] * 2048)
    assert rows() == 2048
    steps.add("text", [1] * 20, max_tokens=8)
    steps.step()
    steps.add("long", [2] * 4000)
    for allowed, wanted in ((0, 128), (-5, 128), (300, 256), (600, 512), (10**6, 2048)):
        steps.beside_decodes = lambda allowed=allowed: allowed
        assert rows() == wanted
