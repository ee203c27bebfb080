"""`chunkattn eval` and `chunkattn calibrate` of decisions: data, measures, the fit, the calibration file and the commands."""

import json
import random

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.decide_eval_data import KINDS, kinds, passages
from chunkattn import LLM, Choice, Level, Option, Predicate, Rating
from chunkattn.calibration import Calibration, LabelScale, read_calibration, read_label_scales, write_calibration
from chunkattn.calls.decide_questions import AnswerLabels
from chunkattn.cli import app
from chunkattn.decisions import ChoiceAnswer, PredicateAnswer
from chunkattn.errors import ConfigError, RequestError
from chunkattn.parsers.states import StateTemplate
from chunkattn.tools.eval.chart import draw
from chunkattn.tools.eval.data import Decisions, read_data
from chunkattn.tools.eval.decisions import WAYS, Way, WayAnswers, brier, compare, conclusion, ece, examine, shares_of
from chunkattn.tools.eval.labels import SOURCES, LabelSample, calibrate_labels, fit, log_loss, samples_of
from chunkattn.tools.eval.recipes import Passage
from chunkattn.tools.eval.results import Results

PREDICATE = {"predicate": "Ana writes.", "name": "ana"}
CHOICE = {"choice": "Who?", "options": ["Ana", True, {"value": "true", "description": "d"}]}
RATING = {"rating": "How?", "levels": ["low", {"label": "high"}]}
POOL = 16 << 20


def line_of(**changes):
    given = {"state": "a", "questions": [PREDICATE, CHOICE, RATING], "answers": [False, "true", "high"]}
    return json.dumps(given | changes)


@pytest.fixture(scope="module")
def folder(chat_folder):
    return chat_folder


# Data


def test_data_is_read(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text(f"{line_of()}\n\n{line_of(state={'b': 1}, answers=[True, True, 'low'])}\n")
    asked = (Predicate("Ana writes.", name="ana"), Choice("Who?", ["Ana", True, Option("true", "d")]))
    asked += (Rating("How?", ["low", Level("high")]),)
    assert read_data(file) == [Decisions(1, "a", asked, (1, 2, 1)), Decisions(3, {"b": 1}, asked, (0, 1, 0))]
    assert len(read_data(file, limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (line_of(state=5), "line 2: `state` must be a text"),
        (line_of(questions=[]), "line 2: `questions` must hold a list of questions, got an empty list"),
        (line_of(questions=[{"choice": "a"}]), "line 2: `questions`: question 0 needs a list of options"),
        ('{"state": "a"}', "line 2: `questions` must hold a list of questions, got nothing"),
        (line_of(answers=None), "line 2: `answers` must be a non-empty list of 3 right answers"),
        (line_of(answers=[True]), "line 2: `answers` must be a list of 3 right answers, one for each question"),
        (line_of(answers=[1, "true", "high"]), "line 2: answer 0 must be one of true, false, got 1"),
        (line_of(answers=[True, "Ben", "high"]), 'line 2: answer 1 must be one of "Ana", true, "true", got "Ben"'),
        (line_of(answers=[True, "true", 1]), 'line 2: answer 2 must be one of "low", "high", got 1'),
        ('{"state": ' + "[" * 100_000, "line 2 nests too deep"),
        ('{"query": "q", "documents": ["a"], "relevance": [1]}', "or decisions (`questions`), not several of them"),
    ],
)
def test_errors_name_line_and_field(line, said, tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text(f"{line_of()}\n{line}\n")
    with pytest.raises(RequestError) as error:
        read_data(file)
    assert said in str(error.value)
    assert str(error.value).startswith(f"{file} line 2")


def test_the_script_makes_lines_that_are_read(tmp_path):
    words = ["who", "when", "where", "how many"]
    source = [Passage(n + 1, f"{words[n % 4]} was it {n}", (f"Zu{n:03}",), "t", f"It was Zu{n:03}. " * 9) for n in range(80)]
    for make in (passages, kinds):
        lines = make(source, 20, random.Random(1))
        assert lines == make(source, 20, random.Random(1))
        file = tmp_path / f"{make.__name__}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        read = read_data(file)
        assert len(read) == 20
        for line, own in zip(lines, read, strict=True):
            assert len(line["questions"][0]["options"]) == len({*line["questions"][0]["options"]}) == 4
            assert line["questions"][0]["options"][own.answers[0]] == line["answers"][0]
    assert [line["answers"][0] for line in lines].count(KINDS["who"]) == 5
    assert sum(line["answers"][1] for line in lines) == 10


# Measures


def test_measures_by_hand():
    assert brier(np.array([0.5, 0.3, 0.2]), 1) == pytest.approx(0.25 + 0.49 + 0.04)
    assert brier(np.array([1.0, 0.0]), 0) == 0
    # bins of 0.9 and 0.6: |1/2 - 0.9| * 2/3 + |1 - 0.6| * 1/3
    assert ece(np.array([0.9, 0.9, 0.6]), np.array([1.0, 0.0, 1.0])) == pytest.approx(0.8 / 3 + 0.4 / 3)
    assert ece(np.array([1.0]), np.array([1.0])) == 0


def test_rows_by_hand():
    asked = (Choice("a", ["b", "c"]), Predicate("d"))
    lines = [Decisions(n, "s", asked, (0, 1)) for n in range(3)]
    right, wrong = [np.array([0.8, 0.2]), np.array([0.4, 0.6])], [np.array([0.2, 0.8]), np.array([0.4, 0.6])]
    base, other = WayAnswers([right, wrong, wrong], [wrong, wrong, wrong]), WayAnswers([right] * 3, [right] * 3)
    rows = compare(lines, {Way("letters"): base, Way("likelihood", True): other})
    assert [row.name for row in rows] == ["letters", "likelihood, N/A"]
    means = {name: mean.mean for name, mean in rows[0].means.items()}
    assert means == pytest.approx(
        {"accuracy": 4 / 6, "Brier": (0.08 + 1.28 * 2 + 0.32 * 3) / 6, "ECE": means["ECE"], "flips": 1 / 3}
    )
    assert rows[0].against_full is None
    assert rows[1].against_full["accuracy"].mean == pytest.approx(1 / 3)
    assert rows[1].means["flips"].mean == 0
    tops, hits = np.array([0.8, 0.6] * 3), np.array([1.0, 1, 0, 1, 0, 1])
    assert means["ECE"] == pytest.approx(ece(tops, hits))
    assert rows[0].means["ECE"].low <= means["ECE"] <= rows[0].means["ECE"].high
    assert conclusion(rows, 3).startswith("likelihood, N/A answers most questions right: accuracy 1.000, +0.333")
    assert "No way answers more" in conclusion(rows[:1], 3)
    assert draw(rows, "title").axes[0].get_xlim()[1] >= 1.02


# The fit


def made_samples(rng, count, temperature, bias, lines=None):
    """Questions whose right answers follow the probabilities of a known calibration."""
    names, found = [*bias], []
    for number in range(count):
        scores = rng.normal(0, 2, len(names)) if names else rng.normal(0, 2, 4)
        z = (scores - np.array([*bias.values()] or 0.0)) / temperature
        p = np.exp(z - z.max())
        right = int(rng.choice(len(p), p=p / p.sum()))
        found.append(LabelSample(number % (lines or count), names, scores + rng.normal(), right))
    return found


@pytest.mark.parametrize("bias", [{}, {"A": 1.5, "B": -0.5, "C": -1.0}])
def test_the_fit_finds_a_known_calibration(bias, rng):
    found = fit(made_samples(rng, 3000, 1.7, bias))
    assert found.temperature == pytest.approx(1.7, rel=0.12)
    assert found.bias == pytest.approx(bias, abs=0.2)
    assert {*found.bias} == {*bias}


def test_only_a_gain_on_the_other_half_is_kept(rng):
    samples = {"letters": made_samples(rng, 400, 3.0, {"A": 2.0, "B": -2.0}), "separate": made_samples(rng, 400, 1.0, {})}
    fits = calibrate_labels(samples, 400)
    assert fits["letters"].is_kept
    assert not fits["separate"].is_kept
    assert fits["letters"].after < fits["letters"].before
    assert fits["letters"].notes()["lines_of_the_report"] == 200
    sample = LabelSample(0, ["A", "B"], np.log([0.5, 0.5]), 0)
    assert log_loss(sample, LabelScale(2.0, {"A": 1.0, "C": 9.0})) == pytest.approx(np.log(1 + np.exp(0.5)))
    with pytest.raises(RequestError, match="needs 20 questions of a kind in each half of the lines; there are letters 30"):
        calibrate_labels({"letters": samples["letters"][:30]}, 30)


# The calibration file


def test_the_file_keeps_both_calibrations(tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"labels": {"letters": {"temperature": 2, "bias": {"A": 1}}, "separate": {}}}')
    assert read_calibration(file) == Calibration()
    assert read_label_scales(file) == {"letters": LabelScale(2.0, {"A": 1.0}), "separate": LabelScale()}
    write_calibration(file, Calibration(8), {"note": 1})
    assert read_calibration(file) == Calibration(8)
    assert read_label_scales(file)["letters"] == LabelScale(2.0, {"A": 1.0})


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([], "labels must be an object with predicate, letters, digits, likelihood, separate, got a list"),
        ({"other": {}}, "labels must be an object with predicate, letters, digits, likelihood, separate, got the kind 'other'"),
        ({"letters": 1}, "labels.letters must be an object with temperature and bias, got 1"),
        ({"letters": {"scale": 1}}, "labels.letters must be an object with temperature and bias"),
        ({"letters": {"temperature": 0}}, "labels.letters.temperature must be a number between 0.01 and 100, got 0"),
        ({"letters": {"temperature": True}}, "labels.letters.temperature must be a number"),
        ({"letters": {"bias": [1]}}, "labels.letters.bias must be an object"),
        ({"letters": {"bias": {"A": "1"}}}, "labels.letters.bias.A must be a number between -100 and 100, got '1'"),
        ({"letters": {"bias": {"A": 1e999}}}, "labels.letters.bias.A must be a number"),
    ],
)
def test_a_bad_file_is_refused_at_the_start(labels, said, tmp_path, folder):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"labels": labels}))
    with pytest.raises(ConfigError) as error:
        LLM(str(folder), chunk_calibration=str(file))
    assert f"chunk_calibration {file}: {said}" in str(error.value)


# With an engine

ASKED = [
    Predicate("Ana writes."),
    Choice("Who?", ["Cleo", "Ana", "Ben"]),
    Rating("How?", ["low", "middle", "high"]),
]
SCALES = {
    "predicate": {"temperature": 2.0, "bias": {"yes": 0.5, "no": -0.5}},
    "letters": {"temperature": 0.5, "bias": {"A": 1.0, "C": -0.25}},
    "digits": {"temperature": 3.0},
    "likelihood": {"temperature": 4.0},
    "separate": {"temperature": 0.25},
}


def scaled(answer, scale, names):
    """Probabilities of an answer under a calibration, computed by hand."""
    weights = [p ** (1 / scale["temperature"]) for p in shares_of(answer)]
    weights = [w * np.exp(-scale.get("bias", {}).get(n, 0) / scale["temperature"]) for w, n in zip(weights, names, strict=True)]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("method", ["letters", "likelihood", "separate"])
def test_fitted_labels_change_the_answers_by_the_formula(method, tmp_path, folder):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"labels": SCALES}))
    llm = LLM(str(folder), kv_cache_memory_bytes=POOL, chunk_calibration=str(file))
    file.write_text("damaged after the start")
    before = llm.decide("Ana writes.", ASKED, method=method, calibrate=method == "likelihood").answers
    if method == "likelihood":
        before[0] = llm.decide("Ana writes.", ASKED[:1]).answers[0]  # N/A divides texts alone
    after = llm.decide("Ana writes.", ASKED, method=method, calibrate="fitted").answers
    kinds = ["predicate", *(("letters", "digits") if method == "letters" else (method, method))]
    names = [["yes", "no"], ["C", "A", "B"], ["0", "1", "2"]]
    for kind, own, old, new in zip(kinds, names, before, after, strict=True):
        np.testing.assert_allclose(shares_of(new), scaled(old, SCALES[kind], own), rtol=1e-9)
        assert new.label_mass == old.label_mass
        if isinstance(new, ChoiceAnswer):
            assert new.probabilities[new.choice] == max(new.probabilities.values())
    assert isinstance(after[0], PredicateAnswer)
    (listed,) = llm.decide(["Ana writes."], ASKED, method=method, calibrate="fitted")
    assert listed.answers == after


def test_calibrate_is_checked(folder):
    llm = LLM(str(folder), kv_cache_memory_bytes=POOL)
    for value, said in ((1, "must be True, False or 'fitted', got 1"), ("fitted", "no calibration file with labels")):
        with pytest.raises(RequestError, match=said) as error:
            llm.decide("a", ASKED, calibrate=value)
        assert error.value.param == "calibrate"


def test_results_are_kept_and_no_order_of_options_flips_an_answer(folder, tmp_path, monkeypatch):
    llm = LLM(str(folder), kv_cache_memory_bytes=POOL)
    lines = [Decisions(n + 1, f"letter {n}", tuple(ASKED), (0, n % 3, 1)) for n in range(4)]
    found = examine(llm, lines, WAYS, Results(tmp_path / "r.jsonl"), lambda count: None)
    for way, given in found.items():
        for shares, turned in zip(given.shares, given.turned, strict=True):
            for own, other in zip(shares, turned, strict=True):
                assert own.tolist() == other.tolist(), way
    output = llm.decide("letter 2", ASKED, method="separate", calibrate=True)
    assert [own.tolist() for own in found[Way("separate", True)].shares[2]] == [*map(shares_of, output.answers)]
    samples = samples_of(llm, lines, found)
    assert {kind: len(own) for kind, own in samples.items()} == {
        "predicate": 4,
        "letters": 4,
        "digits": 4,
        "likelihood": 8,
        "separate": 8,
    }
    for place, sample in enumerate(samples["letters"]):
        assert sample.names[sample.right] == "CAB"[place % 3]  # Cleo, Ana, Ben
        assert np.exp(sample.scores[sample.right]) == pytest.approx(found[WAYS[0]].shares[place][1][place % 3])
    monkeypatch.setattr(llm, "decide", None)
    again = examine(llm, lines, WAYS, Results(tmp_path / "r.jsonl"), lambda count: None)
    assert str(again) == str(found)
    other = AnswerLabels(StateTemplate(llm.frontend.plain, None, {"chat_template": f"{llm.tokenizer.chat_template}So:"}))
    monkeypatch.setattr(llm.frontend, "answer_labels", lambda *_: other)
    with pytest.raises(TypeError):  # asked anew behind another chat template
        examine(llm, lines, WAYS[:1], Results(tmp_path / "r.jsonl"), lambda count: None)


def test_options_without_letters_are_samples_of_likelihood_alone(chat_llm):
    asked = Choice("Who?", [f"person {number}" for number in range(30)])
    given = WayAnswers([[np.full(30, 1 / 30)]], [])
    samples = samples_of(chat_llm, [Decisions(1, "a", (asked,), (0,))], dict.fromkeys(SOURCES, given))
    assert {kind: len(own) for kind, own in samples.items()} == {"likelihood": 1, "separate": 1}


@pytest.mark.slow
def test_the_commands(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [{"state": f"letter {n}", "questions": [PREDICATE, CHOICE], "answers": [n % 2 == 0, "Ana"]} for n in range(48)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--model", str(folder), "--kv-cache-memory-bytes", str(POOL), "--dtype", "float32"]
    done = CliRunner().invoke(app, ["calibrate", "d.jsonl", "--json", "labels.json", *options])
    assert done.exit_code == 0, done.output
    assert "written: chunk_calibration.json" in done.stdout
    report = json.loads((tmp_path / "labels.json").read_text())
    for option in (["--gap", "1"], ["--no-weighing"], ["--plot", "p.png"], ["--max-tokens", "32"]):
        done = CliRunner().invoke(app, ["calibrate", "d.jsonl", *option])
        assert (done.exit_code, "d.jsonl holds decisions" in done.stderr) == (2, True)
    done = CliRunner().invoke(app, ["eval", "d.jsonl", "--max-tokens", "32"])
    assert (done.exit_code, "d.jsonl holds decisions" in done.stderr) == (2, True)
    scales = read_label_scales(tmp_path / "chunk_calibration.json")
    assert {*scales} == {kind for kind in ("predicate", "letters", "likelihood", "separate") if report[kind]["kept"]}
    assert scales, "the random model always has the same right answer"
    thinking = json.dumps({"chat_template": "{{ messages[0].content }}<think>"})
    for command in ("eval", "calibrate"):
        done = CliRunner().invoke(app, [command, "d.jsonl", "--chat-template-kwargs", thinking, *options])
        assert (done.exit_code, "leaves <think> open" in done.stderr) == (2, True), done.output
    arguments = ["eval", "d.jsonl", "--limit", "6", "--json", "r.json", "--plot", "p.png", *options]
    done = CliRunner().invoke(app, [*arguments, "--chunk-calibration", "chunk_calibration.json"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "p.png").stat().st_size > 1000
    report = json.loads((tmp_path / "r.json").read_text())
    assert [row["name"] for row in report["rows"]][:4] == ["letters", "letters, N/A", "letters, fitted", "likelihood"]
    assert (report["states"], report["questions"]) == (6, 12)
    assert {row["means"]["flips"]["mean"] for row in report["rows"]} == {0}
    assert "accuracy - letters" in " ".join(done.stdout.split())
    assert report["conclusion"] in " ".join(done.stdout.split())
