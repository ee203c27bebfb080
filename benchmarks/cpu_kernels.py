"""Time the native CPU kernels beside XLA's: attention of one layer, products of few rows, and readouts of logits.

    python -m benchmarks.cpu_kernels
    python -m benchmarks.cpu_kernels --only ratios --rounds 31

Attention has the heads of Qwen3-0.6B. Layers run one after the other in one program, and each has a cache of its own, so that
the caches do not fit in the processor's. The programs alternate call by call. `ratios` compares chunk-aware attention with
plain causal attention over as many tokens, and calibrated attention with attention that is not.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends.base import AttentionBatch, AttentionSpec, Weighing
from chunkattn.backends.cpu import label_readout, library
from chunkattn.backends.cpu import linear as native
from chunkattn.backends.cpu.normaliser import normaliser
from chunkattn.backends.registry import get_backend
from chunkattn.engine import sampling
from chunkattn.engine.sample_inputs import SAMPLE_BUCKETS
from chunkattn.models import linear
from chunkattn.terminal.progress import timed
from chunkattn.tools.bench.measure import round_name

HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 8, 128, 16
LAYERS = 4
PREFIX, DOCUMENTS, DOCUMENT, QUESTION = 32, 12, 500, 50
MATRICES = {
    "attention and MLP": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "vocabulary": ((151936, 1024),),
    "apart": ((2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (3072, 1024), (1024, 3072)),
}
"""Shapes of weights, `(out, in)`, once for each of 28 layers, but one vocabulary.

The first group joins Q, K and V, and gate and up. `apart` has the same weights one by one.
"""


def batch(rows: list[tuple[int, int, int]], lengths: list[list[int]], prefix: int, weighed: bool = False) -> AttentionBatch:
    """Return a step.

    Args:
        rows: sequence, slot and row start of each row.
        lengths: tokens of each part of each sequence; every part begins a page.
        prefix: slots of the prefix.
        weighed: whether the last part is a question with temperature and scale.
    """
    seq, slot, start = (np.asarray(column, np.int32) for column in zip(*rows))
    pages = [[min(PAGE, part - at) for part in parts for at in range(0, part, PAGE)] for parts in lengths]
    width, seqs = max(map(len, pages)), len(pages)
    held = np.zeros((seqs, width), np.int32)
    for number, of_seq in enumerate(pages):
        held[number, : len(of_seq)] = of_seq
    tables = np.arange(seqs * width, dtype=np.int32).reshape(seqs, width)
    question = np.asarray([PAGE * (len(of_seq) - -(-parts[-1] // PAGE)) for of_seq, parts in zip(pages, lengths)], np.int32)
    ones = np.ones(seqs, np.float32)
    weighing = Weighing(question, 0.8 * ones, 0.8 * ones) if weighed else None
    return AttentionBatch(len(rows), seq, slot, start, np.full(seqs, prefix, np.int32), tables, held, PAGE, weighing)


def plain(tokens: int, new: int, seqs: int = 1) -> AttentionBatch:
    """Return a step that computes the last `new` of `tokens` tokens of each sequence."""
    return batch([(s, slot, 0) for s in range(seqs) for slot in range(tokens - new, tokens)], [[tokens]] * seqs, 0)


def asked(new: int, seqs: int = 1, weighed: bool = False) -> AttentionBatch:
    """Return a step that computes the last `new` tokens of questions behind documents."""
    begin = PREFIX + DOCUMENTS * (-(-DOCUMENT // PAGE) * PAGE)
    rows = [(s, slot, 0) for s in range(seqs) for slot in range(begin + QUESTION - new, begin + QUESTION)]
    return batch(rows, [[PREFIX, *[DOCUMENT] * DOCUMENTS, QUESTION]] * seqs, PREFIX, weighed)


def scored(query: int, items: int, length: int) -> AttentionBatch:
    """Return a step that computes all items of one query."""
    rows = [(0, query + item * length + at, query + item * length) for item in range(items) for at in range(length)]
    return batch(rows, [[query + items * length]], query)


def attention(step: AttentionBatch, backend: str, dtype: jnp.dtype) -> Callable[[], None]:
    """Return a function that runs all layers of a step."""
    made = get_backend(backend)(AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, dtype, PAGE))
    metadata = jax.tree.map(jnp.asarray, made.build_metadata(step))
    rng, rows = np.random.default_rng(0), len(step.row_seq)
    q, k, v = (jnp.asarray(rng.standard_normal((rows, heads, HEAD_DIM)), dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    caches = [made.allocate(step.block_tables.size) for _ in range(LAYERS)]

    def layers(q: jax.Array, caches: list, metadata: object) -> tuple[jax.Array, list]:
        for number, cache in enumerate(caches):
            q, caches[number] = made.forward(q, k, v, cache, metadata, scale=HEAD_DIM**-0.5)
        return q, caches

    program = jax.jit(layers, donate_argnums=1)

    def call() -> None:
        nonlocal caches
        out, caches = program(q, caches, metadata)
        out.block_until_ready()

    return call


@functools.cache
def weights(name: str) -> list[jax.Array]:
    """Return the weights of all layers, or the one large weight."""
    rng, shapes = np.random.default_rng(0), MATRICES[name]
    count = 28 if len(shapes) > 1 else 1
    return [jnp.asarray(rng.standard_normal(s, np.float32), jnp.bfloat16) for _ in range(count) for s in shapes]


def product(rows: int, name: str, multiply: Callable[..., jax.Array]) -> Callable[[], None]:
    """Return a function that multiplies `rows` rows with the weights of a group of `MATRICES`."""
    program = jax.jit(lambda held: sum(multiply(jnp.ones((rows, w.shape[1]), w.dtype), w).sum() for w in held))
    return lambda: program(weights(name)).block_until_ready()


def readout(rows: int, normalise: Callable[[jax.Array], jax.Array]) -> Callable[[], None]:
    """Return a function that adds up the exponentials of `rows` rows of logits."""
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((rows, MATRICES["vocabulary"][0][0]), np.float32))
    program = jax.jit(normalise)
    return lambda: program(logits).block_until_ready()


def labels_at_once(rows: int) -> Callable[[], None]:
    """Return a function that reads two labels of `rows` rows and keeps no logits."""
    (head,) = weights("vocabulary")
    program = jax.jit(label_readout.read_labels)
    hidden, labels = jnp.ones((rows, head.shape[1]), jnp.float32), np.zeros((rows, 2), np.int32)
    return lambda: jax.block_until_ready(program(hidden, head, labels))


def labels_of_logits(rows: int, most: int = sampling.READ_BUCKETS[-1]) -> Callable[[], None]:
    """Return a function that reads two labels of `rows` rows from their logits, `most` rows at a time."""
    (head,) = weights("vocabulary")
    program = jax.jit(lambda hidden, head, labels: sampling.read_labels(linear.multiply(hidden, head), labels))
    sizes = [min(most, rows - first) for first in range(0, rows, most)]
    blocks = [(jnp.ones((size, head.shape[1]), jnp.float32), np.zeros((size, 2), np.int32)) for size in sizes]
    return lambda: jax.block_until_ready([program(hidden, head, labels) for hidden, labels in blocks])


def times(case: str, calls: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each call, which take turns; the first round is left out."""
    milliseconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        with timed(f"{case}, {round_name(number, rounds)}"):
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                if number:
                    milliseconds[name].append(1e3 * (time.perf_counter() - began))
    return milliseconds


def compare(name: str, calls: Mapping[str, Callable[[], None]], rounds: int, per: int = 1) -> None:
    """Print the medians of two calls, and their ratio with its quartiles over the rounds."""
    (first, ours), (second, theirs) = times(name, calls, rounds).items()
    low, ratio, high = np.quantile(np.divide(theirs, ours), (0.25, 0.5, 0.75))
    medians = [statistics.median(of) / per for of in (ours, theirs)]
    print(f"{name:34} {first} {medians[0]:8.2f} ms   {second} {medians[1]:8.2f} ms   ratio {ratio:.2f} ({low:.2f}-{high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["attention", "ratios", "products", "joined", "readouts"], nargs="+")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    parts, dtype = args.only or ["attention", "ratios", "products", "joined", "readouts"], jnp.dtype(args.dtype)
    if reason := library.refusal():
        parser.error(f"the native kernels are missing: {reason}")
    if "attention" in parts:
        print("attention of one layer; ratio: xla over cpu")
        steps = {
            "prefill of 2000": plain(2000, 2000),
            "100 items of 20 behind 2000": scored(2000, 100, 20),
            "question of 50 behind 12 x 500": asked(QUESTION),
            "decode of 1 sequence of 2000": plain(2000, 1),
            "decode of 16 sequences of 2000": plain(2000, 1, 16),
        }
        for name, step in steps.items():
            compare(name, {backend: attention(step, backend, dtype) for backend in ("cpu", "xla")}, args.rounds, LAYERS)
    if "ratios" in parts:
        print("native attention of one layer; ratio: second over first")
        tokens = PREFIX + DOCUMENTS * DOCUMENT + QUESTION
        pairs = {
            "question of 50 behind 12 x 500": (QUESTION, 1),
            "decode of 16 behind 12 x 500": (1, 16),
        }
        for name, (new, seqs) in pairs.items():
            of = {
                "plain": plain(tokens, new, seqs),
                "chunk-aware": asked(new, seqs),
                "calibrated": asked(new, seqs, weighed=True),
            }
            calls = {kind: attention(step, "cpu", dtype) for kind, step in of.items()}
            for first, second in (("plain", "chunk-aware"), ("chunk-aware", "calibrated")):
                compare(name, {first: calls[first], second: calls[second]}, args.rounds, LAYERS)
    if "products" in parts:
        print("products with the weights of Qwen3-0.6B; ratio: xla over native")
        for rows in (1, 2, 4, 8, 16, 32):
            for name in ("attention and MLP", "vocabulary"):
                calls = {"native": product(rows, name, native.multiply), "xla": product(rows, name, linear.dot)}
                compare(f"{rows} rows, {name}", calls, args.rounds)
    if "joined" in parts:
        print("native products of joined and of separate projections; ratio: apart over joined")
        for rows in (1, 8, 16):
            names = {"joined": "attention and MLP", "apart": "apart"}
            compare(f"{rows} rows", {kind: product(rows, name, native.multiply) for kind, name in names.items()}, args.rounds)
    if "readouts" in parts:
        print("maximum and sum of exponentials of 151,936 logits; ratio: xla over native")
        for rows in sampling.READ_BUCKETS:
            ways = {"native": normaliser, "xla": sampling.xla_normaliser}
            compare(f"{rows} rows", {name: readout(rows, way) for name, way in ways.items()}, args.rounds)
        few, many = sampling.READ_BUCKETS[-1], SAMPLE_BUCKETS[-1]
        print("labels of rows from their logits, in blocks; ratio: large over small")
        blocks = {f"{size} rows": labels_of_logits(few * many // 16, size) for size in (few, many)}
        compare(f"{few * many // 16} rows", blocks, args.rounds)
        if label_readout.serves(weights("vocabulary")[0]):
            print("labels of rows, from their hidden states; ratio: from logits over at once")
            for rows in (16, 48, 240):
                compare(f"{rows} rows", {"at once": labels_at_once(rows), "logits": labels_of_logits(rows)}, args.rounds)


if __name__ == "__main__":
    main()
