"""Fuzz the reading of checkpoint folders, quantised folders and GGUF files.

    python -m tests.soak.fuzz_files --folders 300 --quantised 100 --gguf 100 --seed 1000

The command makes random folders of every family, random quantised folders of every format and random GGUF files, right and
wrong. Each gives transformers' logits (float32, within 1e-4; GGUF within 1e-3; of quantised folders, those of their twin in
float32) and the token ids of its tokenizer's own file, or one `ModelError`. The command prints the choices of every file
that gives anything else, and exits with 1. The same seed makes the same files.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import transformers

from chunkattn.terminal.progress import say
from tests.fuzz import gguf_draws, quantised_draws
from tests.fuzz.draws import Draw
from tests.fuzz.folders import FAMILIES, judge, judge_tokenizer
from tests.quantised_folders import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", type=int, default=40, help="folders of each family")
    parser.add_argument("--quantised", type=int, default=40, help="quantised folders of each format")
    parser.add_argument("--gguf", type=int, default=30, help="GGUF files")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first file")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    counts: Counter[str] = Counter()
    began = time.monotonic()

    def count(verdict: str) -> None:
        counts["equal" if verdict == "equal" else "refused"] += 1

    for family in FAMILIES:
        say(f"{family}: {args.folders} folders from seed {args.seed}, after {time.monotonic() - began:.1f} s")
        for seed in range(args.seed, args.seed + args.folders):
            place = Path(tempfile.mkdtemp())
            drawn = Draw(place / "model", family, seed)
            try:
                count(judge(drawn.folder, drawn.make_stale))
                judge_tokenizer(drawn.folder, drawn.encode)
            except Exception as error:  # an error of another class is a finding, too
                counts["wrong"] += 1
                print(f"{type(error).__name__}: {error}: {'; '.join(drawn.story)}", flush=True)
            shutil.rmtree(place)
    for kind in KINDS:
        say(f"{kind}: {args.quantised} folders from seed {args.seed}, after {time.monotonic() - began:.1f} s")
        for seed in range(args.seed, args.seed + args.quantised):
            place = Path(tempfile.mkdtemp())
            quantised = quantised_draws.Draw(place, kind, seed)
            try:
                count(quantised_draws.judge(quantised))
            except Exception as error:
                counts["wrong"] += 1
                print(f"{type(error).__name__}: {error}: {'; '.join(quantised.story)}", flush=True)
            shutil.rmtree(place)
    say(f"{args.gguf} GGUF files from seed {args.seed}, after {time.monotonic() - began:.1f} s")
    for seed in range(args.seed, args.seed + args.gguf):
        place = Path(tempfile.mkdtemp())
        try:
            count(gguf_draws.judge(place / "model.gguf", seed))
        except Exception as error:
            counts["wrong"] += 1
            print(f"GGUF seed {seed}: {type(error).__name__}: {error}", flush=True)
        shutil.rmtree(place)
    taken = time.monotonic() - began
    print(f"{counts['equal']} equal, {counts['refused']} refused, {counts['wrong']} wrong; {taken:.0f} s")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
