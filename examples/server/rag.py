"""Rerank, then answer from the best documents, over HTTP: the loop of a RAG application.

pip install httpx
python examples/server/rag.py [http://127.0.0.1:8000]
"""

import sys

import httpx

DOCUMENTS = [
    "Zenuso works as a baker. Zenuso lives in Kirora.",
    "Lezudo has a house in Pegelu. Lezudo likes honey.",
    "Nila lives in Tunise. Nila likes figs.",
    "Rumi is a poet. Rumi lives in Kirora.",
]

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
with httpx.Client(base_url=url, timeout=60) as server:

    def ask(path: str, body: dict) -> dict:
        answer = server.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    for wanted, question in (
        ("Find a person who likes honey.", "Where does Lezudo live? Answer:"),
        ("Find a person who likes figs.", "Where does Nila live? Answer:"),
    ):
        ranked = ask("/v1/rerank", {"query": wanted, "documents": DOCUMENTS, "top_n": 2})["results"]
        best = [DOCUMENTS[result["index"]] for result in ranked]
        # As parts: whatever a document holds, it stays one document.
        chunks = {"prefix": "Read the documents and answer the question.", "documents": best, "question": question}
        done = ask("/v1/completions", {"chunks": chunks, "max_tokens": 8, "temperature": 0})
        scores = ", ".join(f"{result['relevance_score']:.3f}" for result in ranked)
        print(f"{wanted} [{scores}] {question}{done['choices'][0]['text']}")
