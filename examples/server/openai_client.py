"""The `openai` client against `chunkattn serve`: documents as chunks, streamed.

pip install openai
python examples/server/openai_client.py [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

documents = ["Zenuso works as a baker. Zenuso lives in Kirora.", "Lezudo has a house in Pegelu. Lezudo likes honey."]
for question in ("Where does Lezudo live? Answer:", "What is the job of Zenuso? Answer:"):
    chunks = {"prefix": "Read the documents and answer the question.", "documents": documents, "question": question}
    stream = client.completions.create(
        model=model,
        prompt="",
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"chunks": chunks, "return_chunk_usage": True},
    )
    print(question, end="", flush=True)
    for event in stream:
        if event.choices:
            print(event.choices[0].text, end="", flush=True)
        elif event.usage:
            print(f"  ({event.usage.prompt_tokens_details.cached_tokens} of {event.usage.prompt_tokens} tokens cached)")
    documents.reverse()  # the answer and the cache do not mind
