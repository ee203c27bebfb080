"""Answer a question out of several documents; the order of the documents cannot matter."""

from chunkattn import LLM, ChunkedPrompt, SamplingParams

llm = LLM()  # the bundled demo model; pass a Hugging Face folder or hub id for a real one
documents = [
    "Mukaba has a friend called Bimupu. Mukaba was born in Sinoba.",
    "Lezudo likes honey. Lezudo has a house in Pegelu.",
    "Taraku is a sailor. Taraku comes from Godema.",
]
params = SamplingParams(temperature=0, max_tokens=8)

# As parts: a document that contains the separator cannot forge a boundary.
for order in (documents, documents[::-1]):
    prompt = ChunkedPrompt("Read the documents and answer the question.", order, "Where was Mukaba born? Answer:")
    out = llm.generate(prompt, params)[0]
    print(f"{out.outputs[0].text.strip()}  (documents of {out.chunk_lens} tokens)")

# As a chat, with the documents beside the messages.
messages = [{"role": "user", "content": "What is the job of Taraku?"}]
print(llm.chat(messages, params, documents=documents)[0].outputs[0].text.strip())
