"""Curves of a run: accuracy and loss against rounds, drawn from what the run recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedloom.core.vocabulary import is_extra, leaf
from fedloom.report.figure import COLOURS, as_file, write

_PANELS = 6  # at most


def draw(records: list[dict[str, Any]], *, title: str, path: Path | None = None) -> Figure:
    """A panel for accuracy, loss and each further measure; the worst tenth of the clients is dotted."""
    leaves = _leaves(records)
    figure = Figure(figsize=(4.6 * len(leaves), 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(leaves))
    for axis, end in zip(axes, leaves, strict=True):
        names = _names(records, end)
        for name, colour in zip(names, COLOURS, strict=False):
            rounds, values = _series(records, name)
            axis.plot(rounds, values, color=colour, lw=1.8, label=name.removesuffix(f"/{end}"), marker=_dot(rounds))
            worst_rounds, worst = _series(records, f"{name}_worst10")
            if worst:
                axis.plot(worst_rounds, worst, color=colour, lw=1.0, ls=":", label="its worst tenth of clients")
        axis.set_xlabel("round")
        axis.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        axis.set_ylabel(end)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if names:
            axis.legend(frameon=False, fontsize=8)
        if end == "accuracy":
            axis.set_ylim(0, 1.02)
        elif end == "loss":
            axis.set_ylim(bottom=0)
    figure.suptitle(title, fontsize=11)
    if path is not None:
        write(path, as_file(figure, path.suffix or ".png"))
    return figure


def _leaves(records: list[dict[str, Any]]) -> list[str]:
    """What has a panel: accuracy (or what stands in its place), loss, and what else was asked for."""
    seen = dict.fromkeys(leaf(name) for line in records for name in line if is_extra(name))
    first = [] if "mae" in seen else ["accuracy"]
    return [*first, "loss", *seen][:_PANELS]


def _names(records: list[dict[str, Any]], end: str) -> list[str]:
    """The headline metrics of this kind, in the order in which they were recorded."""
    seen = dict.fromkeys(name for r in records for name in r)
    return [n for n in seen if n.endswith(f"/{end}")]


def _series(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    pairs = [(r["round"], r[name]) for r in records if name in r]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def _dot(rounds: list[int]) -> str:
    return "o" if len(rounds) <= 2 else ""
