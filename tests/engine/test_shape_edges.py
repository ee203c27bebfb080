"""Shaped texts at their edges: ends, biases, vocabularies that lack characters, errors and interrupts."""

import logging
from contextlib import contextmanager
from itertools import count
from unittest.mock import patch

import numpy as np
import pytest

from chunkattn import SamplingParams, StructuredOutputsParams
from chunkattn.engine import masks, readout
from chunkattn.engine.grammars import Grammars, TextMatcher
from chunkattn.engine.messages import GenerateRequest, RequestFailed, TokenOutput
from chunkattn.engine.vocabulary import Vocabulary
from chunkattn.rope.positions import make_layout
from tests.checkpoints import VOCAB
from tests.shaped_texts import CHARACTERS, END, SHAPES, check, shaped, teach, text_of

PROMPT = {"prompt_token_ids": [*range(40, 70)]}
WITHOUT_Z = Vocabulary(tuple(b"" if text == b"z" else text for text in CHARACTERS.tokens), (END, ord("z")))
LONG = StructuredOutputsParams(regex="([a-z]{3} ){12}")


@pytest.fixture
def llm(engine, monkeypatch):
    made = teach(engine("qwen3"), monkeypatch)
    made.reset_prefix_cache()
    return made


@pytest.fixture
def quiet():
    """Without the engine's log of the injected failures."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def write(llm, regex, **options):
    shape = StructuredOutputsParams(regex=regex)
    options = {"max_tokens": 30, "seed": 3, **options}
    return llm.generate(PROMPT, SamplingParams(structured_outputs=shape, **options), use_tqdm=False)[0].outputs


def test_a_mask_bounds_what_biases_and_penalties_choose(llm):
    allowed = [*b"abcd"]
    bias = dict.fromkeys(allowed, -100.0) | dict.fromkeys((END, 10, 11), 100.0)
    options = {"logit_bias": bias, "presence_penalty": 1.1, "frequency_penalty": 0.7, "logprobs": VOCAB}
    (greedy,) = write(llm, "[a-d]{12}", temperature=0, **options)
    assert (len(greedy.token_ids), greedy.finish_reason, greedy.stop_reason) == (12, "stop", None)
    counts = np.zeros(VOCAB)
    for token, row in zip(greedy.token_ids, greedy.logprobs, strict=True):
        assert np.isclose(np.exp([entry.logprob for entry in row.values()]).sum(), 1, atol=1e-5)  # of the whole vocabulary
        value = np.array([row[t].logprob + bias.get(t, 0) - 0.7 * counts[t] - 1.1 * (counts[t] > 0) for t in range(VOCAB)])
        assert token == max(allowed, key=value.__getitem__)
        counts[token] += 1
    assert len({*greedy.token_ids}) > 1
    for limit in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):  # of the allowed tokens
        assert write(llm, "[a-d]{12}", temperature=0.8, **options, **limit)[0].token_ids == greedy.token_ids


def test_log_probabilities_are_those_without_a_shape(llm):
    read = {"temperature": 0, "logprobs": VOCAB, "prompt_logprobs": 3, "max_tokens": 1}
    free, bound = (
        llm.generate(PROMPT, SamplingParams(structured_outputs=shape, **read), use_tqdm=False)[0]
        for shape in (None, StructuredOutputsParams(regex="[QX]+"))
    )
    assert free.prompt_logprobs == bound.prompt_logprobs
    assert free.outputs[0].token_ids != bound.outputs[0].token_ids
    rows = [{token: entry.logprob for token, entry in own.outputs[0].logprobs[0].items()} for own in (free, bound)]
    assert rows[0] == rows[1]


def test_a_vocabulary_without_a_character(llm, monkeypatch):
    monkeypatch.setattr(llm.core.shapes, "grammars", Grammars(WITHOUT_Z))
    for options in ({}, {"ignore_eos": True}, {"min_tokens": 9}):
        (sample,) = write(llm, "ab(zz)?", **options)  # no token ends a text of this model
        assert (text_of(sample), sample.finish_reason, sample.stop_reason) == ("ab", "stop", None)
        (sample,) = write(llm, "ab(zz)?", stop_token_ids=[END], **options)
        assert (text_of(sample), sample.finish_reason, sample.stop_reason) == ("ab", "stop", END)
    (sample,) = write(llm, "z?", stop_token_ids=[END])
    assert text_of(sample) == ""
    for regex in ("abz", "(z)?", "ab{2}z"):
        with pytest.raises(ValueError, match="no token may follow the text, and no token may end it") as refusal:
            write(llm, regex, n=2)
        assert refusal.value.param == "structured_outputs"
    assert not llm.core.requests


def test_ends_of_a_checkpoint(llm, monkeypatch):
    """Ids that the model does not have end nothing, and an end that is a letter, too, never stands inside a text."""
    monkeypatch.setattr(llm.frontend, "eos_token_ids", (END, 5000, -1))
    for options in ({}, {"min_tokens": 5}):
        (sample,) = write(llm, "abc?d*", logit_bias={END: 100.0}, **options)
        text = bytes(sample.token_ids[:-1]).decode()
        assert (sample.token_ids[-1], sample.finish_reason, len(text)) == (END, "stop", options.get("min_tokens", 2))
    monkeypatch.setattr(llm.frontend, "eos_token_ids", (ord("b"),))
    (sample,) = write(llm, "a[bd]c?", logit_bias={ord("b"): 100.0})
    assert (bytes(sample.token_ids), sample.finish_reason) == (b"adb", "stop")
    (sample,) = write(llm, "a[bd]c", logit_bias={ord("b"): 100.0}, ignore_eos=True)
    assert (bytes(sample.token_ids), sample.finish_reason) == (b"abc", "stop")
    with pytest.raises(ValueError, match="no token may follow the text"):
        write(llm, "abc")
    # A stop token cuts the text.
    (sample,) = write(llm, "xyz", stop_token_ids=[ord("y")])
    assert (bytes(sample.token_ids), sample.finish_reason, sample.stop_reason) == (b"xy", "stop", ord("y"))


def test_special_tokens_stand_in_no_text(llm, monkeypatch):
    """A grammar that names a special token has it written; nothing else has."""
    for shape in (StructuredOutputsParams(regex="(?s).{40}"), StructuredOutputsParams(grammar="start: /(?s:.){40}/")):
        params = SamplingParams(structured_outputs=shape, max_tokens=60, seed=2, logit_bias={END: 100.0})
        (sample,) = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs
        assert (len(sample.token_ids), sample.finish_reason) == (40, "stop")
        assert END not in sample.token_ids
    named = StructuredOutputsParams(grammar=f'start: "ab" <[{END}]> "c"')
    for stops, expected in (([], [*b"ab", END, *b"c"]), ([END], [*b"ab", END])):
        params = SamplingParams(structured_outputs=named, max_tokens=9, stop_token_ids=stops)
        assert llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids == expected
    monkeypatch.setattr(llm.frontend, "eos_token_ids", (END,))
    (sample,) = llm.generate(PROMPT, SamplingParams(structured_outputs=named), use_tqdm=False)[0].outputs
    assert (sample.token_ids, sample.finish_reason) == ([*b"ab", END], "stop")


def test_samples_that_end_early_and_late(llm):
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(choice=["a", "bcdefghijkl"]),
        n=6,
        seed=1,
        max_tokens=30,
        stop_token_ids=[END],
    )
    samples = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs
    assert {text_of(sample) for sample in samples} == {"a", "bcdefghijkl"}
    assert {sample.finish_reason for sample in samples} == {"stop"}


def test_a_text_that_is_cut_is_the_beginning_of_one(llm):
    for name in SHAPES:
        (whole,), (cut,) = (llm.generate(PROMPT, shaped(name, max_tokens=most), use_tqdm=False)[0].outputs for most in (120, 5))
        assert check(name, [whole]) == 1
        assert (cut.finish_reason, cut.token_ids) == ("length", whole.token_ids[:5])
        (exact,) = llm.generate(PROMPT, shaped(name, max_tokens=len(whole.token_ids)), use_tqdm=False)[0].outputs
        assert (exact.token_ids, exact.finish_reason) == (whole.token_ids, "stop")


def request(llm, name, shape=LONG, **options):
    params = SamplingParams(structured_outputs=shape, **{"max_tokens": 60, "seed": len(name), **options})
    if shape is not None:
        llm.core.shapes.grammars.compile(shape)
    return GenerateRequest(name, make_layout([], [], PROMPT["prompt_token_ids"][: 10 + len(name)]), params)


def run(llm, *requests):
    """Return the tokens of each sample, and the requests that failed. Nothing may be left."""
    core = llm.core
    for one in requests:
        core.add(one)
    tokens, failed = {}, {}
    while core.has_work:
        try:
            outputs = core.step()
        except KeyboardInterrupt:
            continue
        for output in outputs:
            if isinstance(output, RequestFailed):
                failed[output.request_id] = output.reason
            elif isinstance(output, TokenOutput):
                tokens.setdefault((output.request_id, output.sample), []).extend(output.token_ids)
    assert not core.requests
    assert not core.shapes.waiting
    core.scheduler.check()
    assert core.scheduler.trie.num_available == core.limits.num_pages
    return tokens, failed


ASKED = [("a", {"n": 3}), ("bb", {}), ("free", {"shape": None, "ignore_eos": True})]


def requests(llm):
    return [request(llm, name, **options) for name, options in ASKED]


@contextmanager
def counted_matchers(made):
    class Counted(TextMatcher):
        def __init__(self, grammar):
            made.append(self)
            super().__init__(grammar)

    with patch.object(masks, "TextMatcher", Counted):
        yield


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["sample", "forward", "fetch"])
def test_a_step_that_fails_or_is_interrupted(llm, quiet, error, where):
    expected, _ = run(llm, *requests(llm))
    assert len(expected) == 5
    steps, made, runner = count(), [], llm.core.runner
    original = getattr(runner, where)

    def failing(*args, **options):
        result = original(*args, **options)
        if next(steps) in ((4,) if error is RuntimeError else (4, 9, 10)):  # one that fails again alone is to blame
            raise error
        return result

    with patch.object(runner, where, failing), counted_matchers(made):
        assert run(llm, *requests(llm)) == (expected, {})
    assert next(steps) > 10
    assert len(made) == 4, "no text is read again by its grammar"


def test_an_interrupt_behind_a_grammar_loses_no_token(llm):
    expected, _ = run(llm, *requests(llm))
    calls, take = count(), readout.take_token

    def interrupted(sample, token):
        take(sample, token)
        if next(calls) == 20:
            raise KeyboardInterrupt
        return take(sample, token)

    with patch.object(readout, "take_token", interrupted):
        found, failed = run(llm, *requests(llm))
    assert not failed
    assert found == expected


def test_a_request_that_always_fails_leaves_nothing(llm, quiet):
    expected, _ = run(llm, *requests(llm))
    matcher_of = masks.matcher_of

    def failing(sample):
        if sample.request.request_id == "a" and sample.output_ids[7:]:
            raise RuntimeError("injected")
        return matcher_of(sample)

    with patch.object(masks, "matcher_of", failing):
        found, failed = run(llm, *requests(llm))
    assert failed == {"a": "RuntimeError: injected"}
    assert {name: own for name, own in found.items() if name[0] != "a"} == {
        n: own for n, own in expected.items() if n[0] != "a"
    }
