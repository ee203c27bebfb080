"""`chunk_mode="joined"`: one chunk of all documents, and what a model with recurrent layers allows."""

import hashlib
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from chunkattn import ChunkedPrompt, DocumentPrompt, Focus, Predicate, SamplingParams
from chunkattn.calls.decide import decide_call
from chunkattn.calls.generate import generate_batch
from chunkattn.calls.precompute import precompute_job
from chunkattn.calls.rerank import rerank_call
from chunkattn.calls.score_inputs import score_call
from chunkattn.errors import CapacityError, RequestError
from tests.checkpoints import Oracle
from tests.flows import questions_of

TEXTS = ["Figs are sweet. " * 9, "Ana is a person of Oslo.", "", "A city is large.", "Ana is a person of Oslo."]
PREFIX, QUESTION = "Read. ", "Where does Ana live?"
USER = {"role": "user", "content": QUESTION}
GREEDY = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
JOINED = {"chunk_mode": "joined"}
salts = (f"joined {number}" for number in range(1 << 20))


@pytest.fixture(scope="module")
def llm(chat_llm):
    return chat_llm


def digest(ids):
    return hashlib.blake2b(np.asarray(ids, "<i4").tobytes(), digest_size=16).digest()


def tokens(llm, texts=TEXTS):
    """Token ids of each document in the template, an empty one without any."""
    encode = llm.tokenizer
    return [encode(f"Document: {text}\n\n", add_special_tokens=False).input_ids if text else [] for text in texts]


def concatenated(documents):
    return [token for ids in sorted(documents, key=digest) for token in ids]


def sides(llm):
    return [llm.tokenizer(text, add_special_tokens=False).input_ids for text in (PREFIX, QUESTION)]


def test_one_chunk_in_an_order_of_contents(llm):
    first, last = sides(llm)
    whole, documents = concatenated(tokens(llm)), tokens(llm)
    (output,) = llm.generate(DocumentPrompt(PREFIX, TEXTS, QUESTION), GREEDY, cache_salt=next(salts), **JOINED)
    assert output.prompt_token_ids == [*first, *whole, *last]
    assert (output.prefix_len, output.chunk_lens) == (len(first), (len(whole),))
    assert [*output.joined] == sorted([0, 1, 3, 4], key=lambda number: digest(documents[number]))
    assert output.joined == {number: len(documents[number]) for number in (0, 1, 3, 4)}
    assert output.prompt == "".join([PREFIX, *(f"Document: {TEXTS[number]}\n\n" for number in output.joined), QUESTION])
    (apart,) = llm.generate(DocumentPrompt(PREFIX, TEXTS, QUESTION), GREEDY, cache_salt=next(salts))
    assert (apart.joined, apart.chunk_lens) == (None, tuple(map(len, documents)))


@pytest.mark.parametrize("documents", [[[], []], []], ids=["empty", "none"])
def test_without_tokens_there_is_no_chunk(llm, documents):
    (output,) = llm.generate(DocumentPrompt([5, 6], documents, [7, 8]), GREEDY, **JOINED)
    assert (output.prompt_token_ids, output.chunk_lens) == ([5, 6, 7, 8], ())


def test_answers_are_those_of_one_plain_text_in_every_order(llm, chat_folder):
    first, last = sides(llm)
    witness = Oracle(chat_folder).logits([*first, *concatenated(tokens(llm)), *last])[-1].astype(np.float64)
    expected = witness - np.log(np.exp(witness - witness.max()).sum()) - witness.max()
    bits = set()
    for order in list(permutations(range(5)))[::23]:
        prompt = DocumentPrompt(PREFIX, [TEXTS[number] for number in order], QUESTION)
        (output,) = llm.generate(prompt, GREEDY, cache_salt=next(salts), **JOINED)
        sample = output.outputs[0]
        assert sample.token_ids[0] == witness.argmax()
        assert sample.logprobs[0][sample.token_ids[0]].logprob == pytest.approx(expected.max(), abs=1e-4)
        bits.add((tuple(sample.token_ids), tuple(entry[t].logprob for t, entry in zip(sample.token_ids, sample.logprobs))))
    assert len(bits) == 1


def test_a_joined_set_computed_ahead_serves_every_order(llm):
    salt, whole = next(salts), concatenated(tokens(llm))
    given = {"cache_salt": salt, **JOINED}
    report = llm.precompute(PREFIX, TEXTS, **given)
    assert [(own.tokens, own.was_cached) for own in report.documents] == [(len(whole), False)]
    (output,) = llm.generate(DocumentPrompt(PREFIX, TEXTS[::-1], QUESTION), GREEDY, **given)
    assert output.num_cached_tokens == len(sides(llm)[0]) + len(whole)
    assert output.num_cached_chunk_tokens == (len(whole),)
    assert [own.was_cached for own in llm.lookup(PREFIX, TEXTS[::-1], **given).documents] == [True]
    assert not llm.lookup(PREFIX, TEXTS[:1], cache_salt=salt).documents[0].was_cached
    llm.forget(PREFIX, TEXTS, **given)
    assert not llm.lookup(PREFIX, TEXTS, **given).documents[0].was_cached


@pytest.mark.parametrize("mode", ["only", "reread"])
def test_a_focus_chooses_before_documents_are_joined(llm, mode):
    texts = ["", *TEXTS]
    documents, (first, last) = tokens(llm, texts), sides(llm)
    prompt = DocumentPrompt(PREFIX, texts, QUESTION, Focus(2, mode))
    (apart,) = llm.generate(prompt, GREEDY, cache_salt=next(salts))
    (output,) = llm.generate(prompt, GREEDY, cache_salt=next(salts), **JOINED)
    assert output.focus.documents == apart.focus.documents
    assert output.focus.scores == apart.focus.scores
    chosen = sorted(output.focus.documents, key=lambda number: digest(documents[number]))
    assert output.focus.shown == chosen
    again = concatenated(documents[number] for number in chosen)
    expected = [*first, *again, *last] if mode == "only" else [*first, *concatenated(documents), *again, *last]
    assert output.prompt_token_ids == expected
    assert len(output.chunk_lens) == 1
    assert [*output.joined] == (chosen if mode == "only" else sorted([1, 2, 4, 5], key=lambda n: digest(documents[n])))


def test_decisions_see_one_document(llm):
    question, state = [Predicate("Ana lives in Oslo.")], "Ana moved."
    joined = llm.decide(state, question, documents=TEXTS, cache_salt=next(salts), **JOINED)
    one = llm.decide(state, question, documents=[concatenated(tokens(llm))], cache_salt=next(salts))
    apart = llm.decide(state, question, documents=TEXTS, cache_salt=next(salts))
    assert joined == one
    assert joined.answers[0].label_mass != apart.answers[0].label_mass


def test_limits_count_the_joined_chunk(llm, monkeypatch):
    size = len(concatenated(tokens(llm)))
    limits = replace(llm.limits, config=replace(llm.config, max_chunk_len=size - 1))
    monkeypatch.setattr(llm.frontend, "limits", limits)
    message = f"the joined chunk has {size} tokens, max_chunk_len is {size - 1}"
    for call in (
        lambda: llm.generate(DocumentPrompt(PREFIX, TEXTS, QUESTION), GREEDY, **JOINED),
        lambda: llm.chat([USER], GREEDY, documents=TEXTS, **JOINED),
        lambda: llm.precompute(PREFIX, TEXTS, **JOINED),
        lambda: llm.decide("Ana moved.", [Predicate("Yes.")], documents=TEXTS, **JOINED),
    ):
        with pytest.raises(CapacityError, match=message) as error:
            call()
        assert error.value.param == "documents"


def test_unknown_modes_are_named(llm):
    for mode in ("merged", None, 1):
        with pytest.raises(RequestError, match="chunk_mode must be one of isolated, joined") as error:
            llm.chat([USER], GREEDY, documents=TEXTS, chunk_mode=mode)
        assert error.value.param == "chunk_mode"


# Recurrent layers


@pytest.fixture
def recurrent(llm, monkeypatch):
    """A front whose model has recurrent layers, as far as limits know."""
    monkeypatch.setattr(llm.frontend, "limits", replace(llm.limits, recurrent=True))
    return llm.frontend


def prompts(frontend, prompt, **options):
    return generate_batch(frontend, frontend.parse([prompt], True, **options), GREEDY)


def chat(frontend, documents, **options):
    return generate_batch(frontend, frontend.parse_chat([USER], documents, None, **options), GREEDY)


def decided(frontend, documents, **options):
    questions = [Predicate("Ana lives in Oslo.")]
    return decide_call(frontend, ["Ana moved.", "Ana stayed."], questions, documents=documents, method="letters", **options)


TWO, ONE = TEXTS[:2], ["", TEXTS[1], ""]
REFUSED = {
    "documents": (lambda f: prompts(f, DocumentPrompt(PREFIX, TWO, QUESTION)), "documents", "2 documents"),
    "a duplicate": (lambda f: prompts(f, DocumentPrompt([1], [[5, 6], [5, 6]], [7, 8])), "documents", "2 documents"),
    "chunks": (lambda f: prompts(f, ChunkedPrompt(PREFIX, TEXTS, QUESTION)), "prompt", "4 chunks"),
    "separators": (lambda f: prompts(f, "Read. # # One. # # Two. # # Who?"), "prompt", "2 chunks"),
    "a chat": (lambda f: chat(f, TWO), "documents", "2 documents"),
    "focus on two": (lambda f: chat(f, TEXTS, focus=2), "documents", "2 documents"),
    "reread": (lambda f: chat(f, TEXTS, focus=Focus(1, "reread")), "documents", "4 documents"),
    "decisions": (lambda f: decided(f, TWO), "documents", "2 documents"),
}
ALLOWED = {
    "a plain prompt": lambda f: prompts(f, "Who?"),
    "one document": lambda f: prompts(f, DocumentPrompt(PREFIX, ONE, QUESTION)),
    "no document": lambda f: chat(f, []),
    "joined": lambda f: prompts(f, DocumentPrompt(PREFIX, TEXTS, QUESTION), chunk_mode="joined"),
    "a joined chat": lambda f: chat(f, TEXTS, chunk_mode="joined"),
    "focus on one": lambda f: chat(f, TEXTS, focus=1),
    "focus by relevance": lambda f: chat(f, TEXTS, focus=Focus(1, score="relevance")),
    "joined after a focus": lambda f: chat(f, TEXTS, focus=2, chunk_mode="joined"),
    "reread behind joined": lambda f: chat(f, TEXTS, focus=Focus(2, "reread"), chunk_mode="joined"),
    "a state": lambda f: decided(f, None),
    "a state behind one document": lambda f: decided(f, ONE),
    "a state behind joined documents": lambda f: decided(f, TEXTS, chunk_mode="joined"),
    "documents ahead": lambda f: precompute_job(f, PREFIX, TEXTS),
    "a joined set ahead": lambda f: precompute_job(f, PREFIX, TEXTS, chunk_mode="joined"),
    "items": lambda f: score_call(f, "Who?", TEXTS, labels=[" yes", " no"]),
    "packed items": lambda f: score_call(f, "Who?", TEXTS, labels=[" yes", " no"], algorithm="packed_segment"),
    "ranking": lambda f: rerank_call(f, "Who?", TEXTS),
    "ranking, documents first": lambda f: rerank_call(f, "Who?", TEXTS, order="document_first"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_question_behind_several_chunks_is_refused_before_anything_runs(name, recurrent):
    make, param, count = REFUSED[name]
    with pytest.raises(RequestError, match=f"a question behind {count} that are not empty has no state") as error:
        make(recurrent)
    assert error.value.param == param
    for advice in ("focus=1", 'mode "only"', 'chunk_mode="joined"', "a plain prompt"):
        assert advice in str(error.value)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_ends_in_one_state_is_allowed(name, recurrent, llm, monkeypatch):
    job = ALLOWED[name](recurrent)
    monkeypatch.setattr(llm.core, "limits", recurrent.limits)  # the engine checks every request again
    llm.run(job)


def test_algorithms_of_attention_alone_are_refused(recurrent):
    with pytest.raises(RequestError, match="packed_dense runs attention alone, and this model has recurrent layers") as error:
        score_call(recurrent, "Who?", TEXTS, labels=[" yes", " no"], algorithm="packed_dense")
    assert error.value.param == "algorithm"
    job = score_call(recurrent, "Who?", TEXTS, labels=[" yes", " no"], algorithm="auto")
    assert all(request.backend is None for question in questions_of(job) for request in question.requests)
