"""Measure what grammars cost a decode step: sequences with a JSON schema beside the same number without one.

    python -m benchmarks.grammar_cost [--geometry qwen3-0.6b] [--batch 16] [--steps 40] [--json FILE|-]

Two engines over random weights alternate step by step in one process. The vocabulary has the geometry's size: words of random
letters, numbers, marks and spaces, as byte-level vocabularies have them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from chunkattn import StructuredOutputsParams
from chunkattn.engine.core import EngineCore
from chunkattn.engine.messages import GenerateRequest
from chunkattn.engine.vocabulary import Vocabulary
from chunkattn.rope.positions import make_layout
from chunkattn.sampling_params import SamplingParams
from chunkattn.terminal.files import write_json
from chunkattn.terminal.progress import timed
from chunkattn.tools.bench.geometry import GEOMETRIES, make_core, spec_of
from chunkattn.tools.bench.measure import round_name

_CONTEXT = 100
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["person", "place", "thing"]},
            "count": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}},
        },
        "required": ["name", "kind", "count", "tags"],
        "additionalProperties": False,
    },
    "minItems": 50,
}


def vocabulary(size: int) -> Vocabulary:
    """Return a vocabulary of `size` tokens, all different."""
    rng = np.random.default_rng(0)
    tokens = dict.fromkeys(bytes([value]) for value in range(256))
    marks = [b" ", b'"', b",", b":", b"{", b"}", b"[", b"]", b"\n", b".", b"-"]
    while len(tokens) < size:
        draw = rng.random()
        if draw < 0.05:
            token = b"".join(rng.choice(marks, rng.integers(2, 5)))
        elif draw < 0.07:
            token = b"%d" % rng.integers(0, 1000)
        else:
            token = b" " * int(rng.random() < 0.5) + bytes(rng.integers(97, 123, rng.integers(2, 11)).tolist())
        tokens[token] = None
    return Vocabulary(tuple(tokens), ())


def start(core: EngineCore, batch: int, steps: int, shape: StructuredOutputsParams | None) -> None:
    """Bring `batch` sequences to decoding, with everything compiled."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=1, seed=0, max_tokens=steps + 10, ignore_eos=True, structured_outputs=shape)
    for number in range(batch):
        core.add(GenerateRequest(str(number), make_layout([], [], rng.integers(0, 700, _CONTEXT)), params))
    while any(not sample.output_ids for request in core.requests.values() for sample in request.samples):
        core.step()
    core.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=[*GEOMETRIES], default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of a line")
    args = parser.parse_args()
    pages = args.batch * ((_CONTEXT + args.steps + 32) // 16 + 2)
    cores, shapes = [], (None, StructuredOutputsParams(json=SCHEMA))
    for shape in shapes:
        with timed("prompts " + ("without" if shape is None else "with") + " a grammar"):
            core = make_core(args.geometry, pages, max_num_seqs=max(8, args.batch), num_scheduler_steps=1)
            core.shapes.know(vocabulary(spec_of(args.geometry).vocab_size))
            start(core, args.batch, args.steps, shape)
        cores.append(core)
    taken: list[list[float]] = [[] for _ in cores]
    for number in range(args.steps):
        with timed(f"both engines, {round_name(number + 1, args.steps)}"):
            for core, times in zip(cores, taken, strict=True):
                assert len(core.requests) == args.batch
                began = time.perf_counter()
                core.step()
                times.append(1000 * (time.perf_counter() - began))
    without, with_grammar = taken
    ratios = [b / a for a, b in zip(without, with_grammar, strict=True)]
    row = {"geometry": args.geometry, "batch": args.batch, "step_ms": statistics.median(without)}
    row |= {"with_grammar_ms": statistics.median(with_grammar), "median_ratio": statistics.median(ratios)}
    row |= {"quartiles": statistics.quantiles(ratios)[::2]}
    if write_json([row], args.json):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
