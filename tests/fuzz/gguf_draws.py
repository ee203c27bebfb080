"""Random GGUF files: families, quantisations, RoPE scalings, heads and metadata, right and wrong."""

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from gguf.quants import dequantize

from chunkattn.config import EngineConfig
from chunkattn.errors import ModelError
from chunkattn.models.loader import open_files
from chunkattn.models.packing import Packing
from tests.fuzz.folders import IDS, SilentDifferenceError, dense_logits
from tests.gguf_files import CONFIGS, HALVES, Written

TOLERANCE = 1e-3
_LARGE = 1.0
"""Magnitude of weights above which only the loading is judged."""
KINDS = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)


def _set(key, value):
    """A change of the metadata, which overwrites what the file would have."""

    def change(writer, name):
        full = key.format(name)
        writer.kv_data[0].pop(full, None)
        kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        writer.add_array(full, value) if isinstance(value, list) else kinds[type(value)](full, value)

    return change


HARMLESS = {
    "scaling none": _set("{}.rope.scaling.type", "none"),
    "no experts": _set("{}.expert_count", 0),
    "causal": _set("{}.attention.causal", True),
    "window of all positions": _set("{}.attention.sliding_window", 256),
    "heads by layer": _set("{}.attention.head_count_kv", [2, 2]),
    "a key of nobody": _set("{}.made_up", 7),
    "a name": _set("general.name", "a model"),
}
"""Changes that leave the logits as they are."""
WRONG = {
    "experts": _set("{}.expert_count", 4),
    "bidirectional": _set("{}.attention.causal", False),
    "window": _set("{}.attention.sliding_window", 32),
    "soft caps": _set("{}.attn_logit_softcapping", 50.0),
    "heads differ": _set("{}.attention.head_count_kv", [2, 4]),
    "heads as text": _set("{}.attention.head_count_kv", ["2", "2"]),
    "heads as fractions": _set("{}.attention.head_count_kv", [2.5, 2.5]),
    "no heads": _set("{}.attention.head_count", 0),
    "epsilon": _set("{}.attention.layer_norm_rms_epsilon", float("nan")),
    "theta": _set("{}.rope.freq_base", float("inf")),
    "layers": _set("{}.block_count", 3),
    "width": _set("{}.embedding_length", 260),
    "longrope": _set("{}.rope.scaling.type", "longrope"),
    "adapter": _set("general.type", "adapter"),
}
"""Changes that must be refused."""


def _mutants(rng, config):
    """Random bytes of random matrices: name, offset as a share of the tensor, and what the byte is xored with."""
    modules = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    if config.model_type == "qwen3_moe":
        modules = (*modules[:4], *(f"{module}_exps" for module in modules[4:]))
    names = ["token_embd.weight", *(f"blk.{i}.{m}.weight" for i in range(config.num_hidden_layers) for m in modules)]
    return [(names[rng.integers(len(names))], rng.random(), int(rng.integers(1, 256))) for _ in range(rng.integers(1, 30))]


def _mutate(path, mutants):
    """Change bytes of a file. Return the largest magnitude in the changed tensors, which may be infinite or NaN."""
    if not mutants:
        return 0.0
    content, tensors = bytearray(path.read_bytes()), GGUFReader(path).tensors
    stored, largest = {tensor.name: tensor for tensor in tensors}, 0.0
    for name, share, change in mutants:
        content[int(stored[name].data_offset + share * stored[name].n_bytes)] ^= change
    path.write_bytes(content)
    for tensor in GGUFReader(path).tensors:
        if tensor.name in {name for name, _, _ in mutants}:
            with np.errstate(all="ignore"):
                largest = np.maximum(largest, np.abs(dequantize(tensor.data, tensor.tensor_type)).max())
    return float(largest)


def judge(path, seed):
    """Write a random file, and return "equal" or the text of our error about it.

    Raises:
        SilentDifferenceError: a right file is refused or has other logits than transformers', or a wrong file loads.
    """
    rng = np.random.default_rng(seed)
    name = [*CONFIGS][rng.integers(len(CONFIGS))]
    config = CONFIGS[name]
    # Super-blocks of 256 need rows of as many numbers, which the heads of Qwen3 here do not have.
    kinds = KINDS if config.model_type == "qwen3" else (*KINDS, *HALVES)
    kind = kinds[rng.integers(len(kinds))]
    wrong = rng.random() < 0.25
    table = WRONG if wrong else HARMLESS
    chosen = [[*table][rng.integers(len(table))] for _ in range(1 if wrong else rng.integers(0, 3))]
    if name in ("llama-linear", "llama-yarn"):
        chosen = [case for case in chosen if case != "scaling none"]
    if name == "qwen3moe":
        chosen = [case for case in chosen if case != "no experts"]
    damage = ("none", "nan", "absent", "foreign")[rng.choice(4, p=[0.85, 0.05, 0.05, 0.05])]
    norm = f"blk.{rng.integers(config.num_hidden_layers)}.attn_norm.weight"
    tensors = {
        "none": {},
        "nan": {norm: np.full(config.hidden_size, np.nan, np.float32)},
        "absent": {norm: None},
        "foreign": {"blk.0.made_up.weight": np.ones(4, np.float32)},
    }[damage]

    def change(writer):
        for case in dict.fromkeys(chosen):
            table[case](writer, config.model_type.replace("_moe", "moe"))

    packing = Packing() if rng.random() < 0.5 else None
    mutants = _mutants(rng, config) if kind not in (Kind.F32, Kind.F16, Kind.BF16) and rng.random() < 0.4 else []
    story = f"seed {seed}; {name}; {kind.name}; {chosen}; {damage}; {packing}; {len(mutants)} mutants"
    Written(path, config, kind, change=change, tensors=tensors)
    largest = _mutate(path, mutants)
    try:
        files = open_files(EngineConfig(model=str(path), dtype="float32", skip_tokenizer_init=True))
        decoder = files.load(packing=packing)
    except ModelError as error:
        if not wrong and damage == "none" and np.isfinite(largest):
            raise SilentDifferenceError(f"{story}: a right file is refused: {error}") from error
        return str(error)
    if wrong or damage != "none" or not np.isfinite(largest):
        raise SilentDifferenceError(f"{story}: a wrong file loads")
    # transformers cannot read some of the harmless metadata, so it reads the file without them.
    plain = Written(path.with_name("plain.gguf"), config, kind)
    _mutate(plain.path, mutants)
    expected, found = plain.oracle().logits(IDS), dense_logits(decoder)
    if largest > _LARGE:  # softmax makes great differences of small ones
        return "equal"
    if not np.abs(found - expected).max() <= TOLERANCE:
        raise SilentDifferenceError(f"{story}: logits differ by {np.abs(found - expected).max():.2g}")
    return "equal"
