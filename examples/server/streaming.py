"""Chats over documents as they are answered: one stream, then several at once.

pip install openai
python examples/server/streaming.py [http://127.0.0.1:8000]

CHUNKATTN_API_KEY is the server's key, if it has one.
"""

import asyncio
import os
import sys

from openai import AsyncOpenAI, OpenAI

DOCUMENTS = [
    "Zenuso works as a baker. Zenuso lives in Kirora.",
    "Lezudo has a house in Pegelu. Lezudo likes honey.",
    "Nila lives in Tunise. Nila likes figs.",
]
QUESTIONS = ["What is the job of Zenuso?", "What does Lezudo like?", "Where does Nila live?"]

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
server = {"base_url": f"{url}/v1", "api_key": os.environ.get("CHUNKATTN_API_KEY", "none")}


def body(model, question):
    """Return a request. Each document is a part of its own, whatever text it holds."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_completion_tokens": 8,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"documents": DOCUMENTS, "return_chunk_usage": True},
    }


def told(usage):
    """Describe how much of the prompt and of each document was in the cache."""
    details = usage.prompt_tokens_details
    documents = ", ".join(f"{chunk['cached_tokens']}/{chunk['tokens']}" for chunk in details.chunks)
    return f"({details.cached_tokens} of {usage.prompt_tokens} tokens cached; of the documents {documents})"


def one(question):
    """Print an answer token by token."""
    with OpenAI(**server) as client:
        model = client.models.list().data[0].id
        print(question, end="", flush=True)
        for event in client.chat.completions.create(**body(model, question)):
            if event.choices:
                print(event.choices[0].delta.content or "", end="", flush=True)
            elif event.usage:  # of the last event, which has no choices
                print(f"  {told(event.usage)}")


async def several(questions):
    """Print answers in the order in which they end."""
    async with AsyncOpenAI(**server) as client:
        model = (await client.models.list()).data[0].id

        async def answer(question):
            text = ""
            async for event in await client.chat.completions.create(**body(model, question)):
                if event.choices:
                    text += event.choices[0].delta.content or ""
                elif event.usage:
                    print(f"{question}{text}  {told(event.usage)}")

        await asyncio.gather(*map(answer, questions))


one("Where does Lezudo live?")
asyncio.run(several(QUESTIONS))
