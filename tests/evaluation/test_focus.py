"""A focus in `chunkattn eval` and `chunkattn calibrate`: its answers, its recall, its choice and its conclusion."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from chunkattn import LLM, Focus, SamplingParams
from chunkattn.calibration import Calibration
from chunkattn.cli import app
from chunkattn.tools.eval.calibrate import calibrate
from chunkattn.tools.eval.conditions import GOLD, NONE, Condition, focus_conditions, tokenize
from chunkattn.tools.eval.examiner import Examiner
from chunkattn.tools.eval.report import focus_conclusion
from chunkattn.tools.eval.results import Results
from tests.evaluation.test_evaluate import questions

WEIGHTS = Calibration(0, 0.8, 1.0)


@pytest.fixture(scope="module")
def llm():
    return LLM(chunk_temperature=0.8, kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=128)


@pytest.fixture(scope="module")
def asked():
    return questions(6, documents=4)


@pytest.fixture
def examiner(llm, asked):
    return Examiner(llm, asked, tokenize(llm.parser, asked), Results(), max_tokens=8)


def chat(llm, question, focus):
    messages = [{"role": "system", "content": question.prefix}, {"role": "user", "content": question.question}]
    params = SamplingParams(temperature=0, max_tokens=8)
    return llm.chat(messages, params, documents=question.documents, focus=focus)[0]


@pytest.mark.parametrize("focus", [Focus(1, "only"), Focus(2, "reread"), Focus(1, "reread", "relevance")])
def test_a_condition_asks_as_a_chat_does(llm, asked, examiner, focus):
    condition, numbers = Condition("focus", WEIGHTS, focus), range(len(asked))
    values = examiner.examine([condition], numbers, texts=True)[condition]
    outputs = [chat(llm, question, focus) for question in asked]
    chosen = [set(output.focus.documents) for output in outputs]
    expected = [len(own & set(q.gold)) / len(q.gold) for own, q in zip(chosen, asked, strict=True)]
    assert values["recall"].tolist() == expected
    assert examiner.texts(condition, numbers) == [output.outputs[0].text.strip() for output in outputs]


def test_the_gold_documents_can_be_chosen(asked, examiner):
    for condition in focus_conditions(NONE, 2, [], gold=True):
        assert condition.focus.score == GOLD
        values = examiner.examine([condition], range(len(asked)), texts=False)[condition]
        assert values["recall"].tolist() == [1.0] * len(asked)


def test_scores_are_computed_once_per_document(llm, asked, monkeypatch):
    """Fewer documents of the same question, in another order, need no new score."""
    results = Results()
    condition = Condition("focus", WEIGHTS, Focus(1))
    whole = Examiner(llm, asked, tokenize(llm.parser, asked), results, max_tokens=8)
    whole.examine([condition], range(len(asked)), texts=False)
    fewer = [replace(q, documents=q.documents[:0:-1], gold=None) for q in asked]
    monkeypatch.setattr("chunkattn.tools.eval.choices.get_score", lambda name: pytest.fail("scored again"))
    Examiner(llm, fewer, tokenize(llm.parser, fewer), results, max_tokens=8).examine([condition], range(6), texts=False)


@pytest.mark.parametrize("better", [True, False])
def test_calibrate_tries_a_focus_under_the_values_that_it_writes(asked, examiner, monkeypatch, better):
    monkeypatch.setattr("chunkattn.tools.eval.calibrate.advised", lambda values, best: better)
    found = calibrate(examiner, gaps=[8], weighs=False, top_n=1, scores=["likelihood"])
    written = found.calibration
    assert written == (found.best if better else NONE) != (NONE if better else found.best)
    tried = [Condition("shared", written), *focus_conditions(written, 1, ["likelihood"], gold=False)]
    assert list(found.contained) == tried
    values = examiner.examine(tried, found.halves.search, texts=True)
    means = [values[condition]["contained"].mean() for condition in tried]
    assert found.best_focus == tried[int(np.argmax(means))]
    assert found.best_focus in found.values
    assert found.notes()["focus"] == (None if found.focus is None else vars(found.focus))


def test_equal_documents_are_one_in_the_recall(llm, asked):
    doubled = [replace(q, documents=q.documents * 2, gold=tuple(p + len(q.documents) for p in q.gold)) for q in asked]
    condition = Condition("focus", WEIGHTS, Focus(len(asked[0].documents)))
    found = Examiner(llm, doubled, tokenize(llm.parser, doubled), Results(), max_tokens=8)
    assert found.examine([condition], range(6), texts=False)[condition]["recall"].tolist() == [1.0] * 6


@pytest.mark.parametrize(
    ("shared", "own", "said"),
    [
        ([0, 1] * 40, [1, 1] * 40, "pass focus={'top_n': 1, 'mode': 'only', 'score': 'likelihood'}"),
        ([1, 1] * 40, [0, 1] * 40, "makes it worse: leave it off"),
        ([0, 1] * 40, [1, 1] + [0, 1] * 38 + [0, 0], "80 questions cannot tell a gain of"),
    ],
)
def test_a_conclusion_says_what_it_cannot_tell(shared, own, said):
    best = Condition("focus", NONE, Focus(1, "only"))
    listed = {Condition("full"): shared, Condition("shared"): shared, best: own}
    assert said in focus_conclusion({c: {"contained": np.asarray(v, float)} for c, v in listed.items()}, best)


def test_the_command_has_a_row_for_every_focus(tmp_path, asked, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [{n: list(v) if isinstance(v, tuple) else v for n, v in vars(q).items() if n != "line"} for q in asked[:2]]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["eval", "data.jsonl", "--focus", "1", "--max-tokens", "4", "--json", "-"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert "Of 2 ways to focus, " in report["conclusion"]
    rows = {row["name"]: row for row in report["rows"]}
    assert {"reread 1 by likelihood", "only 1 by likelihood", "only the gold documents"} <= set(rows)
    assert set(rows["only 1 by likelihood"]["means"]) == {"logprob", "exact match", "F1", "contained", "recall"}
    bad = CliRunner().invoke(app, ["eval", "data.jsonl", "--focus", "1", "--focus-score", "luck"])
    assert bad.exit_code == 2
    assert "focus score must be one of likelihood, relevance, got 'luck'" in bad.output
