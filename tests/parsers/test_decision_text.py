"""A shared beginning that is tokenized once: the tokens are those of a tokenizer that reads every text whole."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from chunkattn.models.decision_prompts import MARK, SPLIT
from chunkattn.parsers.decision_text import MarkedEncoder
from chunkattn.parsers.encode import PartEncoder, PlainEncoder
from tests.tokenizer_files import CONTROLS, FILES, TRAINED
from tests.tokenizer_texts import PIECES, TEXTS


def unigram(splits):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=splits)
    trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=CONTROLS, show_progress=False)
    tokenizer.train_from_iterator(TRAINED, trainer)
    return tokenizer


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        TRAINED, trainers.WordPieceTrainer(vocab_size=200, special_tokens=CONTROLS, show_progress=False)
    )
    return tokenizer


KINDS = {name: lambda name=name: FILES[name][0] for name in FILES if name != "truncating"}
KINDS |= {"unigram": lambda: unigram(True), "unigram of sentences": lambda: unigram(False), "word piece": word_piece}


class Counted(PartEncoder):
    """Tokenizer that counts characters."""

    read = 0

    def _ids(self, text):
        self.read += len(text)
        return super()._ids(text)


@pytest.fixture(params=KINDS)
def encoders(request):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[request.param]())
    part = Counted(tokenizer)
    return MarkedEncoder(PlainEncoder(part), MARK, SPLIT, sanitizes=True), part, tokenizer


def test_tokens_equal_those_of_the_whole_text(encoders):
    encode, part, tokenizer = encoders
    rng = np.random.default_rng(3)
    whole = 0
    for case in range(14):
        plain = "".join(rng.choice([*TEXTS, *PIECES], 160))
        end = ["\n\nQuestion:\n", " ", "", " " * 300, "a" * 300, "\u4f60" * 300, "1" * 299][case % 7]
        shared = plain + end
        behind = encode.behind(shared, shared + "0 .", "state", "state")
        whole += len(shared) + 600
        for _ in range(4):
            text = shared + "".join(rng.choice([*TEXTS, *PIECES, "aaa", "  ", "\u0301"], 4))
            expected = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert behind(f"{text}{MARK} x", "a", "b") == encode(f"{text}{MARK} x", "a", "b")
            assert behind(text, "a", "b") == (expected, [])
    part.read = 0
    shared = "Ana lives in Oslo, and Ben likes figs.\n" * 60
    behind = encode.behind(shared, shared + "0 .", "state", "state")
    for number in range(50):
        behind(f"{shared}Question {number}", "a", "b")
    assert part.read < 2 * len(shared) + 50 * 300


def test_other_beginnings_marks_and_control_tokens():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=FILES["qwen2"][0])
    encode = MarkedEncoder(PlainEncoder(PartEncoder(tokenizer)), MARK, SPLIT, sanitizes=True)
    states = ["figs. " * 100, f"a{MARK}b{SPLIT}" + "figs. " * 100, "figs. " * 90 + f"a{SPLIT}b{MARK}c" + "figs. " * 10]
    states += [encode.wrapped("<|im_end|>" + "figs. " * 100), encode.wrapped("figs. " * 100 + "<|im_end|>"), "short"]
    for state in states:
        behind = encode.behind(state, f"{state}a{MARK}", "state", "state")
        for text in (f"{state}Who?{MARK} and{MARK}", f"{state}{MARK}", "other", f"x{state}"):
            assert behind(text, "a", "b") == encode(text, "a", "b")


def test_texts_that_a_template_cuts_within_a_control_token():
    """The rest of a mark does not turn the template's own control tokens into text."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=FILES["qwen2"][0])
    encode = MarkedEncoder(PlainEncoder(PartEncoder(tokenizer)), MARK, SPLIT, sanitizes=True)
    state, option = encode.wrapped("figs <|im_end|> and"), encode.wrapped("<|im_end|>")
    ids, marks = encode(f"{state[:9]}</s>{MARK}x{option}", "a", "b")
    assert tokenizer.convert_ids_to_tokens(ids).count("</s>") == 1
    assert len(marks) == 1
