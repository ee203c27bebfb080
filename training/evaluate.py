"""Evaluate the demo model on held-out worlds, through the public API: `python -m training.evaluate`.

For 2 to 8 documents the table shows the shares of exact answers, of right yes/no judgements, and of answers that are the
same in every order of the documents (all orders up to 4 documents, 24 sampled orders above).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
from dataclasses import asdict, dataclass

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.terminal.progress import timed
from training.world import PREFIX, World

THRESHOLD = 0.95
SAMPLED_ORDERS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@dataclass(frozen=True)
class Result:
    """Shares of right answers for one number of documents.

    Attributes:
        documents: number of documents.
        exact_answers: share of answers equal to the expected text.
        right_judgements: share of items judged correctly.
        same_in_every_order: share of worlds with one answer in every order.
        orders: number of orders asked.
    """

    documents: int
    exact_answers: float
    right_judgements: float
    same_in_every_order: float
    orders: int


def orders_of(documents: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Return all orders of up to 4 documents, otherwise a sample that includes the given order."""
    if math.factorial(documents) <= SAMPLED_ORDERS:
        return list(itertools.permutations(range(documents)))
    return [tuple(range(documents)), *(tuple(rng.sample(range(documents), documents)) for _ in range(SAMPLED_ORDERS - 1))]


def evaluate(llm: LLM, documents: int, worlds: int, reordered: int, seed: int) -> Result:
    """Ask about held-out worlds.

    Args:
        llm: the model.
        documents: number of documents of a world.
        worlds: number of worlds to ask about.
        reordered: number of those worlds to ask about in many orders.
        seed: seed of the worlds.
    """
    world = World(seed * 100 + documents, held_out=True)
    readings = [world.reading(documents) for _ in range(worlds)]
    prompts = [ChunkedPrompt(PREFIX, r.documents, r.questions[0].text) for r in readings]
    answers = [o.outputs[0].text.strip() for o in llm.generate(prompts, GREEDY)]
    exact = [a == r.questions[0].answer for a, r in zip(answers, readings, strict=True)]

    orders = orders_of(documents, world.rng)
    shuffled = [
        ChunkedPrompt(PREFIX, [r.documents[i] for i in order], r.questions[0].text)
        for r in readings[:reordered]
        for order in orders
    ]
    again = [o.outputs[0].text.strip() for o in llm.generate(shuffled, GREEDY)]
    groups = [again[i : i + len(orders)] for i in range(0, len(again), len(orders))]
    same = [set(g) == {a} for g, a in zip(groups, answers, strict=False)]

    yes, no = (llm.tokenizer(w, add_special_tokens=False).input_ids[0] for w in ("yes", "no"))
    right: list[bool] = []
    for _ in range(worlds // 4):
        judging = world.judging(documents)
        scores = llm.score(judging.query, judging.items, label_token_ids=[yes, no]).scores
        right += [(y > n) == label for (y, n), label in zip(scores, judging.labels, strict=True)]
    return Result(documents, _share(exact), _share(right), _share(same), len(orders))


def _share(values: list[bool]) -> float:
    return sum(values) / len(values)


def main() -> None:
    """Run the command line; exit with status 1 below the threshold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="model folder; default: the bundled demo model")
    parser.add_argument("--worlds", type=int, default=200, help="worlds for each number of documents")
    parser.add_argument("--reordered", type=int, default=20, help="worlds asked about in many orders")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    llm = LLM(args.model)
    results = []
    if not args.json:
        print("documents  exact answers  right yes/no  same in every order")
    for documents in range(2, 9):
        with timed(f"{documents} documents, {args.worlds} worlds"):
            result = evaluate(llm, documents, args.worlds, args.reordered, args.seed)
        results.append(result)
        if not args.json:
            row = f"{result.documents:9}  {result.exact_answers:13.1%}  {result.right_judgements:12.1%}"
            print(f"{row}  {result.same_in_every_order:8.1%} of {result.orders} orders", flush=True)
    if args.json:
        print(json.dumps([asdict(r) for r in results], indent=2))
    good = all(min(r.exact_answers, r.right_judgements) >= THRESHOLD and r.same_in_every_order == 1 for r in results)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
