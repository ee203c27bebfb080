"""The field `chunk_mode` over HTTP, and the refusals of a model with recurrent layers."""

from dataclasses import replace

import pytest

from chunkattn import DocumentPrompt, SamplingParams

pytest_plugins = ["tests.told_engine"]

COMPLETION, CHAT, DECISIONS = "/v1/completions", "/v1/chat/completions", "/v1/decisions"
PREFIX = "Read the documents and answer the question."
DOCUMENTS = ["Rumi is a poet.", "", "Nila lives in Tunise.", "Lezudo likes honey and bread.", "Nila lives in Tunise."]
QUESTION = "Where does Nila live? Answer:"
CHUNKS = {"prefix": PREFIX, "documents": DOCUMENTS, "question": QUESTION}
USER = {"role": "user", "content": "Where does Nila live?"}
GREEDY = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)


def answered(http, path, body):
    answer = http.post(path, json={"max_tokens": 4, "temperature": 0, "return_chunk_usage": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_answers_are_those_of_the_engine(http, demo):
    offline = demo.generate(DocumentPrompt(PREFIX, DOCUMENTS, QUESTION), GREEDY, chunk_mode="joined")[0]
    fields = {"chunk_mode": "joined", "echo": True, "logprobs": 0}
    done = answered(http, COMPLETION, {"chunks": CHUNKS, **fields})
    choice, usage = done["choices"][0], done["usage"]
    assert choice["text"] == offline.prompt + offline.outputs[0].text
    (chunk,) = usage["prompt_tokens_details"]["chunks"]
    assert (chunk["tokens"], chunk["documents"]) == (offline.chunk_lens[0], [*offline.joined])
    assert sorted(chunk["documents"]) == [0, 2, 3, 4]
    # Every document's text begins where the text before it ends.
    begins = [len(PREFIX)]
    for number in offline.joined:
        begins.append(begins[-1] + len(DOCUMENTS[number]))
    assert set(begins) <= set(choice["logprobs"]["text_offset"])
    offline = demo.chat([USER], GREEDY, documents=DOCUMENTS, chunk_mode="joined")[0]
    done = answered(http, CHAT, {"messages": [USER], "documents": DOCUMENTS[::-1], "chunk_mode": "joined"})
    assert done["choices"][0]["message"]["content"] == offline.outputs[0].text
    assert done["usage"]["prompt_tokens"] == len(offline.prompt_token_ids)
    inspected = http.post("/inspect", json={"chunks": CHUNKS, "chunk_mode": "joined"}).json()
    assert [part["name"] for part in inspected["parts"]] == ["prefix", "chunk 0", "question"]


def test_a_focus_chooses_first(http, demo):
    for focus in ({"top_n": 2, "mode": "only"}, {"top_n": 2, "mode": "reread"}):
        prompt = DocumentPrompt(PREFIX, DOCUMENTS, QUESTION, focus)
        offline = demo.generate(prompt, GREEDY, chunk_mode="joined")[0]
        done = answered(
            http, COMPLETION, {"chunks": CHUNKS, "chunk_mode": "joined", "focus": focus, "echo": True, "logprobs": 0}
        )
        assert done["choices"][0]["text"] == offline.prompt + offline.outputs[0].text
        details = done["usage"]["prompt_tokens_details"]
        assert details["focus"]["shown"] == offline.focus.shown
        assert [chunk["documents"] for chunk in details["chunks"]] == [[*offline.joined]]


def test_stored_documents_are_joined_and_forgotten(http):
    """By id as by text. The joined chunk is forgotten by itself."""
    given = {"cache_salt": "joined"}
    stored = [{"id": "a", "text": DOCUMENTS[0]}, {"id": "b", "text": DOCUMENTS[2]}]
    http.post("/v1/cache/documents", json={"prefix": PREFIX, "documents": stored, **given}).raise_for_status()
    texts = {**CHUNKS, "documents": [DOCUMENTS[2], DOCUMENTS[0]]}
    named = {**CHUNKS, "documents": [{"id": "a"}, {"id": "b"}]}
    asked = {"chunk_mode": "joined", **given}
    cold, warm = (answered(http, COMPLETION, {"chunks": own, **asked}) for own in (texts, named))
    counts = [own["usage"]["prompt_tokens_details"]["chunks"][0] for own in (cold, warm)]
    assert [own["cached_tokens"] for own in counts] == [0, counts[0]["tokens"]]
    assert "other_prefix_documents" not in warm["usage"]["prompt_tokens_details"]
    assert cold["choices"][0]["text"] == warm["choices"][0]["text"]
    body = {"prefix": PREFIX, "documents": [own["text"] for own in stored], "chunk_mode": "joined", **given}
    (forgotten,) = http.post("/v1/cache/forget", json=body).json()["data"]
    assert (forgotten["tokens"], forgotten["forgotten"]) == (counts[0]["tokens"], True)
    twice = body | {"documents": [DOCUMENTS[0]] * 2}
    assert [own["forgotten"] for own in http.post("/v1/cache/forget", json=twice).json()["data"]] == [True]
    for mode, moved in (("joined", None), ("isolated", 2)):
        other = answered(http, COMPLETION, {"chunks": {**named, "prefix": "Read. "}, "chunk_mode": mode, **given})
        assert other["usage"]["prompt_tokens_details"].get("other_prefix_documents") == moved
    again = answered(http, COMPLETION, {"chunks": named, **asked})
    assert again["usage"]["prompt_tokens_details"]["chunks"][0]["cached_tokens"] == 0
    apart = answered(http, COMPLETION, {"chunks": named, **given})
    assert all(own["tokens"] == own["cached_tokens"] for own in apart["usage"]["prompt_tokens_details"]["chunks"])
    for name in "ab":
        http.delete(f"/v1/cache/documents/{name}", params=given).raise_for_status()


def test_unknown_modes_are_refused(http):
    answer = http.post(CHAT, json={"messages": [USER], "documents": DOCUMENTS, "chunk_mode": "merged"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chunk_mode")


SPLIT = {"prompt": f"{PREFIX} # # {DOCUMENTS[0]} # # {DOCUMENTS[2]} # # {QUESTION}"}
ASKED = {"input": "It is late.", "questions": [{"type": "predicate", "instructions": "Is it late?"}], "method": "letters"}
REFUSED = {
    "chunks": (COMPLETION, {"chunks": CHUNKS}, "documents"),
    "separators": (COMPLETION, SPLIT, "prompt"),
    "a stream": (COMPLETION, {"chunks": CHUNKS, "stream": True}, "documents"),
    "several prompts": (COMPLETION, {"prompt": ["Who?", SPLIT["prompt"]]}, "prompt"),
    "a chat": (CHAT, {"messages": [USER], "documents": DOCUMENTS}, "documents"),
    "focus": (CHAT, {"messages": [USER], "documents": DOCUMENTS, "focus": 2}, "documents"),
    "decisions": (DECISIONS, ASKED | {"documents": DOCUMENTS}, "documents"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_question_without_a_state_is_a_client_error(name, post, llm, monkeypatch):
    monkeypatch.setattr(llm.frontend, "limits", replace(llm.frontend.limits, recurrent=True))
    path, body, param = REFUSED[name]
    answer = post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "has no state in this model's recurrent layers" in error["message"]
    assert 'chunk_mode="joined"' in error["message"]
    assert error["param"] == param
    if name not in ("several prompts", "decisions"):
        assert post(path, body | {"chunk_mode": "joined", "max_tokens": 2}).status_code == 200
