"""Tokenizer of a GGUF file, with llama.cpp's token ids.

Source: `llama_vocab` of https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chunkattn.errors import ModelError
from chunkattn.models.gguf_file import GGUFFile
from chunkattn.models.gguf_vocabulary import Vocabulary, read_vocabulary
from chunkattn.models.sentencepiece_backend import CONTROL, UNKNOWN, USER_DEFINED, Pieces, sentencepiece_backend

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_SIGN = r"[^\r\n\p{L}\p{N}]?"


def _cased(ending: str, digits: str) -> str:
    """Return the pattern that begins a piece at a capital, with an ending behind words and a pattern of digits."""
    words = rf"{_SIGN}{_UPPER}*{_LOWER}+{ending}|{_SIGN}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"


_TEKKEN = _cased("", r"\p{N}")
_GPT4O = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_QWEN35 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
_SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(_LLAMA3_NAMES, (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie"), (_GPT4O,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
}
"""Patterns that split a text one after another, by `tokenizer.ggml.pre`."""
_BOS_BY_DEFAULT = (*_LLAMA3_NAMES, "tekken")
"""Values of `tokenizer.ggml.pre` with which BOS comes first if the file does not say, and a word in the vocabulary is taken
whole before merges."""

_ADVICE = "pass tokenizer=... with the folder or hub id of the original model, or skip_tokenizer_init=True for token ids only"


def tokenizer_from_gguf(file: GGUFFile) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file, with its special tokens and chat template.

    Args:
        file: opened GGUF file.

    Raises:
        ModelError: the file has no tokenizer, or one whose ids cannot be reproduced.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    model = file.get("tokenizer.ggml.model", str)
    if model is None:
        raise ModelError(f"{file.path} has no tokenizer; {_ADVICE}")
    if model not in ("gpt2", "llama"):
        raise file.fault(f"tokenizer {model!r} is not supported; supported are gpt2 and llama. {_ADVICE}")
    vocabulary = read_vocabulary(file)
    if not vocabulary.tokens:
        raise file.fault(f"tokenizer.ggml.tokens is missing or empty; {_ADVICE}")
    if len(vocabulary.tokens) > (rows := file.shape("token_embd.weight")[0]):
        raise file.fault(f"{len(vocabulary.tokens)} tokens exceed the {rows} rows of the embedding; {_ADVICE}")
    pre = file.get("tokenizer.ggml.pre", str)
    try:
        backend = _bpe(file, vocabulary, pre) if model == "gpt2" else _sentencepiece(file, vocabulary)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library has no errors of its own
        raise file.fault(f"the tokenizer cannot be converted ({error}); {_ADVICE}") from error
    added = {
        i: AddedToken(text, normalized=False, special=kind != USER_DEFINED, rstrip=_takes_spaces(file, text))
        for i, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    }
    backend.add_tokens(list(added.values()))
    named = {f"{name}_token": added.get(i, vocabulary.tokens[i]) for name, i in vocabulary.special.items()}
    adds_bos = file.get("tokenizer.ggml.add_bos_token", bool, model == "llama" or pre in _BOS_BY_DEFAULT)
    if adds_bos and model == "gpt2" and "tokenizer.ggml.bos_token_id" not in file.metadata.values:
        raise file.fault(f"BOS comes first, but tokenizer.ggml.bos_token_id is missing; {_ADVICE}")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=adds_bos and "bos_token" in named,
        add_eos_token=False,
        chat_template=file.get("tokenizer.chat_template", str),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _bpe(file: GGUFFile, vocabulary: Vocabulary, pre: str | None) -> Tokenizer:
    """Return a byte-level BPE without added tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if pre not in _SPLITS:
        known = ", ".join(sorted(_SPLITS))
        raise file.fault(f"tokenizer.ggml.pre {pre!r} is not among the supported {known}; {_ADVICE}")
    merges = file.array("tokenizer.ggml.merges", str)
    if merges is None:
        raise file.fault(f"tokenizer.ggml.merges is missing; {_ADVICE}")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: i for i, text in enumerate(vocabulary.tokens)},
            merges=[_pair(merge) for merge in merges],
            ignore_merges=pre in _BOS_BY_DEFAULT,
        )
    )
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    """Return the two parts of a merge. The first space after the first character separates them."""
    place = merge.index(" ", 1)
    return merge[:place], merge[place + 1 :]


def _sentencepiece(file: GGUFFile, vocabulary: Vocabulary) -> Tokenizer:
    """Return a SentencePiece BPE without added tokens. llama.cpp puts its dummy prefix behind every added token, too."""
    size = len(vocabulary.tokens)
    scores = file.array("tokenizer.ggml.scores", float, size) or [0.0] * size
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    return sentencepiece_backend(
        Pieces(
            vocabulary.tokens,
            scores,
            vocabulary.kinds,
            mergeable=frozenset(vocabulary.kinds) - {UNKNOWN, CONTROL, USER_DEFINED},
            dummy_prefix="always" if prefix else "never",
        )
    )


def _takes_spaces(file: GGUFFile, text: str) -> bool:
    """Return whether an added token takes the white space behind it, as those of Phi-3 do."""
    name = file.get("general.name", str, "").lower()
    return ("phi-3" in name or "phi3" in name) and text not in ("<unk>", "<s>", "<|endoftext|>")
