"""`chunkattn eval` and `chunkattn calibrate`: data, measures, conditions against transformers, the search, and the commands."""

import gzip
import json
import math
import sys
from copy import copy
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from lm_eval.tasks.qasper.metrics import f1_abstractive, normalize_answer
from typer.testing import CliRunner

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.calibration import Calibration, read_calibration
from chunkattn.cli import app
from chunkattn.config import make_config
from chunkattn.errors import ConfigError, EngineError, RequestError
from chunkattn.models.loader import DEMO_FOLDER
from chunkattn.parsers import PromptParser
from chunkattn.terminal.files import check_file
from chunkattn.tools.eval.calibrate import CalibrationResult, Halves, halves_of
from chunkattn.tools.eval.calibrate import calibrate as search_and_report
from chunkattn.tools.eval.chart import draw
from chunkattn.tools.eval.conditions import NONE, Condition, conditions_for, tokenize
from chunkattn.tools.eval.data import Question, Ranking, read_data
from chunkattn.tools.eval.examiner import Examiner
from chunkattn.tools.eval.measures import containment, exact_match, mean_of, normalized, ranking_measures, token_f1
from chunkattn.tools.eval.report import LOGPROB, as_json, compare, compare_rankings, conclusion, ranking_conclusion
from chunkattn.tools.eval.results import Results
from chunkattn.tools.eval.search import WEIGHTS, Trial, search
from tests.checkpoints import Oracle
from training.world import PREFIX, World

POOL = 32 << 20
"""Bytes of the KV pool, as in other tests, so that all share their compiled programs."""


def questions(count, documents=3):
    found = []
    for seed in range(count):
        reading = World(seed, held_out=True).reading(documents)
        asked = reading.questions[0]
        gold = tuple(place for place, text in enumerate(reading.documents) if asked.answer in text)
        text = asked.text.removesuffix(" Answer:")  # the chat template adds it
        found.append(Question(seed + 1, PREFIX, reading.documents, text, (asked.answer,), gold))
    return found


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def as_line(question):
    return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(question).items() if name != "line"}


@pytest.fixture(scope="module")
def weighing():
    """The demo model in an engine with a calibration; calls choose their own."""
    return LLM(chunk_temperature=0.8, kv_cache_memory_bytes=POOL, max_num_batched_tokens=128)


@pytest.fixture
def examiner(weighing):
    asked = questions(5)
    return Examiner(weighing, asked, tokenize(weighing.parser, asked), Results(), max_tokens=8)


# Data


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 must be a JSON object, got list"),
        ('{"documents": ["a"], "answers": ["b"]}', "line 2: `question` must be a non-empty text, got nothing"),
        ('{"question": "q", "answers": ["b"]}', "line 2: `documents` must be a non-empty list of texts"),
        ('{"question": "q", "documents": [], "answers": ["b"]}', "line 2: `documents` must be a non-empty list"),
        ('{"question": "q", "documents": [{"title": "t"}], "answers": ["b"]}', "line 2: `documents` must be"),
        ('{"question": "q", "documents": ["a"], "answers": "b"}', "line 2: `answers` must be a non-empty list"),
        ('{"question": "q", "documents": ["a"], "answers": [" "]}', "line 2: `answers` must be a non-empty list"),
        ('{"question": "q", "documents": ["a"], "answers": ["b"], "prefix": 3}', "line 2: `prefix` must be a text, got 3"),
        (
            '{"question": "q", "documents": ["a"], "answers": ["b"], "gold": [1]}',
            "line 2: `gold` must be a non-empty list of pl",
        ),
        ('{"question": "q", "documents": ["a"], "answers": ["b"], "gold": [true]}', "line 2: `gold`"),
        (
            '{"question": "q", "documents": ["a"], "answers": ["b"], "answer_parts": ["b"]}',
            "line 2: `answer_parts` must be a non-empty list of non-empty lists of non-empty texts",
        ),
        ('{"question": "q", "documents": ["a"], "answers": ["b"], "answer_parts": [["b"], []]}', "line 2: `answer_parts` must"),
        (
            '{"question": "q", "documents": ["a"], "answers": ["b"], "answer_parts": [["b", " "]]}',
            "line 2: `answer_parts` must",
        ),
        ('{"query": "q", "documents": ["a"], "relevance": [1]}', "line 2: a file holds questions (`question`), rankings"),
    ],
)
def test_errors_name_line_and_field(tmp_path, line, said):
    file = tmp_path / "data.jsonl"
    file.write_text('{"question": "q", "documents": ["a"], "answers": ["b"]}\n' + line + "\n")
    with pytest.raises(RequestError) as error:
        read_data(file)
    assert said in str(error.value)


def test_relevance_has_one_grade_a_document(tmp_path):
    file = write(tmp_path / "data.jsonl", [{"query": "q", "documents": ["a", "b"], "relevance": [1]}])
    with pytest.raises(RequestError, match="line 1: `relevance` must be a list of 2 integers"):
        read_data(file)


def test_data_is_read(tmp_path):
    titled = [{"title": "T", "text": "one"}, {"text": "two"}, "three"]
    lines = [{"documents": titled, "question": "q", "answers": ["x", "y"], "gold": [2], "other": 1, "state": 1}]
    file = write(tmp_path / "questions.jsonl", lines * 3)
    file.write_text("\n" + file.read_text())
    (first, second) = read_data(file, limit=2)
    assert first == Question(2, "", ("T\none", "two", "three"), "q", ("x", "y"), (2,))
    assert second.line == 3
    file = write(tmp_path / "rankings.jsonl", [{"query": "q", "documents": ["a", "b"], "relevance": [0, 2]}])
    assert read_data(file) == [Ranking(1, "q", ("a", "b"), (0, 2))]
    parts = {"question": "q", "documents": ["a\u2028b"], "answers": ["x and y"], "answer_parts": [["x", "z"], ["y"]]}
    file = tmp_path / "questions.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(parts, ensure_ascii=False).encode()))
    (first,) = read_data(file)
    assert first == Question(1, "", ("a\u2028b",), "q", ("x and y",), None, (("x", "z"), ("y",)))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(RequestError, match="gz cannot be read: "):
        read_data(file)
    for bad in (tmp_path / "none.jsonl", write(tmp_path / "empty.jsonl", [])):
        with pytest.raises(RequestError, match=str(bad)):
            read_data(bad)


# Measures


@pytest.mark.parametrize(
    ("text", "answers", "exact", "f1", "contained"),
    [
        ("The Beatles!", ["beatles"], 1, 1, 1),
        ("It was the Beatles in 1964.", ["The Rolling Stones", "Beatles"], 0, 2 / 6, 1),
        ("15 May 2018", ["5", "May 18, 2018"], 0, 2 * 2 / (3 + 3), 0),
        ("a", ["the"], 0, 0, 0),
        (" A\n", ["a"], 1, 1, 1),
        ("the", ["A"], 0, 0, 0),
        ("Vitamin A", ["A"], 0, 2 / 3, 1),
        ("B", ["A", "B"], 1, 1, 1),
        ("", ["A"], 0, 0, 0),
        ("?", ["?"], 1, 1, 1),
        ("!", ["?"], 0, 0, 0),
        ("", ["x"], 0, 0, 0),
        ("x x y", ["x y y"], 0, 2 / 3, 0),
    ],
)
def test_answers_by_hand(text, answers, exact, f1, contained):
    assert exact_match(text, answers) == exact
    assert token_f1(text, answers) == pytest.approx(f1)
    assert containment(text, answers) == contained


def test_answers_equal_the_script_of_squad(rng):
    words = ["the", "A", "an", "Cat's", "cat", "dog,", "dog", "-", "42"]
    for _ in range(300):
        one, other = (" ".join(rng.choice(words, rng.integers(1, 6))) for _ in range(2))
        assert normalized(one) == normalize_answer(one)
        if normalized(one) and normalized(other):
            assert token_f1(one, [other]) == pytest.approx(f1_abstractive([one], [other]))


def test_rankings_by_hand():
    order, relevance = [2, 0, 3, 1], [0, 2, 0, 1]  # relevant documents on ranks 3 and 4
    found = ranking_measures(order, relevance)
    ideal = 2 / math.log2(2) + 1 / math.log2(3)
    assert found["MRR"] == pytest.approx(1 / 3)
    assert found["NDCG@10"] == pytest.approx((1 / math.log2(4) + 2 / math.log2(5)) / ideal)
    assert (found["recall@1"], found["recall@5"], found["recall@10"]) == (0, 1, 1)
    assert set(ranking_measures([0, 1], [0, 0]).values()) == {0.0}
    twelve = ranking_measures(range(12), [0] * 11 + [1])
    assert (twelve["NDCG@10"], twelve["recall@10"], twelve["MRR"]) == (0, 0, pytest.approx(1 / 12))


@pytest.mark.parametrize("count", [2, 4, 12, 60])
def test_intervals_cover_the_mean_as_often_as_they_say(count, rng):
    """The bootstrap alone covers the mean of 2 values 50 times of 100, of 4 values 82 times."""
    covered = 0
    for seed in range(100):
        found = mean_of(rng.normal(0.3, 1.0, count), seed=seed)
        covered += found.low <= 0.3 <= found.high
    assert 88 <= covered <= 100
    assert all(math.isfinite(x) for x in (mean_of([0.0] * 99 + [1.0]).low, mean_of([0.0] * 99 + [1.0]).high))


def test_the_interval_of_few_differences_is_that_of_the_literature():
    """Student's data of additional sleep (Biometrika 6, 1908), with the interval that R prints for a paired t.test."""
    sleep = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    found = mean_of(sleep)
    assert (found.low, found.mean, found.high) == pytest.approx((0.7001142, 1.58, 2.4598858), abs=1e-7)
    assert found.resolution == pytest.approx((2.4598858 - 0.7001142) / 2, abs=1e-7)
    assert (found.sign, mean_of(np.negative(sleep)).sign, mean_of([-1.0, *sleep[:3], -4.0]).sign) == (1, -1, 0)


@pytest.mark.parametrize(("values", "error"), [([2.0], math.inf), ([2.0, 2.0], 0.0), ([0.0] * 60, 0.0)])
def test_values_without_spread_have_no_interval(values, error):
    found = mean_of(values)
    assert (found.mean, found.low, found.high, found.error) == (values[0], -math.inf, math.inf, error)
    assert (found.has_interval, found.sign, found.resolution) == (False, 0, math.inf)


def test_no_mean_beyond_the_resolution_is_doubtful(rng):
    """Lopsided differences as well, whose bootstrap interval has a wide and a narrow side."""
    for count in (5, 60):
        for shift in np.linspace(-0.5, 0.5, 21):
            found = mean_of(rng.exponential(1.0, count) - 1 + shift)
            assert found.sign or abs(found.mean) <= found.resolution


# Conditions


def test_tokens_are_those_that_the_model_would_read_and_write(demo):
    question = questions(1)[0]
    (prompt,) = tokenize(demo.parser, [question])
    messages = [{"role": "system", "content": PREFIX}, {"role": "user", "content": question.question}]
    told = demo.parser.parse_chat(messages, question.documents).layout
    assert [told.part(segment).tolist() for segment in told.segments] == [prompt.prefix, *prompt.documents, prompt.question]
    ids = demo.tokenizer(f"{question.question} Answer: {question.answers[0]}", add_special_tokens=False)["input_ids"]
    assert ids == [*prompt.question, *prompt.answer]


def test_a_tokenizer_without_a_chat_template_gets_plain_text(demo):
    tokenizer = copy(demo.tokenizer)
    tokenizer.chat_template = None
    parser = PromptParser(
        tokenizer, separator=" # # ", strategy="shared", chunk_aware=True, document_template="Document: {document}\n\n"
    )
    question = replace(questions(1)[0], question="Where? Answer:")
    (prompt,) = tokenize(parser, [question])
    texts = [PREFIX, *(f"Document: {text}\n\n" for text in question.documents), question.question]
    assert [prompt.prefix, *prompt.documents, prompt.question] == [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts
    ]


def test_conditions_are_listed_once():
    names = [condition.name for condition in conditions_for(Calibration(64, 0.8, 0.9), gold=True)]
    assert names == [
        "full",
        "full, T 0.8, S 0.9",
        "shared",
        "shared, T 0.8, S 0.9",
        "shared, gap 64",
        "shared, gap 64, T 0.8, S 0.9",
        "offset",
        "offset, T 0.8, S 0.9",
        "gold only",
        "no document",
    ]
    assert [c.name for c in conditions_for(Calibration(), gold=False)] == ["full", "shared", "offset", "no document"]


def positions_of(kind, gap, prompt):
    """Positions and parts by the definition, token by token."""
    place, parts, found = len(prompt.prefix), ["prefix"] * len(prompt.prefix), list(range(len(prompt.prefix)))
    longest = max(map(len, prompt.documents))
    for number, document in enumerate(prompt.documents):
        start = len(found) if kind == "offset" else place + gap
        parts += [number] * len(document)
        found += range(start, start + len(document))
    end = [*prompt.question, *prompt.answer]
    start = len(found) if kind == "offset" else place + gap + longest
    return [*found, *range(start, start + len(end))], parts + ["question"] * len(end)


def test_log_probabilities_equal_transformers(examiner):
    oracle = Oracle(DEMO_FOLDER)

    def logprob(ids, answer, *layout):
        logits = oracle.logits(ids, *layout).astype(np.float64)[-len(answer) - 1 : -1]
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        return logits[np.arange(len(answer)), answer].mean()

    def isolated(kind, gap, prompt):
        positions, part = positions_of(kind, gap, prompt)
        ids = [*prompt.prefix, *chain(*prompt.documents), *prompt.question, *prompt.answer]
        rows = range(len(ids))
        visible = [[k <= i and (part[k] in ("prefix", part[i]) or part[i] == "question") for k in rows] for i in rows]
        return logprob(ids, prompt.answer, positions, np.array(visible))

    def plain(prompt, places):
        documents = [token for place in places for token in prompt.documents[place]]
        return logprob([*prompt.prefix, *documents, *prompt.question, *prompt.answer], prompt.answer)

    wanted = {
        Condition("full"): lambda prompt: plain(prompt, range(len(prompt.documents))),
        Condition("shared"): lambda prompt: isolated("shared", 0, prompt),
        Condition("shared", Calibration(7)): lambda prompt: isolated("shared", 7, prompt),
        Condition("offset"): lambda prompt: isolated("offset", 0, prompt),
        Condition("gold only"): lambda prompt: plain(prompt, prompt.gold),
        Condition("no document"): lambda prompt: plain(prompt, []),
    }
    values = examiner.examine(list(wanted), range(5), texts=False)
    for condition, witness in wanted.items():
        expected = [witness(prompt) for prompt in examiner.prompts]
        np.testing.assert_allclose(values[condition][LOGPROB], expected, atol=1e-4, err_msg=condition.name)


def test_control_is_full_attention_and_weighs_its_documents(examiner):
    neutral = Condition("full", Calibration(0, 1.0, 1.0 + 1e-7))  # one chunk of all documents, weighed by next to nothing
    weighed = Condition("full", Calibration(0, 0.7, 0.8))
    alone = Examiner(
        examiner.llm, examiner.questions, [replace(p, documents=p.documents[:1]) for p in examiner.prompts], Results()
    )
    values = examiner.examine([Condition("full"), neutral, weighed], range(5), texts=False)
    np.testing.assert_allclose(values[neutral][LOGPROB], values[Condition("full")][LOGPROB], atol=1e-4)
    assert np.abs(values[weighed][LOGPROB] - values[neutral][LOGPROB]).max() > 1e-3
    same = [weighed, Condition("shared", weighed.calibration)]  # of one document, both are the same prompt
    one = alone.examine(same, range(5), texts=False)
    np.testing.assert_allclose(one[same[0]][LOGPROB], one[same[1]][LOGPROB], atol=1e-5)


def test_answers_are_the_engines(examiner):
    llm = examiner.llm
    calibration = llm.config.calibration
    assert calibration.weighs
    texts = examiner.texts(Condition("shared", calibration), [0, 1])
    for text, question in zip(texts, examiner.questions[:2], strict=True):
        messages = [{"role": "system", "content": PREFIX}, {"role": "user", "content": question.question}]
        layout = llm.parser.parse_chat(messages, []).layout  # bare documents, as chunks
        prefix, asked = layout.part(layout.segments[0]).tolist(), layout.part(layout.segments[-1]).tolist()
        chunks = [llm.parser.prompts(document) for document in question.documents]
        (out,) = llm.generate(ChunkedPrompt(prefix, chunks, asked), SamplingParams(temperature=0, max_tokens=8))
        assert text == out.outputs[0].text.strip()


def test_a_control_that_does_not_fit_is_named_before_the_search(examiner):
    longest = max(len(document) for prompt in examiner.prompts for document in prompt.documents)
    llm = LLM(chunk_temperature=0.8, kv_cache_memory_bytes=POOL, max_num_batched_tokens=128, max_chunk_len=longest)
    given, trials = Examiner(llm, examiner.questions, examiner.prompts, Results()), []
    with pytest.raises(RequestError, match=rf"line \d, full, T 0.6, S 0.6: .* max_chunk_len is {longest}"):
        search_and_report(given, gaps=[0], tried=trials.append)
    assert trials == []


def test_gaps_leave_room_for_answers_as_long_as_evals(tmp_path, monkeypatch):
    data, seen = write(tmp_path / "data.jsonl", map(as_line, questions(4))), []

    def examine(*_, max_tokens, **__):
        seen.append(max_tokens)
        raise ConfigError("seen")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("chunkattn.tools.eval.examiner.Examiner", examine)
    for options in ([], ["--max-tokens", "8"]):
        command = ["calibrate", str(data), "--kv-cache-memory-bytes", str(POOL), *options]
        assert CliRunner().invoke(app, command).exit_code == 2
    assert seen == [32, 8]


@pytest.mark.parametrize(("error", "name"), [(EngineError("the step broke"), "logprob"), (RequestError("too long"), "text")])
def test_errors_of_a_group_name_lines_and_condition(error, name, examiner, monkeypatch):
    def fails(self, job, use_tqdm=True):
        raise error

    monkeypatch.setattr(LLM, "run", fails)
    call = examiner.likelihoods if name == "logprob" else examiner.texts
    with pytest.raises(type(error), match=rf"lines 2, 4, shared: {error}"):
        call(Condition("shared"), [1, 3])
    with pytest.raises(type(error), match=rf"line 5, shared, gap 3: {error}"):
        call(Condition("shared", Calibration(3)), [4])


def test_a_question_that_does_not_fit_is_named(examiner):
    long = [replace(examiner.prompts[0], documents=[[5] * 300] * 2), *examiner.prompts[1:]]
    given = Examiner(examiner.llm, examiner.questions, long, Results())
    given.check([Condition("shared")])
    with pytest.raises(RequestError, match="line 1, full: "):
        given.check([Condition("shared"), Condition("full")])
    assert given.max_gap < examiner.max_gap
    with pytest.raises(ConfigError, match="no gap"):
        search(lambda gap, weighings: [0.0] * len(weighings), gaps=[1024], max_gap=given.max_gap)


# Results


def test_an_interrupted_run_continues(examiner, tmp_path, monkeypatch):
    conditions = [Condition("shared"), Condition("no document")]

    def run(path):
        return Examiner(examiner.llm, examiner.questions, examiner.prompts, Results(path), max_tokens=8).examine(
            conditions, range(5), texts=True
        )

    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    expected = run(whole)
    real, calls = LLM.run, []

    def dies(self, job, use_tqdm=True):
        calls.append(job.total)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, job, use_tqdm)

    monkeypatch.setattr(LLM, "run", dies)
    with pytest.raises(KeyboardInterrupt):
        run(broken)
    kept = broken.read_text().splitlines(keepends=True)
    assert kept == whole.read_text().splitlines(keepends=True)[:10]
    broken.write_text("".join(kept[:7]) + kept[7][:20])  # killed while it wrote
    calls[:] = [0] * 3
    again = run(broken)
    assert calls[3:] == [3, 5, 5]  # three answers of the second call are missing, and two calls
    assert broken.read_text() == whole.read_text()
    for condition in conditions:
        assert {name: v.tolist() for name, v in again[condition].items()} == {
            name: v.tolist() for name, v in expected[condition].items()
        }
    run(broken)
    assert len(calls) == 6  # nothing is missing
    # Other tokens, other weights and another length are other results.
    other = Examiner(examiner.llm, examiner.questions, examiner.prompts, Results(broken), max_tokens=7)
    other.texts(conditions[0], [0])
    other.likelihoods(Condition("shared", Calibration(1)), [0])
    other.likelihoods(Condition("shared", Calibration(0, 0.9, 1.0)), [0])
    assert len(calls) == 9


def test_a_file_of_something_else_is_refused(tmp_path):
    file = write(tmp_path / "results.jsonl", [{"key": "a"}, {"question": "q"}])
    with pytest.raises(ConfigError, match=r"results.jsonl line 2 is no result"):
        Results(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A letter without a line break", "holds no complete result"),
        ('{"key": "a"}\nDear reader,\nan unfinished line', "line 2 is no result"),
        ('{"question": "q"}\n{"question": "q2"}', "line 1 is no result"),
    ],
)
def test_a_refused_file_keeps_its_bytes(text, said, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        Results(file)
    assert file.read_text() == text


def test_an_empty_file_takes_results(tmp_path):
    file = tmp_path / "results.jsonl"
    file.touch()
    assert len(Results(file)) == 0


# Search


@pytest.mark.parametrize(
    ("gap", "temperature", "scale"), [(64, 0.8, 0.8), (128, 0.85, 0.75), (0, 1.0, 1.0), (32, 1.1, 0.55), (512, 0.5, 0.9)]
)
def test_the_search_finds_a_planted_optimum(gap, temperature, scale):
    asked = []

    def objective(at, weighings):
        asked.extend((at, *weighing) for weighing in weighings)
        return [-abs(math.log2((at + 1) / (gap + 1))) - 9 * ((t - temperature) ** 2 + (s - scale) ** 2) for t, s in weighings]

    told = []
    trials = search(objective, tried=told.append)
    assert trials[0].calibration == Calibration(gap, temperature, scale)
    assert len(asked) == len(set(asked)) == len(trials) == len(told) < 110
    assert [trial.value for trial in trials] == sorted((trial.value for trial in told), reverse=True)


def test_the_search_keeps_to_its_limits():
    def objective(gap, weighings):
        return [float(gap)] * len(weighings)

    trials = search(objective, max_gap=100, weighs=False)
    assert {trial.calibration for trial in trials} == {Calibration(gap) for gap in (0, 16, 64, 32)}
    assert trials[0].calibration == Calibration(64)
    lowest = search(lambda gap, weighings: [-t - s for t, s in weighings], gaps=[0])
    assert lowest[0].calibration.chunk_temperature < min(WEIGHTS)
    assert all(min(t.calibration.chunk_temperature, t.calibration.chunk_scale) >= 0.1 for t in lowest)


def test_halves_are_apart():
    halves = halves_of(101)
    assert sorted([*halves.search, *halves.report]) == list(range(101))
    assert len(halves.search) == 50
    assert halves == halves_of(101)
    with pytest.raises(RequestError, match="at least 4"):
        halves_of(3)


# Conclusions


def values_of(rng, **means):
    noise = rng.normal(0, 0.02, (4, 80))
    conditions = {
        "full": Condition("full"),
        "control": Condition("full", Calibration(0, 0.8, 0.8)),
        "shared": Condition("shared"),
        "own": Condition("shared", Calibration(64, 0.8, 0.8)),
    }
    return {c: {LOGPROB: means[name] + own} for (name, c), own in zip(conditions.items(), noise, strict=True)}


def test_differences_are_paired(rng):
    values = values_of(rng, full=0.0, control=0.3, shared=-0.4, own=0.2)
    each = rng.normal(0, 5, 80)  # questions differ far more than conditions
    rows = {row.name: row for row in compare({c: {LOGPROB: v[LOGPROB] + each} for c, v in values.items()})}
    own = rows["shared, gap 64, T 0.8, S 0.8"]
    assert own.means[LOGPROB].error > 0.3
    for against, mean in ((own.against_full, 0.2), (own.against_control, -0.1)):
        assert against[LOGPROB].mean == pytest.approx(mean, abs=0.02)
        assert against[LOGPROB].error < 0.01
    assert rows["full"].against_full is rows["full"].against_control is rows["shared"].against_control is None
    assert rows["full, T 0.8, S 0.8"].against_control is None


def differing(count, mean, spread):
    """Return `count` numbers of exactly this mean and standard deviation."""
    values = np.random.default_rng(count).normal(size=count)
    if count < 2 or not spread:
        return np.full(count, float(mean))
    return mean + spread * (values - values.mean()) / values.std(ddof=1)


LEAVE = "leave gap, temperature and scale as they are"
CALIBRATE = "run `chunkattn calibrate` on other questions and set what it finds"
ALIKE = "the same difference for all {} questions does not show how much others vary"


@pytest.mark.parametrize(
    ("count", "mean", "spread", "found", "doubt", "advice"),
    [
        # t(11) = 2.201: 2.201 * 0.7082 / sqrt(12) = 0.45, and (1.96 * 0.7082 / 0.1)² = 192.7
        (12, -0.1, 0.7082, "lose 0.10 (95% interval -0.55 to +0.35)", "0.45", "about 200"),
        (12, 0.1, 0.7082, "gain 0.10 (95% interval -0.35 to +0.55)", "0.45", "about 200"),
        (12, -0.46, 0.7082, "lose 0.46 (95% interval -0.91 to -0.01)", None, CALIBRATE),
        (12, 0.46, 0.7082, "gain 0.46 (95% interval +0.01 to +0.91)", None, LEAVE),
        # t(1) = 12.706, t(3) = 3.182
        (2, -0.5, 0.1, "lose 0.50 (95% interval -1.40 to +0.40)", "0.90", "about 50"),
        (4, -0.5, 0.4, "lose 0.50 (95% interval -1.14 to +0.14)", "0.64", "about 64"),
        (12, -1e-9, 1e-8, "lose less than 0.01 (95% interval -0.00 to +0.00)", "less than 0.01", "about 50"),
        # 1.96 * 0.4 / sqrt(100) = 0.08, small enough to leave it at that
        (100, -0.03, 0.4, "lose 0.03", "0.08", LEAVE),
        (100, -0.13, 0.4, "lose 0.13", None, CALIBRATE),
        (1000, 0.02, 4.0, "gain 0.02", "0.25", "about 6,200"),
        # without spread
        (1, -0.4, 0, "lose 0.40 (no interval)", "one question tells nothing about other questions", "measure more questions"),
        (12, -0.4, 0, "lose 0.40 (no interval)", ALIKE.format(12), "measure more questions"),
        (60, 0, 0, "lose less than 0.01 (no interval)", ALIKE.format(60), "measure more questions"),
    ],
)
def test_conclusions_say_what_the_questions_cannot_tell(count, mean, spread, found, doubt, advice):
    """Numbers by hand, with quantiles from a table of Student's distribution."""
    full = np.random.default_rng(0).normal(-2, 1, count) if spread else np.zeros(count)
    values = {Condition("full"): {LOGPROB: full}, Condition("shared"): {LOGPROB: full + differing(count, mean, spread)}}
    said = conclusion(values, NONE)
    assert said.startswith(f"Isolated documents {found} ")
    if doubt is None:
        assert said.endswith(f" of log-probability per token of the gold answer against full attention: {advice}.")
    else:
        doubt = f"{count} questions cannot tell a loss of {doubt} from none" if spread else doubt
        advice = f"measure {advice} questions, which can tell a loss of 0.1" if advice.startswith("about") else advice
        assert said.endswith(f" of log-probability per token of the gold answer against full attention, but {doubt}: {advice}.")
    (row,) = as_json(compare(values))[1:]
    assert (row["against_full"][LOGPROB]["resolution"] is None) == (spread == 0)


def test_the_picture_shows_doubtful_differences_hollow():
    full = np.zeros(6)
    values = {Condition("full"): {LOGPROB: full}}
    values |= {Condition(kind): {LOGPROB: differing(6, mean, 0.3)} for kind, mean in (("shared", -0.1), ("offset", -0.9))}
    (axes,) = draw(compare(values), "title").axes
    assert [line.get_markerfacecolor() == "white" for line in axes.lines if line.get_marker() == "o"] == [True, False]
    assert "hollow: these questions cannot tell" in axes.get_xlabel()


@pytest.mark.parametrize(
    ("count", "gain", "said", "advises"),
    [
        (80, 0.6, "-0.40 without, and -0.10 (95% interval ", True),
        (80, 0.6, ": set these values.", True),
        (80, 0.0, "80 questions cannot tell a gain of 0.0", False),
        (80, 0.0, "from none: keep the defaults.", False),
        (80, -0.3, ", which makes it worse: keep the defaults.", False),
        # t(5) = 2.571: 2.571 * 0.3 / sqrt(6) = 0.31
        (6, 0.3, ", but 6 questions cannot tell a gain of 0.31 from none: keep the defaults, or measure about 50 qu", False),
        (
            1,
            0.6,
            ", but one question tells nothing about other questions: keep the defaults, or measure more questions.",
            False,
        ),
        (2, 0.6, ", but 2 questions cannot tell a gain of 2.70 from none: keep the defaults, or measure about ", False),
    ],
)
def test_a_calibration_is_advised_where_a_gain_is_shown(count, gain, said, advises):
    best, full = Calibration(64, 0.8, 0.8), np.random.default_rng(1).normal(-2, 1, count)
    shared = full + differing(count, -0.4, 0.02)
    values = {
        Condition("full"): {LOGPROB: full},
        Condition("full", Calibration(0, 0.8, 0.8)): {LOGPROB: full + 0.3},
        Condition("shared"): {LOGPROB: shared},
        Condition("shared", best): {LOGPROB: shared + differing(count, gain, 0.3)},
    }
    text = conclusion(values, best)
    assert said in text
    assert text.startswith("With chunk_position_gap=64, chunk_temperature=0.8 and chunk_scale=0.8, isolated documents ")
    found = CalibrationResult(
        [Trial(best, 0.0), Trial(NONE, -1.0)], halves_of(2 * count) if count > 1 else Halves([0], [1]), values
    )
    assert found.calibration == (best if advises else NONE)
    assert found.conclusion == found.notes()["conclusion"] == text
    json.dumps(found.notes(), allow_nan=False)


def test_a_search_that_finds_nothing_better_tells_what_is_lost():
    full = np.zeros(6)
    values = {Condition("full"): {LOGPROB: full}, Condition("shared"): {LOGPROB: full + differing(6, -0.1, 0.3)}}
    found = CalibrationResult([Trial(NONE, 0.0)], halves_of(12), values)
    assert found.conclusion == (
        "No gap, temperature or scale that was tried is better than the defaults: keep the defaults. With them, isolated "
        "documents lose 0.10 (95% interval -0.41 to +0.21) of log-probability per token of the gold answer against full "
        "attention, but 6 questions cannot tell a loss of 0.31 from none."
    )
    assert found.calibration == NONE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([0.2, 0.3, 0.25], "raises {} 0.500 to 0.750 (difference +0.250, 95% interval +0.126 to +0.374). Every"),
        ([-0.2, -0.3, -0.25], "lowers {} 0.500 to 0.250 (difference -0.250, 95% interval -0.374 to -0.126). Every"),
        ([0.2, -0.3, 0.25], "+0.050, 95% interval -0.706 to +0.806), but 3 queries cannot tell a change of 0.756 from none. E"),
        (
            [0.2],
            "raises {} 0.500 to 0.700 (difference +0.200, no interval), but one query tells nothing about other queries. E",
        ),
        ([0.0] * 4, "keeps {} 0.500 to 0.500 (difference +0.000, no interval), but the same difference for all 4 queries "),
    ],
)
def test_conclusions_of_rankings(changes, said):
    """t(2) = 4.303."""
    given = np.full(len(changes), 0.5)
    rows = compare_rankings({"NDCG@10": given}, {"NDCG@10": given + changes})
    assert said.format("NDCG@10 of the given order,") in ranking_conclusion(rows)


# Commands


def test_eval_writes_table_json_and_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "data.jsonl", map(as_line, questions(4)))
    options = ["eval", str(data), "--kv-cache-memory-bytes", str(POOL), "--max-tokens", "8"]
    done = CliRunner().invoke(app, [*options, "--json", "report.json", "--plot", "report.png"])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["full", "shared", "offset", "gold only", "no document"]
    shared = report["rows"][1]
    assert shared["means"]["exact match"]["mean"] == 1.0
    assert shared["against_full"][LOGPROB]["count"] == 4
    assert report["rows"][-1]["means"][LOGPROB]["mean"] < shared["means"][LOGPROB]["mean"] - 1
    for text in ("shared", "no document", "exact match", "F1 - full", report["conclusion"].split(" against")[0]):
        assert text in done.output
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "data.results.jsonl").read_text().splitlines()) == 2 * 5 * 4
    monkeypatch.setattr(LLM, "run", None)  # nothing is computed again
    alone = CliRunner().invoke(app, [*options, "--json", "-"])
    assert json.loads(alone.stdout) == report


@pytest.mark.ci
def test_eval_of_one_question_has_no_interval(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "data.jsonl", map(as_line, questions(1)))
    options = ["eval", str(data), "--kv-cache-memory-bytes", str(POOL), "--max-tokens", "8"]
    done = CliRunner().invoke(app, [*options, "--json", "report.json", "--plot", "report.png"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "[no interval]" in done.output
    assert "inf" not in done.output
    text = (tmp_path / "report.json").read_text()
    report = json.loads(text, parse_constant=pytest.fail)  # no NaN, no Infinity
    assert report["rows"][1]["against_full"][LOGPROB]["low"] is None


def test_eval_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = []
    for seed in range(3):
        judging = World(seed, held_out=True).judging(4)
        relevance = [int(label) for label in judging.labels]
        lines.append({"query": judging.query, "documents": list(judging.items), "relevance": relevance})
    data = write(tmp_path / "data.jsonl", lines)
    done = CliRunner().invoke(app, ["eval", str(data), "--json", "report.json", "--plot", "report.png"])
    assert done.exit_code == 0, done.output
    given, ranked = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert ranked["means"]["NDCG@10"]["mean"] >= given["means"]["NDCG@10"]["mean"]
    assert ranked["means"]["MRR"]["mean"] == 1.0
    refused = CliRunner().invoke(app, ["calibrate", str(data)])
    assert refused.exit_code == 2
    assert "holds rankings" in refused.stderr


def test_calibrate_writes_a_file_that_an_engine_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "data.jsonl", map(as_line, questions(4)))
    options = ["--kv-cache-memory-bytes", str(POOL), "--gap", "0", "--gap", "4"]
    done = CliRunner().invoke(app, ["calibrate", str(data), *options, "--json", "report.json"])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "report.json").read_text())
    best = max(report["trials"], key=lambda trial: trial["value"])
    found = read_calibration(tmp_path / "chunk_calibration.json")
    assert found == NONE  # two questions show no gain
    written = json.loads((tmp_path / "chunk_calibration.json").read_text())
    assert written["best_of_the_search"] == {name: best[name] for name in vars(found)}
    assert (written["data"], written["questions_of_the_search"], written["questions_of_the_report"]) == ("data.jsonl", 2, 2)
    assert written["conclusion"] == report["conclusion"]
    assert report["conclusion"] in done.output
    assert (
        "written: chunk_calibration.json (gap 0, temperature 1, scale 1, the defaults, because no gain was shown)"
        in done.output
    )
    assert f"warning: {written['warning']}" in done.stderr
    assert make_config(None, {"chunk_calibration": "chunk_calibration.json"}).calibration == found
    assert "best so far" in done.stderr
    assert written.pop("model") == "the demo model"
    (tmp_path / "chunk_calibration.json").write_text(json.dumps(written))
    assert make_config(str(tmp_path), {}).calibration == found  # as if the folder were a model's
    alone = CliRunner().invoke(app, ["calibrate", str(data), *options, "--json", "-"])  # all trials are known by now
    assert json.loads(alone.stdout) == report


@pytest.mark.parametrize(
    ("count", "on_the_search", "on_the_report", "takes"),
    [(60, 0.5, 0.5, True), (60, 0.5, 0.0, False), (60, 0.5, -0.5, False), (60, -0.5, 0.5, False), (8, 0.5, 0.0, False)],
)
def test_calibrate_writes_nothing_that_its_conclusion_advises_against(
    count, on_the_search, on_the_report, takes, tmp_path, monkeypatch
):
    """Planted log-probabilities: gap 4 changes those of the search and those of the report by different numbers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chunk_calibration.json").write_text('{"chunk_position_gap": 99}')  # of an earlier run
    data = write(tmp_path / "data.jsonl", map(as_line, questions(count)))
    noise, searched = differing(count, 0.0, 0.2), set(halves_of(count).search)

    def likelihoods(self, condition, numbers):
        if condition.calibration == NONE:
            return [-1.0] * len(numbers)
        return [-1 + noise[number] + (on_the_search if number in searched else on_the_report) for number in numbers]

    monkeypatch.setattr(Examiner, "likelihoods", likelihoods)
    options = ["--no-weighing", "--gap", "0", "--gap", "4", "--kv-cache-memory-bytes", str(POOL)]
    done = CliRunner().invoke(app, ["calibrate", str(data), *options])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "chunk_calibration.json").read_text())
    assert read_calibration(tmp_path / "chunk_calibration.json") == (Calibration(4) if takes else NONE)
    assert written["conclusion"].endswith(": set these values.") == takes
    assert ("keep the defaults" in written["conclusion"]) != takes
    assert ("(gap 4, temperature 1, scale 1)" in done.stdout) == takes
    assert ("warning" in written) == ("warning: 8 questions are few" in done.stderr) == (count < 50)


def test_the_engines_of_both_commands_bound_chunks_by_positions_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, made = write(tmp_path / "data.jsonl", map(as_line, questions(4))), []

    def make(model, **options):
        made.append(options)
        raise ConfigError("seen")

    for module in ("command", "calibrate_command"):
        monkeypatch.setattr(f"chunkattn.tools.eval.{module}.make_llm", make)
    for command in ("eval", "calibrate"):
        assert CliRunner().invoke(app, [command, str(data), "--tokenizer", "other"]).exit_code == 2
    for options in made:
        assert options["max_chunk_len"] >= 1 << 30
        assert options["tokenizer"] == "other"
    assert len(made) == 2


def test_commands_refuse_bad_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "data.jsonl", map(as_line, questions(2)))
    for options, said in (
        (["eval", "none.jsonl"], "none.jsonl cannot be read"),
        (["eval", str(data), "--limit", "0"], "--limit must be at least 1"),
        (["eval", str(data), "--document-template", "text"], "must hold {document} exactly once"),
        (["eval", str(data), "--json", "no/such.json"], "is not a folder"),
        (["calibrate", str(data)], "at least 4 questions"),
        (["calibrate", str(data), "--gap", "-1"], "--gap must be at least 0"),
        (["calibrate", str(data), "--output", "no/such.json"], "is not a folder"),
        (["calibrate", str(data), "--output", str(tmp_path)], "cannot be written: Is a directory"),
        (["eval", str(data), "--json", str(tmp_path)], "cannot be written: Is a directory"),
    ):
        done = CliRunner().invoke(app, options)
        assert done.exit_code == 2, options
        assert said in " ".join(done.stderr.split()), options
    assert {file.name for file in tmp_path.iterdir()} == {"data.jsonl"}


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ir_measures", None)
    with pytest.raises(ConfigError, match=r"pip install ir-measures"):
        ranking_measures([0], [1])


def test_a_checked_file_stays_as_it_is(tmp_path):
    file = tmp_path / "report.json"
    check_file(file)
    assert not file.exists()
    file.write_text("kept")
    check_file(file)
    assert file.read_text() == "kept"
