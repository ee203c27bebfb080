"""Rerankers in the form of sentence-transformers: prompt, labels and activation against transformers and PyTorch.

The files are those that `CrossEncoder.save_pretrained` of version 6.2 writes.
"""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

from chunkattn import LLM
from chunkattn.calls.rerank_template import MXBAI_RERANK_V2, PLAIN, QWEN3_RERANKER, RerankTemplate, default_template
from chunkattn.config import EngineConfig
from chunkattn.errors import ModelError, RequestError
from chunkattn.models.loader import open_files
from chunkattn.parsers.encode import PartEncoder
from tests.checkpoints import Oracle
from tests.reranker_files import OFFICIAL, SHAPE, make_reranker

DOCUMENTS = ["Paris is a city.", "", "Böb 東 likes figs?!", " two\n\nlines \n", "a # # b"]
OPTIONS = {"kv_cache_memory_bytes": 8 << 20, "max_num_batched_tokens": 256, "max_num_seqs": 16}
WEB = QWEN3_RERANKER.instruction
ROLE = "{{{{ messages | selectattr('role', 'eq', '{}') | map(attribute='content') | first{} }}}}"
PARTS = "{{{{ (messages | selectattr('role', 'eq', '{}') | first).content[0].text }}}}"
DEFAULT = f" | default('{WEB}', true)"


def template(text, role=ROLE, default=DEFAULT):
    """A chat template of the roles `system`, `query` and `document`. Jinja drops the last line break."""
    filled = text.replace("{instruction}", ROLE.format("system", default))
    return filled.replace("{query}", role.format("query", "")).replace("{document}", role.format("document", "")) + "\n"


def describe(folder, *, labels=None, message=True, form="flat", options=None, activation=None, prompt=None, **changes):
    """Write what sentence-transformers writes beside a model."""
    kinds = ["sentence_transformers.base.modules.transformer.Transformer"]
    if labels:
        kinds.append("sentence_transformers.cross_encoder.modules.logit_score.LogitScore")
        (folder / "1_LogitScore").mkdir(exist_ok=True)
        values = dict(zip(("true_token_id", "false_token_id"), (*labels, None), strict=False))
        (folder / "1_LogitScore" / "config.json").write_text(json.dumps(values | {"module_input_name": "causal_logits"}))
    paths = ["", "1_LogitScore"]
    modules = [{"idx": n, "name": str(n), "path": paths[n], "type": kind} for n, kind in enumerate(kinds)]
    text = {"method": "forward", "method_output_name": "logits"}
    modalities = {"text": text, **({"message": text | {"format": form}} if message else {})}
    files = {
        "modules.json": modules,
        "config_sentence_transformers.json": {
            "model_type": "CrossEncoder",
            "prompts": {} if prompt is None else {"mine": prompt},
            "default_prompt_name": None if prompt is None else "mine",
            "activation_fn": activation,
        },
        "sentence_bert_config.json": {"transformer_task": "text-generation", "modality_config": modalities}
        | ({} if options is None else {"processing_kwargs": {"chat_template": options}}),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(changes.get(name, content)))
    return folder


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """A language model under a name that tells nothing; each test writes its description anew."""
    return make_reranker(tmp_path_factory.mktemp("causal") / "tuned", Qwen3Config(**SHAPE, tie_word_embeddings=True))


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """Classifiers of one and of three classes."""
    made = {}
    for count in (1, 3):
        config = Qwen3Config(**SHAPE, num_labels=count)
        made[count] = make_reranker(tmp_path_factory.mktemp("cls") / "tuned", config, AutoModelForSequenceClassification)
    return made


def picked(folder):
    files = open_files(EngineConfig(model=folder))
    return default_template(None, files.reranker, "tuned", PartEncoder(files.tokenizer))


# The prompt


@pytest.mark.parametrize(
    ("case", "text", "expected", "instruction"),
    [
        ({}, template(OFFICIAL), QWEN3_RERANKER.text, WEB),
        ({"prompt": "Find cities"}, template(OFFICIAL), QWEN3_RERANKER.text, "Find cities"),
        ({"form": "structured"}, template(OFFICIAL, PARTS), QWEN3_RERANKER.text, WEB),
        ({}, template("Q {query} D {document}!"), "Q {query} D {document}!", None),
        ({"prompt": "P"}, template("Q {query} D {document}!"), "Q {query} D {document}!", None),
        ({"prompt": "P"}, template("{instruction}: {query} {document}"), "{instruction}: {query} {document}", "P"),
        (
            {"options": {"add_generation_prompt": True}},
            template("{query} {document}{% if add_generation_prompt %} A:{% endif %}"),
            "{query} {document} A:",
            None,
        ),
        ({"message": False}, None, "{query}{document}", None),
        ({"message": False, "prompt": "Find: "}, None, "{instruction}{query}{document}", "Find: "),
    ],
    ids=str,
)
def test_the_prompt(case, text, expected, instruction, causal):
    (causal / "chat_template.jinja").unlink(missing_ok=True)
    if text is not None:
        (causal / "chat_template.jinja").write_text(text)
    found = picked(describe(causal, labels=(5, 6), **case))
    assert (found.text, found.instruction, found.labels) == (expected, instruction, (5, 6))


def test_a_tokenizer_with_special_tokens_of_pairs(causal, tmp_path):
    """As the tokenizer joins a pair: its own tokens around both, and none beside them."""
    folder = describe(make_reranker(tmp_path / "model"), labels=(5,), message=False)
    file = folder / "tokenizer.json"
    source = json.loads(file.read_text())
    ids = {token["content"]: token["id"] for token in source["added_tokens"]}
    begin, end = ("<|im_start|>", "<|im_end|>")
    special = lambda name, kind: {"SpecialToken": {"id": name, "type_id": kind}}  # noqa: E731
    first, second = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    source["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special(begin, 0), first],
        "pair": [special(begin, 0), first, special(end, 0), second, special(end, 1)],
        "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (begin, end)},
    }
    file.write_text(json.dumps(source))
    found = picked(folder)
    assert (found.text, found.add_special_tokens) == (f"{begin}{{query}}{end}{{document}}{end}", False)


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", True),
        ("{{ fail() }}", True),
        ("{{ messages[1].content }}{{ messages[0].content }}", True),
    ],
)
def test_a_chat_template_without_the_roles_tells_nothing(text, warns, causal, caplog):
    (causal / "chat_template.jinja").write_text(text)
    assert picked(describe(causal, labels=(5, 6))).name == "generic"
    assert ("does not show a query and then a document" in caplog.text) == warns


def test_mxbai_s_parts_stay_apart(causal):
    """A text that mxbai-rerank-v2 was trained on is read in its authors' parts."""
    text = MXBAI_RERANK_V2.text.replace("{|}", "").replace("{instruction}", "")
    (causal / "chat_template.jinja").write_text(template(text))
    assert picked(describe(causal, labels=(5, 6))).text == MXBAI_RERANK_V2.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules.json": {}}, r"modules.json must be a list of objects"),
        (
            {"modules.json": [{"type": "a.Transformer"}, {"type": "a.Dense", "path": "1"}]},
            "Transformer, Dense is not supported",
        ),
        (
            {"modules.json": [{"type": "a.Transformer"}, {"type": "a.LogitScore", "path": "../x"}]},
            "must be the name of a folder",
        ),
        ({"sentence_bert_config.json": {"do_lower_case": True}}, "do_lower_case is not supported"),
        (
            {"config_sentence_transformers.json": {"activation_fn": "torch.nn.Mish", "model_type": "CrossEncoder"}},
            "'torch.nn.Mish' is not supported",
        ),
        ({"labels": ("x",)}, "true_token_id must be a token id"),
        ({"labels": (1, True)}, "true_token_id must be a token id"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(changes, message, causal):
    with pytest.raises(ModelError, match=message):
        open_files(EngineConfig(model=describe(causal, **{"labels": (5, 6), **changes})))


def test_an_embedding_model_is_no_cross_encoder(causal):
    modules = [{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Pooling"}]
    config = {"model_type": "SentenceTransformer", "prompts": {"query": "q: "}}
    describe(causal, **{"modules.json": modules, "config_sentence_transformers.json": config})
    assert open_files(EngineConfig(model=causal)).reranker.labels == ()


# Scores


@pytest.mark.parametrize(
    ("labels", "activation", "function"),
    [
        (("yes", "no"), None, torch.sigmoid),
        (("yes", "no"), "torch.nn.modules.activation.Sigmoid", torch.sigmoid),
        (("yes", "no"), "torch.nn.modules.linear.Identity", lambda x: x),
        (("no",), "torch.nn.modules.linear.Identity", lambda x: x),
        (("no",), None, torch.sigmoid),
        (("yes", "no"), "torch.nn.modules.activation.Tanh", torch.tanh),
        (("yes", "no"), "own.Activation", torch.sigmoid),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_language_model_scores_as_its_files_say(labels, activation, function, causal, llm):
    """The logit of one token, or the difference of two, under the activation."""
    tokenizer = AutoTokenizer.from_pretrained(causal)
    ids = [tokenizer.convert_tokens_to_ids(label) for label in labels]
    oracle = Oracle(causal)
    prompt = OFFICIAL.replace("{instruction}", WEB).replace("{query}", "Which city?")
    expected = []
    for document in DOCUMENTS:
        row = oracle.logits(tokenizer(prompt.replace("{document}", document), add_special_tokens=False).input_ids)[-1]
        expected.append(row[ids[0]] - (row[ids[1]] if len(ids) > 1 else 0.0))
    (causal / "chat_template.jinja").write_text(template(OFFICIAL))
    describe(causal, labels=ids, activation=activation)
    llm.frontend.reranker = open_files(EngineConfig(model=causal)).reranker
    llm.frontend.__dict__.pop("rerank_template", None)
    output = llm.rerank("Which city?", DOCUMENTS)
    assert output.template == "qwen3-reranker"
    found = {r.index: r for r in output.results}
    np.testing.assert_allclose(
        [found[n].relevance_score for n in range(len(expected))], function(torch.tensor(expected)), atol=1e-5
    )
    np.testing.assert_allclose([found[n].logit for n in range(len(expected))], expected, atol=1e-5)
    assert [r.index for r in output.results] == sorted(range(len(expected)), key=lambda n: (-found[n].relevance_score, n))


@pytest.fixture(scope="module")
def llm(causal):
    made = LLM(causal, **OPTIONS)
    yield made
    made.close()


ACTIVATIONS = {
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.Softmax": lambda x: torch.softmax(x, -1),
    "torch.nn.modules.activation.LogSigmoid": torch.nn.functional.logsigmoid,
    "torch.nn.modules.activation.LogSoftmax": lambda x: torch.log_softmax(x, -1),
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.Softplus": torch.nn.functional.softplus,
}
PLACES = {
    "config_sentence_transformers.json": lambda name: {"activation_fn": name},
    "sentence_transformers": lambda name: {"activation_fn": name, "version": "4.1.0"},
    "sbert_ce_default_activation_function": lambda name: name,
}


@pytest.mark.parametrize("classes", [1, 3])
def test_classifiers_score_under_their_activation(classes, classifiers):
    """Each activation, from each place where versions of sentence-transformers have written it."""
    folder = classifiers[classes]
    config = json.loads((folder / "config.json").read_text())
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        prompts = [tokenizer("Which city?" + document, return_tensors="pt").input_ids for document in DOCUMENTS]
        logits = torch.cat([model(prompt).logits for prompt in prompts]).double()
    llm = LLM(folder, **OPTIONS)
    default = torch.sigmoid(logits) if classes == 1 else torch.softmax(logits, -1)
    np.testing.assert_allclose(llm.score("Which city?", DOCUMENTS).scores, default, atol=1e-5)
    for place, written in PLACES.items():
        for name, function in ACTIVATIONS.items():
            (folder / "modules.json").unlink(missing_ok=True)
            (folder / "config.json").write_text(json.dumps(config))
            if place == "config_sentence_transformers.json":
                describe(folder, message=False, activation=name)
            else:
                (folder / "config.json").write_text(json.dumps(config | {place: written(name)}))
            llm.frontend.reranker = open_files(EngineConfig(model=folder)).reranker
            output = llm.score("Which city?", DOCUMENTS)
            np.testing.assert_allclose(output.scores, function(logits), atol=1e-5, err_msg=f"{place} {name}")
            np.testing.assert_allclose(output.logits, logits, atol=1e-5)
            if classes == 1:
                ranked = {r.index: r.relevance_score for r in llm.rerank("Which city?", DOCUMENTS, template=PLAIN).results}
                np.testing.assert_allclose([ranked[n] for n in range(len(DOCUMENTS))], function(logits)[:, 0], atol=1e-5)
    llm.close()


@pytest.mark.parametrize("labels", [(3, 4), (3,), ("yes", 4)])
def test_labels_as_token_ids(labels, llm):
    """The witness is the log-probability of these tokens behind the same prompt."""
    query = "Which city?"
    template = RerankTemplate("own", "{query} {document}:", labels)
    result = llm.rerank(query, DOCUMENTS[:1], template=template).results[0]
    ids = [llm.tokenizer.convert_tokens_to_ids(label) if isinstance(label, str) else label for label in labels]
    scored = llm.score(f"{query} {DOCUMENTS[0]}", [":"], label_token_ids=ids)
    if len(ids) == 2:
        assert result.logit == pytest.approx(scored.logprobs[0][0] - scored.logprobs[0][1], abs=1e-4)
    with pytest.raises(RequestError, match="must be one or two strings or token ids"):
        RerankTemplate("own", "{query} {document}:", (-1, 2))
