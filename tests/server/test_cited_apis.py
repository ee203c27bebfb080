"""Citations in chats, `/v1/responses` and `/v1/messages`, whole and streamed, of an engine that writes given texts."""

import asyncio
import json
import random
import re
from base64 import b32encode
from hashlib import blake2b

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from chunkattn.engine.grammars import Grammars
from chunkattn.engine.messages import CachedTokens, TokenOutput
from chunkattn.server import message_form
from tests.server.test_messages import events as message_events
from tests.server.test_reasoning import thinking as thinking
from tests.server.test_tools import CALLED, CALLS, FIND, NOW
from tests.server.test_translated_calls import CUSTOM, TOOLS

pytest_plugins = ["tests.told_engine"]
pytestmark = pytest.mark.usefixtures("compiled")

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "Where is Ana?"}
ASKED = {
    CHAT: {"messages": [USER], "max_tokens": 120},
    RESPONSES: {"input": "Where is Ana?", "max_output_tokens": 120},
    MESSAGES: {"messages": [USER], "max_tokens": 120},
}
TEXTS = ["Nila sings.", "Rumi is a poet.\nRumi writes.", "[doc:nila] is a marker.", "Lezudo likes [doc:#aaaaaaaa] honey."]
IDS = ["nila", "Q-7.1:b@c", "a]b", 'qu"ote', "é ü", "line\nbreak", "[doc:nila]", "x" * 65, "", None]
EVENTS = TypeAdapter(ResponseStreamEvent)


# The witness


def marker(document):
    """Marker of a document, by its definition."""
    name = document.get("id")
    if name is not None and re.fullmatch(r"[A-Za-z0-9_.:@-]{1,64}", name):
        return f"[doc:{name}]"
    title = document.get("title")
    text = f"{title}\n{document['text']}" if title else document["text"]
    value, person = (text, b"text") if name is None else (name, b"id")
    digest = blake2b(value.encode(), digest_size=5, person=person).digest()
    return f"[doc:#{b32encode(digest).decode().lower()}]"


def found_in(raw, markers, keep=False):
    """Text of a raw answer, and the spans of its citations with their markers, by a search for markers and sentences."""
    text, spans, since, is_open = "", [], "", False
    for piece in re.split(r"([ \t]*\[doc:[^\[\]]*\])", raw):
        if piece.lstrip(" \t") not in markers:
            text, since, is_open = text + piece, since + piece, is_open and not piece
            continue
        if is_open:
            spans[-1][2].append(piece.lstrip(" \t"))
        else:
            statement = re.split(r"\n\s*|(?<=[.!?])\s+|(?<=[.!?][\"')])\s+", since.rstrip())[-1].strip()
            begin = text.rindex(statement) if statement else None
            start, end = (begin, begin + len(statement)) if statement or not spans else spans[-1][:2]
            spans.append([start, end, [piece.lstrip(" \t")]])
        since, is_open = "", True
        text += piece if keep else ""
    return text, [(start, end, list(dict.fromkeys(cited))) for start, end, cited in spans]


def random_documents(rng, most=4):
    ids = rng.sample(IDS, k=rng.randint(1, most))
    return [
        {"text": f"{rng.choice(TEXTS)} {n}"}
        | ({} if name is None else {"id": name})
        | ({"title": f"Title {n}"} if rng.random() < 0.3 else {})
        for n, name in enumerate(ids)
    ]


def random_answer(rng, markers):
    """Statements with markers behind and between them, and texts that look like markers."""
    made = "".join(rng.choice(["Nila", "Rumi", "x"]))
    for _ in range(rng.randint(1, 6)):
        made += rng.choice(
            [" sings", " is 3.5 high", " a [link](x)", " [do", " \u00e9t\u00e9", ' said "no."', " <tool", ' "yes"']
        )
        made += rng.choice([".", "!", "", ".", ""])
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            made += rng.choice(["", " ", "  "]) + rng.choice(markers)
        made += rng.choice([" ", "\n", ". ", "\n\n", "! "])
        made += rng.choice(["Then", "He", "It"])
    return made + rng.choice(["", ".", f" {rng.choice(markers)}", f".{rng.choice(markers)}\n"])


# The engine


@pytest.fixture
def says(writer, demo, monkeypatch):
    """A function that sets the text of all answers, and returns it as its tokens are read. They arrive in random pieces."""
    rng = random.Random(7)

    async def write(request):
        for sample in range(request.sampling.n):
            ids, most = (*writer.token_ids, 2), 1 if request.sampling.stop else 9
            while ids:
                size = rng.randint(1, most)
                part, ids = ids[:size], ids[size:]
                reason = None if ids else "stop"
                writer._reply(TokenOutput(request.request_id, sample, part, None, reason, None, CachedTokens(0, (), 0)))
                await asyncio.sleep(0)

    monkeypatch.setattr(writer, "_write", write)

    def set_text(text):
        writer.token_ids = tuple(demo.tokenizer(text, add_special_tokens=False).input_ids)
        return f" {demo.tokenizer.decode(writer.token_ids)}"  # decoded behind the prompt, a first word has its space

    return set_text


def data_of(answer):
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: {")]


def chat_spans(citations):
    return [(c["start"], c["end"], [(s["id"], s["index"]) for s in c["sources"]]) for c in citations]


def asked(post, path, stream=False, **fields):
    answer = post(path, {**ASKED[path], **fields, "stream": stream}, tool_call_parser="hermes", reasoning_parser="qwen3")
    assert answer.status_code == 200, answer.text
    return answer


def streamed_chat(post, **fields):
    """Contents and citations of the samples of a stream; each citation comes behind its text."""
    found = {}
    for event in data_of(asked(post, CHAT, stream=True, **fields)):
        for choice in event["choices"]:
            told = found.setdefault(choice["index"], ["", []])
            told[0] += choice["delta"].get("content") or ""
            for citation in choice["delta"].get("citations", ()):
                assert citation["text"] == told[0][citation["start"] : citation["end"]]
                told[1].append(citation)
    return [found[index] for index in sorted(found)]


def response_of(post, **fields):
    """Output of a response, which its stream has too, each annotation behind its text."""
    whole = asked(post, RESPONSES, **fields).json()
    Response.model_validate(whole)
    text, annotations = "", []
    events = data_of(asked(post, RESPONSES, stream=True, **fields))
    for event in events:
        EVENTS.validate_python(event)
        if event["type"] == "response.output_text.delta":
            text += event["delta"]
        elif event["type"] == "response.output_text.annotation.added":
            assert event["annotation_index"] == len(annotations)
            assert event["annotation"]["index"] <= len(text)
            annotations.append(event["annotation"])
    (said,) = [item["content"][0] for item in whole["output"] if item["type"] == "message"] or [{"text": "", "annotations": []}]
    (last,) = [i["content"][0] for i in events[-1]["response"]["output"] if i["type"] == "message"] or [said]
    assert (text, annotations) == (said["text"], said["annotations"]) == (last["text"], last["annotations"])
    return whole


def message_of(post, **fields):
    """Blocks of a message, which its stream has too."""
    whole, blocks = asked(post, MESSAGES, **fields).json(), []
    for event in message_events(asked(post, MESSAGES, stream=True, **fields).text):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            told = event["delta"]
            if told["type"] == "text_delta":
                blocks[-1]["text"] += told["text"]
            elif told["type"] == "citations_delta":
                blocks[-1]["citations"] = [*(blocks[-1]["citations"] or ()), told["citation"]]
    assert [b for b in blocks if b["type"] == "text"] == [b for b in whole["content"] if b["type"] == "text"]
    return whole["content"]


def in_blocks(spans):
    """Numbers of the documents that each statement cites, in their order."""
    found = {}
    for start, end, sources in spans:
        found.setdefault((start, end), []).extend(number for _, number in sources)
    return [*found.items()]


@pytest.mark.parametrize("seed", range(30))
def test_all_apis_have_the_spans_of_a_search_for_markers(post, says, writer, seed):
    rng = random.Random(seed)
    documents = random_documents(rng)
    numbers = {marker(document): number for number, document in enumerate(documents)}
    keep, thinks, calls = (rng.random() < 0.25 for _ in range(3))
    stop = rng.choice([None, None, "zq!", "Then"])
    before = "<think>\nI read [do" + rng.choice(["", f" {next(iter(numbers))}"]) + ".\n</think>\n\n" if thinks else ""
    after = CALLS if calls and not stop else ""
    raw = says(before + random_answer(rng, [*numbers]) + after)
    text = raw.split("</think>")[-1].split("<tool_call>")[0]
    text = text.lstrip() if thinks else text
    text = text.split(stop)[0] if stop else text
    text, spans = found_in(text.rstrip() if after else text, numbers, keep)
    ids = [document.get("id") or list(numbers)[number][5:-1] for number, document in enumerate(documents)]
    expected = [(start, end, [(ids[numbers[m]], numbers[m]) for m in cited]) for start, end, cited in spans]
    shared = {"documents": documents, "citations": {"keep_markers": keep, "instruction": "Cite. "}} | (
        {"stop": stop} if stop else {}
    )
    tools = {"tools": [FIND, NOW]} if after else {}
    n = rng.randint(1, 2)
    choices = [choice["message"] for choice in asked(post, CHAT, **shared, **tools, n=n).json()["choices"]]
    for message in choices:
        assert ((message["content"] or ""), chat_spans(message["citations"])) == (text, expected), raw
        assert all(c["text"] == text[c["start"] : c["end"]] for c in message["citations"])
    streams = streamed_chat(post, **shared, **tools, n=n)
    assert [(content, chat_spans(citations)) for content, citations in streams] == [(text, expected)] * n, raw

    response = response_of(post, **shared, **({"tools": TOOLS} if after else {}))
    said = [item["content"][0] for item in response["output"] if item["type"] == "message"]
    assert "".join(part["text"] for part in said) == text
    annotations = [a for part in said for a in part["annotations"]]
    assert [(a["start_index"], a["index"], a["file_id"], a["document_index"]) for a in annotations] == [
        (start, end, name, number) for start, end, sources in expected for name, number in sources
    ]
    assert all(a["filename"] == documents[a["document_index"]].get("title", a["file_id"]) for a in annotations)

    if not keep or not stop:  # a stop string holds back a part of a kept marker
        blocks = [b for b in message_of(post, **shared, **({"tools": CUSTOM} if after else {})) if b["type"] == "text"]
        assert "".join(block["text"] for block in blocks) == text
        cited, at = [], 0
        for block in blocks:
            if block["citations"]:
                start = at + len(block["text"]) - len(block["text"].lstrip())
                cited.append(((start, block["text"].strip()), [c["document_index"] for c in block["citations"]]))
            at += len(block["text"])
        wanted = [((start, text[start:end]), listed) for (start, end), listed in in_blocks(expected)]
        if keep:  # the block has the markers, too
            cited = [((start, found_in(block, numbers)[0].strip()), listed) for (start, block), listed in cited]
        assert cited == wanted, raw
        for citation in (c for block in blocks for c in block["citations"] or ()):
            document = documents[citation["document_index"]]
            assert citation["cited_text"] == document["text"]
            assert (citation["file_id"], citation["document_title"]) == (document.get("id"), document.get("title"))
    assert all(request.sampling.structured_outputs.regex for request in writer.requests)


def test_another_order_of_documents_changes_indices_alone(post, says):
    documents = [{"id": f"d{n}", "text": f"Text {n}."} for n in range(300)]
    says("Nila sings [doc:d7][doc:d299]. Rumi writes.[doc:d0] End.")
    order = random.Random(1).sample(range(300), 300)
    found = []
    for listed in (documents, [documents[n] for n in order]):
        numbers = {document["id"]: number for number, document in enumerate(listed)}
        told = []
        for path in ASKED:
            text = asked(post, path, documents=listed, citations=True).json()
            text["id"] = text["created"] = text["created_at"] = None
            for output in text.get("output", ()):
                output["id"] = None
            plain = re.sub(r'"(index|document_index)": (\d+)(?=[,}])', "", json.dumps(text))
            told.append(plain)
            if path == CHAT:
                sources = [s for c in text["choices"][0]["message"]["citations"] for s in c["sources"]]
                assert [(s["id"], s["index"]) for s in sources] == [(name, numbers[name]) for name in ("d7", "d299", "d0")]
        found.append(told)
    assert found[0] == found[1]


BLOCKS = [
    {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "Nila sings."},
        "title": "Nila",
        "context": "Found in 2020.",
        "citations": {"enabled": True},
    },
    {
        "type": "document",
        "source": {"type": "content", "content": [{"type": "text", "text": "Rumi "}, {"type": "text", "text": "writes."}]},
        "citations": {"enabled": True},
        "cache_control": {"type": "ephemeral"},
    },
    {"type": "document", "source": {"type": "content", "content": "Lezudo likes honey."}, "citations": {"enabled": True}},
]
AS_DOCUMENTS = [
    {"title": "Nila", "text": "Found in 2020.\nNila sings."},
    {"text": "Rumi \nwrites."},
    {"text": "Lezudo likes honey."},
]


def test_document_blocks_are_documents_and_are_cited_as_anthropic_does(post, says, writer):
    markers = [marker(document) for document in AS_DOCUMENTS]
    says(f"Nila sings {markers[0]}. Rumi writes {markers[1]}{markers[2]}. So {markers[2]}")
    turns = [{"role": "user", "content": [*BLOCKS, {"type": "text", "text": "Where is Ana?"}]}]
    blocks = message_of(post, messages=turns)
    first = {
        "type": "char_location",
        "cited_text": "Nila sings.",
        "document_index": 0,
        "document_title": "Nila",
        "file_id": None,
        "start_char_index": 0,
        "end_char_index": 11,
    }
    block = {"type": "content_block_location", "document_title": None, "file_id": None, "start_block_index": 0}
    second = block | {"cited_text": "Rumi \nwrites.", "document_index": 1, "end_block_index": 2}
    third = block | {"cited_text": "Lezudo likes honey.", "document_index": 2, "end_block_index": 1}
    told = [(one["text"], one["citations"]) for one in blocks]
    assert told == [
        (" Nila sings", [first]),
        (". ", None),
        ("Rumi writes", [second, third]),
        (". ", None),
        ("So", [third]),
    ] or (told == [("Nila sings", [first]), (". ", None), ("Rumi writes", [second, third]), (". ", None), ("So", [third])])
    asked(post, CHAT, documents=AS_DOCUMENTS, citations=True)
    asked(post, MESSAGES, messages=[*turns, {"role": "assistant", "content": blocks}, USER])  # an answer goes back as it is
    one, _, other, _ = writer.requests
    assert [*one.layout.token_ids] == [*other.layout.token_ids]
    assert one.sampling.structured_outputs == other.sampling.structured_outputs
    own = {"documents": ["Own."], "messages": [{"role": "user", "content": BLOCKS}, {"role": "user", "content": "Who?"}]}
    assert [c["document_index"] for b in message_of(post, **own) for c in b["citations"] or ()] == [1, 2, 3, 3]
    plain = [{name: value for name, value in one.items() if name != "citations"} for one in BLOCKS]
    (said,) = message_of(post, messages=[{"role": "user", "content": plain}])
    assert said["citations"] is None
    assert len(writer.requests[-1].layout.chunk_lens) == 3


def test_a_marker_before_its_statement_cites_it_and_a_long_document_is_cut(post, says, monkeypatch):
    monkeypatch.setattr(message_form, "MAX_CITED_TEXT", 40)
    says("[doc:a] Nila sings. Rumi.")
    documents = [{"id": "a", "text": "é" * 50}]
    first, second = message_of(post, documents=documents, citations=True)
    (citation,) = first["citations"]
    assert (first["text"].strip(), second["text"], second["citations"]) == ("Nila sings.", "Rumi.", None)
    assert (citation["end_char_index"], citation["cited_text"]) == (50, "é" * 40)


REFUSED = [
    ({"documents": [{"id": "a", "text": "x"}] * 2, "citations": True}, "have the id 'a'"),
    ({"documents": ["x", "x"], "citations": True}, "have equal contents and no ids"),
    ({"citations": True}, "the prompt has none"),
    ({"documents": [], "citations": "required"}, "no document to cite"),
    ({"documents": ["x"], "citations": {"style": 1}}, "style"),
]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_refusals(post, path, fields, reason):
    answer = post(path, ASKED[path] | fields)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


def block_with(**fields):
    return {"messages": [{"role": "user", "content": [BLOCKS[0] | fields, BLOCKS[1], {"type": "text", "text": "Who?"}]}]}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (block_with(citations=None), "enabled on all document blocks or on none"),
        (block_with(source={"type": "base64", "media_type": "application/pdf", "data": "x"}), "base64"),
        (block_with(source={"type": "url", "url": "http://x"}), "url"),
        (block_with(source={"type": "text", "media_type": "text/html", "data": "x"}), "media_type"),
        (block_with(source=BLOCKS[1]["source"], title=None, context=None), "equal contents"),
        (block_with() | {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "exclude each other"),
    ],
)
def test_refused_document_blocks(post, fields, reason):
    answer = post(MESSAGES, ASKED[MESSAGES] | fields)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


def test_citations_beside_tools_and_reasoning(post, says, writer):
    """Calls that the model may make go with citations that it may write, and no grammar holds both."""
    says("Nila sings [doc:a] " + CALLS)
    shared = {"documents": [{"id": "a", "text": "x"}], "tools": [FIND, NOW]}
    message = asked(post, CHAT, **shared, citations=True).json()["choices"][0]["message"]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == CALLED
    assert [c["text"] for c in message["citations"]] == ["Nila sings"]
    assert writer.requests[-1].sampling.structured_outputs.regex
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        answer = post(CHAT, {**ASKED[CHAT], **shared, "citations": True, "tool_choice": choice}, tool_call_parser="hermes")
        assert answer.status_code == 400
        assert "citations and enforced calls exclude each other" in answer.json()["error"]["message"]
    answer = post(CHAT, {**ASKED[CHAT], **shared, "citations": "required"}, tool_call_parser="hermes")
    assert answer.status_code == 400
    assert "required citations and tools exclude each other" in answer.json()["error"]["message"]
    none = asked(post, CHAT, **shared, citations=True, tool_choice="none").json()["choices"][0]["message"]
    assert "tool_calls" not in none


def test_required_citations_stand_behind_the_reasoning(post, says, writer, llm, demo, thinking):
    says("I read [doc:a]. \n</think>\n\nNila sings [doc:a]")
    asked_for = {"documents": [{"id": "a", "text": "x"}], "citations": {"mode": "required", "within": 20, "instruction": ""}}
    message = asked(post, CHAT, **asked_for).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Nila sings", "I read.")
    assert [(c["start"], c["text"]) for c in message["citations"]] == [(0, "Nila sings")]
    compiled = Grammars(llm.frontend.vocabulary).compile(writer.requests[-1].sampling.structured_outputs)

    def accepts(text):
        machine = compiled.deep_copy()
        ids = demo.tokenizer(text, add_special_tokens=False).input_ids
        return machine.try_consume_tokens(ids) == len(ids) and machine.is_accepting()

    assert accepts("I think.\n</think>\n\nNila sings [doc:a].")
    assert not accepts("I think [doc:a].\n</think>\n\nNila sings.")
    assert not accepts("I think.\n</think>\n\nNila sings [doc:b].")


def test_required_citations_stand_behind_reasoning_that_the_model_opens(post, says, writer, llm, demo):
    says("<think>\nI read. \n</think>\n\nNila sings [doc:a]")
    asked_for = {"documents": [{"id": "a", "text": "x"}], "citations": {"mode": "required", "within": 20, "instruction": ""}}
    message = asked(post, CHAT, **asked_for).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Nila sings", "I read.")
    compiled = Grammars(llm.frontend.vocabulary).compile(writer.requests[-1].sampling.structured_outputs)

    def accepts(text):
        machine = compiled.deep_copy()
        first, *ids = demo.tokenizer(f"\n{text}", add_special_tokens=False).input_ids  # no space before the text
        while "\n" not in demo.tokenizer.decode([first]):
            first, *ids = ids
        return machine.try_consume_tokens(ids) == len(ids) and machine.is_accepting()

    thoughts = "Far more than twenty characters of thought. " * 3
    assert accepts(f"<think>{thoughts}</think>\n\nNila sings [doc:a].")
    assert accepts("Nila sings [doc:a].")
    assert not accepts(f"<think>{thoughts}</think>\n\nNila sings.")
    assert not accepts(f"{thoughts}[doc:a]")
