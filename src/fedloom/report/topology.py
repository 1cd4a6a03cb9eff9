"""The picture of a network: nodes on a circle, or on a grid, and a line for every link."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.data.arrays import Ints
from fedloom.report.figure import INK, canvas, styled, suffix_of, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NODE, _LINK = "#3b6fb6", "#8a9299"
_MOST_NAMED = 60


def draw(edges: Ints, nodes: int, path: Path, *, title: str = "", directed: bool = False, rows: int = 0) -> None:
    """Write the picture of a graph as a .png, .svg or .pdf. ``rows``: of a grid, else a circle."""
    write(path, as_picture(edges, nodes, suffix_of(path), title=title, directed=directed, rows=rows))


def as_picture(
    edges: Ints, nodes: int, suffix: str = ".png", *, title: str = "", directed: bool = False, rows: int = 0
) -> bytes:
    """The same picture as a file of this kind."""
    at = places(nodes, rows)
    lines = _around(at[edges]) if rows > 1 else at[edges]
    return styled(lambda: _figure(edges, at, lines, title, directed=directed), suffix)


def table(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The names and values that describe a network, ready to print."""
    f = facts
    low, high = f["degree_min"], f["degree_max"]
    degree = f"{low}" if low == high else f"{low} to {high} (mean {f['degree_mean']:.1f})"
    kind = [
        "directed" if f["directed"] else "undirected",
        "symmetric weights" if f["symmetric"] else "weights not symmetric",
    ]
    changes = f["steps"] > 1
    when = f"after {f['window']} gossip steps" if f["window"] > 1 else "yes"
    rows = [
        ("nodes", f"{f['nodes']:,}"),
        ("links", f"{f['edges']:,}, {', '.join(kind)}"),
        ("neighbours", degree),
        ("connected", when if f["connected"] else "no"),
        ("preserves the mean", "yes" if f["preserves_mean"] else "no"),
        ("psi of one step" if changes else "psi", f"{f['psi']:.6f}"),
        ("spectral gap", f"{f['gap']:.6f}"),
    ]
    if changes:
        rows.append((f"psi over {f['steps']} steps", f"{f['psi_steps']:.6g} ({f['psi_rate']:.4f} for each)"))
    return rows


def places(nodes: int, rows: int = 0) -> Any:
    """Where each node is drawn.  ``[N, 2]``"""
    each = np.arange(nodes)
    if rows > 1:
        columns = nodes // rows
        return np.stack([each % columns, -(each // columns)], axis=1).astype(float)
    angle = math.pi / 2 - 2 * math.pi * each / max(nodes, 1)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def _around(lines: Any) -> Any:
    """Lines of a grid, those from one side to the opposite one as two stubs that point over the edge.  ``[L, 2, 2]``"""
    way = lines[:, 1] - lines[:, 0]
    length = np.linalg.norm(way, axis=1)
    far = length > 1.5
    out = 0.45 * way[far] / length[far, None]
    first, last = lines[far, 0], lines[far, 1]
    return np.concatenate([lines[~far], np.stack([first, first - out], 1), np.stack([last, last + out], 1)])


def _figure(edges: Ints, at: Any, lines: Any, title: str, *, directed: bool) -> Figure:
    from matplotlib.collections import LineCollection

    figure = canvas(5.6, 5.6)
    axes = figure.add_subplot()
    width = float(np.clip(120 / max(len(edges), 1), 0.25, 1.4))
    axes.add_collection(LineCollection(list(lines), colors=_LINK, linewidths=width, alpha=0.8, zorder=1))
    if directed and len(edges):
        start, end = at[edges[:, 0]], at[edges[:, 1]]
        tip = start + 0.62 * (end - start)  # beyond the middle, so that the two directions of a link are distinct
        way = 0.01 * (end - start) / np.linalg.norm(end - start, axis=1, keepdims=True)
        axes.quiver(*tip.T, *way.T, color=_LINK, angles="xy", scale_units="xy", scale=0.3, headwidth=9, headlength=9,
                    headaxislength=9, width=0.002, zorder=2)  # fmt: skip
    size = float(np.clip(9000 / max(len(at), 1), 12, 320))
    axes.scatter(at[:, 0], at[:, 1], s=size, color=_NODE, edgecolors="white", linewidths=0.8, zorder=3)
    if len(at) <= _MOST_NAMED:
        for node, (x, y) in enumerate(at):
            axes.text(x, y, str(node), ha="center", va="center", color="white", fontsize=8, zorder=4)
    axes.margins(0.08)
    if not np.ptp(at, axis=0).all():  # nodes in a line would give a picture without width
        middle = at.mean(0)
        axes.set(xlim=(middle[0] - 1.2, middle[0] + 1.2), ylim=(middle[1] - 1.2, middle[1] + 1.2))
    axes.set_aspect("equal")
    axes.set_axis_off()
    if title:
        axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    return figure
