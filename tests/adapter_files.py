"""LoRA adapters with random factors, saved by PEFT or in its format, and the models that have them."""

import copy
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "bias": "none"}


def linears(model) -> dict[str, torch.nn.Linear]:
    """The language part's matrices of a model, by name."""
    named = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {name: module for name, module in named.items() if ".layers." in name and "vision" not in name}


def make_adapter(
    folder: Path, model, ends=("q_proj", "v_proj"), *, seed=0, size=0.3, rank=None, scale=None, dtype=None, **fields
):
    """Save an adapter of the modules whose names end so, and return a copy of the model with it.

    `rank` and `scale` return a module's own, by name, where the fields of the configuration say otherwise.
    """
    generator, made, tensors = torch.Generator().manual_seed(seed), copy.deepcopy(model), {}
    config = {**CONFIG, "target_modules": list(ends), **fields}
    for name, module in made.named_modules():
        if not isinstance(module, torch.nn.Linear) or "vision" in name or not any(name.endswith(end) for end in ends):
            continue
        r = rank(name) if rank else config["r"]
        a = torch.randn(r, module.in_features, generator=generator) * module.in_features**-0.5
        b = torch.randn(module.out_features, r, generator=generator) * size
        a, b = (x.to(dtype or torch.float32) for x in (a, b))
        factor = scale(name) if scale else config["lora_alpha"] / (math.sqrt(r) if config.get("use_rslora") else r)
        module.weight = torch.nn.Parameter(module.weight + factor * (b.float() @ a.float()), requires_grad=False)
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_adapter(folder, config, tensors)
    return made


def make_peft(folder: Path, model, *, seed=0, **fields):
    """Have PEFT add an adapter to a copy of a model, save it, and return its model."""
    import peft  # slow to import

    torch.manual_seed(seed)
    made = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(init_lora_weights=False, **fields))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    made.eval().save_pretrained(folder)
    return made


def save_adapter(folder: Path, config: dict, tensors: dict) -> None:
    """Write the two files of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
