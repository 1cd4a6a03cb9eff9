"""``fedloom show``: runs and comparisons on the terminal, and their curves as pictures."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path

import pytest

import fedloom
from fedloom.compare.look import look_at
from fedloom.core import disk
from fedloom.report.side_by_side import draw
from support.terminal import Quick

pytestmark = pytest.mark.slow


def test_runs_side_by_side(compared: Path, hostile_run: Path, tmp_path: Path) -> None:
    quick, cells = Quick(), sorted((compared / "cells").iterdir())
    one = quick("show", cells[0], cwd=tmp_path)
    assert one.code == 0, one.err
    summary = json.loads((cells[0] / "summary.json").read_text())["metrics"]["global/test/accuracy"]
    assert f"{100 * summary['last']:.2f} %" in one.out
    assert "(lowest tenth)" in one.out
    both = quick("show", *cells[:2], "--plot", "both.pdf", cwd=tmp_path)
    assert "what differs" in both.out
    assert quick("compare", *cells[:2], cwd=tmp_path).out == both.out.removesuffix("drawn in both.pdf\n")
    assert (tmp_path / "both.pdf").read_bytes().startswith(b"%PDF")
    found = quick("show", compared.parent, hostile_run, "--json", cwd=tmp_path).json
    assert [run["state"] for run in found["runs"]] == ["done"]
    assert [len(each["cells"]) for each in found["comparisons"]] == [8]


def test_names_cannot_command_the_terminal(hostile_run: Path, tmp_path: Path) -> None:
    shutil.copytree(hostile_run, tmp_path / "run")
    table = tmp_path / "run" / "clients.csv"
    table.write_text(table.read_text().replace("B & C", "[red]\x1b[2J"))
    done = Quick()("show", "run", cwd=tmp_path)
    assert done.code == 1, done.err  # clients.csv is not what the run wrote
    assert "\x1b" not in done.out
    assert "[red]" in done.out


def test_bad_words_are_one_clear_error(hostile_run: Path, tmp_path: Path) -> None:
    for words, expected in {
        ("show", "nowhere"): "there is no such folder",
        ("show", hostile_run, "--plot", "x.bmp"): "a picture ends in .png, .svg or .pdf",
        ("compare", hostile_run, "fedavg"): f"fedloom compare {hostile_run}",
        ("compare",): "no algorithm is named",
    }.items():
        done = Quick()(*words, cwd=tmp_path)
        assert (done.code, done.out) == (2, "")
        assert expected in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("state", ["ended", "killed"])
def test_metrics_that_were_cut_off_are_one_clear_error(hostile_run: Path, tmp_path: Path, state: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(hostile_run, run)
    if state == "killed":
        (run / "summary.json").unlink()
    for size in (0, 100):
        os.truncate(run / "metrics.jsonl", size)
        done = Quick()("show", "run", cwd=tmp_path)
        assert (done.code, done.out) == (2, "")
        assert re.fullmatch(rf"error: run/metrics\.jsonl: has {size} bytes, the checkpoint needs \d+\n", done.err)
        shutil.copy(hostile_run / "metrics.jsonl", run)
    assert Quick()("show", "run", cwd=tmp_path).code == 0


def test_pictures_are_the_same_whenever_they_are_drawn(compared: Path, hostile_run: Path, tmp_path: Path) -> None:
    for place in (compared, hostile_run):
        for name in ("a.pdf", "b.pdf"):
            draw(look_at([place]), tmp_path / name)
        assert (tmp_path / "a.pdf").read_bytes() == (tmp_path / "b.pdf").read_bytes()
    assert (compared / "curves.pdf").read_bytes().startswith(b"%PDF")


def test_all_curves_of_a_comparison_are_in_one_table(compared: Path) -> None:
    with open(compared / "curves.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 8 * 4  # cells and evaluations
    line = next(x for x in lines if (x["algorithm"], x["seed"], x["partition.alpha"]) == ("fedprox", "1", "1.0"))
    assert float(line["global/test/accuracy"]) >= 0
    assert line["round"] == "0"


def test_a_run_that_was_killed_has_no_time_left(hostile_run: Path, tmp_path: Path) -> None:
    """Its folder is locked as long as a process runs it, and so is that of a comparison."""
    run, quick = tmp_path / "run", Quick()
    shutil.copytree(hostile_run, run)
    (run / "summary.json").unlink()
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("rounds = 3", "rounds = 30", 1))
    stopped = "stopped after round: 3 / 30 · continue with: fedloom resume run\n"
    shown = quick("show", "run", cwd=tmp_path).out
    assert stopped in shown
    assert "time left" not in shown
    held = disk.lock(run / ".lock")
    running = quick("show", "run", cwd=tmp_path).out
    os.close(held)
    assert "round: 3 / 30\ntime left: " in running
    assert stopped not in running


def test_a_comparison_that_was_killed_has_no_time_left(compared: Path, tmp_path: Path) -> None:
    folder, quick = tmp_path / "c", Quick()
    shutil.copytree(compared, folder)
    cell = sorted((folder / "cells").iterdir())[0]
    (cell / "summary.json").unlink()
    shown = quick("show", "c", cwd=tmp_path).out
    assert "cells done: 7 / 8 · stopped; continue with: repeat the command\n" in shown
    assert "time left" not in shown
    assert "continue with: repeat the command" in quick("show", cell, cwd=tmp_path).out
    held = disk.lock(folder / ".lock")
    running = quick("show", "c", cwd=tmp_path).out
    shown = quick("show", cell, cwd=tmp_path).out
    os.close(held)
    assert "cells done: 7 / 8\n" in running
    assert "time left" in running
    assert "continue with" not in shown


def test_clients_that_were_not_measured_are_neither_worst_nor_best(tmp_path: Path) -> None:
    fedloom.run("fedavg", out=tmp_path / "run", rounds=1, model="logistic")
    assert "the 5 worst and the 5 best of 20 clients (run)" in Quick()("show", "run", cwd=tmp_path).out
    for name in ("summary.json", "clients.csv"):
        (tmp_path / "run" / name).unlink()
    assert "the first 5 and the last 5 of 20 clients (run)" in Quick()("show", "run", cwd=tmp_path).out
