"""Documents stored with messages are the chunks of chats, under the chat templates of instruct models."""

import copy
import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from chunkattn.models.loader import DEMO_FOLDER
from chunkattn.parsers import PromptParser

CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen2.5 and SmolLM2 have it: a system message where the chat has none."""
LLAMA = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
DOCUMENTS = ["Nila lives in Tunise.", "Rumi is a poet."]
QUESTION = {"role": "user", "content": "Where does Nila live?"}


@pytest.fixture(scope="module", params=[CHATML, LLAMA], ids=["chatml", "llama"])
def parser(request):
    tokenizer = copy.deepcopy(AutoTokenizer.from_pretrained(DEMO_FOLDER))
    controls = re.findall(r"<\|\w+\|>", request.param)
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(controls))})
    tokenizer.chat_template = request.param
    return PromptParser(tokenizer, separator=" # # ", strategy="shared", chunk_aware=False)


def start_of(layout):
    first, *chunks, _ = (layout.part(s).tolist() for s in layout.segments)
    return first, chunks


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "Be brief."}]], ids=["no system", "system"])
def test_messages_are_the_prefix_of_the_chat(parser, before):
    layout = parser.parse_chat([*before, QUESTION], DOCUMENTS).layout
    assert parser.parse_cache(before, DOCUMENTS) == start_of(layout)


def test_a_text_is_not_the_prefix_of_a_chat(parser):
    system = "Read the documents and answer the question."
    layout = parser.parse_chat([{"role": "system", "content": system}, QUESTION], DOCUMENTS).layout
    assert parser.parse_cache(system, DOCUMENTS)[0] != start_of(layout)[0]


def test_the_example_of_the_reference(parser):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    section = page.partition("### Name a stored document by its id")[2]
    stored, chat = (json.loads(body) for body in re.findall(r"-d '(.*?)'\n", section, flags=re.DOTALL)[:2])
    texts = [document["text"] for document in stored["documents"]]
    assert stored["documents"][0]["id"] == chat["documents"][0]["id"]
    assert parser.parse_cache(stored["messages"], texts) == start_of(parser.parse_chat(chat["messages"], texts).layout)
