"""Answers that cite their documents, by the clients of OpenAI and Anthropic, from a server and through a gateway."""

import anthropic
import openai
import pytest
from anthropic.types import CitationCharLocation, CitationContentBlockLocation
from openai.types.responses.response_output_text import AnnotationFileCitation

MODEL = "chunkattn-demo"
USER = {"role": "user", "content": "Where does Nila live?"}
TEXTS = {"nila": "Nila lives in Tunise.", "rumi": "Rumi is a poet.", "le\nzu]do": "Lezudo likes honey."}
DOCUMENTS = [{"id": name, "text": text} for name, text in TEXTS.items()]
ORDERS = [[0, 1, 2], [2, 0, 1]]
REQUIRED = {"mode": "required", "instruction": "", "within": 8}


@pytest.fixture(params=["server", "gateway"])
def url(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def openai_client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def anthropic_client(url):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def chats(post):
    """The witness: text and citations of the chat by plain HTTP for each order of the documents."""
    found = []
    for order in ORDERS:
        body = {"messages": [USER], "temperature": 0, "max_tokens": 48, "citations": REQUIRED}
        message = post("/v1/chat/completions", body | {"documents": [DOCUMENTS[n] for n in order]})["choices"][0]["message"]
        assert message["citations"]
        found.append((message["content"], message["citations"]))
    return found


def sources_of(citations):
    return [(c["start"], c["end"], source["id"], source["index"]) for c in citations for source in c["sources"]]


@pytest.mark.parametrize("number", range(len(ORDERS)))
def test_openai_reads_annotations(openai_client, chats, number):
    listed = [DOCUMENTS[n] for n in ORDERS[number]]
    asked = {
        "model": MODEL,
        "input": USER["content"],
        "temperature": 0,
        "max_output_tokens": 48,
        "extra_body": {"documents": listed, "citations": REQUIRED},
    }
    answer = openai_client.responses.create(**asked)
    annotations = answer.output[0].content[0].annotations
    assert all(isinstance(annotation, AnnotationFileCitation) for annotation in annotations)
    content, citations = chats[number]
    assert answer.output_text == content
    assert [(a.start_index, a.index, a.file_id, a.document_index) for a in annotations] == sources_of(citations)
    added = []
    for event in openai_client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.annotation.added":
            added.append(event.annotation)
        elif event.type == "response.completed" or event.type == "response.incomplete":
            assert event.response.output[0].content[0].annotations == annotations
    assert added == [annotation.model_dump() for annotation in annotations]


@pytest.mark.parametrize("number", range(len(ORDERS)))
def test_openai_reads_chats(openai_client, chats, number):
    listed = [DOCUMENTS[n] for n in ORDERS[number]]
    body = {"documents": listed, "citations": REQUIRED}
    answer = openai_client.chat.completions.create(model=MODEL, messages=[USER], temperature=0, max_tokens=48, extra_body=body)
    message = answer.choices[0].message
    assert (message.content, message.model_extra["citations"]) == chats[number]
    plain = [[(start, end, name) for start, end, name, _ in sources_of(citations)] for _, citations in chats]
    assert (plain[0], chats[0][0]) == (plain[1], chats[1][0])


def cited_blocks(message):
    """Statements with the texts and titles of the documents that they cite."""
    return [(b.text.strip(), [(c.cited_text, c.document_title) for c in b.citations]) for b in message.content if b.citations]


def test_anthropic_cites_document_blocks(anthropic_client, post):
    """The prompt is that of the chat with the same documents, whatever the order of the blocks."""
    blocks = [
        {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": TEXTS["nila"]},
            "title": "Nila",
            "context": "A list of towns.",
            "citations": {"enabled": True},
        },
        {
            "type": "document",
            "source": {"type": "content", "content": [{"type": "text", "text": TEXTS["rumi"]}]},
            "citations": {"enabled": True},
        },
    ]
    documents = [{"title": "Nila", "text": f"A list of towns.\n{TEXTS['nila']}"}, TEXTS["rumi"]]
    body = {"messages": [USER], "temperature": 0, "max_tokens": 48, "citations": REQUIRED, "documents": documents}
    chat = post("/v1/chat/completions", body)["choices"][0]["message"]
    found = []
    for listed in (blocks, blocks[::-1]):
        asked = {
            "model": MODEL,
            "messages": [{"role": "user", "content": [*listed, {"type": "text", "text": USER["content"]}]}],
            "max_tokens": 48,
            "extra_body": {"citations": REQUIRED, "temperature": 0},
        }
        message = anthropic_client.messages.create(**asked)
        citations = [citation for block in message.content for citation in block.citations or ()]
        assert citations
        for citation in citations:
            kind = CitationCharLocation if citation.document_title == "Nila" else CitationContentBlockLocation
            assert isinstance(citation, kind)
            assert citation.document_index == (
                (citation.document_title is None) if listed is blocks else citation.document_title == "Nila"
            )
        with anthropic_client.messages.stream(**asked) as stream:
            told = [event.citation for event in stream if event.type == "citation"]
            final = stream.get_final_message().content
        assert [(b.text, b.citations) for b in final] == [(b.text, b.citations) for b in message.content]
        assert told == citations
        assert "".join(block.text for block in message.content) == chat["content"]
        found.append(cited_blocks(message))
        again = anthropic_client.messages.create(
            model=MODEL,
            messages=[asked["messages"][0], {"role": "assistant", "content": message.content}, USER],
            max_tokens=4,
        )
        assert again.role == "assistant"
    assert found[0] == found[1]
    wanted = [
        (c["text"], [TEXTS["nila"] if s["index"] == 0 else TEXTS["rumi"] for s in c["sources"]]) for c in chat["citations"]
    ]
    assert [(text, [cited for cited, _ in listed]) for text, listed in found[0]] == wanted


@pytest.mark.parametrize("number", range(len(ORDERS)))
def test_anthropic_cites_documents_of_the_body(anthropic_client, chats, number):
    listed = [DOCUMENTS[n] for n in ORDERS[number]]
    body = {"documents": listed, "citations": REQUIRED, "temperature": 0}
    message = anthropic_client.messages.create(model=MODEL, messages=[USER], max_tokens=48, extra_body=body)
    content, citations = chats[number]
    assert "".join(block.text for block in message.content) == content
    found = [(c.file_id, c.document_index, c.cited_text) for b in message.content for c in b.citations or ()]
    assert found == [(name, index, TEXTS[name]) for _, _, name, index in sources_of(citations)]
