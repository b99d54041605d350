"""benchmarks/ measures what it says: rows and targets, a run from end to end, the page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import figures, page, plot, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("target, good, bad", [
    ("<= 0.8x", [0.8, 0.7], [0.81]), (">= 0.9x", [0.9, 2], [0.89]), ("<= +0.4", [0.4, -1], [0.41]),
    ("<= 5", [5, 0], [5.1]), (">= 5", [5], [4.9])])
def test_targets(target, good, bad):
    assert all(figures.passes(target, value) for value in good)
    assert not any(figures.passes(target, value) for value in bad)


@pytest.mark.parametrize("target", ["< 5", "0.8x", "<= 0.8 x", "<= -1", ""])
def test_targets_that_say_nothing(target):
    with pytest.raises(ValueError, match="a target reads like"):
        figures.passes(target, 1)


def test_a_row_judges_the_rounds():
    row = figures.row("r", "us", [1, 2, 90], [2, 4, 90], "them", "<= 0.5x")
    assert row["pass"] and row["ratio"] == 0.5 and row["ours"]["median"] == 2 and row["theirs"]["p90"] == 90
    assert not figures.row("r", "us", [1, 2, 3], [1, 1, 1], "them", "<= +0.4")["pass"]
    assert figures.row("r", "%", [4, 5, 6], target="<= 5")["pass"]
    assert figures.row("r", "KiB", [4])["pass"] is None
    with pytest.raises(ValueError):
        figures.row("r", "us", [1, 2], [1])
    with pytest.raises(ValueError, match="needs theirs"):
        figures.row("r", "us", [1], target="<= 0.5x")


def test_a_round_without_a_figure_is_left_out():
    row = figures.row("r", "MB/s", [8, 9, 10], [10, 0, 20], "ib_read_bw", ">= 0.6x", note="slow")
    assert row["ratio"] == pytest.approx(0.65) and row["pass"] and row["ours"] == figures.spread([8, 10])
    assert row["note"] == "slow; 1 of 3 rounds left out: ib_read_bw printed 0"
    with pytest.raises(figures.Missing, match="ib_read_bw printed no figure above 0 in 2 rounds"):
        figures.row("r", "MB/s", [1, 2], [0, 0], "ib_read_bw")


def test_names_of_rows_are_unique():
    names = [name for module in run.load(run.GROUPS) for name in module.ROWS]
    assert len(set(names)) == len(names) and len(names) > 20


def test_a_run(tmp_path):
    """Two rows against mpi4py or, where that is not installed, a line that says so."""
    target = tmp_path / "page.md"
    begin, end = page.marks("make bench")
    target.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    command = [sys.executable, ROOT / "benchmarks/run.py", "--rounds", "2",
               "--rows", "^(send/recv 8 B|window 8 B) : mpi4py$|^memory, 2 ranks$",
               "--json", tmp_path / "out.json", "--markdown", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    text = target.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    rows = {row["name"]: row for row in found["rows"]}
    assert rows.pop("memory, 2 ranks")["memory"]["registered"] > 0 and "| 2 ranks |" in text
    assert rows or any("not installed" in failure for failure in found["failures"]), done.stdout
    for name, row in rows.items():
        for side in ("ours", "theirs"):
            assert len(row[side]["all"]) == 2 and min(row[side]["all"]) > 0, row
        assert row["ratio"] > 0 and f"| {name.partition(' : ')[0]} |" in text
    for name, row in rows.items():
        if name.startswith("send/recv"):
            assert plot.curves([row])["rocecomm"] == {8: row["ours"]["median"]}


def test_a_competitor_that_is_missing_is_said(monkeypatch):
    from benchmarks.rivals import Pyzmq
    monkeypatch.setattr(Pyzmq, "module", "no_such_module")
    with pytest.raises(figures.Missing, match="pyzmq is not installed"):
        Pyzmq.start()


def test_a_competitor_that_fails_is_said():
    from benchmarks import processes
    with pytest.raises(processes.Failed, match="broken.*ended.*\n.*gone wrong"):
        processes.Ranks("broken", 1, [([sys.executable, "-c", "raise SystemExit('gone wrong')"], {})], 20)


def test_a_page_without_marks_is_refused(tmp_path):
    (tmp_path / "x.md").write_text("nothing")
    with pytest.raises(SystemExit, match="lacks the lines"):
        page.write(tmp_path / "x.md", "make bench", "text")


def test_rows_of_earlier_runs_complete_a_page():
    modules = run.load(("messages", "memory"))
    first, second = modules[0].ROWS[:2]
    row = lambda name, value: figures.row(name, "us", [value], [1], "them")     # noqa: E731
    now = [(modules[0], [row(second, 2)], ["why"])]
    earlier = [row(first, 1), row(second, 9), row(modules[1].ROWS[0], 5), row("gone", 7)]
    merged = run.completed(modules, now, earlier)
    assert [(m, [r["name"] for r in rows], failures) for m, rows, failures in merged] == [
        (modules[0], [first, second], ["why"]), (modules[1], [modules[1].ROWS[0]], [])]
    assert merged[0][1][1]["ours"]["median"] == 2
