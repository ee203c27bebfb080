"""Chats and completions by the clients of others, each with its defaults."""

import pytest

MODEL = "chunkattn-demo"
TEXTS = ["Read the notes.", "Ana lives in Oslo. Where does Ana live?"]
MESSAGES = [{"role": "system", "content": TEXTS[0]}, {"role": "user", "content": TEXTS[1]}]
PROMPT = "Ana lives in Oslo. Where does Ana live? Answer:"


@pytest.fixture(scope="module")
def chat(post):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    answer = post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"]
    return answer


@pytest.fixture(scope="module")
def content(chat):
    return chat["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def completion(post):
    return post("/v1/completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": 12})["choices"][0]["text"]


def test_openai(server, content, completion):
    import openai

    client = openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=12)
    assert answer.choices[0].message.content == content
    stream = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=12, stream=True)
    assert "".join(event.choices[0].text for event in stream) == completion


def test_openai_responses(server, content):
    import openai

    client = openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0)
    items = [MESSAGES[1]]
    options = {"model": MODEL, "instructions": TEXTS[0], "temperature": 0, "max_output_tokens": 12}
    assert client.responses.create(input=items, **options).output_text == content
    with client.responses.stream(input=items, **options) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == content


def test_anthropic(server, chat, content):
    import anthropic

    client = anthropic.Anthropic(base_url=server, api_key="none", max_retries=0)
    options = {"model": MODEL, "system": TEXTS[0], "messages": [MESSAGES[1]], "max_tokens": 12}
    options["extra_body"] = {"temperature": 0}
    message = client.messages.create(**options)
    assert message.content[0].text == content
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    with client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == content
        assert stream.get_final_message().usage.output_tokens == chat["usage"]["completion_tokens"]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**options | {"max_tokens": 0})


def test_langchain(server, chat, content):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=server + "/v1", api_key="none", max_retries=0, temperature=0, max_tokens=12)
    messages = [(m["role"], m["content"]) for m in MESSAGES]
    answer = model.invoke(messages)
    assert answer.content == content
    assert answer.usage_metadata["output_tokens"] == chat["usage"]["completion_tokens"]
    assert "".join(part.content for part in model.stream(messages)) == content
    assert [a.content for a in model.batch([messages, messages])] == [content, content]


def test_langchain_completes(server, completion):
    from langchain_openai import OpenAI

    model = OpenAI(base_url=server + "/v1", api_key="none", model=MODEL, max_retries=0, temperature=0, max_tokens=12)
    assert model.invoke(PROMPT) == completion


def test_llama_index(server, content, completion):
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    options = {"model": MODEL, "api_base": server + "/v1", "api_key": "none", "temperature": 0, "max_tokens": 12}
    messages = [ChatMessage(role=m["role"], content=m["content"]) for m in MESSAGES]
    model = OpenAILike(is_chat_model=True, max_retries=0, **options)
    assert model.chat(messages).message.content == content
    assert [*model.stream_chat(messages)][-1].message.content == content
    assert OpenAILike(max_retries=0, **options).complete(PROMPT).text == completion


def test_haystack(server, content):
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    generator = OpenAIChatGenerator(
        api_key=Secret.from_token("none"),
        api_base_url=server + "/v1",
        generation_kwargs={"temperature": 0, "max_completion_tokens": 12},
    )
    replies = generator.run([ChatMessage.from_system(TEXTS[0]), ChatMessage.from_user(TEXTS[1])])["replies"]
    assert [reply.text for reply in replies] == [content]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(provider, server, chat, content):
    import litellm

    options = {"api_base": server + "/v1", "api_key": "none", "temperature": 0, "max_tokens": 12, "num_retries": 0}
    answer = litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, **options)
    assert answer.choices[0].message.content == content
    assert answer.usage.completion_tokens == chat["usage"]["completion_tokens"]
    stream = litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, stream=True, **options)
    assert "".join(event.choices[0].delta.content or "" for event in stream) == content


def test_litellm_completes(server, completion):
    import litellm

    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt=PROMPT,
        api_base=server + "/v1",
        api_key="none",
        temperature=0,
        max_tokens=12,
    )
    assert answer.choices[0].text == completion


def test_huggingface_hub(server, content):
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=server + "/v1", api_key="none")
    answer = client.chat_completion(MESSAGES, temperature=0, max_tokens=12)
    assert answer.choices[0].message.content == content
    stream = client.chat_completion(MESSAGES, temperature=0, max_tokens=12, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in stream if event.choices) == content
