"""`keep_states` of stored documents over HTTP, in a model with recurrent layers."""

import asyncio

import httpx

from chunkattn import AsyncLLM
from chunkattn.server.app import create_app
from chunkattn.web.options import ServerConfig
from tests.async_helpers import until

URL = "/v1/cache/documents"
PREFIX = [*range(3, 40)]
DOCUMENTS = [[*range(5, 5 + length)] for length in (70, 20, 64)]
OPTIONS = {
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 4 << 20,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 1,
    "warmup": False,
    "state_cache_memory_bytes": 1 << 19,
}


def flags(entry):
    return [entry[name] for name in ("cached", "pinned", "keep_states", "state_kept")]


def test_stored_documents_keep_their_states(checkpoint, tmp_path):
    folder, store = str(checkpoint("qwen3_5")), str(tmp_path / "documents")

    def server(llm, **options):
        app = create_app(llm, ServerConfig(document_store=store, **options))
        return app.state.server.documents, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")

    async def main():
        async with AsyncLLM(folder, **OPTIONS) as llm:
            registry, http = server(llm)
            await registry.restore()

            async def post(*documents, **fields):
                return await http.post(URL, json={"prefix": PREFIX, "documents": documents, **fields})

            async def stored(*documents, **fields):
                answer = await post(*documents, **fields)
                assert answer.status_code == 200, answer.text
                return answer.json()["data"]

            async def complete():
                chunks = {"prefix": PREFIX, "documents": DOCUMENTS[:1], "question": [9, 8, 7]}
                answer = await http.post("/v1/completions", json={"chunks": chunks, "max_tokens": 1})
                assert answer.status_code == 200, answer.text
                return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

            (plain,) = await stored(DOCUMENTS[0])
            assert flags(plain) == [True, False, False, False]
            assert await complete() == len(PREFIX)
            pinned = await stored(*DOCUMENTS[:2], keep_states=True, pin=True)
            assert [flags(entry) for entry in pinned] == [[True] * 4] * 2
            assert await complete() == len(PREFIX) + len(DOCUMENTS[0])
            most = int(0.5 * llm.limits.state_slots)
            many = [[number, 4] for number in range(5, 5 + most)]
            refused = await post(*many, keep_states=True, pin=True)
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert f"need {most + 1} states with their prefix; pinned documents may hold {most}" in message
            assert "raise state_cache_memory_bytes" in message
            await stored(*many, pin=True)  # without states, pages are the bound
            for entry in (await http.get(URL)).json()["data"][2:]:
                await http.delete(f"{URL}/{entry['id']}")
            await llm.reset_prefix_cache()
            assert flags((await http.get(f"{URL}/{pinned[0]['id']}")).json()) == [False, False, True, False]
            registry.close()
            registry, http = server(llm)
            await registry.restore()

            async def is_pinned():
                return [flags(entry) for entry in (await http.get(URL)).json()["data"]] == [[True] * 4] * 2

            await until(is_pinned)
            registry.close()

    asyncio.run(main())
