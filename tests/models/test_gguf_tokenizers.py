"""Tokenizers of GGUF files against the originals, and their special tokens."""

import pytest
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from chunkattn.cli import app
from chunkattn.errors import ModelError
from chunkattn.models.loader import DEMO_FOLDER, load_tokenizer
from chunkattn.parsers.encode import PartEncoder
from tests import tokenizer_texts
from tests.gguf_files import CONFIGS, Written
from tests.models.gguf_rig import (
    CONTROLS,
    DEFINED,
    I32,
    TEMPLATE,
    TEXTS,
    U32,
    gguf_of,
    opened,
    original,
    replaced,
    sentencepiece_file,
    value_of,
)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_tokenizers(pre, tmp_path):
    """Ids, decoded texts, special tokens and chats are those of the tokenizer that the file was made from."""
    source = original(pre)
    path = gguf_of(source, pre, tmp_path / "model.gguf")
    files = opened(path, skip_tokenizer_init=False)
    for text in (*TEXTS, *CONTROLS):
        ids = source.encode(text, add_special_tokens=False).ids
        assert files.tokenizer(text, add_special_tokens=False).input_ids == ids
        assert files.tokenizer.decode(ids) == source.decode(ids, skip_special_tokens=False)
    encoder = PartEncoder(files.tokenizer)
    assert set(encoder.special.ids) == set(CONTROLS)
    assert set(encoder.added.ids) == {*CONTROLS, *DEFINED}
    start, end, other = (source.token_to_id(t) for t in CONTROLS)
    assert files.eos_token_ids == (end, other)
    assert encoder.leading_ids == ([start] if pre == "llama-bpe" else [])
    original_tokenizer = PreTrainedTokenizerFast(tokenizer_object=source, chat_template=TEMPLATE)
    messages = [{"role": "user", "content": "Is it 1987?"}]
    chats = [t.apply_chat_template(messages, tokenize=False) for t in (files.tokenizer, original_tokenizer)]
    assert chats[0] == chats[1] != ""
    assert len(load_tokenizer(str(path))) == len(files.tokenizer)


def test_the_file_says_whether_bos_comes_first(tmp_path):
    source = original("gpt-2")
    for value in (True, False):
        path = gguf_of(source, "gpt-2", tmp_path / f"{value}.gguf", add_bos_token=value)
        encoder = PartEncoder(load_tokenizer(str(path)))
        assert encoder.leading_ids == ([source.token_to_id("<|im_start|>")] if value else [])


@pytest.mark.parametrize("space", [True, False])
def test_sentencepiece_tokenizers(space, tmp_path):
    """Ids and decoded texts are those of SentencePiece itself, with and without the space before a text."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((DEMO_FOLDER / "tokenizer.model").read_bytes())
    proto.normalizer_spec.add_dummy_prefix = space
    witness = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    tokenizer = load_tokenizer(str(sentencepiece_file(tmp_path / "model.gguf", proto, add_space_prefix=space)))
    for text in (*tokenizer_texts.TEXTS, *tokenizer_texts.random_texts(30)):
        ids = witness.encode(text)
        assert tokenizer(text, add_special_tokens=False).input_ids == ids
        assert tokenizer.decode(ids) == witness.decode(ids)
    encoder = PartEncoder(tokenizer)
    assert set(encoder.special.ids) == {"<unk>", "<s>", "</s>"}
    assert encoder.leading_ids == [proto.trainer_spec.bos_id]
    without = sentencepiece_file(tmp_path / "without.gguf", proto, add_bos_token=False)
    assert PartEncoder(load_tokenizer(str(without))).leading_ids == []


def test_unsupported_tokenizers(tmp_path):
    source = original("gpt-2")
    for pre in ("unheard-of", None):
        path = gguf_of(source, pre, tmp_path / "model.gguf")
        with pytest.raises(ModelError, match=rf"tokenizer.ggml.pre {pre!r} is not among the supported .*; pass tokenizer="):
            opened(path, skip_tokenizer_init=False)
        assert opened(path, skip_tokenizer_init=False, tokenizer=str(DEMO_FOLDER)).tokenizer is not None
    path = Written(tmp_path / "bare.gguf", CONFIGS["llama"]).path
    with pytest.raises(ModelError, match=r"bare.gguf has no tokenizer; pass tokenizer="):
        opened(path, skip_tokenizer_init=False)
    path = Written(tmp_path / "bert.gguf", CONFIGS["llama"], change=lambda w: w.add_tokenizer_model("bert")).path
    with pytest.raises(ModelError, match="tokenizer 'bert' is not supported; supported are gpt2 and llama"):
        opened(path, skip_tokenizer_init=False)


@pytest.mark.parametrize("kind", ["eos", "bos", "unknown", "padding", "eot", "eom", "fim_pad"])
@pytest.mark.parametrize("found", [-1, 2**32 - 1, -2, 10**6])
def test_special_ids(kind, found, tmp_path):
    """-1 is no token, in either spelling; other ids outside the vocabulary are errors."""
    entry = value_of(found, I32 if found < 0 else U32)
    path = gguf_of(original("gpt-2"), "gpt-2", tmp_path / "model.gguf", last=replaced(f"tokenizer.ggml.{kind}_token_id", entry))
    if found in (-2, 10**6):
        with pytest.raises(ModelError, match=rf"model.gguf: tokenizer.ggml.{kind}_token_id {found} is outside the"):
            opened(path, skip_tokenizer_init=False)
        return
    files = opened(path, skip_tokenizer_init=False)
    named = {"eos": "eos", "bos": "bos", "unknown": "unk", "padding": "pad"}.get(kind, "cls")
    assert getattr(files.tokenizer, f"{named}_token_id") is None
    source = original("gpt-2")
    end, other = (source.token_to_id(token) for token in CONTROLS[1:])
    assert set(files.eos_token_ids) == {end, other} - ({other} if kind == "eot" else set())


def test_a_text_ends_where_the_vocabulary_says(tmp_path):
    """`tests/llama` compares the whole table with llama.cpp."""
    tokens = ["<unk>", "a", "</s>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|file_sep|>", "b"]

    def change(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_eos_token_id(9)

    path = Written(tmp_path / "model.gguf", CONFIGS["llama"], change=change).path
    assert sorted(opened(path).eos_token_ids) == [2, 3, 4, 6, 7, 8, 9]


def test_the_tokenizer_of_a_folder_of_one_gguf_file(tmp_path):
    """As `tokenizer`, and in `chunkattn inspect`, which takes the model's own or another."""
    source = original("gpt-2")
    (folder := tmp_path / "model").mkdir()
    path = gguf_of(source, "gpt-2", folder / "model.gguf")
    assert len(load_tokenizer(str(folder))) == len(load_tokenizer(str(path)))
    shown = [
        CliRunner().invoke(app, ["inspect", "xylophone", *options]).stdout
        for options in (["--model", str(folder)], ["--model", str(path)], ["--tokenizer", str(folder)])
    ]
    assert shown[0] == shown[1] == shown[2] != CliRunner().invoke(app, ["inspect", "xylophone"]).stdout
    gguf_of(source, "gpt-2", folder / "other.gguf")
    with pytest.raises(ModelError, match="holds 2 GGUF models"):
        load_tokenizer(str(folder))
    PreTrainedTokenizerFast(tokenizer_object=source).save_pretrained(folder)  # the original's files, for both
    assert load_tokenizer(str(folder)).get_vocab() == source.get_vocab()
