"""Write a checkpoint of a known shape with random weights, for measurements of several servers on one model.

    python -m benchmarks.random_model FOLDER [--geometry qwen3-0.6b]

The checkpoint is bfloat16 and has the demo model's tokenizer, with names for the ids that it lacks: vLLM fails at an id without
a text. The cost is that of the real model; the answers mean nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from chunkattn.tools.bench.geometry import GEOMETRIES, save_model


def name_all_ids(file: Path, size: int) -> None:
    """Extend the vocabulary of a BPE tokenizer to `size` ids. No merge leads to the new ids, so texts keep their ids.

    Args:
        file: `tokenizer.json`.
        size: number of ids.
    """
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary |= {f"<id {number}>": number for number in range(size) if number not in taken}
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write to")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-0.6b")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    save_model(args.geometry, args.folder)
    name_all_ids(args.folder / "tokenizer.json", GEOMETRIES[args.geometry].vocab_size)
