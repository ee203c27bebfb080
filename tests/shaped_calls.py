"""Calls for texts of given shapes, of engines with a tokenizer: the values of each, and a witness of each shape."""

import json
import re

import jsonschema

from chunkattn import ChunkedPrompt, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "size": {"type": "integer", "minimum": -20, "maximum": 700},
        "kinds": {"type": "array", "items": {"enum": ["a", "b\u00e9", None, True]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "size", "kinds"],
    "additionalProperties": False,
}
CHOICES = ["in Oslo", "in Rome", "nobody knows \u00e9", "in Os"]
_WORDS = re.compile(r"([A-F]{2,4}-[0-9]{1,2};){2,4}")


def _is_json(text):
    jsonschema.validate(json.loads(text), SCHEMA, jsonschema.Draft202012Validator)
    return True


_JSON = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
_REGEX = StructuredOutputsParams(regex=_WORDS.pattern)
_CHOICE = StructuredOutputsParams(choice=CHOICES)
ASKED = {
    "json": (_JSON, _is_json, {"temperature": 1.2, "seed": 4, "max_tokens": 80}),
    "regex": (_REGEX, _WORDS.fullmatch, {"temperature": 0, "presence_penalty": 0.8, "min_tokens": 12, "max_tokens": 40}),
    "choice": (_CHOICE, CHOICES.__contains__, {"seed": 2, "top_k": 3, "logit_bias": {5: -100.0}, "max_tokens": 20}),
}
"""By name: shape, witness of whole texts, and other parameters."""


def params(name):
    """Return the parameters of one of `ASKED`."""
    shape, _, options = ASKED[name]
    return SamplingParams(structured_outputs=shape, logprobs=1, **options)


def ask(llm, pieces, turn, salt):
    """Answer pieces of prefix, documents, question and the name of a shape.

    Args:
        llm: the engine.
        pieces: what is asked.
        turn: whether documents come in the reverse order.
        salt: salt of the cache.
    """
    prompts = [ChunkedPrompt(prefix, chunks[::-1] if turn else chunks, question) for prefix, chunks, question, _ in pieces]
    outputs = llm.generate(prompts, [params(name) for *_, name in pieces], cache_salt=salt, use_tqdm=False)
    found = []
    for (*_, name), output in zip(pieces, outputs, strict=True):
        (sample,) = output.outputs
        if sample.finish_reason == "stop":
            assert ASKED[name][1](sample.text), (name, sample.text)
        found.append((sample.text, sample.token_ids, sample.logprobs, sample.finish_reason))
    return found
