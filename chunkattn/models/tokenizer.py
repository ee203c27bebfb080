"""Tokenizer of a folder, a GGUF file or a hub id.

transformers chooses a class by names in `tokenizer_config.json` and `config.json`, and some of its classes rebuild splitting
and normalisation from the class instead of the file. The tokenizer here is built from the file that holds the vocabulary and
compared with it. Special tokens and chat templates are those of transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from chunkattn.errors import ModelError
from chunkattn.gguf_names import split_quant
from chunkattn.local_files import cause_of, is_present, read_object, read_present
from chunkattn.models.foreign_files import explain_name
from chunkattn.models.gguf_file import find_gguf, open_gguf
from chunkattn.models.gguf_tokenizer import tokenizer_from_gguf
from chunkattn.models.locate import download, resolve_path
from chunkattn.models.sentencepiece_backend import CONTROL, UNKNOWN, USER_DEFINED, Pieces, sentencepiece_backend

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_JSON, _SENTENCEPIECE, _VOCAB, _MERGES = "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"
_CONFIG = "tokenizer_config.json"
_CONFIGS = (_CONFIG, "special_tokens_map.json", "added_tokens.json")
_FILES = (_JSON, _SENTENCEPIECE, _VOCAB, *_CONFIGS, "config.json")
_HUB_PATTERNS = [*_FILES, _MERGES, "*.jinja"]
"""Files of a tokenizer on the hub: neither weights nor GGUF files."""
_OPTIONS: dict[str, Any] = {
    "trust_remote_code": False,
    "clean_up_tokenization_spaces": False,
    "split_special_tokens": False,
}
_ADVICE = "pass tokenizer=... with another folder or hub id, or skip_tokenizer_init=True to work with token ids only"
_AGAIN = "get it again"

_PROBES = (
    "a b",
    " yes",
    "  two  spaces ",
    "\n",
    "line\n\n\tand\r\ntab",
    "def f(x):\n    return x\n",
    "caf\u00e9 cafe\u0301 \u212b",
    "1987 12345 3.14",
    "HELLO's we'LL isn't",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\U0001f600\U0001f469\u200d\U0001f467",
    "\u00a0x\u200by\u2581z",
    "((a_b->c))  ##",
)
"""Texts whose ids and decoded texts are compared with those of the file's own tokenizer."""


def load_tokenizer(name: str | PathLike[str]) -> PreTrainedTokenizerBase:
    """Return a tokenizer from a folder, a GGUF file or the hub.

    Args:
        name: local folder, GGUF file or hub id, or either with the quantisation of a GGUF file, such as `owner/name:Q4_K_M`. A
            folder of one GGUF model without tokenizer files stands for that model.

    Raises:
        ModelError: the tokenizer cannot be loaded, or its ids differ from those of its file.
    """
    place = Path(name).expanduser()
    folder = place if place.is_dir() else _elsewhere(str(name))
    if folder.is_dir() and not any((folder / file).exists() for file in _FILES):
        folder = find_gguf(folder) or folder
    if folder.is_file():
        return tokenizer_from_gguf(open_gguf(folder))
    configs = {file: read_object(folder / file) for file in _CONFIGS if is_present(folder / file)}
    config = configs.get(_CONFIG, {})
    if is_present(folder / _JSON):
        tokenizer = _from_json(folder)
    elif is_present(folder / _SENTENCEPIECE):
        tokenizer = _from_sentencepiece(folder, {**configs.get("special_tokens_map.json", {}), **config})
    elif (folder / _VOCAB).exists() or (folder / _MERGES).exists():
        tokenizer = _from_merges(folder, config)
    else:
        text = f"{folder} has no vocabulary: none of {_JSON}, {_SENTENCEPIECE}, or {_VOCAB} with {_MERGES}"
        raise _fault(text, "get it again, name a GGUF file as MODEL:QUANT")
    _check_declared(tokenizer, folder, configs)
    return tokenizer


def check_rows(tokenizer: PreTrainedTokenizerBase, rows: int, name: str) -> None:
    """Raise an error if a tokenizer's vocabulary has ids that a model does not embed.

    Added tokens may lie beyond, such as a padding token that the model never got: a text that holds one is refused.

    Args:
        tokenizer: tokenizer of the model.
        rows: rows of the model's embedding.
        name: where the tokenizer comes from, for the message.

    Raises:
        ModelError: an id is beyond the embedding.
    """
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    needed = {token: i for token, i in tokenizer.get_vocab().items() if token in (tokenizer.bos_token, tokenizer.eos_token)}
    token, largest = max((vocabulary | needed).items(), key=lambda item: item[1])
    if largest >= rows:
        raise _fault(f"the tokenizer of {name} gives {token!r} the id {largest}, and the model embeds {rows} tokens")


def _fault(text: str, how: str = "") -> ModelError:
    """Return an error that ends with ways out: `how`, if there is one, and the advice that holds for every tokenizer."""
    return ModelError(f"{text}; {how and f'{how}, or '}{_ADVICE}")


def _elsewhere(name: str) -> Path:
    """Return the GGUF file of a tokenizer, or the folder of its files, downloaded from the hub without weights."""
    is_hub_id = split_quant(name)[1] is None and explain_name(name) is None and not Path(name).expanduser().exists()
    try:
        return download(name, _HUB_PATTERNS) if is_hub_id else resolve_path(name)
    except ModelError as error:
        raise _fault(f"the tokenizer of {name!r} cannot be loaded: {error}") from error


def _from_json(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a `tokenizer.json`, as it stands in the file."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    file = folder / _JSON
    witness = _load(file, lambda: Tokenizer.from_file(str(file)))
    is_random = _without_dropout(witness)
    witness.no_truncation()
    witness.no_padding()
    if not witness.get_vocab_size(with_added_tokens=False):
        raise _fault(f"{file} has an empty vocabulary", _AGAIN)
    tokenizer = _load(file, lambda: PreTrainedTokenizerFast.from_pretrained(folder, **_OPTIONS))
    if is_random:
        logger.info("%s splits words at random, as training wants it; here it always splits them alike", file)
        _without_dropout(tokenizer.backend_tokenizer)
    special = [token.content for token in witness.get_added_tokens_decoder().values() if token.special]
    _compare(
        tokenizer,
        file,
        (*_PROBES, " a".join(special[:8])),
        lambda text: witness.encode(text, add_special_tokens=False).ids,
        lambda ids: witness.decode(ids, skip_special_tokens=False),
    )
    return tokenizer


def _without_dropout(tokenizer: Tokenizer) -> bool:
    """Switch off the random splits of a tokenizer, which are for training; return whether it had them."""
    model = tokenizer.model
    if not getattr(model, "dropout", None):
        return False
    model.dropout = None
    return True


def _from_sentencepiece(folder: Path, config: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a SentencePiece model.

    As in Llama's tokenizer, BOS comes first if the model has one and `add_bos_token` does not say otherwise, and the dummy
    prefix stands behind control tokens, too, unless `legacy` is false.
    """
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    file = folder / _SENTENCEPIECE
    data = _load(file, file.read_bytes)
    witness = _load(file, lambda: SentencePieceProcessor(model_proto=data))
    if not data:
        raise _fault(f"{file} is empty", _AGAIN)
    proto = sentencepiece_model_pb2.ModelProto.FromString(data)
    rules, trained = proto.normalizer_spec, proto.trainer_spec
    texts, kinds = [piece.piece for piece in proto.pieces], [piece.type for piece in proto.pieces]
    user_defined = [text for text, kind in zip(texts, kinds, strict=True) if kind == USER_DEFINED]
    unigram, bpe = (trained.model_type == kind for kind in (trained.UNIGRAM, trained.BPE))
    for reason, applies in (
        ("it normalises texts with rules of its own", bool(rules.precompiled_charsmap)),
        ("it does not write spaces as \u2581", not rules.escape_whitespaces or trained.treat_whitespace_as_suffix),
        ("it is neither BPE nor unigram", not (unigram or bpe)),
        ("it is a unigram model with user-defined pieces", unigram and bool(user_defined)),
        (f"its add_dummy_prefix contradicts add_prefix_space in {_CONFIG}", _contradicts(config, rules.add_dummy_prefix)),
    ):
        if applies:
            raise _fault(f"{file} cannot be reproduced exactly: {reason}", f"save the tokenizer as {_JSON}")
    legacy = config.get("legacy") is not False
    pieces = Pieces(
        texts,
        [piece.score for piece in proto.pieces],
        kinds,
        dummy_prefix=("always" if legacy else "first") if rules.add_dummy_prefix else "never",
        squeeze_spaces=rules.remove_extra_whitespaces,
        isolated=user_defined,
        unigram=unigram,
    )
    backend = _load(file, lambda: sentencepiece_backend(pieces))
    control = [text for text, kind in zip(texts, kinds, strict=True) if kind in (UNKNOWN, CONTROL)]
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    named = {"bos_token": trained.bos_id, "eos_token": trained.eos_id, "unk_token": trained.unk_id}
    options: dict[str, Any] = {name: texts[i] for name, i in named.items() if 0 <= i < len(texts) and name not in config}
    if not isinstance(config.get("add_bos_token"), bool):
        options["add_bos_token"] = bool(config.get("bos_token", options.get("bos_token")))
    # An empty `vocab_file` keeps transformers from converting the model.
    options |= {"tokenizer_object": backend, "vocab_file": "", **_OPTIONS}
    tokenizer = _load(file, lambda: PreTrainedTokenizerFast.from_pretrained(folder, **options))
    _compare(tokenizer, file, _PROBES, witness.encode, witness.decode)
    return tokenizer


def _contradicts(config: dict[str, Any], dummy_prefix: bool) -> bool:
    return isinstance(config.get("add_prefix_space"), bool) and config["add_prefix_space"] != dummy_prefix


def _from_merges(folder: Path, config: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Return the byte-level BPE of `vocab.json` and `merges.txt`. Only the name of a class says how it splits texts."""
    from transformers import GPT2Tokenizer, Qwen2Tokenizer

    for name in (_VOCAB, _MERGES):
        if not (folder / name).exists():
            raise _fault(f"{folder} has no {name}", _AGAIN)
    vocab = read_object(folder / _VOCAB)
    classes = {"GPT2Tokenizer": GPT2Tokenizer, "Qwen2Tokenizer": Qwen2Tokenizer}
    model = read_present(folder / "config.json")
    by_model = dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), "Qwen2Tokenizer").get(str(model.get("model_type")))
    named = str(config.get("tokenizer_class") or by_model).removesuffix("Fast")
    if named not in classes:
        text = f"{folder}: {_VOCAB} and {_MERGES} do not say how texts are split, and tokenizer_class is {named!r}"
        raise _fault(f"{text}; supported are {', '.join(classes)}", f"save the tokenizer as {_JSON}")
    lines = _load(folder / _MERGES, lambda: (folder / _MERGES).read_text(encoding="utf-8")).split("\n")
    merged = {line.replace(" ", "") for line in lines}
    longer = [token for token in vocab if len(token) > 1]
    unmade = sum(token not in merged for token in longer)
    if not longer or unmade > len(longer) // 10:
        text = f"{folder / _MERGES} makes only {len(longer) - unmade} of the {len(longer)} longer tokens of {_VOCAB}"
        raise _fault(text, _AGAIN)
    tokenizer = _load(folder / _VOCAB, lambda: classes[named].from_pretrained(folder, **_OPTIONS))
    if tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False) != vocab:
        raise _fault(f"{folder / _VOCAB}: the ids of the loaded tokenizer are others")
    return tokenizer


def _load(file: Path, load: Callable[[], _T]) -> _T:
    """Return what a library reads from a file. The libraries raise many classes, and transformers some more."""
    try:
        return load()
    except Exception as error:
        raise _fault(f"{file} cannot be read: {cause_of(file, error)}", _AGAIN) from error


def _compare(
    tokenizer: PreTrainedTokenizerBase,
    file: Path,
    probes: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[list[int]], str],
) -> None:
    """Raise an error if the ids or the decoded texts of `probes` differ from those of the file's own tokenizer."""
    for text in probes:
        ids, expected = tokenizer(text, add_special_tokens=False)["input_ids"], list(encode(text))
        if ids != expected:
            ours, others = map(tokenizer.convert_ids_to_tokens, (ids, expected))
            raise _fault(f"{file}: the loaded tokenizer reads {text!r} as {ours}, the file as {others}")
        decoded = tokenizer.decode(ids)
        # SentencePiece writes a mark of its own for the unknown token.
        if tokenizer.unk_token_id not in ids and decoded != decode(ids):
            raise _fault(f"{file}: the loaded tokenizer writes {decoded!r}, the file {decode(ids)!r}")


def _check_declared(tokenizer: PreTrainedTokenizerBase, folder: Path, configs: dict[str, dict[str, Any]]) -> None:
    """Raise an error if a configuration gives an added token another id than the tokenizer."""
    declared = {text: i for text, i in configs.get("added_tokens.json", {}).items() if isinstance(i, int)}
    entries = configs.get(_CONFIG, {}).get("added_tokens_decoder") or {}
    declared |= {token["content"]: int(i) for i, token in entries.items()}
    ids = tokenizer.get_vocab()
    for text, i in declared.items():
        if ids.get(text) != i:
            raise _fault(f"{folder}: a configuration gives {text!r} the id {i}, the vocabulary gives {ids.get(text)}")
