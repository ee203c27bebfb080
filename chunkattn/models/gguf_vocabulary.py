"""Vocabulary of a GGUF file: its tokens, their kinds, and the tokens that end a text, as llama.cpp reads them.

Source: `llama_vocab::impl::load` of https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chunkattn.models.gguf_file import GGUFFile
from chunkattn.models.sentencepiece_backend import CONTROL, NORMAL, USER_DEFINED

_NONE = (-1, 0xFFFFFFFF)
"""Ids that stand for no token."""
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Named special tokens: name in transformers, name in GGUF."""
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}
"""Ids of the special tokens of a SentencePiece vocabulary that names none."""

_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
    }
)
"""Texts of tokens that end a turn or a text, whatever their kind."""
_FILL_IN = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Tokens of fill-in-the-middle that end a text: name of the key, and the texts of such tokens in files without the key."""
_FILL_IN_PARTS = frozenset(
    {
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>"),
        *("<|code_prefix|>", "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>"),
        *("<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>", "<fim-middle>", "<fim_middle>"),
        *("<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
    }
)
"""Texts of tokens that are control tokens whatever their kind, and end no text."""
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Texts of tokens that are user-defined whatever their kind."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a GGUF file.

    Attributes:
        tokens: texts by id.
        kinds: kinds by id, as llama.cpp sees them.
        special: ids of the named special tokens that the file has, by transformers' name: bos, eos, unk, pad.
        end_ids: tokens that end a text, a turn or a message; the file's own end of text first.
    """

    tokens: list[str]
    kinds: list[int]
    special: Mapping[str, int]
    end_ids: tuple[int, ...]


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Return the vocabulary of a file, which is empty if the file has none.

    Args:
        file: opened GGUF file.

    Raises:
        ModelError: the vocabulary is damaged.
    """
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(file.array("tokenizer.ggml.tokens", str) or [])]
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) < len(tokens):
        i, text = next((i, text) for i, text in enumerate(tokens) if ids[text] != i)
        raise file.damaged(f"tokens {i} and {ids[text]} of tokenizer.ggml.tokens are both {text!r}")
    kinds = file.array("tokenizer.ggml.token_type", int, len(tokens)) or [NORMAL] * len(tokens)
    size = len(tokens) or file.shape("token_embd.weight")[0]
    by_key = {key: _special_id(file, key, size) for key in ("eot", "eom", *_FILL_IN)}
    special = {name: _special_id(file, key, size) for name, key in _SPECIAL.items()}
    if file.get("tokenizer.ggml.model", str) == "llama" and tokens:
        keys = {name: f"tokenizer.ggml.{_SPECIAL[name]}_token_id" for name in _SENTENCEPIECE_IDS}
        unnamed = {name for name, key in keys.items() if key not in file.metadata.values}
        special |= {name: i for name, i in _SENTENCEPIECE_IDS.items() if name in unnamed and i < size}
    control = {ids[text] for text in (_ENDS | _FILL_IN_PARTS) & ids.keys()}
    for key, texts in _FILL_IN.items():
        if by_key[key] is None and (present := next((text for text in texts if text in ids), None)) is not None:
            by_key[key] = ids[present]
            control.add(ids[present])
    by_text = sorted(ids[text] for text in _ENDS & ids.keys())
    ends = dict.fromkeys(i for i in (special["eos"], *by_key.values(), *by_text) if i is not None)
    changed = {**dict.fromkeys(control, CONTROL), **{ids[text]: USER_DEFINED for text in _ALWAYS_SHOWN if text in ids}}
    # In two families, a token of the list ends no turn.
    ended = {tokens[i] for i in ends} if tokens else set()
    harmony = ended & {"<|call|>", "<|calls|>"} and ended & {"<|return|>", "<|flush|>"}
    for text, exempt, kind in (("<|end|>", harmony, USER_DEFINED), ("</s>", ended & {"<|tool_response>"}, NORMAL)):
        if exempt and text in ended:
            ends.pop(ids[text])
            changed[ids[text]] = kind
    return Vocabulary(
        tokens=tokens,
        kinds=[changed.get(i, kind) for i, kind in enumerate(kinds)],
        special={name: i for name, i in special.items() if i is not None},
        end_ids=tuple(ends),
    )


def _special_id(file: GGUFFile, key: str, size: int) -> int | None:
    """Return the id of a named token, or None if the file has none.

    Raises:
        ModelError: the id is outside the vocabulary.
    """
    token_id = file.get(f"tokenizer.ggml.{key}_token_id", int)
    if token_id is None or token_id in _NONE:
        return None
    if not 0 <= token_id < size:
        raise file.damaged(f"tokenizer.ggml.{key}_token_id {token_id} is outside the {size} tokens of the vocabulary")
    return int(token_id)
