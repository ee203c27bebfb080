"""Check that the chat templates of ten families render messages of every role, or that the request is refused."""

import json

import pytest

from chunkattn.errors import NotRenderedError, RequestError
from chunkattn.parsers import PromptParser
from tests.chat_templates import TEMPLATES, byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def said(*texts):
    """Messages of `role text`."""
    return [{"role": text.split()[0], "content": text.partition(" ")[2]} for text in texts]


def call(name="find", arguments='{"who": "Ana", "n": 2}', call_id="call12345"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = [
    {"role": "user", "content": "Where is Ana?"},
    {"role": "assistant", "content": None, "tool_calls": [call()]},
    {"role": "tool", "tool_call_id": "call12345", "content": "in Oslo"},
]
CONVERSATIONS = {
    "user": said("user Hello."),
    "system": said("system Be kind.", "user Hello."),
    "developer": said("developer Be kind.", "user Hello."),
    "turns": said("user Hello.", "assistant Hi.", "user Hello."),
    "system turns": said("system Be kind.", "user Hello.", "assistant Hi.", "user Hello."),
    "late system": said("user Hello.", "assistant Hi.", "user Bye.", "system Be kind."),
    "two systems": said("system Be kind.", "developer Be brief.", "user Hello."),
    "tool": said("user Hello.", "tool Hello.", "user Hello."),
    "function": said("user Hello.", "function Hello.", "user Hello."),
    "calls": CALLS,
    "calls and text": [CALLS[0], {**CALLS[1], "content": "Let me see."}, CALLS[2]],
    "unknown": said("banana Peel.", "user Hello."),
    "own role": said("user Hello.", "critic Bad."),
    "blank": said("system  \n ", "user Hello."),
    "padded": said("system  Be kind.\n\n", "user  Hello. "),
    "thoughts": said("user Hello.", "assistant <think>\nHm.\n</think>\n\nHi.", "user Bye."),
}
RAISES, UNKNOWN = "raises", "unknown"
# For each conversation the templates that do not render it: the message that is lost, or the kind of the error.
SYSTEM = {"mistral1": RAISES, "gemma": RAISES, "phi3": 0}
EXCEPTIONS = {
    "user": {},
    "system": SYSTEM,
    "developer": SYSTEM,
    "turns": {},
    "system turns": SYSTEM,
    "late system": {"llama2": 3, "mistral1": RAISES, "mistral3": RAISES, "phi3": 3},
    "two systems": {"llama2": RAISES, "mistral1": RAISES, "mistral3": RAISES, "gemma": RAISES, "phi3": 0},
    "tool": {"llama2": 1, "mistral1": RAISES, "zephyr": 1, "phi3": 1},
    "function": {"llama2": 1, "mistral1": RAISES, "mistral3": RAISES, "qwen3": 1, "zephyr": 1, "phi3": 1},
    "calls": {
        **dict.fromkeys(("chatml", "zephyr", "phi3", "gpt-oss"), 1),
        **dict.fromkeys(("llama2", "mistral1", "gemma"), RAISES),
    },
    "calls and text": {
        **dict.fromkeys(("chatml", "zephyr", "phi3", "gpt-oss", "llama3", "mistral3"), 1),
        **dict.fromkeys(("llama2", "mistral1", "gemma"), RAISES),
    },
    "unknown": dict.fromkeys(TEMPLATES, UNKNOWN),
    "own role": {**dict.fromkeys(TEMPLATES, UNKNOWN), "gpt-oss": None},
    "blank": {"mistral1": RAISES, "gemma": RAISES},
    "padded": SYSTEM,
    "thoughts": {},
}


@pytest.mark.parametrize("documents", [None, ["a document"]], ids=["plain", "documents"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_message_is_rendered_or_an_error(tokenizer, template, conversation, documents):
    tokenizer.chat_template = TEMPLATES[template]
    messages = CONVERSATIONS[conversation]
    parser = PromptParser(tokenizer, separator=" # # ", strategy="shared", chunk_aware=True)
    expected = EXCEPTIONS[conversation].get(template)
    if expected is None:
        text = parser.parse_chat(messages, documents).text
        for message in messages:
            kept = (message["content"] or "").partition("</think>")[2] or message["content"] or ""
            assert kept.strip() in text
        assert "Hm." not in text or template != "qwen3"
        return
    with pytest.raises(RequestError) as caught:
        parser.parse_chat(messages, documents)
    assert caught.value.param == "messages"
    assert isinstance(caught.value, NotRenderedError) is isinstance(expected, int)
    if expected == UNKNOWN:
        assert "unknown role" in str(caught.value)
    elif expected == RAISES:
        assert str(caught.value).startswith("the chat template failed: ")
    else:
        assert f"message {expected} ({messages[expected]['role']})" in str(caught.value)


def chat_text(tokenizer, template, messages, **options):
    tokenizer.chat_template = template
    parser = PromptParser(tokenizer, separator=" # # ", strategy="shared", chunk_aware=True)
    return parser.parse_chat(messages, **options).text


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("last", ["user Bye now.", "user  Bye. "])
def test_the_last_question_begins_where_its_text_does(tokenizer, template, last):
    """Each token is a byte here."""
    tokenizer.chat_template = TEMPLATES[template]
    parser = PromptParser(tokenizer, separator=" # # ", strategy="shared", chunk_aware=True)
    prompt = parser.parse_chat(said("user Hello.", "assistant Hi.", last), ["A document."], focus=1)
    question = prompt.layout.part(prompt.layout.segments[-1])
    assert tokenizer.decode(question[prompt.history_len :]).lstrip().startswith(last.removeprefix("user").strip())
    assert parser.parse_chat(said(last), ["A document."], focus=1).history_len == 0


def test_a_last_question_that_the_template_moves_has_no_beginning(tokenizer):
    turns = "{% for m in messages[::-1] if m['role'] == 'user' %}{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
    tokenizer.chat_template = turns + "{% for m in messages[1:] %}{{ m['content'] | length }}{{ m['content'] }}{% endfor %}"
    parser = PromptParser(tokenizer, separator=" # # ", strategy="shared", chunk_aware=True)
    assert parser.parse_chat(said("user Hello.", "assistant Hi.", "user Bye."), ["A document."], focus=1).history_len == 0


@pytest.mark.parametrize("template", ["llama3", "mistral3", "qwen3"])
@pytest.mark.parametrize("arguments", ['{"who": "Ana", "n": 2}', {"who": "Ana", "n": 2}], ids=["text", "mapping"])
def test_arguments_of_calls_are_objects_in_the_prompt(tokenizer, template, arguments):
    messages = [CALLS[0], {**CALLS[1], "tool_calls": [call(arguments=arguments)]}, *CALLS[2:]]
    text = chat_text(tokenizer, TEMPLATES[template], messages)
    assert '{"who": "Ana", "n": 2}' in text
    assert text.index("Where is Ana?") < text.index('"find"') < text.index("in Oslo")
    messages[1].pop("content")
    assert chat_text(tokenizer, TEMPLATES[template], messages) == text
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(None, "{}"), ("", "{}"), ("{", "{"), ("[1]", "[1]"), ("[" * 100_000, "[[[["), ('{"a": ' * 400 + "1" + "}" * 400, '"a"')],
    ids=["null", "empty", "cut", "list", "deep", "nested"],
)
def test_arguments_that_are_no_object_stay_as_they_are(tokenizer, arguments, expected):
    messages = [CALLS[0], {**CALLS[1], "tool_calls": [call(arguments=arguments)]}, *CALLS[2:]]
    assert f'"arguments": {expected}' in chat_text(tokenizer, TEMPLATES["qwen3"], messages).replace('{"a": ' * 400, '"a"')


def test_empty_calls_are_no_calls(tokenizer):
    messages = said("user Hello.", "assistant Hi.", "user Bye.")
    expected = chat_text(tokenizer, TEMPLATES["mistral3"], messages)
    messages[1]["tool_calls"] = []
    assert chat_text(tokenizer, TEMPLATES["mistral3"], messages) == expected


def test_a_developer_is_the_system_where_the_template_names_none(tokenizer):
    for name in ("chatml", "llama3", "qwen3", "zephyr", "llama2"):
        texts = [chat_text(tokenizer, TEMPLATES[name], CONVERSATIONS[role]) for role in ("system", "developer")]
        assert texts[0] == texts[1], name
    named = "{% for m in messages %}[{{ 'D' if m.role == 'developer' else m.role }}]{{ m.content }}{% endfor %}"
    assert chat_text(tokenizer, named, CONVERSATIONS["developer"]) == "[D]Be kind.[user]Hello."
    # The template of the call counts.
    assert chat_text(tokenizer, named, CONVERSATIONS["developer"], chat_template=TEMPLATES["chatml"]).startswith(
        "<|im_start|>system"
    )


FOR_ALL = "{% for m in messages %}[{{ m.role }}]{{ CONTENT }}{% endfor %}"


@pytest.mark.parametrize(
    ("content", "message", "lost"),
    [
        ("m.content", "anything", None),
        ("m.content | trim", "  padded ", None),
        ("m.content | upper", "changed in place", None),
        ("m.content | tojson", 'quoted "text"\n', None),
        ("m.content.replace('/no_think', '')", "x /no_think y", None),
        ("m.content if m.content.endswith('>') else ''", "<all>", None),
        ("m.content if m.content.startswith('<') else ''", "<all>", None),
        ("m.content[:4]", "longer than that", "message 1"),
        ("m.content[-4:]", "longer than that", "message 1"),
        ("m.content.split('#')[0]", "x#y", "all of message 1"),
        ("m.content.split('</think>')[-1]", "x</think>y", "all of message 1"),
        ("'' if 'secret' in m.content else m.content", "a secret", "message 1"),
        ("'Hello.'", "Hello.", "message 1"),
    ],
)
def test_contents_are_rendered_whole(tokenizer, content, message, lost):
    """Contents of tools. Only an assistant may lose its beginning, and text that stands elsewhere too counts for nothing."""
    template = FOR_ALL.replace("CONTENT", f"m.content if m.role == 'user' else ({content})")
    messages = [*said("user Hello."), {"role": "tool", "content": message}, *said("user Hello.")]
    if lost is None:
        chat_text(tokenizer, template, messages)
        return
    with pytest.raises(NotRenderedError, match=f"does not render {lost} "):
        chat_text(tokenizer, template, messages)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user"}, "content of message 1 .user. must be a string or a list of text parts, got NoneType"),
        ({"role": "assistant", "content": None}, "content of message 1 .assistant. must be a string"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "must be a string or a list of text parts, got list"),
        ({"role": "user", "content": "x", "tool_calls": [call()]}, "tool_calls of message 1 .user. belong to assistant"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls of message 1 .assistant. must be a list"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "entry in the tool_calls of message 1 .assistant. must be"),
        ({"role": "assistant", "tool_calls": [call(name="")]}, "entry in the tool_calls of message 1 .assistant. must be"),
        ({"role": None, "content": "x"}, "unknown role 'None'"),
        ({"content": "x"}, "unknown role 'None'"),
    ],
)
def test_malformed_messages(tokenizer, message, reason):
    with pytest.raises(RequestError, match=reason) as caught:
        chat_text(tokenizer, TEMPLATES["qwen3"], [*said("user Hello."), message])
    assert caught.value.param == "messages"


def test_text_parts_are_one_text(tokenizer):
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " you."}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    expected = said("system Hello you.", "user Hello you.")
    assert chat_text(tokenizer, TEMPLATES["llama3"], messages) == chat_text(tokenizer, TEMPLATES["llama3"], expected)


def test_a_stored_prefix_is_checked_too(tokenizer):
    tokenizer.chat_template = TEMPLATES["phi3"]
    parser = PromptParser(tokenizer, separator=" # # ", strategy="shared", chunk_aware=True)
    with pytest.raises(NotRenderedError, match=r"message 0 .system."):
        parser.parse_cache(said("system Be kind."), ["a document"])


def test_deeply_nested_arguments_of_untrusted_messages(tokenizer):
    deep = json.loads('{"a": ' * 900 + "1" + "}" * 900)
    messages = [CALLS[0], {**CALLS[1], "tool_calls": [call(arguments=deep)]}, *CALLS[2:]]
    tokenizer.chat_template = TEMPLATES["qwen3"]
    parser = PromptParser(tokenizer, separator=" # # ", strategy="shared", chunk_aware=True, special_tokens_in_prompts=False)
    with pytest.raises(RequestError, match=r"nested too deeply|template failed"):
        parser.parse_chat(messages)
