"""The real server, driven by clients that others wrote, beside the same model offline."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import cohere
import httpx
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from chunkattn import ChunkedPrompt, SamplingParams
from chunkattn.cli import app
from chunkattn.server.texts import TokenTexts
from tests.patience import PATIENCE_S
from tests.server_helpers import CACHE, is_idle, wait_until

PROMPT = "Read the notes. # # Ana lives in Oslo. # # Ben lives in Rome. # # Where does Ana live? Answer:"
PARTS = ChunkedPrompt("Read the notes.", ["Ana lives in Oslo # # .", "Ben lives in Rome."], "Where does Ana live? Answer:")
CHUNKS = {"prefix": PARTS.prefix, "documents": PARTS.chunks, "question": PARTS.question}
MODEL = "chunkattn-demo"


def flat(rows):
    return [value for row in rows for value in row]


def greedy(demo, prompt, **options):
    return demo.generate(prompt, SamplingParams(temperature=0, **options))[0]


# Completions


def test_completions_are_those_of_the_engine(client, demo):
    for prompt in (PROMPT, demo.tokenizer(PROMPT).input_ids):
        offline = greedy(demo, PROMPT if prompt is PROMPT else {"prompt_token_ids": prompt}, max_tokens=8, ignore_eos=True)
        done = client.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
        )
        assert done.choices[0].text == offline.outputs[0].text
        assert done.choices[0].finish_reason == offline.outputs[0].finish_reason
        assert done.usage.prompt_tokens == len(offline.prompt_token_ids)
        assert done.usage.completion_tokens == 8


def test_lists_of_prompts_and_samples_come_in_order(client, demo):
    prompts = [PROMPT, "Where does Ben live?", "Who likes figs?"]
    done = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=6, n=2)
    expected = [greedy(demo, p, max_tokens=6).outputs[0].text for p in prompts for _ in range(2)]
    assert [c.index for c in done.choices] == [*range(6)]
    assert [c.text for c in done.choices] == expected


def test_parts_are_never_split_again(client, demo):
    asked = {"model": MODEL, "prompt": "", "temperature": 0, "max_tokens": 4}
    chunked = {"chunks": CHUNKS, "return_chunk_usage": True}
    for cached in (False, True):
        done = client.completions.create(**asked, extra_body=chunked)
        offline = greedy(demo, PARTS, max_tokens=4)
        assert done.choices[0].text == offline.outputs[0].text
        counts = done.usage.prompt_tokens_details.chunks
        assert [c["tokens"] for c in counts] == list(offline.chunk_lens)
        assert ([c["cached_tokens"] for c in counts] == list(offline.chunk_lens)) == cached
    salted = client.completions.create(**asked, extra_body={**chunked, "cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("most", [0, 5])
def test_echoed_log_probabilities_are_the_engine_s(client, demo, most):
    text = "Ana lives in Oslo. Ben"
    done = client.completions.create(model=MODEL, prompt=text, temperature=0, max_tokens=most, echo=True, logprobs=2)
    offline = greedy(demo, text, max_tokens=max(most, 1), logprobs=2, prompt_logprobs=2)
    found, sample = done.choices[0].logprobs, offline.outputs[0]
    kept = len(sample.token_ids) if most else 0
    ids = offline.prompt_token_ids + sample.token_ids[:kept]
    entries = offline.prompt_logprobs + sample.logprobs[:kept]
    assert found.token_logprobs[0] is None
    expected = [entry[token].logprob for token, entry in zip(ids[1:], entries[1:])]
    assert found.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
    assert done.choices[0].text == text + (sample.text if most else "")
    assert done.usage.completion_tokens == kept
    for token, begin in zip(found.tokens[1 : len(offline.prompt_token_ids)], found.text_offset[1:]):
        assert done.choices[0].text[begin : begin + len(token)] == token
    for token, value, top in zip(found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:]):
        assert top[token] == value
        assert len(top) in (2, 3)


def test_streams_add_up(client):
    asked = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 200, "logprobs": 1}
    body = {"ignore_eos": True, "stop": ["qq", "zzzzzz"]}
    whole = client.completions.create(**asked, extra_body=body)
    events = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}, extra_body=body))
    assert "".join(e.choices[0].text for e in events[:-1]) == whole.choices[0].text
    told = [value for e in events[:-1] if e.choices[0].logprobs for value in e.choices[0].logprobs.token_logprobs]
    assert told == pytest.approx(whole.choices[0].logprobs.token_logprobs, abs=1e-5)
    assert [e.choices[0].finish_reason for e in events[:-1]][-1] == whole.choices[0].finish_reason
    assert (events[-1].choices, events[-1].usage.completion_tokens) == ([], 200)
    assert len(events) > 4, "tokens that arrive together share an event, but not all of 200 do"


def test_a_stream_never_shows_a_piece_of_a_stop_string(client):
    text = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=30, extra_body={"ignore_eos": True})
    stop = text.choices[0].text[9:15]
    asked = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 30, "stop": [stop]}
    events = list(client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}))
    assert "".join(e.choices[0].text for e in events) == text.choices[0].text[: text.choices[0].text.index(stop)]
    assert events[-1].choices[0].finish_reason == "stop"


def test_many_clients_at_once(server, demo):
    prompts = [f"Read. # # Person {i} lives in Oslo. # # Where does person {i} live?" for i in range(16)]
    expected = [o.outputs[0].text for o in demo.generate(prompts, SamplingParams(temperature=0, max_tokens=10))]

    async def ask():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as many:
            calls = [many.completions.create(model=MODEL, prompt=p, temperature=0, max_tokens=10) for p in prompts]
            return [done.choices[0].text for done in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == expected


# Chat


def test_chat_over_documents(client, demo):
    messages = [{"role": "system", "content": "Read."}, {"role": "user", "content": "Where does Ana live?"}]
    documents = ["Ana lives in Oslo.", "Ben lives in Rome."]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    offline = demo.chat(messages, params, documents=documents)[0]
    asked = {"model": MODEL, "messages": messages, "temperature": 0, "max_completion_tokens": 6}
    body = {"ignore_eos": True, "documents": [{"text": documents[0]}, documents[1]]}
    done = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, extra_body=body)
    assert done.choices[0].message.content == offline.outputs[0].text
    assert done.usage.prompt_tokens == len(offline.prompt_token_ids)
    expected = [entry[token].logprob for token, entry in zip(offline.outputs[0].token_ids, offline.outputs[0].logprobs)]
    assert [t.logprob for t in done.choices[0].logprobs.content] == pytest.approx(expected, abs=1e-5)
    assert all(len(t.top_logprobs) == 2 for t in done.choices[0].logprobs.content)
    events = list(client.chat.completions.create(**asked, stream=True, extra_body=body))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events) == offline.outputs[0].text
    parts = [
        {**messages[0]},
        {"role": "user", "content": [{"type": "text", "text": "Where does "}, {"type": "text", "text": "Ana live?"}]},
    ]
    assert (
        client.chat.completions.create(**{**asked, "messages": parts}, extra_body=body).choices[0].message
        == done.choices[0].message
    )


def test_an_answer_goes_back_into_the_conversation(client):
    """As clients hand it back, nulls and all."""
    messages = [{"role": "user", "content": "Where does Ana live?"}]
    for _ in range(2):
        reply = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3).choices[0].message
        messages += [reply, reply.model_dump(), {"role": "user", "content": "And Ben?", "name": None}]


# Scores


def test_scores_in_every_dialect(http, demo):
    query, items = "Find a person who lives in Oslo.", ["Ana lives in Oslo.", "", "Ben likes tea."]
    labels = [demo.tokenizer.convert_tokens_to_ids(t) for t in ("▁yes", "▁no")]
    offline = demo.score(query, items, label_token_ids=labels, apply_softmax=True)
    shares = [row[0] for row in offline.scores]
    asked = {"query": query, "items": items, "label_token_ids": labels, "apply_softmax": True}
    for path in ("/score", "/v1/score"):
        answer = http.post(path, json={**asked, "return_logprobs": True, "model": MODEL}).json()
        assert flat(answer["scores"]) == pytest.approx(flat(offline.scores), abs=1e-6)
        assert flat(answer["logprobs"]) == pytest.approx(flat(offline.logprobs), abs=1e-4)
        assert answer["usage"]["prompt_tokens"] == offline.usage.prompt_tokens
    listed = http.post("/generative_scoring", json=asked).json()
    assert [d["score"] for d in listed["data"]] == pytest.approx(shares, abs=1e-6)
    named = http.post("/v1/score", json={"query": query, "items": items, "labels": ["yes", "no"], "apply_softmax": True}).json()
    assert flat(named["scores"]) == pytest.approx(flat(offline.scores), abs=1e-6)
    own = [["yes", "no"], ["no"], ["yes", "no", "yes"]]
    each = http.post("/v1/score", json={"query": query, "items": items, "labels": own, "return_logprobs": True}).json()
    yes_no = dict(zip(("yes", "no"), zip(*offline.logprobs, strict=True), strict=True))
    expected = [[yes_no[label][number] for label in labels] for number, labels in enumerate(own)]
    for found, row in zip(each["logprobs"], expected, strict=True):
        assert found == pytest.approx(row, abs=1e-4)
    assert [len(row) for row in each["scores"]] == [2, 1, 3]
    by_query = {
        "query": [query, query],
        "items": [items, items[:1]],
        "label_token_ids": [[labels, labels[:1], labels], [labels]],
    }
    first, second = http.post("/v1/score", json={**by_query, "return_logprobs": True}).json()["logprobs"]
    assert first == [pytest.approx(row[: 1 + (n != 1)], abs=1e-4) for n, row in enumerate(offline.logprobs)]
    assert second == [pytest.approx(offline.logprobs[0], abs=1e-4)]
    several = http.post("/v1/score", json={**asked, "query": [query, "Who?"]}).json()
    assert flat(several["scores"][0]) == pytest.approx(flat(offline.scores), abs=1e-6)
    for asked_query, rows in ((query, 1), ([query, query], 2)):
        one = http.post("/v1/score", json={**asked, "query": asked_query, "items": items[0]}).json()["scores"]
        one = flat(one) if rows == 2 else one
        assert flat(one) == pytest.approx(offline.scores[0] * rows, abs=1e-6)
    listed = http.post("/generative_scoring", json={**asked, "items": items[0]}).json()
    assert [d["score"] for d in listed["data"]] == pytest.approx(shares[:1], abs=1e-6)


def test_pairs_are_reranked(http, demo):
    query, documents = "Find a person who lives in Oslo.", ["Ben likes tea.", "Ana lives in Oslo."]
    ranked = {r.index: r.relevance_score for r in demo.rerank(query, documents).results}
    for first, second in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items")):
        answer = http.post("/score", json={first: query, second: documents}).json()
        assert [d["score"] for d in answer["data"]] == pytest.approx([ranked[0], ranked[1]], abs=1e-6)
    paired = http.post("/score", json={"text_1": [query, "tea"], "text_2": documents}).json()["data"]
    assert paired[0]["score"] == pytest.approx(ranked[0], abs=1e-5)


def test_cohere_s_clients_rerank(server, demo):
    query, documents = "Find a person who lives in Oslo.", ["Ben likes tea.", "Ana lives in Oslo.", "Oslo is a town."]
    expected = demo.rerank(query, documents, top_n=2)
    for kind in (cohere.ClientV2, cohere.Client):
        answer = kind(api_key="none", base_url=server.url).rerank(model=MODEL, query=query, documents=documents, top_n=2)
        assert [r.index for r in answer.results] == [r.index for r in expected.results]
        for found, wanted in zip(answer.results, expected.results):
            assert found.relevance_score == pytest.approx(wanted.relevance_score, abs=1e-6)


def test_rerank_returns_what_was_asked_for(http):
    documents = ["Ben likes tea.", {"text": "Ana lives in Oslo. " * 5, "id": 7}]
    asked = {"query": "Oslo", "documents": documents, "return_documents": True, "max_tokens_per_doc": 6}
    results = {r["index"]: r for r in http.post("/v1/rerank", json=asked).json()["results"]}
    assert results[0]["document"] == {"text": documents[0]}
    assert results[1]["document"] == documents[1]
    assert results[1]["truncated"]


def test_a_cut_that_was_asked_for_is_lowered_to_what_fits(server, http, demo):
    """4,096 is what Haystack's client sends by default; the demo model has 512 positions."""
    query, documents = "Find a person who lives in Oslo.", ["Ben likes tea.", "Ana lives in Oslo. " * 200]
    room = 512 - len(demo.tokenizer(query).input_ids)
    expected = demo.rerank(query, documents, max_tokens_per_doc=room)
    scores = {r.index: r.relevance_score for r in expected.results}
    cuts = ({"max_tokens_per_doc": 4096}, {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 4096})
    for path, cut in zip(("/v2/rerank", "/v1/rerank", "/rerank"), cuts, strict=True):
        asked = {"query": query, "documents": documents}
        refused = http.post(path, json=asked)
        assert refused.status_code == 400
        assert f"leaves room for {room}" in refused.json()["error"]["message"]
        results = http.post(path, json={**asked, **cut}).json()["results"]
        assert {r["index"]: "truncated" in r for r in results} == {0: False, 1: True}
        assert {r["index"]: r["relevance_score"] for r in results} == pytest.approx(scores, abs=1e-6)
        pairs = http.post("/score", json={"text_1": query, "text_2": documents, **cut}).json()["data"]
        assert ["truncated" in d for d in pairs] == [False, True]
        assert [d["score"] for d in pairs] == pytest.approx([scores[0], scores[1]], abs=1e-6)
    haystack = cohere.ClientV2(api_key="none", base_url=server.url)
    answer = haystack.rerank(model=MODEL, query=query, documents=documents, max_tokens_per_doc=4096)
    assert {r.index: r.relevance_score for r in answer.results} == pytest.approx(scores, abs=1e-6)


def test_repeated_documents_are_computed_once(http):
    body = {"query": "Who likes honey?", "documents": ["Lezudo likes honey."] * 16 + [f"Number {n}." for n in range(14)]}
    once = http.post("/v1/rerank", json={**body, "documents": body["documents"][15:], "cache_salt": "once"}).json()["usage"]
    first, again = [http.post("/v1/rerank", json=body).json() for _ in range(2)]
    assert first["usage"]["computed_tokens"] == once["computed_tokens"]
    usage = again["usage"]
    assert (usage["computed_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (0, usage["prompt_tokens"])
    assert again["results"] == first["results"]
    pairs = {"text_1": ["Who likes honey?"] * 30, "text_2": body["documents"]}
    assert http.post("/score", json=pairs).json()["usage"]["computed_tokens"] == 0


# What is served


def test_what_is_served(http, client, demo):
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert http.get("/health").json()["status"] == http.get("/readyz").json()["status"] == "ready"
    assert http.get("/livez").status_code == 200
    assert "version" in http.get("/version").json()
    text = "Ana lives in Oslo."
    ids = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert ids["tokens"] == demo.tokenizer(text).input_ids
    assert "".join(ids["token_strs"]).strip() == text
    assert http.post("/detokenize", json={"tokens": ids["tokens"]}).json() == {"prompt": text}
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/score", "/v1/rerank", "/generative_scoring"} <= set(paths)
    metrics = http.get("/metrics").text
    assert 'chunkattn_http_requests_total{route="/v1/models",status="200"}' in metrics
    assert "chunkattn_steps_total" in metrics


# Bad requests

USER = {"role": "user", "content": "x"}
COMPLETION, CHAT, SCORE, RERANK = "/v1/completions", "/v1/chat/completions", "/v1/score", "/v1/rerank"
BAD = [
    (COMPLETION, {"prompt": "x", "tools": []}, "tools", "unsupported_parameter"),
    (COMPLETION, {"prompt": "x", "best_of": 2}, "best_of", "unsupported_parameter"),
    (COMPLETION, {"prompt": "x", "suffix": "y"}, "suffix", "unsupported_parameter"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}},
        "response_format",
        "invalid_value",
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "invalid_value"),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "invalid_value"),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"documents": []}}, "chat_template_kwargs", "invalid_value"),
    (CHAT, {"messages": []}, "messages", "invalid_value"),
    (CHAT, {"messages": [{**USER, "tool_calls": [{"function": {"name": "f"}}]}]}, "messages", "invalid_value"),
    (CHAT, {"messages": [{**USER, "audio": {"id": "x"}}]}, "audio", "unsupported_parameter"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "a": 1}]}]}, "a", "unsupported_parameter"),
    (CHAT, {"messages": [USER] * 4097}, "messages", "invalid_value"),
    (CHAT, {"messages": [USER], "documents": [{"text": "x", "url": "y"}]}, "url", "unsupported_parameter"),
    (CHAT, {}, "messages", "missing_required_parameter"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs", "invalid_value"),
    (COMPLETION, {"prompt": "x", "temperature": "hot"}, "temperature", "invalid_value"),
    (COMPLETION, {"prompt": "x", "temperature": -1}, "temperature", "invalid_value"),
    (COMPLETION, {"prompt": "x", "n": True}, "n", "invalid_value"),
    (COMPLETION, {"prompt": "x", "max_tokens": 0}, "max_tokens", "invalid_value"),
    (COMPLETION, {"prompt": "x", "max_tokens": -1}, "max_tokens", "invalid_value"),
    (COMPLETION, {"prompt": [{}] * 30_000}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
    (COMPLETION, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "invalid_value"),
    (COMPLETION, {"prompt": "x", "max_tokens": 10**6}, "max_tokens", "context_length_exceeded"),
    (COMPLETION, {"prompt": "x " * 2000}, "prompt", "context_length_exceeded"),
    (COMPLETION, {"prompt": "x", "chunks": CHUNKS}, "prompt", "invalid_value"),
    (COMPLETION, {"chunks": {"documents": ["a"], "question": ""}}, "question", "invalid_value"),
    (COMPLETION, {"prompt": [10**6]}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": [-1]}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": []}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": ["x", ""]}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": ["x"] * 2000}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (COMPLETION, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
    (COMPLETION, {"prompt": "x", "logprobs": 1000}, "logprobs", "invalid_value"),
    (COMPLETION, {"prompt": "\ud800"}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": "x", "\ud800": 1}, "?", "unsupported_parameter"),
    (SCORE, {"query": "x", "items": ["y"]}, "label_token_ids", "missing_required_parameter"),
    (SCORE, {"query": "", "items": ["y"], "labels": ["yes"]}, "query", "invalid_value"),
    (SCORE, {"query": "x", "items": ["y"], "labels": ["two words"]}, "labels", "invalid_value"),
    (SCORE, {"query": "x", "items": ["y"], "labels": [["yes"], ["no"]]}, "labels", "invalid_value"),
    (SCORE, {"query": "x", "items": ["y"], "label_token_ids": [["yes"]]}, "label_token_ids", "invalid_value"),
    (SCORE, {"query": "x", "items": ["y"], "labels": ["yes"], "algorithm": "magic"}, "algorithm", "invalid_value"),
    (SCORE, {"query": ["x"] * 2000, "items": ["y"], "labels": ["yes"]}, "query", "invalid_value"),
    (SCORE, {"query": "x", "items": ["y"] * 10_001, "labels": ["yes"]}, "items", "invalid_value"),
    (RERANK, {"query": "x", "documents": ["y"] * 10_001}, "documents", "invalid_value"),
    (
        RERANK,
        {"query": "x", "documents": [{"text": "y", "t": "\ud800"}], "return_documents": True},
        "documents",
        "invalid_value",
    ),
    (SCORE, {"query": "x", "items": 5, "labels": ["yes"]}, "items", "invalid_value"),
    (SCORE, {"text_1": "x"}, "text_1", "invalid_value"),
    (SCORE, {"text_1": ["x", "y"], "text_2": ["a", "b", "c"]}, "text_1", "invalid_value"),
    (RERANK, {"query": "x", "documents": ["y"], "top_n": -1}, "top_n", "invalid_value"),
    (RERANK, {"query": "x", "documents": [1]}, "documents", "invalid_value"),
    ("/detokenize", {"tokens": [10**9]}, "tokens", "invalid_value"),
    ("/tokenize", {}, "prompt", "missing_required_parameter"),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), BAD, ids=lambda v: ascii(v)[:60])
def test_bad_requests_are_told_what_is_wrong(http, path, body, param, code):
    content = json.dumps(body).encode()
    answer = http.post(path, content=content, headers={"Content-Type": "application/json", "X-Request-Id": "mine"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert error["message"]
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'"x"', 400),
        (b"\xff\xfe", 400),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        (b'{"prompt": "' + b"x" * (33 << 20) + b'"}', 413),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"prompt": "x", "temperature": NaN}', 400),
        *(
            (b'{"prompt": "' + b"x" * 100_000 + rest, 400)
            for rest in (b"", b'\xff"}', b'\\ud800"}', b'", "seed": NaN}', b'", "n": 1e999}')
        ),
    ],
    ids=[
        "empty",
        "cut",
        "list",
        "text",
        "utf8",
        "deep",
        "large",
        "digits",
        "nan",
        "long-cut",
        "long-utf8",
        "long-surrogate",
        "long-nan",
        "long-number",
    ],
)
def test_bodies_that_are_no_requests(http, content, status):
    answer = http.post(COMPLETION, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_large_body_without_a_length(http):
    answer = http.post(COMPLETION, content=(b"x" * (1 << 20) for _ in range(40)), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000,
        b"GET /" + b"a" * 100_000,
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20_000,
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: yz\r\n" * 30_000,
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"y" * 400_000,
    ],
    ids=["header", "path", "headers", "trailers", "trailer"],
)
def test_endless_heads(server, sent):
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=PATIENCE_S) as connection:
        with suppress(ConnectionError):  # it may hang up while we send
            connection.sendall(sent)
        with suppress(ConnectionError):
            answer = connection.recv(1 << 16)
            assert not answer or answer.startswith(b"HTTP/1.1 400")
            while connection.recv(1 << 16):
                pass


def test_offsets_count_characters(client):
    """Offsets are places in the text that is sent back, whatever bytes its tokens are."""
    asked = {
        "model": MODEL,
        "prompt": "Ana likes 油. # # Öl and 🍯. # # Ben",
        "max_tokens": 4,
        "temperature": 0,
        "echo": True,
        "logprobs": 0,
    }
    (whole,) = client.completions.create(**asked).choices
    offsets, tokens = whole.logprobs.text_offset, whole.logprobs.tokens
    assert offsets[0] == 0
    for begin, end, token in zip(offsets, [*offsets[1:], len(whole.text)], tokens, strict=True):
        if "\ufffd" not in token:
            assert whole.text[begin:end] in (token, token.removeprefix(" "))
        else:
            assert whole.text[begin:end] in ("", "油", "Ö", "🍯")
    streamed = [choice for event in client.completions.create(**asked, stream=True) for choice in event.choices]
    assert "".join(choice.text for choice in streamed) == whole.text
    assert [offset for choice in streamed if choice.logprobs for offset in choice.logprobs.text_offset] == offsets


def byte_level_tokenizer():
    """Return a tokenizer of single bytes, as byte-level BPE spells them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("byte_level", [False, True])
def test_bytes_of_tokens(demo, byte_level):
    tokenizer = byte_level_tokenizer() if byte_level else demo.tokenizer
    texts, text = TokenTexts(tokenizer, []), "Ana likes 油, Öl and 🍯."
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert b"".join(map(texts.raw, ids)).decode().strip() == text


def test_other_paths_methods_and_models(http):
    assert http.post("/v1/embeddings", json={}).json()["error"]["code"] == "not_found"
    assert http.get(COMPLETION).status_code == 405
    assert http.get("/../../etc/passwd").status_code == 404
    answer = http.post(COMPLETION, json={"model": "gpt-4", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert http.get("/v1/models/gpt-4").status_code == 404


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(server, http, stream):
    asked = {"prompt": "Tell me.", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "n": 8, "stream": stream}

    def aborted():
        found = re.search(r'^chunkattn_requests_total{outcome="aborted"} (\S+)$', http.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def leave():
        if stream:
            with http.stream("POST", COMPLETION, json=asked) as answer:
                next(answer.iter_lines())
            return
        os.kill(server.engine_pid, signal.SIGSTOP)  # so that no engine is too fast
        try:
            with pytest.raises(httpx.ReadTimeout):
                http.post(COMPLETION, json=asked, timeout=0.3)
        finally:
            os.kill(server.engine_pid, signal.SIGCONT)

    before = aborted()
    for _ in range(10):
        leave()
        wait_until(lambda: is_idle(http))
        if aborted() > before:
            return
    raise AssertionError("every answer had ended, or no request was read, before its client left")


# Documentation

ROOT = Path(__file__).parents[2]
RUNNERS = {".py": sys.executable, ".sh": "bash"}
EXAMPLES = sorted(path for path in (ROOT / "examples" / "server").iterdir() if path.suffix in RUNNERS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(server, example):
    assert example.suffix != ".sh" or shutil.which("curl"), "install curl"
    command = [RUNNERS[example.suffix], example, server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "Pegelu" in done.stdout


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/guides/reranking.md", "docs/reference/http.md"])
def test_documented_calls(server, page):
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    calls = [
        part for block in blocks for part in re.split(r"^(?=curl )", block, flags=re.MULTILINE) if part.startswith("curl ")
    ]
    assert calls
    for call in calls:
        command = call.replace("localhost:8000", server.url)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        answer = json.loads(done.stdout)
        assert not (isinstance(answer, dict) and answer.get("error")), done.stdout


@pytest.mark.parametrize("generation", ["chunks", "prompt", "chat"])
def test_load_of_streams(server, generation):
    options = ["--generation", generation, "--workload", "rag-2x10", "--output-tokens", "6", "--document-pool", "4"]
    (run,) = bench(server, *options, "--prefix-tokens", "5", "--question-tokens", "5")
    assert (run["statuses"], run["completion_tokens"]) == ({"200": 4}, 6)
    assert run["latency_ms"]["max"] > run["ttft_ms"]["p50"] > 0
    assert run["gap_ms"]["p50"] > 0
    assert 30 <= run["prompt_tokens"] < 80


@pytest.mark.parametrize("scoring", ["rerank", "score", "pairs", "generative_scoring"])
def test_load_of_scores(server, scoring):
    (run,) = bench(server, "--scoring", scoring, "--workload", "rerank-3x20", "--item-tokens", "5")
    assert run["statuses"] == {"200": 4}
    assert run["prompt_tokens"] >= 20 + 3 * 5


def bench(server, *options):
    """The runs of `chunkattn bench serve` on a server."""
    common = ["--url", server.url, "--rates", "20", "--requests", "4", "--seconds", "60", "--json", "-"]
    result = CliRunner().invoke(app, ["bench", "serve", *common, *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["runs"]


@pytest.mark.slow
def test_clients_of_every_kind_for_a_while():
    """Right answers, no errors, everything free in the end, whoever leaves midway."""
    options = ["--seconds", "20", "--clients", "32", "--json", "-"]
    variables = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(CACHE)}
    command = [sys.executable, "-m", "benchmarks.serve_load", *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    result = json.loads(done.stdout)
    assert not result["errors"]
    assert all(found["finished"] and found["disconnected"] for found in result["requests"].values())
