"""`ChunkRenderer` over vLLM's own renderer, without an engine."""

import asyncio
import base64
import io
import threading
from pathlib import Path

import pytest
import torch
from vllm import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

from chunkattn.integrations.vllm.chunk_options import ChunkOptions
from chunkattn.integrations.vllm.endpoints import ChunkChatRequest, ChunkCompletionRequest
from chunkattn.integrations.vllm.engine_client import ChunkedInput
from chunkattn.integrations.vllm.rendering import ChunkRenderer

DEMO = Path(__file__).parents[2] / "chunkattn" / "models" / "demo"
DOCUMENTS = ["Zenuso lives in Kirora.", "Lezudo has a house in Pegelu."]
QUESTION = "Where does Lezudo live?"
MESSAGES = [{"role": "user", "content": QUESTION}]
TEMPLATE = """
{%- macro text(content) -%}
{%- if content is string %}{{ content }}{% else %}{% for part in content %}{{ part.text }}{% endfor %}{% endif -%}
{%- endmacro -%}
{%- for document in documents or [] %}<{{ document.text }}>{% endfor -%}
{%- for message in messages -%}
[{{ message.role }}{% if message.reasoning_content %} thinks {{ message.reasoning_content }}{% endif -%}
{%- for call in message.tool_calls or [] %} calls {{ call.function.name }}{{ call.function.arguments.place }}{% endfor -%}
] {{ text(message.content) }}
{% endfor -%}
{%- if add_generation_prompt %}[assistant] {% endif -%}
"""


@pytest.fixture(scope="module")
def config():
    return EngineArgs(model=str(DEMO), dtype="float32", max_model_len=512, enable_prompt_embeds=False).create_engine_config()


@pytest.fixture(scope="module")
def inner(config):
    return renderer_from_config(config)


@pytest.fixture
def make(config, inner):
    def get(content_format="auto", **options):
        outer = OnlineRenderer(
            config.model_config,
            inner,
            request_logger=None,
            chat_template=TEMPLATE,
            chat_template_content_format=content_format,
            enable_auto_tools=True,
        )
        return ChunkRenderer(outer, ChunkOptions(**options).parser(inner.get_tokenizer()))

    return get


def chat(renderer, messages=MESSAGES, documents=DOCUMENTS, **fields):
    request = ChunkChatRequest(model="demo", messages=messages, documents=documents, **fields)
    _, (rendered,) = asyncio.run(renderer.render_chat(request))
    return rendered


def complete(renderer, **fields):
    return asyncio.run(renderer.render_completion(ChunkCompletionRequest(model="demo", **fields)))


def test_a_conversation_is_the_one_that_vllm_normalises(make):
    call = {"id": "1", "type": "function", "function": {"name": "visit", "arguments": '{"place": "Pegelu"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "reasoning": "of houses", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a house"}]},
    ]
    prompt = chat(make(), messages)
    assert isinstance(prompt, ChunkedInput)
    assert "[assistant thinks of houses calls visitPegelu]" in prompt["prompt"]
    assert prompt["prompt"].endswith("[tool] a house\n[assistant] ")


@pytest.mark.parametrize(("content_format", "expected"), [("openai", "Where? Here?"), ("string", "Where?\n Here?")])
def test_parts_of_a_text_are_joined_as_the_template_joins_them(make, content_format, expected):
    parts = [{"type": "text", "text": "Where?"}, {"type": "text", "text": " Here?"}]
    prompt = chat(make(content_format), [{"role": "user", "content": parts}])
    assert prompt["prompt"].endswith(f"{expected}\n[assistant] ")


def test_documents_of_the_template_go_without_chunks(make):
    variables = {"documents": [{"text": "one"}]}
    assert chat(make(), documents=None, chat_template_kwargs=variables)["prompt"].startswith("<one>")
    with pytest.raises(VLLMValidationError, match="chat_template_kwargs cannot hold documents"):
        chat(make(), chat_template_kwargs=variables)


def test_special_tokens_of_a_chat_are_refused(make):
    with pytest.raises(VLLMValidationError, match="add_special_tokens is not offered"):
        chat(make(), add_special_tokens=True)


def test_chunks_without_documents_are_answered(make):
    (prompt,) = complete(make(), chunks={"documents": [], "question": QUESTION})
    assert prompt["prompt"] == QUESTION
    assert len(prompt["prompt_token_ids"]) > 1


def test_embeddings_alone_are_vllms(make, config, inner, monkeypatch):
    monkeypatch.setattr(config.model_config, "enable_prompt_embeds", True)
    buffer = io.BytesIO()
    torch.save(torch.zeros(3, config.model_config.get_hidden_size()), buffer)
    (prompt,) = complete(make(enable_chunk_aware=True), prompt_embeds=base64.b64encode(buffer.getvalue()))
    assert prompt["type"] == "embeds"


def test_a_plain_text_is_not_parsed(make, monkeypatch):
    renderer = make(enable_chunk_aware=True)
    monkeypatch.setattr(renderer._parser, "parse", None)
    (prompt,) = complete(renderer, prompt="one # # two")
    assert prompt["prompt"] == "one # # two"


def test_prompts_are_parsed_beside_the_event_loop(make, monkeypatch):
    renderer, threads = make(enable_chunk_aware=True), []
    parse, parse_chat = renderer._parser.parse, renderer._parser.parse_chat

    def note(function):
        def call(*arguments, **options):
            threads.append(threading.current_thread())
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(renderer._parser, "parse", note(parse))
    monkeypatch.setattr(renderer._parser, "parse_chat", note(parse_chat))
    complete(renderer, prompt="one # # two # # three")
    chat(renderer)
    assert len(threads) == 3
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([{"text": 1}], "documents.0.text: Input should be a valid string"),
        ([{"body": "x"}], "documents.0: .*not permitted"),
        (["x", [1, "y"]], "documents.1.1: Input should be a valid integer"),
        ([1], "documents.0: Input should be a valid string or Input should be a valid list"),
        ([{"title": "x"}], "documents: entry 0 needs a text"),
    ],
)
def test_an_error_is_about_the_form_that_was_sent(make, documents, message):
    with pytest.raises(VLLMValidationError, match=message):
        chat(make(), documents=documents)
    with pytest.raises(VLLMValidationError, match=message.replace("documents", "chunks.documents", 1)):
        complete(make(), chunks={"documents": documents, "question": "x"})


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_focus_and_joined_documents_are_refused_by_name(make, documents):
    renderer = make(enable_chunk_aware=True)
    chat = ChunkChatRequest(messages=MESSAGES, documents=documents, focus=1)
    with pytest.raises(VLLMValidationError, match="focus is not offered") as refusal:
        asyncio.run(renderer.render_chat(chat))
    assert refusal.value.parameter == "focus"
    for body in ({"prompt": "Read. # # a # # b # # c?"}, {"chunks": {"documents": DOCUMENTS, "question": QUESTION}}):
        with pytest.raises(VLLMValidationError, match="focus is not offered"):
            asyncio.run(renderer.render_completion(ChunkCompletionRequest(**body, focus={"top_n": 1})))
        with pytest.raises(VLLMValidationError, match="chunk_mode is not offered"):
            asyncio.run(renderer.render_completion(ChunkCompletionRequest(**body, chunk_mode="joined")))
