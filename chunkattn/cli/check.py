"""Command `chunkattn check`: whether the attention of this device is right."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import numpy as np

from chunkattn.cli.environment import environment
from chunkattn.errors import BackendError
from chunkattn.sampling_params import SamplingParams
from chunkattn.terminal.commands import app, command, console, print_lines

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"weighs": True},
    {"window": 7},
    {"head_dim": 128, "num_heads": 8, "num_kv_heads": 4, "dtype": "bfloat16"},
    {"head_dim": 128, "num_heads": 8, "num_kv_heads": 4, "dtype": "bfloat16", "block_size": 64, "window": 20},
    {"head_dim": 64, "num_heads": 8, "num_kv_heads": 1, "dtype": "bfloat16", "weighs": True},
    {"head_dim": 128, "dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"},
)
"""Options of `check_backend` that are tried; a backend may refuse some."""
MANY_ROWS: tuple[dict[str, Any], ...] = (
    {"head_dim": 128, "num_heads": 32, "num_kv_heads": 8, "dtype": "bfloat16", "block_size": 64, "scale": 4},
    {"head_dim": 64, "num_heads": 32, "num_kv_heads": 8, "dtype": "float16", "block_size": 64, "scale": 4, "weighs": True},
    {"head_dim": 256, "num_heads": 32, "num_kv_heads": 4, "dtype": "bfloat16", "block_size": 64, "scale": 4},
)
"""Options with steps of many rows, which accelerators may compute by another kernel. The reference takes minutes on CPUs."""
PREFIX = "Answer from the documents."
DOCUMENTS = ("Ada lives in Rome.", "Ben lives in Oslo.", "Cleo lives in Lima.")
QUESTION = "Where does Ben live?"
KV_BYTES = 1 << 26
"""Bytes of the demo model's K/V. Two engines follow each other, and by default the first would take all memory."""
PACKED_SHAPE, PACKED_TOLERANCES = (64, 1024), {1: 2e-2, 2: 2e-4}
"""Outputs and depth of packed weights, and the largest root mean square error by the bytes of an activation."""
ATTENTION_REMEDY = (
    "[red]The attention of this device is wrong.[/] Use attention_backend='xla' or 'reference' until it is mended."
)
PACKED_REMEDY = "[red]The products with packed weights are wrong.[/] Use weights='dequantized' until they are mended."
TOLERANCE = 1e-3
"""Largest difference of the demo model's scores between two backends, in float32."""


@command(app)
def check(backend: str = "auto", cases: int = 3) -> None:
    """Compare the attention that this device would run with the reference, then answer and score with the demo model.

    On CPUs, products with packed weights are compared as well. The verdicts follow by which engines with `auto` took or left a
    kernel on this device.

    Args:
        backend: `auto`, or the backend to check.
        cases: number of random cases per setting.
    """
    began = time.perf_counter()
    failures = [*_kernels(backend, cases), *_demo(backend), *_verdicts()]
    wrong = _packed()
    console.print(f"{time.perf_counter() - began:.0f} s")
    if failures or wrong:
        for what, remedy in ((failures, ATTENTION_REMEDY), (wrong, PACKED_REMEDY)):
            if what:
                console.print(remedy)
        console.print("Report the lines above with these:")
        print_lines(f"  {name}: {value}" for name, value in environment())
        sys.exit(1)
    console.print("[green]All is right.[/]")


def _kernels(backend: str, cases: int) -> list[str]:
    """Compare kernels with the reference, and return the failures."""
    import jax
    import jax.numpy as jnp

    from chunkattn.backends import AttentionSpec, make_backend
    from chunkattn.testing import TOLERANCE as TOLERANCES
    from chunkattn.testing import check_backend

    console.print(f"{jax.devices()[0].device_kind} ({jax.default_backend()})")
    failures = []
    for options in OPTIONS + (MANY_ROWS if jax.default_backend() != "cpu" else ()):
        values = {"dtype": "float32", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 16, **options}
        heads = (values["num_heads"], values["num_kv_heads"], values["head_dim"])
        kept = jnp.dtype(values["kv_dtype"]) if "kv_dtype" in values else None
        spec = AttentionSpec(*heads, jnp.dtype(values["dtype"]), values["block_size"], (values.get("window"),), kept)
        text = ", ".join(f"{name} {value}" for name, value in values.items())
        try:
            name = make_backend(backend, spec, weighs=values.get("weighs", False)).name
            difference = check_backend(name, cases=cases, **values)
            console.print(f"  [green]right[/] {name}: {text}: {difference:.1e} of {TOLERANCES[values['dtype']]:.0e} allowed")
        except BackendError as error:
            console.print(f"  left out: {text}: {error}", markup=False)
        except AssertionError as error:
            failures.append(str(error))
            console.print(f"  [red]wrong[/] {text}: {error}")
    return failures


def _demo(backend: str) -> list[str]:
    """Answer and score with the demo model on this backend and on the reference, and return the failures."""
    from chunkattn import LLM, ChunkedPrompt

    prompt = ChunkedPrompt(prefix=PREFIX, chunks=list(DOCUMENTS), question=QUESTION)
    answers, scores = [], []
    for name in (backend, "reference"):
        llm = LLM(enable_chunk_aware=True, attention_backend=name, dtype="float32", kv_cache_memory_bytes=KV_BYTES)
        answers.append(llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].text)
        scores.append(np.asarray(llm.score(QUESTION, list(DOCUMENTS), labels=["yes", "no"]).scores))
        llm.close()
    difference = float(np.abs(scores[0] - scores[1]).max())
    right = answers[0] == answers[1] and difference <= TOLERANCE
    console.print(
        f"  {'[green]right[/]' if right else '[red]wrong[/]'} demo model: {answers[0]!r}, scores within {difference:.1e}"
    )
    if right:
        return []
    return [f"demo model: {answers[0]!r} instead of {answers[1]!r}, scores differ by {difference:.1e}"]


def _packed() -> list[str]:
    """Compare products with packed weights with those of the values that the gguf package reads, and return the failures."""
    from chunkattn.backends.cpu import packed

    rng, failures = np.random.default_rng(0), []
    x = rng.standard_normal((40, PACKED_SHAPE[1]), np.float32)
    for name in packed.FORMATS:
        if (reason := packed.refusal(name, *PACKED_SHAPE)) is not None:
            console.print(f"  left out: packed {name}: {reason}", markup=False)
            continue
        for digits, allowed in PACKED_TOLERANCES.items():
            error, agree = _packed_error(name, digits, x, rng)
            text = f"packed {name} times int{8 * digits}: relative error {error:.1e} of {allowed:.0e} allowed"
            if agree and error <= allowed:
                console.print(f"  [green]right[/] {text}")
            else:
                failures.append(text if agree else f"{text}; a row alone has other bits")
                console.print(f"  [red]wrong[/] {failures[-1]}")
    return failures


def _packed_error(name: str, digits: int, x: np.ndarray, rng: np.random.Generator) -> tuple[float, bool]:
    """Return the error of products with a random packed weight, and whether rows alone have the bits of all rows.

    Args:
        name: format of the weight.
        digits: bytes of an activation.
        x: float32 `[N, depth]`.
        rng: random numbers.

    Returns:
        Root mean square of the differences from float64 products, divided by that of the products.
    """
    import jax
    import jax.numpy as jnp
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    from chunkattn.backends.cpu import packed

    kind, (outputs, depth) = GGMLQuantizationType[name], PACKED_SHAPE
    block, size = GGML_QUANT_SIZES[kind]
    # The mask keeps every scale below 1.
    blocks = rng.integers(0, 256, (outputs, depth // block * size), np.uint8) & np.uint8(0x3B)
    data = np.zeros(packed.FORMATS[name].packed_bytes(outputs, depth), np.uint8)
    packed.pack(name, blocks, data)
    product = jax.jit(partial(packed.multiply, format=name, outputs=outputs, digits=digits))
    found = np.asarray(product(jnp.asarray(x), jnp.asarray(data)))
    exact = x.astype(np.float64) @ dequantize(blocks, kind).astype(np.float64).T
    agree = all(np.array_equal(product(jnp.asarray(x[n : n + 1]), jnp.asarray(data))[0], found[n]) for n in range(2))
    return float(np.sqrt(np.square(found - exact).mean() / np.square(exact).mean())), agree


def _verdicts() -> list[str]:
    """Print what engines with `auto` found on this device when they started, and return the failures."""
    from chunkattn.engine.build import enable_compile_cache
    from chunkattn.engine.verdicts import verdict_folder, verdicts_here

    enable_compile_cache()
    failures, verdicts = [], list(verdicts_here())
    print_lines([f"verdicts of engines with attention_backend='auto', in {verdict_folder()}:"])
    for settings, verdict, file in verdicts:
        console.print("  [red]wrong[/]" if verdict.faults else "  [green]right[/]", end=" ")
        print_lines([f"{settings}: {verdict} ({file.name})"])
        failures += [f"{settings}: {fault}" for fault in verdict.faults]
    if not verdicts:
        console.print("  none: no engine has compared a kernel with xla on this device and with these versions")
    return failures
