"""The rerank calls of other servers: their fields and answers, beside `LLM.rerank`."""

import json
import math

import pytest

QUERY = "Find a person who lives in Oslo."
DOCUMENTS = ["Ben likes tea.", "Ana lives in Oslo.", "Oslo is a town."]
LONG = "Ana lives in Oslo. " * 200
PATHS = ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking")


@pytest.fixture(scope="module")
def ranked(demo):
    """Scores of `DOCUMENTS` by index, best first."""
    return {r.index: r.relevance_score for r in demo.rerank(QUERY, DOCUMENTS).results}


def ask(http, body, path="/v1/rerank"):
    answer = http.post(path, json={"query": QUERY, "documents": DOCUMENTS, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def scores(answer):
    return {r["index"]: r["relevance_score"] for r in answer["results"]}


def refused(http, body, path="/v1/rerank"):
    answer = http.post(path, json={"query": QUERY, **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


# TEI


@pytest.mark.parametrize("path", PATHS)
def test_top_k_is_top_n(path, http, ranked):
    for limit in ({"top_n": 2}, {"top_k": 2}, {"top_n": 2, "top_k": 2}, {"top_k": 2, "top_n": None}):
        assert scores(ask(http, limit, path)) == pytest.approx(dict([*ranked.items()][:2]), abs=1e-6)
    assert refused(http, {"documents": DOCUMENTS, "top_n": 2, "top_k": 1}, path)["param"] == "top_k"


@pytest.mark.parametrize("path", PATHS)
def test_texts_get_tei_s_list(path, http, ranked):
    answer = http.post(path, json={"query": QUERY, "texts": DOCUMENTS}).json()
    assert [entry["index"] for entry in answer] == [*ranked]
    assert [entry["score"] for entry in answer] == pytest.approx([*ranked.values()], abs=1e-6)
    assert all(set(entry) == {"index", "score"} for entry in answer)
    every = {"raw_scores": False, "return_text": True, "truncate": False, "truncation_direction": "Right"}
    answer = http.post(path, json={"query": QUERY, "texts": DOCUMENTS, **every}).json()
    assert [entry["text"] for entry in answer] == [DOCUMENTS[index] for index in ranked]
    assert http.post(path, json={"query": QUERY, "texts": []}).json() == []


def test_raw_scores_are_the_log_odds(http, demo, ranked):
    """From the log-probabilities of the two labels, read by `score` over the same text."""
    answer = http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}).json()
    raw = {entry["index"]: entry["score"] for entry in answer}
    template = demo.frontend.rerank_template
    whole = [template.text.format(query=QUERY, document=document) for document in DOCUMENTS]
    assert template.name == "plain"
    read = demo.score(whole[0][: len(QUERY)], [text[len(QUERY) :] for text in whole], labels=["yes", "no"]).logprobs
    assert [raw[n] for n in range(3)] == pytest.approx([yes - no for yes, no in read], abs=1e-3)
    assert {n: 1 / (1 + math.exp(-value)) for n, value in raw.items()} == pytest.approx(ranked, abs=1e-6)
    assert list(raw.values()) == sorted(raw.values(), reverse=True)
    assert scores(ask(http, {"raw_scores": True})) == pytest.approx(raw)  # Infinity's field, in Cohere's form


def test_texts_are_cut_only_on_request(http, demo):
    texts = ["Ben likes tea.", LONG]
    error = refused(http, {"texts": texts}, "/rerank")
    assert (error["param"], error["code"]) == ("texts", "context_length_exceeded")
    assert "document 1" in error["message"]
    expected = {r.index: r.relevance_score for r in demo.rerank(QUERY, texts, truncate_prompt_tokens=-1).results}
    answer = http.post("/rerank", json={"query": QUERY, "texts": texts, "truncate": True}).json()
    assert {entry["index"]: entry["score"] for entry in answer} == pytest.approx(expected, abs=1e-6)
    left = {"texts": texts, "truncate": True, "truncation_direction": "left"}
    assert refused(http, left, "/rerank")["param"] == "truncation_direction"
    uncut = {"query": QUERY, "texts": DOCUMENTS, "truncation_direction": "Left"}  # changes nothing
    assert http.post("/rerank", json=uncut).status_code == 200


# Cohere


def test_rank_fields_choose_what_is_read(http, demo):
    people = [
        {"title": "Ben", "text": "He likes tea.", "city": "Rome", "age": 40},
        {"title": "Ana", "text": "She lives in Oslo.", "city": "Oslo", "age": 30, "note": None},
    ]
    read = {
        ("text",): ["He likes tea.", "She lives in Oslo."],
        ("city",): ["Rome", "Oslo"],
        ("title", "city"): ["title: Ben\ncity: Rome", "title: Ana\ncity: Oslo"],
        ("city", "title"): ["city: Rome\ntitle: Ben", "city: Oslo\ntitle: Ana"],
        ("age", "note"): ["age: 40", "age: 30"],
    }
    for fields, texts in read.items():
        answer = ask(http, {"documents": people, "rank_fields": [*fields], "return_documents": True})
        expected = {r.index: r.relevance_score for r in demo.rerank(QUERY, texts).results}
        assert scores(answer) == pytest.approx(expected, abs=1e-6), fields
        assert all(r["document"] == people[r["index"]] for r in answer["results"])
    whole = scores(ask(http, {"documents": people}))
    assert whole == pytest.approx(
        {r.index: r.relevance_score for r in demo.rerank(QUERY, ["Ben\nHe likes tea.", "Ana\nShe lives in Oslo."]).results},
        abs=1e-6,
    )
    assert scores(ask(http, {"documents": DOCUMENTS, "rank_fields": ["text"]})) == scores(ask(http, {}))
    for documents in ([{"text": "a", "city": "b"}, {"text": "a"}], [{"city": "b"}, "a text"]):
        error = refused(http, {"documents": documents, "rank_fields": ["city"]})
        assert (error["param"], error["code"]) == ("documents", "invalid_value")
        assert "documents.1" in error["message"]
    assert "documents.0 needs a text" in refused(http, {"documents": [{"city": "b"}]})["message"]


def test_meta_counts_the_tokens(http):
    for path, version in (("/v1/rerank", "1"), ("/v2/rerank", "2")):
        answer = ask(http, {}, path)
        tokens = {"input_tokens": answer["usage"]["prompt_tokens"], "output_tokens": 0}
        assert answer["meta"]["tokens"] == tokens
        assert answer["meta"]["billed_units"] == {"search_units": 1, **tokens}
        assert answer["meta"]["api_version"] == {"version": version}


# Jina, Infinity, Xinference, SiliconFlow, SGLang

SAME = [
    {"query": {"text": QUERY}},
    {"truncation": True},
    {"truncation": False},
    {"max_doc_length": 4096},
    {"max_doc_length": 4096, "max_tokens_per_doc": 4096},
    {"max_query_length": 64},
    {"max_chunks_per_doc": 1024, "overlap_tokens": 80},
    {"max_chunks_per_doc": 10, "chunk_overlap_tokens": 80},
    {"return_len": True},
    {"return_documents": False},
    {"top_n": 3},
]


@pytest.mark.parametrize("fields", SAME, ids=str)
def test_fields_that_change_no_score(fields, http, ranked):
    assert scores(ask(http, fields)) == pytest.approx(ranked, abs=1e-6)


def test_siliconflow_s_answer(http, ranked):
    answer = ask(http, {"return_documents": True, "max_chunks_per_doc": 1024, "overlap_tokens": 80, "top_n": 2})
    assert [(r["index"], r["document"]["text"]) for r in answer["results"]] == [(n, DOCUMENTS[n]) for n in [*ranked][:2]]
    assert answer["meta"]["tokens"]["input_tokens"] > 0
    assert answer["id"].startswith("rerank-")


def test_the_answer_has_the_id_that_was_asked_for(http):
    assert ask(http, {"request_id": "mine"})["id"] == "mine"


def test_cuts_under_other_names(http, demo):
    documents = ["Ben likes tea.", LONG]
    for fields, same in (
        ({"truncation": True}, {"truncate_prompt_tokens": -1}),
        ({"max_doc_length": 6}, {"max_tokens_per_doc": 6}),
    ):
        answer = ask(http, {"documents": documents, **fields})
        expected = {r.index: r.relevance_score for r in demo.rerank(QUERY, documents, **same).results}
        assert scores(answer) == pytest.approx(expected, abs=1e-6)
        assert {r["index"] for r in answer["results"] if r.get("truncated")} == {1}


def test_instruct_is_instruction(http):
    template = {"template": "{instruction}\n{query}\n{document}"}
    asked = [{"template": "generic", name: "Prefer towns."} for name in ("instruct", "instruction")]
    first, second = (scores(ask(http, body)) for body in asked)
    assert first == second != scores(ask(http, {"template": "generic"}))
    assert refused(http, {"documents": DOCUMENTS, "instruct": "x"})["param"] == "instruct"  # `plain` takes none
    assert refused(http, {"documents": DOCUMENTS, **template})["code"] == "invalid_value"


def test_documents_first_are_kept_in_every_dialect(http, demo):
    """A second query over documents of an earlier one computes its own tokens alone, whatever form they came in."""
    first, salt = {"order": "document_first"}, {"cache_salt": "kept"}
    expected = {r.index: r.relevance_score for r in demo.rerank(QUERY, DOCUMENTS, **first).results}
    tokens = [len(demo.parser.encode(text)) for text in (QUERY, *DOCUMENTS)]
    cold = ask(http, first | salt)
    assert scores(cold) == pytest.approx(expected, abs=1e-5)
    assert cold["usage"]["computed_tokens"] == 3 * tokens[0] + sum(tokens[1:])
    for path, body in (
        ("/v1/rerank", {"documents": DOCUMENTS}),
        ("/v2/rerank", {"documents": [{"text": d} for d in DOCUMENTS]}),
    ):
        query = f"Is it {path}?"
        answer = ask(http, {"query": query, **body, **first, **salt}, path)
        assert answer["usage"]["computed_tokens"] == 3 * len(demo.parser.encode(query))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(tokens[1:])
    listed = http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, **first, **salt}).json()
    assert {entry["index"]: entry["score"] for entry in listed} == scores(cold)
    pairs = http.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS, **first, **salt}).json()
    assert {entry["index"]: entry["score"] for entry in pairs["data"]} == scores(cold)
    assert scores(ask(http, {"order": "query_first"})) == scores(ask(http, {})) != scores(cold)
    error = refused(http, {"documents": ["Ben.", LONG], **first})
    assert (error["param"], error["code"]) == ("documents", "context_length_exceeded")
    assert "document 1 has" in error["message"]


def test_items_first_read_stored_items(http, demo):
    body = {"query": QUERY, "items": DOCUMENTS, "labels": ["yes", "no"], "item_first": True, "cache_salt": "items"}
    expected = demo.score(QUERY, DOCUMENTS, labels=["yes", "no"], item_first=True, algorithm="serial")
    for algorithm, ran in (("auto", "serial"), ("prefill_extend", "prefill_extend")):
        answer = http.post("/v1/score", json=body | {"algorithm": algorithm, "query": f"{QUERY} ({algorithm})"}).json()
        assert answer["algorithm"] == ran
    answer = http.post("/v1/score", json=body).json()
    assert answer["algorithm"] == "prefill_extend"
    for found, row in zip(answer["scores"], expected.scores, strict=True):
        assert found == pytest.approx(row, abs=1e-6)
    assert answer["usage"]["computed_tokens"] == 3 * len(demo.parser.encode(QUERY))


REFUSED = [
    ({"documents": ["a"], "order": "documents_first"}, "order"),
    ({"documents": ["a"], "order": "document_first", "algorithm": "packed_segment"}, "algorithm"),
    ({"texts": ["a"], "documents": ["a"]}, "texts"),
    ({"documents": ["a"], "return_text": True}, "return_text"),
    ({"texts": ["a"], "return_documents": True}, "return_documents"),
    ({"documents": ["a"], "instruct": "a", "instruction": "b"}, "instruct"),
    ({"documents": ["a"], "max_doc_length": 5, "max_tokens_per_doc": 6}, "max_doc_length"),
    ({"documents": ["a"], "max_doc_length": 0}, "max_doc_length"),
    ({"documents": ["a"], "max_chunks_per_doc": 0}, "max_chunks_per_doc"),
    ({"documents": ["a"], "rank_fields": []}, "rank_fields"),
    ({"documents": ["a"], "rank_fields": "text"}, "rank_fields"),
    ({"documents": ["a"], "request_id": ""}, "request_id"),
    ({"documents": ["a"], "truncation": "true"}, "truncation"),
    ({"texts": ["a"], "raw_scores": "true"}, "raw_scores"),
    ({"texts": ["a", 5]}, "texts"),
    ({"texts": ["a"], "truncation_direction": "up"}, "truncation_direction"),
    ({"documents": ["a"], "query": {"image": "x"}}, "image"),
    ({"documents": ["a"], "query": {"text": ""}}, "query"),
    ({"texts": ["a\ud800"], "return_text": True}, "texts"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda v: ascii(v)[:60])
def test_contradictions_are_refused_by_name(body, param, http):
    content = json.dumps({"query": QUERY, **body}).encode()
    answer = http.post("/rerank", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert error["code"]


def test_a_query_is_never_cut(http, demo):
    tokens = len(demo.tokenizer(QUERY).input_ids)
    body = {"documents": DOCUMENTS}
    assert http.post("/rerank", json={"query": QUERY, **body, "max_query_length": tokens}).status_code == 200
    error = refused(http, {**body, "max_query_length": tokens - 2})
    assert (error["param"], error["code"]) == ("query", "context_length_exceeded")
    error = refused(http, {**body, "query": "x " * 100_000, "max_query_length": 4})
    assert (error["param"], error["code"]) == ("query", "context_length_exceeded")
