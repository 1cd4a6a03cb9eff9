"""Statistics over seeds, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedloom.report.comparison import notes as table_notes
from fedloom.report.comparison import statistics
from fedloom.report.comparison import text as text_table
from fedloom.report.comparison.question import PrivacyCost, Result, Versus
from fedloom.report.comparison.statistics import Mean, Reached
from support.comparisons import question, result


def test_statistics_by_hand() -> None:
    base = [[0.0, *[0.5] * 9, 0.7], [0.0, *[0.5] * 9, 0.8], [0.0, *[0.6] * 9, 0.6]]
    ours = [[0.0, *[0.7] * 9, 0.6], [0.0, *[0.8] * 9, 0.8], [0.0, *[0.9] * 9, 0.7]]
    results = [result("a", s, v) for s, v in enumerate(base)] + [
        result("b", s, v, time_simulated=2.0) for s, v in enumerate(ours)
    ]
    a, b = statistics.rows(question(("a", "b"), 3, target=0.7), results)
    assert a.last is not None
    assert a.last.mean == pytest.approx(0.7)
    assert a.last.std == pytest.approx(0.1)
    assert b.best == pytest.approx((0.8, 0.1))
    tails = [[0.52, 0.53, 0.6], [0.69, 0.8, 0.88]]
    assert a.tail == pytest.approx((np.mean(tails[0]), np.std(tails[0], ddof=1)))
    assert (a.rank, b.rank) == (2, 1)
    assert b.difference == pytest.approx((np.mean([0.17, 0.27, 0.28]), np.std([0.17, 0.27, 0.28], ddof=1)))
    assert b.p == pytest.approx(stats.ttest_rel(tails[1], tails[0]).pvalue)
    t = np.mean([0.17, 0.27, 0.28]) / (np.std([0.17, 0.27, 0.28], ddof=1) / math.sqrt(3))
    assert b.p == pytest.approx(2 * stats.t.sf(t, 2))
    assert a.p is None
    assert a.rounds == Reached(Mean(10.0, 0.0), 2)  # one seed never reaches it
    assert b.rounds == Reached(Mean(1.0, 0.0), 3)
    assert b.bytes == Reached(Mean(40.0, 0.0), 3)
    assert b.seconds == Reached(Mean(2.0, 0.0), 3)
    assert a.seconds is None


def test_few_seeds_and_ties() -> None:
    assert statistics.paired_p([0.5], [0.4]) is None
    assert statistics.paired_p([0.5, 0.6], [0.5, 0.6]) == 1.0
    one = statistics.rows(question(("a", "b"), 1), [result("a", 0, [0.5]), result("b", 0, [0.5])])
    assert [r.rank for r in one] == [1, 1]
    assert one[0].last == (0.5, None)
    assert "not available for one seed" in " ".join(table_notes.notes(question(("a", "b"), 1), one))
    assert "says little" in " ".join(table_notes.notes(question(("a", "b"), 3), one))


def test_a_method_that_lost_a_seed_is_not_ranked() -> None:
    results = [result("a", 0, [0.5]), result("a", 1, [0.6]), result("b", 0, [0.9]), result("b", 1, [0.2], "diverged")]
    asked = question(("a", "b"), 2)
    _, b = rows = statistics.rows(asked, results)
    assert (b.rank, b.seeds, b.diverged, b.p) == (None, 1, 1, None)
    assert text_table.sections(asked, rows)[0].lines[1][1] == "90.00 (1 diverged)"


def test_nobody_is_first_while_the_others_are_still_to_be_run() -> None:
    results = [result("a", 0, [0.5]), result("a", 1, [0.6]), result("b", 0, [0.9])]
    assert [row.rank for row in statistics.rows(question(("a", "b"), 2), results)] == [None, None]
    whole = [*results, result("b", 1, [0.7])]
    assert [row.rank for row in statistics.rows(question(("a", "b"), 2), whole)] == [2, 1]


def test_a_loss_ranks_the_other_way() -> None:
    name = "global/test/loss"
    results = [
        Result((), m, m, 0, "", "done", [{"round": i, name: v} for i, v in enumerate(values)], "")
        for m, values in (("a", [3.0, 1.0, 2.0]), ("b", [3.0, 0.5, 0.4]))
    ]
    asked = question(("a", "b"), 1, metrics=dict.fromkeys("ab", name), target=1.0)
    a, b = statistics.rows(asked, results)
    assert (a.rank, b.rank) == (2, 1)
    assert a.best == (1.0, None)
    assert a.rounds == ((1.0, None), 1)


def test_the_metric_is_the_first_accuracy_of_all() -> None:
    def run(method: str, *names: str) -> Result:
        return Result((), method, method, 0, "", "done", [{"round": 0, **dict.fromkeys(names, 0.5)}], "")

    runs = [run("a", "global/test/accuracy", "personal/test/accuracy"), run("b", "personal/test/accuracy")]
    assert set(statistics.choose_metrics("", "ab", runs).values()) == {"personal/test/accuracy"}
    apart = [run("a", "global/test/accuracy"), run("b", "personal/test/accuracy")]
    assert statistics.choose_metrics("", "ab", apart) == {"a": "global/test/accuracy", "b": "personal/test/accuracy"}
    assert statistics.choose_metrics("x", "ab", apart) == {"a": "x", "b": "x"}


def test_a_gain_is_of_whole_methods_and_for_a_loss_of_less() -> None:
    runs = [result("a", 0, [0.1, 0.5]), result("b", 0, [0.1], "diverged"), result("c", 0, [0.1, 0.6])]
    asked = question(("a", "b", "c"), 1, gain=Versus("c", ("a", "b")))
    (found,) = statistics.gains(asked, statistics.rows(asked, runs))
    assert found.last == pytest.approx(0.2)
    (nothing,) = statistics.gains(asked._replace(gain=Versus("b", ("a", "c"))), statistics.rows(asked, runs))
    assert nothing[1:] == (None, None, None, None)
    assert statistics.relative_gain("global/test/loss", 0.5, [2.0, 1.0]) == 0.5
    assert statistics.relative_gain("global/test/accuracy", 0.5, []) is None
    assert statistics.relative_gain("global/test/accuracy", 0.5, [0.0]) is None


def private(seed: int, method: str = "a", *, data: str = "d", partition: str = "p", **more: Any) -> Result:
    spent = PrivacyCost(data, "client", "add_or_remove_one", 2.0, 1e-5)._replace(**more)
    return Result((), method, method, seed, f"{method}{seed}{data}", "done", [], partition, spent)


def test_what_cells_on_the_same_data_tell_adds_up() -> None:
    assert table_notes.composed([private(0)._replace(spent=None)]) == []
    assert table_notes.composed([private(0)]) == [
        "epsilon: a (seed 0) 2 at delta 1e-05, for each client (add or remove one)."
    ]
    same = [private(0), private(0, "b", epsilon=3.5), private(0)]  # of which the last is the first
    assert table_notes.composed(same) == [
        "epsilon: a (seed 0) 2, b (seed 0) 3.5; 2 cells on the same data add up to epsilon 5.5 at delta 2e-05, "
        "for each client (add or remove one)."
    ]
    assert len(table_notes.composed([private(0), private(0, data="e")])) == 2
    other = table_notes.composed([private(0), private(1, partition="q")])
    assert len(other) == 3
    assert "all of them reveal something about an example" in other[-1]
    own = [private(k, data=f"d{k}", partition=f"p{k}")._replace(source="t.csv") for k in (0, 1)]
    assert "all of them reveal something about an example" in table_notes.composed(own)[-1]
    (whole,) = table_notes.composed([each._replace(natural=True) for each in own])
    assert "2 cells on the same data add up to epsilon 4 at delta 2e-05" in whole
    assert "epsilon inf" in table_notes.composed([private(0), private(0, "b", epsilon=math.inf)])[0]
    assert table_notes.composed([private(0, warning="simulated")])[0].endswith("(add or remove one) (simulated).")
