"""Retrieve, rerank, answer: the loop of a RAG application, over HTTP.

python examples/server/rag.py [http://127.0.0.1:8000]

Needs the standard library alone; the classes have the shape of LangChain's, whose names stand beside them.
CHUNKATTN_API_KEY is the server's key, if it has one.
"""

import json
import os
import re
import sys
from dataclasses import dataclass, field
from urllib.error import HTTPError
from urllib.request import Request, urlopen


@dataclass
class Document:
    """A text, and what is known about it (`Document`)."""

    page_content: str
    metadata: dict = field(default_factory=dict)


@dataclass
class Server:
    """A chunkattn server."""

    url: str
    key: str

    def post(self, path, body):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        try:
            with urlopen(Request(self.url + path, json.dumps(body).encode(), headers), timeout=60) as answer:
                return json.load(answer)
        except HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read().decode()}") from None


@dataclass
class WordRetriever:
    """Finds documents by the words they share with a query; stands in for an index of vectors (`BaseRetriever`)."""

    documents: list
    k: int

    def invoke(self, query, config=None):
        wanted = words(query)
        return sorted(self.documents, key=lambda d: len(wanted & words(d.page_content)), reverse=True)[: self.k]


@dataclass
class Reranker:
    """Keeps the documents that a model finds the most relevant (`BaseDocumentCompressor`)."""

    server: Server
    top_n: int

    def compress_documents(self, documents, query, callbacks=None):
        texts = [d.page_content for d in documents]
        ranked = self.server.post("/v1/rerank", {"query": query, "documents": texts, "top_n": self.top_n})["results"]
        found = [(documents[result["index"]], result["relevance_score"]) for result in ranked]
        return [Document(page_content=d.page_content, metadata={**d.metadata, "relevance_score": score}) for d, score in found]


@dataclass
class RerankingRetriever:
    """Both, one after the other (`ContextualCompressionRetriever`)."""

    base_retriever: WordRetriever
    base_compressor: Reranker

    def invoke(self, query, config=None):
        found = self.base_retriever.invoke(query, config)
        return self.base_compressor.compress_documents(found, query) if found else []


@dataclass
class Reader:
    """Answers a question from documents (`Runnable`). Documents of earlier questions are not computed again, in any order."""

    server: Server

    def invoke(self, input, config=None):
        # As parts: whatever a document holds, it stays one document.
        chunks = {
            "prefix": "Read the documents and answer the question.",
            "documents": [d.page_content for d in input["context"]],
            "question": f"{input['question']} Answer:",
        }
        asked = {"chunks": chunks, "max_tokens": 8, "temperature": 0, "return_chunk_usage": True}
        done = self.server.post("/v1/completions", asked)
        cached = [chunk["cached_tokens"] for chunk in done["usage"]["prompt_tokens_details"]["chunks"]]
        return {**input, "answer": done["choices"][0]["text"].strip(), "cached_tokens": cached}


def words(text):
    return set(re.findall(r"\w+", text.lower()))


TEXTS = {
    "zenuso.txt": "Zenuso works as a baker. Zenuso lives in Kirora.",
    "lezudo.txt": "Lezudo has a house in Pegelu. Lezudo likes honey.",
    "nila.txt": "Nila lives in Tunise. Nila likes figs.",
    "rumi.txt": "Rumi is a poet. Rumi lives in Kirora.",
}
DOCUMENTS = [Document(page_content=text, metadata={"source": name}) for name, text in TEXTS.items()]

server = Server(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000", os.environ.get("CHUNKATTN_API_KEY", "none"))
retriever = RerankingRetriever(WordRetriever(DOCUMENTS, k=3), Reranker(server, top_n=2))
reader = Reader(server)

# The demo model judges by "Find a person who ..." and answers questions, so it is asked in two ways; others need one.
for query, question in (
    ("Find a person who likes honey.", "Where does Lezudo live?"),
    ("Find a person who likes figs.", "Where does Nila live?"),
):
    done = reader.invoke({"context": retriever.invoke(query), "question": question})
    sources = ", ".join(f"{d.metadata['source']} {d.metadata['relevance_score']:.3f}" for d in done["context"])
    print(f"{query} [{sources}] {question} {done['answer']} (cached tokens: {done['cached_tokens']})")
