"""Reports of what the KV cache holds, and contents that are forgotten without an id."""

import asyncio
import json

import httpx
import numpy as np
import pytest

from chunkattn.engine.messages import CachedTokens, PrecomputeRequest
from chunkattn.remote.messages import CacheQuery, Reply
from chunkattn.schema.piece_keys import keys_of
from chunkattn.server import cache_report
from chunkattn.server.app import create_app
from chunkattn.web.options import ServerConfig

pytest_plugins = ["tests.told_engine"]

DOCUMENTS = [f"{name} keeps {number} bees." for number, name in enumerate(("Ana", "Ben", "Cleo"))]
PREFIX = "Read the notes."
STORED, FORGET, REPORT = "/v1/cache/documents", "/v1/cache/forget", "/v1/cache/report"
SYSTEM = {"role": "system", "content": "Be kind."}


def content_of(request):
    return request.salt_key, request.layout.prefix_len, np.asarray(request.layout.token_ids).tobytes()


@pytest.fixture
def engine(llm):
    """Engine whose cache is a set of salts and prefixes with a document."""

    class Memory(type(llm.client._worker)):
        def __init__(self, client):
            super().__init__(client)
            self.cached, self.asked = set(), 0

        def send(self, messages):
            for message in messages:
                if isinstance(message, CacheQuery):
                    self.told.append("forget" if message.forget else "look up")
                    found = [content_of(request) for request in message.requests]
                    self.asked += len(found)
                    counts = [
                        request.layout.chunk_lens if own in self.cached else (0,)
                        for request, own in zip(message.requests, found)
                    ]
                    if message.forget:
                        self.cached -= set(found)
                    self._reply(Reply(message.query_id, tuple(CachedTokens(0, tuple(own), 0) for own in counts)))
                else:
                    if isinstance(message, PrecomputeRequest):
                        self.cached.add(content_of(message))
                    super().send([message])

    llm.client._worker = Memory(llm.client)
    return llm.client._worker


def client(llm, **options):
    app = create_app(llm, ServerConfig(**options))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def post(http, path, body, **headers):
    answer = await http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_what_is_sent_and_held_or_gone_is_reported_by_its_routing_key(llm, engine):
    stored = {"prefix": PREFIX, "documents": [DOCUMENTS[0], {"id": "b", "title": "Bees", "text": DOCUMENTS[1]}, "x"]}
    chat = {"messages": [SYSTEM, {"role": "user", "content": "Who?"}], "documents": [*DOCUMENTS[:2], DOCUMENTS[0]]}
    salted = {"prefix": PREFIX, "documents": DOCUMENTS[:1], "cache_salt": "tenant"}

    async def main():
        async with client(llm, report_documents=True) as http:
            await post(http, STORED, stored)
            await post(http, STORED, salted)
            # The engine computes no prompt here; what a chat asks for is never held.
            waiting = asyncio.create_task(http.post("/v1/chat/completions", json=chat))
            state = http._transport.app.state.server
            while state.metrics.running < 1 or not state.llm.client._calls:
                await asyncio.sleep(0)
            assert (await http.get(REPORT)).json()["gone"] == []  # the engine may be about to compute them
            waiting.cancel()
            while len(state.reports._ledger) < 6:
                await asyncio.sleep(0)
            report = (await http.get(REPORT)).json()
        held = {**dict(keys_of(STORED, stored).pieces[-3:]), **dict(keys_of(STORED, salted).pieces[-1:])}
        assert dict(report["held"]) == held
        documents = {key for key, _ in keys_of("/v1/chat/completions", chat).pieces}
        assert len(report["gone"]) == 2
        assert set(report["gone"]) < documents
        assert report["capacity"] == llm.limits.kv_tokens
        assert report["ready"] is True

    asyncio.run(main())


def test_reports_ask_in_turns_and_tokenize_once(llm, engine, monkeypatch):
    monkeypatch.setattr(cache_report, "_BATCH", 2)

    async def main():
        async with client(llm, report_documents=True) as http:
            await post(http, STORED, {"prefix": PREFIX, "documents": DOCUMENTS})
            keys = [key for key, _ in keys_of(STORED, {"prefix": PREFIX, "documents": DOCUMENTS}).pieces[-3:]]
            report = (await http.get(REPORT)).json()
            assert (len(report["held"]), engine.asked) == (2, 2)
            first = report["version"]
            report = (await http.get(REPORT, params={"since": first})).json()
            assert set(dict(report["held"])) >= {keys[2]}
            assert len((await http.get(REPORT)).json()["held"]) == 3
            engine.cached.clear()
            monkeypatch.setattr(cache_report.CacheReports, "_parse", lambda *_: pytest.fail("tokenized again"))
            for _ in range(3):
                report = (await http.get(REPORT)).json()
            assert (report["held"], set(report["gone"])) == ([], set(keys))
            monkeypatch.undo()
            await post(http, STORED, {"prefix": PREFIX, "documents": DOCUMENTS[:1]})
            assert set(dict((await http.get(REPORT)).json()["held"])) == {keys[0]}

    asyncio.run(main())


def test_a_new_engine_is_a_new_generation_that_holds_nothing(llm, engine):
    async def main():
        async with client(llm, report_documents=True) as http:
            await post(http, STORED, {"prefix": PREFIX, "documents": DOCUMENTS})
            before = (await http.get(REPORT)).json()
            llm.client.restarts += 1
            after = (await http.get(REPORT)).json()
            assert before["generation"] != after["generation"]
            assert (after["held"], after["gone"]) == ([], [])
            llm.client.state = "restarting"
            assert (await http.get(REPORT)).json()["ready"] is False

    asyncio.run(main())


def test_reports_are_off_by_default_and_need_the_key(llm):
    async def main():
        async with client(llm) as http:
            assert (await http.get(REPORT)).status_code == 404
        async with client(llm, report_documents=True, api_key="secret") as http:
            assert (await http.get(REPORT)).status_code == 401
            keyed = {"Authorization": "Bearer secret"}
            assert (await http.get(REPORT, headers=keyed)).status_code == 200
            await post(http, STORED, {"documents": ["Ana."]}, **keyed)
            report = (await http.get(REPORT, headers=keyed)).json()
            ((key, _),) = keys_of(STORED, {"documents": ["Ana."]}, "Bearer secret").pieces[-1:]
            assert report["gone"] == [key]

    asyncio.run(main())


def test_forgetting_spares_what_a_stored_document_uses(llm, engine):
    async def main():
        async with client(llm) as http:
            await post(http, STORED, {"prefix": PREFIX, "documents": [{"id": "a", "text": DOCUMENTS[0]}]})
            await post(
                http, STORED, {"prefix": PREFIX, "documents": [{"id": "b", "text": DOCUMENTS[1]}], "cache_salt": "tenant"}
            )
            body = {"prefix": PREFIX, "documents": DOCUMENTS[:2]}
            answer = await post(http, FORGET, body)
            assert [(d["index"], d["forgotten"]) for d in answer["data"]] == [(0, False), (1, True)]
            assert len(engine.cached) == 2, "the other salt keeps its own"
            assert engine.told.count("forget") == 1
            await post(http, FORGET, {**body, "cache_salt": "tenant"})
            assert len(engine.cached) == 2
            await http.delete(f"{STORED}/a")
            assert len(engine.cached) == 1
            for wrong in (
                {"documents": []},
                {"documents": [""]},
                {"documents": ["a", "a"]},
                {"documents": [{"id": "a"}]},
                {"pin": True},
            ):
                answer = await http.post(FORGET, json={"prefix": PREFIX, "documents": ["x"], **wrong})
                assert answer.status_code == 400, json.dumps(wrong)

    asyncio.run(main())


def test_the_log_leaves_out_reports_that_are_given(llm, engine, caplog):
    caplog.set_level("INFO", "chunkattn.server.access")

    async def main():
        async with client(llm, report_documents=True) as http:
            assert (await http.get(REPORT)).status_code == 200
        async with client(llm, report_documents=True, api_key="a-key-of-some-length") as http:
            assert (await http.get(REPORT)).status_code == 401

    asyncio.run(main())
    assert [record.request["status"] for record in caplog.records if record.name == "chunkattn.server.access"] == [401]
