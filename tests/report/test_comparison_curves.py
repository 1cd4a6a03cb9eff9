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
    curves.complete([curves.panel(asked, (), runs, axes)])
    tails = [row.tail.mean for row in statistics.rows(asked, runs) if row.tail is not None]
    assert tails == pytest.approx([0.6, 0.8, 0.3])
    assert {text.get_text() for text in axes.texts} == {"60.0", "80.0", "30.0"}
    late = runs[0]._replace(records=runs[0].records[1:])  # a metric that there is from the first round on
    axes = Figure().subplots()
    curves.complete([curves.panel(question(("a",), 1), (), [late], axes)])
    assert [text.get_text() for text in axes.texts] == ["60.0"]


def test_a_number_is_where_its_line_ends() -> None:
    """The mean is lower than a line that rises: at its own height it would be far from it, beside ticks."""
    axes = Figure().subplots()
    curves.complete([curves.panel(question(("a",), 1), (), [result("a", 0, [0.1, 0.5, 0.7])], axes)])
    low, high = axes.get_ylim()
    (text,) = axes.texts
    assert low + text.xy[1] * (high - low) == pytest.approx(70.0)  # type: ignore[attr-defined]


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


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ((1, 1), "; at the right, the only evaluation"),
        ((8, 8), "; at the right, the mean of all 8 evaluations"),
        ((10, 10), "; at the right, the mean of all 10 evaluations"),
        ((14, 14), "; at the right, the mean of the last ten of 14 evaluations"),
        ((8, 14), "; at the right, the mean of at most the last ten of 8 to 14 evaluations"),
    ],
)
def test_a_caption_counts_the_evaluations_at_the_right(counts: tuple[int, int], says: str) -> None:
    runs = [result(m, 0, [0.1] * (1 + count)) for m, count in zip("ab", counts, strict=True)]
    assert curves.caption(question(("a", "b"), 1), runs, 0) == f"seed 0{says}"


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")  # which matplotlib gives if texts leave no room for the panels
def test_a_comparison_that_has_hardly_begun_can_be_drawn(tmp_path: Path) -> None:
    methods = tuple(f"a method with a long name {i}" for i in range(11))
    asked = question(methods, 1, axes=("local.lr",), places=(("0.1",), ("0.2",)))
    runs = [result(methods[0], 0, [0.1, 0.5])._replace(place=("0.1",))]
    curves.draw(asked, runs, tmp_path / "a.png")
    texts = []
    for place in asked.places:
        axes = Figure().subplots()
        curves.complete([curves.panel(asked, place, [r for r in runs if r.place == place], axes)])
        texts.append([text.get_text() for text in axes.texts])
    assert texts == [["not finished: 10 of 11 methods", "50.0"], ["no results"]]


@pytest.mark.slow
@pytest.mark.parametrize("length", [3, 25, 60])
def test_a_legend_stays_within_its_figure(length: int) -> None:
    methods = tuple(f"{i} {'a method of many words ' * 3}"[:length] for i in range(8))
    asked = question(methods, 1, axes=("local.lr",), places=(("0.1",), ("0.2",)))
    runs = [result(m, 0, [0.1, 0.5])._replace(place=p) for m in methods for p in asked.places]
    figure = curves.figure_of(asked, runs)
    figure.canvas.draw()
    legend = figure.legends[0].get_window_extent()
    assert 0 <= legend.x0 <= legend.x1 <= figure.bbox.width


@pytest.mark.parametrize(("ends", "shared"), [((0.5, 0.9), True), ((0.11, 0.9), False)])
def test_panels_have_the_same_axis_unless_curves_would_be_flat(ends: tuple[float, float], *, shared: bool) -> None:
    places = (("0.03",), ("0.3",), ("3",))
    asked = question(("a", "b"), 1, axes=("local.lr",), places=places)
    runs = [result(m, 0, [0.1, end])._replace(place=p) for m in "ab" for p, end in zip(places, ends, strict=False)]
    limits = [axes.get_ylim() for axes in curves.figure_of(asked, runs).axes[:2]]  # the third has no results
    assert (limits[0] == limits[1]) == shared
    assert all(low <= 10 and high >= 100 * end for (low, high), end in zip(limits, ends, strict=True))


@pytest.mark.parametrize("count", [9, 10])
def test_lines_of_the_same_colour_are_told_apart_at_their_ends(count: int) -> None:
    """The baseline is in ink, so nine methods have nine colours; the tenth has the second one's, with dashes."""
    methods = tuple(f"m{k}" for k in range(count))
    runs = [result(m, 0, [0.1, 0.1 + k / 20]) for k, m in enumerate(methods)]
    axes = Figure().subplots()
    curves.complete([curves.panel(question(methods, 1), (), runs, axes)])
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines[:count]}
    assert len(looks) == count
    beside = {(line.get_color(), line.get_linestyle()) for line in axes.lines[count:]}
    assert beside == (looks if count > 9 else set())
    heights = sorted(line.get_ydata()[0] for line in axes.lines[count:])  # type: ignore[index]
    assert heights == (sorted(text.xy[1] for text in axes.texts) if count > 9 else [])  # type: ignore[attr-defined]
