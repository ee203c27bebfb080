"""Bytes of tokens, as grammars read them, are those that transformers decodes between other tokens."""

import itertools
import json
from types import SimpleNamespace

import llguidance
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from chunkattn.engine.vocabulary import Vocabulary
from chunkattn.errors import RequestError
from chunkattn.models.loader import DEMO_FOLDER, load_tokenizer
from tests.models.gguf_rig import gguf_of, original, sentencepiece_file
from tests.tokenizer_files import FILES, llama2, make_folder, pieces

BEGINS = [b"", b"\xc3", b"\xe4", b"\xe4\xbd", b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98"]
ENDS = [bytes(tail) for length in range(4) for tail in itertools.product((0x80, 0x90, 0xA0), repeat=length)]


def around(token):
    """Bytes before and behind a token with which it is whole characters; None if no text has its bytes."""
    for before, behind in itertools.product(BEGINS, ENDS):
        try:
            (before + token + behind).decode()
        except UnicodeDecodeError:
            continue
        return before, behind
    return None


def id_of_byte(backend, byte):
    found = [backend.token_to_id(text) for text in (f"<0x{byte:02X}>", bytes_to_unicode()[byte])]
    return next(number for number in found if number is not None)


def check(tokenizer, rows=1 << 20):
    """Compare every token with its text between two letters. Return the vocabulary, and the tokens that no text has."""
    vocabulary, backend = Vocabulary.of(tokenizer, rows), tokenizer.backend_tokenizer
    a, unwritten, partial = backend.token_to_id("a"), [], 0
    dropped = [n for n in range(len(vocabulary.tokens)) if tokenizer.decode([a, n, a], skip_special_tokens=True) == "aa"]
    assert [*vocabulary.special] == [n for n in dropped if vocabulary.tokens[n] or backend.id_to_token(n) is None]
    for number, token in enumerate(vocabulary.tokens):
        if backend.id_to_token(number) is None:
            assert token == b""
            continue
        if (whole := around(token)) is None:
            unwritten.append(number)
            assert "\ufffd" in tokenizer.decode([a, number, a], skip_special_tokens=False)
            continue
        before, behind = ([id_of_byte(backend, byte) for byte in part] for part in whole)
        partial += bool(before or behind)
        text = tokenizer.decode([a, *before, number, *behind, a], skip_special_tokens=False)
        assert text == f"a{(whole[0] + token + whole[1]).decode()}a", (number, token)
    return vocabulary, unwritten, partial


@pytest.mark.parametrize("name", FILES)
def test_tokenizer_json(name, tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": True}
    tokenizer = load_tokenizer(str(make_folder(tmp_path / name, config, json=FILES[name][0].to_str())))
    vocabulary, _, partial = check(tokenizer)
    assert {vocabulary.tokens[number] for number in vocabulary.special} == {b"<unk>", b"<s>", b"</s>", b"<|im_end|>"}
    assert (partial > 100) == ("ByteLevel" in tokenizer.backend_tokenizer.to_str())


@pytest.mark.parametrize("name", ["gpt2", "gpt2-prefix", "qwen2", "digits", "added"])
def test_byte_level_tokens_are_those_of_the_library(name):
    backend = FILES[name][0]
    witness = llguidance.LLTokenizer(backend.to_str(), eos_token=0)
    vocabulary = Vocabulary.of(SimpleNamespace(backend_tokenizer=backend), 1 << 20)
    for number, token in enumerate(vocabulary.tokens):
        if not token.startswith(b"\xff"):  # a mark of its own to the library
            assert token == witness.decode_bytes([number])
    assert all(witness.is_special_token(number) for number in vocabulary.special)


@pytest.mark.parametrize(
    ("model_type", "user_defined", "rules"),
    [
        ("bpe", ("<think>", "\u2581\u2581", "foo bar"), {}),
        ("bpe", (), {"add_dummy_prefix": False}),
        ("bpe", (), {"remove_extra_whitespaces": True}),
        ("unigram", (), {}),
    ],
)
def test_sentencepiece(model_type, user_defined, rules, tmp_path):
    data = pieces(model_type, user_defined, **rules)
    folder = make_folder(tmp_path / "model", {"tokenizer_class": "LlamaTokenizer"}, model=data)
    tokenizer = load_tokenizer(str(folder))
    vocabulary, unwritten, partial = check(tokenizer)
    witness = sentencepiece.SentencePieceProcessor(model_proto=data)
    control = {n for n in range(witness.get_piece_size()) if witness.is_control(n) or witness.is_unknown(n)}
    assert {*vocabulary.special} == control
    assert {vocabulary.tokens[number] for number in unwritten} == {bytes([b]) for b in (0xC0, 0xC1, *range(0xF5, 0x100))}
    assert partial == 128 - len(unwritten)
    a = witness.piece_to_id("a")
    for number, token in enumerate(vocabulary.tokens):
        if number not in control and not witness.is_byte(number):
            assert witness.decode([a, number, a]) == f"a{token.decode()}a"


def test_gguf_files(tmp_path):
    proto = sentencepiece_model_pb2.ModelProto.FromString((DEMO_FOLDER / "tokenizer.model").read_bytes())
    vocabulary, _, partial = check(load_tokenizer(str(sentencepiece_file(tmp_path / "pieces.gguf", proto))))
    assert partial > 100
    assert {vocabulary.tokens[number] for number in vocabulary.special} == {b"<unk>", b"<s>", b"</s>"}
    check(load_tokenizer(str(DEMO_FOLDER)))
    source = original("qwen2")
    vocabulary, _, partial = check(load_tokenizer(str(gguf_of(source, "qwen2", tmp_path / "bytes.gguf"))))
    assert partial > 100
    special = {number for number, token in source.get_added_tokens_decoder().items() if token.special}
    assert {*vocabulary.special} == special
    assert b"<think>" in vocabulary.tokens


def test_pieces_that_only_look_like_bytes():
    """Without a decoder of bytes, `<0x0A>` is a text; with one, `<0xZZ>` is."""
    content = json.loads(llama2().to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<unk>"]
    texts = ["<0x0A>", "<0xZZ>", "<0x0a>", "<0x 1>", "x<0x0A>"]
    size = len(content["model"]["vocab"])
    content["model"]["vocab"] |= {text: size + n for n, text in enumerate(texts)}
    for steps in ([], [decoders.ByteFallback()]):
        backend = Tokenizer.from_str(json.dumps(content))
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *steps, decoders.Fuse()])
        backend.add_tokens([AddedToken("\u2581\u2581", normalized=False), AddedToken("<0x0B>", normalized=False)])
        vocabulary, _, _ = check(PreTrainedTokenizerFast(tokenizer_object=backend))
        assert (b"\n" in vocabulary.tokens[size:]) == bool(steps)
        assert b"<0xZZ>" in vocabulary.tokens


def test_ids_without_a_token_and_rows_of_the_model():
    backend = FILES["gpt2"][0]
    content = json.loads(backend.to_str())
    content["model"]["vocab"] = {text: n + 40 * (n > 300) for text, n in content["model"]["vocab"].items()}
    backend = Tokenizer.from_str(json.dumps(content))
    vocabulary, _, _ = check(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert {*range(301, 341)} <= {*vocabulary.special}
    assert len(check(PreTrainedTokenizerFast(tokenizer_object=backend), rows=400)[0].tokens) == 400


def test_other_tokenizers_are_refused():
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    for tokenizer in (None, SimpleNamespace(backend_tokenizer=backend)):
        with pytest.raises(RequestError, match=r"needs a tokenizer|neither byte-level nor"):
            Vocabulary.of(tokenizer, 2)
