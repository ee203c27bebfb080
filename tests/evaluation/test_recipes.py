"""Recipes of `chunkattn eval --recipe`: documents and questions against a BM25 of the tests' own, and errors."""

import gzip
import hashlib
import json
import math
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chunkattn import LLM
from chunkattn.cli import app
from chunkattn.errors import ConfigError, RequestError
from chunkattn.tools.eval.data import questions_from
from chunkattn.tools.eval.examiner import Examiner
from chunkattn.tools.eval.recipes import PREFIX, RECIPES, Passage, Recipe, make_lines, read_source
from chunkattn.tools.eval.report import answer_measures
from training.world import World

STOP = {"the", "of", "and"}


def words_of(text):
    return [word for word in re.findall(r"\w\w+", text.lower()) if word not in STOP]


def bm25(passages, question):
    """BM25 as Lucene has it: k1 1.5, b 0.75, idf log(1 + (N - df + 0.5) / (df + 0.5))."""
    counts = [Counter(words_of(f"{passage.title}\n{passage.text}")) for passage in passages]
    mean = sum(own.total() for own in counts) / len(counts)
    scores = [0.0] * len(counts)
    for word in words_of(question):
        df = sum(word in own for own in counts)
        idf = math.log(1 + (len(counts) - df + 0.5) / (df + 0.5))
        for place, own in enumerate(counts):
            scores[place] += idf * own[word] / (own[word] + 1.5 * (0.25 + 0.75 * own.total() / mean))
    return scores


def ranks(passages, question):
    """Places of the passages, the best first."""
    scores = bm25(passages, question)
    return sorted(range(len(scores)), key=lambda place: -scores[place])


@pytest.fixture(scope="module")
def source():
    """Passages of 60 words of a small vocabulary. Questions have words of theirs, one in six of any passage's."""
    rng = random.Random(5)
    vocabulary = [f"word{number}" for number in range(70)]
    names = [f"Zu{number}" for number in range(90)]
    found = []
    for number, name in enumerate(names):
        words = [*rng.choices(vocabulary, k=rng.randrange(30, 60)), name, *rng.choices(names, k=4), "the", "of"]
        rng.shuffle(words)
        told = rng.sample(vocabulary if number % 6 == 0 else [word for word in words if word in vocabulary], 5)
        question = " ".join(["what the", *told]) + "?" * (number % 2)
        found.append(Passage(number + 1, question, (name, f"{name} {name}"), f"title of {rng.choice(names)}", " ".join(words)))
    return found


def holds(text, passage):
    return bool({*passage.answers} & {*re.findall(r"\w+", text)})


def by_question(source):
    return {f"Question: {passage.question.removesuffix('?')}?": passage for passage in source}


def digest(lines):
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize(("titles", "expected"), [(False, "8ed8c5faa208be54"), (True, "8c6b82c5768cce63")])
def test_random_makes_the_bytes_that_the_calibration_of_the_examples_was_made_with(titles, expected):
    source = [
        Passage(
            i + 1,
            f"q{i}" + "?" * (i % 2) + " " * (i % 3 == 0),
            (f"w{i}", f"v{i}"),
            f"t{(i + 1) % 30}",
            f"the w{i} and w{i // 2} é",
        )
        for i in range(30)
    ]
    assert digest(make_lines(source, Recipe("random", 5, 12, 3, 4, "Answer.", titles))) == expected


@pytest.mark.parametrize("titles", [False, True])
@pytest.mark.parametrize("name", ["random", "bm25"])
def test_no_other_document_holds_an_answer(name, titles, source):
    lines = make_lines(source, Recipe(name, documents=8, count=50, seed=3, titles=titles))
    assert len(lines) == 50
    for line in lines:
        own, (gold,) = by_question(source)[line["question"]], line["gold"]
        shown = [f"{d['title']} {d['text']}" if titles else d for d in line["documents"]]
        assert [holds(text, own) for text in shown] == [place == gold for place in range(8)]
        assert line["answers"] == list(own.answers)
        assert len(set(shown)) == 8
        assert line["prefix"] == PREFIX
    assert len({line["gold"][0] for line in lines}) == 8


def test_bm25_takes_the_best_passages(source, caplog):
    lines = make_lines(source, Recipe("bm25", documents=8, count=60, seed=3))
    for line in lines:
        own = by_question(source)[line["question"]]
        ranked = [source[place] for place in ranks(source, own.question)]
        assert own in ranked[:20]
        others = [p.text for p in ranked if p != own and not holds(f"{p.title} {p.text}", own)]
        assert {*line["documents"]} == {own.text, *others[:7]}
    assert not caplog.records  # the library logs to stderr by default


def test_bm25_asks_every_question_that_qualifies(source):
    qualifying = [p for place, p in enumerate(source) if place in ranks(source, p.question)[:20]]
    assert 60 < len(qualifying) < len(source)
    lines = make_lines(source, Recipe("bm25", count=len(qualifying)))
    assert {line["question"] for line in lines} == {*by_question(qualifying)}
    with pytest.raises(RequestError, match=rf"needs {len(qualifying) + 1} questions \(skip 2, count {len(qualifying) - 1}\)"):
        make_lines(source, Recipe("bm25", skip=2, count=len(qualifying) - 1))


def test_the_twenty_best_passages_qualify():
    """Passage number n has rank n for every question."""
    texts = [" ".join(["thing"] * (25 - n) + ["other"] * n + [f"Zu{n}"]) for n in range(25)]
    source = [Passage(n + 1, f"what thing of unknown{n}", (f"Zu{n}",), "", text) for n, text in enumerate(texts)]
    with pytest.raises(RequestError, match="the source makes 20 of its 25 lines"):
        make_lines(source, Recipe("bm25", count=21))
    lines = make_lines(source, Recipe("bm25", count=20))
    assert {line["question"] for line in lines} == {*by_question(source[:20])}


def test_bm25_takes_every_text_once():
    source = [Passage(i + 1, f"where is thing{i}", (f"Zu{i}",), "", f"thing{i} lies in Zu{i}") for i in range(8)]
    source += [Passage(i + 9, f"what has Zu{i}", (f"thing{i}",), "more", source[i].text) for i in range(2)]
    for line in make_lines(source, Recipe("bm25", 8, 10)):
        assert {*line["documents"]} == {passage.text for passage in source}
    with pytest.raises(RequestError, match="7 other passages"):
        make_lines(source, Recipe("bm25", 9, 10))


@pytest.mark.parametrize("name", RECIPES)
def test_questions_do_not_depend_on_the_number_of_documents(name, source):
    made = [make_lines(source, Recipe(name, documents, count=20, skip=3, seed=2)) for documents in (3, 6, 12)]
    assert [len(line["documents"]) for lines in made for line in lines] == [3] * 20 + [6] * 20 + [12] * 20
    assert [line["question"] for line in made[0]] == [line["question"] for line in made[1]]
    assert [line["question"] for line in made[0]] == [line["question"] for line in made[2]]
    if name != "random":
        assert all({*few["documents"]} < {*many["documents"]} for few, many in zip(made[0], made[2], strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_skipped_questions_are_others_and_the_seed_decides(name, source):
    first, second = (make_lines(source, Recipe(name, count=12, skip=skip)) for skip in (0, 12))
    assert [*first, *second] == make_lines(source, Recipe(name, count=24))
    asked = [
        {part for line in lines for part in re.split(r"[?] And |Question: ", line["question"])} for lines in (first, second)
    ]
    assert asked[0] & asked[1] == {""}
    assert first != make_lines(source, Recipe(name, count=12, seed=1))


def test_two_hop_needs_both_passages(source):
    lines = make_lines(source, Recipe("two-hop", documents=6, count=20))
    for line, question in zip(lines, questions_from(lines, "made"), strict=True):
        first, second = re.fullmatch(r"Question: (.*)[?] And (.*)[?]", line["question"]).groups()
        pair = [by_question(source)[f"Question: {asked}?"] for asked in (first, second)]
        held = [[holds(text, own) for own in pair] for text in line["documents"]]
        assert sorted(map(sum, held)) == [0, 0, 0, 0, 1, 1]  # no document holds both
        assert [sum(column) for column in zip(*held, strict=True)] == [1, 1]
        assert line["gold"] == [place for place, parts in enumerate(held) if any(parts)]
        assert not any(holds(line["question"], own) for own in pair)
        for own in pair:
            assert own in [source[place] for place in ranks(source, own.question)[:20]]
        assert line["answers"][0] == f"{pair[0].answers[0]} and {pair[1].answers[0]}"
        assert len(line["answers"]) == 4
        one, other = (own.answers[0] for own in pair)
        texts = [f"{other}, and also {one}.", one, other, line["answers"][0]]
        measured = answer_measures(texts, [question] * 4)
        assert measured["contained"].tolist() == [1, 0, 0, 1]
        assert measured["exact match"].tolist() == [0, 0, 0, 1]
    assert {place for line in lines for place in line["gold"]} == set(range(6))  # in random order


def test_two_hop_takes_the_best_passages_of_both_in_turn(source):
    for line in make_lines(source, Recipe("two-hop", documents=6, count=20)):
        pair = [
            by_question(source)[f"Question: {asked}?"] for asked in re.split(r"[?] And |Question: |[?]$", line["question"])[1:3]
        ]
        ranked = [[source[place] for place in ranks(source, own.question)] for own in pair]
        found = [own.text for own in pair]
        for passages in zip(*ranked, strict=True):
            found += [p.text for p in passages if not any(holds(f"{p.title} {p.text}", own) for own in pair)]
        assert {*line["documents"]} == {*list(dict.fromkeys(found))[:6]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text": "Zu1 knows Zu0"}, "0 of"),
        ({"question": "who is thing1 of Zu0"}, "0 of"),
        ({"question": "who is thing1 or Zu1"}, "0 of"),
        ({"answers": ("Zu1", "old Zu0")}, "0 of"),
        ({"text": "thing1 is nobody"}, "0 of"),
    ],
)
def test_two_hop_joins_no_questions_that_tell_of_each_other(change, said):
    parts = [
        {"question": f"who is thing{i}", "answers": (f"Zu{i}",), "title": "", "text": f"thing{i} is Zu{i}"} for i in range(2)
    ]
    make = Recipe("two-hop", documents=2, count=1)
    assert len(make_lines([Passage(i + 1, **part) for i, part in enumerate(parts)], make)) == 1
    parts[1] |= change
    with pytest.raises(RequestError, match=said):
        make_lines([Passage(i + 1, **part) for i, part in enumerate(parts)], make)


# Errors


def test_errors_name_the_numbers(source):
    with pytest.raises(ConfigError, match="recipe must be one of random, bm25, two-hop; got nearest"):
        Recipe("nearest")
    for changes, said in (
        ({"documents": 0}, "documents of recipe bm25 must be at least 1; got 0"),
        ({"name": "two-hop", "documents": 1}, "documents of recipe two-hop must be at least 2; got 1"),
        ({"count": 0}, "count of recipe bm25 must be at least 1"),
        ({"skip": -1}, "skip of recipe bm25 must be at least 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            Recipe(**{"name": "bm25", **changes})
    for recipe, said in (
        (Recipe("random", documents=91), "91 documents need as many passages; the source has 90"),
        (
            Recipe("random", documents=90, count=1),
            r"source line \d+: \d\d other passages hold none of its answers, too few for 89",
        ),
        (
            Recipe("bm25", documents=90, count=1),
            r"source line \d+: \d\d other passages hold none of its answers, too few for 89",
        ),
        (Recipe("random", skip=80, count=11), r"needs 91 questions \(skip 80, count 11\); the source makes 90 of its 90 lines"),
        (Recipe("two-hop", count=80), r"needs 80 pairs of questions \(skip 0, count 80\); the source makes \d\d of its 90"),
    ):
        with pytest.raises(RequestError, match=said):
            make_lines(source, recipe)


def test_a_missing_library_is_named(monkeypatch, source):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    make_lines(source, Recipe("random", count=90))
    for name in ("bm25", "two-hop"):
        with pytest.raises(ConfigError, match=r"pip install bm25s"):
            make_lines(source, Recipe(name))


def test_questions_and_passages_without_words():
    source = [Passage(i + 1, "the of?", ("Zu",), "", "Zu" * i or "!") for i in range(3)]
    with pytest.raises(RequestError, match="makes 0 of its 3 lines"):
        make_lines(source, Recipe("bm25", 1, 1))
    with pytest.raises(RequestError, match="no word to search for"):
        make_lines(source[:1], Recipe("bm25", 1, 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"question": None}, "`question` must be a non-empty text, got null"),
        ({"answers": []}, "`answers` must be a non-empty list of non-empty texts, got []"),
        ({"answers": "Zu"}, "`answers` must be a non-empty list of non-empty texts"),
        ({"text": " "}, "`text` must be a non-empty text"),
        ({"title": 3}, "`title` must be a text, got 3"),
    ],
)
def test_errors_name_line_and_field(change, said, tmp_path):
    file = tmp_path / "source.jsonl"
    line = {"question": "q", "answers": ["Zu"], "title": "t", "text": "one\u2028two\x85three"}
    file.write_text(f"{json.dumps(line, ensure_ascii=False)}\n\n{json.dumps(line | change)}\n", encoding="utf-8")
    assert read_source(file, 1) == [Passage(1, "q", ("Zu",), "t", "one\u2028two\x85three")]
    with pytest.raises(RequestError) as error:
        read_source(file)
    assert f"{file} line 3: {said}" in str(error.value)


def test_the_source_needs_no_titles(tmp_path):
    file = tmp_path / "source.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"question": "q", "answers": ["Zu"], "text": "Zu"}\n' * 2))
    assert read_source(file) == [Passage(line, "q", ("Zu",), "", "Zu") for line in (1, 2)]


# Commands


@pytest.fixture
def passages(tmp_path, monkeypatch):
    """A file of 24 questions that the demo model can answer."""
    monkeypatch.chdir(tmp_path)
    lines = []
    for seed in range(24):
        reading = World(seed, held_out=True).reading(1)
        asked = reading.questions[0]
        question = asked.text.removesuffix(" Answer:")
        lines.append({"question": question, "answers": [asked.answer], "title": "", "text": reading.documents[0]})
    file = tmp_path / "passages.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return file


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def test_eval_names_the_recipe_and_saves_its_data(passages, monkeypatch):
    recipe = ["--recipe", "two-hop", "--documents", "3", "--count", "2", "--skip", "1", "--seed", "4", "--limit", "20"]
    options = ["--max-tokens", "8", "--kv-cache-memory-bytes", 32 << 20]
    done = invoke("eval", passages, *recipe, *options, "--save-data", "made.jsonl", "--json", "report.json")
    assert done.exit_code == 0, done.output
    title = (
        "the demo model, 2 questions of passages.jsonl.gz (recipe two-hop, documents 3, count 2, skip 1, seed 4, first_line 1)"
    )
    assert title in " ".join(done.output.split())
    report = json.loads(Path("report.json").read_text())
    assert report["data"] == "passages.jsonl.gz"
    assert report["recipe"] == {
        "name": "two-hop",
        "documents": 3,
        "count": 2,
        "skip": 1,
        "seed": 4,
        "first_line": 1,
        "passages": 20,
    }
    made = make_lines(read_source(passages, 20), Recipe("two-hop", 3, 2, 1, 4))
    assert digest(made) == digest(map(json.loads, Path("made.jsonl").read_text().splitlines()))
    assert len(Path("passages.results.jsonl").read_text().splitlines()) == 2 * 5 * 2
    monkeypatch.setattr(LLM, "run", None)  # nothing is computed again
    alone = invoke("eval", "made.jsonl", *options, "--results", "passages.results.jsonl", "--json", "-")
    again = json.loads(alone.stdout)
    assert again["rows"] == report["rows"]
    assert "recipe" not in again


def test_calibrate_names_the_recipe(passages, monkeypatch):
    monkeypatch.setattr(Examiner, "likelihoods", lambda self, condition, numbers: [-1.0] * len(numbers))
    recipe = ["--recipe", "bm25", "--documents", "3", "--count", "8"]
    done = invoke("calibrate", passages, *recipe, "--no-weighing", "--gap", "0", "--json", "report.json")
    assert done.exit_code == 0, done.output
    title = "4 other questions of passages.jsonl.gz (recipe bm25, documents 3, count 8, skip 0, seed 0, first_line 1)"
    assert title in " ".join(done.output.split())
    for file in ("report.json", "chunk_calibration.json"):
        found = json.loads(Path(file).read_text())
        assert found["data"] == "passages.jsonl.gz"
        assert found["recipe"] == {
            "name": "bm25",
            "documents": 3,
            "count": 8,
            "skip": 0,
            "seed": 0,
            "first_line": 1,
            "passages": 24,
        }


@pytest.mark.parametrize("command", ["eval", "calibrate"])
def test_commands_refuse_bad_recipes(command, passages):
    before = passages.read_bytes()
    for options, said in (
        (["--documents", "5", "--skip", "0"], "--documents, --skip need --recipe"),
        (["--save-data", "made.jsonl"], "--save-data needs --recipe"),
        (["--recipe", "best"], "recipe must be one of random, bm25, two-hop; got best"),
        (["--recipe", "bm25", "--count", "0"], "count of recipe bm25 must be at least 1; got 0"),
        (["--recipe", "random"], "recipe random needs 200 questions (skip 0, count 200); the source makes 24 of its 24 lines"),
        (["--recipe", "random", "--documents", "25"], "25 documents need as many passages; the source has 24"),
        (["--recipe", "random", "--limit", "0"], "--limit must be at least 1"),
        (["--recipe", "random", "--count", "3", "--save-data", passages], "passages.jsonl.gz is the file of DATA"),
        (["--recipe", "random", "--count", "3", "--save-data", "no/made.jsonl"], "no is not a folder"),
        ([], "passages.jsonl.gz line 1: `documents` must be a non-empty list"),
    ):
        done = invoke(command, passages, *options)
        assert done.exit_code == 2, options
        assert said in " ".join(done.stderr.split()), options
    assert passages.read_bytes() == before
    assert [*Path().iterdir()] == [Path(passages.name)]


def test_the_help_names_every_recipe():
    assert all(name in invoke("eval", "--help").output for name in RECIPES)


def test_data_that_cannot_be_written_is_an_error(passages):
    passages.write_bytes(gzip.compress(b'{"question": "q", "answers": ["a"], "text": "\\ud800"}\n' * 5))
    done = invoke("eval", passages, "--recipe", "random", "--count", "2", "--documents", "1", "--save-data", "made.jsonl")
    assert done.exit_code == 2
    assert "error: made.jsonl cannot be written: 'utf-8' codec can't encode" in done.stderr
