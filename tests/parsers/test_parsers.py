"""Prompts of every form to layouts, with real tokenizers."""

import json

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chunkattn import ChunkedPrompt, DocumentPrompt
from chunkattn.config import EngineConfig
from chunkattn.errors import ConfigError, RequestError
from chunkattn.models.loader import DEMO_FOLDER
from chunkattn.parsers import PromptParser
from chunkattn.parsers.delimited import check_delimiter, flashinfer_params, pack_delimited, parse_delimited
from chunkattn.parsers.document_encoder import DEFAULT_TEMPLATE, pick_template
from chunkattn.parsers.encode import PartEncoder
from chunkattn.parsers.separator import split_ids

SEP = " # # "


@pytest.fixture(scope="module")
def spm():
    """SentencePiece, as Llama 2 uses it: a dummy space before every text."""
    return AutoTokenizer.from_pretrained(DEMO_FOLDER)


@pytest.fixture(scope="module")
def bpe():
    """Byte-level BPE with BOS before and EOS behind, and merges across ' #' and '# '."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    merges = [("Ġ", "#"), (".", "Ġ#"), ("Ġ#", "Ġ#"), ("a", "b"), ("Ġ", "a")]
    vocab = {t: i for i, t in enumerate(["<s>", "</s>", *sorted(alphabet), *("".join(m) for m in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def parser(tokenizer, chunk_aware=True, strategy="shared", **options):
    return PromptParser(tokenizer, separator=SEP, strategy=strategy, chunk_aware=chunk_aware, **options)


def parts(layout):
    return [layout.part(s).tolist() for s in layout.segments]


def bare(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def test_leading_special_tokens_only(bpe, spm):
    assert bpe("ab").input_ids == [0, *bare(bpe, "ab"), 1]
    assert PartEncoder(bpe).leading_ids == [0]
    assert PartEncoder(spm).leading_ids == []


@pytest.mark.parametrize("which", ["bpe", "spm"])
def test_text_is_split_before_tokenizing(which, request):
    tokenizer = request.getfixturevalue(which)
    texts = ["Be brief.", "first doc.", "", "a", "Why?"]
    parsed = parser(tokenizer).parse(SEP.join(texts))
    first, *rest = parts(parsed.layout)
    assert first == [*PartEncoder(tokenizer).leading_ids, *bare(tokenizer, texts[0])]
    assert rest == [bare(tokenizer, t) for t in texts[1:]]
    assert parsed.layout.chunk_lens[1] == 0
    assert parsed.text == "".join(texts)


def test_merges_across_a_separator_do_not_hide_it(bpe):
    """BPE merges '.' with the separator's ' #': a search for its ids would miss it."""
    text = f"x.{SEP}b{SEP}c"
    separator = bare(bpe, SEP)
    assert len(split_ids(bare(bpe, text), separator)) < 3
    assert parser(bpe).parse(text).layout.num_chunks == 1


def test_fewer_than_two_separators_is_a_plain_prompt(bpe):
    for text in ("hello", f"a{SEP}b"):
        layout = parser(bpe).parse(text).layout
        assert layout.is_plain
        assert layout.token_ids.tolist() == [0, *bare(bpe, text)]
    assert parser(bpe, chunk_aware=False).parse(f"a{SEP}b{SEP}c").layout.is_plain
    assert not parser(bpe, chunk_aware=False).parse(f"a{SEP}b{SEP}c", True).layout.is_plain
    assert parser(bpe).parse(f"a{SEP}b{SEP}c", False).layout.is_plain


def test_chunked_prompts_are_never_split_again(bpe):
    evil = f"ignore this{SEP}and that{SEP}or else"
    layout = parser(bpe).parse(ChunkedPrompt(evil, [evil, "b"], evil)).layout
    assert parts(layout) == [[0, *bare(bpe, evil)], bare(bpe, evil), bare(bpe, "b"), bare(bpe, evil)]
    separator = bare(bpe, SEP)
    assert parts(parser(bpe).parse(ChunkedPrompt(separator, [separator], separator)).layout) == [separator] * 3


def test_no_prefix_and_no_chunks(bpe):
    assert parts(parser(bpe).parse(f"{SEP}b{SEP}c").layout)[0] == [0]  # BOS alone
    assert parts(parser(bpe).parse(ChunkedPrompt([], [[5]], [6])).layout) == [[], [5], [6]]
    layout = parser(bpe).parse(ChunkedPrompt([4], [], [6])).layout
    assert (layout.num_chunks, layout.is_plain) == (0, False)


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=3))
def test_split_ids_is_str_split(ids, separator):
    """Leftmost, non-overlapping: what Python does to strings."""
    text, cut = "".join(map(str, ids)), "".join(map(str, separator))
    assert ["".join(map(str, p)) for p in split_ids(ids, separator)] == text.split(cut)


def test_ids_are_split_at_the_separator_s_own_ids(bpe):
    separator = bare(bpe, SEP)
    ids = [7, *separator, 8, 9, *separator, *separator, 5]
    assert parts(parser(bpe).parse({"prompt_token_ids": ids}).layout) == [[7], [8, 9], [], [5]]
    plain = parser(bpe, chunk_aware=False).parse({"prompt_token_ids": ids}).layout
    assert plain.is_plain
    assert plain.token_ids.tolist() == ids
    assert parser(bpe).parse({"prompt": f"a{SEP}b{SEP}c"}).layout.num_chunks == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        (f"a{SEP}b{SEP}", "question is empty"),
        (ChunkedPrompt("a", ["b"], ""), "question is empty"),
        (ChunkedPrompt([1], [[2]], []), "question is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        (ChunkedPrompt("a", [[1]], "b"), "all text or all token ids"),
        (ChunkedPrompt("a", "text", "b"), "chunks must be a list"),
        (ChunkedPrompt([1], 5, [2]), "chunks must be a list"),
        ({7: "a"}, "a prompt dict"),
        ("a\udcff", "valid Unicode"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "a prompt dict"),
        ({"text": "a"}, "a prompt dict"),
        ({"prompt_token_ids": [1, -1]}, r"prompt_token_ids\[1\]"),
        ({"prompt_token_ids": [True]}, r"prompt_token_ids\[0\]"),
        ({"prompt_token_ids": [1.0]}, r"prompt_token_ids\[0\]"),
        ({"prompt_token_ids": 5}, "list of token ids"),
        (ChunkedPrompt([1], [[2], [2**31]], [3]), r"chunk 1\[0\]"),
        (17, "got int"),
        ([1, 2], "prompt_token_ids"),
    ],
)
def test_bad_prompts(bpe, prompt, message):
    with pytest.raises(RequestError, match=message):
        parser(bpe).parse(prompt)


def test_without_a_tokenizer():
    blind = parser(None, chunk_aware=False)
    assert blind.parse({"prompt_token_ids": [1]}).layout.is_plain
    for prompt, aware in (("text", None), ({"prompt_token_ids": [1]}, True)):
        with pytest.raises(RequestError, match="tokenizer"):
            blind.parse(prompt, aware)


CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_chat(bpe):
    bpe.chat_template = CHAT
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": f"  Compare{SEP}a{SEP}b "},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "again"},
    ]
    parsed = parser(bpe).parse_chat(messages, [f"x{SEP}y", "z"])
    prefix, question = (
        "<|system|>Be kind.<|end|><|user|>",
        f"Compare{SEP}a{SEP}b<|end|><|assistant|>ok<|end|><|user|>again<|end|><|assistant|>",
    )
    assert parts(parsed.layout) == [bare(bpe, t) for t in (prefix, f"Document: x{SEP}y\n\n", "Document: z\n\n", question)]
    plain = parser(bpe).parse_chat(messages)
    assert plain.layout.is_plain
    assert plain.layout.token_ids.tolist() == bare(bpe, prefix + question)


def test_documents_stand_in_their_template_wherever_they_are_named(bpe):
    """A text with it, as one text; token ids and an empty text without."""
    bpe.chat_template = CHAT
    documents = [f"a b{SEP}y", [7, 8], "", np.array([9], np.int32)]
    expected = [bare(bpe, f"Document: a b{SEP}y\n\n"), [7, 8], [], [9]]
    prompt = parser(bpe).parse(DocumentPrompt("a", documents, "ab"))
    assert parts(prompt.layout) == [[0, *bare(bpe, "a")], *expected, bare(bpe, "ab")]
    assert prompt.text is None
    assert parser(bpe).parse(DocumentPrompt("a", ["b"], "c")).text == "aDocument: b\n\nc"
    chat = [{"role": "user", "content": "x"}]
    assert parts(parser(bpe).parse_chat(chat, documents).layout)[1:-1] == expected
    assert parser(bpe).parse_cache("a", [documents[0], ""])[1] == [expected[0], []]
    assert parser(bpe).parse_cache([4], [[7, 8]])[1] == [[7, 8]]
    own = parser(bpe, document_template="<{}{document}b")
    assert parts(own.parse(DocumentPrompt([4], ["a"], [5])).layout) == [[4], bare(bpe, "<{}ab"), [5]]


def test_explicit_parts_have_no_template(bpe):
    for prompt in (ChunkedPrompt("a", ["b"], "c"), f"a{SEP}b{SEP}c"):
        assert parts(parser(bpe).parse(prompt).layout)[1] == bare(bpe, "b")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (DocumentPrompt("a", "b", "c"), "documents must be a list of strings or token ids, got str"),
        (DocumentPrompt("a", ["b", 5], "c"), "document 1 must be a string or token ids, got int"),
        (DocumentPrompt("a", ["b", [1.5]], "c"), r"document 1\[0\] is not a token id: 1.5"),
        (DocumentPrompt("a", ["b", "\ud800"], "c"), "document 1 .*cannot be tokenized"),
        (DocumentPrompt("a", ["b"], ""), "the question is empty"),
        (DocumentPrompt([1], ["b"], []), "the question is empty"),
        (DocumentPrompt("a", ["b"], [1]), "prefix and question must be both text or both token ids"),
    ],
)
def test_bad_document_prompts(bpe, prompt, message):
    with pytest.raises(RequestError, match=message):
        parser(bpe).parse(prompt)


@pytest.mark.parametrize(
    "template", ["", "Document:", "{document} {document}", "{title}: {document}", "{}", "{document}\ud800"]
)
def test_bad_document_templates(bpe, template):
    """They are refused before anything is loaded; a checkpoint's own is refused with the file's name."""
    with pytest.raises(ConfigError, match="document_template"):
        EngineConfig(document_template=template)
    with pytest.raises(ConfigError, match="document_template"):
        parser(bpe, document_template=template)
    bpe.init_kwargs["document_template"] = template
    try:
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: document_template"):
            pick_template(None, bpe)
        assert pick_template("{document}", bpe) == "{document}"
    finally:
        del bpe.init_kwargs["document_template"]


def test_where_the_document_template_comes_from(bpe, spm):
    assert pick_template("<{document}", spm) == "<{document}"
    assert pick_template(None, spm) == "{document}"  # the demo's own
    assert pick_template(None, bpe) == pick_template(None, None) == DEFAULT_TEMPLATE == "Document: {document}\n\n"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (CHAT, [{"role": "system", "content": "x"}], "no user message"),
        (CHAT, [{"role": "user", "content": ["x"]}], "must be a string"),
        ("{{ raise_exception('no way') }}", [{"role": "user", "content": "x"}], "no way"),
        ("{{ messages[0].content | length * '-' }}{{ messages[0].content }}", [{"role": "user", "content": "x"}], "in place"),
    ],
)
def test_bad_chats(bpe, template, messages, message):
    bpe.chat_template = template
    with pytest.raises(RequestError, match=message):
        parser(bpe).parse_chat(messages, ["doc"])


def test_flashinfer_parameters_of_the_published_examples():
    ids = [*range(1, 8), 0, 21, 0, 22, 0, 23, 0]
    params = flashinfer_params(ids, 0)
    assert len(ids) == 14
    assert params.prefix_len.tolist() == [7]
    assert params.token_pos_in_items.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert (params.token_pos_in_items_len, params.max_item_len.tolist()) == (7, [1])
    params = flashinfer_params([5, 0, 1, 1, 1, 0, 2, 2, 0, 3, 3, 3, 3, 0], 0)
    assert params.token_pos_in_items.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert params.max_item_len.tolist() == [4]
    assert [str(a.dtype) for a in (params.prefix_len, params.token_pos_in_items, params.max_item_len)] == [
        "uint32",
        "uint16",
        "uint16",
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.lists(st.lists(st.integers(1, 9), max_size=4), max_size=5))
def test_delimited_round_trip(query, items):
    assert parse_delimited(pack_delimited(query, items, 0), 0) == (query, items)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([1, 2], "no delimiter"), ([0, 1, 0], "query is empty"), ([1, 0, 2], "end with the delimiter")],
)
def test_bad_delimited(ids, message):
    with pytest.raises(RequestError, match=message):
        parse_delimited(ids, 0)


def test_delimiter_collisions_name_the_part():
    with pytest.raises(RequestError, match="item 1 contains the delimiter"):
        pack_delimited([1], [[2], [3, 0]], 0)
    with pytest.raises(RequestError, match="query contains the delimiter"):
        pack_delimited([0], [], 0)


def test_a_delimiter_must_stand_for_itself(bpe):
    check_delimiter(bpe, 0, len(bpe))  # "<s>", and id 0 is as good as any
    half = bpe.convert_tokens_to_ids("Ã")  # one byte of a character: its text is a replacement character
    with pytest.raises(ConfigError, match="tokenizes to"):
        check_delimiter(bpe, half, len(bpe))
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        check_delimiter(bpe, 10**6, len(bpe))


def test_the_demo_vocabulary_is_sentencepiece(spm):
    """The Hugging Face tokenizer agrees with the sentencepiece library on the demo's own language."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(DEMO_FOLDER / "tokenizer.model"))
    for text in ("Bukepi likes onions.", "Where does Rofimo live? Answer:", "yes", "Zürich 東京"):
        assert bare(spm, text) == model.encode(text)
    assert json.loads((DEMO_FOLDER / "tokenizer_config.json").read_text())["tokenizer_class"] == "LlamaTokenizer"
    assert np.max(bare(spm, "Zürich 東京 🦙")) < model.get_piece_size()
