"""Answer questions out of several documents: their order cannot matter, and none is computed twice."""

from chunkattn import LLM, DocumentPrompt, SamplingParams

llm = LLM()  # the bundled demo model; pass a Hugging Face folder or hub id for a real one
documents = [
    "Mukaba has a friend called Bimupu. Mukaba was born in Sinoba.",
    "Lezudo likes honey. Lezudo has a house in Pegelu.",
    "Taraku is a sailor. Taraku comes from Godema.",
]
prefix = "Read the documents and answer the question."
params = SamplingParams(temperature=0, max_tokens=8)

# Ahead of the first question, if you like: otherwise the first request that brings a document computes it.
report = llm.precompute(prefix, documents)
print(f"{len(report.documents)} documents take {report.total_bytes / 1024:.0f} KiB of {report.pool_bytes >> 20} MiB")

# Documents are never split: one that contains the separator cannot forge a boundary.
for order in (documents, documents[::-1]):
    prompt = DocumentPrompt(prefix, order, "Where was Mukaba born? Answer:")
    out = llm.generate(prompt, params)[0]
    print(f"{out.outputs[0].text.strip()}  ({out.num_cached_tokens} of {len(out.prompt_token_ids)} prompt tokens were cached)")

# As a chat, with the documents beside the messages.
messages = [{"role": "user", "content": "What is the job of Taraku?"}]
print(llm.chat(messages, params, documents=documents)[0].outputs[0].text.strip())
