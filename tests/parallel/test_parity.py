"""Answers of several devices against those of one."""

import pytest

from chunkattn.engine.runner import Runner
from chunkattn.models.packing import forms_of
from tests.checkpoints import DIVISIBLE
from tests.parallel.answers import ALGORITHMS, DRAWN, GREEDY, Answers

SIZES = (2, 4, 8)
"""Numbers of devices. Most checkpoints have two KV heads, so that groups of two and four devices share one."""
IN_CI = [
    ("llama", "xla", 2),
    ("llama-bias", "cpu", 8),
    ("mistral", "cpu", 2),
    ("mistral-window", "xla", 4),
    ("qwen2", "xla", 8),
    ("qwen2-window", "cpu", 8),
    ("qwen3", "cpu", 8),
    ("qwen2-moe", "xla", 4),
    ("qwen3-moe", "cpu", 2),
]
"""Every family, kind of bias and kind of window, over both backends and all numbers of devices."""
OTHERS = [
    (name, backend, size)
    for name in DIVISIBLE
    for backend in ("cpu", "xla")
    for size in SIZES
    if (name, backend, size) not in IN_CI
]


_KNOWN = {}
"""Answers of one device, by checkpoint, backend and options."""


@pytest.fixture
def expected(wide, start):
    """The answers of one device, by checkpoint, backend and options."""

    def get(name, backend, changes=(), **options):
        key = (name, backend, changes, *options.items())
        if key not in _KNOWN:
            _KNOWN[key] = Answers(start(wide(name, **dict(changes)), attention_backend=backend, **options))
        return _KNOWN[key]

    return get


@pytest.mark.parametrize(
    ("name", "backend", "size"),
    [
        *(pytest.param(*case, marks=pytest.mark.ci) for case in IN_CI),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS),
    ],
)
def test_answers_are_those_of_one_device(wide, start, expected, name, backend, size):
    llm = start(wide(name), size, attention_backend=backend)
    assert llm.core.runner.backend.spec.num_heads == 8 // size
    Answers(llm).check(expected(name, backend))


@pytest.mark.parametrize(
    ("size", "tolerance", "options"),
    [
        pytest.param(2, 1e-4, {"chunk_temperature": 0.8, "chunk_scale": 0.9, "chunk_position_gap": 5}, marks=pytest.mark.ci),
        # A sum in another order may round a value of the cache to its neighbour.
        pytest.param(4, 0.05, {"kv_cache_dtype": "fp8"}, marks=pytest.mark.ci),
        pytest.param(4, 1e-4, {"position_strategy": "offset"}, marks=pytest.mark.slow),
        pytest.param(2, 0.1, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param(8, 0.02, {"dtype": "float16"}, marks=pytest.mark.slow),
    ],
)
def test_options(wide, start, expected, size, tolerance, options):
    Answers(start(wide("qwen3"), size, attention_backend="cpu", **options)).check(
        expected("qwen3", "cpu", **options), tolerance
    )


@pytest.mark.ci
def test_one_array_of_the_host(wide, start, expected, monkeypatch):
    """Every device holds the whole array, as it holds each of the arrays in it."""
    monkeypatch.setattr(Runner, "_packs", lambda *_: True)
    llm = start(wide("qwen3"), 2, attention_backend="cpu")
    Answers(llm).check(expected("qwen3", "cpu"))


@pytest.mark.ci
@pytest.mark.parametrize("size", [2, 4])
def test_packed_weights(wide, start, expected, size):
    """The sums of the devices are rounded before the next product makes integers of them."""
    changes, options = (("intermediate_size", 256),), {"quantization": "int8"}
    llm = start(wide("qwen3", **dict(changes)), size, attention_backend="cpu", **options)
    names = [name for name, *_ in forms_of(dict(zip(llm.core.runner._names, llm.core.runner._params, strict=True)))]
    assert len(names) == 1 + 3 * 7
    Answers(llm).check(expected("qwen3", "cpu", changes, **options), 5e-3)


@pytest.mark.ci
def test_every_algorithm_and_drawn_tokens(wide, start):
    engines = [start(wide("qwen3"), size, attention_backend="cpu") for size in (1, 2)]
    one, two = (Answers(llm, ALGORITHMS, (GREEDY, DRAWN)) for llm in engines)
    two.check(one)


@pytest.mark.ci
def test_a_vocabulary_that_the_devices_do_not_divide(wide, start, expected):
    changes = (("vocab_size", 131), ("tie_word_embeddings", False))
    llm = start(wide("llama", **dict(changes)), 8, attention_backend="xla")
    Answers(llm).check(expected("llama", "xla", changes))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_interpreted_tpu_kernel(wide, start, expected):
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "max_model_len": 128}
    changes = (("head_dim", 64), ("num_attention_heads", 4))
    folder = wide("qwen3-64", **dict(changes))
    interpreted = Answers(start(folder, 2, attention_backend="pallas_tpu", **options))
    interpreted.check(Answers(start(folder, attention_backend="xla", **options)))
