"""The engine under test: a tiny checkpoint and a `Runner` that serves engine after engine.

A new `EngineCore` on the same `Runner` has an empty pool, trie and scheduler, like a new process, and compiles nothing.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config

from chunkattn.cache.disk.store import MIN_BYTES, KVStore
from chunkattn.calls.frontend import Frontend
from chunkattn.config import make_config
from chunkattn.engine.build import build_core
from chunkattn.engine.core import EngineCore
from chunkattn.engine.disk_tier import DiskTier
from chunkattn.models.loader import open_files
from tests.checkpoints import _SHAPE, VOCAB, make_checkpoint

POSITIONS = {"shared": ("shared", 0), "offset": ("offset", 0), "gap 5": ("shared", 5), "gap 23": ("shared", 23)}
"""Position strategy and chunk gap of an engine, by the name that a report gives."""
BLOCK = 4
"""Tokens of a page: small, so that short prompts have many page boundaries."""
PAGES = 48
"""Pages of the pool: a few prompts fill it, so pages are evicted and requests preempted."""
WORDS = 120
"""Token ids below this are words, `w0` and so on; the ids above are `unk`, the rerank labels and the separator."""
SEPARATOR_ID = VOCAB - 1

_OPTIONS = {
    "block_size": BLOCK,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 6,
    "max_multi_item_seq_len": 48,
    "max_logprobs": 4,
    "enable_chunk_aware": True,
    "document_template": "{document}",
}


def make_model(folder: Path) -> Path:
    """Save a random checkpoint of two layers with a tokenizer of one word a token.

    Two layers are the fewest whose K/V depends on the tokens before; with one, a wrong neighbour would go unseen.
    """
    config = Qwen3Config(**{**_SHAPE, "num_hidden_layers": 2}, head_dim=32, tie_word_embeddings=True)
    make_checkpoint(config, folder)
    words = [f"w{i}" for i in range(VOCAB - 4)] + ["unk", "yes", "no", "#"]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="unk"))
    backend.pre_tokenizer = WhitespaceSplit()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="unk", chat_template=template).save_pretrained(folder)
    return folder


def words(ids: list[int] | tuple[int, ...]) -> str:
    """Text whose tokens are `ids`, all below `WORDS`."""
    return " ".join(f"w{i}" for i in ids)


class Rig:
    """Builds engines over one `Runner`, and a `Frontend` for each of `POSITIONS`.

    Args:
        model: folder of `make_model`.

    Attributes:
        frontends: by name in `POSITIONS`.
    """

    def __init__(self, model: Path) -> None:
        page = 2 * 2 * 2 * 32 * 4 * BLOCK  # K and V, layers, heads, head_dim, float32
        options = _OPTIONS | {"kv_cache_memory_bytes": PAGES * page}
        self._configs = {
            name: make_config(str(model), {**options, "position_strategy": strategy, "chunk_position_gap": gap})
            for name, (strategy, gap) in POSITIONS.items()
        }
        files = open_files(self._configs["shared"])
        first = build_core(self._configs["shared"], files)
        assert first.limits.num_pages == PAGES
        self._runner, self._max_model_len = first.runner, first.limits.max_model_len
        self.frontends = {name: Frontend(config, files) for name, config in self._configs.items()}

    def start(self, positions: str, store: Path | None) -> EngineCore:
        """Return a new engine with an empty pool, over the K/V store in a folder if one is given."""
        self._runner.pool.reset()
        disk = None if store is None else DiskTier(KVStore(store, max_bytes=MIN_BYTES), self._runner)
        core = EngineCore(self._runner, self._configs[positions], self._max_model_len, disk)
        self.frontends[positions].connect(core.limits)
        return core
