"""Rerankers of every form against transformers and llama.cpp, and the choice of a checkpoint's template."""

import json
import logging
import shutil
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config, Qwen3Config

from chunkattn import LLM, RerankTemplate
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.rerank import fill_template, label_ids, relevance_class
from chunkattn.calls.rerank_template import MXBAI_RERANK_V2, QWEN3_RERANKER, TEMPLATES, default_template
from chunkattn.config import EngineConfig
from chunkattn.errors import ConfigError, ModelError, RequestError
from chunkattn.models.loader import DEMO_FOLDER, open_files
from chunkattn.parsers.encode import PartEncoder, PlainEncoder
from tests.checkpoints import Oracle
from tests.gguf_files import Written
from tests.llama_cpp import llama_server
from tests.reranker_files import OFFICIAL, SHAPE, add_tokenizer, make_reranker, qwen_tokenizer, write_tokenizer

DOCUMENTS = ["Paris is a city.", "", "Böb 東 likes figs?!", " two\n\nlines \n", "a # # b", "(Paris)?\n"]
OPTIONS = {"kv_cache_memory_bytes": 8 << 20, "max_num_batched_tokens": 256, "max_num_seqs": 16}
PLAIN_PROMPT = OFFICIAL.replace("{instruction}", QWEN3_RERANKER.instruction)


def softmax(logits):
    return torch.softmax(torch.as_tensor(np.asarray(logits)), -1).tolist()


# Which template

FILES = ["config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A folder of configuration and tokenizer alone, of an architecture, with other keys, a chat template or a model card."""
    folder = tmp_path_factory.mktemp("bare")
    tokenizers = {}
    for name, tokenizer in (("qwen", qwen_tokenizer()), ("other", qwen_tokenizer(added=["<|im_end|>"]))):
        add_tokenizer(folder / name, tokenizer)
        tokenizers[name] = folder / name

    def make(architecture, *, name="model", chat_template=None, card=None, tokenizer="qwen", parent="x", **keys):
        made = folder / str(len([*folder.iterdir()])) / parent / name
        shutil.copytree(tokenizers[tokenizer], made)
        kind = {"Qwen2": Qwen2Config, "Qwen3": Qwen3Config}[architecture[:5]]
        config = kind(**SHAPE).to_dict() | {"architectures": [architecture]} | keys
        (made / "config.json").write_text(json.dumps(config))
        if chat_template is not None:
            (made / "chat_template.jinja").write_text(chat_template)
        if card is not None:
            (made / "README.md").write_text(card)
        return made

    return make


def picked(folder, **options):
    """The template of a folder's reranks."""
    files = open_files(EngineConfig(model=str(folder), **options))
    return default_template(None, files.reranker, str(folder), PartEncoder(files.tokenizer)).name


CAUSAL, CLASSIFIER = "Qwen3ForCausalLM", "Qwen3ForSequenceClassification"
QWEN, MXBAI, GENERIC = "qwen3-reranker", "mxbai-rerank-v2", "generic"
YES_NO = {"id2label": {"0": "yes", "1": "no"}, "label2id": {"yes": 0, "no": 1}}
ONE, TWO = ({"id2label": {str(n): f"LABEL_{n}" for n in range(count)}} for count in (1, 2))
SAYS_SO = "{% for m in messages %}{% endfor %}" + PLAIN_PROMPT
TRAITS = {
    "folder": (CAUSAL, {"name": "Qwen3-Reranker-0.6B"}, QWEN),
    "folder above": (CAUSAL, {"parent": "Qwen3-Reranker-0.6B", "name": "main"}, QWEN),
    "folder far above": (CAUSAL, {"parent": "qwen3-reranker/a/b", "name": "main"}, GENERIC),
    "renamed": (CAUSAL, {}, GENERIC),
    "one class": (CLASSIFIER, ONE, QWEN),
    "two classes without names": (CLASSIFIER, TWO, GENERIC),
    "yes and no": (CLASSIFIER, YES_NO, QWEN),
    "chat template": (CAUSAL, {"chat_template": SAYS_SO}, QWEN),
    "another chat template": (CAUSAL, {"chat_template": "{{ messages[0]['content'] }}"}, GENERIC),
    "original name": (CAUSAL, {"_name_or_path": "Qwen/Qwen3-Reranker-4B"}, QWEN),
    "title of the card": (CAUSAL, {"card": "---\nlicense: apache-2.0\n---\n# Qwen3-Reranker-0.6B\n"}, QWEN),
    "base model": (CAUSAL, {"card": "---\nbase_model:\n- Qwen/Qwen3-Reranker-0.6B\n---\n# mine\n"}, QWEN),
    "snapshot of the hub's cache": (CAUSAL, {"parent": "models--Qwen--Qwen3-Reranker-0.6B/snapshots", "name": "6e9e"}, QWEN),
    "dots": (CAUSAL, {"name": "Qwen3.Reranker.0.6B"}, QWEN),
    "longer title": (CAUSAL, {"card": "# Qwen3-Reranker-0.6B GGUF\n"}, QWEN),
    "title in HTML": (CAUSAL, {"card": "<h1 align='center'>Qwen3-Reranker-0.6B</h1>\n"}, QWEN),
    "second base model": (CAUSAL, {"card": "---\nbase_model:\n  - a/b\n  - Qwen/Qwen3-Reranker-0.6B\n---\n"}, QWEN),
    "a list in the card": (
        CAUSAL,
        {"card": "---\nbase_model: a/b\n---\n# Mine\n\n- Qwen3-Reranker-0.6B\n"},
        GENERIC,
    ),
    "vLLM's flag": (CAUSAL, {"is_original_qwen3_reranker": True}, QWEN),
    "a card that speaks of it": (CAUSAL, {"card": "# Qwen3-Embedding\nSee Qwen3-Reranker-0.6B.\n"}, GENERIC),
    "vLLM's labels": (CAUSAL, {"classifier_from_token": ["no", "yes"]}, QWEN),
    "no control tokens": (CLASSIFIER, {**ONE, "tokenizer": "other"}, GENERIC),
    "traits before the name": ("Qwen2ForCausalLM", {"chat_template": MXBAI_RERANK_V2.text, "name": "qwen3-reranker"}, MXBAI),
    "mxbai": ("Qwen2ForCausalLM", {"name": "mxbai-rerank-base-v2"}, MXBAI),
    "mxbai large": ("Qwen2ForSequenceClassification", {**ONE, "name": "mxbai-rerank-large-v2-seq"}, MXBAI),
    "mxbai renamed": ("Qwen2ForCausalLM", {"card": "---\nbase_model: mixedbread-ai/mxbai-rerank-base-v2\n---\n"}, MXBAI),
    "mxbai's first": ("Qwen2ForCausalLM", {"name": "mxbai-rerank-base-v1"}, GENERIC),
    "mxbai's labels": ("Qwen2ForCausalLM", {"classifier_from_token": ["0", "1"]}, MXBAI),
    "another Qwen2 of one class": ("Qwen2ForSequenceClassification", ONE, GENERIC),
}


@pytest.mark.parametrize("case", TRAITS)
def test_the_template_is_picked_by_traits(case, bare):
    architecture, keys, expected = TRAITS[case]
    assert picked(bare(architecture, **keys)) == expected


def test_the_demo_has_the_plain_template(tmp_path):
    assert picked(DEMO_FOLDER) == "plain"
    link = tmp_path / "demo"
    link.symlink_to(DEMO_FOLDER)
    assert picked(link) == "plain"
    assert picked(shutil.copytree(DEMO_FOLDER, tmp_path / "other")) == GENERIC


def test_the_generic_template_warns_once(bare, caplog):
    def frontend(*args, **options):
        folder = str(bare(*args))
        return Frontend(EngineConfig(model=folder, **options), open_files(EngineConfig(model=folder)))

    with caplog.at_level(logging.WARNING, logger="chunkattn"):
        made = frontend(CAUSAL)
        assert caplog.messages == []  # not before it ranks
        assert [made.rerank_template.name for _ in range(3)] == [GENERIC] * 3
    (message,) = caplog.messages
    for said in ("'generic'", "0.2 to 0.4", "rerank(template=...)", "--rerank-template", "`template` of a request", QWEN):
        assert said in message
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="chunkattn"):
        for option in (GENERIC, QWEN):
            assert frontend(CAUSAL, rerank_template=option).rerank_template is TEMPLATES[option]
        own = frontend(CAUSAL, rerank_template="Q: {query} D: {document}").rerank_template
        assert (own.text, own.labels) == ("Q: {query} D: {document}", ("yes", "no"))
    assert caplog.messages == []
    with pytest.raises(ConfigError, match="rerank_template must be one of generic, qwen3-reranker, mxbai-rerank-v2, plain"):
        frontend(CAUSAL, rerank_template="qwen4")
    with pytest.raises(ConfigError, match=r"rerank_template: the text of template 'own' must hold \{query\} once"):
        frontend(CAUSAL, rerank_template="{document}")


# Classes


@pytest.mark.parametrize(
    ("names", "place"),
    [
        (("relevance",), 0),
        (("no", "yes"), 1),
        (("yes", "no"), 0),
        (("No", "YES"), 1),
        (("0", "1"), 1),
        (("not_relevant", "relevant"), 1),
        (("false", "true"), 1),
    ],
)
def test_the_class_that_means_relevant(names, place):
    assert relevance_class(names) == place


@pytest.mark.parametrize("names", [("LABEL_0", "LABEL_1"), ("yes", "maybe"), ("a", "b")])
def test_classes_without_a_meaning_are_refused(names):
    with pytest.raises(RequestError, match=f"'{names[0]}' and '{names[1]}', which does not tell .*id2label") as caught:
        relevance_class(names)
    assert caught.value.param == "documents"


@pytest.mark.parametrize("names", [["relevance"], ["no", "yes"], ["yes", "no"]])
def test_classifiers_rank_as_in_transformers(names, tmp_path):
    """One class: the sigmoid; two: the softmax, whichever comes first."""
    config = Qwen3Config(**SHAPE, id2label=dict(enumerate(names)), label2id={name: n for n, name in enumerate(names)})
    folder = make_reranker(tmp_path, config, AutoModelForSequenceClassification)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(PLAIN_PROMPT.replace("{query}", "Which city?").replace("{document}", d)) for d in DOCUMENTS]
    with torch.no_grad():
        logits = torch.cat([model(torch.as_tensor([prompt.input_ids])).logits for prompt in prompts])
    expected = torch.sigmoid(logits[:, 0]) if len(names) == 1 else torch.softmax(logits, -1)[:, names.index("yes")]
    output = LLM(str(folder), **OPTIONS).rerank("Which city?", DOCUMENTS)
    assert output.template == QWEN
    found = {r.index: r.relevance_score for r in output.results}
    np.testing.assert_allclose([found[n] for n in range(len(DOCUMENTS))], expected, atol=1e-5)


# mxbai-rerank-v2


def mxbai_ids(tokenizer, query, document, instruction=None):
    """The prompt as the package `mxbai-rerank` joins it: six parts, each tokenized alone."""
    asked = f"query: {query}" if not instruction else f"instruction: {instruction}\nquery: {query}"
    task = (
        "You are a search relevance expert who evaluates how well documents match search queries. For each query-document "
        "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment (0 for "
        "not relevant, 1 for relevant).\nRelevance:"
    )
    system = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    parts = [f"{system}<|im_start|>user\n", asked, "\n", f"document: {document}", "\n", task]
    parts.append("<|im_end|>\n<|im_start|>assistant\n")
    return [i for part in parts for i in tokenizer(part, add_special_tokens=False).input_ids]


QUERIES = ["Which city?", "what??\n", " two  spaces (", "東"]


@pytest.fixture(scope="module")
def mxbai(tmp_path_factory):
    config = Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}, tie_word_embeddings=True)
    return make_reranker(tmp_path_factory.mktemp("mxbai") / "mxbai-rerank-base-v2", config)


def test_mxbai_s_parts_are_tokenized_apart(mxbai):
    encode = PartEncoder(AutoTokenizer.from_pretrained(mxbai))
    plain, joined = PlainEncoder(encode), 0
    for query in QUERIES:
        for instruction in (None, "", "Find cities?\n"):
            before, contents, after = fill_template(plain, MXBAI_RERANK_V2, query, DOCUMENTS, instruction)
            for document, content in zip(DOCUMENTS, contents, strict=True):
                ids = mxbai_ids(encode.tokenizer, query, document, instruction)
                assert before + content + after == ids
                joined += ids != encode.tokenizer(encode.tokenizer.decode(ids), add_special_tokens=False).input_ids
    assert joined > 10, "tokenized as one text, they would be other tokens"
    assert encode.tokenizer.convert_ids_to_tokens(label_ids(plain, MXBAI_RERANK_V2)) == ["1", "0"]
    own = RerankTemplate("own", "{query}?{|}\n{document}{|}.", ("1", "0"))
    before, (content,), after = fill_template(plain, own, "q", ["d"])
    assert encode.tokenizer.convert_ids_to_tokens(before + content + after) == ["q", "?", "Ċ", "d", "."]


def test_mxbai_ranks_by_the_difference_of_two_logits(mxbai):
    tokenizer, oracle = AutoTokenizer.from_pretrained(mxbai), Oracle(mxbai)
    one, zero = (tokenizer(label).input_ids[0] for label in "10")
    rows = [oracle.logits(mxbai_ids(tokenizer, QUERIES[0], document))[-1] for document in DOCUMENTS]
    expected = np.array([row[one] - row[zero] for row in rows])
    output = LLM(str(mxbai), **OPTIONS).rerank(QUERIES[0], DOCUMENTS)
    assert output.template == MXBAI
    assert [r.index for r in output.results] == np.argsort(-expected).tolist()
    for result in output.results:
        assert result.relevance_score == pytest.approx(1 / (1 + np.exp(-expected[result.index])), abs=1e-5)


# GGUF files as llama.cpp converts them


def add_head(writer, template=PLAIN_PROMPT, pooling=gguf.PoolingType.RANK, labels=("yes", "no")):
    write_tokenizer(writer, qwen_tokenizer(), template)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if labels:
        writer.add_classifier_output_labels(list(labels))


@pytest.fixture(scope="module")
def headed(tmp_path_factory):
    """A GGUF file with the pooling head, and its twin without: the head is two rows of the tied embedding."""
    folder, tokenizer = tmp_path_factory.mktemp("gguf"), qwen_tokenizer()
    config = Qwen3Config(**{**SHAPE, "hidden_size": 128}, tie_word_embeddings=True)
    torch.manual_seed(0)
    embedding = AutoModelForCausalLM.from_config(config, dtype=torch.float32).get_input_embeddings().weight.detach().numpy()
    rows = np.stack([embedding[tokenizer.token_to_id(label)] for label in ("yes", "no")])

    def make(name, change=add_head, tensors=None):
        given = {"cls.output.weight": rows, **(tensors or {})}
        return Written(folder / f"{name}.gguf", config, Kind.F32, change=change, tensors=given)

    make.twin = Written(folder / "twin.gguf", config, Kind.F32, change=lambda w: write_tokenizer(w, tokenizer))
    make.tokenizer, make.rows = tokenizer, rows
    return make


@pytest.fixture(scope="module")
def ranked(headed):
    """The file, and its scores by document."""
    path = headed("model").path
    output = LLM(str(path), **OPTIONS).rerank("Which city?", DOCUMENTS)
    assert output.template == QWEN
    return path, {r.index: r.relevance_score for r in output.results}


def test_a_pooling_head_ranks_as_its_language_model(headed, ranked):
    """The witness is transformers' loading of the twin: the softmax over the logits of two tokens."""
    oracle, labels = headed.twin.oracle(), [headed.tokenizer.token_to_id(label) for label in ("yes", "no")]
    for index, document in enumerate(DOCUMENTS):
        prompt = PLAIN_PROMPT.replace("{query}", "Which city?").replace("{document}", document)
        logits = oracle.logits(headed.tokenizer.encode(prompt, add_special_tokens=False).ids)[-1]
        assert ranked[1][index] == pytest.approx(softmax(logits[labels])[0], abs=1e-5), document


def test_a_pooling_head_ranks_as_in_llama_cpp(ranked):
    path, found = ranked
    documents = [document for document in DOCUMENTS if document]  # llama.cpp takes no empty document
    with llama_server(path, embedding=True, pooling_type=4) as ask:
        answer = ask("/rerank", {"query": "Which city?", "documents": documents})
    scores = {documents[r["index"]]: r["relevance_score"] for r in answer["results"]}
    assert len(scores) == len(documents)
    for index, document in enumerate(DOCUMENTS):
        if document:
            assert found[index] == pytest.approx(scores[document], abs=1e-3), document


def test_the_template_of_a_gguf_file(headed):
    def template(change):
        files = open_files(EngineConfig(model=str(headed("other", change).path)))
        return default_template(None, files.reranker, None, PartEncoder(files.tokenizer))

    assert template(add_head) is QWEN3_RERANKER
    own = template(partial(add_head, template="{query} is in {document}"))
    assert own.text == "{query} is in {document}"
    assert template(partial(add_head, template=None)) is QWEN3_RERANKER  # by the head's classes
    assert template(partial(add_head, template=None, labels=("a", "b"))).name == GENERIC

    def named(writer):
        add_head(writer, template=None, labels=("a", "b"))
        writer.add_name("Qwen3 Reranker 0.6B")

    assert template(named) is QWEN3_RERANKER


@pytest.mark.parametrize(
    ("change", "tensors", "message"),
    [
        (partial(add_head, pooling=gguf.PoolingType.MEAN), {}, r"qwen3\.pooling_type is 1 \(mean\): embedding models"),
        (partial(add_head, pooling=gguf.PoolingType.CLS), {}, r"pooling_type is 2 \(cls\)"),
        (partial(add_head, pooling=gguf.PoolingType.LAST), {}, r"pooling_type is 3 \(last\)"),
        (partial(add_head, pooling=None), {}, r"the tensor cls\.output\.weight, no bias, and qwen3\.pooling_type 4 \(rank\)"),
        (add_head, {"cls.output.weight": None}, r"the tensor cls\.output\.weight"),
        (partial(add_head, labels=("yes", "no", "perhaps")), {}, r"output_labels names 3 classes, .* has 2 rows"),
        (add_head, {"cls.output.bias": np.zeros(2, np.float32)}, r"cls\.output\.weight, no bias"),
    ],
    ids=["mean", "cls", "last", "no pooling", "no head", "labels", "bias"],
)
def test_other_heads_are_refused(change, tensors, message, headed):
    with pytest.raises(ModelError, match=message):
        open_files(EngineConfig(model=str(headed("refused", change, tensors).path))).load()


def test_a_reranker_in_gguf_generates_nothing(headed):
    llm = LLM(str(headed("silent").path), **OPTIONS)
    with pytest.raises(RequestError, match="sequence classifier and cannot generate"):
        llm.generate("Paris")
    result = llm.score("Which city?", ["Paris"])
    assert (len(result.scores[0]), result.logprobs) == (2, None)
