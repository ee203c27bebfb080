"""Tiny tokenizers in every layout of files, and sentencepiece models with given rules."""

import io
import json
from functools import cache

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.tokenizer_texts import TEXTS, random_texts

CONTROLS = ["<unk>", "<s>", "</s>", "<|im_end|>"]
TRAINED = [*TEXTS, *random_texts(150, seed=1)]
BYTES = pre_tokenizers.ByteLevel.alphabet()
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def make_folder(path, config=None, model_type="llama", **files):
    """A folder with a tokenizer and a configuration that names the model's type; see `add_tokenizer`."""
    path.mkdir()
    if model_type:
        (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return add_tokenizer(path, config, **files)


def add_tokenizer(path, config=None, **files):
    """Write `tokenizer_config.json` and the files `json`, `model`, `vocab` and `merges` to a folder."""
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        name = {"json": "tokenizer.json", "model": "tokenizer.model", "vocab": "vocab.json", "merges": "merges.txt"}[name]
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def trained(tokenizer, alphabet=()):
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=list(alphabet), special_tokens=CONTROLS, show_progress=False)
    tokenizer.train_from_iterator(TRAINED, trainer)
    return tokenizer


def llama2(prefix="prepend", bos=True):
    """A tokenizer as Llama 2's file has it, with the prefix of a normalizer, of `Metaspace`, or none."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    first = [normalizers.Prepend("\u2581")] if prefix == "prepend" else []
    if prefix == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1)] if prefix != "none" else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), *strip])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return trained(tokenizer)


def byte_level(split=None, normalizer=None, digits=False, prefix=False, lower=False):
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not split))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, BYTES)


def with_added(tokenizer):
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("caf\u00e9", single_word=True)])
    return tokenizer


def truncating(tokenizer):
    """The settings of sentence embedders: a file that cuts and pads what it encodes."""
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8, pad_token="</s>", pad_id=2)
    return tokenizer


FILES = {
    "llama2": (llama2(), [1]),
    "metaspace": (llama2("metaspace"), [1]),
    "no-prefix": (llama2("none", bos=False), []),
    "gpt2": (byte_level(), []),
    "gpt2-prefix": (byte_level(prefix=True), []),
    "qwen2": (byte_level(QWEN2, normalizers.NFC()), []),
    "qwen2-nfkc": (byte_level(QWEN2, normalizers.NFKC()), []),
    "digits": (byte_level(digits=True), []),
    "added": (with_added(byte_level(QWEN2)), []),
    "truncating": (truncating(llama2()), [1]),
}
CLASSES = [None, "", "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "PreTrainedTokenizerFast"]
CLASSES += ["TokenizersBackend", "GPT2Tokenizer", "GPT2TokenizerFast", "CodeLlamaTokenizer", "NoSuchTokenizer"]


@cache
def _trained_pieces(model_type, user_defined):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINED * 3),
        model_writer=model,
        model_type=model_type,
        vocab_size=480,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        character_coverage=0.98,
        hard_vocab_limit=False,
        user_defined_symbols=list(user_defined),
        control_symbols=["<|im_end|>"],
        minloglevel=2,
    )
    return model.getvalue()


def pieces(model_type="bpe", user_defined=(), **rules):
    """Bytes of a SentencePiece model with given settings of its normaliser."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(_trained_pieces(model_type, user_defined))
    for name, value in rules.items():
        setattr(proto.normalizer_spec, name, value)
    return proto.SerializeToString()
