"""The field `citations` of completions, chats and stored documents, in whole answers and streams."""

import random

import pytest
from cohere.types import Citation as CohereCitation

from chunkattn import Citation, Document, DocumentPrompt, SamplingParams
from chunkattn.answer_parsers.families import find_tool_parser
from chunkattn.answer_parsers.reader import AnswerReader, Message
from chunkattn.answer_parsers.reasoning import find_reasoning_parser
from chunkattn.answer_parsers.tools import Tool, Tools
from chunkattn.server.citations import ContentPlaces, documents_of

COMPLETION, CHAT, STORED = "/v1/completions", "/v1/chat/completions", "/v1/cache/documents"
MODEL = "chunkattn-demo"
PREFIX, ASKED = "Read the documents and answer the question.", "Where does Nila live?"
QUESTION = f"{ASKED} Answer:"
DOCUMENTS = [{"id": "nila", "text": "Nila lives in Tunise."}, {"id": "rumi", "text": "Rumi is a poet."}, "Lezudo likes honey."]
NAMED = [Document("Nila lives in Tunise.", "nila"), Document("Rumi is a poet.", "rumi"), "Lezudo likes honey."]
USER = {"role": "user", "content": ASKED}
CITATIONS = {"mode": "required", "instruction": "", "within": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=48)
ASK = {"temperature": 0, "max_tokens": 48, "citations": CITATIONS}


def choice(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def objects(output, shift=0):
    return [
        {
            "start": c.start + shift,
            "end": c.end + shift,
            "text": c.text,
            "sources": [{"type": "document", "id": s.id, "index": s.index} for s in c.sources],
            "type": "TEXT_CONTENT",
        }
        for c in output.citations
    ]


def test_answers_list_the_citations_of_the_engine(http, demo):
    offline = demo.generate(DocumentPrompt(PREFIX, NAMED, QUESTION), GREEDY, citations=CITATIONS)[0].outputs[0]
    chunks = {"prefix": PREFIX, "documents": DOCUMENTS, "question": QUESTION}
    found = choice(http.post(COMPLETION, json={**ASK, "chunks": chunks}))
    assert (found["text"], found["citations"]) == (offline.text, objects(offline))
    echoed = choice(http.post(COMPLETION, json={**ASK, "chunks": chunks, "echo": True}))
    assert echoed["citations"] == objects(offline, len(echoed["text"]) - len(offline.text))
    assert all(c["text"] == echoed["text"][c["start"] : c["end"]] for c in echoed["citations"])
    message = choice(http.post(CHAT, json={**ASK, "messages": [USER], "documents": DOCUMENTS}))["message"]
    assert (message["content"], message["citations"]) == (offline.text, objects(offline))
    plain = choice(http.post(COMPLETION, json={**ASK, "chunks": chunks, "citations": False}))
    assert "citations" not in plain


def test_citations_have_the_shape_of_cohere(http):
    message = choice(http.post(CHAT, json={**ASK, "messages": [USER], "documents": DOCUMENTS}))["message"]
    for entry in message["citations"]:
        read = CohereCitation.model_validate(entry)
        assert read.text == message["content"][read.start : read.end]
        assert {source.id for source in read.sources} <= {
            "nila",
            "rumi",
            *(s["id"] for s in entry["sources"] if s["index"] == 2),
        }


@pytest.mark.parametrize("stop", [None, "zzzzzz"])
def test_streams_send_every_citation_once_and_after_its_text(client, demo, stop):
    body = {"documents": DOCUMENTS, "citations": CITATIONS}
    events = client.chat.completions.create(
        model=MODEL, messages=[USER], temperature=0, max_tokens=48, stop=stop, stream=True, extra_body=body
    )
    text, citations = "", []
    for event in events:
        delta = event.choices[0].delta
        text += delta.content or ""
        for citation in delta.model_extra.get("citations", []):
            assert citation["text"] == text[citation["start"] : citation["end"]]
            citations.append(citation)
    offline = demo.chat([USER], GREEDY, documents=NAMED, citations=CITATIONS)[0].outputs[0]
    assert (text, citations) == (offline.text, objects(offline))
    chunks = {"prefix": PREFIX, "documents": DOCUMENTS, "question": QUESTION}
    events = client.completions.create(
        model=MODEL, prompt="", temperature=0, max_tokens=48, stream=True, extra_body={"chunks": chunks, "citations": CITATIONS}
    )
    found = [(e.choices[0].text, c) for e in events for c in e.choices[0].model_extra.get("citations", [])]
    assert [c for _, c in found] == objects(offline)


def test_stored_documents_are_cited_by_their_ids(http):
    stored = [{"id": "nila", "text": "Nila lives in Tunise."}, {"id": "r", "text": "Rumi is a poet.", "cite_as": "rumi"}]
    body = {"prefix": PREFIX, "documents": stored, "citations": True, "cache_salt": "cited"}
    assert http.post(STORED, json=body).status_code == 200
    ask = {**ASK, "cache_salt": "cited", "return_chunk_usage": True}
    given = choice(
        http.post(COMPLETION, json={**ask, "chunks": {"prefix": PREFIX, "documents": DOCUMENTS, "question": QUESTION}})
    )
    named = [{"id": "nila"}, {"id": "r"}, DOCUMENTS[2]]
    answer = http.post(COMPLETION, json={**ask, "chunks": {"prefix": PREFIX, "documents": named, "question": QUESTION}})
    assert choice(answer) == given
    counts = answer.json()["usage"]["prompt_tokens_details"]["chunks"]
    assert all(count["cached_tokens"] for count in counts[:2])
    # Without citations the chunk has no marker.
    plain = {**ask, "citations": None, "chunks": {"prefix": PREFIX, "documents": named, "question": QUESTION}}
    unnamed = {**plain, "chunks": {"prefix": PREFIX, "documents": DOCUMENTS, "question": QUESTION}}
    one, two = (http.post(COMPLETION, json=body).json() for body in (plain, unnamed))
    assert one["choices"] == two["choices"]
    assert one["usage"]["prompt_tokens"] == two["usage"]["prompt_tokens"]
    for name in ("nila", "r"):
        assert http.delete(f"{STORED}/{name}", params={"cache_salt": "cited"}).status_code == 200


def test_contents_with_markers_are_forgotten(http):
    chunks = {"prefix": PREFIX, "documents": DOCUMENTS[:2], "question": QUESTION}
    ask = {**ASK, "cache_salt": "forgotten", "chunks": chunks, "return_chunk_usage": True}

    def cached():
        usage = http.post(COMPLETION, json=ask).json()["usage"]["prompt_tokens_details"]["chunks"]
        return [bool(count["cached_tokens"]) for count in usage]

    cached()
    assert cached() == [True, True]
    body = {"prefix": PREFIX, "documents": DOCUMENTS[:1], "cache_salt": "forgotten", "citations": True}
    assert http.post("/v1/cache/forget", json=body).json()["data"][0]["forgotten"]
    assert cached() == [False, True]


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (CHAT, {"citations": True}, "citations name documents, and the prompt has none"),
        (COMPLETION, {"prompt": "x", "citations": True}, "over HTTP chunks"),
        (CHAT, {"citations": "always", "documents": DOCUMENTS}, "citations"),
        (CHAT, {"citations": {"style": 1}, "documents": DOCUMENTS}, "style"),
        (CHAT, {"citations": {"within": -1}, "documents": DOCUMENTS}, "within must be an integer"),
        (CHAT, {"citations": True, "documents": [DOCUMENTS[0]] * 2}, "document 0 and document 1 have the id 'nila'"),
        (
            CHAT,
            {"citations": True, "documents": DOCUMENTS, "response_format": {"type": "json_object"}},
            "citations and structured outputs exclude each other",
        ),
    ],
)
def test_refusals(http, path, fields, reason):
    answer = http.post(path, json={**({"messages": [USER]} if path == CHAT else {}), **fields})
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "Ana"}}\n</tool_call>'


@pytest.mark.parametrize("seed", range(20))
def test_places_are_those_of_the_content(seed):
    """Reasoning, calls, and what looks like a call stand before and between the sentences."""
    rng = random.Random(seed)
    text = rng.choice(["", " <think>\nCleo sings.\n</think>\n\n"])
    words = ["Ana", "Ben", "Dora", "Emil"]
    for word in words:
        text += rng.choice(["", "  ", "\n", CALL, f" {CALL}\n", "<tool_call>no call, "]) + f"{word} lives here."
    tools = Tools((Tool("look", {"type": "object", "properties": {}}),))
    reader = AnswerReader(find_tool_parser("hermes", ""), tools, find_reasoning_parser("qwen3", ""))
    places, message, rest = ContentPlaces(7), Message(), text
    while True:
        size = rng.randint(1, 30)
        piece, rest = rest[:size], rest[size:]
        events = reader.feed(piece, last=not rest)
        places.add(events)
        message.add(events)
        if not rest:
            break

    def found(statement):
        place = text.rindex(statement)
        return places.place(Citation(place, place + len(statement), statement, ()))

    for word in words:
        statement = f"{word} lives here"
        assert found(statement) == (7 + message.content.index(statement), statement)
    if "Cleo" in text:
        assert found("Cleo sings") is None


def test_a_span_across_a_call_has_the_content_on_both_sides():
    places, text = ContentPlaces(0), f"Ana sings {CALL} and dances."
    places.add(AnswerReader(find_tool_parser("hermes", ""), Tools((Tool("look", {}),))).feed(text, last=True))
    start = text.index("sings")
    assert places.place(Citation(start, len(text), text[start:], ())) == (4, "singsand dances.")
    assert places.place(Citation(text.index("look"), text.index("</"), "", ())) is None
    assert places.place(Citation(0, 0, "", ())) == (0, "")


def test_a_citation_waits_for_its_text():
    """A text that may begin a call is held back."""
    places, reader = ContentPlaces(0), AnswerReader(find_tool_parser("hermes", ""), Tools((Tool("look", {}),)))
    first, second = Citation(0, 3, "Ana", ()), Citation(4, 9, "<tool", ())
    places.add(reader.feed("Ana <tool"))
    assert places.settled([first, second], ended=False) == [first]
    places.add(reader.feed("s>"))
    assert places.settled(None, ended=False) == [second]
    assert places.settled([second], ended=True) == [second]


def test_a_document_of_token_ids_is_decoded_once():
    decoded = []

    class Texts:
        def whole(self, ids):
            decoded.append(ids)
            return "x"

    documents = documents_of([[1, 2], [3]], {}, Texts())
    assert [documents(number).text for number in (0, 1, 0, 0)] == ["x"] * 4
    assert decoded == [[1, 2], [3]]
