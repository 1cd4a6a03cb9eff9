"""Curves of a run: accuracy and loss against rounds, drawn from what the run recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedloom.report.figure import COLOURS, as_file, write


def draw(records: list[dict[str, Any]], *, title: str, path: Path | None = None) -> Figure:
    """Two panels; the worst tenth of the clients is the dotted line below its mean."""
    figure = Figure(figsize=(9.2, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for axis, leaf in zip(axes, ("accuracy", "loss"), strict=True):
        names = _names(records, leaf)
        for name, colour in zip(names, COLOURS, strict=False):
            rounds, values = _series(records, name)
            axis.plot(rounds, values, color=colour, lw=1.8, label=name.removesuffix(f"/{leaf}"), marker=_dot(rounds))
            worst_rounds, worst = _series(records, f"{name}_worst10")
            if worst:
                axis.plot(worst_rounds, worst, color=colour, lw=1.0, ls=":", label="its worst tenth of clients")
        axis.set_xlabel("round")
        axis.set_ylabel(leaf)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if names:
            axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylim(0, 1.02)
    axes[1].set_ylim(bottom=0)
    figure.suptitle(title, fontsize=11)
    if path is not None:
        write(path, as_file(figure, path.suffix or ".png"))
    return figure


def _names(records: list[dict[str, Any]], leaf: str) -> list[str]:
    """The headline metrics of this kind, in the order in which they were recorded."""
    seen = dict.fromkeys(name for r in records for name in r)
    return [n for n in seen if n.endswith(f"/{leaf}")]


def _series(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    pairs = [(r["round"], r[name]) for r in records if name in r]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def _dot(rounds: list[int]) -> str:
    return "o" if len(rounds) <= 2 else ""
