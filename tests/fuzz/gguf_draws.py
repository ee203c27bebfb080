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
from tests.fuzz.routers import Routing
from tests.gguf_converter import architecture_of, head_dim_of
from tests.gguf_files import ALL, ARCHITECTURES, CONFIGS, HALVES, HYBRIDS, write

TOLERANCE = 1e-3
_PACKED = 3e-3
"""Tolerance of hybrids whose rows are rounded to int16: their gates amplify small differences."""
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
OTHER_WINDOWS = ("mistral-window", "gemma3", "gemma3-linear", "phi3-window")
"""Files that a window of all positions changes."""
WINDOWED = (*OTHER_WINDOWS, "phi3", "phi3-longrope", "mistral3", "ministral3", *(name for name in CONFIGS if "llama" in name))
"""Files that may have any window."""
SCALED = ("llama-linear", "llama-yarn", "ministral3", "gemma3-linear", "phi3-longrope")


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
    name = [*ALL][rng.integers(len(ALL))]
    config = ALL[name]
    # Super-blocks of 256 need rows of as many numbers, which some heads and MLPs here do not have.
    widths = config.num_attention_heads * head_dim_of(config), getattr(config, "shared_intermediate_size", 256)
    kinds = KINDS if any(width % 256 for width in widths) else (*KINDS, *HALVES)
    kind = kinds[rng.integers(len(kinds))]
    wrong = rng.random() < 0.25
    table = dict(WRONG if wrong else HARMLESS)
    own = (
        ("window", WINDOWED),
        ("window of all positions", OTHER_WINDOWS),
        ("scaling none", SCALED),
        ("no experts", ("qwen3moe", "qwen35moe", "qwen3next")),
    )
    for left_out, names in own:
        table = {case: change for case, change in table.items() if case != left_out or name not in names}
    if name == "phi3-longrope":
        table.pop("longrope", None)
    chosen = [[*table][rng.integers(len(table))] for _ in range(1 if wrong else rng.integers(0, 3))]
    damage = ("none", "nan", "absent", "foreign")[rng.choice(4, p=[0.85, 0.05, 0.05, 0.05])]
    norm = f"blk.{rng.integers(config.num_hidden_layers)}.{'post_attention_norm' if name == 'olmo2' else 'attn_norm'}.weight"
    tensors = {
        "none": {},
        "nan": {norm: np.full(config.hidden_size, np.nan, np.float32)},
        "absent": {norm: None},
        "foreign": {"blk.0.made_up.weight": np.ones(4, np.float32)},
    }[damage]

    def change(writer):
        for case in dict.fromkeys(chosen):
            table[case](writer, ARCHITECTURES.get(name) or architecture_of(config))

    packing = Packing() if rng.random() < 0.5 else None
    # Other families store rows in another order than the model that was written, which is the witness.
    mutable = name in CONFIGS and kind not in (Kind.F32, Kind.F16, Kind.BF16)
    mutants = _mutants(rng, config) if mutable and rng.random() < 0.4 else []
    story = f"seed {seed}; {name}; {kind.name}; {chosen}; {damage}; {packing}; {len(mutants)} mutants"
    write(path, name, kind, change=change, tensors=tensors)
    largest = _mutate(path, mutants)
    try:
        # transformers takes the short factors for so few tokens.
        short = {"max_model_len": 64} if name == "phi3-longrope" else {}
        files = open_files(EngineConfig(model=str(path), dtype="float32", skip_tokenizer_init=True, **short))
        decoder = files.load(packing=packing)
    except ModelError as error:
        if not wrong and damage == "none" and np.isfinite(largest):
            raise SilentDifferenceError(f"{story}: a right file is refused: {error}") from error
        return str(error)
    if wrong or damage != "none" or not np.isfinite(largest):
        raise SilentDifferenceError(f"{story}: a wrong file loads")
    # transformers cannot read some of the harmless metadata, so it reads the file without them.
    plain = write(path.with_name("plain.gguf"), name, kind)
    if mutants:
        _mutate(plain.path, mutants)
        if not plain.is_read_by_transformers:
            plain.reread()
    oracle = plain.oracle()
    with Routing().recorded() as routing:
        found = dense_logits(decoder)
    with routing.forced(oracle.model):
        expected = oracle.logits(IDS)
    if largest > _LARGE:  # softmax makes great differences of small ones
        return "equal"
    if not routing.largest <= TOLERANCE:
        raise SilentDifferenceError(f"{story}: a router's logit of an expert lies {routing.largest:.2g} below one left out")
    bound = _PACKED if packing is not None and name in HYBRIDS else TOLERANCE
    if not np.abs(found - expected).max() <= bound:
        raise SilentDifferenceError(f"{story}: logits differ by {np.abs(found - expected).max():.2g}")
    return "equal"
