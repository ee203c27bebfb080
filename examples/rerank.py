"""Rank documents by a query, each judged exactly as if it had been sent alone."""

from chunkattn import LLM

llm = LLM()
documents = ["Rumi lives in Limuzo.", "Nila was born in Limuzo.", "Siku is a poet. Siku has a house in Limuzo."]
output = llm.rerank("Find a person who lives in Limuzo.", documents, top_n=2)
for result in output.results:
    print(f"{result.relevance_score:6.1%}  {result.document}")
print(f"{output.algorithm}: {output.usage.computed_tokens} tokens computed")
