"""Texts of a shape: every one that ended by itself has it, and nothing else of an answer changes."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest

from chunkattn import ChunkedPrompt, SamplingParams, StructuredOutputsParams

PROMPT = ChunkedPrompt("Read the notes.", ["Ana lives in Oslo.", "Ben lives in Rome."], "Where does Ana live?")
FREE = SamplingParams(max_tokens=24, seed=11, logprobs=3)
CHOICE = StructuredOutputsParams(choice=["in Oslo", "in Rome", "nobody knows \u00e9"])


def run(llm, prompts, params):
    return [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]


def shaped(shape, **options):
    return SamplingParams(structured_outputs=shape, **{"max_tokens": 160, "seed": 5, **options})


def random_schema(draw, depth=0):
    kinds = ["string", "integer", "boolean", "enum", "number", "null"] + (["object", "array", "anyOf"] * 2 if depth < 2 else [])
    kind = draw.choice(kinds)
    if kind == "string":
        return draw.choice([{"type": "string", "maxLength": 6}, {"type": "string", "pattern": "^[a-c]{1,4}$"}])
    if kind == "integer":
        return {"type": "integer", "minimum": draw.randint(-50, 0), "maximum": draw.randint(1, 5000)}
    if kind == "enum":
        return {"enum": draw.sample(["a", "b \u00e9", 3, None, True, 'c"'], 3)}
    if kind == "object":
        names = draw.sample(["n", "name", "x y", "\u00fc"], draw.randint(1, 3))
        properties = {name: random_schema(draw, depth + 1) for name in names}
        required = [name for name in names if draw.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": random_schema(draw, depth + 1), "minItems": draw.randint(0, 1), "maxItems": 3}
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth + 1), {"type": "boolean"}]}
    return {"type": "number", "minimum": 0, "maximum": 9} if kind == "number" else {"type": kind}


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.ci)])
def test_answers_that_ended_validate(demo, count):
    draw = random.Random(72)
    schemas = [random_schema(draw) for _ in range(count)]
    params = [
        shaped(StructuredOutputsParams(json=schema, disable_any_whitespace=number % 4 > 0), n=2, seed=number)
        for number, schema in enumerate(schemas)
    ]
    ended = 0
    for schema, samples in zip(schemas, run(demo, [PROMPT] * count, params), strict=True):
        for sample in samples:
            if sample.finish_reason == "stop":
                ended += 1
                jsonschema.validate(json.loads(sample.text), schema, jsonschema.Draft202012Validator)
    assert ended > count


def test_other_shapes(demo):
    lark = 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-z]{2,4}/\n'
    gbnf = 'root ::= "<" word ("," word)* ">"\nword ::= [a-z] [a-z] [a-z]? [a-z]?\n'
    shapes = {
        "GBNF": (StructuredOutputsParams(grammar=gbnf), re.compile("<[a-z]{2,4}(,[a-z]{2,4})*>").fullmatch),
        "choice": (CHOICE, lambda text: text in CHOICE.choice),
        "regex": (StructuredOutputsParams(regex=r"[A-C]{3}/\d{2}"), re.compile(r"[A-C]{3}/\d{2}").fullmatch),
        "grammar": (StructuredOutputsParams(grammar=lark), re.compile("<[a-z]{2,4}(,[a-z]{2,4})*>").fullmatch),
        "object": (StructuredOutputsParams(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    }
    for name, (shape, holds) in shapes.items():
        (samples,) = run(demo, [PROMPT], shaped(shape, n=4))
        ended = [sample for sample in samples if sample.finish_reason == "stop"]
        assert ended, name
        assert all(holds(sample.text) for sample in ended), (name, [sample.text for sample in ended])


def test_a_text_ends_where_its_grammar_does(demo):
    ids = demo.tokenizer("in Oslo", add_special_tokens=False).input_ids
    for options in ({}, {"ignore_eos": True}, {"min_tokens": 40}):
        (samples,) = run(demo, [PROMPT], shaped(StructuredOutputsParams(choice=["in Oslo"]), temperature=0, **options))
        assert (samples[0].text, samples[0].finish_reason, samples[0].stop_reason) == ("in Oslo", "stop", None)
    # Where the text may go on, it ends with the end-of-sequence token, or at its length.
    open_ended = StructuredOutputsParams(regex="x+")
    end = demo.frontend.eos_token_ids[0]
    (samples,) = run(demo, [PROMPT], shaped(open_ended, logit_bias={end: 100.0}))
    assert samples[0].finish_reason == "stop"
    assert re.fullmatch("x+", samples[0].text)
    assert samples[0].token_ids[-1] == end
    for options in ({"ignore_eos": True}, {"min_tokens": 9}):
        (samples,) = run(demo, [PROMPT], shaped(open_ended, max_tokens=9, logit_bias={end: 100.0}, **options))
        assert samples[0].finish_reason == "length"
        assert re.fullmatch("x+", samples[0].text)
    assert ids


def test_stop_strings_cut_a_text(demo):
    schema = {"type": "object", "properties": {"a": {"enum": ["x y"]}, "b": {"enum": [7]}}, "required": ["a", "b"]}
    shape = StructuredOutputsParams(json=schema | {"additionalProperties": False}, disable_any_whitespace=True)
    whole = '{"a":"x y","b":7}'
    for stop, options, expected in (
        ((), {}, whole),
        (["y", "7"], {}, '{"a":"x '),
        (["y", "7"], {"include_stop_str_in_output": True}, '{"a":"x y'),
        (['","'], {"min_tokens": 2}, '{"a":"x y'),
        (["}"], {"ignore_eos": True, "include_stop_str_in_output": True}, whole),
        (["not there"], {}, whole),
    ):
        (samples,) = run(demo, [PROMPT], shaped(shape, stop=stop, n=2, **options))
        for sample in samples:
            cut = next((own for own in stop if own in whole), None)
            assert (sample.text, sample.finish_reason, sample.stop_reason) == (expected, "stop", cut)
    assert not demo.core.requests


def test_logprobs_are_of_the_unmasked_distribution(demo):
    (samples,) = run(demo, [PROMPT], shaped(CHOICE, temperature=0, logprobs=2))
    chosen = samples[0].token_ids
    layout = demo.frontend.parse([PROMPT], None)[0].layout
    question = layout.token_ids[layout.question_start :].tolist()
    chunks = [layout.part(segment).tolist() for segment in layout.segments[1:-1]]
    prefix = layout.part(layout.segments[0]).tolist()
    whole = ChunkedPrompt(prefix, chunks, question + chosen)
    read = SamplingParams(max_tokens=1, prompt_logprobs=2, temperature=0)
    prompt_logprobs = demo.generate(whole, read, use_tqdm=False)[0].prompt_logprobs[-len(chosen) :]
    for drawn, token, witness in zip(samples[0].logprobs, chosen, prompt_logprobs, strict=True):
        np.testing.assert_allclose(drawn[token].logprob, witness[token].logprob, atol=1e-4)
    assert any(entry[token].rank > 1 for entry, token in zip(samples[0].logprobs, chosen, strict=True))


def test_free_texts_keep_their_bits_in_company(demo):
    alone = run(demo, ["A word", PROMPT], FREE)
    greedy = SamplingParams(max_tokens=24, temperature=0, logprobs=3)
    alone += run(demo, ["A word", PROMPT], greedy)
    mixed = ["A word", PROMPT] * 2 + [PROMPT] * 3
    company = run(demo, mixed, [FREE] * 2 + [greedy] * 2 + [shaped(CHOICE, n=3), shaped(CHOICE), FREE])
    for one, other in zip(alone, company[:4], strict=True):
        assert one[0].token_ids == other[0].token_ids
        assert one[0].logprobs == other[0].logprobs
    assert run(demo, [PROMPT], shaped(CHOICE, n=3)) == [company[4]]


def test_a_shape_that_is_refused(demo):
    shapes = {
        "unclosed group": StructuredOutputsParams(regex="(a"),
        "look-around": StructuredOutputsParams(regex="(?=a)b"),
        "Unimplemented keys": StructuredOutputsParams(json={"not": {}}),
        "no JSON schema": StructuredOutputsParams(json="{"),
        "too deep": StructuredOutputsParams(json="[" * 9000),
        "recursion limit": StructuredOutputsParams(json='{"items":' * 300 + "{}" + "}" * 300),
        "unknown name": StructuredOutputsParams(grammar="start: nothing"),
        "no GBNF .*'nothing' not found": StructuredOutputsParams(grammar="root ::= nothing"),
        "no GBNF .*recursion": StructuredOutputsParams(grammar=f"root ::= {'(' * 40_000}"),
        "no text has this shape": StructuredOutputsParams(json={"$ref": "#"}),
    }
    for words, shape in shapes.items():
        with pytest.raises(ValueError, match=words) as refusal:
            run(demo, [PROMPT, "x"], [FREE, shaped(shape)])
        assert refusal.value.param == "structured_outputs"
    assert not demo.core.requests


def test_parameters():
    wrong = [
        ({}, "got none"),
        ({"json": "{}", "regex": "a"}, "got json and regex"),
        ({"regex": 3}, "regex must be a text"),
        ({"choice": []}, "between 1 and 4096"),
        ({"choice": "ab"}, "must be a list"),
        ({"choice": ["a", ""]}, "choice 1"),
        ({"regex": "a" * 200_000}, "at most"),
        ({"json": {"a": object()}}, "no JSON schema"),
        ({"regex": "a", "disable_any_whitespace": True}, "needs json"),
    ]
    for given, words in wrong:
        with pytest.raises(ValueError, match=words):
            StructuredOutputsParams(**given)
    with pytest.raises(ValueError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"json": {}})
