"""Tiny random rerankers with a byte-level tokenizer of Qwen's kind: folders and GGUF files."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from tests.checkpoints import make_checkpoint

# Qwen's rule of what words are.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Prompt of Qwen3-Reranker as its authors write it, in one text.
OFFICIAL = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n'
    "<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
SPECIAL, ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>", "</think>"]  # not special, as in Qwen3
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
CHAT_OPTIONS = {
    "kv_cache_memory_bytes": 16 << 20,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "warmup": False,
    "decide_method": "letters",
}
"""Options of the engine of `chat_folder`."""


def qwen_tokenizer(added=(*SPECIAL, *ADDED)):
    """A byte-level BPE with Qwen's splits and control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), behavior="isolated"), bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    words = trainers.BpeTrainer(vocab_size=400, initial_alphabet=bytes_.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([f"yes no yes no\n\n {OFFICIAL} Paris is a city."] * 9, words)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in added if name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in added if name not in SPECIAL])
    return tokenizer


def add_tokenizer(folder, tokenizer=None, **options):
    """Save a tokenizer to a folder, `qwen_tokenizer` by default."""
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer or qwen_tokenizer(), eos_token="<|im_end|>", **options)
    made.save_pretrained(folder)
    return made


def make_reranker(folder, config=None, auto=AutoModelForCausalLM):
    """Save a random model, a Qwen3 language model by default, with its tokenizer."""
    make_checkpoint(config or Qwen3Config(**SHAPE), folder, auto=auto)
    add_tokenizer(folder)
    return folder


def write_tokenizer(writer, tokenizer, template=None):
    """Write a tokenizer, and a rerank template, to a GGUF file as llama.cpp's converter does."""
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    unused = [f"[PAD{number}]" for number in range(len(tokens), SHAPE["vocab_size"])]
    writer.add_token_list(tokens + unused)
    writer.add_token_types([3 if t in SPECIAL else 4 if t in ADDED else 1 for t in tokens] + [5] * len(unused))
    writer.add_token_merges([" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template([{"name": "rerank", "template": template}])
