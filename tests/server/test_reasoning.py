"""Reasoning over HTTP: apart from the content, before shapes, and counted, over an engine that writes a given text."""

import json

import pytest

from tests.server.test_tools import CHAT, USER, answered, body_of, shape, streamed

pytest_plugins = ["tests.told_engine"]
pytestmark = pytest.mark.usefixtures("compiled")

THINKING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)


@pytest.fixture
def thinking(demo, monkeypatch):
    monkeypatch.setattr(demo.tokenizer, "chat_template", THINKING)


def test_reasoning_is_apart_from_the_content(post, says, thinking):
    says("She moved.\n</think>\n\nIn Oslo.")
    message, reason = answered(post, tools=None)
    assert (message["reasoning_content"], message["content"], reason) == ("She moved.", "In Oslo.", "stop")
    message, _, reason = streamed(post, tools=None)
    assert (message["reasoning_content"], message["content"], reason) == ("She moved.", "In Oslo.", "stop")
    message, _ = answered(post, tools=None, include_reasoning=False)
    assert "reasoning_content" not in message
    assert message["content"] == "In Oslo."
    assert not streamed(post, tools=None, include_reasoning=False)[0]["reasoning_content"]


def test_shapes_hold_behind_the_reasoning(post, says, writer, thinking):
    says("She moved.\n</think>\n\n{}")
    asked = {"tools": None, "response_format": {"type": "json_object"}}
    message, _ = answered(post, **asked)
    assert (message["reasoning_content"], message["content"]) == ("She moved.", "{}")
    assert "</think>" in shape(writer).grammar
    answered(post, **asked, chat_template_kwargs={"enable_thinking": False})
    assert shape(writer).json_object


def test_shapes_hold_behind_reasoning_that_the_model_begins(post, says, writer, demo, monkeypatch):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}[assistant]"
    monkeypatch.setattr(demo.tokenizer, "chat_template", template)
    says("<think>She moved.</think>{}")
    message, _ = answered(post, tools=None, response_format={"type": "json_object"})
    assert (message["reasoning_content"], message["content"]) == ("She moved.", "{}")
    assert "<think>" in shape(writer).grammar
    says("She moved.</think>In Oslo.")
    for parser, content in (("qwen3", "She moved.</think>In Oslo."), ("deepseek_r1", "In Oslo.")):
        answer = post(CHAT, body_of(tools=None), reasoning_parser=parser).json()
        assert answer["choices"][0]["message"]["content"].strip() == content


def test_an_answer_goes_on_within_the_reasoning(post, says, thinking, demo, monkeypatch):
    monkeypatch.setattr(demo.tokenizer, "chat_template", "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    says("moved.</think>In Oslo.")
    for said, expected in (("<think>She", ("moved.", "In Oslo.")), ("<think>x</think>She", (None, "moved.</think>In Oslo."))):
        turns = [USER, {"role": "assistant", "content": said}]
        body = body_of(tools=None, messages=turns, continue_final_message=True)
        message = post(CHAT, body, reasoning_parser="qwen3").json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"].strip()) == expected


@pytest.mark.parametrize("has_marker", [False, True])
def test_usage_counts_the_tokens_of_the_reasoning(post, says, writer, thinking, demo, has_marker):
    thought, rest = "She moved.\n</think>", "\n\nIn Oslo."
    says(thought + rest if has_marker else thought[:-8] + rest)
    ids = writer.token_ids
    count = next((n for n in range(len(ids)) if "</think>" in demo.tokenizer.decode(ids[:n])), len(ids))
    assert (count < len(ids)) is has_marker
    answer = post(CHAT, body_of(tools=None, n=2)).json()
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * count}
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = post(CHAT, body_of(tools=None, stream=True, stream_options=options)).text
    usages = [json.loads(line.removeprefix("data: "))["usage"] for line in text.splitlines() if line.startswith("data: {")]
    assert usages[-1]["completion_tokens_details"] == {"reasoning_tokens": count}
    asked = {"input": "Where?", "max_output_tokens": 200}
    usage = post("/v1/responses", asked).json()["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": count}
    usage = post("/v1/messages", {"messages": [USER], "max_tokens": 200}).json()["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": count}
    off = body_of(tools=None, chat_template_kwargs={"enable_thinking": False})
    assert post(CHAT, off).json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_shapes_hold_for_answers_without_calls(post, says, writer):
    says("{}")
    for choice, has_shape, has_calls in (("auto", True, True), ("required", False, True), ("none", True, False)):
        answered(post, response_format={"type": "json_object"}, tool_choice=choice)
        found = shape(writer)
        assert ("%lark" in (found.grammar or "") or found.json_object) is has_shape
        assert ("<tool_call>" in (found.grammar or "")) is has_calls


def test_templates_turn_reasoning_off(post, says, thinking):
    says("In Oslo.")
    message, _ = answered(post, tools=None, chat_template_kwargs={"enable_thinking": False})
    assert (message["content"].strip(), "reasoning_content" in message) == ("In Oslo.", False)
    message, _ = answered(post, tools=None)
    assert (message["content"], message["reasoning_content"]) == ("", "In Oslo.")


def test_reasoning_stays_in_the_text_without_a_parser(post, says, thinking):
    says("She moved.\n</think>\n\nIn Oslo.")
    answer = post(CHAT, body_of(tools=None), reasoning_parser="none")
    assert "</think>" in answer.json()["choices"][0]["message"]["content"]
