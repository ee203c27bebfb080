"""Calls in texts as the templates write them, whole and in pieces, and texts that are none."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkattn.answer_parsers.events import Arguments, CallBegun
from chunkattn.answer_parsers.families import find_tool_parser
from chunkattn.answer_parsers.reader import AnswerReader, Message
from chunkattn.answer_parsers.reasoning import REASONING_PARSERS, find_reasoning_parser
from chunkattn.answer_parsers.tool_parser import TOOL_PARSERS, ToolParser, register_tool_parser
from chunkattn.answer_parsers.tools import Tool, Tools
from chunkattn.errors import ConfigError
from tests.answer_parsers.families import AT_BEGINNING, TEMPLATES, written

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "warm": {"type": "boolean"},
        "degrees": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object"},
        "note": {"type": ["string", "null"]},
        "code": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    },
}
TOOLS = Tools((Tool("get_weather", SCHEMA), Tool("search.web", {"type": "object", "properties": {}})))
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=12)
# Texts without the characters that the families' own signs have.
ARGUMENTS = st.fixed_dictionaries(
    {"city": st.one_of(TEXT, st.sampled_from(['Pa"r\\is', "a\nb", "{[", "]}", "<p>", "null", "3", " x "]))},
    optional={
        "days": st.integers(-5, 10**9),
        "warm": st.booleans(),
        "degrees": st.floats(-9, 9, allow_nan=False).map(lambda x: round(x, 3)),
        "tags": st.lists(TEXT, max_size=3),
        "place": st.dictionaries(st.sampled_from(["lat", "lon"]), st.one_of(TEXT, st.integers(), st.lists(TEXT, max_size=2))),
    },
)
CALLS = st.lists(
    st.one_of(
        ARGUMENTS.map(lambda arguments: {"name": "get_weather", "arguments": arguments}),
        st.just({"name": "search.web", "arguments": {}}),
    ),
    min_size=1,
    max_size=3,
)


def parser(form):
    return find_tool_parser(form.split()[0], "")


def read(form, pieces, tools=TOOLS, **options):
    """Read an answer in pieces."""
    reader, message = AnswerReader(parser(form), tools, **options), Message()
    for number, piece in enumerate(pieces):
        message.add(reader.feed(piece, last=number == len(pieces) - 1))
    return message


def split(text, random):
    """Cut a text at random places; some pieces are empty."""
    cuts = sorted(random.randint(0, len(text)) for _ in range(random.randint(0, min(len(text), 12))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def called(message):
    return [{"name": call.name, "arguments": json.loads(call.arguments)} for call in message.calls]


@pytest.mark.parametrize("form", TEMPLATES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(calls=CALLS, random=st.randoms(use_true_random=False))
def test_calls_are_those_that_the_template_wrote(form, calls, random):
    """Every way of cutting the text into pieces gives the same calls, down to the letters of the arguments."""
    before = "" if form in AT_BEGINNING else "I will look.\n\n"
    text = before + written(form, calls)
    whole = read(form, [text])
    assert called(whole) == calls
    assert whole.content == before.rstrip()
    assert read(form, split(text, random)) == whole
    assert read(form, [*text]) == whole


FOREIGN = [
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "<parameter=a>",
    '{"name": "f", ',
    '"arguments": {',
    "}",
    "[TOOL_CALLS]",
]
FOREIGN += [
    "[",
    "]",
    "[ARGS]",
    "<|tool_call>",
    "call:f{",
    "<escape>",
    '<|"|>',
    "<start_function_call>",
    "x",
    "\n",
    " ",
    '"',
    "\\",
    "é",
]
FOREIGN += ["</parameter>", "</function>", '{"name": "get_weather", "parameters": ', "<tool_call|>", "<think>", "</think>", "<"]


@pytest.mark.parametrize("form", TEMPLATES)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(pieces=st.lists(st.sampled_from(FOREIGN), max_size=14), random=st.randoms(use_true_random=False), opened=st.booleans())
def test_any_text_reads_the_same_in_any_pieces(form, pieces, random, opened):
    text, options = "".join(pieces), {"reasoning_parser": find_reasoning_parser("qwen3", ""), "is_open": opened}
    whole = read(form, [text], **options)
    assert read(form, split(text, random), **options) == whole
    if "{" not in text and "<function=" not in text:  # no call can begin
        plain = read(form, [text])
        assert (plain.content, plain.calls) == (text, [])


NO_CALLS = [
    ("hermes", "<tool_call>\nnot json\n</tool_call>"),
    ("hermes", '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "f", "argu'),
    ("hermes", "Use <tool_call> tags."),
    ("qwen3_coder", "<tool_call>\n<function=>\n</function>"),
    ("qwen3_coder", "<tool_call>\n<function=a b>\n"),
    ("qwen3_coder", "a < b and <function = f>"),
    ("llama3_json", '{"name": "Ada", "parameters": {"born": 1815}}'),
    ("llama3_json", '{"city": "Paris", "name": "get_weather", "parameters": {}}'),
    ("llama3_json", 'It is {"name": "get_weather", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS] nothing"),
    ("mistral", '[TOOL_CALLS][{"nom": "f"}]'),
    ("functiongemma", "<start_function_call>print(1)<end_function_call>"),
    ("pythonic", "[1](x)"),
    ("pythonic", 'It is [get_weather(city="Oslo")]'),
    ("pythonic", "[lose(a=1)]"),
    ("pythonic", '[get_weather("Oslo")]'),
    ("pythonic", "[get_weather(city=oslo)]"),
    ("pythonic", '[get_weather(**{"city": 1})]'),
    ("pythonic", "[get_weather(city=b'x')]"),
    ("pythonic", "[get_weather(warm=-True)]"),
    ("pythonic", "[get_weather(1a=2)]"),
    ("pythonic", "[get_weather(,)]"),
    ("pythonic", f"[get_weather(city={'[' * 9000}{']' * 9000})]"),
    ("pythonic", '[get_weather(city="Os'),
    ("gemma4", "<|tool_call>call:<tool_call|>"),
]


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_malformed_calls_stay_text(form, text):
    for pieces in ([text], [*text]):
        assert read(form, pieces) == Message(content=text)


def test_a_call_behind_a_malformed_one_is_read():
    text = "<tool_call>\n{oops}\n</tool_call>\n" + written("hermes", [{"name": "f", "arguments": {"a": 1}}]) + "\nDone."
    message = read("hermes", [text])
    assert called(message) == [{"name": "f", "arguments": {"a": 1}}]
    assert message.content == "<tool_call>\n{oops}\n</tool_call>Done."


BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>', '{"a": [1}}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "Par', '{"a": "Par'),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar", '{"city": "Par'),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=days>\n3", '{"days": 3'),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Par', '{"city": "Par'),
    ("mistral", '[TOOL_CALLS]f{"a": tr', '{"a": tr'),
    ("functiongemma", "<start_function_call>call:f{a:<escape>Par", '{"a": "Par'),
    # A marker that is cut off is no part of the arguments, and does not close them.
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar\n</para", '{"city": "Par'),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n</", '{"days": 3'),
    ("qwen3_coder", "<function=get_weather>\n<parameter=days>\n3\n</parameter>\n<param", '{"days": 3'),
    ("qwen3_coder", "<function=get_weather>\n</func", "{"),
    ("gemma4", '<|tool_call>call:f{a:<|"|>Par<|"', '{"a": "Par'),
    ("gemma4", '<|tool_call>call:f{a:<|"', '{"a": '),
    ("pythonic", '[get_weather(city="Par"), get_weather(ci', '{"city": "Par"}'),
]


@pytest.mark.parametrize(("form", "text", "arguments"), BROKEN)
def test_a_call_that_has_begun_keeps_what_was_written(form, text, arguments):
    (call,) = read(form, [text]).calls
    assert call.arguments == arguments


@pytest.mark.parametrize("form", [form for form in TEMPLATES if form != "pythonic repr"])
def test_a_cut_answer_holds_the_beginning_of_its_calls(form):
    """Wherever a limit cuts an answer, its calls are a beginning of the whole answer's, and no part of a call is content."""
    text = written(form, [{"name": "get_weather", "arguments": {"city": 'a<\n"b\\', "days": 3}}] * 2)
    whole = [(call.name, call.arguments) for call in read(form, [text]).calls]
    assert len(whole) == 2
    for end in range(len(text)):
        cut = read(form, [text[:end]])
        assert cut == read(form, [*text[:end]] or [""])
        assert not (cut.calls and cut.content), text[:end]
        for found, (name, arguments) in zip(cut.calls, whole, strict=False):
            assert found.name == name
            assert arguments.startswith(found.arguments), text[:end]


OTHER_FORMS = [
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', {"a": 1}),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', {}),
    ("hermes", '<tool_call>{"id": 7, "name": "f", "arguments": null}</tool_call>', {}),
    ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", {"a": 1}),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>\n\n</parameter></function></tool_call>", {"city": ""}),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=warm>\nTrue\n</parameter></function></tool_call>",
        {"warm": True},
    ),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=note>\nnull\n</parameter></function></tool_call>",
        {"note": None},
    ),
    ("qwen3_coder", "<function=get_weather><parameter=code>\n3\n</parameter></function>", {"code": 3}),
    ("qwen3_coder", "<function=get_weather><parameter=code>\n[3]\n</parameter></function>", {"code": "[3]"}),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "get_weather", "arguments": {"a": 1}}', {"a": 1}),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', {"a": 1}),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', {"a": 1}),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\n\ty"}}</tool_call>', {"a": "x\n\ty"}),
    ("mistral", '[TOOL_CALLS] f {"a": 1}', {"a": 1}),
    ("gemma4", "<|tool_call>call:ns:f{a:1}<tool_call|>", {"a": 1}),
    ("pythonic", " <|python_start|>[ get_weather (a = 1, b=-2.5 ,)]<|python_end|>", {"a": 1, "b": -2.5}),
    ("pythonic", "[get_weather(a=true, b=None, c=('x', {'k': False}))]", {"a": True, "b": None, "c": ["x", {"k": False}]}),
    ("pythonic", "[get_weather(a='''it's''', b=\"\\d\n)]\", c=\"\\ud83d\\ude00\")]", {"a": "it's", "b": "\\d\n)]", "c": "😀"}),
    (
        "pythonic",
        "[get_weather(from=', to=', to=[1, ('in', {'is': -1})],\n True = 2, _a=(3, 4))]",
        {"from": ", to=", "to": [1, ["in", {"is": -1}]], "True": 2, "_a": [3, 4]},
    ),
    ("gemma4", '<|tool_call>call:f{a:{<|"|>b<|"|>:[1,true]}}<tool_call|>', {"a": {"b": [1, True]}}),
]


@pytest.mark.parametrize(("form", "text", "arguments"), OTHER_FORMS)
def test_other_forms_that_models_write(form, text, arguments):
    for pieces in ([text], [*text]):
        message = read(form, pieces)
        assert [call["arguments"] for call in called(message)] == [arguments]
        assert not message.content


def test_arguments_are_passed_on_as_they_arrive():
    """The name is there before the arguments, and every piece of the text has its piece of the arguments."""
    reader = AnswerReader(parser("hermes"), TOOLS)
    pieces = ["<tool_", 'call>\n{"name": "f", "arg', 'uments": {"a": "b', "c", 'd"', "}}\n</tool_call>"]
    events = [reader.feed(piece) for piece in pieces]
    assert [event.name for event in events[2] if isinstance(event, CallBegun)] == ["f"]
    pieces_of_arguments = ["".join(e.text for e in fed if isinstance(e, Arguments)) for fed in events]
    assert pieces_of_arguments == ["", "", '{"a": "b', "c", 'd"', "}"]


def test_one_call_at_most_if_calls_are_not_parallel():
    text = written("hermes", [{"name": "f", "arguments": {"a": n}} for n in range(3)])
    message = read("hermes", [*text], Tools(TOOLS.tools, parallel=False))
    assert called(message) == [{"name": "f", "arguments": {"a": 0}}]


# Reasoning

REASONED = [
    ("<think>\nWell.\n</think>\n\nYes.", False, "Well.", "Yes."),
    ("Well.\n</think>\n\nYes.", True, "Well.", "Yes."),
    ("\n<think>Well. </think>Yes. ", True, "Well.", "Yes. "),
    ("Yes, a <think> tag.", False, None, "Yes, a <think> tag."),
    ("Well, that", True, "Well, that", ""),
    ("<think>\n\n</think>\n\nYes.", False, None, "Yes."),
    ("  Yes.", False, None, "  Yes."),
    ("<think>a<think>b</think>c</think>Yes.", False, "a<think>b", "c</think>Yes."),
    ("<think></think>", False, None, ""),
    ("Yes.</think>No.", False, None, "Yes.</think>No."),
    ("</think>Yes.", True, None, "Yes."),
]


@pytest.mark.parametrize(("text", "opened", "reasoning", "content"), REASONED)
def test_reasoning_stands_before_the_answer(text, opened, reasoning, content):
    for pieces in ([text], [*text]):
        message = read("hermes", pieces, reasoning_parser=find_reasoning_parser("deepseek_r1", ""), is_open=opened)
        assert (message.reasoning, message.content) == (reasoning, content)


def test_calls_stand_behind_the_reasoning():
    """A call within the reasoning is a part of it."""
    call = written("hermes", [{"name": "f", "arguments": {}}])
    text = f"Shall I {call}?\n</think>\n\n{call}"
    message = read("hermes", split(text, random.Random(1)), reasoning_parser=find_reasoning_parser("qwen3", ""), is_open=True)
    assert message.reasoning == f"Shall I {call}?"
    assert (called(message), message.content) == ([{"name": "f", "arguments": {}}], "")


PROMPTS = [
    # prompt, message that goes on, whether Qwen 3 and DeepSeek R1 begin inside the reasoning, whether both begin behind it
    ("a<think>\n", "", True, True, False),
    ("<think>\n\n</think>\n\n", "", False, False, True),
    ("<think> a", "", False, True, False),
    ("<think>Hm, w", "<think>Hm, w", True, True, False),
    ("</think>Well", "<think>Hm</think>Well", False, False, True),
    ("Well", "Well", False, True, False),
]


@pytest.mark.parametrize(("prompt", "continued", "qwen", "deepseek", "over"), PROMPTS)
def test_a_prompt_may_open_the_reasoning(prompt, continued, qwen, deepseek, over):
    for name, expected in (("qwen3", qwen), ("deepseek_r1", deepseek)):
        parser = find_reasoning_parser(name, "")
        assert (parser.is_open(prompt, continued), parser.is_over(prompt, continued)) == (expected, over)


# The registry

TRACES = {
    "hermes": "{{ '<tool_call>\\n{\"name\": ' }}",
    "qwen3_coder": "<tool_call>\\n<function={{ name }}>",
    "llama3_json": "{{- 'Environment: ipython\\n' }}",
    "mistral": "[TOOL_CALLS]",
    "pythonic": "Environment: ipython [func_name1(params_name1=params_value1)]",
    "functiongemma": "<start_function_call>call:",
    "gemma4": "<|tool_call>call:",
}


def test_templates_choose_parsers():
    for name, template in TRACES.items():
        assert find_tool_parser("auto", f"{{% if tools %}}{template}{{% endif %}}") is find_tool_parser(name, "")
        assert find_tool_parser("none", template) is None
    assert {*TRACES} <= {*TOOL_PARSERS.names()}
    assert find_tool_parser("auto", "{{ messages }}") is None
    assert find_reasoning_parser("auto", "{{ messages }}") is None
    assert find_reasoning_parser("auto", "</think>") is find_reasoning_parser("qwen3", "")
    assert {"qwen3", "mistral", "gemma4"} <= {*REASONING_PARSERS.names()}


@pytest.mark.parametrize("find", [find_tool_parser, find_reasoning_parser])
def test_unknown_names_are_refused(find):
    with pytest.raises(ConfigError, match=r"'banana' is unknown; choose auto, none, .*mistral"):
        find("banana", "")


def test_a_class_can_be_registered(monkeypatch):
    monkeypatch.setattr(TOOL_PARSERS, "_parsers", dict(TOOL_PARSERS._parsers))

    @register_tool_parser("shout")
    class Shout(ToolParser):
        traces = ("<tool_call>",)
        openings = ("CALL ",)

        def read_calls(self, source, sink, tools):
            yield from source.took("CALL ")
            sink.call("f")
            yield from source.until(("!",), sink.arguments)
            yield from source.took("!")
            return True

        def calls(self, grammar, tools):
            return '"!"'

    assert isinstance(find_tool_parser("auto", "<tool_call>"), Shout)
    assert called(read("shout", ["Hm. CA", "LL {}", "!"])) == [{"name": "f", "arguments": {}}]
