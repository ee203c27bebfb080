"""Tokenizers of folders: ids, decoded texts and leading tokens are those of the file that holds the vocabulary."""

import io
import json
import sys
from functools import partial

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, models

from chunkattn.calls.detokenizer import Detokenizer
from chunkattn.config import EngineConfig
from chunkattn.errors import ModelError
from chunkattn.models.loader import DEMO_FOLDER, load_tokenizer, open_files
from chunkattn.parsers.encode import PartEncoder
from tests.checkpoints import CHECKPOINTS
from tests.tokenizer_files import (
    CLASSES,
    CONTROLS,
    FILES,
    TRAINED,
    llama2,
    make_folder,
    pieces,
)
from tests.tokenizer_texts import TEXTS, random_texts

ALL = (*TEXTS, *random_texts(40))


def check(folder, encode, decode, leading=(), texts=ALL):
    """Ids, decoded texts, streamed texts and leading tokens of a folder are the witness's."""
    tokenizer = load_tokenizer(str(folder))
    for text in texts:
        ids = list(encode(text))
        found = tokenizer(text, add_special_tokens=False).input_ids
        assert found == ids, (text, tokenizer.convert_ids_to_tokens(found))
        assert tokenizer.decode(ids) == decode(ids)
        streamed = Detokenizer(tokenizer, [])
        for place, token in enumerate(ids):
            streamed.add([token], last=place == len(ids) - 1)
            assert decode(ids).startswith(streamed.text) or "\ufffd" in streamed.text
        assert streamed.text == decode(ids)
    assert PartEncoder(tokenizer).leading_ids == list(leading)
    return tokenizer


# tokenizer.json


@pytest.mark.parametrize("name", FILES)
def test_the_ids_of_tokenizer_json(name, tmp_path):
    """A folder has the ids of its file for every class that the configuration names, and every model type."""
    source, leading = FILES[name]
    witness = Tokenizer.from_str(source.to_str())
    witness.no_truncation()
    witness.no_padding()
    for place, named in enumerate(CLASSES):
        for model_type in ("llama", "qwen2", None) if named in (None, "LlamaTokenizer", "Qwen2Tokenizer") else ("qwen3",):
            config = {"bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": True, "legacy": False}
            config = None if named is None else {**config, **({"tokenizer_class": named} if named else {})}
            folder = make_folder(tmp_path / f"{place}-{model_type}", config, model_type, json=source.to_str())
            check(
                folder,
                lambda text: witness.encode(text, add_special_tokens=False).ids,
                lambda ids: witness.decode(ids, skip_special_tokens=False),
                leading,
                ALL if model_type == "llama" else TEXTS[:16],
            )


def test_tokenizer_json_before_tokenizer_model(tmp_path):
    """Where the two disagree, tokenizer.json counts."""
    source = llama2("none")
    folder = make_folder(tmp_path / "both", {"tokenizer_class": "LlamaTokenizer"}, json=source.to_str(), model=pieces())
    check(folder, lambda text: source.encode(text, add_special_tokens=False).ids, source.decode, [1])


# tokenizer.model


@pytest.mark.parametrize("dummy", [True, False])
@pytest.mark.parametrize("legacy", [True, False, None, "absent", "no config"])
@pytest.mark.parametrize("squeeze", [True, False])
def test_the_ids_of_sentencepiece(dummy, legacy, squeeze, tmp_path):
    data = pieces(add_dummy_prefix=dummy, remove_extra_whitespaces=squeeze)
    witness = sentencepiece.SentencePieceProcessor(model_proto=data)
    for place, extra in enumerate(({"add_bos_token": True}, {"add_bos_token": False}, {}, {"add_bos_token": None})):
        config = {"tokenizer_class": "LlamaTokenizer", "add_eos_token": False, **extra}
        config = None if legacy == "no config" else config if legacy == "absent" else {**config, "legacy": legacy}
        folder = make_folder(tmp_path / str(place), config, model=data)
        bos = config is None or extra.get("add_bos_token") is not False
        # A literal \u2581 at the start of a squeezed text is the one place where decoding keeps more than SentencePiece.
        texts = [text for text in ALL if not (squeeze and "\u2581" in text)]
        tokenizer = check(folder, witness.encode, witness.decode, [1] if bos else [], texts if place == 0 else texts[:20])
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
        again = "first" if legacy is False else "always"
        expected = [2, *(witness.encode("the") if again == "always" or not dummy else no_prefix(data).encode("the"))]
        assert tokenizer("</s>the", add_special_tokens=False).input_ids[-len(expected) :] == expected


def test_special_tokens_of_a_map(tmp_path):
    """A special token that only special_tokens_map.json names comes before the model's own."""
    folder = make_folder(tmp_path / "model", {"tokenizer_class": "LlamaTokenizer"}, model=pieces())
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}, "pad_token": "</s>"}')
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "<|im_end|>", "</s>")


def no_prefix(data):
    proto = sentencepiece_model_pb2.ModelProto.FromString(data)
    proto.normalizer_spec.add_dummy_prefix = False
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


@pytest.mark.parametrize(("model_type", "user_defined"), [("bpe", ("<think>", "\u2581\u2581", "foo bar")), ("unigram", ())])
def test_user_defined_pieces_and_unigram_models(model_type, user_defined, tmp_path):
    data = pieces(model_type, user_defined)
    witness = sentencepiece.SentencePieceProcessor(model_proto=data)
    texts = (*ALL, "a<think>b  <think> foo bar  c")
    check(make_folder(tmp_path / "model", model=data), witness.encode, witness.decode, [1], texts)


def edited(data, change):
    proto = sentencepiece_model_pb2.ModelProto.FromString(data)
    change(proto)
    return proto.SerializeToString()


def same_scores(proto):
    for piece in proto.pieces:
        piece.score = 0.0


def without_a_character(proto):
    """A merged piece whose character became another one."""
    merged = {piece.piece for piece in proto.pieces if len(piece.piece) == 2}
    character = next(p for p in proto.pieces if p.type == 1 and len(p.piece) == 1 and any(p.piece in m for m in merged))
    character.piece = "\u2603"


@pytest.mark.parametrize(
    ("data", "config", "message"),
    [
        (lambda get: get(precompiled_charsmap=nfkc()), {}, "it normalises texts"),
        (lambda get: get(escape_whitespaces=False), {}, "does not write spaces"),
        (lambda get: get("unigram", ("<think>",)), {}, "unigram model with user-defined pieces"),
        (lambda get: edited(get(), same_scores), {}, "overlap and have the same score"),
        (lambda get: edited(get(), without_a_character), {}, "is in the vocabulary, its characters are not"),
        (lambda get: get(add_dummy_prefix=False), {"add_prefix_space": True}, "contradicts add_prefix_space"),
        (lambda get: get(), {"add_prefix_space": False}, "contradicts add_prefix_space"),
    ],
    ids=["charsmap", "escape", "unigram", "scores", "characters", "prefix", "no-prefix"],
)
def test_models_that_cannot_be_reproduced(data, config, message, tmp_path):
    folder = make_folder(tmp_path / "model", config, model=data(pieces))
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(str(folder))
    assert "tokenizer.model" in str(caught.value)
    assert "tokenizer=" in str(caught.value)


def nfkc():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINED),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return sentencepiece_model_pb2.ModelProto.FromString(model.getvalue()).normalizer_spec.precompiled_charsmap


# vocab.json and merges.txt


def vocab_and_merges(tokenizer):
    content = json.loads(tokenizer.to_str())["model"]
    return {
        "vocab": json.dumps(content["vocab"]),
        "merges": "#version: 0.2\n" + "\n".join(" ".join(m) for m in content["merges"]),
    }


@pytest.mark.parametrize(
    ("config", "model_type", "source"),
    [
        ({"tokenizer_class": "GPT2Tokenizer"}, "llama", "gpt2"),
        ({"tokenizer_class": "GPT2TokenizerFast"}, "qwen2", "gpt2"),
        ({"tokenizer_class": "Qwen2Tokenizer"}, "llama", "qwen2"),
        ({}, "qwen2", "qwen2"),
        (None, "qwen3", "qwen2"),
        ({}, "qwen2_moe", "qwen2"),
        (None, "qwen3_moe", "qwen2"),
    ],
    ids=str,
)
def test_vocab_and_merges(config, model_type, source, tmp_path):
    witness = FILES[source][0]
    if config is None:
        witness = byte_level_with_default(witness)
    else:
        config = {**config, "bos_token": None, **dict.fromkeys(("eos_token", "unk_token", "pad_token"), "</s>")}
    folder = make_folder(tmp_path / "model", config, model_type, **vocab_and_merges(witness))
    check(folder, lambda text: witness.encode(text, add_special_tokens=False).ids, witness.decode)


def byte_level_with_default(tokenizer):
    """The same with the token that transformers' class adds to every vocabulary."""
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"]["<|endoftext|>"] = len(content["model"]["vocab"])
    return Tokenizer.from_str(json.dumps(content))


# Incomplete and damaged folders

GOOD = FILES["qwen2"][0]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 17\n"
SMALL = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        (SMALL, {}, "has no vocabulary"),
        (None, {}, "has no vocabulary"),
        (SMALL, {"vocab": vocab_and_merges(GOOD)["vocab"]}, "has no merges.txt"),
        (SMALL, {"merges": vocab_and_merges(GOOD)["merges"]}, "has no vocab.json"),
        (SMALL, {**vocab_and_merges(GOOD), "merges": ""}, "merges.txt makes only 0 of"),
        (SMALL, {**vocab_and_merges(GOOD), "merges": vocab_and_merges(GOOD)["merges"][:300]}, "merges.txt makes only"),
        (SMALL, {**vocab_and_merges(GOOD), "vocab": "{}"}, "merges.txt makes only 0 of the 0"),
        (SMALL, {**vocab_and_merges(GOOD), "vocab": POINTER}, "vocab.json"),
        ({"tokenizer_class": "LlamaTokenizer"}, vocab_and_merges(GOOD), "do not say how texts are split"),
        (None, vocab_and_merges(GOOD), "do not say how texts are split"),
        (SMALL, {"json": ""}, "tokenizer.json cannot be read"),
        (SMALL, {"json": "{}"}, "tokenizer.json cannot be read"),
        (SMALL, {"json": GOOD.to_str()[:5000]}, "tokenizer.json cannot be read"),
        (SMALL, {"json": POINTER}, "it is a pointer of Git LFS: run `git lfs pull`"),
        (SMALL, {"json": Tokenizer(models.BPE()).to_str()}, "empty vocabulary"),
        (SMALL, {"model": b""}, "tokenizer.model"),
        (SMALL, {"model": (DEMO_FOLDER / "tokenizer.model").read_bytes()[:5000]}, "tokenizer.model cannot be read"),
        (SMALL, {"model": POINTER}, "it is a pointer of Git LFS"),
        (SMALL, {"model": b"IQ== 0\nIg== 1\nIw== 2\n"}, "tokenizer.model cannot be read"),
        ({**SMALL, "added_tokens_decoder": {"7": {"content": "<new>"}}}, {"json": GOOD.to_str()}, "'<new>' the id 7"),
    ],
    ids=range(20),
)
def test_incomplete_folders(config, files, message, tmp_path):
    folder = make_folder(tmp_path / "model", config, **files)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(str(folder))
    assert str(folder) in str(caught.value)
    assert "skip_tokenizer_init=True" in str(caught.value) or "vocab.json cannot be read" in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 10**6, b"\xff\xfe", '{"a": ' * 10**5])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
def test_odd_json(name, text, tmp_path):
    folder = make_folder(tmp_path / "model", {}, json=GOOD.to_str())
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=name):
        load_tokenizer(str(folder))


def test_more_ids_than_rows(tmp_path):
    folder = make_folder(tmp_path / "model", {}, json=GOOD.to_str())
    size = GOOD.get_vocab_size()
    for rows in (size, size + 7, size - 1):
        changed = {**CHECKPOINTS["qwen3"].to_dict(), "vocab_size": rows, "architectures": ["Qwen3ForCausalLM"]}
        CHECKPOINTS["qwen3"].__class__(**changed).save_pretrained(folder)
        if rows >= size:
            assert open_files(EngineConfig(model=str(folder))).spec.vocab_size == rows
            continue
        with pytest.raises(ModelError, match=rf"the id {size - 1}, and the model embeds {rows} tokens"):
            open_files(EngineConfig(model=str(folder)))


def test_control_tokens_are_whole_whatever_the_configuration_says(tmp_path):
    """`split_special_tokens` would split what the file adds as one token."""
    folder = make_folder(tmp_path / "model", {"split_special_tokens": True}, json=GOOD.to_str())
    found = load_tokenizer(str(folder))("a</s>b<|im_end|>", add_special_tokens=False).input_ids
    assert found == GOOD.encode("a</s>b<|im_end|>", add_special_tokens=False).ids
    assert CONTROLS.index("</s>") in found


def test_an_added_token_beyond_the_rows_loads(tmp_path):
    """Vicuna's folder has such a padding token, which transformers loads, too. A text that holds it is refused later."""
    source = Tokenizer.from_str(GOOD.to_str())
    source.add_special_tokens(["<pad>"])
    folder = make_folder(tmp_path / "model", {}, json=source.to_str())
    rows = GOOD.get_vocab_size()
    changed = {**CHECKPOINTS["qwen3"].to_dict(), "vocab_size": rows, "architectures": ["Qwen3ForCausalLM"]}
    CHECKPOINTS["qwen3"].__class__(**changed).save_pretrained(folder)
    assert open_files(EngineConfig(model=str(folder))).tokenizer.convert_tokens_to_ids("<pad>") == rows


@pytest.mark.parametrize("layout", ["json", "model", "merges"])
def test_no_code_of_a_repository_runs(layout, tmp_path, monkeypatch):
    """Neither the tokenizer's class nor a question on standard input."""
    files = {"json": {"json": GOOD.to_str()}, "model": {"model": pieces()}, "merges": vocab_and_merges(GOOD)}[layout]
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    folder = make_folder(tmp_path / "model", config, **files)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("standard input was read"))
    monkeypatch.setattr(sys, "stdin", None)
    load_tokenizer(str(folder))
    assert not (tmp_path / "ran").exists()


def test_random_splits_are_switched_off(tmp_path):
    """BPE dropout is for training. The witness is the file without it."""
    source = json.loads(GOOD.to_str())
    source["model"]["dropout"] = 0.5
    folder = make_folder(tmp_path / "model", {}, json=json.dumps(source))
    encode = partial(GOOD.encode, add_special_tokens=False)
    decode = partial(GOOD.decode, skip_special_tokens=False)
    check(folder, lambda text: encode(text).ids, decode, FILES["qwen2"][1], TEXTS)
