"""What clients can do to a server on purpose, and what it costs the others."""

import asyncio
import gc
import threading
import tracemalloc

import pytest

from chunkattn.server.app import create_app
from chunkattn.server.documents import Documents
from chunkattn.server.options import ServerConfig

pytest_plugins = ["tests.told_engine"]


def add(documents, name="a", text="A text.", **options):
    how = {"cache_salt": None, "pin": False, "ttl_s": None, "priority": 0, "options": {}, "timeout": 60, **options}
    return documents.add("Read.", [text], [name], **how)


def test_a_late_forget_spares_a_document_added_again(llm, monkeypatch):
    """The forgetting is held where its request has been decided on and not yet sent."""
    entered, go, slow = threading.Event(), threading.Event(), False
    precompute = llm.frontend.precompute

    def held(*args, **options):
        if slow and not entered.is_set():
            entered.set()
            assert go.wait(60)
        return precompute(*args, **options)

    monkeypatch.setattr(llm.frontend, "precompute", held)

    async def main():
        nonlocal slow
        documents = Documents(llm, ServerConfig())
        ((document, _),) = await add(documents)
        slow = True
        deleting = asyncio.create_task(documents.delete(document))
        await asyncio.to_thread(entered.wait, 60)
        slow = False
        ((again, _),) = await add(documents)
        go.set()
        await deleting
        assert documents.get("a", None) is again
        told = llm.client._worker.told
        assert told[-1] == "compute", told
        await documents.delete(again)
        assert told[-1] == "forget"

    asyncio.run(main())


BAD_BODIES = [
    ("/v1/completions", b'{"prompt": "%s", "tools": 1}'),
    ("/v1/completions", b'{"prompt": "%s"'),
    ("/v1/completions", b'{"prompt": "%s", "temperature": "hot"}'),
    ("/v1/completions", b'{"prompt": "%s", "prompt_logprobs": 1, "stream": true}'),
    ("/v1/completions", b'{"prompt": ["%s", 1]}'),
    ("/v1/completions", b'{"prompt": "%s", "model": "other"}'),
    ("/v1/score", b'{"text_1": "%s"}'),
    ("/v1/completions", b'{"prompt": "\xff%s"}'),
    ("/v1/cache/documents", b'{"documents": ["%s", ""], "prefix": 1}'),
    ("/v1/completions", b'{"prompt": "%s%s%s"}'),
]


@pytest.mark.parametrize(("path", "body"), BAD_BODIES, ids=lambda v: ascii(v)[:50])
def test_a_refused_body_is_freed_at_once(llm, path, body):
    """Not by the garbage collector, before which others like it pile up."""
    size = 1 << 20
    app = create_app(llm, ServerConfig(max_body_bytes=2 * size))
    content = body.replace(b"%s", b"x" * size)

    async def ask():
        async def receive():
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message):
            statuses.append(message.get("status"))

        statuses = []
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "scheme": "http"}
        await app(scope, receive, send)
        assert 400 <= statuses[0] < 500

    async def main():
        await ask()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(4):
                await ask()
            assert tracemalloc.get_traced_memory()[0] - before < size
        finally:
            tracemalloc.stop()
            gc.enable()

    asyncio.run(main())
