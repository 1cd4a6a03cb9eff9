"""A part of a comparison: --only runs the cells of some methods and points, which are those of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.compare.left_out import left_out
from fedloom.compare.plan import ComparisonPlan, plan
from fedloom.core.errors import ConfigError
from support.comparisons import SMALL, contents
from support.terminal import fedloom as typed

_METHODS = ["fedavg", {"kind": "fedprox", "label": "weak", "mu": 0.01}, {"kind": "fedprox", "label": "strong"}]
_GRID: dict[str, Any] = {
    "partition.alpha": [0.1, 1.0],
    "local.lr": [{"value": 0.05, "label": "slow, but sure"}, 0.5],
}


@pytest.fixture(scope="module")
def planned() -> ComparisonPlan:
    return plan({**SMALL, "compare": {"algorithms": _METHODS, "seeds": 2, "grid": _GRID}})


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ({"algorithm": ["weak"], "partition.alpha": ["0.10"], "local.lr": [0.5]}, ["weak · 0.1 · 0.5"]),
        (
            {"algorithm": ["fedprox"], "partition.alpha": [1], "local.lr": ["0.5"]},
            ["weak · 1.0 · 0.5", "strong · 1.0 · 0.5"],
        ),
        (
            {"algorithm": ["fedavg"], "local.lr": ["slow, but sure"]},
            ["fedavg · 0.1 · slow, but sure", "fedavg · 1.0 · slow, but sure"],
        ),
        (
            {"algorithm": ["fedavg", "weak"], "partition.alpha": ["1.0"], "local.lr": ["0.5"]},
            ["fedavg · 1.0 · 0.5", "weak · 1.0 · 0.5"],
        ),
    ],
)
def test_a_part_has_the_cells_that_are_named(
    planned: ComparisonPlan, only: dict[str, list[Any]], names: list[str]
) -> None:
    without = left_out(planned, None, only)
    run = [cell.name for cell in planned.cells if cell.hash not in without.hashes]
    assert run == [f"{name} · seed {seed}" for seed in (0, 1) for name in names]


def test_nothing_is_left_out_of_the_whole(planned: ComparisonPlan) -> None:
    assert left_out(planned, None, {}) == (frozenset(), "")


def test_what_the_comparison_does_not_have_is_refused(planned: ComparisonPlan) -> None:
    wrong = {"algorithm": ["fedprx"], "alpha": ["0.1"], "local.lr": ["slow"]}
    with pytest.raises(ConfigError) as refused:
        left_out(planned, None, wrong)
    assert [str(fault) for fault in refused.value.faults] == [
        "--only algorithm: there is no method 'fedprx' (did you mean 'fedprox'?)",
        "--only alpha: is not an axis of the grid (known: algorithm, local.lr, partition.alpha)",
        "--only local.lr: there is no 'slow' (did you mean 'slow, but sure'?)",
    ]


def test_parts_add_up_to_the_whole(tmp_path: Path) -> None:
    """Each part says what it leaves out; after the last one files are those of a comparison in one go."""
    settings = ["rounds=2", "model=logistic", "partition.clients=4", "--seeds", "1", "--jobs", "1"]
    words = ["compare", "fedavg", "fedprox", "--grid", "partition.alpha=0.1,1.0", *settings]
    whole = typed(*words, "--out", "whole", cwd=tmp_path)
    assert whole.code == 0, whole.err
    first = typed(
        *words, "--only", "algorithm=fedprox", "--only", "partition.alpha=1.0", "--out", "parts", cwd=tmp_path
    )
    said = "3 of 4 cells were left out: only algorithm=fedprox and partition.alpha=1.0 was asked for"
    assert (first.code, said in " ".join(first.out.split())) == (0, True), first.out
    assert len(list((tmp_path / "parts" / "cells").iterdir())) == 1
    assert typed(*words, "--only", "algorithm=fedavg", "--out", "parts", cwd=tmp_path).code == 0
    rest = typed(*words, "--out", "parts", cwd=tmp_path)
    assert (rest.code, "left out" in rest.out) == (0, False)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    wrong = typed(*words, "--only", "fedavg", "--out", "none", cwd=tmp_path)
    assert (wrong.code, "--only: is not of the form key=value (got 'fedavg')" in wrong.err) == (2, True)
    assert not (tmp_path / "none").exists()


def test_a_part_from_python(tmp_path: Path) -> None:
    done = fedloom.compare(
        "fedavg",
        "fedprox",
        out=tmp_path / "part",
        seeds=1,
        jobs=1,
        only={"algorithm": "fedprox"},
        progress=False,
        **SMALL,
    )
    assert [(each.method, each.state) for each in done.results] == [("fedavg", "missing"), ("fedprox", "done")]
