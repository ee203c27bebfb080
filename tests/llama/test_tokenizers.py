"""Token ids of GGUF files are llama.cpp's."""

import io
import json

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from chunkattn.config import EngineConfig
from chunkattn.models.gguf_tokenizer import _SPLITS
from chunkattn.models.gguf_vocabulary import _ALWAYS_SHOWN, _ENDS, _FILL_IN, _FILL_IN_PARTS
from chunkattn.models.loader import load_tokenizer, open_files
from tests.gguf_files import CONFIGS, Written
from tests.llama_cpp import llama_server
from tests.tokenizer_texts import TEXTS, random_texts

CONTROLS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<\uff5cend\u2581of\u2581text\uff5c>"]
WITH_CONTROLS = (
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<s> Hello</s>Hello <think> no</think>",
    "<\uff5cend\u2581of\u2581text\uff5c> x",
)
ALL = (*TEXTS, *WITH_CONTROLS, *random_texts(60))


def file_of(path, model, tokens, kinds, change=lambda writer: None):
    """A tiny model with a vocabulary."""

    def write(writer):
        writer.add_tokenizer_model(model)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        change(writer)

    config = type(CONFIGS["llama"])(**{**CONFIGS["llama"].to_dict(), "vocab_size": len(tokens)})
    return Written(path, config, change=write).path


def compare(path, texts=ALL, spaces=False):
    """Ids are llama.cpp's, with and without the leading special tokens; a text without control tokens comes back whole.

    `spaces`: SentencePiece reads \u2581 as a space.
    """
    tokenizer = load_tokenizer(str(path))
    with llama_server(path) as post:
        for text in texts:
            for special in (True, False):
                asked = {"content": text, "add_special": special, "parse_special": True}
                expected = post("/tokenize", asked)["tokens"]
                found = tokenizer(text, add_special_tokens=special).input_ids
                assert found == expected, (text, special, tokenizer.convert_ids_to_tokens(found))
            if not any(control in text for control in CONTROLS):
                assert tokenizer.decode(found) == (text.replace("\u2581", " ") if spaces else text)


@pytest.fixture(scope="module")
def byte_level():
    """Vocabulary and merges of a byte-level BPE, with a word that no merge makes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    texts = [text.replace("zebrafish", "") for text in (" ".join(TEXTS) * 3, *TEXTS, *random_texts(40, seed=1))]
    tokenizer.train_from_iterator(texts, trainer)
    content = json.loads(tokenizer.to_str())["model"]
    words = sorted(content["vocab"], key=content["vocab"].get)
    return [*words, "\u0120zebrafish"], [" ".join(merge) for merge in content["merges"]]


@pytest.mark.parametrize("pre", _SPLITS)
def test_byte_level(pre, byte_level, tmp_path):
    words, merges = byte_level
    tokens = [*words, *CONTROLS, "<think>"]

    def change(writer):
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(tokens.index("<s>"))
        writer.add_eos_token_id(tokens.index("</s>"))

    compare(file_of(tmp_path / "model.gguf", "gpt2", tokens, [1] * len(words) + [3] * len(CONTROLS) + [4], change))


@pytest.fixture(scope="module")
def pieces():
    """Pieces of a SentencePiece BPE."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS, *random_texts(200, seed=1)] * 5),
        model_writer=model,
        model_type="bpe",
        vocab_size=460,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    return list(sentencepiece_model_pb2.ModelProto.FromString(model.getvalue()).pieces)


def spm_file(path, pieces, change=lambda writer: None):
    texts = [piece.piece for piece in pieces] + [*CONTROLS[2:], "<|endoftext|>", "<think>"]
    kinds = [piece.type for piece in pieces] + [3, 3, 3, 3, 4]

    def write(writer):
        writer.add_token_scores([piece.score for piece in pieces] + [-1000.0] * 5)
        change(writer)

    return file_of(path, "llama", texts, kinds, write)


@pytest.mark.parametrize("prefix", [True, False, None])
@pytest.mark.parametrize("squeeze", [True, False, None])
@pytest.mark.parametrize("bos", [True, False, None])
def test_sentencepiece(prefix, squeeze, bos, pieces, tmp_path):
    def change(writer):
        for key, value in (("add_space_prefix", prefix), ("remove_extra_whitespaces", squeeze), ("add_bos_token", bos)):
            if value is not None:
                writer.add_bool(f"tokenizer.ggml.{key}", value)

    compare(spm_file(tmp_path / "model.gguf", pieces, change), spaces=True)


def test_gemma_takes_runs_of_spaces_and_lines_whole(pieces, tmp_path):
    """Its files have them as user-defined tokens, and no space before a text."""
    runs = ["  ", "   ", "    ", "\n\n", "\n\n\n", "\t\t", "<start_of_turn>", "[multimodal]", "<h1>"]
    texts, kinds = [piece.piece for piece in pieces] + CONTROLS[2:] + runs, [piece.type for piece in pieces] + [3] * 3 + [4] * 9

    def change(writer):
        writer.add_token_scores([piece.score for piece in pieces] + [-1000.0] * 12)
        writer.add_add_space_prefix(False)

    mixed = ("a  b   c    d     e", "x\n\ny\n\n\n\nz\t\t\tw", " <h1> a <start_of_turn>user\n  b")
    compare(file_of(tmp_path / "model.gguf", "llama", texts, kinds, change), (*ALL, *mixed), spaces=True)


def test_phi3_tokens_take_the_spaces_behind_them(pieces, tmp_path):
    compare(spm_file(tmp_path / "model.gguf", pieces, lambda writer: writer.add_name("Phi-3 mini")), spaces=True)


# Tokens that end a text

PLAIN = [f"word{i}" for i in range(12)]


def ends_of(path):
    """Ids that end llama.cpp's generation: each id is forced, and the answer says why it stopped."""
    size = open_files(EngineConfig(model=str(path), skip_tokenizer_init=True)).spec.vocab_size
    with llama_server(path, n_ctx=64) as post:
        asked = {"prompt": [0], "n_predict": 2, "temperature": 0, "cache_prompt": False}
        answers = [post("/completion", {**asked, "logit_bias": [[i, 1000.0]]}) for i in range(size)]
    return {i for i, answer in enumerate(answers) if answer["stop_type"] == "eos"}


def check_ends(path):
    expected = ends_of(path)
    assert set(open_files(EngineConfig(model=str(path), skip_tokenizer_init=True)).eos_token_ids) == expected
    return expected


GROUPS = [
    sorted(_ENDS - {"<|end|>", "</s>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<|tool_response>"}),
    *(["</s>"], ["<|end|>"], ["<|tool_response>"], ["</s>", "<|tool_response>"]),
    *(["<|end|>", *more] for more in (["<|return|>"], ["<|call|>"], ["<|return|>", "<|call|>"])),
    *(["<|end|>", *more] for more in (["<|flush|>"], ["<|calls|>", "<|flush|>"], ["<|return|>", "<|calls|>"])),
    ["<|end|>", "<|call|>", "<|flush|>"],
    *([text] for texts in _FILL_IN.values() for text in texts),
    sorted(_FILL_IN_PARTS),
    [*_ALWAYS_SHOWN, "<|end|>"],
    ["<|endoftext|", "<|Im_end|>", "</S>", "[eos]", "<bos>", "<EOS>", "<|EOT|>"],
]


@pytest.mark.parametrize("texts", GROUPS, ids=lambda texts: " ".join(texts)[:60])
@pytest.mark.parametrize("kind", [1, 3])
def test_texts_that_end_a_text(kind, texts, tmp_path):
    tokens = ["<unk>", *PLAIN, *texts]
    kinds = [2, *[1] * len(PLAIN), *[kind] * len(texts)]

    def change(writer):
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_eos_token_id(3)

    assert 3 in check_ends(file_of(tmp_path / "model.gguf", "llama", tokens, kinds, change))


@pytest.mark.parametrize("key", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep", "fim_pre", "padding", "bos"])
def test_keys_that_end_a_text(key, tmp_path):
    def change(writer):
        writer.add_token_scores([0.0] * (1 + len(PLAIN)))
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", 7)

    check_ends(file_of(tmp_path / "model.gguf", "llama", ["<unk>", *PLAIN], [2, *[1] * len(PLAIN)], change))
