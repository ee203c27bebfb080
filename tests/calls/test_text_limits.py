"""Texts that can never fit are refused before they are tokenized whole."""

import pytest
from fastapi.testclient import TestClient
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chunkattn.errors import CapacityError
from chunkattn.fair_threads import AbandonedError
from chunkattn.parsers import encode
from chunkattn.parsers.encode import PartEncoder
from chunkattn.server.app import create_app
from chunkattn.web.options import ServerConfig

pytest_plugins = ["tests.told_engine"]

LONG = "Zenuso lives in Kirora and works as a baker. " * 20_000
CHUNKS = {"prefix": "Read.", "documents": ["A.", "B."], "question": "Who?"}
COMPLETION, CHAT, CACHE = "/v1/completions", "/v1/chat/completions", "/v1/cache/documents"
SCORE = {"query": "a", "items": ["b", "c"], "labels": ["yes", "no"]}
ROUTES = {
    "prompt": (COMPLETION, {"prompt": LONG}, "prompt", ""),
    "second prompt": (COMPLETION, {"prompt": ["a", LONG]}, "prompt", "prompt 1"),
    "separated": (COMPLETION, {"prompt": f"a # # b # # {LONG} # # c", "chunk_aware": True}, "prompt", "chunk 1"),
    "prefix": (COMPLETION, {"chunks": {**CHUNKS, "prefix": LONG}}, "prefix", ""),
    "document": (COMPLETION, {"chunks": {**CHUNKS, "documents": ["A.", LONG]}}, "documents", "document 1"),
    "question": (COMPLETION, {"chunks": {**CHUNKS, "question": LONG}}, "question", ""),
    "inspected": ("/inspect", {"prompt": LONG}, "prompt", ""),
    "message": (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages", "messages"),
    "messages": (CHAT, {"messages": [{"role": "user", "content": LONG[:300]}] * 2000}, "messages", "messages"),
    "chat document": (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "documents": ["b", LONG]},
        "documents",
        "document 1",
    ),
    "query": ("/v1/score", {**SCORE, "query": LONG}, "query", "query"),
    "item": ("/v1/score", {**SCORE, "items": ["b", LONG]}, "items", "item 1"),
    "reranked": ("/v1/rerank", {"query": "a", "documents": ["b", LONG]}, "documents", "document 1"),
    "rerank query": ("/v1/rerank", {"query": LONG, "documents": ["b"]}, "query", ""),
    "stored": (CACHE, {"documents": ["b", LONG]}, "documents", "document 1"),
    "stored prefix": (CACHE, {"documents": ["b"], "prefix": LONG}, None, ""),
}


@pytest.mark.parametrize("name", ROUTES)
def test_no_route_tokenizes_a_text_that_cannot_fit(llm, monkeypatch, name):
    path, body, param, part = ROUTES[name]
    lengths, ids = [], PartEncoder._ids
    monkeypatch.setattr(PartEncoder, "_ids", lambda self, text: lengths.append(len(text)) or ids(self, text))
    answer = TestClient(create_app(llm, ServerConfig()), base_url="http://localhost").post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert "max_model_len" in error["message"]
    assert part in error["message"]
    assert param in (None, error["param"])
    assert sum(lengths) < 3 * encode._PIECE


@pytest.mark.parametrize(
    ("path", "body"),
    [("/detokenize", {"tokens": [1] * 65_537}), ("/tokenize", {"prompt": "a " * 70_000, "return_token_strs": True})],
)
def test_few_tokens_are_shown_as_texts(llm, path, body):
    answer = TestClient(create_app(llm, ServerConfig()), base_url="http://localhost").post(path, json=body)
    assert answer.status_code == 400
    assert "up to 65536 are shown" in answer.json()["error"]["message"]


def merging():
    """Return a tokenizer that makes one token of any run of unknown characters, and none of spaces."""
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.mark.parametrize("text", [" " * 300_000 + "a", "ü" * 300_000, "a" * 100, "a" * 101])
def test_texts_of_few_tokens_pass_whatever_their_characters(text):
    """A tokenizer may merge or drop characters without limit; a text a little too long is judged by its exact tokens later."""
    encoder = PartEncoder(merging())
    expected = encoder(text)
    encoder.limit = 100
    assert encoder(text) == expected
    assert encoder.head(text) == text


def test_a_text_of_many_tokens_is_refused_or_cut():
    """Its head has at least the tokens that are kept, and the same ones."""
    encoder = PartEncoder(merging())
    text = " " * 100_000 + "a" * 300_000
    whole = encoder(text)
    encoder.limit = 5000
    with pytest.raises(
        CapacityError, match=r"document 3 of 400000 characters has more than 5000 tokens .*max_model_len is 5000"
    ):
        encoder(text, "document 3", "documents")
    head = encoder.head(text)
    assert len(head) < 150_000
    kept = encoder._ids(head)
    assert kept[:5000] == whole[:5000]


def test_measuring_ends_when_the_caller_has_left(monkeypatch):
    encoder, calls = PartEncoder(merging()), []

    def leave():
        if len(calls) > 2:
            raise AbandonedError

    encoder.limit = 100
    ids = encoder._ids
    monkeypatch.setattr(encode, "check_wanted", leave)
    monkeypatch.setattr(encoder, "_ids", lambda text: calls.append(text) or ids(text))
    with pytest.raises(AbandonedError):
        encoder(" " * 10_000_000)
    assert len(calls) == 3
