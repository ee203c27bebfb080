"""Command `chunkattn plan`: the memory of a model on each of its devices."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from chunkattn.config import EngineConfig, make_config
from chunkattn.terminal.commands import app, command, console, figures
from chunkattn.terminal.flags import with_options

_GIB, _MIB = 1 << 30, 1 << 20
_ENGINE = (
    "dtype weights quantization adapter lora_modules enable_lora max_loras max_lora_rank revision kv_cache_dtype block_size "
    "kv_cache_memory_bytes state_cache_memory_bytes max_num_seqs gpu_memory_utilization max_model_len"
)


@command(app)
@with_options((EngineConfig, None, _ENGINE))
def plan(
    model: Annotated[str | None, typer.Argument()] = None,
    device: str | None = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(min=1)] = None,
    **options: Any,
) -> None:
    """Print the weights, pages and tokens of a model on each of its devices, from its configuration alone.

    Args:
        model: local folder, GGUF file or hub id; the bundled demo model when left out.
        device: device, such as v6e, l4 or h200; the usual ones when left out.
        tensor_parallel_size: number of devices; the powers of two that divide the model when left out.
        **options: other fields of `EngineConfig`.
    """
    from chunkattn.engine import plan as plans
    from chunkattn.models.adapter_slots import SlotShape
    from chunkattn.models.loader import open_adapters, open_shape
    from chunkattn.models.shards import ONE_DEVICE

    config = make_config(model, {**options, "skip_tokenizer_init": True})
    spec, dtype, types = open_shape(config)
    slots = SlotShape.of(config, spec, open_adapters(config, spec).values())
    longest = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
    chips = dict(map(plans.chip_of, plans.USUAL if device is None else [device]))
    table = figures("device", "N", "weights", "of 1/N", "KV pool", "pages", "tokens", "prompts", texts=("device",))
    states = figures("device", "N", "MiB a state", "states", "running", texts=("device",))
    for name, chip in chips.items():
        for size in plans.sizes(spec) if tensor_parallel_size is None else [tensor_parallel_size]:
            memory = plans.plan(config, spec, dtype, chip, size, slots)
            share = f"{memory.weight_bytes / memory.least_weight_bytes:.3f}"
            weights, pool = f"{memory.weight_bytes / _GIB:.2f}", f"{memory.num_pages * memory.page_bytes / _GIB:.2f}"
            fits = [pool, f"{memory.num_pages:,}", f"{memory.num_tokens:,}", f"{memory.num_tokens / longest:,.1f}"]
            fits = fits if memory.num_pages else ["too large", "", "", ""]
            place = f"{name}, {chip.memory_bytes / _GIB:.0f}", str(size)
            table.add_row(*place, weights, share, *fits)
            if memory.num_pages:
                bytes_of_one = f"{memory.state_bytes / _MIB:.2f}"
                states.add_row(*place, bytes_of_one, f"{memory.num_states:,}", f"{memory.num_tracks:,}")
    num_heads, num_kv_heads, _ = spec.heads
    console.print(f"{spec.num_layers} layers, {num_heads} heads, {num_kv_heads} KV heads, weights in {dtype.name}")
    console.print(table)
    console.print("GiB on each of N devices. Weights and pool take the memory of JAX but 15%, at most 6 GiB, which steps have.")
    if packed := plans.packed_bytes(config, spec, dtype, types):
        console.print(f"A CPU packs the weights in {packed / _GIB:.2f} GiB; these devices dequantise them.")
    if slots:
        held = slots.num_values(ONE_DEVICE) * dtype.itemsize / _GIB
        console.print(
            f"Weights count {held:.2f} GiB of one device for {slots.count} adapters of rank {slots.rank}; a CPU adds it."
        )
    if any(chip.is_gpu for chip in chips.values()):
        console.print(f"JAX takes {config.gpu_memory_utilization:.0%} of a GPU (`--gpu-memory-utilization`), and all of a TPU.")
    console.print(f"`of 1/N`: weights, divided by 1/N of all; `prompts`: prompts of {longest:,} tokens.")
    if spec.recurrent is not None:
        console.print(states)
        text = "Beside the pool, recurrent layers have the states of `running` samples, and `states` that prompts leave"
        console.print(f"{text} (`--state-cache-memory-bytes`).")
