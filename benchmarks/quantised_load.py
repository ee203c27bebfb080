"""Time the load of quantised folders beside a bfloat16 folder of the same shape.

    python -m benchmarks.quantised_load [--layers 8] [--rounds 3]

The command writes random folders of Qwen3-0.6B's layers with a vocabulary of 1,024 ids, loads each in turn from the page cache,
dequantised and packed, and prints medians and the ratio to bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from copy import deepcopy
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from safetensors.torch import save_file

from chunkattn.config import EngineConfig
from chunkattn.models.families import spec_from_config
from chunkattn.models.loader import open_files
from chunkattn.models.packing import Packing
from chunkattn.terminal.progress import say
from chunkattn.tools.bench.geometry import GEOMETRIES
from tests.quantised_folders import KINDS, awq, compressed, fp8, gptq, int8, is_linear, nvfp4, packed

_GROUP = {"strategy": "group", "group_size": 128}
FORMATS = {
    "fp8, 128 x 128": (partial(fp8, block=(128, 128), name="weight_scale_inv", dtype=torch.bfloat16), KINDS["fp8"].config),
    "W8A8 by channel": (partial(int8, dtype=torch.bfloat16), KINDS["ct-int8"].config),
    "W4A16, groups of 128": (
        partial(packed, group=128),
        compressed("pack-quantized", num_bits=4, type="int", **_GROUP),
    ),
    "NVFP4": (nvfp4, KINDS["ct-nvfp4"].config),
    "AWQ, groups of 128": (partial(awq, group=128), KINDS["awq"].config | {"group_size": 128}),
    "GPTQ, groups of 128": (partial(gptq, group=128), KINDS["gptq"].config | {"group_size": 128}),
}


def write_folders(place: Path, layers: int) -> dict[str, Path]:
    """Write a folder of each format. Matrices of one shape hold the same numbers."""
    config, rng = deepcopy(GEOMETRIES["qwen3-0.6b"]), np.random.default_rng(0)
    config.num_hidden_layers, config.vocab_size, config.layer_types = layers, 1024, ["full_attention"] * layers
    shapes = spec_from_config(config).parameters()
    keys = json.loads(config.to_json_string(use_diff=False)) | {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
    plain = {name: torch.randn(shape).to(torch.bfloat16) * 0.02 for name, shape in shapes.items()}
    folders = {}
    for form, (make, settings) in {"bfloat16": (None, None), **FORMATS}.items():
        say(f"writing {form}")
        made, tensors = {}, {}
        for name, value in plain.items():
            if make is None or not is_linear(name, value):
                tensors[name] = value
                continue
            if value.shape not in made:
                made[value.shape] = make(rng, *value.shape).tensors
            tensors |= {name.removesuffix("weight") + leaf: stored.clone() for leaf, stored in made[value.shape].items()}
        folders[form] = place / form
        folders[form].mkdir()
        (folders[form] / "config.json").write_text(json.dumps(keys | ({"quantization_config": settings} if settings else {})))
        save_file(tensors, folders[form] / "model.safetensors", metadata={"format": "pt"})
    return folders


def load_time(folder: Path, packing: Packing | None) -> float:
    """Return the seconds that a load takes."""
    files = open_files(EngineConfig(model=str(folder), dtype="bfloat16", skip_tokenizer_init=True))
    began = time.perf_counter()
    decoder = files.load(packing=packing)
    jax.block_until_ready([jnp.asarray(leaf) for leaf in jax.tree.leaves(decoder.weights)])
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folders = write_folders(Path(place), args.layers)
        ways = {"dequantised": None, "packed": Packing()}
        times: dict[tuple[str, str], list[float]] = {(form, way): [] for form in folders for way in ways}
        for number in range(args.rounds + 1):
            for form, way in times:
                taken = load_time(folders[form], ways[way])
                times[form, way] += [taken] * (number > 0)  # the first round fills the page cache
        base = statistics.median(times["bfloat16", "dequantised"])
        for (form, way), taken in times.items():
            print(f"{form:24} {way:12} {statistics.median(taken):6.2f} s {statistics.median(taken) / base:6.2f}")


if __name__ == "__main__":
    main()
