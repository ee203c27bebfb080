"""Sequence classifiers: class logits against one transformers forward per item, whatever the algorithm."""

import asyncio
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from chunkattn import LLM, AsyncLLM, SamplingParams
from chunkattn.calls.algorithms import ALGORITHMS
from chunkattn.cli import app
from chunkattn.config import EngineConfig
from chunkattn.engine.messages import GenerateRequest, ScoreRequest
from chunkattn.errors import ModelError, NonFiniteError, RequestError
from chunkattn.models.loader import DEMO_FOLDER, open_files
from chunkattn.rope.positions import make_layout
from tests.checkpoints import CHECKPOINTS, VOCAB, make_checkpoint
from tests.engine.test_non_finite import BAD, damaged

QUICK = [("llama", 1), ("qwen3", 3), ("mistral-window", 3)]
MODELS = [
    *QUICK,
    *(pytest.param(*m, marks=pytest.mark.ci) for m in (("mistral", 3), ("qwen2", 1), ("llama-bias", 3), ("qwen3", 1))),
]
OPTIONS = {"skip_tokenizer_init": True, "max_num_batched_tokens": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 8 << 20}


class Classifier:
    """A tiny random checkpoint, the engine over it, and transformers as the witness."""

    def __init__(self, name, num_labels, folder, **changes):
        config = type(CHECKPOINTS[name]).from_dict(CHECKPOINTS[name].to_dict() | {"num_labels": num_labels} | changes)
        self.folder = make_checkpoint(config, folder, auto=AutoModelForSequenceClassification)
        self.llm = LLM(str(self.folder), **OPTIONS)
        self.model = AutoModelForSequenceClassification.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def logits(self, query, items):
        """float32 `[items, num_labels]` by definition."""
        return np.array([self.model(torch.as_tensor([[*query, *item]])).logits[0].numpy() for item in items])


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A classifier by name and number of classes, made once."""
    made = {}

    def get(name="qwen3", num_labels=3):
        if (name, num_labels) not in made:
            made[name, num_labels] = Classifier(name, num_labels, tmp_path_factory.mktemp(name))
        return made[name, num_labels]

    yield get
    for one in made.values():
        one.llm.core.scheduler.check()
        assert one.llm.reset_prefix_cache(), "pages leaked"


def random_job(rng, items=9):
    query = rng.integers(0, VOCAB, rng.integers(1, 60)).tolist()
    return query, [[], *(rng.integers(0, VOCAB, rng.integers(0, 25)).tolist() for _ in range(items))]


@pytest.mark.parametrize("num_labels", [1, 3])
def test_logits_have_the_same_bits_in_any_company(num_labels, classifier, rng):
    llm = classifier("qwen3" if num_labels == 3 else "llama", num_labels).llm
    query, item = (rng.integers(0, VOCAB, n).tolist() for n in (40, 17))
    alone = llm.score(query, [item], algorithm="serial", cache_salt="alone").logits[0]
    for company in (1, 5, 30):
        others = [rng.integers(0, VOCAB, rng.integers(1, 30)).tolist() for _ in range(company)]
        for algorithm in ("packed_segment", "prefill_extend", "serial"):
            found = llm.score(query, [*others[1:], item, others[0]], algorithm=algorithm, cache_salt=f"{algorithm} {company}")
            assert found.logits[-2] == alone


@pytest.mark.parametrize(("name", "num_labels"), MODELS)
def test_scores_are_one_forward_per_item(name, num_labels, classifier, rng):
    one = classifier(name, num_labels)
    query, items = random_job(rng)
    expected = torch.as_tensor(one.logits(query, items))
    scores = torch.sigmoid(expected) if num_labels == 1 else torch.softmax(expected, -1)
    for algorithm in ["auto", *ALGORITHMS]:
        result = one.llm.score(query, items, algorithm=algorithm)
        assert result.algorithm == algorithm or algorithm == "auto"
        assert result.logprobs is None
        np.testing.assert_allclose(result.logits, expected, atol=1e-4)
        np.testing.assert_allclose(result.scores, scores, atol=1e-4)
        assert one.llm.score(query, items, algorithm=algorithm, apply_softmax=True).scores == result.scores
    assert np.ptp(expected.numpy(), axis=0).min() > 0.1, "items that look alike would show nothing"


def test_item_first(classifier, rng):
    query, items = random_job(rng)
    expected = np.concatenate([classifier().logits(item, [query]) for item in items])
    np.testing.assert_allclose(classifier().llm.score(query, items, item_first=True).logits, expected, atol=1e-4)


def test_more_items_than_rows_are_read_at_once(classifier, rng):
    query, items = [1, 2], rng.integers(0, VOCAB, (70, 2)).tolist()
    logits = classifier().llm.score(query, items).logits
    np.testing.assert_allclose(logits[::9], classifier().logits(query, items[::9]), atol=1e-4)


def test_no_items(classifier):
    result = classifier().llm.score([1], [])
    assert (result.scores, result.logits, result.logprobs) == ([], [], None)


def test_generation_is_refused_before_any_work(classifier):
    llm = classifier().llm
    for call in (
        lambda: llm.generate({"prompt_token_ids": [1]}),
        lambda: llm.generate([]),
        lambda: llm.chat([{"role": "user", "content": "Hello"}]),
        lambda: llm.core.add(GenerateRequest("g", make_layout([], [], [1]), SamplingParams())),
    ):
        with pytest.raises(RequestError, match="sequence classifier and cannot generate"):
            call()
    assert not llm.core.has_work


def test_label_tokens_are_refused(classifier):
    llm = classifier().llm
    for items in ([[2]], []):
        for name, value in (("label_token_ids", [5]), ("labels", ["yes"])):
            with pytest.raises(RequestError, match=f"scores its own 3 classes; leave {name} out") as caught:
                llm.score([1], items, **{name: value})
            assert caught.value.param == name
    with pytest.raises(RequestError, match="a sequence classifier takes none"):
        llm.core.add(ScoreRequest("s", make_layout([], [], [1, 2]), np.array([1]), ((5,),)))
    assert not llm.core.has_work


def test_language_models_need_label_tokens(engine):
    llm = engine("qwen3")
    with pytest.raises(RequestError, match="give either labels or label_token_ids"):
        llm.score([1], [[2]])
    with pytest.raises(RequestError, match="a language model needs label_token_ids"):
        llm.core.add(ScoreRequest("s", make_layout([], [], [1, 2]), np.array([1]), ()))
    assert llm.score([1], [[2]], label_token_ids=[5]).logits is None


def test_warm_up_compiles_the_head(classifier, rng):
    llm = LLM(
        str(classifier().folder), **OPTIONS | {"warmup": True, "max_num_batched_tokens": 16, "kv_cache_memory_bytes": 1 << 20}
    )
    before = dict(llm.core.runner.compiles)
    assert before["classify"] > 0
    assert "sample" not in before
    llm.score(*random_job(rng))
    assert dict(llm.core.runner.compiles) == before


@pytest.mark.ci
def test_text_and_the_command(tmp_path):
    """With the demo's tokenizer."""
    Classifier("qwen3", 1, tmp_path, vocab_size=704)
    for file in DEMO_FOLDER.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    llm = LLM(str(tmp_path), kv_cache_memory_bytes=1 << 20)
    query, items = "Find a poet.", ["Rumi is a poet.", ""]
    ids = [llm.parser.encode(text) for text in (query, *items)]
    np.testing.assert_allclose(llm.score(query, items).logits, llm.score(ids[0], ids[1:]).logits, atol=1e-6)
    done = CliRunner().invoke(app, ["score", query, *items, "--model", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "class 0" in done.output
    done = CliRunner().invoke(app, ["score", query, *items, "--model", str(tmp_path), "--label", "yes"])
    assert done.exit_code != 0
    assert "leave labels out" in done.output
    scores = [row[0] for row in llm.score(query, items).scores]
    ranked = llm.rerank(query, items, template="plain").results
    assert [r.relevance_score for r in ranked] == sorted(scores, reverse=True)


def test_several_classes_are_no_relevance(classifier):
    with pytest.raises(RequestError, match=r"a classifier of one class, or of two .*, this has 3"):
        classifier().llm.rerank("a", ["b"])


@pytest.mark.ci
def test_async(classifier, rng):
    query, items = random_job(rng)

    async def run():
        async with AsyncLLM(str(classifier().folder), warmup=False, **OPTIONS) as llm:
            with pytest.raises(RequestError, match="cannot generate"):
                async for _ in llm.generate({"prompt_token_ids": [1]}):
                    pass
            return await llm.score(query, items)

    np.testing.assert_allclose(asyncio.run(run()).logits, classifier().logits(query, items), atol=1e-4)


# Checkpoints


def test_a_missing_head(tmp_path):
    """The weights of a language model under the configuration of a classifier."""
    folder = make_checkpoint(CHECKPOINTS["llama"], tmp_path)
    file = folder / "config.json"
    changes = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError, match=r"tensor 'score\.weight' that LlamaForSequenceClassification needs is missing"):
        open_files(EngineConfig(model=str(folder), skip_tokenizer_init=True)).load()


def test_a_head_of_another_size(classifier, tmp_path):
    source = classifier().folder
    file = next(f for f in source.glob("*.safetensors") if "score.weight" in load_file(f))
    for other in source.iterdir():
        (tmp_path / other.name).write_bytes(other.read_bytes())
    save_file(load_file(file) | {"score.weight": np.zeros((2, 64), np.float32)}, tmp_path / file.name)
    with pytest.raises(ModelError, match=r"'score\.weight' has shape \[2, 64\], the configuration says \[3, 64\]"):
        open_files(EngineConfig(model=str(tmp_path), skip_tokenizer_init=True)).load()


def test_no_classes(classifier, tmp_path):
    config = json.loads((classifier().folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": {}, "label2id": {}}))
    with pytest.raises(ModelError, match="num_labels must be a positive integer, got 0"):
        open_files(EngineConfig(model=str(tmp_path), skip_tokenizer_init=True))


def test_logits_that_are_not_finite_fail_their_call(classifier):
    """An item with a damaged token fails; so does every item where a class's row of the head is damaged."""
    one = classifier()
    for name, items in (("embed_tokens", [[9], [BAD]]), ("score", [[9]])):
        assert one.llm.reset_prefix_cache()
        with damaged(one.llm.core, name, np.nan, row=1 if name == "score" else BAD), pytest.raises(NonFiniteError):
            one.llm.score([1, 2], items, algorithm="packed_segment")  # in one step, whatever the machine is fast at
        assert not [*one.llm.core.scheduler.trie.blocks()]
    np.testing.assert_allclose(one.llm.score([1, 2], [[9], [BAD]]).logits, one.logits([1, 2], [[9], [BAD]]), atol=1e-4)
