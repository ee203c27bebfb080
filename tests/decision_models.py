"""Tiny decision models of the published formats, and witnesses: transformers' pipeline, and kev's formula in PyTorch."""

import json
import re

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DecisionPipeline,
    JevForDecision,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from tests.chat_templates import CHATML
from tests.checkpoints import make_checkpoint
from tests.reranker_files import SHAPE, add_tokenizer, qwen_tokenizer

SEGMENTS = ["<|fim_prefix|>", "<|fim_middle|>", "<|box_start|>", "<|box_end|>", "<|fim_suffix|>"]
LONG = {**SHAPE, "max_position_embeddings": 2048}
_QWEN2 = {name: value for name, value in LONG.items() if name != "head_dim"}
_HYBRID = {
    **LONG,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_CONFIGS = {"qwen2": (Qwen2Config, _QWEN2), "qwen3": (Qwen3Config, LONG), "qwen3_5": (Qwen3_5TextConfig, _HYBRID)}
CODES = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]


def make_base(folder, family="qwen2", *, tie=True):
    """Save a random base model with its tokenizer, which has kev's segment tokens."""
    made, fields = _CONFIGS[family]
    make_checkpoint(made(**fields, tie_word_embeddings=tie), folder)
    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SEGMENTS])
    add_tokenizer(folder, tokenizer, chat_template=CHATML)
    return folder


def add_codes(folder, prompt="pplx", **changes):
    """Make a folder a decision model of vLLM's format."""
    torch.manual_seed(1)
    save_file({"weight": torch.randn(len(CODES), LONG["hidden_size"]) * 0.3}, folder / "readout.safetensors")
    fields = {"format_version": 1, "attention_mode": "causal", "pooling": "last", "temperature": 1.3, "codes": CODES}
    (folder / "decision_config.json").write_text(json.dumps({**fields, "prompt": prompt, **changes}))
    return folder


def add_judge(folder, **changes):
    """Make a folder a decision model of JEV's format, whose adapter is merged."""
    torch.manual_seed(2)
    ranges = {"noul": [0, 2], "score": [2, 8], "choice": [8, 24]}
    slots = {"num_slots": 24, "verbalizers": ["no", "yes", *"012345", *CODES[:16]], "ranges": ranges}
    head = {"proj.weight": torch.randn(24, LONG["hidden_size"]) * 0.3, "proj.bias": torch.randn(24)}
    save_file(head, folder / "head.safetensors")
    (folder / "judge_config.json").write_text(
        json.dumps({"slots": slots, "softcap": 5.0, "adapter_subfolder": None, **changes})
    )
    (folder / "calibration.json").write_text(json.dumps({"per_kind": {"noul": 0.8, "score": 1.5, "choice": 2.0}}))
    return folder


def pipeline(folder):
    """Return transformers' pipeline of a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    has_head = any((folder / name).exists() for name in ("readout.safetensors", "head.safetensors"))
    auto = JevForDecision if has_head else AutoModelForCausalLM
    return DecisionPipeline(model=auto.from_pretrained(folder, dtype=torch.float32), tokenizer=tokenizer)


def pointer_head(size=16, seed=3):
    """Return the tensors of a random pointer head."""
    torch.manual_seed(seed)
    hidden = LONG["hidden_size"]
    weights = {f"{name}.weight": torch.randn(size, hidden) * 0.3 for name in "qk"}
    return weights | {f"{name}.bias": torch.randn(size) for name in "qk"}


def save_kev(folder, base, head, temperature=1.0, **changes):
    """Save kev's `head.pt`."""
    facts = {"base": str(base), "lora": 4, "head_dim": 16, "option_isolation": False, "holdout": ["a"], "head": head}
    torch.save({**facts, "temperature": temperature, "args": {"lr": 1e-4, "none": None}, **changes}, folder / "head.pt")


def kev_shares(model, tokenizer, head, state, questions, temperature=1.0):
    """Return the probabilities of each question's options by kev's formula: a causal row of state and question each.

    Args:
        model: decoder of transformers, with the adapter merged.
        tokenizer: its tokenizer.
        head: tensors of the head.
        state: text of the state.
        questions: pairs of a question's text and its options' texts.
        temperature: divisor of the scores.

    Source: kev/model.py of jaredpalmer/kev.
    """
    begin, middle, option, end, decide = tokenizer.convert_tokens_to_ids(SEGMENTS)

    def plain(text):
        return tokenizer(re.sub(r"<\|([A-Za-z0-9_]+)\|>", "<\u00a6\\1\u00a6>", text), add_special_tokens=False).input_ids

    found = []
    for text, options in questions:
        ids, ends = [begin, *plain(state), middle, *plain(text)], []
        for own in options:
            ids += [option, *plain(own), end]
            ends.append(len(ids) - 1)
        with torch.no_grad():
            hidden = model(torch.tensor([[*ids, decide]]), use_cache=False).last_hidden_state[0]
        query = hidden[-1] @ head["q.weight"].T + head["q.bias"]
        keys = hidden[ends] @ head["k.weight"].T + head["k.bias"]
        found.append(torch.softmax(keys @ query / len(query) ** 0.5 / temperature, -1).tolist())
    return found
