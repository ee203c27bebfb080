"""Count the citations in answers of the demo model, with and without the pattern of citations.

    python -m benchmarks.citations [--answers 500] [--documents 5] [--within 16] [--max-tokens 48] [--json FILE|-]

The demo model has never seen a marker. Required citations make it write one, which says nothing about the choice of the
document: compare `first right` with `blind`. Without the pattern the prompt ends in the beginning of a marker, which the model
completes freely. Every answer is asked again with the documents in another order. The command fails if an answer names a
document that was not given, if fewer than four of five hold a citation, or if the order changes more than indices.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from dataclasses import asdict, dataclass

from chunkattn import LLM, Document, DocumentPrompt, SamplingParams
from chunkattn.outputs import CompletionOutput
from chunkattn.parsers.markers import CLOSE, OPEN, marker_of
from chunkattn.terminal.files import write_json
from chunkattn.terminal.progress import timed
from training.world import PREFIX, World

_MARKER = re.compile(rf"{re.escape(OPEN)}[^\[\]]*{re.escape(CLOSE)}")
_SHARE = 0.8


@dataclass(frozen=True)
class Result:
    """Counts over all answers.

    Attributes:
        answers: number of answers.
        cited: answers that hold a citation.
        foreign: answers that name a document which was not given.
        free_foreign: answers that do so, or never finish the marker, if the model completes a begun marker without the pattern.
        first_right: answers whose first citation names the document with the answer.
        blind: expected number for a blind choice.
        moved: answers that another order of the documents changed in more than indices.
    """

    answers: int
    cited: int
    foreign: int
    free_foreign: int
    first_right: int
    blind: float
    moved: int


def measure(answers: int, documents: int, within: int, max_tokens: int, seed: int) -> Result:
    """Ask the demo model about held-out worlds, and count; see the options of the command."""
    llm, world, rng = LLM(), World(seed, held_out=True), random.Random(seed)
    readings = [world.reading(documents) for _ in range(answers)]
    lists = [
        [Document(text, f"{rng.getrandbits(32):08x}" if rng.random() < 0.5 else None) for text in reading.documents]
        for reading in readings
    ]
    orders = [rng.sample(range(documents), documents) for _ in readings]
    asked = [reading.questions[0] for reading in readings]
    sampling = [SamplingParams(temperature=n % 2, seed=n, max_tokens=max_tokens) for n in range(answers)]
    how = {"mode": "required", "instruction": "", "within": within}
    prompts = [DocumentPrompt(PREFIX, listed, question.text) for listed, question in zip(lists, asked, strict=True)]
    turned = [
        DocumentPrompt(PREFIX, [listed[n] for n in order], question.text)
        for listed, order, question in zip(lists, orders, asked, strict=True)
    ]
    found = []
    for told, asked_now in (("answers", prompts), ("answers with the documents in another order", turned)):
        with timed(told):
            found.append([output.outputs[0] for output in llm.generate(asked_now, sampling, citations=how)])
    outputs, again = found
    begun = [f"{q.text} {q.answer} {OPEN}" for q in asked]
    shown = [
        DocumentPrompt(PREFIX, [f"{marker_of(d)}\n{d.content}" for d in listed], text)
        for listed, text in zip(lists, begun, strict=True)
    ]
    with timed("answers without the pattern"):
        free = llm.generate(shown, sampling)
    cited = foreign = free_foreign = right = moved = 0
    for n, (listed, output, other) in enumerate(zip(lists, outputs, again, strict=True)):
        markers = {marker_of(document) for document in listed}
        cited += bool(output.citations)
        foreign += not set(_MARKER.findall(llm.tokenizer.decode(output.token_ids))) <= markers
        completed = _MARKER.match(OPEN + free[n].outputs[0].text.lstrip())
        free_foreign += completed is None or completed[0] not in markers
        person = asked[n].text.split("?")[0].split()
        holders = [k for k, text in enumerate(readings[n].documents) if text.split()[0] in person or asked[n].answer in text]
        right += bool(output.citations) and output.citations[0].sources[0].index in holders
        moved += _plain(output, range(documents)) != _plain(other, orders[n])
    return Result(answers, cited, foreign, free_foreign, right, answers / documents, moved)


def _plain(output: CompletionOutput, order: range | list[int]) -> list[object]:
    citations = [(c.start, c.end, [(s.id, order[s.index]) for s in c.sources]) for c in output.citations or ()]
    return [output.text, output.token_ids, citations]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=500, help="number of answers")
    parser.add_argument("--documents", type=int, default=5, help="documents of each prompt")
    parser.add_argument("--within", type=int, default=16, help="characters before the first citation")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=1, help="seed of the worlds")
    parser.add_argument("--json", help="file for the counts, or - for the output")
    args = parser.parse_args()
    result = measure(args.answers, args.documents, args.within, args.max_tokens, args.seed)
    if write_json([asdict(result)], args.json):
        for name, value in asdict(result).items():
            print(f"{name.replace('_', ' '):<13} {value:g}")
    sys.exit(result.foreign > 0 or result.moved > 0 or result.cited < _SHARE * result.answers)


if __name__ == "__main__":
    main()
