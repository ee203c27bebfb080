"""`python -m benchmarks.card`: checked arguments, counted updates of graphs, and one run on any device."""

import json
import subprocess
import sys

import pytest

from benchmarks import card


def test_updates_of_graphs_are_counted_by_part():
    update = "I0000 command_buffer_thunk.cc:289] Updated command buffer in {} μs; num_commands=9\n"
    log = (
        f"{update.format(7)}MARK new arrays\n{update.format(10)}other\n{update.format(30)}"
        f"MARK arrays on the device\n{update.format(5)}MARK end\n{update.format(9)}"
    )
    assert card.graph_updates(log, 2) == {
        "new arrays": {"updates_a_call": 0.5, "update_us_a_call": 10.0},
        "arrays on the device": {"updates_a_call": 0.25, "update_us_a_call": 1.2},
    }


@pytest.mark.parametrize("options", [["--rows", "0"], ["--calls", "0"], ["--settings", "fast"]])
def test_bad_options(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["card", *options])
    with pytest.raises(SystemExit) as ended:
        card.main()
    assert ended.value.code == 2, capsys.readouterr()


@pytest.mark.slow
def test_a_step_is_timed_apart():
    options = ["--geometry", "small", "--rows", "8", "--calls", "2", "--settings", "as it is", "--json", "-"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.card", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    (result,) = json.loads(done.stdout)
    assert (result["setting"], result["rows"]) == ("as it is", 8)
    for part in ("new arrays", "arrays on the device"):
        assert min(result[part].values()) > 0
        assert result["graphs"][part]["updates_a_call"] >= 0
