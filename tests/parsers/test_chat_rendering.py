"""Chat templates of every kind: what a conversation is rendered to, and when. transformers is the witness."""

import datetime as dates

import pytest
from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from chunkattn.config import EngineConfig
from chunkattn.errors import ConfigError, RequestError
from chunkattn.models.loader import open_files
from chunkattn.parsers import PromptParser, chat_template
from chunkattn.parsers.arguments import chat_options
from chunkattn.parsers.chat_template import own_template
from chunkattn.parsers.encode import PartEncoder, PlainEncoder
from chunkattn.parsers.states import StateTemplate
from tests.chat_templates import CHATML, TEMPLATES, byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer("<|end|>")


def said(*texts):
    """Messages of `role text`."""
    return [{"role": text.split()[0], "content": text.partition(" ")[2]} for text in texts]


def parser(tokenizer, template):
    tokenizer.chat_template = template
    return PromptParser(tokenizer, separator=" # # ", strategy="shared", chunk_aware=True)


def rendered(tokenizer, template, messages, documents=None, **options):
    """Text of a chat without its documents."""
    parsed = parser(tokenizer, template).parse_chat(messages, documents, **options)
    if not documents:
        return parsed.text
    return tokenizer.decode([t for s in parsed.layout.segments if s.chunk_id < 0 for t in parsed.layout.part(s)])


def witness(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **options})


DOCUMENTS = pytest.mark.parametrize("documents", [None, ["A document."]], ids=["plain", "documents"])

# The clock

FIRST = dates.datetime(2026, 3, 5, 23, 59, 59, 999_950)
BODY = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CLOCKS = {
    **{
        format: f"{{{{ strftime_now('{format}') }}}} {BODY}"
        for format in ("%f", "%S", "%H:%M", "%d %b %Y", "%-d", "%%%d", "5%")
    },
    "several": "{{ strftime_now('%A, %B %d') }} {{ strftime_now(\"%Y-%m-%dT%H:%M:%S.%f\") }}" + BODY,
    "width": "{{ strftime_now('%010Y %^a') }}" + BODY,
    "behind": BODY + "{{ strftime_now('%f') }}",
    "each message": "{% for m in messages %}[{{ strftime_now('%S.%f') }} {{ m.role }}]{{ m.content }}{% endfor %}",
    "by keyword": "{{ strftime_now(format='%f') }}" + BODY,
    "computed": "{% set form = '%H' ~ ':%' ~ 'M:%S.' ~ ('%' ~ 'f') ~ ' %-d %%' %}{{ strftime_now(form) }}" + BODY,
    "another name": "{% set clock = strftime_now %}{{ clock('%f') }}" + BODY,
    "in a macro": "{% macro date() %}{{ strftime_now('%f') }}{% endmacro %}{{ date() }}" + BODY,
    "as a number": "{% if strftime_now('%Y') | int > 2000 %}{{ strftime_now('%f') | int + 1 }}{% endif %}" + BODY,
    "if defined": "{% if strftime_now is defined %}{{ strftime_now('%f') }}{% else %}no clock{% endif %}" + BODY,
    "white space": "  {%- if true %}\n{{ strftime_now('%f') }}\n  {% endif %}\n" + BODY,
    "a first line": "\n  {% if true %}\n{{ strftime_now('%f') }}{% endif %}" + BODY,
}


class Clock(dates.datetime):
    """A clock that goes on by 60 us at each look, over the end of the day."""

    looks = 0

    @classmethod
    def now(cls, tz=None):
        cls.looks += 1
        return FIRST + dates.timedelta(microseconds=60 * (cls.looks - 1))


class Stopped(dates.datetime):
    @classmethod
    def now(cls, tz=None):
        return FIRST


@DOCUMENTS
@pytest.mark.parametrize("template", CLOCKS)
def test_a_chat_shows_one_time(tokenizer, template, documents, monkeypatch):
    """However often it is rendered to find the messages in it."""
    messages = said("system Be kind.", "user Hello.", "assistant Hi.", "user <|end|>Bye.")
    tokenizer.chat_template = CLOCKS[template]
    with monkeypatch.context() as stopped:
        stopped.setattr(chat_template_utils, "datetime", Stopped)
        expected = witness(tokenizer, messages)
    Clock.looks = 0
    for module in (chat_template_utils, chat_template):
        monkeypatch.setattr(module, "datetime", Clock)
    assert rendered(tokenizer, CLOCKS[template], messages, documents) == expected
    assert "no clock" not in expected


def test_a_decision_shows_a_fixed_time(tokenizer):
    """A format that the template computes is no exception."""
    tokenizer.chat_template = "{{ strftime_now('%Y' ~ '-%m-%d') }} {{ strftime_now('%H:%M:%S.%f') }}" + BODY
    before = StateTemplate(PlainEncoder(PartEncoder(tokenizer))).before
    assert before == "2024-07-26 00:00:00.000000[user]"


def test_a_decision_is_rendered_in_the_form_that_the_template_reads(tokenizer):
    plain = PlainEncoder(PartEncoder(tokenizer))
    tokenizer.chat_template = PARTS_ONLY
    made = StateTemplate(plain, "Be kind.")
    assert (made.before, made.after) == ("[system](Be kind.)[user](", ")[assistant]")
    tokenizer.chat_template = EITHER
    assert StateTemplate(plain, "Be kind.").before == "[system]Be kind.[user]"


# Contents

PARTS_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m['content'] %}{% if part['type'] == 'text' %}({{ part['text'] }})"
    "{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
EITHER = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "({{ part.text | trim }}){% endfor %}{% endif %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.content is string %}{{ raise_exception('no strings') }}{% endif %}[{{ m.role }}]"
    "{{ m.content | map(attribute='text') | join('|') }}{% endfor %}"
)
SYSTEM_STRING = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '!' }}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }};{% endfor %}{% endfor %}"
)
ALL = ("system", "developer", "user", "assistant", "tool", "critic")
# Templates, and the forms in which they read the contents of each role.
SHAPES = {
    "chatml": (CHATML.replace("<|im_start|>", "'critic'"), dict.fromkeys(ALL, "string")),
    "json": (
        "{% for m in messages %}{{ m.role }}{{ m.content | tojson }}{% endfor %}critic'critic'",
        dict.fromkeys(ALL, "string"),
    ),
    "parts only": (PARTS_ONLY + "'critic'", dict.fromkeys(ALL, "parts")),
    "first part": (
        "{% for m in messages %}{{ m.role }}{{ m.content[0].text }}{% endfor %}'critic'",
        dict.fromkeys(ALL, "parts"),
    ),
    "either": (EITHER + "'critic'", dict.fromkeys(ALL, "either")),
    "strict": (STRICT + "'critic'", dict.fromkeys(ALL, "parts")),
    "system is a string": (
        SYSTEM_STRING + "'critic'",
        dict.fromkeys(ALL, "parts") | {"system": "string", "developer": "string"},
    ),
}


def part(text):
    return {"type": "text", "text": text}


CONTENTS = {
    "string": "Be kind. ",
    "part": [part("Be kind. ")],
    "parts": [part("Be "), part("kind."), part("")],
    "empty": "",
    "no parts": [],
}


def shaped(content, form):
    """The content as a template is to get it."""
    texts = [content] if isinstance(content, str) else [p["text"] for p in content]
    if form == "string" or (form == "either" and not texts):
        return "".join(texts)
    return content if form == "either" or (texts and not isinstance(content, str)) else [part("".join(texts))]


@DOCUMENTS
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("template", SHAPES)
def test_contents_have_the_form_that_the_template_reads(tokenizer, template, content, documents):
    source, forms = SHAPES[template]
    for role in ALL:
        first = [] if role in ("user", "system", "developer") else said("user Hello.")
        given = [*first, {"role": role, "content": CONTENTS[content]}, *said("user Bye.")]
        reads = [m | {"role": m["role"].replace("developer", "system")} for m in given]
        tokenizer.chat_template = source
        read = [m | {"content": shaped(m["content"], forms[m["role"]])} for m in reads]
        if template == "first part" and len(CONTENTS[content]) == 3:  # it shows one part, so the others are lost
            with pytest.raises(RequestError, match="does not render all of message"):
                rendered(tokenizer, source, given, documents)
            continue
        assert rendered(tokenizer, source, given, documents) == witness(tokenizer, read), role


def test_variables_of_one_request_decide_nothing_for_others(tokenizer):
    """The first request has the template raise an exception."""
    template = "{% if wrong %}{{ raise_exception('wrong') }}{% endif %}" + PARTS_ONLY
    with pytest.raises(RequestError, match="wrong"):
        rendered(tokenizer, template, said("user Hello."), wrong=True)
    assert rendered(tokenizer, template, said("user Hello.")) == "[user](Hello.)[assistant]"


def test_control_tokens_in_parts_stay_text(tokenizer):
    """Each token is a byte here, but for the control token."""
    control = tokenizer.convert_tokens_to_ids("<|end|>")
    content = [part("a<|end|>"), part("<|end|>b")]
    template = PARTS_ONLY.replace("[{{ m.role }}]", "<|end|>")
    for documents in (None, ["c"]):
        layout = parser(tokenizer, template).parse_chat([{"role": "user", "content": content}], documents).layout
        assert list(layout.token_ids).count(control) == 1
        assert "a<|end|>)(<|end|>b)" in tokenizer.decode(layout.token_ids)


def test_the_question_of_a_focus_is_its_text(tokenizer):
    messages = [{"role": "user", "content": [part("Who "), part("is Ana?")]}]
    assert parser(tokenizer, EITHER).parse_chat(messages, ["c"], focus=1).query == "Who is Ana?"


@pytest.mark.parametrize(
    "content",
    [
        "upper",
        "title",
        "e",
        "trim",
        "tojson",
        "tojson(ensure_ascii=true)",
        "urlencode",
        "replace('x', 'y')",
        "string",
        "indent",
    ],
)
def test_contents_that_a_template_changes_are_found(tokenizer, content):
    template = f"{{% for m in messages %}}<m role='{{{{ m.role }}}}' text=\"{{{{ m.content | {content} }}}}\">{{% endfor %}}"
    for messages in (said('user a "b" <c> é'), said("system Be kind.", "user Hello.", "assistant Hi.", "user  Bye. ")):
        for documents in (None, ["c"]):
            tokenizer.chat_template = template
            assert rendered(tokenizer, template, messages, documents) == witness(tokenizer, messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% if '/think' in messages[0].content %}think{% endif %}[{{ messages[0].content }}]",
        "{{ messages[0].content | length > 40 }}[{{ messages[0].content }}]",
        "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}{{ loop is defined }}[{{ messages[0].content }}]",
    ],
)
def test_the_cut_is_found_where_the_beginning_depends_on_the_content(tokenizer, template):
    messages = said("user What does /think mean, and /no_think?")
    tokenizer.chat_template = template
    parsed = parser(tokenizer, template).parse_chat(messages, ["c"])
    question = parsed.layout.part(parsed.layout.segments[-1])
    assert tokenizer.decode(question) == messages[0]["content"] + "]"
    assert rendered(tokenizer, template, messages, ["c"]) == witness(tokenizer, messages)


# Chats without a user message

WITHOUT_USER = {
    "system": said("system Be kind."),
    "assistant": said("assistant Hi."),
    "both": said("system Be kind.", "assistant Hi."),
    "tool": said("tool Hi."),
}


@pytest.mark.parametrize("conversation", WITHOUT_USER)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_without_a_user_message_is_a_plain_prompt(tokenizer, template, conversation):
    messages = WITHOUT_USER[conversation]
    tokenizer.chat_template = TEMPLATES[template]
    try:
        expected = witness(tokenizer, messages)
    except TemplateError:
        expected = None
    if expected is None or messages[-1]["content"] not in expected or messages[0]["content"] not in expected:
        with pytest.raises(RequestError, match=r"chat template failed|does not render message"):
            rendered(tokenizer, TEMPLATES[template], messages)
    else:
        assert rendered(tokenizer, TEMPLATES[template], messages) == expected
        parsed = parser(tokenizer, TEMPLATES[template]).parse_chat(messages, [])
        assert (parsed.text, parsed.layout.is_plain) == (expected, True)
    with pytest.raises(RequestError, match="no user message"):
        rendered(tokenizer, TEMPLATES[template], messages, ["A document."])


# The last message goes on

LAST = {
    "assistant": said("user Hello.", "assistant I am"),
    "padded": said("user Hello.", "assistant  I am  "),
    "user": said("system Be kind.", "user I am"),
    "parts": [*said("user Hello."), {"role": "assistant", "content": [part("I "), part("am")]}],
    "control": said("user Say <|end|>.", "assistant I am"),
}


@DOCUMENTS
@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("template", [*TEMPLATES, "parts only", "clock"])
def test_the_last_message_goes_on(tokenizer, template, last, documents, monkeypatch):
    source = (
        TEMPLATES.get(template) or {"parts only": PARTS_ONLY, "clock": "{{ strftime_now('%f') }}" + BODY + "<|end|>"}[template]
    )
    tokenizer.chat_template = source
    for module in (chat_template_utils, chat_template):
        monkeypatch.setattr(module, "datetime", Stopped)
    form = "parts" if template == "parts only" else "string"
    messages = [m | {"content": shaped(m["content"], form)} for m in LAST[last]]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    try:
        expected = witness(tokenizer, messages, **options)
    except (TemplateError, ValueError):
        expected = None
    if expected is None or ("system" in messages[0]["role"] and "kind" not in expected):
        with pytest.raises(RequestError, match=r"chat template failed|does not render"):
            rendered(tokenizer, source, LAST[last], documents, continue_final_message=True)
        return
    assert rendered(tokenizer, source, LAST[last], documents, continue_final_message=True) == expected
    assert expected.rstrip(") ").endswith("am")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"variables": {"add_generation_prompt": True}, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template": 5}, "chat_template"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt"),
        ({"continue_final_message": "reasoning_content"}, "continue_final_message"),
        ({"variables": [5]}, "chat_template_kwargs"),
    ],
)
def test_arguments_of_a_chat(options, param):
    with pytest.raises(RequestError) as caught:
        chat_options(options.pop("variables", None), **options)
    assert caught.value.param == param


# Templates of the user's own


def test_a_template_is_a_file_a_name_or_itself(tokenizer, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text(BODY)
    tokenizer.chat_template = {"default": CHATML, "rag": EITHER}
    assert own_template(tokenizer, str(file)) == own_template(tokenizer, BODY) == BODY
    assert own_template(tokenizer, "rag") == EITHER
    for given, reason in (("missing.jinja", "default, rag"), (str(tmp_path), "neither"), ("{% if %}", "fault in line 1")):
        with pytest.raises(ConfigError, match=reason):
            own_template(tokenizer, given)


def test_what_depends_on_the_template_follows_the_option(tmp_path):
    """The tokenizer of the engine's files, and the template of its reranks."""
    sentence = "Judge whether the Document meets the requirements based on the Query and the Instruct provided"
    file = tmp_path / "own.jinja"
    file.write_text(sentence + BODY)
    for own in (str(file), sentence + BODY):
        assert open_files(EngineConfig(chat_template=own)).tokenizer.chat_template == sentence + BODY
    with pytest.raises(ConfigError, match="chat_template needs a tokenizer"):
        open_files(EngineConfig(chat_template=BODY, skip_tokenizer_init=True))
