"""Documents kept by the real server, driven over HTTP."""

import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from chunkattn.config import EngineConfig
from chunkattn.fair_shares import FairShares
from chunkattn.focus import MODES
from chunkattn.server.state import ServerState
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import Caller, Shares
from chunkattn.web.options import ServerConfig
from tests.server_helpers import SMALL, ServerProcess, is_idle, wait_until

URL = "/v1/cache/documents"
PREFIX = "Read the notes."
TEMPLATE = "Document: {document}\n\n"
TEXTS = [
    f"{name} lives in {town} and keeps {number} bees in the garden behind the old mill."
    for name, town, number in (("Ana", "Oslo", 3), ("Ben", "Rome", 5), ("Cleo", "Bonn", 8))
]
QUESTION = "Where does Ana live? Answer:"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = "--max-cached-documents=8", f"--document-template={TEMPLATE}"
    made = ServerProcess(*SMALL, f"--kv-store={tmp_path_factory.mktemp('store')}", *options)
    yield made
    with made.client() as http:
        wait_until(lambda: is_idle(http))
    assert made.close() == 0


@pytest.fixture
def http(server):
    with server.client() as made:
        yield made
        for salt in ({}, {"cache_salt": "tenant"}):
            for document in made.get(URL, params=salt).json()["data"]:
                made.delete(f"{URL}/{document['id']}", params=salt)


def put(http, documents, **options):
    answer = http.post(URL, json={"prefix": PREFIX, "documents": documents, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def cached_tokens(http, texts, salt=None):
    """Cached tokens of each document in a completion that is never cached itself."""
    chunks = {"prefix": PREFIX, "documents": texts, "question": QUESTION}
    body = {"chunks": chunks, "max_tokens": 1, "return_chunk_usage": True, "cache_salt": salt}
    details = http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]
    return [(chunk["cached_tokens"], chunk["tokens"]) for chunk in details["chunks"]]


def pages(http, state):
    text = http.get("/metrics").text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f'chunkattn_pages{{state="{state}"}}'))


def test_documents_are_there_before_they_are_asked_for(http):
    texts = [f"{text} Nobody asked for it." for text in TEXTS]
    named = [{"id": f"note-{n}", "text": text} for n, text in enumerate(texts)]
    made = put(http, named)
    assert [d["id"] for d in made] == ["note-0", "note-1", "note-2"]
    assert all(d["cached"] and not d["was_cached"] and not d["pinned"] and d["expires"] is None for d in made)
    used = cached_tokens(http, texts)
    assert [d["tokens"] for d in made] == [tokens for _, tokens in used]
    assert all(cached == tokens for cached, tokens in used)
    assert http.get(URL).json()["data"] == [{k: v for k, v in d.items() if k != "was_cached"} for d in made]
    assert all(d["was_cached"] for d in put(http, named))
    assert len(http.get(URL).json()["data"]) == 3
    first = http.get(URL, params={"limit": 2}).json()
    assert first["has_more"]
    rest = http.get(URL, params={"limit": 2, "after": first["data"][-1]["id"]}).json()
    assert [d["id"] for d in first["data"] + rest["data"]] == ["note-0", "note-1", "note-2"]
    assert not rest["has_more"]


def test_salts_know_nothing_of_each_other(http):
    put(http, [{"id": "a", "text": TEXTS[0]}], cache_salt="tenant")
    assert http.get(URL).json()["data"] == []
    assert [d["id"] for d in http.get(URL, params={"cache_salt": "tenant"}).json()["data"]] == ["a"]
    for answer in (http.get(f"{URL}/a"), http.delete(f"{URL}/a"), http.patch(f"{URL}/a", json={"pinned": True})):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "document_not_found"
    assert cached_tokens(http, TEXTS[:1]) == [(0, cached_tokens(http, TEXTS[:1], "tenant")[0][0])]


def test_deleted_documents_are_gone_from_memory_and_disk(http):
    """One that others still name stays; one whose id is given to another text does not."""
    put(http, [{"id": "a", "text": TEXTS[0]}, {"id": "b", "text": TEXTS[1]}])
    put(http, [{"id": "twin", "text": TEXTS[0]}])
    cached_tokens(http, TEXTS[:2])  # with question paths below both
    assert http.delete(f"{URL}/a").json() == {"id": "a", "object": "cache.document.deleted", "deleted": True}
    assert http.get(f"{URL}/a").status_code == 404
    assert http.get(f"{URL}/twin").json()["cached"]
    before = pages(http, "cached")
    assert http.delete(f"{URL}/twin").status_code == 200
    assert pages(http, "cached") < before
    (gone, _), (kept, tokens) = cached_tokens(http, TEXTS[:2])
    assert (gone, kept) == (0, tokens)  # nor did the disk bring it back
    put(http, [{"id": "b", "text": TEXTS[2]}])
    assert cached_tokens(http, TEXTS[1:2])[0][0] == 0
    assert http.delete(f"{URL}/a").status_code == 404


def test_pins(http):
    (made,) = put(http, [{"id": "a", "text": TEXTS[0]}], pin=True)
    assert made["pinned"]
    held = pages(http, "pinned")
    assert held > 0
    assert not http.patch(f"{URL}/a", json={"pinned": False}).json()["pinned"]
    assert pages(http, "pinned") == 0
    assert http.patch(f"{URL}/a", json={"pinned": True}).json()["pinned"]
    assert pages(http, "pinned") == held
    put(http, [{"id": "a", "text": TEXTS[0]}])  # the same again, unpinned
    assert pages(http, "pinned") == 0
    http.patch(f"{URL}/a", json={"pinned": True})
    http.delete(f"{URL}/a")
    assert pages(http, "pinned") == 0


def test_documents_expire(http):
    began = time.time()
    put(http, [{"id": "a", "text": TEXTS[0]}, {"id": "b", "text": TEXTS[1]}], ttl_s=100, pin=True)
    assert began + 100 <= http.get(f"{URL}/a").json()["expires"] <= time.time() + 100
    assert http.patch(f"{URL}/b", json={"ttl_s": 0.1}).json()["expires"] < began + 90
    wait_until(lambda: http.get(f"{URL}/b").status_code == 404)
    assert http.patch(f"{URL}/a", json={"ttl_s": "never"}).json()["expires"] is None
    before = http.get(f"{URL}/a").json()
    assert before["pinned"]
    assert before["cached"]
    put(http, [{"id": "b", "text": TEXTS[1]}], ttl_s=0.1)
    put(http, [{"id": "b", "text": TEXTS[1]}])  # the last word counts
    time.sleep(0.3)
    assert http.get(f"{URL}/b").json()["expires"] is None


def test_a_client_that_leaves_leaves_nothing(http, server):
    """Neither pins nor documents, however far its request got."""
    used, left = pages(http, "pinned"), 0
    for number, wait in enumerate((0.001, 0.01, 0.03, 0.06)):
        texts = [f"{number} {n} " * 50 for n in range(2)]
        try:
            with server.client() as own:
                own.post(URL, json={"prefix": PREFIX, "documents": texts, "pin": True}, timeout=wait)
        except httpx.TimeoutException:
            left += 1
        wait_until(lambda: is_idle(http))
    assert left

    def nothing_is_left():
        # A request that came in time is there, and told. A slow server may read it after its client has left.
        for document in http.get(URL).json()["data"]:
            assert document["pinned"]
            assert http.delete(f"{URL}/{document['id']}").status_code == 200
        return pages(http, "pinned") == used

    wait_until(nothing_is_left)


def test_deleted_below_a_running_request(http, server):
    """K/V that the request goes on to compute is not kept either."""
    put(http, [{"id": "a", "text": TEXTS[0]}])
    chunks = {"prefix": PREFIX, "documents": TEXTS[:1], "question": QUESTION}
    body = {"chunks": chunks, "max_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        with server.client() as own:
            assert own.delete(f"{URL}/a").status_code == 200
        assert [*lines][-2] == "data: [DONE]"
    wait_until(lambda: is_idle(http))
    assert cached_tokens(http, TEXTS[:1])[0][0] == 0


def test_chats_find_them(http):
    system = {"role": "system", "content": "Answer from the documents."}
    answer = http.post(URL, json={"messages": [system], "documents": TEXTS})
    made = answer.json()["data"]
    body = {"messages": [system, {"role": "user", "content": QUESTION}], "documents": TEXTS, "max_tokens": 1}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= sum(d["tokens"] for d in made)
    assert answer.json()["usage"]["prompt_tokens"] == made[0]["prefix_tokens"] + sum(d["tokens"] for d in made)


def test_an_engine_that_died_holds_nothing(http, server):
    put(http, [{"id": "a", "text": TEXTS[0]}], pin=True)

    os.kill(server.engine_pid, signal.SIGKILL)
    wait_until(lambda: http.get("/health").status_code == 503)
    wait_until(lambda: http.get("/health").status_code == 200)
    told = http.get(f"{URL}/a").json()
    assert not told["pinned"]
    assert not told["cached"]
    assert http.patch(f"{URL}/a", json={"pinned": True}).json()["cached"]
    assert http.delete(f"{URL}/a").status_code == 200
    assert pages(http, "pinned") == 0


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"documents": []}, None, "no document"),
        ({"documents": ["a", ""]}, "documents", "documents.1 is empty"),
        ({"documents": ["a", "b", "a"]}, "documents", "documents.2 has the id or the content of documents.0"),
        ({"documents": [{"id": "a b", "text": "c"}]}, None, "an id has"),
        ({"documents": ["a", [1, 2]]}, None, "all text or all token ids"),
        ({"documents": ["a"], "ttl_s": 0}, "ttl_s", "above 0"),
        ({"documents": ["a"], "prefix": "b", "messages": []}, None, "exclude each other"),
        ({"documents": [f"text {n}" for n in range(9)]}, "documents", "max_cached_documents 8"),
        ({"documents": [f"a{n}" for n in range(20_000)]}, "documents", "max_items_per_request"),
        ({"documents": ["word " * 9000]}, "documents", "max_"),
        ({"documents": ["a"], "model": "other"}, "model", "not served"),
    ],
)
def test_bad_documents(http, body, param, said):
    answer = http.post(URL, json=body)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert said in error["message"]
    assert param is None or error["param"] == param
    assert http.get(URL).json()["data"] == []


OF_CHAT = {"max_tokens": 1, "return_chunk_usage": True}
CHAT_PREFIX = "Read the documents and answer the question."
"""Text that the demo's chat template writes before a first user message."""


def completion(http, documents, prefix=PREFIX, **options):
    body = {"chunks": {"prefix": prefix, "documents": documents, "question": QUESTION}, "max_tokens": 1, "temperature": 0}
    return http.post("/v1/completions", json={**body, "return_chunk_usage": True, **options})


def chat(http, documents, **options):
    body = {"messages": [{"role": "user", "content": "Where does Ana live?"}], "documents": documents, "temperature": 0}
    return http.post("/v1/chat/completions", json={**body, "max_tokens": 4, "return_chunk_usage": True, **options})


def rerank(http, documents, **options):
    return http.post("/v1/rerank", json={"query": "Who lives in Oslo?", "documents": documents, **options})


def cached_chunks(answer):
    assert answer.status_code == 200, answer.text
    chunks = answer.json()["usage"]["prompt_tokens_details"]["chunks"]
    return [(chunk["cached_tokens"], chunk["tokens"]) for chunk in chunks]


def refused(answer, status=404, code="document_not_found"):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("documents", code)
    return error["message"]


def test_a_document_is_one_chunk_wherever_it_is_named(http):
    """Stored once; its id, its text and its token ids then find the same K/V in chats and completions."""
    named = [{"id": f"n{n}", "text": text} for n, text in enumerate(TEXTS)]
    sizes = [d["tokens"] for d in put(http, named, prefix=CHAT_PREFIX)]
    shown = http.post("/inspect", json={"chunks": {"prefix": CHAT_PREFIX, "documents": [{"id": "n0"}], "question": "?"}})
    part = next(p for p in shown.json()["parts"] if p["name"] == "chunk 0")
    ids = [token["id"] for token in part["tokens"]]
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"].strip() == TEMPLATE.format(document=TEXTS[0]).strip()
    forms = [
        [{"id": "n0"}, {"id": "n1"}, {"id": "n2"}],
        TEXTS,
        [ids, {"id": "ignored", "text": TEXTS[1]}, {"id": "n2"}],
    ]
    for documents in forms:
        for order in ((0, 1, 2), (2, 0, 1)):
            expected = [(sizes[i], sizes[i]) for i in order]
            assert cached_chunks(chat(http, [documents[i] for i in order])) == expected
            assert cached_chunks(completion(http, [documents[i] for i in order], CHAT_PREFIX)) == expected
    texts = {chat(http, documents).json()["choices"][0]["message"]["content"] for documents in forms}
    assert len(texts) == 1


def test_a_stored_document_behind_another_prefix_is_computed(http):
    (made,) = put(http, [{"id": "a", "text": TEXTS[0]}])
    assert cached_chunks(completion(http, [{"id": "a"}], "Another prefix.")) == [(0, made["tokens"])]
    assert cached_chunks(completion(http, [{"id": "a"}], "Another prefix.")) == [(made["tokens"], made["tokens"])]


def test_the_usage_tells_that_a_document_was_stored_after_another_prefix(http):
    put(http, [{"id": "a", "text": TEXTS[0]}])
    put(http, [{"id": "b", "text": TEXTS[1]}], prefix=CHAT_PREFIX)
    documents = [{"id": "a"}, TEXTS[2], {"id": "b"}]
    for answer, moved in ((chat(http, documents), [0]), (completion(http, documents), [2])):
        details = answer.json()["usage"]["prompt_tokens_details"]
        assert details["other_prefix_documents"] == 1
        assert [n for n, chunk in enumerate(details["chunks"]) if chunk.get("other_prefix")] == moved
    usage = chat(http, documents, return_chunk_usage=False).json()["usage"]["prompt_tokens_details"]
    assert (usage["other_prefix_documents"], "chunks" in usage) == (1, False)
    lines = chat(http, documents, stream=True, stream_options={"include_usage": True}).text.splitlines()
    last = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])
    assert last["usage"]["prompt_tokens_details"]["other_prefix_documents"] == 1
    for answer in (chat(http, [{"id": "b"}, TEXTS[0]]), completion(http, [{"id": "a"}, *TEXTS])):
        details = answer.json()["usage"]["prompt_tokens_details"]
        assert "other_prefix" not in json.dumps(details)
    # A prefix that begins with the stored one is another prefix.
    details = completion(http, [{"id": "a"}], f"{PREFIX} Be brief.").json()["usage"]["prompt_tokens_details"]
    assert details["other_prefix_documents"] == 1


@pytest.mark.parametrize("score", ["likelihood", "relevance"])
@pytest.mark.parametrize("mode", MODES)
def test_focus_chooses_stored_documents_as_their_texts(http, mode, score):
    """Relevance reads a document without the template. The usage counts the chosen documents by their own numbers."""
    put(http, [{"id": "b", "text": TEXTS[1]}, {"id": "c", "text": TEXTS[2]}], prefix=CHAT_PREFIX)
    put(http, [{"id": "a", "text": TEXTS[0]}])
    focus = {"top_n": 2, "mode": mode, "score": score}
    for call in (chat, lambda *args, **options: completion(*args, CHAT_PREFIX, **options)):
        named, plain = (
            call(http, documents, focus=focus).json()["usage"]["prompt_tokens_details"]
            for documents in ([{"id": "b"}, TEXTS[2], {"id": "a"}], [TEXTS[1], TEXTS[2], TEXTS[0]])
        )
        assert named["focus"]["documents"] == plain["focus"]["documents"]
        assert named["focus"]["scores"] == pytest.approx(plain["focus"]["scores"], abs=1e-4)
        numbers = sorted(named["focus"]["documents"]) if mode == "only" else [0, 1, 2]
        assert named.get("other_prefix_documents", 0) == (2 in numbers)
        assert [chunk.get("document") for chunk in named["chunks"]] == (numbers if mode == "only" else [None] * 3)
        assert [chunk.get("other_prefix", False) for chunk in named["chunks"]] == [number == 2 for number in numbers]
        assert [chunk["tokens"] for chunk in named["chunks"]] == [chunk["tokens"] for chunk in plain["chunks"]]


def test_the_list_shows_each_prefix(http):
    system = {"role": "system", "content": "Answer from the documents."}
    put(http, [{"id": "a", "text": TEXTS[0]}])
    put(http, [{"id": "b", "text": TEXTS[1]}], prefix="", messages=[system])
    put(http, [{"id": "c", "text": TEXTS[1]}], prefix="bees " * 150)
    shown = {d["id"]: d["prefix"] for d in http.get(URL).json()["data"]}
    assert PREFIX in shown["a"]
    assert system["content"] in shown["b"]
    assert 100 < shown["c"].count("bees") < 150
    assert http.get(f"{URL}/a").json()["prefix"] == shown["a"]
    # The list shows documents of the caller's own salt only.
    put(http, [{"id": "d", "text": TEXTS[0]}], prefix="A secret of the tenant.", cache_salt="tenant")
    assert "secret" not in http.get(URL).text


def test_the_example_of_the_reference_finds_its_documents(http):
    """The bodies of the section that names a document by its id, as a reader would send them."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    section = page.partition("### Name a stored document by its id")[2].partition("\n## ")[0]
    calls = re.findall(r"localhost:8000(\S+) .*?-d '(.*?)'\n", section, flags=re.DOTALL)
    assert [path for path, _ in calls] == [URL, "/v1/chat/completions", "/v1/rerank"]
    answers = [http.post(path, json={**json.loads(body), **more}) for (path, body), more in zip(calls, ({}, OF_CHAT, {}))]
    assert [answer.status_code for answer in answers] == [200] * 3
    details = answers[1].json()["usage"]["prompt_tokens_details"]
    assert details["chunks"][0]["cached_tokens"] == details["chunks"][0]["tokens"] > 0
    assert "other_prefix_documents" not in details


def test_documents_stored_as_token_ids(http):
    """They have no template, wherever they are named, and no text."""
    (made,) = put(http, [[7, 8, 9]], prefix=[5, 6])
    prompt = {"prefix": [5, 6], "documents": [{"id": made["id"]}, [7, 8, 9]], "question": [4]}
    answer = http.post("/v1/completions", json={"chunks": prompt, "max_tokens": 1, "return_chunk_usage": True})
    assert cached_chunks(answer) == [(3, 3), (3, 3)]
    assert cached_chunks(chat(http, [{"id": made["id"]}]))[0][1] == 3
    ranked = rerank(http, [{"id": made["id"]}, TEXTS[0]], return_documents=True)
    assert ranked.status_code == 200, ranked.text
    assert {"id": made["id"]} in [result["document"] for result in ranked.json()["results"]]


def test_reranked_ids_are_their_texts(http):
    """The rerank template alone is around them: the scores are those of the texts."""
    put(http, [{"id": f"n{n}", "title": "Note", "text": text} for n, text in enumerate(TEXTS)])
    texts = [f"Note\n{text}" for text in TEXTS]
    by_text = rerank(http, texts, return_documents=True).json()["results"]
    by_id = rerank(http, [{"id": "n0"}, texts[1], {"id": "n2"}], return_documents=True).json()["results"]
    assert [(r["index"], r["relevance_score"]) for r in by_id] == [(r["index"], r["relevance_score"]) for r in by_text]
    shown = {r["index"]: r["document"] for r in by_id}
    assert shown == {0: {"id": "n0", "text": texts[0]}, 1: {"text": texts[1]}, 2: {"id": "n2", "text": texts[2]}}
    pair = {"queries": "Who lives in Oslo?", "documents": [{"id": "n0"}, texts[1], {"id": "n2"}]}
    scores = {d["index"]: d["score"] for d in http.post("/v1/score", json=pair).json()["data"]}
    assert scores == {r["index"]: r["relevance_score"] for r in by_text}


def test_a_title_is_part_of_the_text_everywhere(http):
    """A document in the request and a stored one are ranked alike; other fields come back as they were given."""
    titled = [{"title": "Note", "text": TEXTS[0], "source": 7}, {"text": TEXTS[1]}, {"title": "", "text": TEXTS[2]}]
    texts = [f"Note\n{TEXTS[0]}", *TEXTS[1:]]
    found = rerank(http, titled, return_documents=True).json()["results"]
    wanted = {r["index"]: r["relevance_score"] for r in rerank(http, texts).json()["results"]}
    assert {r["index"]: r["relevance_score"] for r in found} == wanted
    assert {r["index"]: r["document"] for r in found} == dict(enumerate(titled))
    plain = [{name: value for name, value in document.items() if name != "source"} for document in titled]
    pair = {"queries": "Who lives in Oslo?", "documents": plain}
    assert {d["index"]: d["score"] for d in http.post("/v1/score", json=pair).json()["data"]} == wanted
    sizes = [d["tokens"] for d in put(http, plain, prefix=CHAT_PREFIX)]
    assert cached_chunks(chat(http, texts)) == [(size, size) for size in sizes]


def test_a_server_that_stores_nothing_gives_no_advice_to_store():
    llm = SimpleNamespace(config=EngineConfig(position_strategy="offset"), threads=None)
    caller = Caller(None, Shares(1, FairShares(0)))
    with pytest.raises(ApiError) as error:
        ServerState(llm, ServerConfig()).named_documents({2: "ghost"}, caller, None)
    said = error.value.body["error"]["message"]
    assert said.startswith("documents.2 names the document 'ghost'")
    assert said.endswith("under position_strategy 'offset' this server stores no documents, so send its text")


def test_inspect_names_the_field_of_an_unknown_id(http):
    answer = http.post("/inspect", json={"chunks": {"documents": [TEXTS[0], {"id": "ghost"}], "question": "?"}})
    assert refused(answer).startswith("chunks.documents.1 names the document 'ghost'")


@pytest.mark.parametrize("call", [completion, chat, rerank])
def test_ids_that_name_nothing(http, call):
    """Never stored, deleted, expired, or of another tenant: the answers are equal but for the id."""
    said = refused(call(http, [TEXTS[0], {"id": "ghost"}]))
    field = "chunks.documents" if call is completion else "documents"
    assert said.startswith(f"{field}.1 names the document 'ghost', which is not stored under this salt")
    assert "POST /v1/cache/documents" in said
    put(http, [{"id": "other", "text": TEXTS[0]}], cache_salt="tenant")
    assert refused(call(http, [TEXTS[0], {"id": "other"}])) == said.replace("ghost", "other")
    assert call(http, [{"id": "other"}], cache_salt="tenant").status_code == 200
    put(http, [{"id": "gone", "text": TEXTS[0]}])
    assert call(http, [{"id": "gone"}]).status_code == 200
    http.delete(f"{URL}/gone")
    assert refused(call(http, [TEXTS[0], {"id": "gone"}])) == said.replace("ghost", "gone")
    put(http, [{"id": "old", "text": TEXTS[0]}], ttl_s=0.1)
    wait_until(lambda: http.get(f"{URL}/old").status_code == 404)
    assert refused(call(http, [TEXTS[0], {"id": "old"}])) == said.replace("ghost", "old")
    assert len(refused(call(http, [{"id": "x" * 100_000}]))) < 500


@pytest.mark.parametrize("call", [completion, chat, rerank])
@pytest.mark.parametrize("document", [{}, {"id": "a", "title": "b"}, {"title": "b"}, {"id": 5}])
def test_objects_that_are_no_documents(http, call, document):
    put(http, [{"id": "a", "text": TEXTS[0]}])
    assert call(http, [document]).status_code == 400


def test_ids_that_are_too_many_or_too_long(http):
    put(http, [{"id": "a", "text": TEXTS[0]}])
    assert "max_chunks_per_prompt" in refused(chat(http, [{"id": "a"}] * 5000), 400, "invalid_value")
    assert "max_items_per_request" in refused(rerank(http, [{"id": "a"}] * 10_001), 400, "invalid_value")
    (made,) = put(http, [{"id": "b", "text": "word " * 130}])
    many = -(-(1 << 21) // made["tokens"])
    for call in (completion, chat, rerank):
        assert "2097152 tokens" in refused(call(http, [{"id": "b"}] * (many + 1)), 400, "too_many_documents")
    values = completion(http, [{"id": "b"}] * 130, max_tokens=0, prompt_logprobs=20)  # their log-probabilities count too
    assert values.status_code == 400
    assert "max_answer_values" in values.json()["error"]["message"]


@pytest.fixture(scope="module")
def tight():
    """A client of a server without a disk, of 400 KV pages and chunks of 96 tokens."""
    template = "word " * 20 + "{document}"
    pool = 400 * 16 * 2560
    made = ServerProcess(
        *SMALL[:-2], "--no-warmup", f"--kv-cache-memory-bytes={pool}", "--max-chunk-len=96", f"--document-template={template}"
    )
    with made.client() as http:
        yield http
    assert made.close() == 0


@pytest.mark.ci
def test_documents_that_the_template_makes_too_long(tight):
    for call in (completion, chat):
        assert call(tight, ["a", "b"]).status_code == 200
        said = refused(call(tight, ["a", "word " * 25]), 400, "context_length_exceeded")
        assert said.startswith("document 1 has ")
        assert said.endswith("max_chunk_len is 96")
    posted = tight.post(URL, json={"documents": ["a", "word " * 25]})
    assert refused(posted, 400, "context_length_exceeded").startswith("document 1 has ")


@pytest.mark.ci
def test_evicted_documents_are_computed_again(tight):
    """Their ids stay; the answer is the one of before."""
    (made,) = put(tight, [{"id": "a", "text": TEXTS[0]}], prefix=CHAT_PREFIX)
    whole = made["tokens"], made["tokens"]
    before = chat(tight, [{"id": "a"}])
    assert cached_chunks(before) == [whole]
    for number in range(100):
        if not tight.get(f"{URL}/a").json()["cached"]:
            break
        assert completion(tight, [f"{number} {n}" for n in range(64)]).status_code == 200
    else:
        raise AssertionError("nothing is evicted")
    after = chat(tight, [{"id": "a"}])
    assert cached_chunks(after)[0][0] < made["tokens"]
    assert after.json()["choices"] == before.json()["choices"]
    assert cached_chunks(chat(tight, [{"id": "a"}])) == [whole]
