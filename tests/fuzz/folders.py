"""Judge of checkpoint folders: a folder gives transformers' logits or one clear error, and nothing else."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from chunkattn.errors import ModelError
from chunkattn.models.loader import open_model

TOLERANCE = 1e-4
IDS = np.random.default_rng(5).integers(0, 64, 40)


class SilentDifferenceError(AssertionError):
    """A folder whose logits are not those of transformers, without an error."""


def dense_logits(decoder, ids=IDS):
    """Logits `[T, vocab]` of a decoder under plain causal attention with its windows: no engine, no compilation of steps."""
    spec, count = decoder.spec, len(ids)
    distance = np.arange(count)[:, None] - np.arange(count)

    def attend(layer, q, k, v):
        k, v = (jnp.repeat(x, spec.num_heads // spec.num_kv_heads, axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * spec.head_dim**-0.5
        seen = (distance >= 0) & (distance < (spec.windows[layer] or count))
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)

    with jax.default_matmul_precision("highest"):
        return np.asarray(decoder.logits(decoder(jnp.asarray(ids), jnp.arange(count), attend)))


@torch.no_grad()
def transformers_logits(folder, ids=IDS):
    """Logits of transformers in float32 `[T, vocab or 1]`, or the reason why it has none that count."""
    try:
        named = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
        classifies = named[0].endswith("ForSequenceClassification")
        auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
        model, info = auto.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            trust_remote_code=False,
        )
    except Exception as error:  # every class that a broken folder raises
        return f"{type(error).__name__}: {error}"
    if info["missing_keys"] or info["mismatched_keys"]:
        return f"random weights in place of {sorted(info['missing_keys'])[:3]}"
    # Without a cache, whose layers a foreign `sliding_window` would shorten.
    batch = {"input_ids": torch.as_tensor(ids)[None], "use_cache": False}
    if not classifies:
        return model.eval()(**batch).logits[0].numpy()
    return model.score(model.eval().model(**batch).last_hidden_state)[0].numpy()


def judge(folder):
    """Return "equal" or the text of our error.

    Raises:
        SilentDifferenceError: the logits are not transformers'.
    """
    try:
        decoder = open_model(str(folder), dtype="float32", skip_tokenizer_init=True).load()
    except ModelError as error:
        return str(error)
    expected = transformers_logits(folder)
    if isinstance(expected, str):
        raise SilentDifferenceError(f"transformers has no logits ({expected})")
    found = dense_logits(decoder)
    if decoder.spec.max_model_len < len(IDS):
        found, expected = found[: decoder.spec.max_model_len], expected[: decoder.spec.max_model_len]
    if found.shape != expected.shape or not np.abs(found - expected).max() <= TOLERANCE:
        raise SilentDifferenceError(f"logits differ by {np.abs(found - expected).max():.2g}")
    return "equal"
