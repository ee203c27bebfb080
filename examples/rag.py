"""Answer a question out of several documents; the order of the documents cannot matter."""

from chunkattn import LLM, ChunkedPrompt, SamplingParams

llm = LLM()  # the bundled demo model; pass a Hugging Face folder or hub id for a real one
documents = [
    "Mitasu has a friend called Bodeka. Mitasu was born in Sorami.",
    "Lonavi likes honey. Lonavi has a house in Petubo.",
    "Tekiru is a sailor. Tekiru comes from Gomita.",
]
params = SamplingParams(temperature=0, max_tokens=8)

# As parts: a document that contains the separator cannot forge a boundary.
for order in (documents, documents[::-1]):
    prompt = ChunkedPrompt("Read the documents and answer the question.", order, "Where was Mitasu born? Answer:")
    out = llm.generate(prompt, params)[0]
    print(f"{out.outputs[0].text.strip()}  (documents of {out.chunk_lens} tokens)")

# As a chat, with the documents beside the messages.
messages = [{"role": "user", "content": "What is the job of Tekiru?"}]
print(llm.chat(messages, params, documents=documents)[0].outputs[0].text.strip())
