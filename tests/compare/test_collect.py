"""Results that stay: finished cells as small files, gathered from several places, and tables drawn from them alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedloom.compare.collect import Collected, collect
from fedloom.compare.plan import plan
from fedloom.core.errors import ConfigError
from fedloom.runs.settings import read_toml
from support.terminal import fedloom


def gathered(whole: Path, out: Path, *sources: Path) -> Collected:
    return collect(plan(read_toml(whole / "compare.toml")), out, sources)


def test_tables_of_kept_results_are_those_of_the_comparison(whole: Path, tmp_path: Path) -> None:
    done = gathered(whole, tmp_path / "r", whole)
    assert (done.cells, done.new, done.missing) == (12, 12, ())
    assert (tmp_path / "r" / "table.csv").read_bytes() == (whole / "table.csv").read_bytes()
    assert (tmp_path / "r" / "missing.txt").read_text() == ""
    again = gathered(whole, tmp_path / "r")
    assert (again.cells, again.new) == (12, 0)
    assert (tmp_path / "r" / "table.csv").read_bytes() == (whole / "table.csv").read_bytes()


def test_a_result_is_small_and_says_how_it_was_made(whole: Path, tmp_path: Path) -> None:
    gathered(whole, tmp_path / "r", whole)
    files = sorted((tmp_path / "r" / "cells").glob("*.json"))
    assert len(files) == 12
    for file in files:
        kept = json.loads(file.read_text())
        assert file.stat().st_size < 50_000
        assert kept["hash"] == file.stem
        assert kept["state"] == "done"
        assert kept["origin"]["precision"] == "fp32"
        assert set(kept["origin"]["versions"]) == {"python", "fedloom", "torch", "numpy"}
        assert kept["settings"]["seed"] == kept["seed"]
        assert all("global/test/accuracy" in record for record in kept["metrics"])


def test_cells_of_two_machines_meet(whole: Path, tmp_path: Path) -> None:
    """Half of the cells ran here, and half there; both are in the table, and what is missing between is listed."""
    homes = sorted((whole / "cells").iterdir())
    for name, some in (("here", homes[:5]), ("there", homes[5:])):
        for home in some:
            shutil.copytree(home, tmp_path / name / "cells" / home.name)
    first = gathered(whole, tmp_path / "r", tmp_path / "here")
    assert (first.new, len(first.missing)) == (5, 7)
    assert len((tmp_path / "r" / "missing.txt").read_text().splitlines()) == 7
    assert "5 of 12 cells are there" in (tmp_path / "r" / "table.md").read_text()
    second = gathered(whole, tmp_path / "r", tmp_path / "there")
    assert (second.new, second.missing) == (7, ())
    assert (tmp_path / "r" / "table.csv").read_bytes() == (whole / "table.csv").read_bytes()


def test_kept_results_can_be_a_source_themselves(whole: Path, tmp_path: Path) -> None:
    gathered(whole, tmp_path / "a", whole)
    done = gathered(whole, tmp_path / "b", tmp_path / "a")
    assert (done.new, done.missing) == (12, ())


def test_other_code_is_named_and_another_result_does_not_replace_one(whole: Path, tmp_path: Path) -> None:
    gathered(whole, tmp_path / "a", whole)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = min((tmp_path / "b" / "cells").glob("*.json"))
    changed = json.loads(first.read_text())
    changed["origin"]["commit"] = "feedfacefeedface"
    changed["metrics"][-1]["global/test/accuracy"] = 0.123
    first.write_text(json.dumps(changed))
    done = gathered(whole, tmp_path / "a", tmp_path / "b")
    remarks = " ".join(done.comparison.question.remarks)
    assert "has another result by commit feedfac" in remarks
    assert (tmp_path / "a" / "table.csv").read_bytes() == (whole / "table.csv").read_bytes()
    mixed = gathered(whole, tmp_path / "b")
    assert "different code or machines" in " ".join(mixed.comparison.question.remarks)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a result"),
        ('{"format": 9}', "has format 9"),
        ('{"format": 1, "hash": "x"}', "has no valid 'state'"),
        (
            '{"format": 1, "hash": "x", "state": "done", "origin": {}, "partition": "", "metrics": [1]}',
            "has metrics without a round",
        ),
        (
            '{"format": 1, "hash": "x", "state": "done", "origin": {}, "partition": "", "metrics": []}',
            "is the result of another cell, x",
        ),
    ],
)
def test_a_damaged_result_is_refused(whole: Path, tmp_path: Path, text: str, says: str) -> None:
    gathered(whole, tmp_path / "r", whole)
    first = min((tmp_path / "r" / "cells").glob("*.json"))
    first.write_text(text)
    with pytest.raises(ConfigError, match=says):
        gathered(whole, tmp_path / "r")
    assert first.read_text() == text


def test_nothing_is_written_where_nothing_is_finished(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no finished cell of this comparison is below .*empty"):
        gathered(whole, tmp_path / "r", tmp_path / "empty")
    assert not (tmp_path / "r").exists()


def test_a_run_folder_whose_environment_is_damaged_is_refused(whole: Path, tmp_path: Path) -> None:
    home = min((whole / "cells").iterdir())
    shutil.copytree(home, tmp_path / "cells" / home.name)
    (tmp_path / "cells" / home.name / "environment.json").write_text("{")
    with pytest.raises(ConfigError, match=r"environment\.json: cannot be read"):
        gathered(whole, tmp_path / "r", tmp_path)


def test_the_command(whole: Path, tmp_path: Path) -> None:
    shutil.copy(whole / "compare.toml", tmp_path / "c.toml")
    done = fedloom("collect", "c.toml", "--from", whole, "--out", "results/c", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "12 of 12 cells, 12 of them new: results/c" in done.out
    assert fedloom("collect", "c.toml", "--from", "nowhere", "--out", "results/c", cwd=tmp_path).code == 2
    found = fedloom("collect", "c.toml", "--out", "results/c", "--json", cwd=tmp_path)
    assert (found.json["new"], found.json["missing"], found.json["cells"]) == (0, [], 12)
