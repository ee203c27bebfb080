"""Sizes of the benchmarks, as options of their commands. This module imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chunkattn.errors import ConfigError
from chunkattn.terminal.flags import check_choice

CASES = ("prefill", "rag", "plain", "decode", "score")
DEFAULT_CASES = ("prefill", "rag", "decode", "score")
"""Cases that run unless others are named. The long prompts of `plain` take longer than all of them together."""
SPARE = 8
"""Tokens generated beyond those that are timed, because vLLM may start some sequences a few steps early."""
BLOCK = 16
"""Slots per page unless a benchmark is given another number."""


@dataclass(frozen=True)
class Setup:
    """Model and rounds of a benchmark.

    Attributes:
        geometry: model shape, with random weights: qwen3-0.6b, qwen3-30b-a3b or small.
        dtype: dtype of weights and K/V: float32 or bfloat16.
        block_size: tokens per KV page, a power of two; by default the engine's.
        repeats: number of timed rounds, after one round that compiles.
    """

    geometry: str = "small"
    dtype: str = "bfloat16"
    block_size: int | None = None
    repeats: int = 3

    def check(self, longest: int) -> None:
        """Check the model.

        Args:
            longest: tokens of the longest sequence.

        Raises:
            ConfigError: the geometry or dtype is unknown, or the model's positions end before the longest sequence.
        """
        check_geometry(self.geometry)
        check_choice("dtype", self.dtype, ("float32", "bfloat16"))
        from chunkattn.tools.bench.geometry import GEOMETRIES

        check_positions(self.geometry, longest, GEOMETRIES[self.geometry].max_position_embeddings)

    @property
    def page(self) -> int:
        """Return the tokens per KV page, where none are chosen the engine's."""
        from chunkattn.tools.bench.geometry import default_block_size

        return self.block_size or default_block_size(self.geometry)


@dataclass(frozen=True)
class FileOptions:
    """GGUF file of the weights.

    Attributes:
        model: GGUF file to measure instead of a geometry.
        gguf: quantisation of a random GGUF file of the geometry to measure, such as Q8_0 or Q4_K_M; by default no file.
    """

    model: Path | None = None
    gguf: str | None = None

    def check(self) -> None:
        """Check the file.

        Raises:
            ConfigError: there is no such file, the quantisation is unknown, or both are given.
        """
        if self.gguf is not None:
            from chunkattn.tools.bench.random_gguf import QUANTS

            if self.model is not None:
                raise ConfigError("--gguf writes a random file, and --model names one; give one of them")
            check_choice("quantisation", self.gguf, QUANTS)
        if self.model is not None and not self.model.is_file():
            raise ConfigError(f"--model must be a GGUF file; there is no file {self.model}")


@dataclass(frozen=True)
class PeerOptions:
    """Other libraries to measure.

    Attributes:
        peers: measure other libraries as well, in processes of their own.
        peer_python: Python interpreter with a peer installed; repeatable.
    """

    peers: bool = False
    peer_python: tuple[Path, ...] = ()


def check_geometry(name: str) -> None:
    """Check the name of a model shape.

    Raises:
        ConfigError: the name is unknown.
    """
    from chunkattn.tools.bench.geometry import GEOMETRIES

    check_choice("geometry", name, GEOMETRIES)


def check_positions(name: str, longest: int, limit: int) -> None:
    """Check that a model has enough positions.

    Args:
        name: name of the model in the error.
        longest: tokens of the longest sequence.
        limit: positions of the model.

    Raises:
        ConfigError: the model's positions end before the longest sequence.
    """
    if longest > limit:
        raise ConfigError(f"a sequence of {longest} tokens is longer than the {limit} of {name}")


@dataclass(frozen=True)
class ScoreWorkload:
    """Token counts of a scoring request.

    Attributes:
        query: tokens of the query.
        items: number of items.
        item_len: tokens per item.
    """

    query: int = 2000
    items: int = 500
    item_len: int = 20

    @property
    def name(self) -> str:
        """Return the sizes."""
        return f"query {self.query}, {self.items} x {self.item_len}"


@dataclass(frozen=True)
class Sizes:
    """Cases of `chunkattn bench gen`, and their token counts.

    Attributes:
        prefill: tokens of a plain prompt; repeatable.
        documents: number of documents.
        document_tokens: tokens per document.
        prefix_tokens: tokens of the prefix before the documents.
        question_tokens: tokens of the question after the documents.
        sequences: number of sequences that decode together; repeatable.
        prompt_tokens: tokens of the prompt of a sequence that decodes.
        decode_tokens: number of timed tokens of a sequence that decodes.
        query: tokens of the scoring query.
        items: number of items to score.
        item_len: tokens per item.
        case: prefill, rag, plain, decode or score; repeatable.
    """

    prefill: tuple[int, ...] = (2000, 6000)
    documents: int = 12
    document_tokens: int = 500
    prefix_tokens: int = 32
    question_tokens: int = 50
    sequences: tuple[int, ...] = (1, 16)
    prompt_tokens: int = 128
    decode_tokens: int = 32
    query: int = 2000
    items: int = 100
    item_len: int = 20
    case: tuple[str, ...] = DEFAULT_CASES

    def __post_init__(self) -> None:
        for name in self.case:
            check_choice("case", name, CASES)
        if self.documents < 2 or self.decode_tokens < 2:
            raise ConfigError("a new order needs at least 2 documents, and a decode rate at least 2 tokens")

    @property
    def score(self) -> ScoreWorkload:
        """Return the scoring request."""
        return ScoreWorkload(self.query, self.items, self.item_len)

    @property
    def rag_tokens(self) -> int:
        """Return the tokens of a prompt of documents."""
        return self.prefix_tokens + self.documents * self.document_tokens + self.question_tokens

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence, generated tokens included."""
        lengths = {
            "prefill": max(self.prefill) + 1,
            "rag": self.rag_tokens + 1,
            "plain": self.rag_tokens + 1,
            "decode": self.prompt_tokens + self.decode_tokens + SPARE,
            "score": self.query + self.item_len + 1,
        }
        return max(lengths[case] for case in self.case)

    def kv_tokens(self, page: int) -> int:
        """Return the size in tokens of a KV pool that runs the cases without eviction.

        Args:
            page: slots per page.
        """
        chunks = self.prefix_tokens + self.documents * (self.document_tokens + page)
        tokens = {
            "prefill": max(self.prefill) + 2 * page,
            "rag": chunks + 2 * (self.question_tokens + 2 * page),  # the documents stay, and two questions follow
            "plain": 2 * (self.rag_tokens + page),  # the prompt of the first order stays
            "decode": max(self.sequences) * (self.prompt_tokens + self.decode_tokens + SPARE + page),
            # A pack has a quarter of the pool.
            "score": min(pool_tokens(self.query), 4 * (self.query + self.items * (self.item_len + page))),
        }
        return max(tokens[case] for case in self.case)


def pool_tokens(query: int, budget: int = 2048) -> int:
    """Return the size in tokens of a KV pool that holds packs of full length after a query.

    Args:
        query: tokens of the query.
        budget: token budget of a step.
    """
    return 4 * max(8192, 4 * query, budget)
