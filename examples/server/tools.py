"""A tool that the model calls, and its result in the next turn, with the `openai` client against `chunkattn serve`.

pip install openai
python examples/server/tools.py [http://127.0.0.1:8000]
"""

import json
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

search = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string", "maxLength": 8}}, "required": ["query"]},
    },
}
documents = ["Lezudo has a house in Pegelu. Lezudo likes honey."]
messages = [{"role": "user", "content": "Where does Lezudo live?"}]
options = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
message = client.chat.completions.create(model=model, messages=messages, tools=[search], **options).choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    query = json.loads(call.function.arguments)["query"]
    print(f"{call.function.name}({query!r}): {documents[0]}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": documents[0]})
options = {"tool_choice": "none", "max_tokens": 8, "temperature": 0}
print(client.chat.completions.create(model=model, messages=messages, tools=[search], **options).choices[0].message.content)
