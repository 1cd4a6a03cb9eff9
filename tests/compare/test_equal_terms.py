"""Comparisons in which every method spends the same."""

from __future__ import annotations

import csv
import io
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.compare.equal_terms import equalised, equally_often
from fedloom.compare.plan import plan
from fedloom.compare.run import run
from fedloom.core.errors import ConfigError
from fedloom.report.comparison import notes as table_notes
from fedloom.report.comparison import statistics
from support.comparisons import SMALL, THREE, question, result, table
from support.terminal import fedloom

FOUR = ["fedavg", "dfedavg", "dfedsam", "dfedgam"]
EIGHT = ("partition.clients=8", "cohort.size=4", "model.kind=logistic", "local.steps=5", "evaluate.every=2")


def test_equal_gradients_through_the_command(tmp_path: Path) -> None:
    """FedAvg calls 4 clients and takes one gradient in a step; networks train all 8 with one, two and three."""
    words = ("compare", *FOUR, "--seeds", "1", "--equal", "gradients", "--reference", "dfedgam", "rounds=2", *EIGHT)
    schedule = ("local.schedule=exponential", "local.decay=0.9")
    done = fedloom(*words, *schedule, "--metric", "*/test/accuracy", "--json", "--out", "c", cwd=tmp_path)
    assert done.code == 0, done.err
    rows = {row["algorithm"]: row for row in done.json["table"]}
    assert {m: row["rounds_spent"] for m, row in rows.items()} == dict(zip(FOUR, (12, 6, 3, 2), strict=True))
    assert {row["gradients_spent"] for row in rows.values()} == {240.0}
    assert done.json["equal"] == "gradients"
    assert done.json["budgets"] == {"all": 240.0}
    cells = list(csv.DictReader(io.StringIO((tmp_path / "c" / "cells.csv").read_text())))
    assert {cell["gradients"] for cell in cells} == {"240.0"}
    for cell in cells:
        config = tomllib.loads((tmp_path / "c" / cell["folder"] / "config.toml").read_text())
        share = 2 / config["rounds"]
        assert config["local"]["decay"] == pytest.approx(0.9**share)
        assert config["evaluate"]["every"] == max(1, round(2 / share))
    text = (tmp_path / "c" / "table.md").read_text()
    assert "as many rounds as 240 gradients of a batch allow" in text
    assert "| rounds | gradients | MB |" in text
    again = fedloom(*words, *schedule, "--metric", "*/test/accuracy", "--out", "c", cwd=tmp_path)
    assert "4 of 4 cells are done already" in again.out
    assert "gradients of a batch" in (tmp_path / "c" / "curves.svg").read_text()


@pytest.mark.parametrize(("equal", "spent"), [("bytes", "bytes_spent"), ("busiest", "busiest_spent")])
def test_equal_bytes_through_the_command(equal: str, spent: str, tmp_path: Path) -> None:
    words = ("compare", "fedavg", "dfedavg", "local_only", "--seeds", "1", "--equal", equal, "rounds=8", *EIGHT)
    done = fedloom(*words, "--json", "--out", "c", cwd=tmp_path)
    assert done.code == 0, done.err
    server, ring, alone = done.json["table"]
    # A ring of 8 sends 16 models in a round, 4 of which pass every node; a server sends and receives 8.
    assert (server["rounds_spent"], alone["rounds_spent"], alone[spent]) == (8, 8, 0)
    assert ring["rounds_spent"] == (4 if equal == "bytes" else 16)
    assert ring[spent] == server[spent] == 8 * 4 * 2 * 4 * 650
    assert any("local_only spends none of it" in note for note in done.json["notes"])


def test_seeds_that_miss_the_budget_of_the_first_one_are_said_to_differ() -> None:
    """The budget is what the first seed spends; with another split of the rows the same rounds are more batches."""
    budgets = {"equal": "gradients", "budgets": {(): 200.0}}
    results = [result("a", seed, [0.1, 0.2, 0.3], work_gradients=100.0 + 40 * seed) for seed in (0, 1)]
    asked = question(("a",), 2, **budgets)
    notes = table_notes.notes(asked, statistics.rows(asked, results))
    assert "a spent 120% of the budget: rounds are counted for the first seed, and seeds differ." in notes


def test_a_budget_of_ones_own(tmp_path: Path) -> None:
    terms = {"equal": "gradients", "budget": 100.0, "algorithms": ["fedavg", "dfedavg", "dfedgam"], "seeds": 1}
    base = SMALL | {"local": {"steps": 5}, "compare": terms}
    planned = equalised(plan(base), tmp_path)
    assert [cell.config.basics.rounds for cell in planned.cells] == [6, 3, 1]  # of 15, 30 and 90 in a round
    done = run(base, tmp_path / "c", jobs=1)
    notes = " ".join(table_notes.notes(done.question, done.rows))
    assert "Equal gradients: each method trains for as many rounds as 100 gradients" in notes
    assert "fedavg spent 90% of the budget: one more round would exceed it." in notes
    assert "seeds differ" not in notes
    unequal = plan(SMALL | {"compare": {"algorithms": THREE}})
    assert equalised(unequal, tmp_path) is unequal


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        ({"budget": 5.0}, "compare.budget: methods have equal rounds (got 5.0)"),
        ({"equal": "bytes", "budget": 5.0, "reference": "fedavg"}, "keep one of them"),
        ({"equal": "bytes", "reference": "fedagv"}, "'fedagv' is not one of the methods (did you mean 'fedavg'?)"),
        ({"equal": "time"}, "compare.equal"),
        (
            {"equal": "bytes", "algorithms": ["fedavg", {"kind": "fedprox", "with": {"rounds": 9}}]},
            "its rounds follow from compare.equal = 'bytes' [in fedprox]",
        ),
    ],
)
def test_terms_that_contradict_each_other_are_refused(terms: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        plan(table(**terms))


def test_a_reference_that_spends_nothing_is_no_reference(tmp_path: Path) -> None:
    planned = plan(table(algorithms=["local_only", "fedavg"], equal="bytes"))
    with pytest.raises(ConfigError, match="local_only spends no bytes"):
        equalised(planned, tmp_path)


def test_equal_gradients_of_a_regression(tmp_path: Path) -> None:
    """The forecast reads numbers as numbers, as the run does."""
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "num.npz", x=draw.normal(size=(200, 4)), y=draw.normal(size=200))
    given = ("data=num.npz", "task=regression", "rounds=2", "partition.clients=4", "model.kind=logistic")
    words = ("compare", "fedavg", "fedsam", *given, "--equal", "gradients", "--seeds", 1, "--json", "--out", "c")
    done = fedloom(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert {row["algorithm"]: row["rounds_spent"] for row in done.json["table"]} == {"fedavg": 2, "fedsam": 1}


@pytest.mark.parametrize(
    ("rounds", "wanted", "every"),
    [
        ([20, 10], 20, [2, 1]),  # the shorter run decides
        ([20, 40], 10, [2, 4]),
        ([5, 20], 20, [1, 4]),
        ([100, 67], 100, [3, 2]),  # 34 of each, rather than 50 and 67
        ([12, 6, 1], 12, [12, 6, 1]),
        ([10, 10], 5, [2, 2]),
    ],
)
def test_methods_are_evaluated_as_often_as_the_one_with_the_fewest_rounds(
    rounds: list[int], wanted: int, every: list[int]
) -> None:
    assert equally_often(rounds, wanted) == every


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5), st.integers(1, 300))
def test_no_method_is_evaluated_much_more_often_than_another(rounds: list[int], wanted: int) -> None:
    counts = [-(-each // every) for each, every in zip(rounds, equally_often(rounds, wanted), strict=True)]
    assert max(counts) <= 1.5 * min(counts) or max(counts) - min(counts) <= 1


def test_methods_on_equal_terms_are_ranked_by_the_same_shares_of_training(tmp_path: Path) -> None:
    """SCAFFOLD sends twice as much in a round, so it has half of the rounds, and each has ten evaluations."""
    base = SMALL | {"rounds": 20, "compare": {"algorithms": ["fedavg", "scaffold"], "seeds": [0, 1], "equal": "bytes"}}
    cells = equalised(plan(base), tmp_path).cells
    assert [(c.config.basics.rounds, c.config.evaluate.every) for c in cells] == [(20, 2), (10, 1)] * 2
