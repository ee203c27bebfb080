"""Markers of documents, the pattern of answers that cite them, and the chunks that hold them."""

import random
import re
import struct
from hashlib import blake2b

import llguidance.hf
import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance import numpy as bitmasks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chunkattn import ChunkedPrompt, Citations, Document, DocumentPrompt
from chunkattn.errors import RequestError
from chunkattn.layout import Names
from chunkattn.models.loader import DEMO_FOLDER
from chunkattn.parsers import PromptParser
from chunkattn.parsers.markers import OPEN, answer_pattern, cited_documents, marker_of

NAMES = Names(chunks="documents", chunk="document")
MARKERS = ["[doc:a]", "[doc:ab]", "[doc:Q-7.1]", "[doc:#k3bq5x2a]"]
WITHIN = 12
PIECES = [
    "[",
    "[d",
    "[do",
    "[doc",
    "[doc:",
    "[doc:a",
    "[doc:b]",
    "[[doc:a]",
    "[Doc:a]",
    "d",
    "oc:",
    "]",
    " ",
    ".",
    "\n",
    "é",
    *MARKERS,
]


def is_allowed(text, required):
    """Definition: every opening begins a marker; required, the first marker comes early enough and without another bracket."""
    places = [match.start() for match in re.finditer(re.escape(OPEN), text)]
    if not all(any(text.startswith(marker, place) for marker in MARKERS) for place in places):
        return False
    if not required:
        return True
    if not places or "[" in text[: places[0]]:
        return False
    late = text[WITHIN : places[0]]
    word = late.removesuffix(" ")
    word = word[:-1] if word[-1:] in (".", "!", "?") else word
    return len(word) <= 32 and all(character.isalnum() for character in word)


def random_text(rng):
    text = "".join(rng.choices(PIECES, k=rng.randint(0, 9)))
    return "".join(rng.choices("xyz,.3 " if rng.random() < 0.5 else "xyzw", k=rng.choice((0, 0, 8, 14, 45)))) + text


@pytest.mark.parametrize("required", [False, True])
def test_the_pattern_holds_the_texts_of_the_definition(required):
    rng, pattern = random.Random(3), re.compile(answer_pattern(MARKERS, WITHIN if required else None))
    found = set()
    for _ in range(20_000):
        text = random_text(rng)
        assert (pattern.fullmatch(text) is not None) == is_allowed(text, required), text
        found.add(is_allowed(text, required))
    assert found == {True, False}


def byte_pairs(extra):
    """A byte-level tokenizer whose vocabulary has tokens across the edges of markers."""
    letters = dict(zip(range(256), sorted(pre_tokenizers.ByteLevel.alphabet())))
    coder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = {word: "".join(part for part, _ in coder.pre_tokenize_str(word)) for word in extra}
    vocabulary = {"</s>": 0, **{letter: 1 + n for n, letter in letters.items()}}
    for word in words.values():
        vocabulary.setdefault(word, len(vocabulary))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = coder, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


@pytest.fixture(scope="module", params=["demo", "bytes"])
def tokens(request):
    """Tokenizer, its tokens for the matcher, and the text of every token."""
    if request.param == "demo":
        tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
        texts = {n: tokenizer.decode([5, n]).removeprefix(tokenizer.decode([5])) for n in range(3, len(tokenizer))}
    else:
        text = "x[doc:a] [doc:ab][doc:Q-7.1]. [[doc:#k3bq5x2a]\n"
        parts = {text[a : a + n] for a in range(len(text)) for n in range(2, 7)}
        tokenizer = byte_pairs(sorted(parts))
        texts = {n: tokenizer.decode([n]) for n in range(1, len(tokenizer))}
    return tokenizer, llguidance.hf.from_tokenizer(tokenizer), {n: t for n, t in texts.items() if t and "\ufffd" not in t}


def matcher(made, required):
    return LLMatcher(made, LLMatcher.grammar_from_regex(answer_pattern(MARKERS, WITHIN if required else None)))


def allowed(machine, size):
    mask = bitmasks.allocate_token_bitmask(1, size)
    bitmasks.fill_next_token_bitmask(machine, mask, 0)
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:size].astype(bool)


@pytest.mark.parametrize("required", [False, True])
def test_random_walks_under_the_mask_make_texts_of_the_definition(tokens, required):
    """Tokens that begin a marker or go on with one are likely, so that walks could break many of them."""
    tokenizer, made, texts = tokens
    rng, pattern = random.Random(5), re.compile(answer_pattern(MARKERS, WITHIN if required else None))

    def weight(text, token):
        begun = (text + texts[token])[text.rfind("[") if "[" in text else len(text) :]
        is_marker = any(marker.startswith(begun) for marker in MARKERS) or texts[token].strip().startswith("[")
        return 3000 if is_marker else 1

    cited = 0
    for _ in range(40):
        machine, text = matcher(made, required), ""
        for _ in range(60):
            choices = allowed(machine, made.vocab_size)
            can_end = choices[tokenizer.eos_token_id]
            assert can_end == machine.is_accepting()
            if can_end and rng.random() < 0.05:
                break
            listed = [n for n in np.flatnonzero(choices) if n in texts]
            token = rng.choices(listed, weights=[weight(text, n) for n in listed])[0]
            assert machine.consume_token(int(token))
            text += texts[token]
        # A text may end inside a marker, so only complete markers are compared.
        assert set(re.findall(r"\[doc:[^\]]*\]", text)) <= set(MARKERS)
        assert machine.is_accepting() == (pattern.fullmatch(text) is not None), text
        cited += any(marker in text for marker in MARKERS)
    assert cited >= 10


def test_a_text_is_accepted_however_its_tokens_split_it_and_a_foreign_marker_never(tokens):
    _, made, texts = tokens
    by_text = {text: token for token, text in texts.items()}
    rng = random.Random(7)

    def split(text):
        """Random tokens of a text; None where the vocabulary has no way."""
        found = []
        while text:
            sizes = [n for n in range(1, 8) if text[:n] in by_text]
            if not sizes:
                return None
            found.append(by_text[text[: (size := rng.choice(sizes))]])
            text = text[size:]
        return found

    tried = 0
    for _ in range(300):
        text = f"x {rng.choice(MARKERS)}{rng.choice(['', ' ', '. '])}[{rng.choice(MARKERS)} [x](d)"
        ids = split(text)
        if ids is not None:
            machine = matcher(made, False)
            assert all(machine.consume_token(token) for token in ids), text
            assert machine.is_accepting()
            tried += 1
    assert tried > 100
    for foreign in ("[doc:b]", "[doc:]", "[doc:aa]", "[doc:abc]", "[[doc:A]", "[doc:a"):
        for _ in range(20):
            machine, ids = matcher(made, False), split(f"x {foreign} y")
            assert ids is not None
            assert not (all(map(machine.consume_token, ids)) and machine.is_accepting()), foreign


def test_a_marker_is_a_function_of_the_document_alone():
    assert marker_of(Document("text", "report-7")) == "[doc:report-7]"
    assert marker_of(Document("other text", "report-7")) == "[doc:report-7]"
    digest = blake2b(b"text", digest_size=5, person=b"text").digest()
    letters = "abcdefghijklmnopqrstuvwxyz234567"
    number = int.from_bytes(digest, "big")
    assert marker_of(Document("text")) == "[doc:#" + "".join(letters[number >> 35 - 5 * n & 31] for n in range(8)) + "]"
    assert marker_of(Document([1, 2])) == marker_of(Document(np.array([1, 2])))
    assert marker_of(Document([1, 2])) != marker_of(Document(struct.pack("<ii", 1, 2).decode()))


@pytest.mark.parametrize("name", ["", "a]b", "[doc:x]", "a b", "a\n", "<|im_end|>", "é", "x" * 65, "#k3bq5x2a", "\ud800"])
def test_other_ids_are_hashed(name):
    marker = marker_of(Document("text", name))
    assert re.fullmatch(r"\[doc:#[a-z2-7]{8}\]", marker)
    assert marker == marker_of(Document("other", name)) != marker_of(Document(name if name else "x"))


@pytest.mark.parametrize(
    ("documents", "reason"),
    [
        ([Document("x", "a"), Document("y", "b"), Document("z", "a")], "document 0 and document 2 have the id 'a'"),
        ([Document("x", "a"), Document("x", "a")], "document 0 and document 1 have the id 'a'"),
        ([Document("y"), Document("x"), Document("x")], "document 1 and document 2 have equal contents and no ids"),
        ([Document([1, 2]), Document(np.array([1, 2]))], "have equal contents and no ids"),
    ],
)
def test_two_documents_with_one_marker_are_refused_by_name(documents, reason):
    with pytest.raises(RequestError, match=reason) as raised:
        cited_documents(documents, Citations(), NAMES)
    assert raised.value.param == "documents"
    assert "give each an id of its own" in str(raised.value)


def test_a_chance_collision_is_told_apart(monkeypatch):
    monkeypatch.setattr("chunkattn.parsers.markers._hash", lambda value, person: "#aaaaaaaa")
    with pytest.raises(RequestError, match="equal by chance"):
        cited_documents([Document("x"), Document("y")], Citations(), NAMES)


@pytest.fixture(scope="module")
def parser():
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    return PromptParser(tokenizer, separator=" # # ", strategy="shared", chunk_aware=False, document_template="<{document}>")


def test_markers_stand_inside_the_chunks_and_the_instruction_in_the_question(parser):
    documents = [Document("Nila sings.", "n"), "", Document([5, 6], "ids"), "Rumi is a poet."]
    prompt = DocumentPrompt("Read.", documents, "Who sings?")
    parsed = parser.parse(prompt, citations={"instruction": "Cite. "})
    tokenizer = parser.encode.tokenizer
    parts = [parsed.layout.part(segment).tolist() for segment in parsed.layout.segments]
    assert tokenizer.decode(parts[1]) == "<[doc:n]\nNila sings.>"
    assert parts[2] == []
    assert parts[3] == [*tokenizer("[doc:ids]\n", add_special_tokens=False).input_ids, 5, 6]
    assert tokenizer.decode(parts[4]) == f"<{marker_of(Document('Rumi is a poet.'))}\nRumi is a poet.>"
    assert tokenizer.decode(parts[5]) == "Cite. Who sings?"
    assert parsed.query == "Who sings?"
    assert parsed.source(0) == "Nila sings."
    assert parsed.source(2) == [5, 6]
    assert parsed.cited.numbers() == {"[doc:n]": 0, "[doc:ids]": 2, marker_of(Document("Rumi is a poet.")): 3}
    plain = parser.parse(prompt)
    assert plain.layout.part(plain.layout.segments[1]).tolist() == parser.encode("<Nila sings.>")
    prefix, chunks = parser.parse_cache("Read.", [Document("Nila sings.", "n"), "Rumi is a poet."], citations=True)
    assert (prefix, chunks) == (parts[0], [parts[1], parts[4]])


def test_the_chunks_of_a_chat_are_those_of_a_prompt(parser):
    documents = [Document("Nila sings.", "n"), "Rumi is a poet."]
    system, user = {"role": "system", "content": "Read."}, {"role": "user", "content": "Who sings?"}
    chat = parser.parse_chat([system, user], documents, None, {"instruction": "Cite. "})
    prompt = parser.parse(DocumentPrompt("Read.", documents, "Who sings? Answer:"), citations={"instruction": "Cite. "})
    assert chat.layout.token_ids.tolist() == prompt.layout.token_ids.tolist()
    assert chat.cited == prompt.cited
    assert chat.query == "Who sings?"


@pytest.mark.parametrize(
    ("prompt", "citations", "reason"),
    [
        ("plain", True, "send a DocumentPrompt"),
        (ChunkedPrompt("a", ["b"], "c"), "auto", "send a DocumentPrompt"),
        (DocumentPrompt("a", ["b"], "c"), "always", "citations must be True, False or one of auto, required"),
        (DocumentPrompt("a", ["b"], "c"), {"style": 1}, "citations have the fields mode, instruction, keep_markers, within"),
        (DocumentPrompt("a", ["b"], "c"), {"instruction": None}, "must be a text of at most"),
        (DocumentPrompt("a", ["b"], "c"), {"keep_markers": 1}, "keep_markers must be True or False"),
        (DocumentPrompt("a", ["b"], "c"), {"within": -1}, "within must be an integer from 0"),
        (DocumentPrompt("a", [Document("b", 7)], "c"), True, "document 0 has an id that is no text but int"),
    ],
)
def test_malformed_citations_are_refused(parser, prompt, citations, reason):
    with pytest.raises(RequestError, match=reason):
        parser.parse(prompt, citations=citations)


def test_a_tokenizer_that_cannot_write_markers_is_refused():
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
    for tokenizer in (words, None):
        parser = PromptParser(tokenizer, separator=" # # ", strategy="shared", chunk_aware=False)
        with pytest.raises(RequestError, match="citations need a tokenizer"):
            parser.parse(DocumentPrompt([1], [Document([1], "a")], [1]), citations=True)


def test_required_citations_need_a_document(parser):
    parsed = parser.parse(DocumentPrompt("a", [""], "c"), citations="required")
    with pytest.raises(RequestError, match="no document to cite"):
        parsed.cited.pattern()
    free = parser.parse(DocumentPrompt("a", [""], "c"), citations=True).cited.pattern()
    assert re.fullmatch(free, "A [link] and [doc.")
    assert not re.fullmatch(free, "A [doc:a]")
