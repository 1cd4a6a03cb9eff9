"""What a run shows, and to whom: it does not need a reader."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from fedloom.cli.console import in_one_line, plain_console
from fedloom.cli.screen import ComparisonScreen
from fedloom.compare.crew import Standing
from support.terminal import HANG, SMALL, fedloom, started


def test_words_with_line_breaks_stay_in_their_line() -> None:
    assert in_one_line("words: sex (f, m\r\nale, \x1b[2J)") == "words: sex (f, m\ufffdale, \ufffd[2J)"
    assert in_one_line("") == ""


@pytest.mark.slow
def test_a_word_of_a_table_cannot_add_a_line_to_what_a_run_shows(tmp_path: Path) -> None:
    rows = [f'{k},"u\nnote: v{k % 2}",{"yes" if k % 3 else "no"}' for k in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["a,sex,ill", *rows]) + "\n")
    words = ("data=t.csv", "data.label=ill", "rounds=1", *SMALL)
    with started("run", *words, cwd=tmp_path) as process:
        out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err
    assert "(u\ufffdnote: v0, u\ufffdnote: v1)" in out
    assert "\nnote: v" not in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("run", "rounds=3", *SMALL, "--out", "out"), "out/summary.json"),
        (("compare", "fedavg", "fedprox", "rounds=2", *SMALL, "--jobs", "1", "--out", "out"), "out/summary.json"),
    ],
    ids=["run", "compare"],
)
def test_a_reader_that_leaves_does_not_end_it(words: tuple[str, ...], found: str, tmp_path: Path) -> None:
    """As with ``| head -1``."""
    with started(*words, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("fedloom ")
        process.stdout.close()
        assert process.wait(HANG) == 0
        assert process.stderr.read() == ""
    assert json.loads((tmp_path / found).read_text())


def test_a_terminal_that_lacks_a_character_does_not_end_a_run(tmp_path: Path) -> None:
    words = ("run", *SMALL, "rounds=3", "--out", "r")
    done = fedloom(*words, cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"}, fresh=True)
    assert (done.code, done.err) == (0, "")
    assert "global/test/accuracy  ????  " in done.out
    assert (tmp_path / "r/summary.json").exists()


@pytest.mark.parametrize(("running", "shown"), [(4, "run 3 1/5\n"), (9, "run 3 1/5; 5 more\n")])
def test_of_many_cells_at_the_same_time_a_few_are_named(
    running: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.cli.screen._EVERY", (0.0, 0.0))
    said = io.StringIO()
    cells = tuple((f"run {k}", 1, 5) for k in range(running))
    ComparisonScreen(plain_console(file=said, width=250)).moved(Standing(0, running, 0, cells, 60.0))
    assert said.getvalue().endswith(shown)
