"""Curves of a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fedloom.report.comparison import curves, statistics
from support.comparisons import question, result


def test_the_end_of_a_curve_is_labelled_as_in_the_table() -> None:
    """With the mean of the last ten, and without the model that nobody has trained yet."""
    runs = [result("a", 0, [0.1, 0.5, 0.7]), result("b", 0, [0.1, *[0.4] * 5, *[0.8] * 10]), result("c", 0, [0.3])]
    asked = question(("a", "b", "c"), 1)
    axes = Figure().subplots()
    curves.panel(asked, (), runs, axes)
    tails = [row.tail.mean for row in statistics.rows(asked, runs) if row.tail is not None]
    assert tails == pytest.approx([0.6, 0.8, 0.3])
    assert {text.get_text() for text in axes.texts} == {"60.0", "80.0", "30.0"}
    late = runs[0]._replace(records=runs[0].records[1:])  # a metric that there is from the first round on
    axes = Figure().subplots()
    curves.panel(question(("a",), 1), (), [late], axes)
    assert [text.get_text() for text in axes.texts] == ["60.0"]


@pytest.mark.slow
def test_many_panels_and_many_methods_can_be_drawn(tmp_path: Path) -> None:
    methods = tuple(f"m{i}" for i in range(12))
    places = tuple((str(i),) for i in range(8))
    runs = [result(m, s, [0.1, 0.5, 0.6])._replace(place=p) for m in methods for s in (0, 1) for p in places]
    asked = question(methods, 2, axes=("local.lr",), places=places)
    for name in ("a.png", "a.svg"):
        curves.draw(asked, runs, tmp_path / name)
        first = (tmp_path / name).read_bytes()
        curves.draw(asked, runs, tmp_path / name)
        assert (tmp_path / name).read_bytes() == first


def test_a_caption_counts_the_seeds_that_are_there() -> None:
    asked = question(("fedavg", "fedprox"), 3)
    some = [result("fedavg", seed, [0.1, 0.2]) for seed in range(3)] + [result("fedprox", 0, [0.1, 0.2])]
    assert curves.caption(asked, some[:3], 0).startswith("mean over 3 seeds")
    assert curves.caption(asked, some, 0).startswith("mean over 1 to 3 seeds")
