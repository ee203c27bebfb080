"""Shapes of texts over a vocabulary of single characters, with witnesses of their own, for models without a tokenizer."""

import json
import re
from itertools import count
from unittest.mock import patch

import jsonschema
import numpy as np

from chunkattn import ChunkedPrompt, SamplingParams, StructuredOutputsParams
from chunkattn.engine.grammars import Grammars
from chunkattn.engine.vocabulary import Vocabulary
from tests.checkpoints import VOCAB

END = 0
"""Token that ends a text."""
CHARACTERS = Vocabulary(tuple(bytes([code]) for code in range(VOCAB)), (END,))
"""Token `i` is the character `chr(i)`."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "minimum": -20, "maximum": 700},
        "kinds": {"type": "array", "items": {"enum": ["a", "bc", None, True]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "kinds"],
    "additionalProperties": False,
}
CHOICES = ["in Oslo", "in Rome", "nobody knows", "in Os"]


def _is_json(text):
    try:
        jsonschema.validate(json.loads(text), SCHEMA, jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


SHAPES = {
    "json": (StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), _is_json),
    "regex": (
        StructuredOutputsParams(regex=r"([A-F]{2,5}-[0-9]{1,3};){2,6}"),
        re.compile(r"([A-F]{2,5}-[0-9]{1,3};){2,6}").fullmatch,
    ),
    "choice": (StructuredOutputsParams(choice=CHOICES), CHOICES.__contains__),
    "grammar": (
        StructuredOutputsParams(grammar='start: "<" list ">"\nlist: WORD | "(" list ("," list)* ")"\nWORD: /[a-z]{1,4}/\n'),
        lambda text: text[:1] == "<" and text[-1:] == ">" and _is_list(text[1:-1]),
    ),
}
"""Shape and witness of whole texts, by name."""


def _is_list(text):
    """Return whether a text is a word, or lists in parentheses: innermost lists become words, until one word is left."""
    while (shorter := re.sub(r"\((?:[a-z]{1,4})(?:,[a-z]{1,4})*\)", "x", text)) != text:
        text = shorter
    return bool(re.fullmatch("[a-z]{1,4}", text))


def teach(llm, monkeypatch):
    """Let an engine without a tokenizer know `CHARACTERS`."""
    monkeypatch.setattr(llm.core.shapes, "grammars", Grammars(CHARACTERS))
    monkeypatch.setitem(llm.frontend.__dict__, "vocabulary", CHARACTERS)
    return llm


def shaped(name, **options):
    """Return parameters of a text of one of `SHAPES`."""
    return SamplingParams(
        structured_outputs=SHAPES[name][0], **{"max_tokens": 90, "stop_token_ids": [END], "logprobs": 2, "seed": 3, **options}
    )


def text_of(sample):
    """Return the text of a sample without the token that ends it."""
    ids = sample.token_ids[:-1] if sample.stop_reason == END else sample.token_ids
    return bytes(ids).decode()


def check(name, samples):
    """Check that each text that ended has its shape. Return the number of such texts."""
    ended = [text_of(sample) for sample in samples if sample.finish_reason == "stop"]
    assert all(SHAPES[name][1](text) for text in ended), (name, ended)
    return len(ended)


def prompts(*, chunked=True):
    """Return a plain prompt, one with a document, and more with shared and repeated documents if the model can read them."""
    rng = np.random.default_rng(6)
    prefix, one, two, three, question, plain = (rng.integers(2, 120, n).tolist() for n in (20, 37, 18, 5, 9, 60))
    pieces = [{"prompt_token_ids": plain}, ChunkedPrompt(prefix, [one], question)]
    if chunked:
        pieces += [ChunkedPrompt(prefix, [one, two], question), ChunkedPrompt(prefix, [three, one, one], question[:4])]
    return pieces


def asks(*, chunked=True):
    """Return prompts, parameters and names of shapes: every shape, greedy and drawn, and forks into two samples."""
    asked, given = [], prompts(chunked=chunked)
    for number, name in enumerate(SHAPES):
        greedy, drawn = shaped(name, temperature=0), shaped(name, seed=number, n=1 + number % 2, top_p=0.95)
        asked += [(given[number % len(given)], greedy, name), (given[(number + 1) % len(given)], drawn, name)]
    return asked


def values(output):
    """Return every value of an answer."""
    return [(sample.token_ids, sample.logprobs, sample.finish_reason) for sample in output.outputs]


def alone(llm, asked, **options):
    """Answer asks one after the other, each on an empty cache. Return their values."""
    found = []
    for prompt, params, name in asked:
        llm.reset_prefix_cache()
        (output,) = llm.generate(prompt, params, use_tqdm=False, **options)
        check(name, output.outputs)
        found.append(values(output))
    return found


def in_company(llm, asked, **options):
    """Answer asks at once, beside texts without a shape, and preempt some of them. Return their values."""
    scheduler, steps = llm.core.scheduler, count()
    plan, before = scheduler.plan, scheduler.preemptions
    free = SamplingParams(max_tokens=70, seed=9, ignore_eos=True, logprobs=0)

    def disturbed(*args):
        if next(steps) % 7 == 6 and scheduler.running and scheduler.preemptions < before + 8:
            scheduler.preempt(scheduler.running[-1])
        return plan(*args)

    llm.reset_prefix_cache()
    given, params = [prompt for prompt, *_ in asked], [own for _, own, _ in asked]
    with patch.object(scheduler, "plan", disturbed):
        outputs = llm.generate([given[0], *given, given[-1]], [free, *params, free], use_tqdm=False, **options)
    assert scheduler.preemptions > before
    return [values(output) for output in outputs[1:-1]]
