"""Routing keys of a request: a 64-bit key for each piece whose K/V a replica may hold, from the JSON body alone.

The K/V of a document depends on the API key, the cache salt, the prefix and the document, and on nothing else of the request.
A key is a hash of these, so equal keys stand for equal K/V, whatever the order and the company of the documents. What has to
be read from the beginning (prefixes, plain prompts, conversations, states) becomes a chain of pieces: the key of each piece
covers all text before it, so equal beginnings have equal keys. No tokenizer is needed; sizes are bytes of text.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from chunkattn.web.paths import RERANK_PATHS

_FIRST_BLOCK = 512
"""Bytes of the first piece of a long text. Each further piece ends at twice the bytes, so a text has few pieces."""
MAX_PIECES = 4096
"""Pieces of one request, as many as the chunks that an engine takes by default. A request with more has no keys: to hash and to
record them would hold up all other requests."""
_SMALLEST = 64
"""Bytes below which a message of a conversation shares the piece of the next one."""
_UNSHARED = ("enable_thinking", "thinking")
"""Template variables that change the text behind the documents. `/v1/decisions` sets them, and shares documents with chats."""
_NO_EFFECT = ("id", "annotations", "refusal", "cache_control", "type")
"""Fields of a message that its text does not depend on."""


class Keys(NamedTuple):
    """Pieces of a request, with their sizes in bytes of text.

    Attributes:
        pieces: key and size of each distinct piece that a replica may have cached, in the request's order: the prefix before
            the documents.
        rest: size of what no replica can have cached, such as the question.
    """

    pieces: tuple[tuple[int, int], ...] = ()
    rest: int = 0


def keys_of(path: str, body: Any, authorization: str = "", *, separator: str | None = None) -> Keys:
    """Return the routing keys of a request.

    A malformed body has no keys; the replica answers with the proper error. A document named by id contributes nothing unless
    its text has taken the place of the id.

    Args:
        path: path of the request, with or without the `root_path` of the replicas.
        body: decoded JSON body.
        authorization: Authorization header, since API keys with names share no cache.
        separator: separator at which the replicas split text prompts; None if they split none. A body with
            `chunk_aware: false` is not split.
    """
    read = _route(path)
    if read is None or not isinstance(body, Mapping):
        return Keys()
    try:
        pieces = _Pieces(authorization, body, separator)
        read(pieces, body)
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError):
        return Keys()
    return Keys(tuple(pieces.found.items()), pieces.rest)


class _Pieces:
    """Pieces found in one body.

    Attributes:
        salt: cache salt of the request.
        found: size of each piece by its key.
        rest: see `Keys`.
        separator: see `keys_of`.
    """

    def __init__(self, authorization: str, body: Mapping[str, Any], separator: str | None) -> None:
        self.salt = body.get("cache_salt")
        self._authorization = authorization
        self.found: dict[int, int] = {}
        self.rest = 0
        self.separator = separator

    def chain(self, kind: Any, parts: Iterable[bytes]) -> bytes:
        """Add the pieces of a text that is read from its beginning.

        Args:
            kind: what else the K/V depends on, as JSON.
            parts: the text in parts. Each part ends a piece if there are bytes enough.

        Returns:
            Digest of the whole text, which begins the keys of the documents behind it.
        """
        state, size = blake2b(_json([self._authorization, self.salt, kind]), digest_size=16), 0
        for part in parts:
            start, end = 0, _FIRST_BLOCK
            while start < len(part):
                block = part[start:end]
                state.update(block)
                size += len(block)
                if len(part) >= end:
                    size = self._add(state.digest(), size)
                start, end = end, 2 * end
            state.update(len(part).to_bytes(8, "big"))
            if size >= _SMALLEST:
                size = self._add(state.digest(), size)
        if size:
            self._add(state.digest(), size)
        return state.digest()

    def _add(self, digest: bytes, size: int) -> int:
        """Add a piece, and return the size of the next one, which is empty.

        Raises:
            ValueError: there are too many pieces.
        """
        self.found[int.from_bytes(digest[:8], "big")] = size
        if len(self.found) > MAX_PIECES:
            raise ValueError("too many pieces")
        return 0

    def text(self, given: Any, *, plain: bool = True) -> bytes:
        """Add the pieces of a text or of token ids that begin a prompt, and return their digest.

        Args:
            given: text or token ids.
            plain: whether a text begins with the tokenizer's leading special tokens.
        """
        if isinstance(given, str):
            return self.chain("text" if plain else "bare", [_utf8(given)])
        return self.chain("ids", [_ids(given)])

    def documents(self, start: bytes, given: Iterable[Any], kind: bytes = b"document") -> bytes:
        """Add documents behind a prefix.

        Args:
            start: digest of the prefix.
            given: texts, token ids, or objects with a text.
            kind: `b"document"` for texts that stand in the document template, `b"chunk"` for others.

        Returns:
            Digest of prefix and documents in any order, which begins the keys of what is read behind them.
        """
        keys = set()
        for document in given:
            if isinstance(document, Mapping):
                if (text := document.get("text")) is None:
                    continue
                document = _titled(document.get("title"), text)
            content, own = (_utf8(document), kind) if isinstance(document, str) else (_ids(document), b"ids")
            if content:
                key = blake2b(content, digest_size=8, key=start, person=own).digest()
                keys.add(key)
                self._add(key, len(content))
        return blake2b(b"".join(sorted(keys)), digest_size=16, key=start).digest()


def _completion(pieces: _Pieces, body: Mapping[str, Any]) -> None:
    plain = body.get("add_special_tokens") is not False
    if (parts := body.get("chunks")) is not None:
        question = parts["question"]
        start = pieces.text(parts.get("prefix") or ("" if isinstance(question, str) else []), plain=plain)
        pieces.documents(start, _listed(parts["documents"]))
        pieces.rest = _size(question)
        return
    for prompt in _leaves(body.get("prompt")):
        split = prompt.split(pieces.separator) if pieces.separator and isinstance(prompt, str) else []
        if len(split) > 2 and body.get("chunk_aware") is not False:
            first, *chunks, last = split
            pieces.documents(pieces.text(first, plain=plain), chunks, b"chunk")
            pieces.rest += _size(last)
        else:
            pieces.text(prompt, plain=plain)


def _chat(pieces: _Pieces, body: Mapping[str, Any]) -> None:
    messages, documents = _listed(body["messages"]), body.get("documents")
    if not documents:
        pieces.chain(_template(body), map(_message, messages))
        return
    first = [message.get("role") for message in messages].index("user")
    start = pieces.chain(_template(body), map(_message, messages[:first]))
    behind = pieces.documents(start, _listed(documents))
    *earlier, last = map(_message, messages[first:])
    if earlier:
        pieces.chain(behind.hex(), earlier)
    pieces.rest = len(last)


def _stored(pieces: _Pieces, body: Mapping[str, Any]) -> None:
    documents, messages = _listed(body["documents"]), body.get("messages")
    if messages is not None:
        start = pieces.chain(_template(body), map(_message, _listed(messages)))
    else:
        start = pieces.text(body.get("prefix") or ([] if isinstance(documents[0], list) else ""))
    pieces.documents(start, documents)


def _score(pieces: _Pieces, body: Mapping[str, Any]) -> None:
    if (queries := _first(body, "text_1", "queries")) is not None:
        _rank(pieces, body, queries, _first(body, "text_2", "documents", "items"))
        return
    if (packed := body.get("packed_ids")) is not None:
        pieces.text(packed)
        return
    kept, others = body.get("query"), body.get("items")
    if body.get("item_first") is True:
        kept, others = others, kept
    for one in _leaves(kept):
        pieces.text(one)
    pieces.rest = sum(map(_size, _leaves(others)))


def _rerank(pieces: _Pieces, body: Mapping[str, Any]) -> None:
    query, names = body["query"], body.get("rank_fields")
    documents = _listed(_first(body, "documents", "texts"))
    if names is not None:
        documents = [_fields(d, _listed(names)) if isinstance(d, Mapping) else d for d in documents]
    _rank(pieces, body, query["text"] if isinstance(query, Mapping) else query, documents)


def _rank(pieces: _Pieces, body: Mapping[str, Any], queries: Any, documents: Any) -> None:
    """Add the pieces of a call that judges relevance: the queries, or the documents where they come first."""
    template = body.get("template")
    queries, documents = ([one] if isinstance(one, str) else _listed(one) for one in (queries, documents))
    texts = [_titled(d.get("title"), d["text"]) if isinstance(d, Mapping) else d for d in documents if _has_text(d)]
    if body.get("order") == "document_first":
        for text in texts:
            pieces.chain(["document first", template], [_content(text)])
        pieces.rest = sum(map(_size, queries))
    else:
        for query in queries:
            pieces.chain(["query first", template, _first(body, "instruction", "instruct")], [_content(query)])
        pieces.rest = sum(map(_size, texts))


def _decisions(pieces: _Pieces, body: Mapping[str, Any]) -> None:
    given = body["input"]
    if pieces.salt is None:
        pieces.salt = body.get("prompt_cache_key")
    _decide(pieces, body, [_utf8(given)] if isinstance(given, str) else map(_item, _listed(given)))


def _system_one(pieces: _Pieces, body: Mapping[str, Any]) -> None:
    given = body["state"]
    if isinstance(given, list) and given and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in given):
        _decide(pieces, body, map(_json, given))
    else:
        _decide(pieces, body, [_utf8(given if isinstance(given, str) else json.dumps(given, **_COMPACT))])


def _decide(pieces: _Pieces, body: Mapping[str, Any], state: Iterable[bytes]) -> None:
    """Add the pieces of a state behind its system message, or behind its documents."""
    system = body.get("system")
    before = [] if system is None else [_message({"role": "system", "content": system})]
    if documents := body.get("documents"):
        behind = pieces.documents(pieces.chain(_template(body), before), _listed(documents))
        pieces.chain(["state", behind.hex()], state)
    else:
        pieces.chain(_template(body), [*before, *(b"\0" + part for part in state)])  # no message begins with a zero
    pieces.rest = len(_json(body.get("questions")))


_ROUTES: dict[str, Callable[[_Pieces, Mapping[str, Any]], None]] = {
    "/v1/completions": _completion,
    "/v1/chat/completions": _chat,
    "/v1/cache/documents": _stored,
    "/v1/score": _score,
    "/score": _score,
    "/generative_scoring": _score,
    **dict.fromkeys(RERANK_PATHS, _rerank),
    "/v1/decisions": _decisions,
    "/v1/systemone": _system_one,
}
"""Readers of bodies by route; a route that ends like another one comes before it."""
_COMPACT: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
"""Form in which `/v1/systemone` reads JSON as text."""


def _route(path: str) -> Callable[[_Pieces, Mapping[str, Any]], None] | None:
    """Return the reader of a route's bodies, or None for other routes."""
    return _ROUTES.get(path) or next((read for end, read in _ROUTES.items() if path.endswith(end)), None)


def _template(body: Mapping[str, Any]) -> Any:
    """Return what the text before the first user message depends on beside the messages."""
    options = {"reasoning_effort": body.get("reasoning_effort"), **(body.get("chat_template_kwargs") or {})}
    return {"template": {name: value for name, value in options.items() if name not in _UNSHARED and value is not None}}


def _message(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes, equal for messages that render alike."""
    given = {name: value for name, value in message.items() if value is not None and name not in _NO_EFFECT}
    content = given.get("content")
    if isinstance(content, list):
        given["content"] = "".join([part["text"] for part in content])
    if not given.get("tool_calls"):
        given.pop("tool_calls", None)
    if "reasoning" in given:
        given.setdefault("reasoning_content", given.pop("reasoning"))
    return _json(given)


def _item(item: Mapping[str, Any]) -> bytes:
    """Return an item of the input of `/v1/decisions` as bytes, equal for items that the model reads alike."""
    given = {name: value for name, value in item.items() if value is not None and name != "id"}
    if given.get("type") == "message":
        del given["type"]
    content = given.get("content")
    if isinstance(content, list):
        values = [_first(part, "text", "data", "refusal") for part in content]
        given["content"] = values[0] if len(values) == 1 else values
    return _json(given)


def _fields(document: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the text of a document to rank by some of its fields; an id alone stays as it is."""
    if "id" not in names and not _has_text(document):
        return document
    found = {name: document[name] for name in names if document.get(name) is not None}
    texts = {n: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for n, v in found.items()}
    return "\n".join(f"{n}: {v}" for n, v in texts.items()) if len(names) > 1 else "".join(texts.values())


def _has_text(document: Any) -> bool:
    """Return whether a document is more than the id of a stored one."""
    return not isinstance(document, Mapping) or {n for n, v in document.items() if v is not None} != {"id"}


def _titled(title: Any, text: str) -> str:
    return f"{title}\n{text}" if title else text


def _first(body: Mapping[str, Any], *names: str) -> Any:
    """Return the first of some fields that is given; null counts as absent."""
    return next((body[name] for name in names if body.get(name) is not None), None)


def _listed(value: Any) -> Sequence[Any]:
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
    elif value is not None and _listed(value):
        if isinstance(value[0], (str, list, tuple)):
            for one in value:
                yield from _leaves(one)
        else:
            yield value


def _size(given: Any) -> int:
    return len(_content(given))


def _content(given: Any) -> bytes:
    return _utf8(given) if isinstance(given, str) else _ids(given)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _ids(ids: Any) -> bytes:
    """Return token ids as bytes: 4 each, about the text of a token."""
    return array("i", _listed(ids)).tobytes()


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
