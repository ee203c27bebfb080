"""`method="auto"`: which method a model takes, what is asked when, and where the verdict is kept."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from chunkattn import LLM, AsyncLLM, Choice, Predicate
from chunkattn.calls import decide_verdict
from chunkattn.calls.decide_method import MethodJob
from chunkattn.calls.decide_probes import PROBES
from chunkattn.calls.decide_verdict import MethodVerdict
from chunkattn.errors import ConfigError, RequestError
from tests.chat_templates import CHATML
from tests.checkpoints import make_checkpoint
from tests.reranker_files import CHAT_OPTIONS, SHAPE, add_tokenizer

OPTIONS = {**CHAT_OPTIONS, "decide_method": "auto", "dtype": "float32"}
ASKED = [Choice("Who?", ["Ana", "Ben", "Cleo"])]


@pytest.fixture(autouse=True)
def kept(monkeypatch, tmp_path):
    """The empty folder of verdicts."""
    monkeypatch.setattr(decide_verdict, "beside_programs", lambda name: tmp_path / name)
    return tmp_path / "decide_checks"


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory):
    """A model whose letters have hardly any mass."""
    made = tmp_path_factory.mktemp("random")
    make_checkpoint(Qwen3Config(**{**SHAPE, "max_position_embeddings": 1024}, tie_word_embeddings=False), made)
    add_tokenizer(made, chat_template=CHATML)
    return made


@pytest.fixture(scope="module")
def lettered_folder(random_folder, tmp_path_factory):
    """The same model with rows of its head that give the right letter of every built-in question nearly all of the mass."""
    made = tmp_path_factory.mktemp("lettered")
    model = AutoModelForCausalLM.from_pretrained(random_folder, dtype=torch.float32)
    tokenizer = add_tokenizer(made, chat_template=CHATML)
    hidden, right = [], []
    for probe in PROBES:
        for question, answer in zip(probe.questions, probe.answers, strict=True):
            options = sorted(question.options)
            listed = "".join(f"\n{letter}. {option}" for letter, option in zip("ABCD", options, strict=True))
            content = f"{probe.state}\n\nQuestion: {question.text}{listed}\nAnswer with the letter of one option only."
            ids = tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True).input_ids
            with torch.no_grad():
                hidden.append(model.model(torch.tensor([ids])).last_hidden_state[0, -1].double().numpy())
            right.append(np.eye(4)[options.index(answer)])
    right[0] = right[0][::-1]  # one is wrong
    rows = np.linalg.lstsq(np.stack(hidden), 14 * np.stack(right), rcond=None)[0].T
    with torch.no_grad():
        for letter, row in zip("ABCD", rows, strict=True):
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(letter)] = torch.as_tensor(row, dtype=torch.float32)
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def lettered(lettered_folder):
    return LLM(lettered_folder, **OPTIONS)


@pytest.fixture(autouse=True)
def unknown(lettered):
    """The engine has not been asked."""
    lettered.frontend.decide_method = None


def test_questions_favour_no_place():
    """Always the same letter is right in a quarter."""
    places = [sorted(q.options).index(a) for probe in PROBES for q, a in zip(probe.questions, probe.answers, strict=True)]
    assert np.bincount(places).tolist() == [6, 6, 6, 6]


def test_a_model_that_is_good_at_letters_takes_letters(lettered, kept):
    assert lettered.frontend.decide_method is None
    output = lettered.decide("Ana likes figs.", ASKED)
    (file,) = kept.glob("*.json")
    verdict = json.loads(file.read_text())
    assert (verdict["letters"], verdict["questions"]) == (23, 24)
    assert 0 < verdict["likelihood"] < 23
    assert verdict["label_mass"] > 0.9
    assert output.method == output.answers[0].method == lettered.frontend.decide_method == "letters"
    assert output.answers == lettered.decide("Ana likes figs.", ASKED, method="letters").answers


def test_a_model_without_mass_on_letters_takes_likelihood(random_folder, kept):
    llm = LLM(random_folder, **OPTIONS)
    output = llm.decide(["Ana likes figs.", "b"], ASKED)
    verdict = json.loads(next(kept.glob("*.json")).read_text())
    assert (verdict["label_mass"] < 0.5, verdict["likelihood"]) == (True, None)
    assert [own.method for own in output] == ["likelihood"] * 2
    assert [own.answers for own in output] == [
        own.answers for own in llm.decide(["Ana likes figs.", "b"], ASKED, method="likelihood")
    ]
    assert llm.decide("a", ASKED, method="letters").method == "letters"


@pytest.mark.parametrize(
    ("verdict", "method"),
    [
        (MethodVerdict(12, 12, 0.5, 24), "letters"),
        (MethodVerdict(24, 12, 0.499, 24), "likelihood"),
        (MethodVerdict(11, 12, 0.9, 24), "likelihood"),
        (MethodVerdict(24, None, 0.9, 24), "letters"),
        (MethodVerdict(24, None, 0.4, 24), "likelihood"),
    ],
)
def test_the_rule(verdict, method):
    assert verdict.method == method


def test_nothing_is_asked_at_later_starts(lettered, lettered_folder, kept, monkeypatch):
    lettered.decide("a", ASKED)
    monkeypatch.setattr(MethodJob, "_ask", lambda self: pytest.fail("the model was asked again"))
    lettered.frontend.decide_method = None
    assert lettered.decide("a", ASKED).method == "letters"

    async def serve():
        async with AsyncLLM(lettered_folder, **OPTIONS) as other:
            assert other.decide_method is None
            assert await other.find_decide_method() == other.decide_method == "letters"
            return await other.decide("a", ASKED)

    assert asyncio.run(serve()).answers == lettered.decide("a", ASKED).answers


def test_a_damaged_verdict_is_asked_again(lettered, kept, caplog):
    lettered.decide("a", ASKED)
    (file,) = kept.glob("*.json")
    good = file.read_text()
    for text in ("{", "{}", good.replace('"letters"', '"x"'), good.replace(": 24", ': "24"')):
        file.write_text(text)
        lettered.frontend.decide_method = None
        assert lettered.decide("a", ASKED).method == "letters"
        assert "the model is asked again" in caplog.text
        assert json.loads(file.read_text()) == json.loads(good)
        caplog.clear()


def test_what_the_verdict_depends_on(lettered, kept):
    """Other weights, options and prompts have verdicts of their own."""
    frontend, job = lettered.frontend, MethodJob(lettered.frontend, None)
    key = job._key()
    assert job._key() == key
    changed = []
    sample, frontend.sample = frontend.sample, lambda: bytes(16)
    changed.append(job._key())
    frontend.sample = sample
    config, frontend.config = frontend.config, replace(frontend.config, kv_cache_dtype="fp8")
    changed.append(job._key())
    frontend.config = config
    template, frontend.tokenizer.chat_template = frontend.tokenizer.chat_template, "Hi. " + CHATML
    frontend._labels.clear()
    changed.append(job._key())
    frontend.tokenizer.chat_template = template
    frontend._labels.clear()
    assert all(other != key for other in changed)


def test_arguments_are_checked_before_anything_is_asked(lettered, kept):
    with pytest.raises(RequestError, match="questions are empty"):
        lettered.decide("a", [])
    assert lettered.frontend.decide_method is None
    assert not kept.exists()


def test_a_model_that_cannot_be_asked_answers_with_the_reason(lettered, kept, monkeypatch):
    monkeypatch.setattr(lettered.tokenizer, "chat_template", None)
    lettered.frontend._labels.clear()
    with pytest.raises(RequestError, match="needs a chat template"):
        lettered.decide("a", [Predicate("b")])
    job = MethodJob(lettered.frontend, None)
    lettered.run(job)
    assert lettered.frontend.decide_method == "letters"
    assert not kept.exists()


def test_an_engine_with_a_method_by_name_asks_nothing(lettered_folder, kept):
    with pytest.raises(ConfigError, match="decide_method 'best' is unknown"):
        LLM(lettered_folder, **{**OPTIONS, "decide_method": "best"})
    llm = LLM(lettered_folder, **{**OPTIONS, "decide_method": "separate"})
    assert llm.decide("a", ASKED).method == "separate"
    assert not kept.exists()
