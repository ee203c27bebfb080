"""Adapters over HTTP, chosen by `model`: the answers of a model with each adapter merged, on every route that takes a model."""

import numpy as np
import pytest

from chunkattn import LLM, Choice, SamplingParams
from chunkattn.adapter_salt import salted
from chunkattn.schema.piece_keys import keys_of
from tests.adapter_files import make_adapter
from tests.checkpoints import Oracle
from tests.gateway.test_process import Route
from tests.reranker_files import CHAT_OPTIONS
from tests.server_helpers import ServerProcess, wait_until

TEXTS = ["The figs came late.", "Nila lives in Tunise, by the sea."]
MESSAGES = [{"role": "user", "content": "Who likes figs?"}]
QUESTION = {"type": "choice", "name": "who", "instructions": "Who?", "choices": [{"value": "Nila"}, {"value": "Rumi"}]}
NAMES = (None, "a", "b")
DOCUMENTS = "/v1/cache/documents"


@pytest.fixture(scope="module")
def folders(chat_folder, tmp_path_factory):
    """Folders of two adapters."""
    model, made = Oracle(chat_folder).model, tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("ab"):
        make_adapter(made / name, model, ("q_proj", "v_proj", "down_proj"), seed=seed, size=0.6)
    return made


@pytest.fixture(scope="module")
def server(chat_folder, folders):
    options = [f"--lora-modules={name}={folders / name}" for name in "ab"]
    sizes = ["--max-num-batched-tokens=256", f"--kv-cache-memory-bytes={16 << 20}", "--max-num-seqs=16", "--no-warmup"]
    made = ServerProcess(str(chat_folder), "--served-model-name=base", "--report-documents", *options, *sizes)
    yield made
    assert made.close() == 0


@pytest.fixture(scope="module")
def merged(chat_folder, folders):
    """An engine of each model, with its adapter merged."""
    return {name: LLM(str(chat_folder), adapter=name and str(folders / name), **CHAT_OPTIONS) for name in NAMES}


def post(http, path, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_models_list_the_adapters(http, folders):
    data = {entry["id"]: entry for entry in http.get("/v1/models").json()["data"]}
    assert [*data] == ["base", "a", "b"]
    assert (data["a"]["parent"], data["a"]["root"]) == ("base", str(folders / "a"))
    assert "parent" not in data["base"]
    assert http.get("/v1/models/b").json() == data["b"]
    asked = {"input": "Nila likes figs.", "questions": [QUESTION]}
    methods = {entry["decide_method"] for entry in data.values()}  # the base model's verdict serves its adapters
    assert {post(http, "/v1/decisions", **asked, model=name)["method"] for name in data} == methods
    assert len(methods) == 1
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/score", {"query": "x", "items": ["y"]})):
        refused = http.post(path, json={**body, "model": "c"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "it is 'base' or 'a' or 'b'" in refused.json()["error"]["message"]


def test_a_salt_names_no_adapter(http):
    refused = http.post("/v1/completions", json={"prompt": "x", "cache_salt": salted("a", "own")})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


@pytest.mark.parametrize("name", NAMES)
def test_every_route_answers_with_the_adapter_that_model_names(name, http, merged):
    llm, chosen = merged[name], {"model": name} if name else {}
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0)
    answer = post(http, "/v1/completions", prompt=TEXTS[0], temperature=0, max_tokens=4, logprobs=0, **chosen)
    expected = llm.generate(TEXTS[0], params)[0].outputs[0]
    assert (answer["model"], answer["choices"][0]["text"]) == (name or "base", expected.text)
    found = answer["choices"][0]["logprobs"]["token_logprobs"]
    own = [entry[token].logprob for entry, token in zip(expected.logprobs, expected.token_ids, strict=True)]
    np.testing.assert_allclose(found, own, atol=1e-4)

    answer = post(http, "/v1/chat/completions", messages=MESSAGES, documents=TEXTS, temperature=0, max_tokens=4, **chosen)
    expected = llm.chat(MESSAGES, params, documents=TEXTS)[0].outputs[0]
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == (name or "base", expected.text)

    answer = post(http, "/v1/score", query="Is it late?", items=TEXTS, label_token_ids=[7, 11], **chosen)
    expected = llm.score("Is it late?", TEXTS, label_token_ids=[7, 11])
    assert answer["model"] == (name or "base")
    np.testing.assert_allclose(answer["scores"], expected.scores, rtol=1e-4)

    answer = post(http, "/v1/rerank", query="figs", documents=TEXTS, **chosen)
    expected = {result.index: result.relevance_score for result in llm.rerank("figs", TEXTS).results}
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert answer["model"] == (name or "base")
    assert found == pytest.approx(expected, rel=1e-4)

    answer = post(http, "/v1/decisions", input="Nila likes figs.", questions=[QUESTION], method="letters", **chosen)
    (expected,) = llm.decide("Nila likes figs.", [Choice("Who?", ["Nila", "Rumi"])], method="letters").answers
    assert answer["model"] == (name or "base")
    (found,) = answer["answers"]
    told = {own["value"]: own["probability"] for own in found["probabilities"]}
    assert told == pytest.approx(expected.probabilities, rel=1e-3)


def test_a_stored_document_belongs_to_its_adapter(http):
    """The id is known under its model alone, and so are its K/V."""
    entry = {"id": "d", "text": "A document of some length, which is stored ahead of its use by anybody."}
    stored = post(http, DOCUMENTS, prefix="", documents=[entry], model="a")["data"][0]
    assert not stored["was_cached"]
    ask = {"chunks": {"prefix": "", "documents": [{"id": "d"}], "question": "What?"}, "max_tokens": 2, "temperature": 0}
    for model, status in (("a", 200), ("b", 404), ("base", 404)):
        assert http.get(f"{DOCUMENTS}/d", params={"model": model}).status_code == status
        assert http.post("/v1/completions", json={**ask, "model": model}).status_code == status
    assert http.get(f"{DOCUMENTS}/d", params={"model": "c"}).status_code == 404
    assert not post(http, DOCUMENTS, prefix="", documents=[entry], model="b")["data"][0]["was_cached"]
    assert post(http, DOCUMENTS, prefix="", documents=[entry], model="a")["data"][0]["was_cached"]
    assert http.delete(f"{DOCUMENTS}/d", params={"model": "a"}).status_code == 200
    assert http.get(f"{DOCUMENTS}/d", params={"model": "b"}).json()["cached"]


def test_a_gateway_routes_by_adapter(server, http):
    """Routing keys and stored documents of a gateway know the adapters that its replicas report."""
    body = {"prompt": "A long prompt. " * 100, "max_tokens": 1, "temperature": 0}
    keys = {
        name: keys_of("/v1/completions", {**body, "model": name}, adapters=("a", "b")).pieces
        for name in ("base", "a", "b", "c")
    }
    assert keys["base"] == keys["c"] == keys_of("/v1/completions", body).pieces
    assert len({keys["base"], keys["a"], keys["b"]}) == 3
    route = Route(server.url, "--report-period-s=0.05")
    try:
        with route.client() as gate:
            wait_until(lambda: gate.get("/health").status_code == 200)
            assert gate.get("/v1/models").json() == http.get("/v1/models").json()
            expected = {name: post(http, "/v1/completions", **body, model=name)["choices"] for name in ("base", "a")}
            assert {name: post(gate, "/v1/completions", **body, model=name)["choices"] for name in expected} == expected
            entry = {"id": "g", "text": "A document that a gateway stores, of some length as well."}
            post(gate, DOCUMENTS, prefix="", documents=[entry], model="a")
            assert gate.get(f"{DOCUMENTS}/g", params={"model": "a"}).json()["cached"]
            assert gate.get(f"{DOCUMENTS}/g").status_code == 404
            ask = {"chunks": {"prefix": "", "documents": [{"id": "g"}], "question": "What?"}, "max_tokens": 2, "temperature": 0}
            answer = post(gate, "/v1/completions", **ask, model="a")
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            assert gate.post("/v1/completions", json={**ask, "model": "b"}).status_code == 404
            assert gate.delete(f"{DOCUMENTS}/g", params={"model": "a"}).status_code == 200
    finally:
        assert route.close() == 0
