"""Decisions with documents: answers against transformers under a dense mask, and what is computed."""

from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest

from chunkattn import LLM, Choice, Predicate, Rating, SamplingParams
from chunkattn.calls.decide import decide_call
from chunkattn.errors import CapacityError, RequestError
from chunkattn.parsers.states import StateTemplate
from tests.calls.test_decide import CASES, FORGED, METHODS, QUESTIONS, YES_NO, expected, shares_of, spellings
from tests.chat_templates import CHATML
from tests.checkpoints import CHECKPOINTS, Oracle, make_checkpoint
from tests.flows import questions_of
from tests.reranker_files import CHAT_OPTIONS, SHAPE, add_tokenizer

STATE = "Paris is a city. Ana likes figs."
DOCUMENTS = ["Figs are sweet. " * 9, f"Ben wrote: {FORGED}", "Ana is a person of Oslo.", "A city is large. " * 4]
salts = (f"salt {number}" for number in range(1 << 20))


@pytest.fixture(scope="module")
def folder(chat_folder):
    return chat_folder


@pytest.fixture(scope="module")
def llm(chat_llm):
    return chat_llm


class BehindDocuments:
    """transformers on a chat whose documents lie between the template's beginning and the rest."""

    def __init__(self, folder, tokenizer, documents, strategy="shared"):
        self.oracle, self.shared = Oracle(folder), strategy == "shared"
        self.first = tokenizer("<|im_start|>user\n").input_ids
        self.chunks = [tokenizer(f"Document: {own}\n\n").input_ids for own in documents]

    def logits(self, ids):
        """Logits `[T, vocab]` of the tokens of a whole chat without documents, with the documents in their place."""
        prefix, lens = len(self.first), [len(own) for own in self.chunks]
        assert ids[:prefix] == self.first
        rest = len(ids) - prefix
        if self.shared:
            starts, end = [prefix] * len(lens), prefix + max(lens)
        else:
            starts, end = [prefix + sum(lens[:number]) for number in range(len(lens))], prefix + sum(lens)
        positions = [*range(prefix), *(s + n for s, size in zip(starts, lens, strict=True) for n in range(size))]
        layout = SimpleNamespace(
            token_ids=np.concatenate([self.first, *self.chunks, ids[prefix:]]),
            positions=np.array([*positions, *range(end, end + rest)]),
            prefix_len=prefix,
            chunk_lens=lens,
            question_len=rest,
            next_position=end + rest,
        )
        found = self.oracle.chunked(layout)
        return np.concatenate([found[:prefix], found[-rest:]])


def check_answers(llm, witness, output, method, calibrate=False):
    for number, answer in enumerate(output.answers):
        shares, mass = expected(llm.tokenizer, witness, STATE, number, method)
        if not calibrate:
            np.testing.assert_allclose(np.log(shares_of(answer)), np.log(shares), atol=2e-4)
        assert np.log(answer.label_mass) == pytest.approx(np.log(mass), abs=1e-4)


PLAIN = ["Figs are sweet. " * 9, "Ana is a person of Oslo.", "A city is large. " * 4]


@pytest.mark.parametrize("method", METHODS)
def test_answers_equal_those_under_a_dense_mask(method, llm, folder):
    witness = BehindDocuments(folder, llm.tokenizer, PLAIN)
    for _ in ("cold", "warm"):
        check_answers(llm, witness, llm.decide(STATE, CASES, documents=PLAIN, method=method), method)
    calibrated = llm.decide(STATE, CASES, documents=PLAIN, method=method, calibrate=True)
    check_answers(llm, witness, calibrated, method, calibrate=True)
    free = [shares_of(own) for own in llm.decide("N/A", CASES, method=method).answers]
    plain = [shares_of(own) for own in llm.decide(STATE, CASES, documents=PLAIN, method=method).answers]
    for own, prior, raw in zip(calibrated.answers, free, plain, strict=True):
        if method == "letters":
            weighed = np.divide(raw, prior)
            np.testing.assert_allclose(shares_of(own), weighed / weighed.sum(), rtol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_families(family, tmp_path):
    config = deepcopy(CHECKPOINTS[family])
    config.vocab_size, config.max_position_embeddings = SHAPE["vocab_size"], 2048
    make_checkpoint(config, tmp_path)
    add_tokenizer(tmp_path, chat_template=CHATML)
    llm = LLM(str(tmp_path), **CHAT_OPTIONS)
    for method in METHODS:
        for documents in ([], PLAIN):
            witness = BehindDocuments(tmp_path, llm.tokenizer, documents) if documents else Oracle(tmp_path)
            check_answers(llm, witness, llm.decide(STATE, CASES, documents=documents, method=method), method)


def test_documents_at_consecutive_positions(folder):
    llm = LLM(str(folder), position_strategy="offset", **CHAT_OPTIONS)
    witness = BehindDocuments(folder, llm.tokenizer, PLAIN, "offset")
    check_answers(llm, witness, llm.decide(STATE, CASES, documents=PLAIN), "letters")


def test_documents_are_weighed_as_for_generation(folder):
    """Under a calibration of chunks, the mass of yes is that of the first token of a chat."""
    llm = LLM(str(folder), chunk_temperature=0.7, chunk_scale=0.8, max_logprobs=SHAPE["vocab_size"], **CHAT_OPTIONS)
    (answer,) = llm.decide(STATE, [Predicate("Paris is a city.")], documents=PLAIN).answers
    content = f"{STATE}\n\nQuestion: Is this true? Paris is a city.\nAnswer yes or no only."
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=llm.limits.max_logprobs)
    (output,) = llm.chat([{"role": "user", "content": content}], params, documents=PLAIN)
    found = output.outputs[0].logprobs[0]
    start = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    masses = [sum(np.exp(found[token].logprob) for token in spellings(llm.tokenizer, start, words)) for words in YES_NO]
    assert answer.label_mass == pytest.approx(sum(masses), rel=1e-5)
    assert answer.probability == pytest.approx(masses[0] / sum(masses), rel=1e-5)
    # A look-up finds the weighed state.
    (call,) = [decide_call(llm.frontend, [STATE], [Predicate("Another.")], documents=PLAIN)]
    (request,) = next(questions_of(call)).requests
    assert llm.core.look_up(request).total == len(request.layout)


# The cache


def test_documents_and_state_are_computed_once(llm):
    salt, template = next(salts), StateTemplate(llm.frontend.plain)
    before, state = template.before_ids, template.prefix(STATE, behind_documents=True)
    chunks = llm.frontend.parser.read_documents(DOCUMENTS)
    questions = [Predicate(f"Fact {number} is true.") for number in range(20)]
    own = sum(len(template.item(["Is this true? ", q.text, "\nAnswer yes or no only."], "")) for q in questions)
    documents = sum(map(len, chunks))
    cold = llm.decide(STATE, questions, documents=DOCUMENTS, cache_salt=salt).usage
    assert (cold.prompt_tokens, cold.cached_tokens) == (len(before) + documents + len(state) + own, 0)
    assert cold.computed_tokens == cold.prompt_tokens
    other = [Predicate(f"Thing {number} is true.") for number in range(20)]
    warm = llm.decide(STATE, other, documents=DOCUMENTS[::-1], cache_salt=salt).usage
    assert warm.cached_tokens == len(before) + documents + len(state)
    assert warm.computed_tokens == warm.prompt_tokens - warm.cached_tokens
    fresh = llm.decide("Another state.", other, documents=DOCUMENTS, cache_salt=salt).usage
    assert fresh.cached_tokens == len(before) + documents
    assert llm.decide(STATE, questions, documents=DOCUMENTS, cache_salt=salt).usage.computed_tokens == 0


def test_precomputed_documents_and_those_of_chats_are_found(llm):
    salt, messages = next(salts), [{"role": "system", "content": "Be kind."}]
    documents = llm.frontend.parser.read_documents(DOCUMENTS)
    llm.precompute(messages, DOCUMENTS[:2], cache_salt=salt)
    params = SamplingParams(max_tokens=1)
    llm.chat([*messages, {"role": "user", "content": "Hello?"}], params, documents=DOCUMENTS[2:], cache_salt=salt)
    usage = llm.decide(STATE, CASES, documents=DOCUMENTS, system="Be kind.", cache_salt=salt).usage
    before = len(StateTemplate(llm.frontend.plain, "Be kind.").before_ids)
    assert usage.cached_tokens == before + sum(map(len, documents))
    report = llm.lookup(messages, DOCUMENTS, cache_salt=salt)
    assert all(own.was_cached for own in report.documents)


def test_documents_from_disk(folder, tmp_path):
    options = {**CHAT_OPTIONS, "kv_store": str(tmp_path)}
    outputs = []
    for _ in range(2):
        llm = LLM(str(folder), **options)
        outputs.append(llm.decide(STATE, QUESTIONS, documents=DOCUMENTS))
        llm.close()
    first, second = outputs
    documents = sum(map(len, llm.frontend.parser.read_documents(DOCUMENTS)))
    assert second.answers == first.answers
    assert second.usage.cached_tokens >= documents


def test_lists_of_states_share_their_documents(llm):
    salt, states = next(salts), [STATE, "Another state.", {"third": [1, 2]}, "The fourth state. " * 30]
    alone = [llm.decide(own, QUESTIONS, documents=DOCUMENTS, cache_salt=next(salts)).answers for own in states]
    outputs = llm.decide(states, QUESTIONS, documents=DOCUMENTS[::-1], cache_salt=salt)
    assert [output.answers for output in outputs] == alone
    documents = sum(map(len, llm.frontend.parser.read_documents(DOCUMENTS)))
    usages = [output.usage for output in outputs]
    assert sum(usage.computed_tokens for usage in usages) < sum(usage.prompt_tokens for usage in usages) - 2 * documents
    again = llm.decide(states[1:], QUESTIONS[:1], documents=DOCUMENTS, cache_salt=salt, method="separate")
    assert all(output.usage.cached_tokens >= documents for output in again)
    with pytest.raises(CapacityError, match=r"state 2 of \d+ tokens .* max_model_len"):
        llm.decide([STATE, STATE, "word " * 2000], QUESTIONS, documents=DOCUMENTS)


def test_token_ids_and_equal_documents(llm):
    texts = [*PLAIN, PLAIN[0]]
    ids = [llm.tokenizer(f"Document: {own}\n\n").input_ids for own in texts]
    assert llm.decide(STATE, CASES, documents=ids).answers == llm.decide(STATE, CASES, documents=texts).answers
    assert llm.decide(STATE, CASES, documents=[]).answers == llm.decide(STATE, CASES).answers
    assert llm.decide(STATE, CASES, documents=PLAIN).answers != llm.decide(STATE, CASES, documents=texts).answers


# Errors


@pytest.mark.parametrize(
    ("documents", "param", "message"),
    [
        ("one text", "documents", "documents must be a list"),
        (["a", 5], "documents", "document 1"),
        (["a", [1 << 20]], "documents", "document 1: token id 1048576 at index 0 is outside the vocabulary"),
        (["a", "bad \ud800"], "documents", "document 1"),
        (["a", "many words " * 15000], "documents", "document 1"),
    ],
    ids=str,
)
def test_bad_documents(documents, param, message, llm):
    with pytest.raises(RequestError, match=message) as error:
        llm.decide(STATE, CASES, documents=documents)
    assert error.value.param == param
    assert not llm.core.has_work


def test_states_and_questions_that_do_not_fit_behind_documents(llm):
    """The state's last position depends on the longest document, and the question's on both."""
    limit = llm.limits.max_model_len

    def fails(state, questions):
        with pytest.raises(CapacityError) as error:
            llm.decide(state, questions, documents=[*DOCUMENTS, "x " * 200])
        assert not llm.core.has_work
        return error.value

    long = "word " * (limit - 100)
    error = fails(long, [Predicate("a")])
    assert (error.param, error.part) == ("state", "state")
    assert f"max_model_len {limit}" in str(error)
    error = fails(STATE, [Predicate("a"), Predicate(long)])
    assert (error.param, error.part) == ("questions", "question 1")
    error = fails("word " * 100, [Predicate("a"), Choice("b", ["word " * (limit // 4 - 30), "d"])])
    assert (error.param, error.part) == ("questions", "state with question 1")


def test_engines_that_take_no_documents(folder):
    llm = LLM(str(folder), enable_prefix_caching=False, **CHAT_OPTIONS)
    with pytest.raises(RequestError, match="enable_prefix_caching=False") as error:
        llm.decide(STATE, [Rating("How?", ["a", "b"])], documents=DOCUMENTS)
    assert error.value.param == "documents"
    without = [llm.decide(STATE, [Rating("How?", ["a", "b"])], documents=none).answers for none in (None, [])]
    assert without[0] == without[1]
