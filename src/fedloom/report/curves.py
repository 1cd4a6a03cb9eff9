"""Curves of a run: accuracy and loss against rounds, drawn from what the run recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedloom.core.vocabulary import is_diagnostic, is_extra, leaf
from fedloom.report.figure import COLOURS, as_file, write

_PANELS = 9  # at most, of measures and of diagnostics
_ACROSS = 3  # at most: more would be too small to read on a screen


class _Panel(NamedTuple):
    """A panel: the label of the axis, and lines by the name of the metric."""

    label: str
    lines: dict[str, str]


def draw(records: list[dict[str, Any]], *, title: str, path: Path | None = None) -> Figure:
    """A panel for accuracy, loss and each further measure; the worst tenth of the clients is dotted.

    Diagnostics have panels in separate rows below.
    """
    measures, diagnostics = _measures(records), _diagnostics(records)
    across = min(_ACROSS, len(measures))
    upper, lower = (-(-len(panels) // across) for panels in (measures, diagnostics))
    down = upper + lower
    figure = Figure(figsize=(4.6 * across, 3.8 * down), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, across, squeeze=False).ravel().tolist()
    for panels, own in ((measures, axes[: upper * across]), (diagnostics, axes[upper * across :])):
        for axis, panel in zip(own, panels, strict=False):
            _fill(axis, panel, records)
        for unused in own[len(panels) :]:
            unused.set_axis_off()
    figure.suptitle(title, fontsize=11)
    if path is not None:
        write(path, as_file(figure, path.suffix or ".png"))
    return figure


def _fill(axis: Axes, panel: _Panel, records: list[dict[str, Any]]) -> None:
    for (name, label), colour in zip(panel.lines.items(), COLOURS, strict=False):
        rounds, values = _series(records, name)
        axis.plot(rounds, values, color=colour, lw=1.8, label=label, marker=_dot(rounds))
        worst_rounds, worst = _series(records, f"{name}_worst10")
        if worst:
            axis.plot(worst_rounds, worst, color=colour, lw=1.0, ls=":", label="its worst tenth of clients")
    axis.set_xlabel("round")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axis.set_ylabel(panel.label)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if panel.lines:
        axis.legend(fontsize=7, framealpha=0.7, edgecolor="none")
    if panel.label == "accuracy":
        axis.set_ylim(0, 1.02)
    elif panel.label == "loss":
        axis.set_ylim(bottom=0)


def _measures(records: list[dict[str, Any]]) -> list[_Panel]:
    """Accuracy (or its equivalent in regression), loss, and other requested measures, in the order of the records."""
    names = dict.fromkeys(name for line in records for name in line)
    seen = dict.fromkeys(leaf(name) for name in names if is_extra(name))
    first = [] if "mae" in seen else ["accuracy"]
    ends = [*first, "loss", *seen][:_PANELS]
    return [_Panel(end, {n: n.removesuffix(f"/{end}") for n in names if n.endswith(f"/{end}")}) for end in ends]


def _diagnostics(records: list[dict[str, Any]]) -> list[_Panel]:
    """Diagnostics by the first part of their names."""
    names = dict.fromkeys(name for line in records for name in line if is_diagnostic(name))
    places = list(dict.fromkeys(name.partition("/")[0] for name in names))[:_PANELS]
    return [_Panel(at, {n: n.removeprefix(f"{at}/") for n in names if n.startswith(f"{at}/")}) for at in places]


def _series(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    pairs = [(r["round"], r[name]) for r in records if name in r]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def _dot(rounds: list[int]) -> str:
    return "o" if len(rounds) <= 2 else ""
