"""Count the steps of answers with a JSON schema whose mask allows a single token, which needs no step of the model.

    python -m benchmarks.forced_tokens [MODEL] [--answers 8] [--json FILE|-]

MODEL is a folder, a GGUF file or a hub id; by default the file of SmolLM2 that `make run-real` downloads. Each answer is
sampled at temperature 1, with whitespace between the tokens of JSON and without.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partialmethod
from unittest.mock import patch

import numpy as np

from chunkattn import LLM, SamplingParams, StructuredOutputsParams
from chunkattn.engine.grammars import Grammars, TextMatcher
from chunkattn.terminal.files import write_json
from chunkattn.terminal.progress import timed

MODEL = ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "Write a JSON answer to customer {} about a late parcel."
MASKS = Grammars.masks
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 80},
        "sources": {"type": "array", "items": {"enum": ["doc-alpha", "doc-beta", "doc-gamma"]}, "minItems": 1, "maxItems": 3},
        "confidence": {"type": "number"},
        "category": {"enum": ["billing", "shipping", "returns"]},
    },
    "required": ["answer", "sources", "confidence", "category"],
    "additionalProperties": False,
}


def counted(grammars: Grammars, allowed: list[int], matchers: Sequence[TextMatcher]) -> tuple[np.ndarray, np.ndarray]:
    """Return `grammars.masks(matchers)`, and add to `allowed` how many tokens each mask allows, the end included."""
    words, may_end = MASKS(grammars, matchers)
    allowed += (np.unpackbits(words.view(np.uint8), axis=1).sum(axis=1, dtype=np.int64) + may_end).tolist()
    return words, may_end


def main() -> None:
    """Run and print a line for each form of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of lines")
    args = parser.parse_args()
    llm = LLM(args.model, max_model_len=1024)
    chats = [[{"role": "user", "content": QUESTION.format(number)}] for number in range(args.answers)]
    rows = []
    for compact in (False, True):
        shape = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=compact)
        params = SamplingParams(temperature=1, seed=0, max_tokens=200, structured_outputs=shape)
        with timed(f"answers {'without' if compact else 'with'} whitespace"):
            allowed = list[int]()
            with patch.object(Grammars, "masks", partialmethod(counted, allowed)):
                llm.chat(chats, params)
        counts = np.asarray(allowed)
        rows.append({"whitespace": not compact, "masks": len(counts), "of_one_token": float((counts == 1).mean())})
    if write_json(rows, args.json):
        for row in rows:
            print(json.dumps(row))


if __name__ == "__main__":
    main()
