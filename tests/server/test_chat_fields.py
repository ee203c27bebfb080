"""Fields that decide how a chat is rendered: over HTTP, in Python, and at `/tokenize`."""

import inspect
import json
from typing import get_args

import pytest
from openai.types.shared import ReasoningEffort
from transformers import PreTrainedTokenizerBase

from chunkattn.errors import RequestError
from chunkattn.parsers import PromptParser

pytest_plugins = ["tests.told_engine"]

CHAT = "/v1/chat/completions"
USER, SYSTEM, BEGUN = (
    {"role": "user", "content": "Where is Ana?"},
    {"role": "system", "content": "Be kind."},
    {"role": "assistant", "content": "Ana is"},
)
TEMPLATE = (
    "{{ reasoning_effort }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def template(demo, monkeypatch):
    monkeypatch.setattr(demo.tokenizer, "chat_template", TEMPLATE)


def squeezed(text):
    return text.replace(" ", "")


def sent(post, writer, demo, body, **options):
    """Text of the prompt that the engine gets."""
    answer = post(CHAT, {"max_tokens": 2, **body}, **options)
    assert answer.status_code == 200, answer.text
    return squeezed(demo.tokenizer.decode(writer.requests[-1].layout.token_ids))


PROMPTS = [
    ({"messages": [USER]}, "[user]Where is Ana?[assistant]"),
    ({"messages": [USER], "add_generation_prompt": False}, "[user]Where is Ana?"),
    ({"messages": [USER, BEGUN], "continue_final_message": True}, "[user]Where is Ana?[assistant]Ana is"),
    (
        {"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": False},
        "[user]Where is Ana?[assistant]Ana is",
    ),
    ({"messages": [USER, BEGUN], "continue_final_message": False}, "[user]Where is Ana?[assistant]Ana is[assistant]"),
    ({"messages": [USER], "continue_final_message": True}, "[user]Where is Ana?"),
    ({"messages": [SYSTEM]}, "[system]Be kind.[assistant]"),
    ({"messages": [BEGUN], "continue_final_message": True}, "[assistant]Ana is"),
    ({"messages": [USER], "reasoning_effort": "high"}, "high[user]Where is Ana?[assistant]"),
    ({"messages": [USER], "chat_template_kwargs": {"reasoning_effort": "odd"}}, "odd[user]Where is Ana?[assistant]"),
    (
        {"messages": [USER], "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}},
        "low[user]Where is Ana?[assistant]",
    ),
]


@pytest.mark.parametrize(("body", "expected"), PROMPTS)
def test_prompts(post, writer, demo, template, body, expected):
    assert sent(post, writer, demo, body) == squeezed(expected)
    tokens = post("/tokenize", body).json()["tokens"]
    assert tokens == [*writer.requests[-1].layout.token_ids]
    effort = body.get("reasoning_effort")
    variables = {**body.get("chat_template_kwargs", {}), **({"reasoning_effort": effort} if effort else {})}
    names = ("add_generation_prompt", "continue_final_message")
    options = {name: body[name] for name in names if name in body} | {"chat_template_kwargs": variables}
    (parsed,) = demo.frontend.parse_chat(body["messages"], None, variables | {n: body[n] for n in names if n in body})
    assert [*parsed.layout.token_ids] == tokens
    if body == PROMPTS[2][0]:
        (output,) = demo.chat(body["messages"], **options)
        assert output.prompt_token_ids == tokens


def test_documents_stand_before_a_continued_answer(post, writer, demo, template):
    body = {"messages": [SYSTEM, USER, BEGUN], "documents": ["Ana is in Oslo."], "continue_final_message": True}
    text = sent(post, writer, demo, body)
    assert text.startswith("[system]Bekind.[user]")
    assert text.endswith("WhereisAna?[assistant]Anais")
    assert writer.requests[-1].layout.num_chunks == 1


REFUSED = [
    ({"messages": []}, "messages"),
    ({"messages": [SYSTEM], "documents": ["x"]}, "messages"),
    ({"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": [USER], "continue_final_message": "yes"}, "continue_final_message"),
    ({"messages": [USER], "reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"messages": [USER], "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort"),
    ({"messages": [USER], "echo": 1}, "echo"),
    ({"messages": [USER], "seed": 1.5}, "seed"),
    ({"messages": [USER], "seed": 2**63}, "seed"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
def test_refused(post, writer, template, body, param):
    for stream in ({}, {"stream": True}):
        answer = post(CHAT, body | stream)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
    assert not writer.requests


@pytest.mark.parametrize("call", [PreTrainedTokenizerBase.apply_chat_template, PromptParser.parse_chat, PromptParser._pieces])
def test_arguments_are_no_variables(post, template, call):
    """Names of arguments of the calls that render a template are refused; all other names are variables."""
    names = [name for name, p in inspect.signature(call).parameters.items() if p.kind != p.VAR_KEYWORD]
    for name in names:
        error = post(CHAT, {"messages": [USER], "chat_template_kwargs": {name: True}}).json().get("error")
        assert error is None if name in ("param", "is_cut", "with_history") else error["param"] == "chat_template_kwargs", name
    for name in ("control", "is_trusted", "now", "strftime_now", "chunkattn_times", "loop", "caller", "kwargs", "args"):
        assert post(CHAT, {"messages": [USER], "chat_template_kwargs": {name: True}, "max_tokens": 2}).status_code == 200, name


def test_every_effort_of_openai(post, writer, demo, template):
    efforts = [value for kind in get_args(ReasoningEffort) for value in get_args(kind)]
    assert "high" in efforts
    for effort in (*efforts, None):
        text = sent(post, writer, demo, {"messages": [USER], "reasoning_effort": effort})
        assert text.startswith(f"{effort or ''}[user]")


def test_an_effort_that_the_template_does_not_read(post, writer, demo, monkeypatch):
    monkeypatch.setattr(demo.tokenizer, "chat_template", TEMPLATE.removeprefix("{{ reasoning_effort }}"))
    plain, asked = (sent(post, writer, demo, {"messages": [USER]} | own) for own in ({}, {"reasoning_effort": "high"}))
    assert plain == asked


@pytest.mark.parametrize("last", [BEGUN, {**BEGUN, "content": [{"type": "text", "text": t} for t in ("Ana", " is")]}, USER])
@pytest.mark.parametrize("goes_on", [True, False])
def test_echo_repeats_an_assistant_s_last_message(post, writer, template, last, goes_on):
    body = {"messages": [USER, last], "max_tokens": 2, "continue_final_message": goes_on, "n": 2}
    plain = [choice["message"]["content"] for choice in post(CHAT, body).json()["choices"]]
    begun = "" if last is USER else "Ana is"
    answer = post(CHAT, body | {"echo": True}).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [begun + text for text in plain]
    events = post(CHAT, body | {"echo": True, "stream": True}).text.split("\n\n")
    texts = ["", ""]
    for event in events[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [begun + text for text in plain]


def test_seeds(post, writer):
    for seed in (-1, 0, 7, -7, 2**63 - 1, -(2**63), None):
        for path, body in ((CHAT, {"messages": [USER]}), ("/v1/completions", {"prompt": "x"})):
            assert post(path, body | {"max_tokens": 2, "seed": seed}).status_code == 200
            assert writer.requests[-1].sampling.seed == (None if seed == -1 else seed)


def test_chat_in_python(demo, tmp_path):
    """Without a user message, with a template of the caller's, and to its end."""
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE.replace("[{{ m.role }}]", "<{{ m.role }}>"))
    for own in (str(file), file.read_text()):
        (output,) = demo.chat([SYSTEM, BEGUN], chat_template=own, continue_final_message=True)
        assert squeezed(output.prompt) == "<system>Bekind.<assistant>Anais"
    with pytest.raises(RequestError, match="neither") as caught:
        demo.chat([USER], chat_template="missing.jinja")
    assert caught.value.param == "chat_template"
    with pytest.raises(RequestError, match="no user message"):
        demo.chat([SYSTEM], documents=["x"])
