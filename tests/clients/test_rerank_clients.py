"""Rankings by the clients of others, each with its defaults."""

import pytest

QUERY = "Find a person who lives in Oslo."
DOCUMENTS = ["Ben likes tea.", "Ana lives in Oslo.", "Oslo is a town.", "Tea is hot."]
CLOSE = {"abs": 1e-6}


@pytest.fixture(scope="module")
def scores(post):
    """Score of each document, best first."""
    results = post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})["results"]
    assert DOCUMENTS[results[0]["index"]] == "Ana lives in Oslo."
    return {DOCUMENTS[r["index"]]: r["relevance_score"] for r in results}


@pytest.fixture
def nodes():
    from llama_index.core.schema import NodeWithScore, TextNode

    return [NodeWithScore(node=TextNode(text=text), score=0.5) for text in DOCUMENTS]


def check(found, scores, count):
    """Texts with their scores, best first."""
    expected = [*scores.items()][:count]
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], **CLOSE)


@pytest.mark.parametrize("name", ["Client", "ClientV2"])
def test_cohere(name, server, scores):
    import cohere

    answer = getattr(cohere, name)(api_key="none", base_url=server).rerank(
        model="rerank-v3.5", query=QUERY, documents=DOCUMENTS
    )
    check([(DOCUMENTS[r.index], r.relevance_score) for r in answer.results], scores, 4)
    assert answer.meta.tokens.input_tokens > 0
    assert answer.meta.billed_units.search_units == 1


def test_cohere_ranks_by_fields(server, post):
    import cohere

    people = [{"name": "Ben", "city": "Rome"}, {"name": "Ana", "city": "Oslo"}]
    answer = cohere.Client(api_key="none", base_url=server).rerank(
        model="rerank-v3.5", query=QUERY, documents=people, rank_fields=["name", "city"], return_documents=True
    )
    plain = post("/v1/rerank", {"query": QUERY, "documents": ["name: Ben\ncity: Rome", "name: Ana\ncity: Oslo"]})["results"]
    assert [(r.index, r.relevance_score) for r in answer.results] == [(r["index"], r["relevance_score"]) for r in plain]


def test_langchain_cohere(server, scores):
    from langchain_cohere import CohereRerank
    from langchain_core.documents import Document

    compressor = CohereRerank(cohere_api_key="none", base_url=server, model="rerank-v3.5")
    found = compressor.compress_documents([Document(page_content=text) for text in DOCUMENTS], QUERY)
    check([(d.page_content, d.metadata["relevance_score"]) for d in found], scores, 3)
    people = [{"name": "Ben", "city": "Rome"}, {"name": "Ana", "city": "Oslo"}]
    ranked = compressor.rerank(people, QUERY, rank_fields=["city"])
    assert {r["index"] for r in ranked} == {0, 1}


def test_langchain_jina(server, scores, monkeypatch):
    from langchain_community.document_compressors import jina_rerank
    from langchain_core.documents import Document

    monkeypatch.setattr(jina_rerank, "JINA_API_URL", server + "/v1/rerank")
    compressor = jina_rerank.JinaRerank(jina_api_key="none", model="jina-reranker-v1-base-en")
    found = compressor.compress_documents([Document(page_content=text) for text in DOCUMENTS], QUERY)
    check([(d.page_content, d.metadata["relevance_score"]) for d in found], scores, 3)


def test_llama_index_cohere(server, scores, nodes):
    from llama_index.postprocessor.cohere_rerank import CohereRerank

    found = CohereRerank(api_key="none", base_url=server).postprocess_nodes(nodes, query_str=QUERY)
    check([(n.node.text, n.score) for n in found], scores, 2)


def test_llama_index_siliconflow(server, scores, nodes):
    from llama_index.postprocessor.siliconflow_rerank import SiliconFlowRerank

    ranker = SiliconFlowRerank(api_key="none", base_url=server + "/v1/rerank")
    check([(n.node.text, n.score) for n in ranker.postprocess_nodes(nodes, query_str=QUERY)], scores, 4)


def test_llama_index_tei(server, scores, nodes):
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    found = TextEmbeddingInference(base_url=server).postprocess_nodes(nodes, query_str=QUERY)
    check([(n.node.text, n.score) for n in found], scores, 4)


@pytest.fixture
def documents():
    from haystack import Document

    return [Document(content=text) for text in DOCUMENTS]


def test_haystack_cohere(server, scores, documents):
    from haystack.utils import Secret
    from haystack_integrations.components.rankers.cohere import CohereRanker

    ranker = CohereRanker(api_key=Secret.from_token("none"), api_base_url=server)
    check([(d.content, d.score) for d in ranker.run(query=QUERY, documents=documents)["documents"]], scores, 4)


def test_haystack_jina(server, scores, documents):
    from haystack.utils import Secret
    from haystack_integrations.components.rankers.jina import JinaRanker

    ranker = JinaRanker(api_key=Secret.from_token("none"), base_url=server + "/v1/rerank")
    answer = ranker.run(query=QUERY, documents=documents)
    check([(d.content, d.score) for d in answer["documents"]], scores, 4)


@pytest.mark.parametrize("raw", [False, True])
def test_haystack_tei(raw, server, scores, documents, post):
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    ranker = HuggingFaceTEIRanker(url=server, raw_scores=raw)
    found = ranker.run(query=QUERY, documents=documents)["documents"]
    if raw:
        plain = post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "raw_scores": True})["results"]
        scores = {DOCUMENTS[r["index"]]: r["relevance_score"] for r in plain}
    check([(d.content, d.score) for d in found], scores, 4)


@pytest.mark.parametrize(("provider", "path"), [("cohere", "/v1/rerank"), ("jina_ai", "/v1/rerank"), ("hosted_vllm", "")])
def test_litellm(provider, path, server, scores):
    import litellm

    answer = litellm.rerank(
        model=f"{provider}/rerank-v3.5", query=QUERY, documents=DOCUMENTS, top_n=3, api_key="none", api_base=server + path
    )
    check([(DOCUMENTS[r["index"]], r["relevance_score"]) for r in answer.results], scores, 3)


def test_huggingface_hub_reads_tei_s_routes(server):
    """`InferenceClient` has no call for rankings; it reads the server's description and health."""
    from huggingface_hub import InferenceClient

    client = InferenceClient(model=server, provider="hf-inference")
    assert client.get_endpoint_info()["model_id"] == "chunkattn-demo"
    assert client.health_check()
    assert not hasattr(client, "rerank")
