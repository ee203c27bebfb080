"""Reports of what the KV cache holds, and contents that are forgotten without an id."""

import asyncio
import json

import httpx
import numpy as np
import pytest

from chunkattn.engine.messages import CachedTokens, PrecomputeRequest
from chunkattn.remote.messages import CacheQuery, Reply
from chunkattn.schema.piece_keys import Keys, keys_of
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


def test_what_is_sent_is_reported_by_its_routing_key_the_last_one_last(llm, engine):
    stored = {"prefix": PREFIX, "documents": [DOCUMENTS[0], {"id": "b", "title": "Bees", "text": DOCUMENTS[1]}, "x"]}
    salted = {"prefix": PREFIX, "documents": DOCUMENTS[:1], "cache_salt": "tenant"}
    chat = {"messages": [SYSTEM, {"role": "user", "content": "Who?"}], "documents": [*DOCUMENTS[:2], DOCUMENTS[0]]}
    refused = {"prefix": PREFIX, "documents": ["y"], "priority": 99}

    def logged(body, path=STORED):
        return [list(piece) for piece in reversed(keys_of(path, body).pieces)]

    async def main():
        async with client(llm, report_documents=True) as http:
            await post(http, STORED, stored)
            first = (await http.get(REPORT)).json()
            assert first["held"] == logged(stored)
            assert (first["capacity"], first["ready"], first["responsive"]) == (llm.limits.kv_tokens, True, True)
            assert first["decide_method"] == llm.decide_method == "letters"
            await post(http, STORED, salted)
            assert (await http.post(STORED, json=refused)).status_code == 400
            later = (await http.get(REPORT, params={"since": first["version"]})).json()
            assert later["held"] == logged(salted)
            assert later["version"] > first["version"]
            # A request is logged before its answer, and again: its pieces are now the youngest.
            waiting = asyncio.create_task(http.post("/v1/chat/completions", json=chat))
            while len((await http.get(REPORT)).json()["held"]) < 8:
                await asyncio.sleep(0.01)
            waiting.cancel()
            await post(http, STORED, {"prefix": PREFIX, "documents": ["x"]})
            held = (await http.get(REPORT)).json()["held"]
            assert held[-2:] == logged({"prefix": PREFIX, "documents": ["x"]})
            assert len(held) == len({key for key, _ in held})
            assert (await http.get(REPORT, params={"since": 10**6})).json()["held"] == held
            assert "look up" not in engine.told

    asyncio.run(main())


def test_the_log_is_bounded(llm, monkeypatch):
    monkeypatch.setattr(cache_report, "_MOST_PIECES", 3)
    reports = cache_report.CacheReports(llm)
    for start in range(4):
        with reports.sent(Keys(((start, 1), (start + 1, 1)))):
            pass
    assert [key for key, _ in reports.report()["held"]] == [2, 4, 3]


def test_a_new_engine_is_a_new_generation_that_holds_nothing(llm, engine):
    async def main():
        async with client(llm, report_documents=True) as http:
            await post(http, STORED, {"prefix": PREFIX, "documents": DOCUMENTS})
            before = (await http.get(REPORT)).json()
            llm.client.restarts += 1
            after = (await http.get(REPORT)).json()
            assert before["generation"] != after["generation"]
            assert before["held"]
            assert after["held"] == []
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
            assert report["held"] == [list(piece) for piece in keys_of(STORED, {"documents": ["Ana."]}, "Bearer secret").pieces]

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
