"""Measure decisions: questions behind a long state, and behind cached documents, against scoring the same tokens.

    python -m benchmarks.decide [--geometry qwen3-0.6b] [--questions 64] [--rounds 3]

The checkpoint has random weights and the demo model's tokenizer. In every round the forms take turns, each behind a new state
of the same length: `decide`; `score` of the same token ids by `prefill_extend`, with one list of labels; and `score` by
`serial` on some of the questions, whose time is scaled to all. Then `decide` and one-token chats ask about documents that the
cache holds. Times are the process's CPU seconds and wall seconds, medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chunkattn import LLM, Choice, SamplingParams
from chunkattn.calls.decide_questions import AskedQuestion, ask
from chunkattn.terminal.progress import timed
from chunkattn.tools.bench.geometry import save_model
from chunkattn.tools.load.workloads import WORDS

SERIAL = 4
"""Questions that `serial` is timed on."""
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)


class Decisions:
    """Engine, texts of known lengths, and the forms of asking about them."""

    def __init__(self, folder: Path, questions: int, question_tokens: int, kv_tokens: int) -> None:
        bytes_per_token = 28 * 2 * 8 * 128 * 2  # of Qwen3-0.6B, the largest geometry
        self.llm = LLM(str(folder), dtype="bfloat16", kv_cache_memory_bytes=kv_tokens * bytes_per_token, max_model_len=32768)
        self._rng = random.Random(0)
        self.labels = self.llm.frontend.answer_labels(None, None)
        self.template = self.labels.template
        self.question_tokens = question_tokens
        self.questions = [self._question() for _ in range(questions)]
        self.items = [self._item(question) for question in self.questions]

    def text(self, tokens: int) -> str:
        """Return random words of about `tokens` tokens, and not more."""
        words = self._rng.choices(WORDS.split(), k=tokens)
        encode = self.llm.tokenizer
        while len(encode(" ".join(words)).input_ids) > tokens:
            words = words[: -max(1, len(words) // 50)]
        return " ".join(words)

    def _question(self) -> Choice:
        """Return a question with four options whose item has about `question_tokens` tokens."""
        for words in range(1, self.question_tokens):
            text = " ".join(self._rng.choices(WORDS.split(), k=words))
            made = Choice(text, self._rng.sample(WORDS.split(), 4))
            if len(self._item(made)) >= self.question_tokens:
                return made
        raise ValueError(f"a question has more than {self.question_tokens} tokens")

    def _item(self, question: Choice) -> list[int]:
        return self.template.item(self._asked(question).items[0], "question")

    def _asked(self, question: Choice) -> AskedQuestion:
        return ask(question, "letters", self.labels, "question")

    def measure(self, run: Callable[[], Any]) -> tuple[float, float, Any]:
        """Return CPU seconds, wall seconds and the result of a call."""
        cpu, began = time.process_time(), time.perf_counter()
        result = run()
        return time.process_time() - cpu, time.perf_counter() - began, result

    def state_round(self, tokens: int) -> dict[str, tuple[float, float]]:
        """Return CPU and wall seconds of every form behind new states, and check the tokens that are computed."""
        times = {}
        for name, items in (("decide", None), ("prefill_extend", self.items), ("serial", self.items[:SERIAL])):
            state = self.text(tokens)
            if items is None:
                cpu, wall, output = self.measure(lambda state=state: self.llm.decide(state, self.questions, use_tqdm=False))
                own = sum(map(len, self.items))
                self.shares = (output.usage.computed_tokens - len(self.template.prefix(state))) / own
            else:
                ids = [token for _, own in self.labels.letters[:4] for token in own]
                query = self.template.prefix(state)
                cpu, wall, _ = self.measure(
                    lambda query=query, items=items, ids=ids, name=name: self.llm.score(
                        query, items, label_token_ids=ids, algorithm=name, use_tqdm=False
                    )
                )
                cpu, wall = (value * len(self.items) / len(items) for value in (cpu, wall))
            times[name] = cpu, wall
        return times

    def documents_round(self, documents: list[str], tokens: int) -> dict[str, tuple[float, float]]:
        """Return CPU and wall seconds of `decide` and of one-token chats behind cached documents and a new state."""
        times = {}
        state = self.text(tokens)
        cpu, wall, output = self.measure(
            lambda: self.llm.decide(state, self.questions, documents=documents, method="letters", use_tqdm=False)
        )
        own = sum(map(len, self.items))
        self.shares = (output.usage.computed_tokens - len(self.template.behind(state))) / own
        times["decide"] = cpu, wall
        state = self.text(tokens)
        texts = ["".join(self._asked(own).items[0]) for own in self.questions]
        chats = [[{"role": "user", "content": f"{state}\n\nQuestion: {text}"}] for text in texts]
        times["chat"] = self.measure(lambda: self.llm.chat(chats, PARAMS, documents=documents, use_tqdm=False))[:2]
        return times


def medians(rounds: list[dict[str, tuple[float, float]]], base: str) -> dict[str, dict[str, float]]:
    """Return the median CPU and wall seconds of each form, and the median ratio of its CPU seconds to those of `base`."""
    rows: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for times in rounds:
        for name, (cpu, wall) in times.items():
            rows[name]["cpu_s"].append(cpu)
            rows[name]["wall_s"].append(wall)
            rows[name]["ratio"].append(cpu / times[base][0])
    return {name: {key: statistics.median(values) for key, values in values_of.items()} for name, values_of in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-0.6b")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--question-tokens", type=int, default=40)
    parser.add_argument("--state-tokens", type=int, default=2000)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--document-tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    kv_tokens = 4 * args.state_tokens + 2 * args.documents * args.document_tokens + 64 * args.questions
    with tempfile.TemporaryDirectory() as folder:
        with timed("checkpoint"):
            save_model(args.geometry, Path(folder))
        with timed("engine"):
            bench = Decisions(Path(folder), args.questions, args.question_tokens, kv_tokens)
    report: dict[str, Any] = {}
    rounds = []
    for number in range(args.rounds + 1):
        with timed(f"state, round {number} of {args.rounds}"):
            rounds.append(bench.state_round(args.state_tokens))
    report["state"] = {"own_tokens_ratio": bench.shares, **medians(rounds[1:], "prefill_extend")}
    documents = [bench.text(args.document_tokens) for _ in range(args.documents)]
    bench.llm.precompute([], documents, use_tqdm=False)
    rounds = []
    for number in range(args.rounds + 1):
        with timed(f"documents, round {number} of {args.rounds}"):
            rounds.append(bench.documents_round(documents, args.question_tokens))
    report["documents"] = {"own_tokens_ratio": bench.shares, **medians(rounds[1:], "chat")}
    if args.json:
        print(json.dumps(report, indent=2))
        return
    names = {
        "state": f"{args.questions} questions of {args.question_tokens} tokens behind a state of {args.state_tokens}",
        "documents": f"{args.questions} questions behind {args.documents} x {args.document_tokens} cached tokens and a state",
    }
    for part, rows in report.items():
        ratio = rows.pop("own_tokens_ratio")
        print(f"\n{names[part]}; computed beside the state: {ratio:.3f} x the questions' own tokens")
        for name, row in rows.items():
            print(f"  {name:15} CPU {row['cpu_s']:7.2f} s  wall {row['wall_s']:7.2f} s  CPU ratio {row['ratio']:.2f}")


if __name__ == "__main__":
    main()
