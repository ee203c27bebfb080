"""A step's arrays as one array: the same values, bits and programs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkattn import ChunkedPrompt, LoRARequest, SamplingParams
from chunkattn.engine.runner import Runner
from chunkattn.engine.upload import pack, unpack
from tests.adapter_files import make_adapter
from tests.checkpoints import VOCAB

DTYPES = ("int32", "uint32", "float32", "bool", "int8", "uint8", "int16", "uint16", "float16", ml_dtypes.bfloat16)
GREEDY = SamplingParams(temperature=0, max_tokens=5, logprobs=4)

bits = st.integers(0, 2**64 - 1)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def leaves(draw):
    """An array of random bits."""
    dtype, shape, rng = np.dtype(draw(st.sampled_from(DTYPES))), draw(shapes), np.random.default_rng(draw(bits))
    values = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return values[..., 0] > 127 if dtype.kind == "b" else values.view(dtype).reshape(shape)


trees = st.recursive(
    leaves() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=12,
)


@given(trees.filter(jax.tree.leaves))
def test_a_tree_comes_back(tree):
    packed, form = pack(tree)
    assert (packed.dtype, packed.ndim) == (np.int32, 1)
    found = jax.jit(unpack, static_argnums=1)(packed, form)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for got, wanted in zip(map(np.asarray, jax.tree.leaves(found)), jax.tree.leaves(tree), strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        if wanted.dtype.itemsize == 4:
            assert got.tobytes() == wanted.tobytes()
        else:  # a NaN that is widened may change its bits
            np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32))


def test_numbers_and_64_bits_become_what_jax_makes_of_them():
    tree = (np.int32(7), np.float32(0.5), True, 3, 2.5, np.arange(3), np.arange(3.0), np.arange(6, dtype=np.int32)[::2])
    packed, form = pack(tree)
    for got, wanted in zip(unpack(packed, form), tree, strict=True):
        wanted = jnp.asarray(wanted)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(got, wanted)


def test_the_array_is_a_copy():
    """A device may still read the array of one step while the host builds the next."""
    value = np.arange(4, dtype=np.int32)
    packed, _ = pack([value])
    value[:] = -1
    assert packed[:4].tolist() == [0, 1, 2, 3]


def test_forms_are_equal_where_programs_are():
    one, two, wider, other = (
        pack(tree)[1] for tree in ([np.zeros(3, np.int32)], [np.ones(3, np.int32)], [np.zeros(4, np.int32)], [np.ones(3, bool)])
    )
    assert one is two
    assert len({one, two, wider, other}) == 3


@pytest.mark.parametrize("dtype", [np.complex64, "datetime64[s]", object])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError):
        pack([np.zeros(2, dtype)])


@given(trees.filter(jax.tree.leaves))
def test_leaves_are_aligned(tree):
    """Every leaf begins at a multiple of 256 bytes, and a zero comes last."""
    packed, _ = pack(jax.tree.map(lambda x: np.ones(x.shape, np.int32), tree))
    sizes = [leaf.size for leaf in jax.tree.leaves(tree)]
    places = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])
    ones = [np.arange(place, place + size) for place, size in zip(places, sizes, strict=False)]
    np.testing.assert_array_equal(np.flatnonzero(packed), np.concatenate(ones))
    assert packed[-1] == 0


# Steps


def answers(llm, **options):
    """Answers to plain and chunked prompts, and scores, with the bits of all log-probabilities."""
    rng = np.random.default_rng(3)
    prefix, one, two, question = (rng.integers(0, VOCAB, n).tolist() for n in (20, 37, 18, 9))
    llm.reset_prefix_cache()
    chunks = [one] if llm.core.runner.states else [one, two]
    prompts = [ChunkedPrompt(prefix, chunks, question), {"prompt_token_ids": one + two}]
    outs = [sample for out in llm.generate(prompts, GREEDY, use_tqdm=False, **options) for sample in out.outputs]
    values = [[np.float32(at[token].logprob) for token in sorted(at)] for out in outs for at in out.logprobs]
    scores = llm.score(prefix, [one, two], label_token_ids=[3, 5]).scores
    return [out.token_ids for out in outs], np.concatenate([*values, *scores]).tobytes()


CASES = [
    pytest.param("qwen3", {"attention_backend": "cpu"}, marks=pytest.mark.ci),
    ("qwen3", {"attention_backend": "xla", "chunk_temperature": 0.7, "chunk_scale": 0.9}),
    pytest.param("mistral-window", {"attention_backend": "xla"}, marks=pytest.mark.ci),
    pytest.param("qwen3_5", {}, marks=pytest.mark.ci),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_step_has_the_same_bits(engine, monkeypatch, name, options):
    llm = engine(name, **options)
    apart, runner = answers(llm), llm.core.runner
    before = runner.compiles["step"]
    monkeypatch.setattr(Runner, "_packs", lambda *_: True)
    assert answers(llm) == apart
    assert runner.compiles["step"] > before


def test_adapters_of_rows_travel_too(engine, checkpoint, oracle, monkeypatch, tmp_path):
    make_adapter(tmp_path, oracle("qwen3").model, seed=1)
    llm = engine("qwen3", lora_modules=(f"a={tmp_path}",))
    asked = {"lora_request": LoRARequest("a", 1)}
    (plain, _), apart = answers(llm), answers(llm, **asked)
    monkeypatch.setattr(Runner, "_packs", lambda *_: True)
    assert answers(llm, **asked) == apart
    assert plain != apart[0]


def step_arrays(llm):
    """Leaves of the arguments of a step's program beside parameters and caches."""
    _, caches, _, *inputs = llm.core.runner.lower(llm.core.builder.empty(8, llm.core.builder.width_buckets[0]), 16).args_info[0]
    assert len(jax.tree.leaves(caches)) == len(jax.tree.leaves(llm.core.runner.caches))
    return jax.tree.leaves(inputs)


@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3_5", marks=pytest.mark.ci)])
def test_a_step_takes_one_array_of_the_host(engine, monkeypatch, name):
    llm = engine(name, attention_backend="xla")
    *inputs, _ = llm.core.builder.empty(8, llm.core.builder.width_buckets[0])
    assert len(step_arrays(llm)) == len(jax.tree.leaves(inputs)) >= 12
    monkeypatch.setattr(Runner, "_packs", lambda *_: True)
    (array,) = step_arrays(llm)
    sizes = [np.size(leaf) for leaf in jax.tree.leaves(inputs)]
    assert array.dtype == np.int32
    assert sum(sizes) < np.prod(array.shape) <= sum(sizes) + 64 * len(sizes)


@pytest.mark.parametrize(("platform", "packs"), [("cpu", False), ("gpu", True), ("tpu", True)])
def test_devices_with_a_memory_of_their_own_get_one_array(engine, platform, packs):
    runner = engine("qwen3", attention_backend="xla").core.runner
    assert runner._packs(SimpleNamespace(device_set=[SimpleNamespace(platform=platform)])) == packs
    assert not runner._packs(None)
