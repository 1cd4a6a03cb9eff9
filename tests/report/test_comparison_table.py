"""The table of a comparison as text, LaTeX and numbers."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest

from fedloom.data.partition import Dirichlet
from fedloom.report.comparison import latex, numbers, statistics
from fedloom.report.comparison import notes as table_notes
from fedloom.report.comparison import text as text_table
from fedloom.report.comparison.notes import about_partitions
from fedloom.report.comparison.question import Versus
from fedloom.report.comparison.text import Section
from fedloom.report.page.language import sentence_in
from support.comparisons import question, result


@pytest.mark.parametrize(
    ("costs", "shown"),
    [
        ([{"work_gradients": 5}, {"work_gradients": 5}], []),
        ([{"work_gradients": 5}, {"work_gradients": 15}], [["2", "10", "2.00"], ["2", "30", "2.00"]]),
        ([{"work_gradients": 5}, {"bytes_up": 2e6, "work_gradients": 5}], [["2", "10", "2.00"], ["2", "10", "4.00"]]),
    ],
    ids=["equal", "gradients", "bytes"],
)
def test_what_methods_took_is_shown_where_it_differs(costs: list[dict[str, float]], shown: list[list[str]]) -> None:
    """After two rounds; what they may spend is not limited, but rounds alone would not compare them."""
    fixed = {"bytes_up": 1e6, "bytes_down": 0.0}
    runs = [result(m, 0, [0.1, 0.5, 0.6], **(fixed | cost)) for m, cost in zip("ab", costs, strict=True)]
    asked = question(("a", "b"), 1)
    (section,) = text_table.sections(asked, statistics.rows(asked, runs))
    where = [section.header.index(name) for name in ("rounds", "gradients", "MB") if name in section.header]
    assert [[line[i] for i in where] for line in section.lines] == (shown or [[], []])


def test_a_method_that_did_not_finish_took_nothing_that_could_differ() -> None:
    runs = [result("a", 0, [0.1, 0.5], work_gradients=5), result("b", 0, [0.1], "diverged", work_gradients=9)]
    asked = question(("a", "b"), 1)
    assert "gradients" not in text_table.sections(asked, statistics.rows(asked, runs))[0].header


def test_the_gain_over_the_best_of_the_others_is_a_row_of_every_table() -> None:
    runs = [result(m, s, [0.1, v, v - 0.02]) for m, v in (("a", 0.5), ("b", 0.62), ("c", 0.7)) for s in (0, 1)]
    paper = {((), "a"): 0.6391, ((), "c"): 0.7215}
    asked = question(("a", "b", "c"), 2, gain=Versus("c", ("a", "b")), paper=paper)
    table = statistics.rows(asked, runs)
    (section,) = text_table.sections(asked, table)
    line = dict(zip(section.header, section.lines[-1], strict=True))
    assert len(section.lines) == 4
    assert line["algorithm"] == "gain of c"
    assert (line["last (%)"], line["best (%)"]) == (
        f"{100 * (0.68 / 0.6 - 1):+.2f}%",
        f"{100 * (0.7 / 0.62 - 1):+.2f}%",
    )
    assert (line["paper (%)"], line["p"], line["rank"]) == ("+12.89%", "", "")
    assert "| gain of c | +13.33% | +12.90% |" in text_table.markdown(asked, table)
    assert "gain of c & +13.33\\% & +12.90\\% &" in latex.latex(asked, table)
    last = list(csv.DictReader(io.StringIO(numbers.table_csv(asked, table))))[-1]
    assert (last["algorithm"], float(last["last"]), last["rank"]) == ("gain of c", pytest.approx(0.68 / 0.6 - 1), "")
    assert float(last["paper"]) == pytest.approx(0.7215 / 0.6391 - 1)
    assert "gain of c: relative to the best of a, b in the same column." in table_notes.notes(asked, table)


def test_latex_escapes_what_it_must() -> None:
    label = "50% & a_b #1 ~ {x}"
    asked = question((label,), 1)
    tex = latex.latex(asked, statistics.rows(asked, [result(label, 0, [0.5])]))
    assert "50\\% \\& a\\_b \\#1 \\textasciitilde{} \\{x\\}" in tex


def test_methods_that_share_the_first_rank_are_all_bold() -> None:
    asked = question(("a", "b", "c"), 2)
    values = {"a": 0.5, "b": 0.6, "c": 0.6}
    found = statistics.rows(asked, [result(m, seed, [0.1, v]) for m, v in values.items() for seed in (0, 1)])
    assert [row.rank for row in found] == [3, 1, 1]
    assert [f"| **{m}** |" in text_table.markdown(asked, found) for m in values] == [False, True, True]
    assert [f"\\textbf{{{m}}}" in latex.latex(asked, found) for m in values] == [False, True, True]


def test_rounds_as_an_axis_are_those_of_the_grid_also_where_a_run_diverged() -> None:
    own = [result("a", 0, [0.1, 0.2], "diverged")._replace(place=(rounds,)) for rounds in ("5", "ten")]
    asked = question(("a",), 1, axes=("rounds",), places=(("5",), ("ten",)))
    lines = list(csv.DictReader(io.StringIO(numbers.cells_csv(asked, own, "cells"))))
    assert [line["rounds"] for line in lines] == ["5", "ten"]


def test_a_narrow_terminal_gets_fewer_columns() -> None:
    section = Section("", ["algorithm", "last", "best", "mean", "rank"], [["a", *["x" * 10] * 3, "1"]], (0,))
    assert text_table.narrowed(section, 200) == section
    assert text_table.narrowed(section, 45).header == ["algorithm", "last", "mean", "rank"]


@pytest.mark.parametrize(
    ("counts", "part"),
    [
        ((9, 9), "only 9; the mean of the last ten is the mean of the whole curve,"),
        ((10, 10), "only 10; the mean of the last ten is the mean of the whole curve,"),
        ((12, 19), "only 12 to 19; the mean of the last ten is the mean of most of the curve,"),
        ((8, 30), "only 8 to 30; the mean of the last ten is the mean of most of the curve, or all of it,"),
        ((20, 30), ""),
    ],
)
def test_a_mean_of_most_of_the_curve_has_a_note(counts: tuple[int, int], part: str) -> None:
    runs = [result(m, 0, [0.1] * (1 + count)) for m, count in zip("ab", counts, strict=True)]
    asked = question(("a", "b"), 1)
    said = [note for note in table_notes.notes(asked, statistics.rows(asked, runs)) if "Evaluations" in note]
    assert [part in note for note in said] == [True] * bool(part)
    assert not any(sentence_in("zh", note) == note for note in said)


@pytest.mark.parametrize(
    ("counts", "head"), [((9, 9), "mean of all 9"), ((9, 10), "mean of at most 10"), ((10, 12), "mean of last 10")]
)
def test_the_mean_says_of_how_many_evaluations_it_is(counts: tuple[int, int], head: str) -> None:
    runs = [result(m, 0, [0.1] * (1 + count)) for m, count in zip("ab", counts, strict=True)]
    asked = question(("a", "b"), 1)
    assert text_table.sections(asked, statistics.rows(asked, runs))[0].header[3] == f"{head} (%)"


@pytest.mark.parametrize(("count", "differs"), [(24, False), (26, True)])
def test_methods_on_equal_terms_that_are_not_evaluated_equally_often_have_a_note(count: int, *, differs: bool) -> None:
    runs = [result("a", 0, [0.1] * 21), result("b", 0, [0.1] * (1 + count))]
    asked = question(("a", "b"), 1, equal="bytes", budgets={(): 1.0})
    said = [
        n for n in table_notes.notes(asked, statistics.rows(asked, runs)) if "Evaluations of a run: 20 of a, 2" in n
    ]
    assert len(said) == differs
    assert not any(sentence_in("zh", note) == note for note in said)


def test_repairs_of_partitions_are_notes_once_for_all_points_that_share_them() -> None:
    places = tuple((alpha, rate) for alpha in ("0.01", "1.0") for rate in ("0.1", "0.3"))
    asked = question(("a", "b"), 2, axes=("partition.alpha", "local.lr"), places=places)
    runs = [result(m, s, [0.1, 0.5])._replace(place=p) for p in places for m in "ab" for s in (0, 1)]
    harsh = [r._replace(repairs=(f"moved {r.seed} rows",)) if r.place[0] == "0.01" else r for r in runs]
    assert about_partitions(asked, runs) == []
    assert about_partitions(asked, harsh) == ["partition (partition.alpha = 0.01; numbers of seed 0): moved 0 rows"]
    alike = [r._replace(repairs=("rows of clients are split",)) for r in runs]
    assert about_partitions(asked, alike) == ["partition: rows of clients are split"]
    rate = [r._replace(repairs=("moved",)) for r in runs if r.place == places[3]]
    assert about_partitions(asked, rate) == ["partition (partition.alpha = 1.0, local.lr = 0.3): moved"]
    (kept,) = about_partitions(asked, [r._replace(repairs=assigned_notes()) for r in runs])
    assert not any(word in sentence_in("zh", kept) for word in ("moved", "rows", "heterogeneity was"))


def assigned_notes() -> tuple[str, ...]:
    """The notes of a real split."""
    partition = Dirichlet(clients=20, alpha=0.05)
    return partition.assign(np.arange(400) % 10, 10, np.random.default_rng(0), None).notes


def test_the_interval_of_a_difference_is_beside_its_p_value() -> None:
    """Differences of 1, 2 and 3 points: Student's t with two degrees of freedom is 4.303 at 97.5 %."""
    runs = [result("a", s, [0.1, 0.5]) for s in range(3)] + [result("b", s, [0.1, 0.51 + s / 100]) for s in range(3)]
    asked = question(("a", "b"), 3)
    table = statistics.rows(asked, runs)
    half = 4.302653 / 3**0.5
    (section,) = text_table.sections(asked, table)
    at = section.header.index("95 % interval")
    assert section.header[at - 1 : at + 2] == ["vs a", "95 % interval", "p"]
    assert [line[at] for line in section.lines] == ["-", f"[{2 - half:+.2f}, {2 + half:+.2f}]"]
    low, high = (float(list(csv.DictReader(io.StringIO(numbers.table_csv(asked, table))))[1][f"difference_{end}"])
                 for end in ("low", "high"))  # fmt: skip
    assert (low, high) == pytest.approx(((2 - half) / 100, (2 + half) / 100))
    one = statistics.rows(question(("a", "b"), 1), [r for r in runs if r.seed == 0])
    assert [row.interval for row in one] == [(None, None)] * 2
