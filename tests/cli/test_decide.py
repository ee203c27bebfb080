"""`chunkattn decide`: files of questions and states, lines of answers, and errors that name file and line."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chunkattn import LLM, Choice, Level, Option, Predicate, Rating
from chunkattn.calls.decide_files import as_json, read_questions
from chunkattn.calls.decide_table import table_header
from chunkattn.cli import app, decide
from chunkattn.errors import RequestError

ROOT = Path(__file__).parents[2]
YAML = """
- predicate: Ana likes figs.
  yes: she eats them
  no: 3
  name: figs
- choice: Who writes?
  options: [yes, true, {value: Ana, description: a person}]
- {rating: 'How late?', levels: [1, 2024-01-31, {label: ~x}]}
"""
ASKED = [
    Predicate("Ana likes figs.", "she eats them", "3", "figs"),
    Choice("Who writes?", ["yes", True, Option("Ana", "a person")]),
    Rating("How late?", ["1", "2024-01-31", Level("~x")]),
]
PLAIN = {"chat_template": "{{ messages[0].content }}<|im_end|>"}
POOL = ["--kv-cache-memory-bytes", str(16 << 20)]
LINES = [
    '"Ana likes figs."',
    "",
    '{"text": "an object"}',
    '{"id": "é\\ud800", "state": [{"role": "user", "content": "Hi"}]}',
    "[1, 2]",
    '{"state": {"state": 1}, "id": 7}',
]
DOCUMENTS = [
    '{"state": "Ana likes figs.", "id": "a,\\"b\\"", "documents": ["One.", {"text": "Two."}]}',
    '"Ana likes figs."',
    '{"state": [1, 2], "documents": ["One.", "Two."]}',
    '{"state": "Ana likes figs.", "documents": [[5, 6, 7]]}',
    '{"state": "Ana likes figs.", "documents": []}',
]
STATES = ["Ana likes figs.", {"text": "an object"}, [{"role": "user", "content": "Hi"}], [1, 2], {"state": 1}]


@pytest.fixture(scope="module")
def folder(chat_folder):
    return chat_folder


@pytest.fixture
def files(tmp_path):
    (tmp_path / "questions.yaml").write_text(YAML)
    (tmp_path / "tickets.jsonl").write_text("\n".join(LINES))
    return tmp_path


def run(folder, files, *arguments, **options):
    given = ["decide", "--questions", str(files / "questions.yaml"), *map(str, arguments), "--model", str(folder), *POOL]
    return CliRunner().invoke(app, given, **options)


# Questions


def test_questions_are_read(files):
    assert read_questions(files / "questions.yaml") == ASKED
    listed = [
        {"predicate": "Ana likes figs.", "yes": "she eats them", "no": "3", "name": "figs"},
        {"choice": "Who writes?", "options": ["yes", True, {"value": "Ana", "description": "a person"}]},
        {"rating": "How late?", "levels": ["1", "2024-01-31", {"label": "~x"}]},
    ]
    (files / "questions.json").write_text(json.dumps(listed))
    assert read_questions(files / "questions.json") == ASKED
    (files / "questions.json").write_text('[{"predicate": "a", "predicate": "b"}]')
    with pytest.raises(RequestError, match="cannot be read: the key 'predicate' is there twice"):
        read_questions(files / "questions.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must hold a list of questions, got nothing"),
        ("[]", "must hold a list of questions, got an empty list"),
        ("a: b", "must hold a list of questions, got dict"),
        ("- a", "question 0 must be a mapping with one of predicate, choice, rating, got str"),
        ("- {name: a}", "question 0 must be a mapping with one of predicate, choice, rating, got the keys name"),
        ("- {predicate: a, choice: b}", "got the keys predicate, choice"),
        ("- {predicate: a, options: [b]}", "question 0, a predicate, has the unknown key 'options'; the keys are name, no,"),
        ("- {choice: a}", "question 0 needs a list of options, got nothing"),
        ("- {choice: a, options: [{label: b}]}", "question 0, option 0, has the unknown key 'label'"),
        ("- {rating: a, levels: [b, {description: c}]}", "question 0, level 1, needs the key 'label'"),
        ("- {predicate: a, predicate: b}", "the key 'predicate' is there twice"),
        ("- [a", "cannot be read"),
        ("- &a [*a]", "question 0 must be a mapping"),
        ("[" * 5000, "cannot be read"),
        ("- !!python/object:os.system {}", "cannot be read"),
        ("\ud800", "cannot be read"),
    ],
)
def test_bad_questions(text, said, tmp_path):
    file = tmp_path / "q.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(RequestError) as error:
        read_questions(file)
    assert str(error.value).startswith(str(file))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


# States of a file


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_lines_have_the_answers_of_the_call(source, folder, files, monkeypatch):
    monkeypatch.setattr(decide, "_STATES", 2)
    if source == "file":
        done = run(folder, files, "--input", files / "tickets.jsonl", "--output", files / "out.jsonl", "--calibrate", "on")
        text = (files / "out.jsonl").read_bytes()
        assert done.stdout == ""
    else:
        done = run(folder, files, "--input", "-", "--calibrate", "on", input="\n".join(LINES).encode())
        text = done.stdout_bytes
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[-1].startswith("5 of 5 states, 100%")
    found = [json.loads(line) for line in text.decode().splitlines()]
    outputs = LLM(str(folder), kv_cache_memory_bytes=16 << 20).decide(STATES, ASKED, calibrate=True)
    assert [line.pop("line") for line in found] == [1, 3, 4, 5, 6]
    assert [line.pop("id", None) for line in found] == [None, None, "é\ud800", None, 7]
    assert [line["answers"] for line in found] == [as_json(output)["answers"] for output in outputs]
    assert [line["usage"]["prompt_tokens"] for line in found] == [output.usage.prompt_tokens for output in outputs]
    first = found[0]["answers"][1]
    assert [own["value"] for own in first["probabilities"]] == ["yes", True, "Ana"]
    assert {*first} == {"name", "type", "choice", "confidence", "probabilities", "label_mass", "method"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON"),
        ("\udcff", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 nests too deep"),
        ("5", "line 2 must be a text, a JSON object or array, or messages, got int"),
        ('" "', "line 2 is empty"),
        (
            '{"state": "a", "texts": []}',
            "line 2 has the unknown key 'texts' beside `state`; the keys are state, id and",
        ),
        ('{"state": "a", "documents": "b"}', "line 2: `documents` must be a list, got str"),
        ('{"state": "a", "documents": [5]}', "line 2: document 0 must be a text, an object with the key `text`, or a list of"),
        ('{"state": "a", "documents": ["b", {"id": "c"}]}', "line 2: document 1 must be a text"),
        ('{"state": "a", "documents": [["b"]]}', "line 2: document 0"),
        ('{"state": "a", "documents": [[-1]]}', "line 2: document 0"),
        (json.dumps({"state": "a", "documents": ["many words " * 5000]}), "line 2: document 0 of 55012 characters has"),
        ('{"state": "a", "id": []}', "line 2: `id` must be a text or an integer, got list"),
        ('{"state": NaN}', "line 2 must be a text"),
        ('"bad \\ud800"', "line 2"),
        (json.dumps("many words " * 1200), "line 2 has"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_computed(line, said, folder, files, monkeypatch):
    monkeypatch.setattr(LLM, "run", None)
    file = files / "tickets.jsonl"
    file.write_bytes(b'"a"\n' + line.encode("utf-8", "surrogateescape") + b'\n"b"\n')
    done = run(folder, files, "--input", file, "--output", files / "out.jsonl")
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith(f"error: {file} {said}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (files / "out.jsonl").exists()


def test_other_errors(folder, files):
    tickets = files / "tickets.jsonl"
    for arguments, said in (
        ([], "give one of a state, --state-file and --input"),
        (["a", "--input", tickets], "give one of"),
        (["--input", files / "none"], "none cannot be read: No such file"),
        (["--input", tickets, "--output", tickets], "is the file of --input"),
        (["a", "--output", files / "questions.yaml"], "is the file of --questions"),
        (["--state-file", tickets, "--output", tickets], "is the file of --state-file"),
        (["a", "--document-file", tickets, "--output", tickets], "is the file of --document-file"),
        (["a", "--chunk-calibration", tickets, "--output", tickets], "is the file of --chunk-calibration"),
        *(
            (["a", "--output", tickets, "--chat-template", template], "chat_template has a fault in line")
            for template in ("{{ " + "x" * 300, "{{ x\n", "~nobody/{{ x", "{{ \0")
        ),
        (["a", "--chat-template-kwargs", "{"], "--chat-template-kwargs is no JSON"),
        (["a", "--chat-template-kwargs", "[1]"], "--chat-template-kwargs must be a JSON object, got list"),
        (["a", "--chat-template-kwargs", "[" * 100_000], "--chat-template-kwargs nests too deep"),
        (["a", "--cache-salt", ""], "cache_salt must be a non-empty string"),
        (["--input", tickets, "--output", files / "no" / "out"], "is not a folder"),
        (["--state-file", files / "none.txt"], "none.txt cannot be read"),
        (["a", "--method", "guess"], "method must be one of"),
        (["--input", tickets, "--method", "guess"], "method must be one of"),
        (["a", "--output-format", "xlsx"], "--output-format must be one of jsonl, csv; got xlsx"),
        ([" "], "state is empty"),
        (["a", "--calibrate", "yes"], "--calibrate must be one of off, on, fitted; got yes"),
        (["a", "--calibrate", "fitted"], "no calibration file with labels"),
    ):
        done = run(folder, files, *arguments)
        assert (done.exit_code, said in done.stderr) == (2, True), done.output
    tickets.write_text("\n")
    assert "holds no line" in run(folder, files, "--input", tickets).stderr
    (files / "questions.yaml").write_text("- {choice: a, options: [b, b]}")
    assert f"{files / 'questions.yaml'}: question 0 has the option 'b' twice" in run(folder, files, "a").stderr
    assert tickets.read_text() == "\n"


def test_an_interrupted_run_leaves_complete_lines(folder, files, monkeypatch):
    monkeypatch.setattr(decide, "_STATES", 2)
    calls, real = [], LLM.decide

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(LLM, "decide", interrupted)
    done = run(folder, files, "--input", files / "tickets.jsonl", "--output", files / "out.jsonl")
    assert done.exit_code == 130
    assert [json.loads(line)["line"] for line in (files / "out.jsonl").read_text().splitlines()] == [1, 3, 4, 5]


def test_a_line_has_documents_of_its_own(folder, files):
    """The lines of equal documents share a call; the answers are in the order of the lines."""
    (files / "tickets.jsonl").write_text("\n".join(DOCUMENTS))
    done = run(folder, files, "--input", files / "tickets.jsonl", "--document", "First.")
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["line"] for line in found] == [1, 2, 3, 4, 5]
    llm = LLM(str(folder), kv_cache_memory_bytes=16 << 20)
    for line, state, own in zip(
        found,
        [STATES[0], STATES[0], [1, 2], STATES[0], STATES[0]],
        [["One.", "Two."], [], ["One.", "Two."], [[5, 6, 7]], []],
        strict=True,
    ):
        (alone,) = llm.decide([state], ASKED, documents=["First.", *own])
        assert line["answers"] == as_json(alone)["answers"]
        assert line["usage"]["prompt_tokens"] == alone.usage.prompt_tokens


@pytest.mark.parametrize(
    "to", ["--output out.CSV", pytest.param("--output out --output-format csv", marks=pytest.mark.ci), "--output-format csv"]
)
def test_csv_says_what_json_says(to, folder, files, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.setattr(decide, "_STATES", 2)
    lines = [DOCUMENTS[0], *LINES]
    (files / "tickets.jsonl").write_text("\n".join(lines))
    (files / "questions.yaml").write_text(YAML.replace("Who writes?", 'Who "writes", =1+1?\\n'))
    asked = read_questions(files / "questions.yaml")
    outputs = [json.loads(line) for line in run(folder, files, "--input", files / "tickets.jsonl").stdout.splitlines()]
    done = run(folder, files, "--input", files / "tickets.jsonl", *to.split())
    assert done.exit_code == 0, done.output
    text = (files / to.split()[1]).read_bytes() if to.startswith("--output ") else done.stdout_bytes
    header, *rows = csv.reader(io.StringIO(text.decode(), newline=""))
    assert header == ["line", "id", *table_header(asked)]
    assert len(set(header)) == len(header)
    assert header[2:5] == ["figs", "figs: yes", "figs label mass"]
    assert {f"{asked[1].text}: {own}" for own in ("yes", "true", "Ana")} < set(header)
    assert [row[:2] for row in rows[:3]] == [["1", 'a,"b"'], ["2", ""], ["4", ""]]
    assert rows[3][1] == "é\\ud800"
    for row, output in zip(rows, outputs, strict=True):
        values = dict(zip(header, row, strict=True))
        figs, who, late = output["answers"]
        assert values["figs"] == ("yes" if figs["probability"] >= 0.5 else "no")
        assert float(values["figs: yes"]) == figs["probability"]
        assert values[asked[1].text] == {"yes": "yes", True: "true", "Ana": "Ana"}[who["choice"]]
        shares = [float(values[f"{asked[1].text}: {own}"]) for own in ("yes", "true", "Ana")]
        assert shares == [own["probability"] for own in who["probabilities"]]
        assert float(values["How late?"]) == late["score"]
        assert float(values["How late? confidence"]) == late["confidence"]
        assert float(values["How late? label mass"]) == late["label_mass"]
        assert {name: int(values[name]) for name in output["usage"]} == output["usage"]


def test_columns_of_one_name_are_told_apart():
    asked = [Predicate("a"), Predicate("a"), Choice("a", ["yes", "label mass"]), Rating("prompt_tokens", ["b", Level("c")])]
    header = table_header(asked)
    assert header[:4] == ["a", "a: yes", "a label mass", "a (2)"]
    assert header[-3:] == ["prompt_tokens (2)", "computed_tokens", "cached_tokens"]
    assert len(set(header)) == len(header) == 19


@pytest.mark.ci
def test_a_reader_that_leaves_ends_the_run(folder, files):
    (files / "tickets.jsonl").write_text('"a state"\n' * 200)
    command = [sys.executable, "-m", "chunkattn", "decide", "--questions", str(files / "questions.yaml"), *POOL]
    command += ["--model", str(folder), "--input", str(files / "tickets.jsonl")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        line = process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
    assert json.loads(line)["line"] == 1
    assert process.returncode == 1
    assert "Traceback" not in said
    assert "Exception ignored" not in said


# One state


def test_one_state(folder, files):
    (files / "state.json").write_text('[{"role": "user", "content": "Hi"}]')
    (files / "state.txt").write_text("[1]")
    done = run(folder, files, "Ana likes figs.", "--method", "letters")
    assert done.exit_code == 0, done.output
    assert [word in done.stdout for word in ("figs", "Who writes?", "How late?", "letters: ")] == [True] * 4
    llm = LLM(str(folder), kv_cache_memory_bytes=16 << 20)
    for arguments, state, options in (
        (["--state-file", files / "state.json"], STATES[2], {}),
        (["--state-file", files / "state.txt", "--system", "Be kind."], "[1]", {"system": "Be kind."}),
        (["-", "--method", "separate"], "a\nb", {"method": "separate"}),
        (["a", "--chat-template-kwargs", json.dumps(PLAIN)], "a", {"chat_template_kwargs": PLAIN}),
        (["a", "--document", "One.", "--document-file", files / "state.txt"], "a", {"documents": ["One.", "[1]"]}),
    ):
        done = run(folder, files, *arguments, "--output", "-", input=b"a\nb\n")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["answers"] == as_json(llm.decide(state, ASKED, **options))["answers"]
        assert json.loads(done.stdout)["method"] == options.get("method", llm.frontend.decide_method)
    done = run(folder, files, "a", "--output-format", "csv")
    assert next(csv.reader(io.StringIO(done.stdout)))[0] == "figs"
