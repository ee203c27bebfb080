"""Score many items against one query, each exactly as if it had been sent alone."""

from chunkattn import LLM

llm = LLM()
yes, no = (llm.tokenizer(word, add_special_tokens=False).input_ids[0] for word in ("yes", "no"))
items = ["Rumi lives in Limuzo.", "Nila was born in Limuzo.", "Siku is a poet. Siku has a house in Limuzo."]
result = llm.score("Find a person who lives in Limuzo.", items, label_token_ids=[yes, no], apply_softmax=True)
for score, item in sorted(zip([row[0] for row in result.scores], items, strict=True), reverse=True):
    print(f"{score:6.1%}  {item}")
print(f"{result.algorithm}: {result.usage.computed_tokens} tokens computed")
