"""The picture of a partition: one stacked bar for each client, coloured by class, and a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.data.arrays import Ints
from fedloom.data.partition import PartitionSummary
from fedloom.report.figure import INK, canvas, plain_frame, styled, suffix_of, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_BARS = 100
_MOST_NAMED = 20
_FAINT = "#d9dce1"
# Ten colours that are distinct on paper and for colour-blind readers, dark and light in turn so that neighbours differ.
TEN = (
    "#3b6fb6", "#f2a541", "#3a9d78", "#d1495b", "#8a63b8", "#e8d25c", "#7a5c45", "#6cc0e5", "#e38bb8", "#8a9299",
)  # fmt: skip


def draw(
    y: Ints,
    owner: Ints,
    clients: int,
    labels: tuple[str, ...],
    path: Path,
    title: str = "",
    names: Sequence[str] = (),
) -> None:
    """Write the picture of how many rows of each class every client has, as a .png, .svg or .pdf.

    ``names``: of the clients, if they have any.
    """
    suffix, shown = suffix_of(path), shown_clients(clients)
    counts = _table(y, owner, clients, shown, len(labels))
    write(path, styled(lambda: _figure(shown, counts, labels, _headline(title, clients), names), suffix))


def table(summary: PartitionSummary) -> list[tuple[str, str]]:
    """The names and values that describe a partition, ready to print."""
    s = summary
    return [
        ("clients", f"{s.clients:,}"),
        ("rows", f"{s.rows:,}"),
        ("rows per client", f"{s.size_min:,} to {s.size_max:,} (median {s.size_median:,g}, mean {s.size_mean:,.1f})"),
        ("inequality of sizes (Gini)", f"{s.size_gini:.2f}"),
        ("classes per client", f"{s.classes_min} to {s.classes_max} of {s.classes} (mean {s.classes_mean:.1f})"),
        ("effective classes per client", f"{s.effective_classes:.2f}"),
        ("share of the largest class", f"{s.top_share:.0%}"),
        ("heterogeneity", f"{s.heterogeneity:.2f} of at most {s.heterogeneity_most:.2f}"),
    ]


def shown_clients(clients: int) -> Ints:
    """The clients that get a bar: all of them, or evenly spaced ones."""
    return np.linspace(0, clients - 1, min(clients, _MOST_BARS)).round().astype(np.int64)


def _table(y: Ints, owner: Ints, clients: int, shown: Ints, classes: int) -> Ints:
    """The rows of each class of each shown client."""
    place = np.full(clients, -1)
    place[shown] = np.arange(len(shown))
    bar = place[owner]
    cells = bar[bar >= 0] * classes + y[bar >= 0]
    return np.bincount(cells, minlength=len(shown) * classes).reshape(len(shown), classes)


def _headline(title: str, clients: int) -> str:
    subset = f"{_MOST_BARS} of {clients:,} clients, evenly spaced" if clients > _MOST_BARS else ""
    return "\n".join(part for part in (title, subset) if part)


def _figure(shown: Ints, counts: Ints, labels: tuple[str, ...], headline: str, names: Sequence[str]) -> Figure:
    figure = canvas(float(np.clip(3.4 + 0.16 * len(shown), 6.0, 13.0)), 4.2)
    axes = figure.add_subplot()
    colours = _colours(len(labels))
    _bars(axes, counts, colours)
    _frame(axes, shown, counts, headline, names)
    if len(labels) <= _MOST_NAMED:
        _legend(axes, labels, colours)
    else:
        _colour_bar(figure, axes, labels)
    return figure


def _colours(classes: int) -> list[Any]:
    import matplotlib

    if classes <= len(TEN):
        return list(TEN[:classes])
    if classes <= _MOST_NAMED:
        return [matplotlib.colormaps["tab20"](k) for k in range(classes)]
    return list(matplotlib.colormaps["turbo"](np.linspace(0.03, 0.97, classes)))


def _bars(axes: Axes, counts: Ints, colours: list[Any]) -> None:
    """One collection of all non-empty rectangles: ten thousand artists would be slow and large."""
    from matplotlib.collections import PolyCollection

    top = counts.cumsum(axis=1)
    bar, label = np.nonzero(counts)
    low, high = (top - counts)[bar, label], top[bar, label]
    left, right = bar - 0.41, bar + 0.41
    corners = np.stack([left, low, left, high, right, high, right, low], axis=1).reshape(-1, 4, 2)
    few = len(colours) <= _MOST_NAMED and len(counts) <= 50
    rectangles = PolyCollection(
        list(corners),
        facecolors=[colours[k] for k in label],
        edgecolors="white" if few else "none",
        linewidths=0.4 if few else 0.0,
        antialiaseds=few,  # without an outline, soft edges would leave hairlines between classes
    )
    axes.add_collection(rectangles)


def _frame(axes: Axes, shown: Ints, counts: Ints, headline: str, names: Sequence[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    bars = len(shown)
    margin = max(0.7, 4.0 - bars / 2)  # a few bars do not fill the width
    axes.set_xlim(-margin, bars - 1 + margin)
    axes.set_ylim(0, max(1.0, 1.04 * float(counts.sum(axis=1).max())))
    step = next(s for s in (1, 2, 5, 10, 20) if bars / s <= 26)
    ticks = np.arange(0, bars, step)
    called = [names[shown[k]] if names else f"{shown[k]}" for k in ticks]
    axes.set_xticks(ticks, called, rotation=45 if max(map(len, called)) >= 4 else 0)
    axes.set_xlabel("client", color=INK)
    axes.set_ylabel("rows", color=INK)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(axis="y", color=_FAINT, linewidth=0.6)
    plain_frame(axes, _FAINT)
    if headline:
        axes.set_title(headline, loc="left", fontsize=10.5, color=INK, pad=10)


def _legend(axes: Axes, labels: tuple[str, ...], colours: list[Any]) -> None:
    """Classes from top to bottom, in the order of a bar."""
    from matplotlib.patches import Patch

    patches = [Patch(color=colours[k], label=_short(labels[k])) for k in range(len(labels) - 1, -1, -1)]
    axes.legend(
        handles=patches,
        title="class",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.02),
        frameon=False,
        handlelength=1.0,
        handleheight=1.0,
        fontsize=8.5 if len(labels) <= len(TEN) else 7.0,
        labelspacing=0.35,
    )


def _colour_bar(figure: Figure, axes: Axes, labels: tuple[str, ...]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    classes = len(labels)
    norm = BoundaryNorm(np.arange(classes + 1) - 0.5, classes)
    scale = ScalarMappable(norm, ListedColormap(_colours(classes)))
    ticks = np.unique(np.linspace(0, classes - 1, 11).round().astype(int))
    bar = figure.colorbar(scale, ax=axes, ticks=ticks, pad=0.015, aspect=28, drawedges=False)
    bar.ax.set_yticklabels([_short(labels[k]) for k in ticks])
    bar.ax.tick_params(length=0, which="both", colors=INK)
    bar.ax.set_title("class", fontsize=9, color=INK)
    bar.outline.set_visible(False)


def _short(name: str) -> str:
    return name if len(name) <= 18 else name[:17] + "…"
