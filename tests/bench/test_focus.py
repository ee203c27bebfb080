"""`benchmarks.focus` counts what its ways compute, and `benchmarks.focus_quality` compares the answers of a model."""

import json
import random
import sys

import pytest

from benchmarks import focus, focus_quality
from chunkattn.calibration import Calibration
from chunkattn.focus import MODES
from chunkattn.tools.eval.conditions import Condition
from training.world import SYLLABLES

pytestmark = pytest.mark.ci


def report_of(main, monkeypatch, capsys, *arguments):
    """The exit status of a benchmark, and its report."""
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments), "--json", "-"])
    status = 0
    try:
        main()
    except SystemExit as end:
        status = int(end.code or 0)
    out = capsys.readouterr().out
    return status, json.loads(out[out.index("\n[") if "\n[" in out else out.index("{") :])


def test_tokens_of_every_way(monkeypatch, capsys):
    documents, tokens, question = 3, 70, 20
    sizes = ["--documents", documents, "--tokens", tokens, "--question", question, "--top-n", 2, "--rounds", 1]
    options = ["--geometry", "small", "--dtype", "float32", *sizes]
    status, found = report_of(focus.main, monkeypatch, capsys, *options, "--at-least", 0)
    assert status == 0
    computed = {state: {name: row["computed"] for name, row in found[state].items()} for state in ("cached", "cold")}
    prefix, all_documents = focus.PREFIX, documents * tokens
    read, last = documents * question, question % focus.BLOCK  # `only` 1 has read its question before
    again = {n: computed["cached"].pop(f"reread {n} by likelihood") for n in (1, 2)}
    assert computed["cached"] == {
        "full attention": all_documents + question,  # the prefix is cached
        "isolated": question,
        "only 1 by likelihood": read + last,
        "only 2 by likelihood": read + question,
    }
    for count, own in again.items():  # an earlier question may have chosen the same documents
        assert read + question < own <= read + count * tokens + question
    assert computed["cold"]["isolated"] == computed["cold"]["full attention"] == prefix + all_documents + question
    assert computed["cold"]["only 1 by likelihood"] == computed["cached"]["only 1 by likelihood"] + prefix + all_documents
    assert found["most"] == documents * question + tokens + question
    status, _ = report_of(focus.main, monkeypatch, capsys, *options, "--at-least", 1e6)
    assert status == 1


def test_a_table_of_every_condition(tmp_path, monkeypatch, capsys):
    rng, names = random.Random(2), set()
    while len(names) < 24:
        names.add("".join(rng.choices(SYLLABLES, k=3)).capitalize())
    lines = [
        {"question": f"Where does {name} live?", "answers": [name[::-1]], "text": f"{name} lives in {name[::-1]}."}
        for name in sorted(names)
    ]
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = ["--documents", 4, "--count", 6, "--top-n", 1, "--kv-cache-memory-bytes", 32 << 20]
    options = [source, "--recipe", "bm25", *sizes, "--results", tmp_path / "results.jsonl"]
    status, (table,) = report_of(focus_quality.main, monkeypatch, capsys, *options)
    assert (status, table["documents"], table["questions"]) == (0, 4, 6)
    rows = {row["name"]: row for row in table["rows"]}
    focused = {f"{mode} {which}" for mode in MODES for which in ("1 by likelihood", "1 by relevance", "the gold documents")}
    assert set(rows) == {"full", "shared", "gold only", *focused}
    for row in rows.values():
        change = row["means"]["contained"]["mean"] - rows["full"]["means"]["contained"]["mean"]
        assert row["name"] == "full" or row["against_full"]["contained"]["mean"] == pytest.approx(change)
        assert ("recall" in row["means"]) == (row["name"] in focused)
    assert all(rows[f"{mode} the gold documents"]["means"]["recall"]["mean"] == 1 for mode in MODES)
    # The second run finds every result.
    monkeypatch.setattr(focus_quality.LLM, "run", lambda *_: pytest.fail("measured again"))
    assert report_of(focus_quality.main, monkeypatch, capsys, *options) == (0, [table])


def test_controls_are_the_rows_that_the_calibration_is_compared_with():
    calibration = Calibration(8, 0.55, 0.55)
    listed = {rows: focus_quality.conditions_of(calibration, ["likelihood"], 1, rows) for rows in focus_quality.ROWS}
    focused = {f"{mode} 1 by likelihood" for mode in MODES}
    assert {c.name for c in listed["controls"]} == {"full", "full, T 0.55, S 0.55", "shared", *focused}
    assert set(listed["controls"]) & set(listed["calibrated"]) == {Condition("full")}
    assert set(listed["controls"]) | set(listed["calibrated"]) == set(listed["all"])
