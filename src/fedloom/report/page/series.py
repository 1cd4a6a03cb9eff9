"""The data of the charts: lines with bands, the rows of each class, links; plain numbers, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedloom.core.vocabulary import is_extra, is_share, leaf
from fedloom.report.comparison.statistics import along
from fedloom.report.partition import shown_clients
from fedloom.report.topology import places
from fedloom.report.view import ComparisonView, RunView, at_point, recorded_metrics, standing_for

MOST_POINTS = 400  # of one line
_MOST_LINKS = 2000
_SPREAD = ("_mean", "_std")  # in curves.csv, not in the charts
_AXES = {"round": "rounds", "bytes": "bytes", "seconds": "seconds", "gradients": "gradients"}


class Curve(NamedTuple):
    """One line of a chart: the mean over runs that differ only in their seed."""

    choice: str  # of the list of metrics
    place: str  # of the grid
    name: str
    metric: str
    runs: Sequence[RunView]
    baseline: bool = False


def of_run(run: RunView) -> list[Curve]:
    """The lines of a run: metrics of one quantity together, such as all accuracies."""
    found = []
    for metric in recorded_metrics([run]):
        place, _, end = metric.rpartition("/")
        if not end.endswith(_SPREAD):
            base = metric.removesuffix("_worst10")
            together = leaf(base) in ("accuracy", "loss") or is_extra(base)
            choice = leaf(base) if together else metric
            found.append(Curve("bytes" if place == "bytes" else choice, "", metric, metric, [run]))
    return found


def of_runs(runs: Sequence[RunView]) -> list[Curve]:
    """The lines of several runs, metric by metric."""
    names = [name for name in recorded_metrics(runs) if not name.endswith(_SPREAD)]
    names.sort(key=lambda name: -sum(name in run.last for run in runs))
    own = {run.name: standing_for([run]) for run in runs if run.records}
    found = [Curve(name, "", run.name, name, [run]) for name in names for run in runs]
    if len(set(own.values())) < 2:
        return found
    # what represents each run, together with those of the other runs that are in the same unit
    return [
        Curve(leaf(metric), "", f"{run.name} ({metric})", metric, [run])
        for run in runs
        if (metric := own.get(run.name))
    ] + found


def of_comparison(view: ComparisonView, first: str) -> list[Curve]:
    """The lines of a comparison: its own metric comes ``first``, then every other one."""
    rows = [row for row in view.summary.get("table", []) if isinstance(row, Mapping)]
    own = {str(row.get("algorithm")): str(row.get("metric")) for row in rows}
    baseline = str(view.summary.get("baseline", ""))
    names = [name for name in recorded_metrics(view.cells) if not name.endswith(_SPREAD)]
    groups: dict[tuple[str, str], list[RunView]] = {}
    for cell in view.cells:
        groups.setdefault((at_point(view.axes, cell.place), cell.method), []).append(cell)
    found = []
    for name in [first, *(name for name in names if name != first)]:
        for (place, method), cells in groups.items():
            metric = own.get(method, name) if name == first else name
            done = [cell for cell in cells if cell.state == "done"]
            found.append(Curve(name, place, method, metric, done or cells, method == baseline))
    return found


def lines_for(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Each curve as points, those without any left out."""
    return [line for line in map(_points, curves) if line["y"]]


def _points(curve: Curve) -> dict[str, Any]:
    """Mean and standard deviation at every round that was evaluated, thinned to at most ``MOST_POINTS`` points."""
    at: dict[int, list[Mapping[str, Any]]] = {}
    for run in curve.runs:
        for line in run.evaluations:
            if math.isfinite(line.get(curve.metric, math.nan)):
                at.setdefault(line["round"], []).append(line)
    most = max(map(len, at.values()), default=0)
    rounds = sorted(round_ for round_, lines in at.items() if len(lines) == most)
    if len(rounds) > MOST_POINTS:
        rounds = [rounds[k] for k in np.linspace(0, len(rounds) - 1, MOST_POINTS).round().astype(int)]
    values = [np.array([float(line[curve.metric]) for line in at[round_]]) for round_ in rounds]
    spread = [float(v.std(ddof=1)) for v in values] if most > 1 else []
    return {
        "choice": curve.choice,
        "place": curve.place,
        "name": curve.name,
        "baseline": curve.baseline,
        "runs": most,
        "share": is_share(curve.metric),
        "y": [_rounded(float(v.mean())) for v in values],
        "sd": [_rounded(v) for v in spread],
        "x": _axes([at[round_] for round_ in rounds]),
    }


def _axes(points: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, list[float]]:
    """The positions of the points on each axis; a constant axis is left out."""
    out = {}
    for name, x in _AXES.items():
        values = [_rounded(float(np.mean([along(x, dict(line)) for line in lines]))) for lines in points]  # type: ignore[arg-type]
        if name == "round" or (all(map(math.isfinite, values)) and max(values, default=0) > 0):
            out[name] = values
    return out


def _rounded(value: float) -> float:
    """Rounded to six digits: more than a screen shows."""
    return float(f"{value:.6g}") if math.isfinite(value) else value


def class_counts(run: RunView) -> dict[str, Any]:
    """How many rows of each class the clients have; of many clients, evenly spaced ones."""
    if run.counts is None or not len(run.counts):
        return {}
    labels = [str(label) for label in run.partition.get("labels", [])]
    clients = int(run.counts[:, 0].max()) + 1
    shown = {int(client): k for k, client in enumerate(shown_clients(clients))}
    classes = max(int(run.counts[:, 1].max()) + 1, len(labels))
    rows = [[0] * len(shown) for _ in range(classes)]
    for client, label, count in run.counts.tolist():
        if client in shown:
            rows[label][shown[client]] += count
    names = [line.get("name") or line["client"] for line in run.clients]
    return {
        "clients": [names[c] if c < len(names) else str(c) for c in shown],
        "labels": labels + [str(k) for k in range(len(labels), classes)],
        "rows": rows,
        "all": clients,
    }


def first_links(run: RunView) -> dict[str, Any]:
    """The network of the first round: where its nodes are drawn, and its links."""
    nodes, found = run.topology.get("nodes"), run.topology.get("first_round", [])
    pairs = [
        pair for pair in found if isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, int) for n in pair)
    ]
    if not isinstance(nodes, int) or not 0 < nodes <= _MOST_LINKS or len(pairs) > _MOST_LINKS:
        return {}
    kept = [pair for pair in pairs if all(0 <= node < nodes for node in pair)]
    at = [[_rounded(float(x)), _rounded(-float(y))] for x, y in places(nodes)]
    return {"at": at, "links": kept, "directed": bool(run.topology.get("directed"))}
