"""Fuzz the cache for a chosen time.

    python -m tests.soak.fuzz_cache --seed 0 --seconds 3600

The command runs episodes of `tests.fuzz`, one per seed from `--seed` on. It prints the first difference from an independent
answer with its seed and its operation, and exits with 1. If one or two prompts reproduce the difference on a new engine, it
prints these prompts. The same seed reproduces the difference. `--plant` puts a known defect into the engine, to check that
the fuzzer finds it. `--backend` fuzzes another attention backend, of which an engine that shares nothing is the only witness.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.fuzz.alone import Alone
from tests.fuzz.fuzzer import EPISODE, Fuzzer
from tests.fuzz.plants import PLANTS, planted
from tests.fuzz.rig import SUBJECTS, Rig, make_model
from tests.fuzz.witness import ColdEngine, Difference


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode")
    parser.add_argument("--ops", type=int, default=None, help=f"total operations; an episode has {EPISODE}")
    parser.add_argument("--seconds", type=float, default=None, help="time limit in seconds; default 120 without --ops")
    parser.add_argument("--plant", choices=PLANTS, default=None, help="defect to find")
    parser.add_argument("--backend", choices=SUBJECTS, default="auto", help="attention backend of the engine")
    args = parser.parse_args()
    subject = SUBJECTS[args.backend]
    seconds = 120.0 if args.seconds is None and args.ops is None else args.seconds
    logging.disable(logging.ERROR)  # hide the injected failures
    with tempfile.TemporaryDirectory() as folder, planted(args.plant):
        model, oracle = make_model(Path(folder), subject), None
        if args.backend in ("auto", "auto packed", "recurrent"):
            from tests.fuzz.oracle import Transformers

            oracle = Transformers(model, subject)
        rig, cold = Rig(model, subject), ColdEngine(model, subject)
        alone = Alone(model, subject) if subject.backend in ("auto", "xla", "reference") else None
        began, done, seed = time.monotonic(), 0, args.seed

        def expired() -> bool:
            return seconds is not None and time.monotonic() - began > seconds

        while not expired() and (args.ops is None or done < args.ops):
            fuzzer = Fuzzer(rig, cold, oracle, seed, alone)
            try:
                fuzzer.run(EPISODE if args.ops is None else min(EPISODE, args.ops - done), expired)
            except Exception as error:
                taken = time.monotonic() - began
                print(f"seed {seed}, operation {fuzzer.counts['operations']}, after {taken:.0f} s: {error}", flush=True)
                if not isinstance(error, Difference):
                    traceback.print_exc()
                return 1
            done += fuzzer.counts["operations"]
            rate = done / (time.monotonic() - began)
            print(f"seed {seed}: no difference; {rate:.0f} operations/s; {dict(sorted(fuzzer.counts.items()))}", flush=True)
            seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
