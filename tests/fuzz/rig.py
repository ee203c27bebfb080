"""The engine under test: a tiny checkpoint and a `Runner` that serves engine after engine.

A new `EngineCore` on the same `Runner` has an empty pool, trie and scheduler, like a new process, and compiles nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from chunkattn.backends.cpu.recurrence import NativeRecurrence
from chunkattn.backends.xla_recurrence import XlaRecurrence
from chunkattn.cache.disk.store import MIN_BYTES, KVStore
from chunkattn.calls.frontend import Frontend
from chunkattn.config import make_config
from chunkattn.engine import runner as engine_runner
from chunkattn.engine.build import build_core
from chunkattn.engine.core import EngineCore
from chunkattn.engine.disk_tier import DiskTier
from chunkattn.engine.vocabulary import Vocabulary
from chunkattn.models.decoder import Decoder
from chunkattn.models.families import spec_from_config
from chunkattn.models.loader import open_files
from chunkattn.models.weights import save_weights

POSITIONS = {"shared": ("shared", 0), "offset": ("offset", 0), "gap 5": ("shared", 5), "gap 23": ("shared", 23)}
"""Position strategy and chunk gap of an engine, by the name that a report gives."""
PAGES = 48
"""Pages of the pool: a few prompts fill it, so pages are evicted and requests preempted."""
VOCAB = 128
WORDS = 120
"""Token ids below this are words, `w0` and so on; the ids above are the other tokens of `VOCABULARY`."""
LETTERS = "ABCD"
"""Letters that are one token; a question with more options is asked by their likelihood."""
VOCABULARY = [f"w{i}" for i in range(WORDS)] + [*LETTERS, "unk", "yes", "no", "#"]
"""Text of every token id: words, labels of decisions, any other word, labels of decisions and of reranking, the separator."""
TEXTS = Vocabulary(tuple(text.encode() for text in VOCABULARY), ())
UNKNOWN_ID = VOCABULARY.index("unk")
SEPARATOR_ID = VOCAB - 1

FORMS = {"native": NativeRecurrence, "xla": XlaRecurrence}
"""Forms of recurrent layers."""
TRACKS = ((1, 4), (1, 5), (2, 7), (2, 9), (4, 11), (6, 15), (6, 24))
"""Seats and slots of an engine, from the fewest that `state_cache_memory_bytes` may give to the most of the rig."""
_LAYERS, _KV_HEADS = 2, 2
_RECURRENT = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_theta": 1e4,
        "rope_type": "default",
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
_UNWRITTEN = 3.0
"""Value in every slot and seat that no step has written."""
_OPTIONS = {
    "max_num_seqs": 6,
    "max_logprobs": 4,
    "enable_chunk_aware": True,
    "document_template": "{document}",
    "rerank_template": "plain",
}


@dataclass(frozen=True)
class Subject:
    """An attention backend to fuzz, with sizes that it serves. All lengths follow from the page.

    Attributes:
        backend: name of the backend.
        block: tokens of a page: few, so that short prompts have many page boundaries.
        head_dim: size of a head.
        dtype: dtype of weights, activations and K/V.
        tolerance: tolerance of log-probabilities.
        router_tolerance: tolerance of the logits by which experts are chosen.
        quantization: rounding of the weights at the load.
        window: sliding window of the last layer; None for full attention in all.
        experts: number of experts of a layer; None for layers with an MLP.
        recurrence: form of the recurrent layers, one of `FORMS`; None for a model without such layers.
        step: pages of a step's tokens.
    """

    backend: str = "auto"
    block: int = 4
    head_dim: int = 32
    dtype: str = "float32"
    tolerance: float = 1e-4
    router_tolerance: float = 1e-4
    quantization: str | None = None
    window: int | None = None
    experts: int | None = None
    recurrence: str | None = None
    step: int = 8

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of an engine under test."""
        layers = _LAYERS if self.recurrence is None else 1
        page = 2 * layers * _KV_HEADS * self.head_dim * jnp.dtype(self.dtype).itemsize * self.block
        return {
            **_OPTIONS,
            "attention_backend": self.backend,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "block_size": self.block,
            "max_num_batched_tokens": self.step * self.block,
            "kv_cache_memory_bytes": PAGES * page,
        }


SUBJECTS = {
    "auto": Subject(),
    "auto bfloat16": Subject(dtype="bfloat16", tolerance=0.2),
    "auto float16": Subject(dtype="float16", tolerance=0.02),
    "auto packed": Subject(tolerance=5e-3, quantization="int8"),
    "xla": Subject("xla"),
    "xla bfloat16": Subject("xla", dtype="bfloat16", tolerance=0.2),
    "xla float16": Subject("xla", dtype="float16", tolerance=0.02),
    "reference": Subject("reference"),
    "pallas_gpu": Subject("pallas_gpu", 16, 64, "float16", 0.02),
    "auto window": Subject(window=11),
    "auto window bfloat16": Subject(dtype="bfloat16", tolerance=0.2, window=11),
    "xla window": Subject("xla", window=11),
    "auto experts": Subject(experts=8),
    "auto experts bfloat16": Subject(dtype="bfloat16", tolerance=0.2, router_tolerance=0.06, experts=8),
    "auto experts packed": Subject(tolerance=5e-3, router_tolerance=1e-3, quantization="int8", experts=8),
    "recurrent": Subject(block=16, recurrence="native", step=5),
    "recurrent bfloat16": Subject(block=16, dtype="bfloat16", tolerance=0.2, recurrence="native", step=5),
    "recurrent xla": Subject(block=16, recurrence="xla", step=5),
    "recurrent pages": Subject(block=128, recurrence="native", step=1),
    "recurrent experts": Subject(block=16, experts=8, recurrence="native", step=5),
}
"""By the name of the backend, with the dtype where it is not the first, and `window` or `experts` for models with them.

A page of recurrent subjects has 16 tokens, so that prompts have several blocks of the chunkwise form, or 128, so that such a
block ends inside a page.
"""


def make_model(folder: Path, subject: Subject) -> Path:
    """Save a random checkpoint of two layers with a tokenizer of one word a token.

    Two layers are the fewest whose K/V depends on the tokens before; with one, a wrong neighbour would go unseen. No
    parameter has a trivial value. The rounding of a quantised subject changes none. A model with recurrent layers has attention
    between two of them.
    """
    if subject.recurrence is not None:
        _save_recurrent(folder, subject)
        return _save_tokenizer(folder)
    family, name = (Qwen3Config, "Qwen3ForCausalLM") if subject.experts is None else (Qwen3MoeConfig, "Qwen3MoeForCausalLM")
    own = {"num_experts": subject.experts, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = family(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=_KV_HEADS,
        head_dim=subject.head_dim,
        max_position_embeddings=64 * subject.block,
        tie_word_embeddings=True,
        architectures=[name],
        use_sliding_window=subject.window is not None,
        sliding_window=subject.window,
        max_window_layers=_LAYERS - 1,
        **(own if subject.experts else {}),
    )
    spec, rng = spec_from_config(config), np.random.default_rng(0)
    drawn = {
        parameter: 0.15 * rng.standard_normal(shape) if len(shape) > 1 else 1 + 0.1 * rng.standard_normal(shape)
        for parameter, shape in sorted(spec.parameters().items())
    }
    if subject.quantization:
        drawn = {name: _rounded(x) if x.ndim > 1 else x for name, x in drawn.items()}
    weights = {name: jnp.asarray(x, jnp.float32) for name, x in drawn.items()}
    save_weights(Decoder(spec, weights, jnp.dtype("float32")), folder)
    config.save_pretrained(folder)
    return _save_tokenizer(folder)


def _save_recurrent(folder: Path, subject: Subject) -> None:
    from tests.checkpoints import make_checkpoint  # needs PyTorch, as the other models do not

    family: type[PretrainedConfig] = Qwen3_5TextConfig if subject.experts is None else Qwen3_5MoeTextConfig
    own = {
        "num_experts": subject.experts,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 48,
    }
    config = family(
        vocab_size=VOCAB,
        hidden_size=64,
        **({"intermediate_size": 96} if subject.experts is None else own),
        num_attention_heads=4,
        num_key_value_heads=_KV_HEADS,
        head_dim=subject.head_dim,
        max_position_embeddings=64 * subject.block,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **_RECURRENT,
    )
    make_checkpoint(config, folder)


def _save_tokenizer(folder: Path) -> Path:
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="unk"))
    backend.pre_tokenizer = WhitespaceSplit()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="unk", chat_template=template).save_pretrained(folder)
    return folder


def _rounded(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix in the values of blocks of 8 bits."""
    kind = gguf.GGMLQuantizationType.Q8_0
    return gguf.quants.dequantize(gguf.quants.quantize(np.float32(matrix), kind), kind)


def words(ids: list[int] | tuple[int, ...]) -> str:
    """Text whose tokens are `ids`. A text that must hold no control token has only ids below `WORDS`."""
    return " ".join(VOCABULARY[i] for i in ids)


def read(text: str) -> tuple[int, ...]:
    """Token ids of a text."""
    return tuple(VOCABULARY.index(word) if word in VOCABULARY else UNKNOWN_ID for word in text.split())


class Rig:
    """Builds engines over one `Runner`, and a `Frontend` for each of `POSITIONS`.

    Args:
        model: folder of `make_model`.
        subject: backend and sizes.
        pages: pages of the pool.
        changes: other options of the engine.

    Attributes:
        block: tokens of a page.
        frontends: by name in `POSITIONS`.
        recurrent: whether the model has recurrent layers.
        lengths: values of `max_tokens`. With experts, a prompt and its text fit a step, as the witness takes over their choice.
        long: values of `max_tokens` of texts that take several runs of decodes; with experts, as many as fit.
    """

    def __init__(self, model: Path, subject: Subject, pages: int = PAGES, **changes: Any) -> None:
        self.block = subject.block
        options = subject.options | changes
        options["kv_cache_memory_bytes"] = options["kv_cache_memory_bytes"] // PAGES * pages
        self._configs = {
            name: make_config(str(model), {**options, "position_strategy": strategy, "chunk_position_gap": gap})
            for name, (strategy, gap) in POSITIONS.items()
        }
        files = open_files(self._configs["shared"])
        with forced(subject.recurrence):
            first = build_core(self._configs["shared"], files)
        if (states := first.runner.states) is not None:
            assert type(states.recurrence) is FORMS[subject.recurrence or ""]
            assert (states.num_seats, states.num_slots) == TRACKS[-1]
        assert first.limits.num_pages == pages
        self.recurrent = subject.recurrence is not None
        self.lengths = (1, 1, 2, 3, 5, 8) if subject.experts else (1, 1, 2, 5, 9, 20)
        self.long = self.lengths[-1:] if subject.experts else (17, 24, 36)
        self._runner, self._max_model_len, self._files = first.runner, first.limits.max_model_len, files
        self.frontends = {name: Frontend(config, files) for name, config in self._configs.items()}

    def caching(self) -> Rig:
        """Return a rig over the same runner whose engines have a cache."""
        made = copy(self)
        made._configs = {name: replace(config, enable_prefix_caching=True) for name, config in self._configs.items()}
        made.frontends = {name: Frontend(config, self._files) for name, config in made._configs.items()}
        return made

    def start(
        self,
        positions: str,
        store: Path | None,
        tracks: tuple[int, int] | None = None,
        threshold: int | None = None,
        steps: int = 1,
    ) -> EngineCore:
        """Return a new engine with an empty pool.

        Args:
            positions: name in `POSITIONS`.
            store: folder of the K/V store; None for none.
            tracks: seats and slots of recurrent layers, one of `TRACKS`; None for all.
            threshold: `long_prefill_token_threshold`.
            steps: `num_scheduler_steps`; a run has as many as it may, however long they take.
        """
        self._runner.reset()
        disk = None if store is None else DiskTier(KVStore(store, max_bytes=MIN_BYTES), self._runner)
        config = replace(self._configs[positions], long_prefill_token_threshold=threshold, num_scheduler_steps=steps)
        if (pool := self._runner.states) is None:
            core = EngineCore(self._runner, config, self._max_model_len, disk)
        else:
            pool.caches = jax.tree.map(lambda x: jnp.full_like(x, _UNWRITTEN), pool.caches)
            seats, slots = tracks or (pool.num_seats, pool.num_slots)
            with patch.multiple(pool, num_seats=seats, num_slots=slots):
                core = EngineCore(self._runner, config, self._max_model_len, disk)
        core.runs.limit_s, core.runs.first, core.runs.least = math.inf, steps, 1
        self.frontends[positions].connect(core.limits)
        self.frontends[positions].__dict__["vocabulary"] = TEXTS  # that of a tokenizer of words cannot be read
        core.shapes.know(TEXTS)
        return core


@contextmanager
def forced(recurrence: str | None) -> Iterator[None]:
    """Have engines compute recurrent layers in one of `FORMS`; None leaves the choice to them."""
    if recurrence is None:
        yield
        return
    with patch.object(engine_runner, "make_recurrence", FORMS[recurrence]):
        yield
