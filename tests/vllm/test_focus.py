"""`focus` of `ChunkLLM`: scores, choices and answers against transformers, and what they compute."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from chunkattn import DocumentPrompt, SamplingParams, make_layout
from chunkattn.errors import CapacityError, RequestError
from chunkattn.integrations.vllm import ChunkLLM
from tests.vllm.witness import Witness

DEMO = Path(__file__).parents[2] / "chunkattn" / "models" / "demo"
GAP, COUNT = 5, 4
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, logprobs=5, ignore_eos=True)
PREFIX, QUESTION = "Read the documents and answer the question.", "Where does Lezudo live? Answer:"
DOCUMENTS = [
    "Rumi is a poet.",
    "",
    "Lezudo has a house in Pegelu.",
    "Zenuso works as a baker.",
    "Lezudo has a house in Pegelu.",
]


@pytest.fixture(scope="module")
def llm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        options = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_num_seqs": 8, "max_model_len": 512}
        made = ChunkLLM(str(DEMO), max_store_bytes=2 << 20, enable_chunk_aware=True, chunk_position_gap=GAP, **options)
        yield made
        made.close()


@pytest.fixture(scope="module")
def witness():
    return Witness(DEMO)


def parts_of(llm, prompt):
    layout = llm.parser.parse(prompt).layout
    first, *chunks, last = (layout.part(segment).tolist() for segment in layout.segments)
    return first, chunks, last


def expected_scores(witness, first, chunks, last):
    """Mean log-probability of the question's tokens but the first, behind prefix and one document."""
    found = []
    for chunk in chunks:
        layout = make_layout(first, [chunk], last, "shared", GAP)
        logits = witness.oracle.chunked(layout).astype(np.float64)[-len(last) : -1]
        logprobs = (
            logits
            - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
            - logits.max(-1, keepdims=True)
        )
        found.append(float(np.mean(logprobs[np.arange(len(last) - 1), last[1:]])) if chunk else None)
    return found


def check_answer(witness, output, first, chunks, last):
    tokens, logprobs = witness.shared(first, chunks, last, COUNT, GAP)
    (completion,) = output.outputs
    assert completion.token_ids == tokens
    assert max(abs(entry.logprob - logprobs[token]) for token, entry in completion.logprobs[0].items()) <= 1e-4
    assert output.prompt_token_ids == [*first, *chain(*chunks), *last]


@pytest.mark.parametrize("mode", ["reread", "only"])
def test_choices_and_answers_are_those_of_transformers(llm, witness, mode):
    """Cold, warm, and in another order: a question that was read before is read again."""
    llm.reset_prefix_cache()
    question = QUESTION * 4  # longer than a block of vLLM's prefix cache
    costs = []
    for documents in (DOCUMENTS, DOCUMENTS, DOCUMENTS[::-1]):
        prompt = DocumentPrompt(PREFIX, documents, question, {"top_n": 2, "mode": mode})
        (output,) = llm.generate(prompt, GREEDY)
        first, chunks, last = parts_of(llm, DocumentPrompt(PREFIX, documents, question))
        expected = expected_scores(witness, first, chunks, last)
        assert output.focus.scores == [value if value is None else pytest.approx(value, abs=1e-4) for value in expected]
        best = sorted((n for n, text in enumerate(documents) if text and text not in documents[:n]), key=lambda n: -expected[n])
        assert output.focus.documents == best[:2]
        assert output.prompt.count("Lezudo has") == {"reread": 3, "only": 1}[mode]
        if mode == "only":
            shown = first, [chunks[n] for n in sorted(best[:2])], last
        else:
            shown = first, chunks, [*chain(*(chunks[n] for n in output.focus.shown)), *last]
            assert sorted(output.focus.shown) == sorted(best[:2])
        check_answer(witness, output, *shown)
        costs.append(output.focus.computed_tokens)
    assert costs[1] == costs[2] == 3 * len(last) < costs[0]


def test_prompts_with_and_without_focus_in_one_call(llm, witness):
    texts = [text for text in DOCUMENTS if text]
    prompts = [
        DocumentPrompt(PREFIX, texts, QUESTION),
        DocumentPrompt(PREFIX, texts, "Who is a poet? Answer:", {"top_n": 1, "mode": "only"}),
        DocumentPrompt(PREFIX, ["", ""], QUESTION, 1),
    ]
    plain, focused, empty = llm.generate(prompts, GREEDY)
    assert plain.focus is None
    assert (empty.focus.documents, empty.focus.scores) == ([], [None, None])
    check_answer(witness, plain, *parts_of(llm, prompts[0]))
    first, chunks, last = parts_of(llm, prompts[1])
    check_answer(witness, focused, first, [chunks[focused.focus.documents[0]]], last)
    (chat,) = llm.chat([{"role": "user", "content": "Where does Lezudo live?"}], GREEDY, documents=texts, focus=1)
    assert texts[chat.focus.documents[0]] == DOCUMENTS[2]


@pytest.mark.parametrize(
    ("prompt", "focus", "error", "message"),
    [
        (
            DocumentPrompt(PREFIX, DOCUMENTS, QUESTION),
            {"top_n": 1, "score": "relevance"},
            RequestError,
            "must be likelihood in vLLM",
        ),
        (DocumentPrompt(PREFIX, DOCUMENTS, QUESTION), 0, RequestError, "at least 1"),
        ("Where?", 1, RequestError, "the prompt has none"),
        (DocumentPrompt([5], [[6], [7]], [8]), 1, RequestError, "has one token"),
        (DocumentPrompt([5], [[6] * 300, [7]], [8, 9]), {"top_n": 1, "mode": "reread"}, CapacityError, "max_model_len"),
    ],
    ids=["score", "count", "plain", "question", "length"],
)
def test_what_cannot_be_chosen_is_refused_before_anything_runs(llm, prompt, focus, error, message):
    with pytest.raises(error, match=message):
        llm.generate(prompt, GREEDY, focus=focus)
