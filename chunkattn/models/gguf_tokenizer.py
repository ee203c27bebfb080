"""Tokenizer of a GGUF file, through transformers' conversion."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from chunkattn.errors import ModelError
from chunkattn.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens in `tokenizer.ggml.token_type`."""

_BOS_BY_DEFAULT = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken")
"""Values of `tokenizer.ggml.pre` with which llama.cpp puts BOS first if the file does not say, and takes whole words of the
vocabulary before it merges."""

_MORE_SPLITS = ("gpt-2", "smollm")
"""Values of `tokenizer.ggml.pre` that are read besides those that transformers knows."""

_ADVICE = "pass tokenizer=... with the folder or hub id of the original model, or skip_tokenizer_init=True for token ids only"


def tokenizer_from_gguf(file: GGUFFile) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file, with its special tokens and chat template.

    Args:
        file: opened GGUF file.

    Raises:
        ModelError: the file has no tokenizer, or one that cannot be converted exactly.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer

    stored = _stored(file)
    tokens, model, pre = stored["tokens"], stored["tokenizer_type"], stored.get("pre_tokenizer_type")
    try:
        backend, _ = convert_gguf_tokenizer(file.need("general.architecture", str), stored)
    except Exception as error:  # the conversion indexes and splits what the file holds
        raise ModelError(f"{file.path}: the tokenizer cannot be converted ({error}); {_ADVICE}") from error
    if model == "gpt2":
        _set_splits(backend, pre)
    elif not stored.get("add_prefix_space", True):
        _drop_leading_space(backend)
    backend = _with_added_tokens(backend, stored)
    default_bos = model == "llama" or pre in _BOS_BY_DEFAULT
    named = {f"{kind}_token": None if (i := stored.get(f"{kind}_token_id")) is None else tokens[i] for kind in _NAMED}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=file.get("tokenizer.ggml.add_bos_token", bool, default_bos) and named["bos_token"] is not None,
        add_eos_token=False,
        chat_template=file.get("tokenizer.chat_template", str),
        clean_up_tokenization_spaces=False,
        **named,
    )


_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Named special tokens: name in transformers, name in GGUF."""


def _stored(file: GGUFFile) -> dict[str, Any]:
    """Return what the file holds about its tokenizer, under the names that transformers' conversion takes."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    model = file.get("tokenizer.ggml.model", str)
    if model is None:
        raise ModelError(f"{file.path} has no tokenizer; {_ADVICE}")
    if model not in ("gpt2", "llama"):
        raise ModelError(f"{file.path}: tokenizer {model!r} is not supported; supported are gpt2 and llama. {_ADVICE}")
    pre = file.get("tokenizer.ggml.pre", str)
    known = sorted({*GGUF_PRE_TOKENIZER_SPLITS, *_MORE_SPLITS})
    if model == "gpt2" and pre not in known:
        raise ModelError(f"{file.path}: tokenizer.ggml.pre {pre!r} is not among the supported {', '.join(known)}; {_ADVICE}")
    stored = {
        "tokenizer_type": model,
        "pre_tokenizer_type": pre,
        "tokens": file.need("tokenizer.ggml.tokens", list),
        "token_type": file.get("tokenizer.ggml.token_type", list, []),
        "scores": file.get("tokenizer.ggml.scores", list),
        "merges": file.get("tokenizer.ggml.merges", list),
        "add_prefix_space": file.get("tokenizer.ggml.add_space_prefix", bool),
        **{f"{kind}_token_id": file.get(f"tokenizer.ggml.{name}_token_id", int) for kind, name in _NAMED.items()},
    }
    size = len(stored["tokens"])
    for name in ("token_type", "scores"):
        if stored[name] and len(stored[name]) != size:
            raise ModelError(
                f"{file.path}: tokenizer.ggml.{name} has {len(stored[name])} entries for {size} tokens; get it again"
            )
    if model == "gpt2" and stored["merges"] is None:
        raise ModelError(f"{file.path}: tokenizer.ggml.merges is missing; {_ADVICE}")
    if size > file.shape("token_embd.weight")[0]:
        raise ModelError(f"{file.path}: {size} tokens exceed the {file.shape('token_embd.weight')[0]} rows of the embedding")
    for kind in _NAMED:
        if (token_id := stored[f"{kind}_token_id"]) is not None and token_id >= size:
            raise ModelError(f"{file.path}: tokenizer.ggml.{_NAMED[kind]}_token_id {token_id} is beyond the {size} tokens")
    return {key: value for key, value in stored.items() if value is not None}


def _set_splits(backend: Tokenizer, pre: str | None) -> None:
    """Split and normalise texts as the original tokenizer does, where transformers' conversion does not."""
    from tokenizers import normalizers, pre_tokenizers

    if pre == "smollm":
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    if pre in _BOS_BY_DEFAULT:
        backend.model.ignore_merges = True


def _with_added_tokens(backend: Tokenizer, stored: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer with exactly the added tokens of the file.

    transformers' conversion spells tokens outside the byte alphabet, such as DeepSeek's, in bytes and does not add them, so
    no chat template reaches them. It adds the defaults of its tokenizer classes, such as `<|endoftext|>`, beyond the
    vocabulary where the file lacks them.
    """
    from tokenizers import AddedToken, Tokenizer

    size = len(stored["tokens"])
    missing = [
        (i, token, kind == _CONTROL)
        for i, (token, kind) in enumerate(zip(stored["tokens"], stored.get("token_type", ())))
        if kind in (_CONTROL, _USER_DEFINED) and backend.token_to_id(token) is None
    ]
    if not missing and backend.get_vocab_size(with_added_tokens=True) <= size:
        return backend
    document = json.loads(backend.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < size]
    vocabulary = document["model"]["vocab"]
    spelled = {i: text for text, i in vocabulary.items()}
    for i, token, _ in missing:
        del vocabulary[spelled[i]]
        vocabulary[token] = i
    changed = Tokenizer.from_str(json.dumps(document))
    for special in (True, False):
        added = [AddedToken(token, normalized=False, special=special) for _, token, control in missing if control == special]
        (changed.add_special_tokens if special else changed.add_tokens)(added)
    return changed


def _drop_leading_space(backend: Tokenizer) -> None:
    """Put no space before a text, and take none away from decoded texts."""
    from tokenizers import decoders, pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
