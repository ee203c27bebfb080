"""Typed questions about one text with the `openai` client against `chunkattn serve`: a predicate, a choice and a score.

pip install "openai>=3.57"
python examples/server/decisions.py [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

text = "Lezudo ordered honey. The parcel went to Kirora, but Lezudo lives in Pegelu and waited for a week."
questions = [
    {"type": "predicate", "name": "late", "instructions": "The parcel came late."},
    {
        "type": "choice",
        "name": "town",
        "instructions": "Where does Lezudo live?",
        "choices": [{"value": "Kirora"}, {"value": "Pegelu", "description": "a town"}, {"value": "elsewhere"}],
    },
    {
        "type": "score",
        "name": "urgency",
        "instructions": "How urgent is it?",
        "levels": [{"label": "can wait"}, {"label": "this week"}, {"label": "today"}],
    },
]
together = client.decisions.create(model=model, input=text, questions=questions)
late, town, urgency = together.answers
print(f"late: {late.probability:.3f}")
print(f"town: {town.choice}, of { ({own.value: round(own.probability, 3) for own in town.probabilities}) }")
print(f"urgency: {urgency.score:.3f}, confidence {urgency.confidence:.3f}")
usage = together.usage
print(f"{usage.input_tokens} tokens for all questions, {usage.input_tokens_details.cached_tokens} of them cached")

alone = client.decisions.create(model=model, input=text, questions=questions[1:2])
print(f"the second question alone has the same bits: {alone.answers[0].probabilities == town.probabilities}")
