"""Logit processing against transformers' processors, and detokenization against whole decodes."""

import itertools
import random

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from chunkattn import SamplingParams, make_layout
from chunkattn.calls.detokenizer import Detokenizer
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import GenerateRequest, StepRates
from chunkattn.engine.request import Request, Sample
from chunkattn.engine.sample_inputs import edit_input
from chunkattn.engine.sampling import apply_edits, argmax, truncate
from chunkattn.engine.step_sizes import StepSizes
from chunkattn.models.loader import DEMO_FOLDER

V = 300


@pytest.fixture(scope="module")
def logits():
    return np.random.default_rng(0).standard_normal((6, V)).astype(np.float32) * 4


@pytest.mark.parametrize("top_k", [1, 2, 17, 299, 300])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.93, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.5, 1.0])
def test_truncation(logits, top_k, top_p, min_p):
    rows = len(logits)
    mine = truncate(
        jnp.asarray(logits),
        jnp.full(rows, top_k),
        jnp.full(rows, top_p, jnp.float32),
        jnp.full(rows, min_p, jnp.float32),
    )
    theirs = torch.as_tensor(logits)
    for warper in (MinPLogitsWarper(min_p), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p) if top_p < 1 else None):
        theirs = warper(None, theirs) if warper else theirs
    np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(theirs.numpy()))
    np.testing.assert_array_equal(np.asarray(mine)[np.isfinite(mine)], logits[np.isfinite(mine)])


def rows_for(params, prompt, output):
    limits = EngineLimits(1000, 16, 1, 4000, 20, V, StepRates(0, 0, 0), StepSizes((8,), 256))
    request = Request(GenerateRequest("r", make_layout([], [], prompt), params, (2,)), limits, arrival=0)
    return [(0, Sample(request, 0, output_ids=output), 0)]


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, V - 1), min_size=1, max_size=20),
    st.lists(st.integers(0, V - 1), max_size=20),
    st.floats(0.5, 2.0),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100), max_size=5),
    st.integers(0, 30),
)
def test_penalties_bias_and_bans(prompt, output, repetition, presence, frequency, bias, min_tokens):
    logits = np.random.default_rng(1).standard_normal((1, V)).astype(np.float32) * 3
    params = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        min_tokens=min_tokens,
        stop_token_ids=[7],
        max_tokens=None,
    )
    edits = edit_input(rows_for(params, prompt, output), 8, V)
    mine = logits
    if edits is not None:
        mine = np.asarray(apply_edits(jnp.asarray(np.repeat(logits, 8, 0)), edits))
        np.testing.assert_array_equal(mine[1:], np.repeat(logits, 7, 0))
    expected = logits.copy()
    for token, value in bias.items():
        expected[0, token] += np.float32(value)
    if len(output) < min_tokens:
        expected[0, [2, 7]] = -np.inf
    processor = RepetitionPenaltyLogitsProcessor(penalty=repetition)
    expected = processor(torch.as_tensor([prompt + output]), torch.as_tensor(expected)).numpy()
    counts = np.bincount(output, minlength=V)
    expected[0] -= frequency * counts + presence * (counts > 0)
    np.testing.assert_allclose(mine[0], expected[0], rtol=1e-5, atol=1e-4)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_FOLDER)


TEXTS = ["Bukepi likes onions.", "naïve café, 東京 🦙🦙 done", "", " leading", "x\n\ny  z"]


@pytest.mark.parametrize("size", [1, 7, 64, 300, 1187, 4096])
def test_argmax_is_the_first_maximum(size):
    """NumPy's argmax, for sizes that have blocks and for sizes that have none; small integers make ties."""
    rng = np.random.default_rng(size)
    for values in (rng.integers(0, 5, (9, size)).astype(np.float32), rng.standard_normal((9, size), np.float32)):
        values[2] = -np.inf
        np.testing.assert_array_equal(argmax(jnp.asarray(values)), values.argmax(-1))


@pytest.mark.parametrize("text", TEXTS)
def test_detokenizer_never_splits_a_character(text, tokenizer):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    prompt = tokenizer("Where? Answer:", add_special_tokens=False).input_ids
    detokenizer = Detokenizer(tokenizer, prompt)
    seen = []
    for i, token in enumerate(ids):
        detokenizer.add([token], last=i == len(ids) - 1)
        assert "\ufffd" not in detokenizer.text
        assert not seen or detokenizer.text.startswith(seen[-1])
        seen.append(detokenizer.text)
    whole = tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]
    assert detokenizer.text == whole


def test_text_may_be_asked_for_now_and_then(tokenizer):
    rng = random.Random(0)
    for _ in range(50):
        text = "".join(rng.choices(["東", "🦙", "é", "lives", " in ", "a", "\n", " "], k=rng.randint(1, 40)))
        ids = tokenizer(text, add_special_tokens=False).input_ids
        detokenizer, seen = Detokenizer(tokenizer, []), [""]
        for i, token in enumerate(ids):
            detokenizer.add([token], last=i == len(ids) - 1)
            if rng.random() < 0.3:
                seen.append(detokenizer.text)
        assert detokenizer.text == tokenizer.decode(ids)
        for before, now in itertools.pairwise([*seen, detokenizer.text]):
            assert now.startswith(before)
            assert "\ufffd" not in now


def head(tokenizer, ids):
    """The text that byte fallback tokens make, up to the first byte that is no part of a character."""
    raw = b""
    for piece in tokenizer.convert_ids_to_tokens(ids):
        raw += bytes([int(piece[3:-1], 16)]) if piece.startswith("<0x") else piece.replace("▁", " ").encode()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        return raw[: error.start].decode()


@settings(max_examples=200)
@given(data=st.data())
def test_however_often_text_is_asked_for_it_is_the_same(tokenizer, data):
    """And characters before bytes that are none are there, whether cut off or astray."""
    pieces = data.draw(st.lists(st.sampled_from(["🦙", "東", "é", "🦙" * 30, " lives", "a", 0xF0, 0x9F, 0xFF]), max_size=12))
    ids = tokenizer("a", add_special_tokens=False).input_ids
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(tokenizer.convert_tokens_to_ids(f"<0x{piece:02X}>"))
        else:
            ids += tokenizer(piece, add_special_tokens=False).input_ids
    ids = ids[: data.draw(st.integers(1, len(ids)))]
    texts, rng = [], random.Random(data.draw(st.integers(0, 9)))
    for often in (0, 0.3, 1):
        detokenizer, seen = Detokenizer(tokenizer, []), ""
        end = 0
        while end < len(ids):
            begin, end = end, min(end + rng.randint(1, 3), len(ids))
            detokenizer.add(ids[begin:end], last=end == len(ids))
            if rng.random() < often:
                assert detokenizer.text.startswith(seen)
                seen = detokenizer.text
        texts.append(detokenizer.text)
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].startswith(head(tokenizer, ids).removeprefix(" "))


@pytest.mark.parametrize("read", [False, True])
def test_a_byte_astray_harms_nobody(tokenizer, read):
    ids = tokenizer("🦙東", add_special_tokens=False).input_ids
    ids += [tokenizer.convert_tokens_to_ids("<0xFF>"), *tokenizer(" lives", add_special_tokens=False).input_ids]
    detokenizer = Detokenizer(tokenizer, [])
    for token in ids:
        detokenizer.add([token])
        assert not read or "\ufffd" not in detokenizer.text[:2]
    assert detokenizer.text == "🦙東\ufffd lives"


def test_bytes_that_are_no_character_are_not_held_back_for_ever(tokenizer):
    byte = tokenizer("東", add_special_tokens=False).input_ids[1]
    assert tokenizer.decode([byte]) == "\ufffd"
    detokenizer = Detokenizer(tokenizer, [])
    for count in range(1, 40):
        detokenizer.add([byte])
        assert len(detokenizer.text) > count - 16
    detokenizer.flush()
    assert detokenizer.text == tokenizer.decode([byte] * 39)


def test_unfinished_bytes_appear_at_the_end_only(tokenizer):
    ids = tokenizer("a東", add_special_tokens=False).input_ids[:-1]
    detokenizer = Detokenizer(tokenizer, [])
    for token in ids[:-1]:
        detokenizer.add([token])
    assert "\ufffd" not in detokenizer.text
    detokenizer.add(ids[-1:], last=True)
    assert detokenizer.text.endswith("\ufffd")


def test_held_back_bytes_are_flushed_when_the_text_ends(tokenizer):
    *ids, _ = tokenizer("a東", add_special_tokens=False).input_ids
    detokenizer = Detokenizer(tokenizer, [])
    for token in ids:
        detokenizer.add([token])
    held = detokenizer.text
    detokenizer.flush()
    assert detokenizer.text.startswith(held)
    assert detokenizer.text == tokenizer.decode(ids)


def test_a_stop_string_may_turn_up_when_the_text_ends(tokenizer):
    *ids, _ = tokenizer("STOP東", add_special_tokens=False).input_ids
    detokenizer = Detokenizer(tokenizer, [], stop=("\ufffd",))
    assert not any(detokenizer.add([token]) for token in ids)
    assert detokenizer.flush()
    assert detokenizer.text == "STOP"


def test_a_prompt_that_ends_within_a_character(tokenizer):
    ids = tokenizer("a東b", add_special_tokens=False).input_ids
    cut = ids[:3]
    assert tokenizer.decode(cut).endswith("\ufffd")
    detokenizer = Detokenizer(tokenizer, cut)
    for i, token in enumerate(ids[3:]):
        detokenizer.add([token], last=i == len(ids) - 4)
    assert detokenizer.text == tokenizer.decode(ids[3:])


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_across_tokens(include, tokenizer):
    ids = tokenizer("Meru lives in Melubo. Meru is a doctor.", add_special_tokens=False).input_ids
    detokenizer = Detokenizer(tokenizer, [], stop=("nowhere", "ubo. Me", "doctor"), include_stop=include)
    stopped = [detokenizer.add([t]) for t in ids]
    first = stopped.index(True)
    again = Detokenizer(tokenizer, [], stop=("nowhere", "ubo. Me", "doctor"), include_stop=include)
    for token in ids[: first + 1]:
        again.add([token])
    assert again.text == "Meru lives in Mel" + "ubo. Me" * include
    assert again.stopped_by == "ubo. Me"
