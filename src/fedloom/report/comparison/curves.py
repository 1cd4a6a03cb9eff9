"""Curves of a comparison: the mean of each method over seeds, with a band of one standard deviation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.core import disk
from fedloom.core.vocabulary import is_share, leaf
from fedloom.report.comparison.question import Along, Place, Question, Result
from fedloom.report.comparison.statistics import along, evaluations, summary_of
from fedloom.report.figure import COLOURS, INK, canvas, plain_frame, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# After Okabe and Ito, for readers with any kind of colour vision; the baseline is drawn in ink.
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))


_MOST_PANELS = 6
_BETWEEN = 0.16  # inches on either side of a panel, so that the numbers at its right are not ticks of the next one


_X_NAMES: dict[Along, str] = {
    "rounds": "round",
    "seconds": "simulated seconds",
    "bytes": "MB sent",
    "busiest": "MB through the busiest end",
    "gradients": "gradients of a batch",
}


Floats = NDArray[np.float64]

_FAINT = "#e3e5e9"


def draw(question: Question, results: Sequence[Result], path: Path) -> None:
    """A panel for each point of the grid: the mean of each method over seeds, with a band of one deviation."""
    disk.write_bytes(path, styled(lambda: figure_of(question, results), path.suffix))


def band(results: Sequence[Result], metric: str, x: Along = "rounds") -> tuple[Floats, Floats, Floats]:
    """Where, mean and sample standard deviation over the finished seeds, at the rounds that all of them evaluated.

    Seconds, bytes and gradients of a round differ from seed to seed; it is drawn at their mean.
    """
    done = [r.records for r in results if r.state == "done"]
    found = [{line["round"]: (along(x, line), line[metric]) for line in lines if metric in line} for lines in done]
    rounds = sorted(set.intersection(*(set(f) for f in found))) if found else []
    shape = (len(found), len(rounds), 2)
    values = np.array([[f[r] for r in rounds] for f in found], dtype=np.float64).reshape(shape)
    deviation = values[..., 1].std(axis=0, ddof=1) if len(found) > 1 else np.zeros(len(rounds))
    where, mean = values.mean(axis=0).T if found else np.zeros((2, 0))
    return where, mean, deviation


def figure_of(question: Question, results: Sequence[Result]) -> Figure:
    """The figure that is drawn."""
    places = question.places[:_MOST_PANELS]
    wide = min(len(places), 3)
    high = math.ceil(len(places) / wide)
    width = {1: 6.8, 2: 9.6, 3: 12.6}[wide]
    across = _columns(question, width, 3 if wide == 1 else 5)
    lines = math.ceil(len(question.methods) / across)
    figure = canvas(width, 3.7 * high + 0.3 * lines + 0.3, beside=_BETWEEN)
    panels = figure.subplots(high, wide, squeeze=False, sharey=False).ravel()
    found = []
    for index, (axes, place) in enumerate(zip(panels, places, strict=False)):
        found.append(panel(question, place, [r for r in results if r.place == place], axes))
        if index % wide == 0:
            axes.set_ylabel(_axis_name(question), color=INK)
    complete(found)
    for axes in panels[len(places) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=across, frameon=False, handlelength=2.4)
    hidden = len(question.places) - _MOST_PANELS
    figure.suptitle(caption(question, results, hidden), x=0.01, ha="left", fontsize=9.5, color=INK)
    return figure


def _columns(question: Question, width: float, most: int) -> int:
    """How many columns of the legend fit into a figure of this width, in inches, by the longest name."""
    longest = max(len(_name(question, method)) for method in question.methods)
    return max(1, min(len(question.methods), most, int(width / (0.6 + 0.075 * longest))))


def _name(question: Question, method: str) -> str:
    return f"{method} (baseline)" if method == question.baseline else method


def caption(question: Question, results: Sequence[Result], hidden: int) -> str:
    """How to read the curves, and how many panels are not shown."""
    counts = Counter((r.place, r.method) for r in results if r.state == "done").values()
    fewest, most = min(counts, default=0), max(counts, default=0)
    count = f"{most}" if fewest == most else f"{fewest} to {most}"
    seeds = len(question.seeds)
    text = f"mean over {count} seeds ± one standard deviation" if seeds > 1 else f"seed {question.seeds[0]}"
    text += _about_ends(question, results)
    return text + (f"; {hidden} more of the grid in the table" if hidden > 0 else "")


def _about_ends(question: Question, results: Sequence[Result]) -> str:
    """What the numbers at the right are, with the number of evaluations that they are of."""
    counts = [evaluations(r, question.metrics[r.method]) for r in results if r.state == "done"]
    fewest, most = min(counts, default=0), max(counts, default=0)
    if not most:
        return ""
    if most <= 10:
        of = f"all {most}" if fewest == most else f"all {fewest} to {most}"
    else:
        of = f"the last ten of {most}" if fewest == most else f"at most the last ten of {fewest} to {most}"
    return f"; at the right, the mean of {of} evaluations" if most > 1 else "; at the right, the only evaluation"


def _axis_name(question: Question) -> str:
    names = set(question.metrics.values())
    name = question.metric if len(names) == 1 else leaf(question.metric)
    return f"{name} (%)" if is_share(question.metric) else name


class End(NamedTuple):
    """The number at the end of a line, where the line ends, and how that is drawn."""

    value: float
    height: float
    colour: str
    dash: Any
    width: float


class Panel(NamedTuple):
    """A panel with its lines, the ends of which are not marked yet."""

    axes: Axes
    ends: tuple[End, ...]
    styled: bool  # whether several lines have the same colour, so that only their dashes tell them apart


def panel(question: Question, place: Place, results: Sequence[Result], axes: Axes) -> Panel:
    """The lines of all methods at one point of the grid."""
    scale = 100.0 if is_share(question.metric) else 1.0
    lines = [_line(question, method, results, scale, axes) for method in question.methods]
    ends = [line for line in lines if line is not None]
    if question.target is not None:
        axes.axhline(scale * question.target, color="#8a9299", lw=0.9, ls=(0, (2, 2)), zorder=1)
    lost = [method for method, line in zip(question.methods, lines, strict=True) if line is None]
    _frame(axes, question.x)
    if not ends:
        _say_empty(axes)
    elif lost:
        # A long text would push the panel aside; the table names them all.
        text = f"not finished: {', '.join(lost) if len(lost) <= 2 else f'{len(lost)} of {len(lines)} methods'}"
        axes.annotate(text, (0.98, 0.03), xycoords="axes fraction", ha="right", fontsize=8)
    if scale == 100.0 and ends:
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(0.0, bottom), min(100.0, top))
    axes.set_title(question.title(place), loc="left", fontsize=10, color=INK)
    return Panel(axes, tuple(ends), len(question.methods) - (question.baseline in question.methods) > len(COLOURS))


_FLAT = 1 / 8  # of the height of a panel: curves that would have less of it keep an axis of their own


def complete(panels: Sequence[Panel]) -> None:
    """Give panels of one metric the same axis, unless some curves would be flat, and mark the ends of lines."""
    drawn = [each.axes for each in panels if each.ends]
    limits = [axes.get_ylim() for axes in drawn]
    if limits:
        low, high = min(low for low, _ in limits), max(high for _, high in limits)
        if all(top - bottom >= _FLAT * (high - low) for bottom, top in limits):
            for axes in drawn:
                axes.set_ylim(low, high)
    for each in panels:
        _mark_ends(each)


def _say_empty(axes: Axes) -> None:
    """Text instead of axes whose numbers would mean nothing."""
    axes.set(xticks=[], yticks=[])
    axes.annotate("no results", (0.5, 0.5), xycoords="axes fraction", ha="center", fontsize=9, color=INK)


def _line(question: Question, method: str, results: Sequence[Result], scale: float, axes: Axes) -> End | None:
    """Draw the mean of a method and its band; the mean of the last ten, or None if no seed finished."""
    mine, metric = [r for r in results if r.method == method], question.metrics[method]
    where, mean, deviation = band(mine, metric, question.x)
    colour, dash, width = _look(question, method)
    marker = "o" if 0 < len(where) <= 5 else ""
    # A line without a point is drawn, too: the legend needs it.
    look = {"color": colour, "ls": dash, "lw": width, "marker": marker, "ms": 3}
    axes.plot(where, scale * mean, label=_name(question, method), zorder=3, **look)
    if not len(where):
        return None
    low, high = scale * (mean - deviation), scale * (mean + deviation)
    axes.fill_between(where, low, high, color=colour, alpha=0.13, lw=0, zorder=2)
    tails = [s.mean_last_10 for s in (summary_of(r, metric) for r in mine) if s is not None]
    return End(scale * float(np.mean(tails)), scale * float(mean[-1]), colour, dash, width)


_SAMPLE = 0.06  # the length of a piece of line, as a share of the width of its panel


def _mark_ends(panel: Panel) -> None:
    """The mean of the last ten next to the end of each line, moved apart if they would overlap.

    They are bold: the ticks of the next panel are not far.

    Where several lines have the same colour, a piece of the line is before its number.
    """
    from matplotlib.lines import Line2D

    axes, (low, high) = panel.axes, panel.axes.get_ylim()
    gap, used = 0.052, 2.0
    order = sorted(panel.ends, key=lambda end: -end.height)
    for place, end in enumerate(order):
        height = min(1.0, max(0.0, (end.height - low) / (high - low)))
        used, left = max(min(height, used - gap), gap * (len(order) - 1 - place)), 1.012
        if panel.styled:
            look = {"color": end.colour, "ls": end.dash, "lw": end.width}
            where = [left, left + _SAMPLE]
            axes.add_line(Line2D(where, [used, used], transform=axes.transAxes, clip_on=False, **look))
            left += _SAMPLE + 0.012
        text = f"{end.value:.1f}" if high > 2 else f"{end.value:.3f}"
        look = {"va": "center", "color": end.colour, "fontsize": 8, "weight": "bold"}
        axes.annotate(text, (left, used), xycoords="axes fraction", annotation_clip=False, **look)


def _look(question: Question, method: str) -> tuple[str, Any, float]:
    """Colour, dashes and width of a method's line, the same in every panel."""
    if method == question.baseline:
        return INK, "-", 2.0
    index = [m for m in question.methods if m != question.baseline].index(method)
    return COLOURS[index % len(COLOURS)], _DASHES[(index // len(COLOURS)) % len(_DASHES)], 1.6


def _frame(axes: Axes, x: Along) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(_X_NAMES[x], color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=x == "rounds"))
    axes.grid(axis="y", color=_FAINT, linewidth=0.7)
    plain_frame(axes, "#c9cdd3")
    axes.margins(x=0.01)
    if x != "rounds":  # never below zero, even if a method sends nothing
        axes.set_xlim(left=0.0)
