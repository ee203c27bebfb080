"""`focus` against its definition over transformers, and the tokens that it computes."""

from copy import deepcopy

import numpy as np
import pytest
import torch

from chunkattn import LLM, ChunkedPrompt, DocumentPrompt, Focus, SamplingParams
from chunkattn.calls import generate
from chunkattn.calls.generate import generate_job
from chunkattn.calls.rerank_template import GENERIC
from tests import tokenizer_files
from tests.chat_templates import CHATML
from tests.checkpoints import CHECKPOINTS, CHUNKABLE, VOCAB, Oracle, make_checkpoint
from tests.focus_definition import GREEDY, MODES, Definition
from tests.reranker_files import CHAT_OPTIONS

QUICK = [pytest.param(n, marks=() if n in ("llama", "qwen3") else pytest.mark.ci) for n in CHUNKABLE]
DOCUMENTS = ["Figs are sweet. " * 3, "Ana is a person of Oslo.", "", "A city is large.", "Ana is a person of Oslo."]
QUESTION = "Where does Ana live?"
salts = (f"focus {number}" for number in range(1 << 20))


def random_prompts(rng, count):
    """Prefix, documents and question as token ids; some prefixes and documents are empty, some documents repeat."""
    found = []
    for number in range(count):
        documents = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 20, rng.integers(1, 5))]
        if number % 2:
            documents.insert(int(rng.integers(len(documents) + 1)), [])
            documents.insert(int(rng.integers(len(documents) + 1)), documents[-1])
        prefix = rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist() if number % 3 else []
        found.append((prefix, documents, rng.integers(0, VOCAB, int(rng.integers(2, 12))).tolist()))
    return found


def check_random_prompts(llm, definition, count=6):
    """Every mode with one to three documents to choose, in one call; then the same with a warm cache."""
    cases = [
        (parts, 1 + number // 2 % 3, MODES[number % 2])
        for number, parts in enumerate(random_prompts(np.random.default_rng(3), count))
    ]
    prompts = [DocumentPrompt(*parts, focus=Focus(top_n, mode)) for parts, top_n, mode in cases]
    llm.reset_prefix_cache()
    for _ in ("cold", "warm"):
        for (parts, top_n, mode), output in zip(cases, llm.generate(prompts, GREEDY), strict=True):
            definition.check(output, *parts, top_n, mode)


@pytest.mark.parametrize("name", QUICK)
def test_families(name, engine, oracle):
    check_random_prompts(engine(name), Definition(oracle(name)))


def test_a_gap(engine, oracle):
    check_random_prompts(engine("qwen3", chunk_position_gap=37), Definition(oracle("qwen3"), gap=37))


@pytest.mark.ci
def test_temperature_and_scale(engine, oracle):
    llm = engine("qwen3", attention_backend="xla", chunk_temperature=0.7, chunk_scale=1.3)
    check_random_prompts(llm, Definition(oracle("qwen3"), weighing=(0.7, 1.3)))


IN_CI = "llama-yarn", "qwen3-moe", "granite4", "smollm3"
"""A scaled rotary embedding, experts, factors, and layers without a rotary embedding."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.ci if n in IN_CI else pytest.mark.slow) for n in CHUNKABLE])
def test_families_with_gap_temperature_and_scale(name, engine, oracle):
    llm = engine(name, chunk_position_gap=11, chunk_temperature=0.8, chunk_scale=0.8)
    check_random_prompts(llm, Definition(oracle(name), 11, (0.8, 0.8)), count=18)


# Texts and chats


@pytest.fixture(scope="module")
def chat_oracle(chat_folder):
    return Oracle(chat_folder)


def read(tokenizer, *texts):
    """Token ids of each text alone."""
    return [tokenizer(text, add_special_tokens=False).input_ids if text else [] for text in texts]


def documents_of(tokenizer):
    return read(tokenizer, *(text and f"Document: {text}\n\n" for text in DOCUMENTS))


def test_chats(chat_llm, chat_oracle):
    """The documents lie before the first user message, and the question holds all that follows."""
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": QUESTION},
    ]
    before = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    after = f"Hello.<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n"
    prefix, question = read(chat_llm.tokenizer, before, f"{after}<|im_start|>assistant\n")
    (earlier,) = read(chat_llm.tokenizer, after[: after.index(QUESTION)])
    assert 1 < len(earlier) < len(question)
    documents, definition = documents_of(chat_llm.tokenizer), Definition(chat_oracle)
    scores = definition.likelihoods(prefix, documents, question, len(earlier))
    assert scores[0] != pytest.approx(definition.likelihoods(prefix, documents, question)[0], abs=0.01)
    for top_n, mode in ((1, "reread"), (2, "only"), (9, "reread")):
        (output,) = chat_llm.chat(messages, GREEDY, documents=DOCUMENTS, focus={"top_n": top_n, "mode": mode})
        definition.check(output, prefix, documents, question, top_n, mode, scores)
        assert output.prompt == chat_llm.tokenizer.decode(output.prompt_token_ids)


def relevances(oracle, tokenizer, query, documents):
    """Log-odds of yes under the generic template with the document first."""
    text = GENERIC.document_first.replace("{instruction}", GENERIC.instruction).replace("{query}", query)
    head, rest = text.split("{document}")
    (before, after), (yes, no) = read(tokenizer, head.rstrip(" "), rest), read(tokenizer, *GENERIC.labels)
    spaces = head[len(head.rstrip(" ")) :]
    found = []
    for document in documents:
        (own,) = read(tokenizer, spaces + document) if document else [[]]
        logits = oracle.logits([*before, *own, *after])[-1]
        found.append(float(logits[yes[0]] - logits[no[0]]) if document else None)
    return found


def test_relevance(chat_llm, chat_oracle, chat_folder):
    """Scores are those of a rerank, and of transformers under the template's text."""
    scores = relevances(chat_oracle, chat_llm.tokenizer, QUESTION, DOCUMENTS)
    other = LLM(str(chat_folder), **CHAT_OPTIONS)
    ranked = other.rerank(QUESTION, DOCUMENTS, order="document_first", template="generic")
    by_rerank = {result.index: result.logit for result in ranked.results}
    definition, documents = Definition(chat_oracle), documents_of(chat_llm.tokenizer)
    (prefix, question), focus = read(chat_llm.tokenizer, "Read. ", QUESTION), Focus(2, "reread", "relevance")
    (output,) = chat_llm.generate(DocumentPrompt("Read. ", DOCUMENTS, QUESTION, focus), GREEDY)
    definition.check(output, prefix, documents, question, 2, "reread", scores)
    assert output.focus.scores == [by_rerank[n] if text else None for n, text in enumerate(DOCUMENTS)]
    messages = [{"role": "user", "content": "Hello."}, {"role": "user", "content": QUESTION}]
    (chat,) = chat_llm.chat(messages, GREEDY, documents=DOCUMENTS, focus=focus)
    assert chat.focus.scores == output.focus.scores
    # Chunks as they are have no other text than their tokens.
    (chunked,) = chat_llm.generate(ChunkedPrompt("Read. ", DOCUMENTS, QUESTION), GREEDY, focus=focus)
    np.testing.assert_allclose(chunked.focus.scores[0], scores[0], atol=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["llama2", "metaspace"])
def test_sentencepiece(kind, tmp_path):
    """Every part is tokenized alone, and only the prefix begins with the leading token."""
    config = deepcopy(CHECKPOINTS["llama"])
    config.vocab_size = 512
    make_checkpoint(config, tmp_path)
    tokenizer, _ = tokenizer_files.FILES[kind]
    tokenizer_files.add_tokenizer(
        tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML}, json=tokenizer.to_str()
    )
    llm, texts = LLM(str(tmp_path), **CHAT_OPTIONS), ["abc the", "a thing", "", "abc the"]
    documents = read(llm.tokenizer, *(text and f"Document: {text}\n\n" for text in texts))
    (before, question), definition = read(llm.tokenizer, "Read", "where is it"), Definition(Oracle(tmp_path))
    for mode in MODES:
        (output,) = llm.generate(DocumentPrompt("Read", texts, "where is it", Focus(2, mode)), GREEDY)
        definition.check(output, [1, *before], documents, question, 2, mode)


# Tokens


@pytest.mark.parametrize("top_n", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_cached_documents_cost_the_question_alone(mode, top_n, engine):
    """The counts of the output are those of the engine's metrics, and only what must be computed is."""
    llm, rng, salt = engine("qwen3"), np.random.default_rng(4), next(salts)
    prefix, question = rng.integers(0, VOCAB, 21).tolist(), rng.integers(0, VOCAB, 19).tolist()
    documents = [rng.integers(0, VOCAB, n).tolist() for n in (5, 16, 40, 33)]
    documents += [documents[1], []]
    llm.precompute(prefix, documents, cache_salt=salt)
    counter = llm.core.metrics.tokens.labels("prefill")._value
    before, one = counter.get(), SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.generate(DocumentPrompt(prefix, documents, question, Focus(top_n, mode)), one, cache_salt=salt)
    chosen = sum(len(documents[number]) for number in output.focus.documents)
    assert output.focus.computed_tokens == 4 * len(question)
    computed = len(question) + (chosen if mode == "reread" else 0)
    if mode == "only" and top_n == 1:  # the question has just been computed: its full page of 16 tokens is cached
        computed -= 16
    assert len(output.prompt_token_ids) - output.num_cached_tokens == computed
    assert counter.get() - before == 4 * len(question) + computed
    # The tokens of a question have log-probabilities only where they are computed.
    before = counter.get()
    (again,) = llm.generate(DocumentPrompt(prefix, documents, question, Focus(top_n, mode)), one, cache_salt=salt)
    assert again.focus == output.focus
    last = len(again.prompt_token_ids) - again.num_cached_tokens
    assert 0 < last <= 16
    assert counter.get() - before == 4 * len(question) + last
    assert again.outputs == output.outputs


def test_cold_documents_are_computed_once(engine):
    llm, rng, salt = engine("qwen3"), np.random.default_rng(5), next(salts)
    prefix, question = rng.integers(0, VOCAB, 21).tolist(), rng.integers(0, VOCAB, 19).tolist()
    documents = [rng.integers(0, VOCAB, n).tolist() for n in (5, 16, 40)]
    (output,) = llm.generate(DocumentPrompt(prefix, documents, question, Focus(1, "reread")), GREEDY, cache_salt=salt)
    assert output.focus.computed_tokens == len(prefix) + sum(map(len, documents)) + 3 * len(question)
    assert output.num_cached_chunk_tokens == (5, 16, 40)


@pytest.mark.parametrize("priority", [0, [2, 0, 1, 0, 2, 1, 0]])
def test_many_prompts_find_their_documents_when_they_are_answered(priority, checkpoint, monkeypatch):
    """Documents behind six prefixes exceed the pool: groups of three compute each once, and answers keep their places."""
    rng, groups = np.random.default_rng(8), []
    llm = LLM(str(checkpoint("qwen3")), skip_tokenizer_init=True, max_num_batched_tokens=256, kv_cache_memory_bytes=2 << 20)
    pages = llm.limits.num_pages // 40  # of one document: nine of them take nearly a quarter of the pool
    documents = [rng.integers(0, VOCAB, 16 * pages - 3).tolist() for _ in range(9)]
    prompts = [DocumentPrompt([number], documents, [1, 2, 3, number], Focus(2, "reread")) for number in range(6)]
    prompts.append({"prompt_token_ids": [5, 6, 7]})
    monkeypatch.setattr(
        generate, "generate_job", lambda f, own, *a, **k: groups.append(len(own)) or generate_job(f, own, *a, **k)
    )
    counter = llm.core.metrics.tokens.labels("prefill")._value
    outputs = llm.generate(prompts, GREEDY, priority=priority)
    assert sorted(groups) == [3, 4]
    assert counter.get() == 6 * (1 + (9 + 2) * len(documents[0]) + (9 + 1) * 4) + 3
    assert llm.core.metrics.value("time_to_first_token_seconds_count") == 7
    for prompt, output in zip(prompts, outputs, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert (output.outputs, output.focus and output.focus.scores) == (alone.outputs, alone.focus and alone.focus.scores)


def test_relevance_keeps_documents_for_later_questions(chat_llm):
    salt, focus = next(salts), Focus(1, "only", "relevance")
    costs = []
    for question in (QUESTION, "Where does Ben live?", "Where does Ben live?"):
        prompt = DocumentPrompt("Read. ", DOCUMENTS, question, focus)
        (output,) = chat_llm.generate(prompt, SamplingParams(max_tokens=1), cache_salt=salt)
        costs.append(output.focus.computed_tokens)
    assert costs[0] > costs[1] > costs[2] == 0
    assert torch.isfinite(torch.tensor([score for score in output.focus.scores if score is not None])).all()
