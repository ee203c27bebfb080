"""Comparison of a kernel with `xla` on the device of this process, before an engine with `auto` takes the kernel."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from itertools import product

import jax
import numpy as np

from chunkattn.backends.base import AttentionBackend, AttentionBatch
from chunkattn.backends.registry import make_backend
from chunkattn.engine.verdicts import Verdict, read_verdict, verdict_file, verdict_key, write_verdict
from chunkattn.rope.positions import make_layout
from chunkattn.same_bits import Row, batch_of
from chunkattn.testing import TOLERANCE, Comparison, PlannedPrompt

logger = logging.getLogger(__name__)

_PROMPTS = ((70, (1, 130, 37), 45), (5, (90, 3), 20), (0, (200, 150), 64))
"""Tokens of prefix, chunks and question of the prompts."""
_ROWS = 1024
"""Rows of a prefill step: enough that every kernel takes its path for many rows."""
_FEW = 8
"""Rows of a decode step."""
_DECODES = 2
"""Number of decode steps."""
_SLOTS, _PARTS = 512, 5
"""Bounds of the slots of a prompt without holes, and of its parts."""
_WINDOW = 96
"""Largest sliding window that is compared, in positions, so that prompts exceed it."""

_LONGEST_ERROR = 500
"""Characters of a compiler's error that are kept."""


def checked(backend: AttentionBackend, *, weighs: bool, batch_invariant: bool) -> AttentionBackend:
    """Return the backend if it agrees with `xla` on this device, otherwise `xla` with a warning.

    The comparison takes small steps of every kind that the engine computes, with the engine's geometry, dtypes and page size.
    It runs once for each chip, software and setting; later calls read the verdict from a file.

    Args:
        backend: backend that `auto` has chosen.
        weighs: whether the engine's steps weigh chunks anew.
        batch_invariant: whether the engine asks for rows of the same bits in any company.
    """
    chip = jax.devices()[0].device_kind
    key = verdict_key(backend, weighs=weighs, batch_invariant=batch_invariant)
    verdict = read_verdict(key)
    if verdict is None:
        began = time.perf_counter()
        verdict = compare(backend, weighs=weighs, batch_invariant=batch_invariant)
        logger.info("attention_backend auto: %s compared in %.1f s", backend.name, time.perf_counter() - began)
        if not verdict.raised:  # an error may pass, for example one of memory that another process holds
            write_verdict(key, verdict)
    if not verdict.faults:
        logger.info("attention_backend auto: %s agrees with xla on this %s: %s", backend.name, chip, verdict)
        return backend
    file = verdict_file(key)
    logger.warning(
        "attention_backend auto: xla instead of %s, which is not equal to it on this %s: %s; %s",
        backend.name,
        chip,
        verdict,
        f"delete {file} to compare again" if os.path.exists(file) else "the next start compares again",
    )
    return make_backend("xla", backend.spec, weighs=weighs)


def compare(backend: AttentionBackend, *, weighs: bool, batch_invariant: bool) -> Verdict:
    """Compare a backend with `xla` over small steps of every kind; see `checked` for the arguments."""
    spec, results = backend.spec, dict[str, float | str]()
    kinds = ["prefill with chunks", "decode", "packed scores"]
    for window in spec.windows:
        shown = None if window is None else min(window, _WINDOW)
        one = replace(spec, windows=(shown,))
        judged = type(backend)(one)
        judged.batch_invariant = batch_invariant
        oracle = make_backend("xla", one, weighs=weighs)
        whole = [*kinds, "weighed question"] if weighs and window is None else kinds
        ways = (False, True) if judged.prepares_heads and window is None else (False,)
        pairs = {inputs: Comparison(judged, oracle, np.random.default_rng(0), shown, inputs=inputs) for inputs in ways}
        for (inputs, pair), kind in product(pairs.items(), whole):
            name = kind if window is None else f"{kind} within a window of {shown} tokens"
            name += " from products" * inputs
            steps = _steps(kind, spec.block_size, weighs=weighs, windowed=spec.windowed)
            try:
                differences = list(pair.differences(steps))
            except Exception as error:  # a compiler and a device may raise anything
                results[name] = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
                continue
            results[name] = float(np.max(differences[-_DECODES:] if kind == "decode" else differences))
    return Verdict(TOLERANCE[spec.dtype.name], results)


def _steps(kind: str, block_size: int, *, weighs: bool, windowed: bool) -> list[AttentionBatch]:
    """Return consecutive steps of one kind. All kinds have the same two step sizes and one size of page tables.

    Args:
        kind: kind of the steps. Decodes follow the steps of their prompts.
        block_size: slots per page.
        weighs: whether the batches have a weighing, which leaves all but weighed questions as they are.
        windowed: whether the batches have the positions of pages.
    """
    prompts: list[PlannedPrompt] = []
    decodes = _DECODES if kind in ("decode", "weighed question") else 0
    for number, (prefix, chunks, question) in enumerate(_PROMPTS):
        parts = [np.zeros(n, np.int32) for n in (prefix, *chunks, 0 if kind == "packed scores" else question)]
        layout = make_layout(parts[0], parts[1:-1], parts[-1])
        prompt = PlannedPrompt.of(layout, block_size, aligned=windowed or number % 2 == 0, decodes=decodes)
        if kind == "weighed question":
            prompt.question, prompt.weighing = prompt.slots[layout.question_start], (0.6, 1.4)
        prompts.append(prompt)
    width = -(-_SLOTS // block_size) + _PARTS
    tables = np.random.default_rng(0).permutation(len(prompts) * width).astype(np.int32).reshape(-1, width)

    def step(size: int, counts: list[int]) -> AttentionBatch:
        rows: list[Row] = [row for n, (p, count) in enumerate(zip(prompts, counts, strict=True)) for row in p.take(count, n)]
        return batch_of(prompts, tables, rows, size, block_size, weighs=weighs, windowed=windowed)

    halves = [p.prompt_len // 2 for p in prompts]
    steps = [step(_ROWS, halves), step(_ROWS, [p.prompt_len - half for p, half in zip(prompts, halves, strict=True)])]
    return steps + [step(_FEW, [1] * len(prompts)) for _ in range(decodes)]
