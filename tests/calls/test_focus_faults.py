"""`focus`: arguments that are wrong, prompts that do not fit, and options beside it."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from chunkattn import LLM, ChunkedPrompt, DocumentPrompt, Focus, SamplingParams, make_layout
from chunkattn.calls.focus_scores import Candidates, get_score
from chunkattn.calls.generate import generate_job
from chunkattn.calls.job import STAGE_STEPS
from chunkattn.errors import CapacityError, NonFiniteError, RequestError
from chunkattn.parsers.choice import choose
from tests.engine.test_non_finite import damaged
from tests.flows import stages_of
from tests.focus_definition import digest
from tests.reranker_files import CHAT_OPTIONS

GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=0)
DOCUMENTS = ["Figs are sweet.", "Ana is a person of Oslo.", "A city is large."]
PROMPT = DocumentPrompt("Read. ", DOCUMENTS, "Where does Ana live?")
MESSAGES = [{"role": "user", "content": "Where does Ana live?"}]


@pytest.fixture
def llm(chat_llm):
    """The engine, in which no request may be left and no page be lost."""
    yield chat_llm
    assert not chat_llm.core.has_work
    chat_llm.core.scheduler.check()
    assert chat_llm.reset_prefix_cache(), "pages leaked"


def refused(call, kind=RequestError):
    """The error of a call that runs nothing."""
    with pytest.raises(kind) as error:
        call()
    return error.value


def test_a_score_that_is_no_number_is_the_lowest():
    layout = make_layout([1], [[2], [3], [4], [5]], [6, 7])
    for order in itertools.permutations(range(4)):
        shuffled = layout.with_chunk_order(order)
        scores = [[np.nan, 0.5, np.nan, -np.inf][number] for number in order]
        best = [order[place] for place in choose(shuffled, range(4), scores, 4)]
        assert best == [1, *sorted([0, 2, 3], key=lambda number: digest([2 + number]))]


NUMBER = "focus must choose an integer of at least 1 documents, got "
BAD = [
    (True, NUMBER + "True"),
    (0, NUMBER + "0"),
    (-1, NUMBER + "-1"),
    (1.0, NUMBER + r"1\.0"),
    (float("nan"), NUMBER + "nan"),
    ("1", NUMBER + "'1'"),
    ([1], NUMBER + "a list"),
    (object(), NUMBER + "a value of type object"),
    ({"top_n": "2"}, NUMBER + "'2'"),
    ({"top_n": None}, NUMBER + "None"),
    ({}, "focus needs top_n"),
    ({"mode": "only"}, "focus needs top_n"),
    ({"top_n": 1, "topn": 2}, "focus has the fields top_n, mode, score, got 'topn'"),
    ({"top_n": 1, 5: 2}, "focus has the fields top_n, mode, score, got 5"),
    ({"top_n": 1, "mode": "again"}, "focus mode must be one of only, reread, got 'again'"),
    ({"top_n": 1, "mode": ["only"]}, "focus mode must be one of only, reread, got a list"),
    ({"top_n": 1, "mode": np.array(["only", "reread"])}, "focus mode must be one of only, reread, got a value of type ndarray"),
    ({"top_n": 1, "score": "bm25"}, "focus score must be one of likelihood, relevance, got 'bm25'"),
    ({"top_n": 1, "score": ["likelihood"]}, "focus score must be the name of a score, got a list"),
    ({"top_n": 1, "score": None}, "focus score must be the name of a score, got None"),
    (Focus(0), NUMBER + "0"),
    (Focus(1, "again"), "focus mode must be one of only, reread, got 'again'"),
    (Focus(1, score="bm25"), "focus score must be one of likelihood, relevance, got 'bm25'"),
]


@pytest.mark.parametrize(("value", "message"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_bad_values(value, message, llm):
    calls = [
        lambda: llm.generate(PROMPT, focus=value),
        lambda: llm.generate([PROMPT, dataclasses.replace(PROMPT, focus=value)]),
        lambda: llm.chat(MESSAGES, documents=DOCUMENTS, focus=value),
    ]
    for call in calls:
        error = refused(call)
        assert error.param == "focus"
        with pytest.raises(RequestError, match=message):
            raise error


@pytest.mark.parametrize(
    ("call", "param", "message"),
    [
        (lambda llm: llm.generate("One text.", focus=1), "focus", "the prompt has none; enable chunk_aware"),
        (lambda llm: llm.generate("One # # text.", focus=1, chunk_aware=True), "focus", "the prompt has none"),
        (lambda llm: llm.generate([PROMPT, {"prompt_token_ids": [1, 2]}], focus=1), "focus", "the prompt has none"),
        (lambda llm: llm.chat(MESSAGES, focus=1), "focus", "the prompt has none; give them as documents"),
        (lambda llm: llm.generate(DocumentPrompt([1], [[2], [3]], [4]), focus=1), "question", "the question has one token"),
        (lambda llm: llm.generate(ChunkedPrompt([1], [[2], [3]], [4]), focus=1), "prompt", "the question has one token"),
        (
            lambda llm: llm.generate(DocumentPrompt([1], [[2], [3]], [4, 5]), focus=Focus(1, score="relevance")),
            "focus",
            "focus by relevance reads the question's text; send documents and a question as texts, or use likelihood",
        ),
        (
            lambda llm: llm.generate(DocumentPrompt("", ["a"], "  "), focus=Focus(1, score="relevance")),
            "focus",
            "relevance reads",
        ),
        (lambda llm: llm.generate(DocumentPrompt("", ["a"], ""), focus=1), "question", "the question is empty"),
    ],
    ids=range(9),
)
def test_prompts_without_a_choice_to_make(call, param, message, llm):
    error = refused(lambda: call(llm))
    assert error.param == param
    assert message in str(error)


def test_nothing_to_choose_from(llm):
    """Without tokens in any document, the prompt stays as it is."""
    for score in ("likelihood", "relevance"):
        for documents in ([], ["", ""]):
            prompt, focus = DocumentPrompt("Read. ", documents, "Where?"), Focus(2, "only", score)
            (plain,) = llm.generate(prompt, GREEDY)
            both = llm.generate([prompt, PROMPT], GREEDY, focus=focus)
            assert (both[0].outputs, both[0].prompt_token_ids) == (plain.outputs, plain.prompt_token_ids)
            assert (both[0].focus.documents, both[0].focus.scores) == ([], [None] * len(documents))
            assert len(both[1].focus.documents) == 2


def test_more_to_choose_than_there_is(llm):
    for mode in ("reread", "only"):
        all_, more, most = (llm.generate(PROMPT, GREEDY, focus=Focus(n, mode))[0] for n in (3, 4, 10**30))
        assert sorted(all_.focus.documents) == [0, 1, 2]
        assert all_.outputs == more.outputs == most.outputs
        assert all_.focus.documents == more.focus.documents == most.focus.documents


# Limits


def ids(*lengths):
    return [[number + 1] * length for number, length in enumerate(lengths)]


AGAIN = "focus reads up to {} again: "
CHOOSE = "; choose fewer or take the mode 'only'"


@pytest.mark.parametrize(
    ("documents", "question", "focus", "sampling", "param", "message"),
    [
        # They fit, and the chosen ones again do not.
        (
            ids(700, 650),
            5,
            Focus(2, "reread"),
            {},
            "focus",
            AGAIN.format("2 documents") + "the question behind them of 1355 tokens reaches",
        ),
        (
            ids(1100, 650),
            5,
            Focus(1, "reread"),
            {},
            "focus",
            AGAIN.format("1 document") + "the question behind them of 1105 tokens reaches",
        ),
        (ids(700, 640), 2, Focus(2, "reread"), {"max_tokens": 40}, "focus", "max_tokens 40 would exceed max_model_len 2048"),
        (ids(*[900] * 17), 5, Focus(1, "reread"), {}, "focus", AGAIN.format("1 document") + "the prompt of 16206 tokens"),
        # A document does not fit alone.
        (ids(2048, 9), 5, Focus(1, "only"), {}, "documents", "document 0 of 2048 tokens reaches position 2048"),
        (ids(9, 2040), 40, Focus(1, "only"), {}, "question", "question of 40 tokens reaches position 2080"),
        (ids(1100, 650), 2000, Focus(1, "reread"), {}, "question", "question of 2000 tokens reaches position 3100"),
        (ids(9, 2030), 10, Focus(1, "only"), {"max_tokens": 9}, "max_tokens", "max_tokens 9 would exceed max_model_len 2048"),
        (
            ids(9, 30),
            10,
            Focus(1, "reread"),
            {"max_tokens": 2040},
            "max_tokens",
            "max_tokens 2040 would exceed max_model_len 2048",
        ),
    ],
    ids=range(9),
)
def test_prompts_that_do_not_fit(documents, question, focus, sampling, param, message, llm):
    prompt = DocumentPrompt([9], documents, [8] * question, focus)
    error = refused(lambda: llm.generate([PROMPT, prompt], SamplingParams(**{"max_tokens": 4, **sampling})), CapacityError)
    assert message in str(error)
    assert error.param == param
    assert (CHOOSE in str(error)) == (param == "focus")


def test_only_fits_where_all_documents_do_not(llm):
    """Each of the documents fits the pool alone."""
    documents = ids(*[1800] * 10)
    refused(lambda: llm.generate(DocumentPrompt([9], documents, [8, 7]), GREEDY), CapacityError)
    (output,) = llm.generate(DocumentPrompt([9], documents, [8, 7], Focus(1, "only")), SamplingParams(max_tokens=1))
    assert output.chunk_lens == (1800,)


@pytest.mark.parametrize("form", ["documents", "chunks", "separated", "chat"])
def test_texts_fit_under_only_where_all_of_them_do_not(form, llm):
    texts = [f"{number} " + "word " * 440 for number in range(10)]  # one fits the pool, ten do not
    separator = llm.config.chunk_separator
    prompts = {
        "documents": DocumentPrompt("Read. ", texts, "Where is it?"),
        "chunks": ChunkedPrompt("Read. ", texts, "Where is it?"),
        "separated": separator.join(["Read. ", *texts, "Where is it?"]),
    }

    def parse(focus):
        if form == "chat":
            return llm.frontend.parse_chat(MESSAGES, texts, None, focus)
        return llm.frontend.parse(prompts[form], form == "separated", focus)

    (parsed,) = parse(1)
    assert parsed.layout.num_chunks == 10
    for focus in (None, Focus(1, "reread")):
        assert "send less" in str(refused(lambda focus=focus: parse(focus), CapacityError))


def test_a_document_too_long_for_the_rerank_template(llm):
    prompt = DocumentPrompt("", ["word " * 505, "word"], "Where?", Focus(1, "only", "relevance"))
    error = refused(lambda: llm.generate(prompt, GREEDY), CapacityError)
    assert error.param == "documents"
    assert str(error).startswith("focus by relevance: document 0 has ")
    assert "max_model_len leaves room for" in str(error)
    assert "max_tokens_per_doc" not in str(error)


def test_tokens_of_a_call(llm, monkeypatch):
    """All that is scored counts, also where it is cached."""
    prompt, params = DocumentPrompt([9], ids(100, 50), [8] * 10), SamplingParams(max_tokens=4, temperature=0)
    scored, reread, only = 2 * 12 + 150, 1 + 150 + 100 + 10 + 4, 1 + 100 + 10 + 4
    for focus, tokens in ((Focus(1, "reread"), scored + reread), (1, scored + only)):
        monkeypatch.setattr(llm.frontend, "config", dataclasses.replace(llm.config, max_tokens_per_call=tokens))
        monkeypatch.setattr(llm.frontend, "limits", dataclasses.replace(llm.limits, config=llm.frontend.config))
        llm.generate(prompt, params, focus=focus)
        error = refused(lambda own=focus: llm.generate(prompt, SamplingParams(max_tokens=5), focus=own), CapacityError)
        assert error.param == "documents"
        assert f"with all that focus scores, are {tokens + 1} tokens, max_tokens_per_call is {tokens}" in str(error)


@pytest.mark.parametrize("score", ["likelihood", "relevance"])
def test_the_tokens_of_scores_are_those_that_an_engine_computes(llm, score):
    """With an empty cache; a request of `likelihood` counts its generated token, and documents share a page of the template."""
    llm.reset_prefix_cache()
    prompt = DocumentPrompt("", ["one document", "another, longer document"], "Where is it?", Focus(1, score=score))
    (parsed,) = llm.frontend.parse([prompt], None)
    job = get_score(score)(llm.frontend, [Candidates(parsed, [0, 1])])
    (output,) = llm.generate(prompt, GREEDY)
    more = 2 if score == "likelihood" else llm.limits.block_size
    assert job.tokens == output.focus.computed_tokens + more


def test_a_stage_counts_documents(llm):
    """Other requests wait for a stage, whose documents may be uncached."""
    prompt = DocumentPrompt([9], ids(*[500] * 20), [8, 7], 1)
    job = generate_job(llm.frontend, llm.frontend.parse([prompt], None), GREEDY)
    stage = next(stages_of(job))
    most = STAGE_STEPS * llm.config.max_num_batched_tokens
    assert most - 503 < sum(len(request.layout) for request in stage) <= most + len(stage)


@pytest.mark.parametrize("score", ["likelihood", "relevance"])
def test_scores_bypass_the_cache_with_the_answer(llm, score):
    params = SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)
    llm.reset_prefix_cache()
    computed = set()
    for _ in range(2):
        llm.frontend.scores.forget_cached()  # the results of reranks
        (output,) = llm.generate(PROMPT, params, focus=Focus(1, score=score))
        computed.add(output.focus.computed_tokens)
        assert llm.core.scheduler.trie.num_free == llm.limits.num_pages
    assert len(computed) == 1


# Engines


def test_a_classifier_answers_nothing(llm, monkeypatch):
    monkeypatch.setattr(llm.frontend, "limits", dataclasses.replace(llm.limits, num_labels=2))
    for call in (lambda: llm.generate(PROMPT, focus=1), lambda: llm.chat(MESSAGES, documents=DOCUMENTS, focus=1)):
        assert "sequence classifier" in str(refused(call))


@pytest.mark.ci
def test_consecutive_positions(chat_folder):
    llm = LLM(str(chat_folder), position_strategy="offset", **CHAT_OPTIONS)
    error = refused(lambda: llm.generate(PROMPT, focus=1))
    assert error.param == "focus"
    assert "needs position_strategy 'shared', this engine has 'offset'" in str(error)


def test_without_a_cache(chat_folder, llm):
    """The answers are those of an engine with a cache; everything is computed for every document."""
    other = LLM(str(chat_folder), enable_prefix_caching=False, **CHAT_OPTIONS)
    for focus in (Focus(1, "reread"), Focus(2), Focus(2, "reread", "relevance")):
        (own,), (cold,) = llm.generate(PROMPT, GREEDY, focus=focus), other.generate(PROMPT, GREEDY, focus=focus)
        assert cold.outputs == own.outputs
        assert (cold.focus.documents, cold.focus.scores) == (own.focus.documents, own.focus.scores)
    (cold,) = other.generate(PROMPT, GREEDY, focus=Focus(1, "reread"))
    lens, (question, prefix) = cold.chunk_lens, (other.tokenizer(t).input_ids for t in (PROMPT.question, PROMPT.prefix))
    assert cold.focus.computed_tokens == sum(lens) + len(lens) * (len(question) + len(prefix))


def test_a_document_that_is_not_finite(llm):
    """It fails its own call while documents are chosen, and nothing of it stays."""
    spoilt = DocumentPrompt([9], [[30, 31], [32, 40]], [8, 7], 1)
    with damaged(llm.core, "embed", jnp.nan, row=40), pytest.raises(NonFiniteError):
        llm.generate([PROMPT, spoilt], GREEDY)
    (output,) = llm.generate(spoilt, GREEDY)
    assert np.isfinite(output.focus.scores).all()


# Options beside it


def test_options_of_sampling(llm):
    """Log-probabilities, samples and stop strings are those of the composed prompt, sent as it is."""
    params = [
        SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=2, logprobs=1),
        SamplingParams(seed=3, max_tokens=6, n=2, logprobs=0),
        SamplingParams(temperature=0, max_tokens=12, stop=["a", "e", "i", "o", " "]),
        SamplingParams(temperature=0, max_tokens=6, skip_reading_prefix_cache=True, logprobs=0),
    ]
    documents = [llm.tokenizer(f"Document: {own}\n\n").input_ids for own in DOCUMENTS]
    prefix, question = (llm.tokenizer(own).input_ids for own in (PROMPT.prefix, PROMPT.question))
    for mode in ("reread", "only"):
        for param in params:
            (output,) = llm.generate(PROMPT, param, focus=Focus(2, mode))
            chosen = [documents[number] for number in sorted(output.focus.documents)]
            if mode == "reread":
                again = [token for document in sorted(chosen, key=digest) for token in document]
                (same,) = llm.generate(ChunkedPrompt(prefix, documents, again + question), param)
            else:
                (same,) = llm.generate(ChunkedPrompt(prefix, chosen, question), param)
            assert output.outputs == same.outputs
            assert output.prompt_token_ids == same.prompt_token_ids
            assert output.prompt_logprobs == same.prompt_logprobs
            assert output.prompt == llm.tokenizer.decode(output.prompt_token_ids)
