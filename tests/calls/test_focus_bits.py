"""Bits of `focus`: order, company, cache, preemption and steps change no score, choice, token or log-probability."""

from types import SimpleNamespace

import pytest

from chunkattn import LLM, DocumentPrompt, Focus, SamplingParams
from chunkattn.calls.focus_scores import SCORES, Scored, register_focus_score
from tests.focus_definition import digest
from tests.reranker_files import CHAT_OPTIONS

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
FOCUSES = [Focus(n, mode, score) for mode in ("reread", "only") for n, score in ((1, "likelihood"), (3, "relevance"))]
LONGER = [
    pytest.param(kind, marks=pytest.mark.ci) for kind in ("cpu bfloat16", "xla float32", "xla bfloat16", "cpu float32 small")
]
ORDERS = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 5, 0, 4, 3, 1]]
salts = (f"bits {number}" for number in range(1 << 20))


@pytest.fixture(scope="module", params=["cpu float32", *LONGER])
def llm(request, chat_folder):
    backend, dtype, *small = request.param.split()
    options = {**CHAT_OPTIONS, "dtype": dtype, "attention_backend": backend}
    if small:  # steps of other sizes, and a pool that holds little more than one prompt
        options |= {"max_num_batched_tokens": 48, "kv_cache_memory_bytes": 1 << 20}
    made = LLM(str(chat_folder), **options)
    yield made
    made.core.scheduler.check()
    assert made.reset_prefix_cache(), "pages leaked"


def prompt_of(focus, order=ORDERS[0], question=QUESTION):
    return DocumentPrompt("Read. ", [TEXTS[number] for number in order], question, focus)


def values(output, order=ORDERS[0]):
    """Every value of an output, documents by their contents, scores and choice apart from the caller's numbers."""
    (sample,) = output.outputs
    logprobs = [{token: entry.logprob for token, entry in row.items()} for row in sample.logprobs]
    if output.focus is None:
        return sample.token_ids, logprobs
    scores = {TEXTS[number]: score for number, score in zip(order, output.focus.scores, strict=True)}
    chosen = [TEXTS[order[number]] for number in output.focus.documents]
    assert len({*chosen}) == len(chosen)
    return scores, chosen, sample.token_ids, logprobs


def alone(llm, focus, salt=None, **changes):
    """Values of a prompt that runs by itself, with nothing cached unless a salt is given."""
    (output,) = llm.generate(prompt_of(focus, **changes), GREEDY, cache_salt=salt or next(salts))
    return values(output, changes.get("order", ORDERS[0]))


@pytest.mark.parametrize("focus", FOCUSES, ids=[focus.name for focus in FOCUSES])
def test_order_and_cache_change_no_bit(focus, llm):
    salt = next(salts)
    cold = alone(llm, focus, salt)
    for order in ORDERS[1:]:
        assert alone(llm, focus, order=order) == cold
        llm.frontend.scores.forget_cached()  # the results of reranks, not the documents
        assert alone(llm, focus, salt, order=order) == cold
        # A chosen document has the number of its first copy in this order.
        (output,) = llm.generate(prompt_of(focus, order), GREEDY, cache_salt=salt)
        assert all([TEXTS[n] for n in order].index(TEXTS[order[n]]) == n for n in output.focus.documents)
    (skipping,) = llm.generate(
        prompt_of(focus),
        SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True, skip_reading_prefix_cache=True),
    )
    assert values(skipping) == cold


def test_company_changes_no_bit(llm):
    """Other prompts of the call, of other questions and choices or none; each gets its own scores."""
    company = [prompt_of(focus, order) for focus, order in zip(FOCUSES, [*ORDERS, ORDERS[0]], strict=True)]
    company += [prompt_of(focus, question="Is it sweet?") for focus in FOCUSES]
    company += [prompt_of(None), {"prompt_token_ids": [5, 6, 7]}, DocumentPrompt("", ["One."], QUESTION, 2)]
    together = llm.generate(company, GREEDY, cache_salt=next(salts))
    backwards = llm.generate(company[::-1], GREEDY, cache_salt=next(salts))[::-1]
    for prompt, output, other in zip(company, together, backwards, strict=True):
        (own,) = llm.generate(prompt, GREEDY, cache_salt=next(salts))
        assert own.outputs == output.outputs == other.outputs
        if own.focus is not None:
            assert own.focus.documents == output.focus.documents == other.focus.documents
            assert own.focus.scores == output.focus.scores == other.focus.scores
            assert own.prompt_token_ids == output.prompt_token_ids == other.prompt_token_ids


def test_preemption_changes_no_bit(llm, monkeypatch):
    company = [prompt_of(focus, order) for focus, order in zip(FOCUSES, [*ORDERS, ORDERS[0]], strict=True)]
    together = llm.generate(company, GREEDY, cache_salt=next(salts))
    scheduler, steps = llm.core.scheduler, iter(range(1 << 20))
    plan = scheduler.plan

    def disturbed(*args):
        if next(steps) % 3 == 2 and len(scheduler.running) > 1:
            scheduler.preempt(scheduler.running[-1])
        return plan(*args)

    monkeypatch.setattr(scheduler, "plan", disturbed)
    before = scheduler.preemptions
    again = llm.generate(company, GREEDY, cache_salt=next(salts))
    assert scheduler.preemptions > before
    for own, other in zip(together, again, strict=True):
        assert own.outputs == other.outputs
        assert (own.focus.documents, own.focus.scores) == (other.focus.documents, other.focus.scores)


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_documents_from_disk_change_no_bit(dtype, chat_folder, tmp_path):
    found = []
    for _ in range(2):
        llm = LLM(str(chat_folder), dtype=dtype, kv_store=str(tmp_path), **CHAT_OPTIONS)
        outputs = [llm.generate(prompt_of(focus), GREEDY)[0] for focus in FOCUSES]
        found.append([values(output) for output in outputs])
        llm.close()
    assert found[0] == found[1]
    assert outputs[0].focus.computed_tokens < 6 * len(llm.tokenizer(QUESTION).input_ids), "documents came from disk"


# Ties


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
