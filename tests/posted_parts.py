"""Parts of validated bodies, and a fixture that compares them with `chunkattn.schema.parts` for each body that a test posts."""

import json

import pytest

from chunkattn.citations import Document
from chunkattn.errors import RequestError
from chunkattn.parsers.markers import marker_of
from chunkattn.schema.citations import citations_of
from chunkattn.schema.decide import DecideBody
from chunkattn.schema.decisions import DecisionsBody
from chunkattn.schema.documents import CacheBody, ForgetBody
from chunkattn.schema.generation import ChatBody, CompletionBody, named_documents, with_stored
from chunkattn.schema.parts import _UNSHARED, Parts, Prompt, Value, parts, route_of, state_message
from chunkattn.schema.scoring import GenerativeScoringBody, RerankBody, ScoreBody
from chunkattn.schema.tokens import InspectBody, TokenizeBody
from chunkattn.schema.translated import Translated
from chunkattn.web import bodies


def validated(body):
    """Return the parts of a validated body as the server uses them, or None for a body that the server refuses later."""
    try:
        prompts, question = _prompts(body)
    except (RequestError, ValueError):
        return None
    salt = body.salt if isinstance(body, DecideBody) else getattr(body, "cache_salt", None)
    return Parts(salt, prompts, question)


def _contents(documents, citing=None):
    named, contents = named_documents(documents), with_stored(documents or (), {}, named=True)
    listed = [content for number, content in enumerate(contents) if number not in named]
    plain = [content.content if isinstance(content, Document) else content for content in listed]
    return plain if citing is None else [*map(_marked, listed, plain)]


def _marked(document, content):
    if not content:
        return content
    marker = marker_of(document if isinstance(document, Document) else Document(document))
    return f"{marker}\n{content}" if isinstance(content, str) else {"marker": marker, "ids": content}


def _template(variables, body=None):
    shared = {name: value for name, value in variables.items() if name not in _UNSHARED and value is not None}
    tools = [] if body is None else body.shown_tools
    return {"template": shared} | ({"tools": json.dumps(tools, separators=(",", ":"))} if tools else {})


def _kind(content, body):
    plain = getattr(body, "add_special_tokens", True)
    return "ids" if not isinstance(content, str) else "text" if plain else "bare"


def _texts(values, body):
    """Return a prompt of each text and list of token ids."""
    if isinstance(values, str) or (values and isinstance(values[0], int)):
        return [Prompt(_kind(values, body), [values])]
    return [prompt for value in values or () for prompt in _texts(value, body)]


def _flat(values):
    return [prompt.prefix[0] for prompt in _texts(values, None)]


def _ranked(body, queries, texts):
    if body.order == "document_first":
        return [Prompt(["document first", body.template], [text]) for text in texts], queries
    instruction = body.instruction if body.instruction is not None else getattr(body, "instruct", None)
    return [Prompt(["query first", body.template, instruction], [query]) for query in queries], texts


def _prompts(body):
    match body:
        case CompletionBody(chunks=chunks) | InspectBody(chunks=chunks) if chunks is not None:
            prompt = chunks.prompt(dict.fromkeys(named_documents(chunks.documents), ""))
            citing = citations_of(getattr(body, "citations", None))
            asked = [] if citing is None or not isinstance(prompt.question, str) else [citing.instruction]
            documents = _contents(chunks.documents, citing)
            return [Prompt(_kind(prompt.prefix, body), [prompt.prefix], documents)], [*asked, prompt.question]
        case CompletionBody() | InspectBody() | TokenizeBody(messages=None):
            return _texts(body.prompt, body), []
        case TokenizeBody():
            return [Prompt(_template(body.variables, body), [m.plain() for m in body.messages])], []
        case Translated():
            return _prompts(body.chat)
        case ChatBody(documents=documents):
            messages, kind = [m.plain() for m in body.messages], _template(body.variables, body)
            if not documents:
                return [Prompt(kind, messages)], []
            first = [message["role"] for message in messages].index("user")
            citing = citations_of(body.citations)
            asked, turns = [] if citing is None else [Value(citing.instruction)], messages[first:-1]
            behind, question = ([*asked, *turns], messages[-1:]) if turns else ([], [*asked, *messages[-1:]])
            return [Prompt(kind, messages[:first], _contents(documents, citing), behind)], question
        case CacheBody() | ForgetBody():
            start, texts = body.start(), body.texts()
            if body.citations:
                texts = [_marked(Document(text, name), text) for text, name in zip(texts, body.cited_ids(), strict=True)]
            if body.messages is None:
                return [Prompt(_kind(start, body), [start], texts)], []
            return [Prompt(_template(body.chat_template_kwargs, body), start, texts)], []
        case ScoreBody(pairwise=True):
            queries, _ = body.pairs({})
            texts = [body.text_2, body.items, body.documents]
            return _ranked(body, queries, next(_contents([v] if isinstance(v, str) else v) for v in texts if v is not None))
        case ScoreBody(packed_ids=ids) if ids is not None:
            return _texts(ids, body), []
        case ScoreBody() | GenerativeScoringBody():
            first, second = (body.items, body.query) if body.item_first else (body.query, body.items)
            return _texts(first, body), _flat(second)
        case RerankBody():
            named = body.named()
            texts = [content for number, content in enumerate(body.contents(dict.fromkeys(named))) if number not in named]
            return _ranked(body, [body.query_text], texts)
        case DecideBody():
            if isinstance(body, DecisionsBody):
                state = [body.input] if isinstance(body.input, str) else [state_message(i.model_dump()) for i in body.input]
            else:
                messages = body.state if isinstance(body.state, list) else []
                is_chat = messages and all(isinstance(m, dict) and {"role", "content"} <= {*m} for m in messages)
                state = messages if is_chat else [body.state]
            before = [] if body.system is None else [{"role": "system", "content": body.system}]
            kind, values = _template(body.chat_template_kwargs), [Value(value) for value in state]
            prompt = Prompt(kind, [*before, *values])
            if body.documents:
                prompt = Prompt(kind, before, _contents(body.documents), values)
            return [prompt], [len(body.questions)]
    raise AssertionError(f"no parts of {type(body).__name__}")


def difference(path, raw, body):
    """Return how the parts of a raw body differ from those of the validated one; None if they do not."""
    expected = validated(body)
    if expected is None:
        return None
    read = parts(path, raw)
    if isinstance(body, DecideBody):
        read = read._replace(question=[len(value.content) for value in read.question])
    shown = []
    for own in (read, expected):
        prompts = [[p.kind, [*p.prefix], [*p.documents], [*p.behind], p.in_template] for p in own.prompts]
        shown.append([own.salt, prompts, [*own.question]])
    return None if shown[0] == shown[1] else f"{path}: {shown[0]} != {shown[1]}"


@pytest.fixture(autouse=True)
def posted_parts(monkeypatch):
    """Compare both readings of every body that the test posts to a server in this process."""
    read, differences = bodies._read, []

    async def compared(request, field):
        noted = await read(request, field)
        if route_of(path := request.scope["path"]) and hasattr(request, "_json") and "content-encoding" not in request.headers:
            raw = json.loads(request._body)
            if isinstance(raw, dict) and (found := difference(path, raw, request._json)):
                differences.append(found)
        return noted

    monkeypatch.setattr(bodies, "_read", compared)
    yield
    assert not differences
