"""Ties of `focus`: documents of equal scores, and of equal contents."""

from types import SimpleNamespace

import pytest

from chunkattn import DocumentPrompt, Focus, SamplingParams
from chunkattn.calls.focus_scores import SCORES, Scored, register_focus_score
from tests.focus_definition import digest

GREEDY = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
TEXTS = [
    "Figs are sweet. " * 9,
    "Ana is a person of Oslo.",
    "",
    "A city is large. " * 4,
    "Ana is a person of Oslo.",
    "Yes. " * 30,
]
QUESTION = "Where does Ana live, and is it a large city?"
ORDERS = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 5, 0, 4, 3, 1]]
salts = (f"bits {number}" for number in range(1 << 20))


@pytest.fixture(scope="module")
def llm(chat_llm):
    return chat_llm


def prompt_of(focus, order=ORDERS[0], question=QUESTION):
    return DocumentPrompt("Read. ", [TEXTS[number] for number in order], question, focus)


@pytest.fixture
def table():
    """Scores of texts, 1 where the table has none, as the score "table"."""
    found = {}

    @register_focus_score("table")
    def by_table(frontend, listed):
        scored = [Scored([found.get(own.prompt.source(number), 1.0) for number in own.numbers], 7) for own in listed]

        def flow():
            yield from ()
            return scored

        return SimpleNamespace(tokens=0, total=0, done=0, flow=flow)

    yield found
    del SCORES["table"]


@pytest.mark.parametrize("mode", ["reread", "only"])
def test_ties_go_to_contents(mode, llm, table):
    """Equal scores choose the documents of the lowest hashes, in any order of the caller."""
    table[TEXTS[3]] = 2.0
    ids = llm.frontend.parser.read_documents(TEXTS)
    tied = sorted([0, 1, 5], key=lambda number: digest(ids[number]))
    expected, answers = [TEXTS[3], *(TEXTS[number] for number in tied[:2])], []
    for order in ORDERS:
        (output,) = llm.generate(prompt_of(Focus(3, mode, "table"), order), GREEDY)
        assert [TEXTS[order[number]] for number in output.focus.documents] == expected
        assert output.focus.computed_tokens == 7
        answers.append(output.outputs)
    assert answers[0] == answers[1] == answers[2]


def test_forms_of_one_document_are_judged_alike(llm):
    """A text, and the token ids that it becomes as a chunk, are one document, whose text is judged in any order."""
    ids = llm.frontend.parser.read_documents(TEXTS[:1])[0]
    answers = []
    for documents in ([TEXTS[0], ids, TEXTS[1]], [ids, TEXTS[1], TEXTS[0]]):
        prompt = DocumentPrompt("Read. ", documents, QUESTION, Focus(1, "only", "relevance"))
        (output,) = llm.generate(prompt, GREEDY, cache_salt=next(salts))
        answers.append(({*output.focus.scores}, output.outputs))
    assert answers[0] == answers[1]
