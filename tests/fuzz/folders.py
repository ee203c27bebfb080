"""Judge of checkpoint folders: a folder gives transformers' logits or one clear error, and nothing else."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from chunkattn.config import EngineConfig
from chunkattn.errors import ModelError
from chunkattn.models.loader import load_tokenizer, open_files
from tests.checkpoints import auto_class
from tests.delta_rule import sequential
from tests.fuzz.routers import Routing
from tests.tokenizer_texts import TEXTS

NESTED = ("gemma3", "mistral3")
"""Multimodal families: their keys are those of `text_config`, and `write` gives tensors the names of their language part."""
FAMILIES = (
    *("llama", "mistral", "ministral3", "qwen2", "qwen3", "gemma", "gemma3_text", "granite", "granitemoehybrid", "olmo2"),
    *("phi3", "qwen2_moe", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "seed_oss", "smollm3", *NESTED),
)
CLASSIFIED = tuple(family for family in FAMILIES if family not in ("granite", "granitemoehybrid", "qwen3_5_moe_text", *NESTED))
"""Families with classifiers."""
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_DELTA_NET = {
    "head_dim": 16,
    "initializer_range": 0.2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
OWN = {
    "gemma3_text": {"query_pre_attn_scalar": 12, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "granitemoehybrid": {
        "num_local_experts": 0,
        "shared_intermediate_size": 40,
        "layer_types": ["full_attention"] * 2,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
    },
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen3_moe": _EXPERTS,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": _EXPERTS | _DELTA_NET | {"shared_expert_intermediate_size": 40},
    "qwen3_next": _EXPERTS | _DELTA_NET | {"shared_expert_intermediate_size": 40},
    "ministral3": {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
        }
    },
}
"""Keys of families without which they have no small models, or ones of other layers."""
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DECODER = "model.embed_tokens.", "model.layers.", "model.norm."
VISUAL = "model.vision_tower.", "model.multi_modal_projector."
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
VISION = {
    "gemma3": {"model_type": "siglip_vision_model", "patch_size": 2, **_VISION},
    "mistral3": {"model_type": "pixtral", "patch_size": 2, "head_dim": 8, **_VISION},
}
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def tensors_of(family, seed=0, auto=AutoModelForCausalLM, **changes):
    """Tensors of a random model, with a bias beside every projection, and the configuration's keys."""
    if family in NESTED:
        text = "gemma3_text" if family == "gemma3" else "mistral"
        own = {"text_config": {**SHAPE, **OWN.get(text, {}), "model_type": text}, "vision_config": VISION[family]}
        config = AutoConfig.for_model(family, **own, **({"mm_tokens_per_image": 4} if family == "gemma3" else {}))
        auto = auto_class(config)
    else:
        config = AutoConfig.for_model(family, **{**SHAPE, **OWN.get(family, {}), **changes})
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float32)
    named = [(name.replace("model.language_model.", "model."), value) for name, value in model.state_dict().items()]
    tensors = {name: value.clone() for name, value in named if not name.startswith(VISUAL)}
    for name, value in [*tensors.items()]:
        if value.ndim == 1:
            value.add_(0.2 * torch.randn_like(value))
        if "_proj." in name:
            tensors[name.replace("weight", "bias")] = 0.3 * torch.randn(len(value))
    keys = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    if family in NESTED:
        tensors |= {name.removeprefix("model."): value.clone() for name, value in named if name.startswith(VISUAL)}
    return tensors, keys


def numbered(tensors):
    """The tensors with a name for each expert, as checkpoints on the hub have them."""
    found = {}
    for name, value in tensors.items():
        before, _, module = name.rpartition(".")
        if value.ndim < 3 or "conv1d" in name:
            found[name] = value
            continue
        parts = ("gate_proj", "up_proj") if module == "gate_up_proj" else (module,)
        for number, expert in enumerate(value):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                found[f"{before}.{number}.{part}.weight"] = rows.contiguous()
    return found


def decoder_keys(keys):
    """The keys that say what the decoder computes: all, or those of a multimodal model's language part."""
    return keys["text_config"] if keys.get("model_type") in NESTED else keys


def write(folder, tensors, keys, shards=1):
    """Write a folder; with several shards, tensors go to the shards in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    if keys.get("model_type") in NESTED:
        tensors = {f"language_model.{n}" if n.startswith(DECODER) else n: value for n, value in tensors.items()}
    (folder / "config.json").write_text(json.dumps(keys))
    if shards == 1:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return folder
    place = {name: number % shards for number, name in enumerate(sorted(tensors))}
    names = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    for number, name in enumerate(names):
        save_file({n: t for n, t in tensors.items() if place[n] == number}, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: names[number] for name, number in place.items()}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


TOLERANCE = 1e-4
IDS = np.random.default_rng(5).integers(0, 64, 40)


class SilentDifferenceError(AssertionError):
    """A folder whose logits are not those of transformers, without an error."""


def dense_logits(decoder, ids=IDS):
    """Logits `[T, vocab]` of a decoder under plain causal attention with its windows: no engine, no compilation of steps."""
    spec, count = decoder.spec, len(ids)
    distance = np.arange(count)[:, None] - np.arange(count)

    def attend(layer, q, k, v):
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * spec.layers[layer].mixer.scale
        seen = (distance >= 0) & (distance < (spec.layers[layer].mixer.window or count))
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)

    def recur(layer, inputs):
        return jnp.asarray(sequential(inputs, spec.layers[layer].mixer), jnp.float32)

    with jax.default_matmul_precision("highest"):
        return np.asarray(decoder.logits(decoder(jnp.asarray(ids), jnp.arange(count), attend, recur=recur)))


def transformers_model(folder):
    """The model of transformers in float32, and whether it classifies; or the reason why it has no logits that count."""
    try:
        named = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
        classifies = named[0].endswith("ForSequenceClassification")
        plain = auto_class(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        auto = AutoModelForSequenceClassification if classifies else plain
        options = {"attn_implementation": "eager", "output_loading_info": True, "trust_remote_code": False}
        model, info = auto.from_pretrained(folder, dtype=torch.float32, **options)
        if info["missing_keys"] or info["mismatched_keys"]:
            return f"random weights in place of {sorted(info['missing_keys'])[:3]}"
        logits_of(model, classifies)
        return model, classifies
    except Exception as error:  # every class that a broken folder raises
        return f"{type(error).__name__}: {error}"


@torch.no_grad()
def logits_of(model, classifies=False, ids=IDS):
    """Logits of a model of transformers, float32 `[T, vocab or num_labels]`."""
    # Without a cache, whose layers a foreign `sliding_window` would shorten.
    batch = {"input_ids": torch.as_tensor(ids)[None], "use_cache": False, "return_dict": True}
    if not classifies:
        return model.eval()(**batch).logits[0].numpy()
    return model.score(model.eval().model(**batch).last_hidden_state)[0].numpy()


def transformers_logits(folder):
    """Logits of transformers in float32, or the reason why it has none that count."""
    witness = transformers_model(folder)
    return witness if isinstance(witness, str) else logits_of(*witness)


def judge(folder, change=lambda: None):
    """Return "equal" or the text of our error.

    Args:
        folder: folder of the checkpoint.
        change: a change that transformers must not see, made after its run.

    Raises:
        SilentDifferenceError: the logits are not transformers'.
    """
    witness = transformers_model(folder)
    change()
    try:
        decoder = open_files(EngineConfig(model=str(folder), dtype="float32", skip_tokenizer_init=True)).load()
    except ModelError as error:
        return str(error)
    if isinstance(witness, str):
        raise SilentDifferenceError(f"transformers has no logits ({witness})")
    with Routing().recorded() as routing:
        found, known = dense_logits(decoder), decoder.spec.max_model_len
    with routing.forced(witness[0]):
        expected = logits_of(*witness)
    if not routing.largest <= TOLERANCE:
        raise SilentDifferenceError(f"a router's logit of an expert lies {routing.largest:.2g} below one left out")
    if found.shape != expected.shape or not np.abs(found - expected)[:known].max() <= TOLERANCE:
        raise SilentDifferenceError(f"logits differ by {np.abs(found - expected).max():.2g}")
    return "equal"


def judge_tokenizer(folder, encode):
    """Check that a folder's tokenizer has the ids of its file, or is refused.

    Args:
        folder: folder of the tokenizer.
        encode: ids of a text by the file's own tokenizer; None if the folder has no vocabulary.

    Raises:
        SilentDifferenceError: the ids differ, or a tokenizer without vocabulary loads.
    """
    try:
        tokenizer = load_tokenizer(str(folder))
    except ModelError as error:
        if encode is not None:
            raise SilentDifferenceError(f"a right tokenizer is refused: {error}") from error
        return
    if encode is None:
        raise SilentDifferenceError("a tokenizer without vocabulary loads")
    for text in TEXTS:
        found, expected = tokenizer(text, add_special_tokens=False).input_ids, list(encode(text))
        if found != expected:
            raise SilentDifferenceError(f"the ids of {text!r} are {found}, the file's are {expected}")
