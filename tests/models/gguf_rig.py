"""GGUF files with tokenizers, and the decoders of files."""

import json

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from chunkattn.config import EngineConfig
from chunkattn.errors import ModelError
from chunkattn.models.loader import open_files
from tests.fuzz import folders
from tests.gguf_files import CONFIGS, Written

TEXTS = (
    "The year 1987  5 and 12345, isn't it?",
    "  two spaces\n\n\tand a tab 3.14 ",
    "cafe\u0301 na\u00efve \u4f60\u597d \U0001f600",
    "",
    "HELLO's we'LL <s> <|im_start|>user\nhi<|im_end|> <think>no</think> xylophone",
)
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CONTROLS, DEFINED = ["<|im_start|>", "<|im_end|>", "<\uff5cend\u2581of\u2581text\uff5c>"], ["<think>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
U32, I32, ARRAY, TEXT = (gguf.GGUFValueType[name] for name in ("UINT32", "INT32", "ARRAY", "STRING"))


def opened(path, **options):
    return open_files(EngineConfig(model=str(path), **{"dtype": "float32", "skip_tokenizer_init": True, **options}))


def dense_logits(path, ids, **options):
    """Logits `[T, vocab]` of a file's decoder under plain causal attention: no engine, no compilation of steps."""
    return folders.dense_logits(opened(path, **options).load(), ids)


def refused(tmp_path, message, name="llama", **options):
    path = Written(tmp_path / "model.gguf", CONFIGS[name], **options).path
    with pytest.raises(ModelError, match=message) as caught:
        opened(path).load()
    assert str(path) in str(caught.value)


def original(pre):
    """A byte-level BPE as a family's `tokenizer.json` has it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    split = {"llama-bpe": LLAMA3, "qwen2": QWEN2}.get(pre)
    first = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    first += [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator([" ".join(TEXTS[:4]) * 3, "caf\u00e9 " * 9], trainer)
    # A word that no merge makes: Llama 3 takes it whole, the other families never.
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"]["\u0120xylophone"] = tokenizer.get_vocab_size()
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(CONTROLS)
    tokenizer.add_tokens(DEFINED)
    return tokenizer


def gguf_of(tokenizer, pre, path, last=lambda writer: None, **keys):
    content = json.loads(tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    kinds = [3 if t in CONTROLS else 4 if t in DEFINED else 1 for t in tokens]

    def change(writer):
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
        writer.add_bos_token_id(tokens.index("<|im_start|>"))
        writer.add_eos_token_id(tokens.index("<|im_end|>"))
        writer.add_uint32("tokenizer.ggml.eot_token_id", tokens.index(CONTROLS[2]))
        writer.add_chat_template(TEMPLATE)
        for key, value in keys.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        last(writer)

    config = type(CONFIGS["llama"])(**{**CONFIGS["llama"].to_dict(), "vocab_size": 1024})
    return Written(path, config, change=change).path


def sentencepiece_file(path, proto, **keys):
    def change(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([piece.piece for piece in proto.pieces])
        writer.add_token_scores([piece.score for piece in proto.pieces])
        writer.add_token_types([piece.type for piece in proto.pieces])
        writer.add_bos_token_id(proto.trainer_spec.bos_id)
        writer.add_eos_token_id(proto.trainer_spec.eos_id)
        writer.add_unk_token_id(proto.trainer_spec.unk_id)
        for key, value in keys.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    config = type(CONFIGS["llama"])(**{**CONFIGS["llama"].to_dict(), "vocab_size": len(proto.pieces)})
    return Written(path, config, change=change).path


def replaced(name, value):
    """Change of a writer's key that exists."""
    return lambda writer: writer.kv_data[0].__setitem__(name, value)


def value_of(value, kind, sub_type=None):
    return gguf.gguf_writer.GGUFValue(value, kind, sub_type)
