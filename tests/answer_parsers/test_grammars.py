"""Grammars of calls: what a model may write under them, judged by llguidance's matcher, and by jsonschema."""

import json
import random

import jsonschema
import pytest

from chunkattn.answer_parsers.families import find_tool_parser
from chunkattn.answer_parsers.reader import AnswerReader, Message
from chunkattn.answer_parsers.reasoning import find_reasoning_parser
from chunkattn.answer_parsers.tools import Tool, Tools
from chunkattn.engine.grammars import Grammars, TextMatcher
from chunkattn.engine.grammars import grammar_of as grammar_of_shape
from chunkattn.engine.vocabulary import Vocabulary
from chunkattn.errors import RequestError
from chunkattn.structured_outputs import StructuredOutputsParams
from tests.answer_parsers.families import AT_BEGINNING, TEMPLATES, written
from tests.chat_templates import byte_tokenizer

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "unit": {"enum": ["C", "F", None]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "place": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "string", "pattern": "^[a-z]{2,4}$"}, {"type": "null"}]},
        "loud": {"type": ["boolean", "null"]},
    },
    "required": ["city", "tags"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "on": {"const": "sea"}},
            "required": ["lat"],
            "additionalProperties": False,
        }
    },
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = (Tool("get_weather", WEATHER), Tool("now", NOW))
FORMS = [form for form in TEMPLATES if form not in ("mistral ids", "pythonic repr")]  # not written under grammars
MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<escape>",
    "<|tool_call>",
    "<tool_call|>",
    "</think>",
    "<think>",
]


@pytest.fixture(scope="module", params=["special", "added", "letters"])
def tokenizer(request):
    """A tokenizer whose markers are special tokens, added ones that are none, or letters."""
    made = byte_tokenizer(*(MARKERS if request.param == "special" else ["[ARGS]"]))
    if request.param == "added":
        made.add_tokens([marker for marker in MARKERS if marker != "[ARGS]"])
    return made


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(Vocabulary.of(tokenizer, len(tokenizer)))


def grammar_of(form, tools, tokenizer, **options):
    has_args = form != "mistral"  # the older tokenizers have no such token
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = {text: number for text, number in special.items() if has_args or text != "[ARGS]"}
    return find_tool_parser(form.split()[0], "").grammar(tools, ids.get, **options)


def compiled(grammars, grammar):
    return TextMatcher(grammars.compile(StructuredOutputsParams(grammar=grammar)))


def accepts(grammars, grammar, tokenizer, text):
    matcher, ids = compiled(grammars, grammar).matcher, tokenizer(text).input_ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def sampled(grammars, grammar, tokenizer, chance, most=600):
    """Write random tokens that a grammar allows, uniformly drawn; None if the text does not end within `most` tokens."""
    text, ids, size = compiled(grammars, grammar), list[int](), len(tokenizer)
    while len(ids) < most and not text.is_complete:
        (row,), (may_end,) = grammars.masks([text])
        if may_end and chance.random() < 0.5:
            break
        allowed = [t for t in range(size) if row[t // 32] >> (t % 32) & 1]
        if not allowed:
            break
        # Printable ASCII, so that random bytes do not end within a character.
        ids.append(chance.choice([t for t in allowed if " " <= tokenizer.decode([t]) <= "~"] or allowed))
        text.follow(ids)
        assert not text.error
    return tokenizer.decode(ids) if text.matcher.is_accepting() or text.is_complete else None


@pytest.mark.parametrize("form", FORMS)
def test_calls_as_templates_write_them_are_allowed(form, tokenizer, grammars):
    arguments = {"city": "Paris", "unit": "C", "days": 3, "tags": ["a", "b"], "place": {"lat": 1.5, "on": "sea"}, "note": "abc"}
    calls = [{"name": "get_weather", "arguments": arguments}, {"name": "now", "arguments": {}}]
    if form == "llama3_json":
        calls = calls[:1]
    required = Tools(FUNCTIONS, "required")
    assert accepts(grammars, grammar_of(form, required, tokenizer), tokenizer, written(form, calls))
    assert not accepts(grammars, grammar_of(form, required, tokenizer), tokenizer, "Hello.")
    named = Tools(FUNCTIONS, "required", "now")
    assert not accepts(grammars, grammar_of(form, named, tokenizer), tokenizer, written(form, calls[:1]))
    now = [{"name": "now", "arguments": {}}]
    assert accepts(grammars, grammar_of(form, named, tokenizer), tokenizer, written(form, now))
    if form != "llama3_json":
        assert not accepts(grammars, grammar_of(form, named, tokenizer), tokenizer, written(form, now * 2))
        one = Tools(FUNCTIONS, "required", parallel=False)
        assert not accepts(grammars, grammar_of(form, one, tokenizer), tokenizer, written(form, calls))


@pytest.mark.parametrize("form", FORMS)
def test_random_answers_hold_valid_calls(form, tokenizer, grammars):
    """Random texts under the grammar are calls whose arguments fit their schemas, and nothing else."""
    chance, ended = random.Random(7), 0
    tools = Tools(FUNCTIONS, "required")
    schemas = {tool.name: tool.parameters for tool in FUNCTIONS}
    grammar = grammar_of(form, tools, tokenizer)
    for _ in range(25):
        text = sampled(grammars, grammar, tokenizer, chance)
        if text is None:
            continue
        ended += 1
        message = Message()
        message.add(AnswerReader(find_tool_parser(form.split()[0], ""), tools).feed(text, last=True))
        assert message.calls, text
        assert not message.content, text
        for call in message.calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    assert ended >= 8


@pytest.mark.parametrize("form", FORMS)
def test_strict_tools_hold_calls_to_their_schema_where_the_model_decides(form, tokenizer, grammars):
    strict = Tools((Tool("get_weather", WEATHER, strict=True), Tool("now", NOW)))
    assert strict.is_enforced
    grammar = grammar_of(form, strict, tokenizer)
    good = [{"name": "get_weather", "arguments": {"city": "Rome", "tags": []}}]
    bad = [{"name": "get_weather", "arguments": {"city": "Rome", "tags": 5}}]
    before = "" if form in AT_BEGINNING else "I look.\n"
    assert accepts(grammars, grammar, tokenizer, "It is warm, {really}.")
    assert accepts(grammars, grammar, tokenizer, before + written(form, good))
    assert not accepts(grammars, grammar, tokenizer, before + written(form, bad))


def test_reasoning_may_stand_before_enforced_calls(tokenizer, grammars):
    reasoning, call = find_reasoning_parser("qwen3", ""), written("hermes", [{"name": "now", "arguments": {}}])
    tools = Tools(FUNCTIONS, "required")

    def allows(is_open, text):
        grammar = grammar_of("hermes", tools, tokenizer, before=lambda made: reasoning.before(made, is_open))
        return accepts(grammars, grammar, tokenizer, text)

    assert allows(False, call)
    assert allows(False, f"<think>\nWell.\n</think>\n\n{call}")
    assert allows(True, f"Well {{}}.\n</think>\n\n{call}")
    assert not allows(True, call)
    assert not allows(False, f"Well.</think>{call}")


SHAPES = [
    ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}, '{"a": 1}'),
    ({"regex": "ab+"}, "abb"),
    ({"choice": ["x", "yy"]}, "yy"),
    ({"grammar": 'start: A "c"\nA: /a+/'}, "aac"),
]


@pytest.mark.parametrize(("fields", "answer"), SHAPES, ids=lambda value: next(iter(value)))
def test_answers_have_their_shape_behind_reasoning(tokenizer, grammars, fields, answer):
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    shape = grammar_of_shape(StructuredOutputsParams(**fields))
    for opening, is_open in (("", True), ("<think>\n", False)):
        grammar = find_reasoning_parser("qwen3", "").before_shape(shape, special.get, is_open=is_open)
        assert accepts(grammars, grammar, tokenizer, f"{opening}Well, {{}}.\n</think>\n\n{answer}")
        assert accepts(grammars, grammar, tokenizer, answer) is not is_open
        assert not accepts(grammars, grammar, tokenizer, f"{opening}Well.\n</think>\n\nWell. {answer}")


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_calls_or_have_their_shape(form, tokenizer, grammars):
    tools, shape = Tools(FUNCTIONS), grammar_of_shape(StructuredOutputsParams(json=SHAPES[0][0]["json"]))
    if form in AT_BEGINNING:
        with pytest.raises(RequestError, match="set tool_choice to required or none"):
            grammar_of(form, tools, tokenizer, shape=shape)
        return
    grammar = grammar_of(form, tools, tokenizer, shape=shape)
    for arguments, is_valid in (({"city": "Rome", "tags": []}, True), ({"city": "Rome", "tags": 5}, False)):
        call = written(form, [{"name": "get_weather", "arguments": arguments}])
        assert accepts(grammars, grammar, tokenizer, call) is is_valid
    assert accepts(grammars, grammar, tokenizer, SHAPES[0][1])
    assert not accepts(grammars, grammar, tokenizer, '{"a": "b"}')
    assert not accepts(grammars, grammar, tokenizer, "Hello.")


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "patternProperties"])
def test_objects_that_no_tags_can_write_are_refused(keyword):
    tools = Tools((Tool("f", {"type": "object", keyword: {}}),), "required")
    with pytest.raises(RequestError, match=f"'{keyword}' in the parameters of the tool 'f' cannot be enforced") as caught:
        find_tool_parser("qwen3_coder", "").grammar(tools, lambda text: None)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("form", "key"),
    [
        *(("functiongemma", key) for key in ("a:b", "a<b", " a", "a,b", "a]")),
        *(("gemma4", key) for key in ("a:b", "a{")),
        *(("qwen3_coder", key) for key in ("a>b", "<a", "a\nb")),
        *(("pythonic", key) for key in ("a-b", "1a", "ﬁ", "")),
    ],
)
def test_properties_that_calls_cannot_name_are_refused(form, key):
    """Their parser would read another name."""
    tools = Tools((Tool("f", {"type": "object", "properties": {key: {"type": "integer"}}}),), "required")
    with pytest.raises(RequestError, match="is a name that this model's form of calls cannot hold") as caught:
        find_tool_parser(form, "").grammar(tools, lambda text: None)
    assert caught.value.param == "tools"
    assert repr(key) in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["from", "None", "naïve", "a b.c-d/$", ""])
def test_unusual_names_of_properties_are_read(form, key, tokenizer, grammars):
    schema = {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key]}
    tools, text = Tools((Tool("f", schema),), "required"), written(form, [{"name": "f", "arguments": {key: 3}}])
    if form == "pythonic" and not key.isidentifier():
        return
    assert accepts(grammars, grammar_of(form, tools, tokenizer), tokenizer, text)
    message = Message()
    message.add(AnswerReader(find_tool_parser(form.split()[0], ""), tools).feed(text, last=True))
    assert [json.loads(call.arguments) for call in message.calls] == [{key: 3}]


@pytest.mark.parametrize("reference", ["#/$defs/none", "elsewhere.json", "#/properties/a"])
@pytest.mark.parametrize("form", ["qwen3_coder", "gemma4"])
def test_references_that_lead_to_nothing_are_refused(form, reference):
    tools = Tools((Tool("f", {"type": "object", "properties": {"a": {"$ref": reference}}}),), "required")
    with pytest.raises(RequestError, match="a schema of tools refers to"):
        find_tool_parser(form, "").grammar(tools, lambda text: None)


@pytest.mark.parametrize(
    ("form", "marker"), [("qwen3_coder", "</parameter>"), ("functiongemma", "<escape>"), ("gemma4", '<|"|>')]
)
def test_texts_hold_no_marker_of_their_end(form, marker, tokenizer, grammars):
    """A text with its own end inside would be read as a shorter one, with the rest behind it."""
    text = Tools((Tool("f", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}),), "required")
    for value, is_allowed in (("x < y", True), (f"x{marker}y", False)):
        written_text = written(form, [{"name": "f", "arguments": {"a": value}}])
        assert accepts(grammars, grammar_of(form, text, tokenizer), tokenizer, written_text) is is_allowed


@pytest.mark.parametrize("form", FORMS)
def test_arguments_are_those_of_the_schema(form, tokenizer, grammars):
    """A weak model would write further ones without end where a schema does not exclude them."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = grammar_of(form, Tools((Tool("f", schema),), "required"), tokenizer)
    assert accepts(grammars, grammar, tokenizer, written(form, [{"name": "f", "arguments": {"a": 1}}]))
    assert not accepts(grammars, grammar, tokenizer, written(form, [{"name": "f", "arguments": {"a": 1, "b": 2}}]))
    grammar = grammar_of(form, Tools((Tool("f", {"type": "object", "properties": {}}),), "required"), tokenizer)
    for arguments in ({}, {"a": 1}):
        allowed = accepts(grammars, grammar, tokenizer, written(form, [{"name": "f", "arguments": arguments}]))
        assert allowed is (not arguments)


def test_recursive_values_of_gemma(tokenizer, grammars):
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}},
        "required": ["value"],
    }
    schema = {"type": "object", "properties": {"list": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    grammar = grammar_of("gemma4", Tools((Tool("f", schema),), "required"), tokenizer)
    deep = {"list": {"next": {"next": {"value": 3}, "value": 2}, "value": 1}}
    assert accepts(grammars, grammar, tokenizer, written("gemma4", [{"name": "f", "arguments": deep}]))
    assert not accepts(
        grammars, grammar, tokenizer, written("gemma4", [{"name": "f", "arguments": {"list": {"next": 1, "value": 1}}}])
    )
