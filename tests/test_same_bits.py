"""The bits of a result depend on its request alone: equal requests in random company, order, steps and cache states."""

import copy
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.backends import registry
from chunkattn.backends.cpu import backend as cpu_backend
from chunkattn.engine import intake, sampling
from chunkattn.models import linear, norm
from tests.checkpoints import CHECKPOINTS, VOCAB, make_checkpoint
from tests.tiled_backend import Tiled

DTYPES = ("float32", "bfloat16", "float16")
ALGORITHMS = ("serial", "packed_segment", "prefill_extend")
LABELS = [5, 9, 11]
LONG = 600
"""Tokens of the query, more than two tiles of attention."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of Qwen3's shape with positions enough for a long query, and products as deep as those of real models."""
    config = copy.deepcopy(CHECKPOINTS["qwen3-64"])
    config.max_position_embeddings, config.intermediate_size = 8192, 2176
    return make_checkpoint(config, tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="module")
def engines(folder):
    """An engine by its options."""
    made = {}

    def get(dtype="float32", **options) -> LLM:
        key = (dtype, *options.items())
        if key not in made:
            defaults = {"max_num_batched_tokens": 512, "max_num_seqs": 8, "skip_tokenizer_init": True, "max_logprobs": 4}
            made[key] = LLM(str(folder), dtype=dtype, kv_cache_memory_bytes=8 << 20, **(defaults | options))
        return made[key]

    yield get
    for llm in made.values():
        llm.core.scheduler.check()
        assert llm.reset_prefix_cache(), "pages leaked"


def draw(rng, most, least=1):
    return rng.integers(2, VOCAB, int(rng.integers(least, most + 1))).tolist()


class Party:
    """A fixed set of items and prompts, asked alone and beside random others."""

    def __init__(self, llm, seed, query_tokens=LONG):
        self.llm, self.rng = llm, np.random.default_rng(seed)
        fixed = np.random.default_rng(99)
        self.query = draw(fixed, query_tokens, query_tokens)
        self.items = [draw(fixed, n, n) for n in (1, 23, 150)] + [[]]
        chunks = [draw(fixed, n, n) for n in (270, 9, 70)]
        self.prompts = [
            {"prompt_token_ids": draw(fixed, 300, 300)},
            ChunkedPrompt(draw(fixed, 40, 40), chunks, draw(fixed, 25, 25)),
            ChunkedPrompt([], chunks[1:], draw(fixed, 300, 300)),
        ]
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
        self.sampling = [
            greedy,
            SamplingParams(seed=7, temperature=1.3, top_p=0.9, max_tokens=6, ignore_eos=True, logprobs=2),
            SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1, repetition_penalty=1.2, logprobs=0),
        ]

    def scores(self, algorithm, company=0, longest=60):
        """The bits of the items' log-probabilities among `company` others in random order."""
        others = [draw(self.rng, longest) for _ in range(company)]
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

    def preempting(self):
        """A step of the engine, before which a request may lose its pages."""
        core = self.llm.core
        if core.scheduler.running and self.rng.random() < 0.2:
            core.scheduler.preempt(core.scheduler.running[int(self.rng.integers(len(core.scheduler.running)))])
        return type(core).step(core)

    def answers(self, company=0):
        """The bits of every answer to the prompts, among `company` other prompts."""
        mine = [(p, s) for p in self.prompts for s in self.sampling]
        others = [({"prompt_token_ids": draw(self.rng, 200)}, self.sampling[int(self.rng.integers(2))]) for _ in range(company)]
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


BY_DTYPE = pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(d, marks=pytest.mark.telling) for d in ("float32", "float16"))]
)


@BY_DTYPE
def test_scores_in_company(engines, dtype):
    party = Party(engines(dtype), 1)
    party.llm.reset_prefix_cache()
    alone = party.scores("serial")
    for company, tokens in ((0, 512), (1, 97), (7, 512), (40, 512)):
        for algorithm in ALGORITHMS:
            others = min(company, 4) if algorithm == "serial" else company
            with steps_of(party.llm, tokens):
                assert party.scores(algorithm, others) == alone, (algorithm, company)
            assert party.scores(algorithm) == alone  # warm, where the algorithm caches the query


@BY_DTYPE
def test_answers_in_company(engines, dtype, tmp_path_factory):
    """Cold, warm, restored from disk and preempted, in other steps and beside other prompts."""
    party = Party(engines(dtype, kv_store=str(tmp_path_factory.mktemp(dtype))), 2)
    core = party.llm.core
    alone = [party.answer(prompt, params) for prompt in party.prompts for params in party.sampling]
    for company, tokens, preempts in ((0, 512, False), (5, 512, True), (3, 61, False), (0, 13, False)):
        for reset in (True, False):
            if reset:
                party.llm.reset_prefix_cache()
            with steps_of(party.llm, tokens), patch.object(core, "step", party.preempting if preempts else core.step):
                assert party.answers(company) == alone, (company, tokens, reset)
    assert core.scheduler.preemptions
    assert core.disk.counts["hit"]


@pytest.mark.telling
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_random_companies(engines, dtype, kv_cache_dtype):
    party = Party(engines(dtype, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=2048), 3, query_tokens=2500)
    alone, answers = party.scores("serial"), [party.answer(p, s) for p in party.prompts for s in party.sampling]
    for company in (1, 7, 50, 500):
        for algorithm in ALGORITHMS:
            with steps_of(party.llm, int(party.rng.integers(70, 2048))):
                assert party.scores(algorithm, min(company, 20) if algorithm == "serial" else company, longest=200) == alone
        with patch.object(party.llm.core, "step", party.preempting):
            assert party.answers(min(company, 30)) == answers


def _contiguous():
    """A prompt of a query and an item is summed as one piece."""
    original = intake.plan_slots
    return patch.object(intake, "plan_slots", lambda *args, apart, **options: original(*args, **options))


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
        metadata = original(self, batch)
        inner = metadata.row_start > metadata.prefix_end[metadata.row_seq]
        moved = np.maximum(metadata.row_start - inner * 8, 0).astype(np.int32)
        return metadata._replace(row_start=np.where(inner, moved, metadata.row_start))

    return patch.object(cpu_backend.CpuBackend, "build_metadata", build)


def _step_size():
    """Norms add up a row as XLA does, in an order that follows the rows of the step."""
    return patch.object(norm, "sums", lambda x: x.sum(-1, keepdims=True))


def _block():
    """Log-probabilities are normalised in an order that follows the number of rows that are read."""
    return patch.object(sampling, "sums", lambda x: x[:, ::-1].sum(-1, keepdims=True) if len(x) > 16 else linear.sums(x))


@pytest.mark.telling
@pytest.mark.parametrize("plant", [_contiguous, _single_row, _absolute, _step_size, _block])
def test_planted_faults_are_found(folder, plant):
    with plant():
        llm = LLM(
            str(folder), max_num_batched_tokens=512, max_num_seqs=8, skip_tokenizer_init=True, kv_cache_memory_bytes=8 << 20
        )
        party = Party(llm, 1)
        alone, answers = party.scores("serial"), [party.answer(p, s) for p in party.prompts for s in party.sampling]
        bits = [party.scores(algorithm, company) for algorithm in ALGORITHMS[1:] for company in (0, 7, 40)]
        with steps_of(llm, 13):  # fewer rows are read at a time
            assert any(found != alone for found in bits) or party.answers() != answers
