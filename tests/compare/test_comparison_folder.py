"""A folder keeps one comparison; cells may be shared by several."""

from __future__ import annotations

import csv
import io
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedloom.compare.folder import alone
from fedloom.compare.run import run
from fedloom.core.errors import ConfigError
from support.comparisons import GRID, contents, table
from support.terminal import fedloom, files


def test_a_folder_with_anything_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="not a comparison"):
        run(table(), tmp_path)
    assert files(tmp_path) == {"mine"}


@pytest.fixture
def kept(whole: Path, tmp_path: Path) -> Path:
    """A finished comparison that may be spoilt."""
    shutil.copytree(whole, tmp_path / "kept")
    return tmp_path / "kept"


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (table(grid=GRID, seeds=1), "6 of its 12 cells are not in this one"),
        (table(grid=GRID, algorithms=["fedavg"]), "8 of its 12 cells"),
        (table(grid={"partition.alpha": [0.1, 2.0]}), "6 of its 12 cells"),
        (table(grid=GRID) | {"rounds": 4}, "12 of its 12 cells are not in this one; rounds is 3 there and 4 here"),
        (table(grid=GRID) | {"local": {"lr": 0.3}}, "local.lr is unset there and 0.3 here"),
    ],
)
def test_another_comparison_in_the_folder_of_one_is_refused(kept: Path, other: dict[str, Any], says: str) -> None:
    before, inside = contents(kept), files(kept)
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        run(other, kept)
    words = f"--out: {kept} contains another comparison, of fedavg, fedprox, fedopt with seeds 0, 1"
    assert words in str(caught.value)
    assert "choose another folder" in str(caught.value)
    assert contents(kept) == before
    assert files(kept) == inside


def test_the_command_refuses_it_too(kept: Path) -> None:
    before = contents(kept)
    done = fedloom("compare", "fedavg", "fedprox", "--seeds", "1", "--out", "kept", cwd=kept.parent)
    assert done.code == 2
    assert "kept contains another comparison" in done.err
    assert contents(kept) == before


def test_a_comparison_that_cannot_be_read_is_not_replaced(kept: Path) -> None:
    (kept / "compare.toml").write_text("compare = 3\n")
    with pytest.raises(ConfigError, match="can no longer be read"):
        run(table(grid=GRID), kept)


def test_another_question_to_the_same_cells_is_answered(kept: Path) -> None:
    times = {p: p.stat().st_mtime_ns for p in (kept / "cells").rglob("*")}
    done = run(table(grid=GRID, metric="global/test/loss", baseline="fedopt"), kept)
    assert {row.metric for row in done.rows} == {"global/test/loss"}
    assert {p: p.stat().st_mtime_ns for p in (kept / "cells").rglob("*")} == times


def test_comparisons_that_share_their_cells_compute_them_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    first = run(table(cells="runs/mine", metric="global/test/loss"), "runs/loss", jobs=1)
    times = {p: p.stat().st_mtime_ns for p in Path("runs/mine").rglob("*") if p.is_file() and p.name != ".lock"}
    second = run(table(cells="runs/mine", algorithms=["fedopt", "fedavg"]), "runs/accuracy", jobs=1)
    assert {p: p.stat().st_mtime_ns for p in times} == times
    assert len({p.parts[2] for p in times}) == 6
    assert [(row.metric, row.seeds) for row in second.rows] == [("global/test/accuracy", 2)] * 2
    assert first.cells == second.cells == Path("runs/mine")
    for folder in ("runs/loss", "runs/accuracy"):
        assert not Path(folder, "cells").exists()
        for line in csv.DictReader(io.StringIO(Path(folder, "cells.csv").read_text())):
            assert Path(folder, line["folder"], "metrics.jsonl").is_file()
        again = tomllib.loads(Path(folder, "compare.toml").read_text())
        assert again["compare"]["cells"] == "runs/mine"


def test_a_folder_of_other_things_takes_no_cells(tmp_path: Path) -> None:
    """A recipe of others may name any folder of the user's."""
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to mother.txt").write_text("")
    with pytest.raises(ConfigError, match=r"compare.cells: .*letters is not a folder of cells \(it contains to mother"):
        run(table(cells=str(tmp_path / "letters")), tmp_path / "c")
    assert [p.name for p in (tmp_path / "letters").iterdir()] == ["to mother.txt"]


def test_shared_cells_are_used_by_one_comparison_at_a_time(tmp_path: Path) -> None:
    shared = tmp_path / "cells"
    with (
        alone(shared, "compare.cells"),
        pytest.raises(ConfigError, match=f"compare.cells: another process is using {shared}"),
    ):
        run(table(cells=str(shared)), tmp_path / "c")
