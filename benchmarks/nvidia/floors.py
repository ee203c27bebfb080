"""Floors and predictions of an engine's work on a GPU, from its bytes, products and launches.

    python -m benchmarks.nvidia.floors [--geometry qwen3-0.6b] [--read-tb-s 2.74] [--matmul-tflops 673]

The floor of a decode is the time to read weights and K/V once, at the rate that the card reaches. The floor of other work is
that time or the time of its products, whichever is longer. The prediction adds what the engine's programs do beside:

- bytes move at 0.85 of the card's rate
- a layer's rows pass through memory between its kernels
- products, bytes and launches do not overlap
- every launch takes 1.3 us

Counts of launches and of rows' bytes are those of `benchmarks.gpu_aot --only launches` for Qwen3-0.6B. The host's time is not
in the prediction.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

from chunkattn.models.spec import DecoderSpec
from chunkattn.tools.bench.geometry import GEOMETRIES, spec_of
from chunkattn.tools.bench.sizes import SPARE, Sizes

SIZES = Sizes(case=("rag", "decode", "score"), sequences=(1, 16, 64), prompt_tokens=80, decode_tokens=128, items=500)
"""Work that is predicted by default: sequences have 150 tokens on average."""
COPY_SHARE = 0.85
"""Share of the card's rate of reads that a program with several kernels reaches."""
LAUNCH_S = 1.3e-6
"""Seconds of a launch inside a CUDA graph."""
LAUNCHES_A_LAYER, LAUNCHES_BESIDE = 10, 30
"""Launches of a layer, and of embedding, head and choice, in a run without draws."""
STEP_ROWS = 2048
"""Rows of a step of a long prompt."""
_ROW_BYTES = 112
"""Bytes that a row moves between the kernels of a layer, for each element of its hidden state."""
_ITEM = 2
"""Bytes of a bfloat16."""


@dataclass(frozen=True)
class Rates:
    """Rates that a card reaches: bytes per second read, and FLOP/s of matrix products."""

    read_bytes_per_s: float
    matmul_flops: float


@dataclass(frozen=True)
class Figure:
    """Best and expected figure of a case, in its unit: `s`, `tok/s` or `items/s`. `name` is that of `GenCase`."""

    name: str
    unit: str
    floor: float
    predicted: float


@dataclass(frozen=True)
class Work:
    """Work of the device.

    Attributes:
        rows: rows that the layers compute.
        pairs: visible pairs of a row and a slot.
        picked: rows that the head computes.
        kv_tokens: tokens whose K/V is read.
    """

    rows: int
    pairs: int
    picked: int
    kv_tokens: int


class Floors:
    """Floors and predictions of a model in bfloat16 on a card.

    Args:
        spec: shape of the model.
        rates: rates of the card.
    """

    def __init__(self, spec: DecoderSpec, rates: Rates) -> None:
        self._spec, self._rates = spec, rates
        mixers = spec.attention.values()
        self.weight_bytes = _ITEM * sum(math.prod(shape) for shape in spec.parameters().values())
        self.token_bytes = _ITEM * sum(2 * mixer.num_kv_heads * mixer.head_dim for mixer in mixers)
        self.launches = LAUNCHES_A_LAYER * len(spec.layers) + LAUNCHES_BESIDE
        self._row_flops = 2 * sum(layer.row_products(spec.hidden_size) for layer in spec.layers)
        self._pair_flops = 4 * sum(mixer.num_heads * mixer.head_dim for mixer in mixers)

    def seconds(self, work: Work) -> tuple[float, float]:
        """Return the floor and the prediction of some work in seconds."""
        spec, rates, steps = self._spec, self._rates, -(-work.rows // STEP_ROWS)
        products = work.rows * self._row_flops + work.pairs * self._pair_flops
        products_s = (products + 2 * work.picked * spec.hidden_size * spec.vocab_size) / rates.matmul_flops
        kept = self.weight_bytes + work.kv_tokens * self.token_bytes
        moved = kept + (steps - 1) * self.weight_bytes + _ROW_BYTES * spec.hidden_size * len(spec.layers) * work.rows
        predicted = moved / (COPY_SHARE * rates.read_bytes_per_s) + products_s + steps * self.launches * LAUNCH_S
        return max(kept / rates.read_bytes_per_s, products_s), predicted

    def decode(self, sequences: int, context: int) -> Figure:
        """Return the tokens per second of sequences that decode together.

        Args:
            sequences: number of sequences.
            context: tokens of each.
        """
        kept = self.weight_bytes + sequences * context * self.token_bytes
        rate = self._rates.read_bytes_per_s
        seconds = kept / (COPY_SHARE * rate) + self.launches * LAUNCH_S
        return Figure(f"decode {sequences}", "tok/s", sequences * rate / kept, sequences / seconds)

    def figures(self, sizes: Sizes) -> Iterator[Figure]:
        """Yield the figures of the cases of documents, decode and scores."""
        if "rag" in sizes.case:
            for state, work in (("cold", cold(sizes)), ("warm", warm(sizes))):
                name = f"rag {state} {sizes.documents} x {sizes.document_tokens} + {sizes.question_tokens}"
                yield Figure(name, "s", *self.seconds(work))
        if "decode" in sizes.case:
            for sequences in sizes.sequences:
                yield self.decode(sequences, context_of(sizes))
        if "score" in sizes.case:
            floor, predicted = self.seconds(scores(sizes))
            name = f"score {sizes.query} + {sizes.items} x {sizes.item_len}"
            yield Figure(name, "items/s", sizes.items / floor, sizes.items / predicted)


def context_of(sizes: Sizes) -> int:
    """Return the tokens of a sequence that decodes, on average."""
    return sizes.prompt_tokens + (sizes.decode_tokens + SPARE + 2) // 2


def cold(sizes: Sizes) -> Work:
    """Return the work of a prompt of documents that do not see each other."""
    prefix, size, question = sizes.prefix_tokens, sizes.document_tokens, sizes.question_tokens
    pairs = _causal(prefix) + sizes.documents * (_causal(size) + size * prefix) + warm(sizes).pairs
    return Work(prefix + sizes.documents * size + question, pairs, 1, 0)


def warm(sizes: Sizes) -> Work:
    """Return the work of a question behind cached documents."""
    cached, question = sizes.prefix_tokens + sizes.documents * sizes.document_tokens, sizes.question_tokens
    return Work(question, _causal(question) + question * cached, 1, cached)


def scores(sizes: Sizes) -> Work:
    """Return the work of items behind one query."""
    rows = sizes.items * sizes.item_len
    pairs = _causal(sizes.query) + sizes.items * _causal(sizes.item_len) + rows * sizes.query
    return Work(sizes.query + rows, pairs, sizes.items, 0)


def _causal(rows: int) -> int:
    """Return the pairs of rows that see themselves and those before."""
    return rows * (rows + 1) // 2


def in_unit(value: float, unit: str) -> str:
    """Return a figure as text; seconds become milliseconds."""
    return f"{1000 * value:.3g} ms" if unit == "s" else f"{float(f'{value:.4g}'):,.0f} {unit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-0.6b", help="shape of the model")
    parser.add_argument("--read-tb-s", type=float, default=2.74, help="rate of reads in TB/s; default: an H100's")
    parser.add_argument("--matmul-tflops", type=float, default=673.0, help="rate of products in TFLOP/s; default: an H100's")
    args = parser.parse_args()
    floors = Floors(spec_of(args.geometry), Rates(1e12 * args.read_tb_s, 1e12 * args.matmul_tflops))
    weights = f"{floors.weight_bytes / 1e9:.2f} GB of weights"
    print(
        f"{weights}, {floors.token_bytes:,} bytes of K/V a token, {floors.launches} launches, contexts of {context_of(SIZES)}"
    )
    for figure in floors.figures(SIZES):
        floor, predicted = (in_unit(value, figure.unit) for value in (figure.floor, figure.predicted))
        print(f"{figure.name}: floor {floor}, predicted {predicted}")


if __name__ == "__main__":
    main()
