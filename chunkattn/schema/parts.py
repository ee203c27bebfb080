"""Parts of request bodies, by route: salt, prefix, documents and question of a body as a client sends it.

Gateways read bodies here without a model: routing keys, stored ids and samples of documents follow from the parts. A reader
raises on a malformed body, which the server refuses with the proper error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from chunkattn.answer_parsers.tools import shown_tool
from chunkattn.citations import Citations, Document
from chunkattn.parsers.markers import BEHIND_MARKER, marker_of
from chunkattn.schema.citations import citations_in
from chunkattn.schema.messages_chat import messages_chat
from chunkattn.schema.responses_chat import responses_chat
from chunkattn.web.paths import RERANK_PATHS

Object = Mapping[str, Any]

MALFORMED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""Exceptions of readers on malformed bodies."""
_UNSHARED = ("enable_thinking", "thinking")
"""Template variables that change the text behind the documents. `/v1/decisions` sets them, and shares documents with chats."""
_ITEM_FIELDS = ("role", "type", "phase", "name", "namespace", "call_id", "status", "content")


class Value(NamedTuple):
    """Text or JSON value that is no message, such as a state."""

    content: Any


class Prompt(NamedTuple):
    """Text read from its beginning, documents behind it in any order, and what is read behind them.

    Attributes:
        kind: what the K/V depends on beside the parts, as JSON.
        prefix: texts, token ids, messages or values at the beginning.
        documents: texts and token ids, without documents named by id.
        behind: messages or values behind the documents.
        in_template: whether the document template surrounds the documents that are texts.
        is_joined: whether the documents are one chunk together. Those that a focus chooses from are scored apart.
    """

    kind: Any
    prefix: Sequence[Any]
    documents: Sequence[Any] = ()
    behind: Sequence[Any] = ()
    in_template: bool = True
    is_joined: bool = False


class Parts(NamedTuple):
    """Parts of a body.

    Attributes:
        salt: cache salt; None without one.
        prompts: what a cache may hold.
        question: texts, token ids, messages or values that no cache holds.
    """

    salt: str | None
    prompts: Sequence[Prompt]
    question: Sequence[Any] = ()


class Route(NamedTuple):
    """Bodies of a route.

    Attributes:
        read: function from a body and the separator of text prompts, or None, to prompts and question; see `Parts`.
        place: names of the fields, one in the other, that lead to documents which may be named by id.
        named: form in which a document takes the place of its id: its content, its text, or an object to rank.
        salts: fields of the salt; the first that is given counts.
        is_cached: whether a cache holds the prompts of a request afterwards.
        decides: whether the bodies ask for decisions.
        chat: function from a body to the chat that it stands for, which `read` gets; the body itself for most routes.
    """

    read: Callable[[Object, str | None], tuple[Sequence[Prompt], Sequence[Any]]]
    place: tuple[str, ...] = ("documents",)
    named: Literal["content", "text", "ranked"] | None = "content"
    salts: tuple[str, ...] = ("cache_salt",)
    is_cached: bool = True
    decides: bool = False
    chat: Callable[[Object], Object] = dict

    def salt(self, body: Object) -> str | None:
        """Return the salt that a body gives, or None."""
        salt = _first(body, *self.salts)
        return salt if isinstance(salt, str) else None

    def documents(self, body: Any) -> Sequence[Any]:
        """Return the documents of a body as they were sent."""
        for name in self.place:
            body = body.get(name) if isinstance(body, Mapping) else None
        return body if isinstance(body, list) else ()

    def with_documents(self, body: Object, documents: Sequence[Any]) -> Object:
        """Return a body with other documents."""
        *outer, last = self.place
        changed: Object = {last: documents}
        for name in outer:
            changed = {name: {**body[name], **changed}}
        return {**body, **changed}

    def parts(self, body: Object, separator: str | None = None) -> Parts:
        """Return the parts of a body; see `parts`."""
        prompts, question = self.read(self.chat(body), separator)
        if body.get("chunk_mode") == "joined" and body.get("focus") is None:
            prompts = [prompt._replace(is_joined=True) for prompt in prompts]
        return Parts(self.salt(body), prompts, question)


def route_of(path: str) -> Route | None:
    """Return the route of a path, with or without the `root_path` of a server; None for a path without such bodies."""
    return ROUTES.get(path) or next((route for end, route in ROUTES.items() if path.endswith(end)), None)


def parts(path: str, body: Object, separator: str | None = None) -> Parts:
    """Return the parts of a body.

    Args:
        path: path of the request, one of `ROUTES`.
        body: decoded JSON body.
        separator: separator at which text prompts are split; None splits none. A body with `chunk_aware: false` is not split.

    Raises:
        Exception: one of `MALFORMED`.
    """
    return ROUTES[path].parts(body, separator)


def documents_of(path: str, body: Any) -> Sequence[Any]:
    """Return the documents of a body as they were sent, for any path and body."""
    route = route_of(path)
    return () if route is None else route.documents(body)


def decides_by_default(path: str, body: Any) -> bool:
    """Return whether a body asks for decisions by the default method of the replica that answers."""
    route = route_of(path)
    return route is not None and route.decides and isinstance(body, Mapping) and body.get("method", "auto") == "auto"


# Documents and messages


def titled(title: str | None, text: str) -> str:
    """Return a text below its title, if it has one."""
    return f"{title}\n{text}" if title else text


def stored_id(document: Any) -> str | None:
    """Return the id of an object that holds an id alone, or None."""
    if not isinstance(document, Mapping):
        return None
    names = {name for name, value in document.items() if value is not None}
    return document["id"] if names == {"id"} and isinstance(document["id"], str) else None


def fields_text(document: Object, names: Sequence[str]) -> str:
    """Return the text of a document that is ranked by some of its fields: one field's value, or a line for each of several.

    Args:
        document: the document.
        names: names of the fields, in the order of the result. Absent and null ones are left out.
    """
    texts = {
        n: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for n in names if (v := document.get(n)) is not None
    }
    return "\n".join(f"{n}: {v}" for n, v in texts.items()) if len(names) > 1 else "".join(texts.values())


def chat_message(message: Object) -> dict[str, Any]:
    """Return a message as the chat template reads it. A single text part is a text; an empty list of calls is absent."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        listed = [{"type": "text", "text": part["text"]} for part in content]
        content = listed if len(listed) > 1 else "".join(part["text"] for part in listed)
    optional = {
        "name": message.get("name"),
        "tool_call_id": message.get("tool_call_id"),
        "tool_calls": [_call(call) for call in calls] if calls else None,
        "reasoning_content": _first(message, "reasoning_content", "reasoning"),
    }
    return {"role": message["role"], "content": content} | {n: v for n, v in optional.items() if v is not None}


def _call(call: Object) -> dict[str, Any]:
    """Return a tool call for the chat template. `index` numbers the calls of a stream and is left out."""
    called = {"name": call["function"]["name"], "arguments": call["function"].get("arguments")}
    return ({} if call.get("id") is None else {"id": call["id"]}) | {"type": "function", "function": called}


def state_message(item: Object) -> dict[str, Any]:
    """Return an item of the input of `/v1/decisions` as a message of the state."""
    kind, content = item.get("type"), _first(item, "content", "arguments", "input", "output")
    if isinstance(content, list):
        values = [{"refusal": part["refusal"]} if "refusal" in part else _first(part, "text", "data") for part in content]
        content = values[0] if len(values) == 1 else values
    read = {**item, "content": content}
    if kind in (None, "message"):
        read["type"] = None
    else:
        read["role"] = "tool" if kind.endswith("_output") else "assistant"
    return {name: read[name] for name in _ITEM_FIELDS if read.get(name) is not None}


# Readers


def _prompt(content: Any, documents: Sequence[Any] = (), *, plain: bool = True, in_template: bool = True) -> Prompt:
    """Return a prompt that begins with a text, with leading special tokens if `plain`, or with token ids."""
    kind = ("text" if plain else "bare") if isinstance(content, str) else "ids"
    return Prompt(kind, [content], documents, in_template=in_template)


def _completion(body: Object, separator: str | None) -> tuple[list[Prompt], list[Any]]:
    plain, prompts, questions = body.get("add_special_tokens") is not False, list[Prompt](), list[Any]()
    if (chunks := body.get("chunks")) is not None:
        question = chunks["question"]
        prefix = chunks.get("prefix") or ("" if isinstance(question, str) else [])
        citing = citations_in(body)
        questions = [question] if citing is None or not isinstance(question, str) else [citing.instruction, question]
        return [_prompt(prefix, _contents(chunks["documents"], citing), plain=plain)], questions
    for prompt in _leaves(body.get("prompt")):
        first, *chunks = prompt.split(separator) if separator and isinstance(prompt, str) else [prompt]
        if len(chunks) > 1 and body.get("chunk_aware") is not False:
            *chunks, question = chunks
            questions.append(question)
            prompts.append(_prompt(first, chunks, plain=plain, in_template=False))
        else:
            prompts.append(_prompt(prompt, plain=plain))
    return prompts, questions


def _chat(body: Object, separator: str | None) -> tuple[list[Prompt], list[Any]]:
    messages, documents = [*map(chat_message, listed(body["messages"]))], body.get("documents")
    if not documents:
        return [Prompt(_template(body), messages)], []
    first = [message["role"] for message in messages].index("user")
    citing = citations_in(body)
    asked: list[Any] = [] if citing is None else [Value(citing.instruction)]
    behind, question = [*asked, *messages[first:-1]], messages[-1:]
    if first == len(messages) - 1:  # nothing but the instruction is behind the documents
        behind, question = [], [*asked, *question]
    return [Prompt(_template(body), messages[:first], _contents(documents, citing), behind)], question


def _stored(body: Object, separator: str | None) -> tuple[list[Prompt], list[Any]]:
    documents, messages = _contents(body["documents"], citations_in(body)), body.get("messages")
    if messages is not None:
        return [Prompt(_template(body), [*map(chat_message, listed(messages))], documents)], []
    return [_prompt(body.get("prefix") or ([] if isinstance(body["documents"][0], list) else ""), documents)], []


def _tokenized(body: Object, separator: str | None) -> tuple[list[Prompt], list[Any]]:
    if (messages := body.get("messages")) is not None:
        return [Prompt(_template(body), [*map(chat_message, listed(messages))])], []
    return _completion(body, None)


def _score(body: Object, separator: str | None) -> tuple[list[Prompt], list[Any]]:
    if (queries := _first(body, "text_1", "queries")) is not None:
        return _ranked(body, queries, _first(body, "text_2", "documents", "items"))
    if (packed := body.get("packed_ids")) is not None:
        return [_prompt(packed)], []
    kept, others = body.get("query"), body.get("items")
    if body.get("item_first") is True:
        kept, others = others, kept
    return [*map(_prompt, _leaves(kept))], [*_leaves(others)]


def _rerank(body: Object, separator: str | None) -> tuple[list[Prompt], list[Any]]:
    query, names = body["query"], body.get("rank_fields")
    documents = listed(_first(body, "documents", "texts"))
    if names is not None:
        stored = "id" not in listed(names)
        documents = [
            fields_text(d, names) if isinstance(d, Mapping) and not (stored and stored_id(d)) else d for d in documents
        ]
    return _ranked(body, query["text"] if isinstance(query, Mapping) else query, documents)


def _ranked(body: Object, queries: Any, documents: Any) -> tuple[list[Prompt], list[Any]]:
    """Return the parts of a call that judges relevance: queries come first, or documents."""
    template = body.get("template")
    queries, texts = ([one] if isinstance(one, str) else listed(one) for one in (queries, documents))
    texts = _contents(texts)
    if body.get("order") == "document_first":
        return [Prompt(["document first", template], [text]) for text in texts], queries
    kind = ["query first", template, _first(body, "instruction", "instruct")]
    return [Prompt(kind, [query]) for query in queries], texts


def _decisions(body: Object, separator: str | None) -> tuple[list[Prompt], list[Any]]:
    given = body["input"]
    return _decided(body, [given] if isinstance(given, str) else [*map(state_message, listed(given))])


def _system_one(body: Object, separator: str | None) -> tuple[list[Prompt], list[Any]]:
    state = body["state"]
    is_chat = isinstance(state, list) and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in state)
    return _decided(body, state if is_chat and state else [state])


def _decided(body: Object, state: Sequence[Any]) -> tuple[list[Prompt], list[Any]]:
    """Return the parts of a state behind its system message, or behind its documents."""
    system, values = body.get("system"), [*map(Value, state)]
    before = [] if system is None else [chat_message({"role": "system", "content": system})]
    question = [Value(body.get("questions"))]
    if documents := body.get("documents"):
        return [Prompt(_template(body), before, _contents(documents), values)], question
    return [Prompt(_template(body), [*before, *values])], question


_CHUNKS = ("chunks", "documents")
_PAIRS, _RERANK = Route(_score, named="text"), Route(_rerank, named="ranked")

ROUTES: dict[str, Route] = {
    "/v1/completions": Route(_completion, _CHUNKS),
    "/v1/chat/completions": Route(_chat),
    "/v1/responses": Route(_chat, chat=responses_chat),
    "/v1/messages": Route(_chat, chat=messages_chat),
    "/v1/messages/count_tokens": Route(_chat, is_cached=False, chat=messages_chat),
    "/v1/cache/documents": Route(_stored, named=None),
    "/v1/cache/forget": Route(_stored, named=None, is_cached=False),
    "/v1/score": _PAIRS,
    "/score": _PAIRS,
    "/generative_scoring": Route(_score, (), named=None),
    **dict.fromkeys(RERANK_PATHS, _RERANK),
    "/v1/decisions": Route(_decisions, salts=("cache_salt", "prompt_cache_key"), decides=True),
    "/v1/systemone": Route(_system_one, decides=True),
    "/inspect": Route(_completion, _CHUNKS, is_cached=False),
    "/tokenize": Route(_tokenized, (), named=None, is_cached=False),
}
"""Routes with prompts in their bodies, by path; a path that ends like another one comes before it."""


def _template(body: Object) -> Any:
    """Return what the text before the first user message depends on beside the messages."""
    options = {"reasoning_effort": body.get("reasoning_effort"), **(body.get("chat_template_kwargs") or {})}
    shared = {name: value for name, value in options.items() if name not in _UNSHARED and value is not None}
    return {"template": shared, **tools_kind(body.get("tools") or ())}


def tools_kind(tools: Sequence[Object]) -> dict[str, str]:
    """Return what a prefix depends on beside the messages if the chat template shows tools: their text, in their order."""
    return {"tools": json.dumps([*map(shown_tool, tools)], separators=(",", ":"))} if tools else {}


def _contents(documents: Any, citing: Citations | None = None) -> list[Any]:
    """Return texts and token ids of documents, with their markers under citations, without those that have no text."""
    given = [d for d in listed(documents) if _has_text(d)]
    contents = [titled(d.get("title"), d["text"]) if isinstance(d, Mapping) else d for d in given]
    return contents if citing is None else [*map(_marked, contents, given)]


def _marked(content: Any, document: Any) -> Any:
    """Return a content with the marker of its document, as the chunk begins; token ids with the marker beside them."""
    if not content:
        return content
    marker = marker_of(Document(content, _first(document, "cite_as", "id") if isinstance(document, Mapping) else None))
    return f"{marker}{BEHIND_MARKER}{content}" if isinstance(content, str) else {"marker": marker, "ids": content}


def _has_text(document: Any) -> bool:
    return not isinstance(document, Mapping) or document.get("text") is not None


def _first(body: Object, *names: str) -> Any:
    """Return the first of some fields that is given; null counts as absent."""
    return next((body[name] for name in names if body.get(name) is not None), None)


def listed(value: Any) -> Sequence[Any]:
    """Return a list.

    Raises:
        TypeError: the value is no list.
    """
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"expected a list, got {type(value).__name__}")
    return value


def _leaves(value: Any) -> Iterator[Any]:
    """Yield every text and every list of token ids in nested lists."""
    if isinstance(value, str):
        yield value
    elif value is not None and listed(value):
        if isinstance(value[0], (str, list, tuple)):
            for one in value:
                yield from _leaves(one)
        else:
            yield value
