"""Whom a server lets in, and what clients of different keys see and may hold."""

import asyncio
import base64
import signal
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from chunkattn.async_llm import AsyncLLM
from chunkattn.documents.records import Scope
from chunkattn.errors import ConfigError
from chunkattn.fair_shares import FairShares
from chunkattn.server.app import create_app
from chunkattn.server.state import ServerState
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import Caller, Keys, Shares
from chunkattn.web.options import ServerConfig
from tests.documents.rig import add, registry_of
from tests.server_helpers import SMALL, ServerProcess, wait_until

pytest_plugins = ["tests.told_engine"]


def client_of(config=None, llm=None, **options):
    return TestClient(create_app(llm or AsyncLLM(), config), base_url="http://localhost", **options)


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz"])
def test_probes_need_no_key(path):
    client = client_of(ServerConfig(api_key="secret"))
    assert client.get(path).status_code in (200, 503)
    assert client.get("/metrics").status_code == 401
    assert (
        client.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()["paths"][path]["get"]["security"] == []
    )


def test_a_local_model_is_shown_by_its_folder_s_name(tmp_path):
    folder = tmp_path / "secret-place" / "my-model"
    folder.mkdir(parents=True)
    client = client_of(llm=AsyncLLM(str(folder) + "/"))
    answer = client.get("/v1/models")
    assert "secret-place" not in answer.text
    assert answer.json()["data"][0]["id"] == "my-model"
    assert client.get("/v1/models/my-model").status_code == 200
    state = ServerState(AsyncLLM(str(folder)), ServerConfig())
    state.check_model("my-model")
    assert ServerState(AsyncLLM("org/name"), ServerConfig()).model_name == "org/name"


def test_two_headers_of_one_kind_are_refused():
    for config in (ServerConfig(), ServerConfig(api_key="k"), ServerConfig(host="0.0.0.0")):
        client = client_of(config)
        for name, values in (("Host", ("localhost", "evil.example")), ("Authorization", ("Bearer k", "Bearer l"))):
            answer = client.get("/livez", headers=[("Host", "localhost")][name == "Host" :] + [(name, v) for v in values])
            assert answer.status_code == 400
            assert f"several {name}" in answer.json()["error"]["message"]


def test_answers_are_what_they_say_they_are():
    client = client_of()
    for path in ("/livez", "/nothing", "/openapi.json", "/static/app.js", "/metrics"):
        assert client.get(path).headers.get_list("x-content-type-options") == ["nosniff"], path
    policy = client.get("/").headers["content-security-policy"]
    assert "base-uri 'none'" in policy
    assert "form-action 'none'" in policy


# Named keys

FILE = "# who may come in\n\nana:key-of-ana\nben:key-of-ben\n"


@pytest.fixture
def key_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(FILE)
    return file


def test_named_keys_are_read_again(key_file):
    keys = Keys("main", str(key_file))

    def name_of(authorization):
        holder = keys.holder(authorization)
        return holder and holder.name

    assert [name_of(f"Bearer {key}") for key in ("main", "key-of-ana", "key-of-ben")] == ["default", "ana", "ben"]
    assert name_of("Basic " + base64.b64encode(b"me:key-of-ben").decode()) == "ben"
    for wrong in ("", "Bearer", "Bearer x", "key-of-ana", "Basic !", "Bearer ana:key-of-ana"):
        assert name_of(wrong) is None
    for bad in ("ana", "ana:", ":x", "a b:x", "ana:x\nana:y", "ana:x\nben:x", "ana:main", "default:x"):
        key_file.write_text(bad)
        with pytest.raises(ConfigError):
            keys.reload()
        assert name_of("Bearer key-of-ana") == "ana"
        with pytest.raises(ConfigError) as error:
            Keys("main", str(key_file))
        assert ":x" not in str(error.value)
    key_file.write_text("cleo:new")
    assert {holder.name for holder in keys.reload()} == {"ana", "ben"}
    assert (name_of("Bearer key-of-ana"), name_of("Bearer new")) == (None, "cleo")
    with pytest.raises(ConfigError):
        Keys(None, str(key_file) + ".not")


def test_names_share_no_salt():
    shares = Shares(4, FairShares(1))
    ana, ben, anybody = Caller("ana", shares, tag="1"), Caller("ben", shares, tag="2"), Caller(None, shares)
    again = Caller("ana", shares, tag="3")  # another key of the name
    given = (None, "ana", "ben", "ana:ben", "ana:1", "1")
    salts = [caller.salt(salt) for caller in (ana, ben, again) for salt in given]
    assert len(set(salts)) == len(salts)
    assert [anybody.salt(given) for given in (None, "x")] == [None, "x"]


def test_a_name_holds_its_share_of_the_queue_and_no_more():
    shares = Shares(4, FairShares(1))
    first, second, other = Caller("ana", shares), Caller("ana", shares), Caller("ben", shares)
    first.take(3)
    with pytest.raises(ApiError) as refused:
        second.take(2)
    assert refused.value.status == 429
    other.take(4)
    first.leave()
    second.take(4)
    one, two = Caller(None, shares), Caller(None, shares)
    one.take(4)
    two.take(4)
    with pytest.raises(ApiError):
        one.take(1)


def test_one_request_cannot_fill_the_queue(llm):
    assert ServerConfig().max_prompts_per_request < llm.config.max_queued_requests
    state = ServerState(llm, ServerConfig(max_prompts_per_request=10**6))
    assert state.most_prompts == llm.config.max_queued_requests // 2


def test_quotas_of_documents(llm, tmp_path):
    """Per name and for all; what is said of one name tells nothing about another."""
    (tmp_path / "keys").write_text("ana:1\nben:2\ncleo:3\n")
    share = 3.5 / llm.limits.num_pages
    options = {"max_pinned_share_per_key": share, "max_pinned_share": 2 * share, "api_key_file": str(tmp_path / "keys")}
    documents = registry_of(llm, max_cached_documents_per_key=2, **options)
    ana, ben, cleo = (documents._keys.salt_of(name) for name in ("ana", "ben", "cleo"))

    async def store(owner, name, pin=True):
        return await add(documents, name, f"The text {name}.", owner, pin=pin)

    async def refused(*args, **fields):
        with pytest.raises(ApiError) as error:
            await store(*args, **fields)
        assert error.value.status == 400
        return error.value

    async def main():
        a = await store(ana, "a")
        await store(ana, "b")
        assert (await refused(ana, "c", pin=False)).code == "too_many_documents"
        assert documents.page(Scope(ben, ben), None, 9) == ([], False)
        await store(ben, "a")
        documents.config = replace(documents.config, max_cached_documents_per_key=9)
        error = await refused(ana, "c")
        assert error.code == "too_many_pins"
        await store(ana, "b")  # pinned already
        c = await store(ana, "c", pin=False)
        with pytest.raises(ApiError):
            await documents.change(c, pinned=True, ttl_s=None)
        await documents.change(a, pinned=False, ttl_s=None)
        await documents.change(c, pinned=True, ttl_s=None)
        await store(ben, "b")
        assert "max_pinned_share 0" in (await refused(cleo, "a")).message

    asyncio.run(main())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(FILE)
    made = ServerProcess(*SMALL, f"--api-key-file={file}")
    made.file = file
    yield made
    assert made.close() == 0


def test_names_are_strangers_to_each_other(server):
    url, document = "/v1/cache/documents", {"prefix": "Read.", "documents": [{"id": "a", "text": "Ana lives in Oslo."}]}
    chunks = {"chunks": {"prefix": "Read.", "documents": ["Ana lives in Oslo."], "question": "Where?"}, "max_tokens": 1}
    with server.client() as http:
        ana, ben = ({"headers": {"Authorization": f"Bearer key-of-{name}"}} for name in ("ana", "ben"))
        assert http.post(url, json=document).status_code == 401
        assert http.post(url, json=document, **ana).status_code == 200
        assert http.get(f"{url}/a", **ben).status_code == 404
        assert "a" not in [d["id"] for d in http.get(url, **ben).json()["data"]]
        assert "a" in [d["id"] for d in http.get(url, **ana).json()["data"]]
        named = {"chunks": {**chunks["chunks"], "documents": [{"id": "a"}]}, "max_tokens": 1}
        asked = {"messages": [{"role": "user", "content": "Where?"}], "documents": [{"id": "a"}], "max_tokens": 1}
        ranked = {"query": "Where?", "documents": [{"id": "a"}]}
        for path, body in (("completions", named), ("chat/completions", asked), ("rerank", ranked)):
            assert http.post(f"/v1/{path}", json=body, **ana).status_code == 200
            for given in ({}, {"cache_salt": "ana"}):
                refused = http.post(f"/v1/{path}", json={**body, **given}, **ben)
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "document_not_found")
        assert http.post("/inspect", json={"chunks": named["chunks"]}, **ana).status_code == 200
        assert http.post("/inspect", json={"chunks": named["chunks"]}, **ben).status_code == 404
        for given in ({}, {"cache_salt": "ana"}):  # the name of another is no salt of theirs
            usage = http.post("/v1/completions", json={**chunks, **given}, **ben).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        usage = http.post("/v1/completions", json=chunks, **ana).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_hangup_reads_the_keys_again(server):
    with server.client() as http:

        def status(key):
            return http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

        server.file.write_text("no key")
        server.signal(signal.SIGHUP)
        server.wait_for("the API keys stay as they are", 60)
        assert status("key-of-ana") == 200
        server.file.write_text(FILE + "cleo:key-of-cleo\n")
        server.signal(signal.SIGHUP)
        wait_until(lambda: status("key-of-cleo") == 200)


def test_a_new_key_under_an_old_name_starts_empty(server):
    url, document = "/v1/cache/documents", {"prefix": "See.", "documents": [{"id": "d", "text": "Rumi."}], "pin": True}
    asked = {"chunks": {"prefix": "See.", "documents": ["Rumi."], "question": "Who?"}, "max_tokens": 1}

    def status_of(path, key, **options):
        return http.request("GET", path, headers={"Authorization": f"Bearer {key}"}, **options)

    def cached(key):
        answer = http.post("/v1/completions", json=asked, headers={"Authorization": f"Bearer {key}"})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with server.client() as http:
        for name in ("ana", "ben"):
            headers = {"Authorization": f"Bearer key-of-{name}"}
            assert http.post(url, json=document, headers=headers).status_code == 200
            assert cached(f"key-of-{name}") > 0
        server.file.write_text(FILE.replace("key-of-ana", "fresh"))
        server.signal(signal.SIGHUP)
        wait_until(lambda: status_of(url, "fresh").status_code == 200)
        assert status_of(url, "key-of-ana").status_code == 401
        assert status_of(url, "fresh").json()["data"] == []
        assert cached("fresh") == 0
        assert [d["pinned"] for d in status_of(url, "key-of-ben").json()["data"] if d["id"] == "d"] == [True]
        server.file.write_text(FILE)  # the first key again finds neither document nor K/V of the document
        server.signal(signal.SIGHUP)
        wait_until(lambda: status_of(url, "key-of-ana").status_code == 200)
        assert status_of(url, "key-of-ana").json()["data"] == []
        page = 16
        assert cached("key-of-ana") <= page
