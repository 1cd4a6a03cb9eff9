"""What is shown of runs and comparisons: plain values, read from folders by ``runs.look`` and ``compare.look``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fedloom.core.metrics import Summary, summary_of_records
from fedloom.core.vocabulary import accuracies, is_evaluation, lower_is_better
from fedloom.data.arrays import Ints

RunStatus = Literal["done", "diverged", "failed", "missing", "unfinished"]


class RunView(NamedTuple):
    """One run, read from its folder; missing parts are empty."""

    name: str
    folder: str
    state: RunStatus
    settings: Mapping[str, Any]  # by dotted key
    records: Sequence[Mapping[str, Any]] = ()  # of metrics.jsonl
    timings: Sequence[Mapping[str, Any]] = ()
    environment: Mapping[str, Any] = {}
    partition: Mapping[str, Any] = {}
    counts: Ints | None = None  # client, class, rows
    clients: Sequence[Mapping[str, str]] = ()  # of clients.csv
    topology: Mapping[str, Any] = {}
    privacy: Mapping[str, Any] = {}
    confusion: Mapping[str, Any] = {}
    written: float | None = None  # when a growing file was last written, in seconds since 1970
    method: str = ""  # in a comparison
    place: tuple[str, ...] = ()  # in the grid of a comparison
    changed: tuple[str, ...] = ()  # files that have changed since the run wrote them
    stopped: str = ""  # how to continue it, if it has not ended and no process runs it

    @property
    def algorithm(self) -> str:
        return str(self.settings.get("algorithm.kind", "?"))

    @property
    def seed(self) -> int:
        found = self.settings.get("seed", 0)
        return found if isinstance(found, int) else 0

    @property
    def rounds(self) -> int:
        """The planned number of rounds."""
        found = self.settings.get("rounds", 0)
        return found if isinstance(found, int) else 0

    @property
    def round(self) -> int:
        """The newest round that is known."""
        ends = [line["round"] for line in (*self.records[-1:], *self.timings[-1:])]
        return max(ends, default=0)

    @property
    def evaluations(self) -> list[Mapping[str, Any]]:
        return [line for line in self.records if is_evaluation(line)]

    @property
    def last(self) -> Mapping[str, Any]:
        """The newest evaluation."""
        return (self.evaluations or [{}])[-1]

    @property
    def seconds(self) -> float:
        """How long the rounds took on this machine."""
        return sum(float(line.get(part, 0.0)) for line in self.timings for part in ("train", "evaluate", "record"))

    @property
    def seconds_left(self) -> float | None:
        """The remaining time if the other rounds are like the last twenty; a run that was stopped has none."""
        recent = self.timings[-20:]
        if self.state != "unfinished" or self.stopped or not recent:
            return None
        took = sum(float(line.get(part, 0.0)) for line in recent for part in ("train", "evaluate", "record"))
        return took / len(recent) * max(0, self.rounds - self.round)


class ComparisonView(NamedTuple):
    """A comparison: its cells, and the tables as they were last written."""

    name: str
    folder: str
    axes: tuple[str, ...]
    cells: tuple[RunView, ...]
    planned: int  # the planned number of cells
    summary: Mapping[str, Any]  # empty before the tables are first written
    layout: Mapping[str, Any] = {}  # of a paper's table, where the recipe has one
    stopped: bool = False  # it has not ended, and no process runs it


class FolderView(NamedTuple):
    """Several runs and comparisons side by side."""

    name: str
    runs: tuple[RunView, ...]
    comparisons: tuple[ComparisonView, ...]


AnyView = RunView | ComparisonView | FolderView


def runs_shown(view: AnyView) -> tuple[RunView, ...]:
    """All runs that are shown, including the cells of comparisons."""
    if isinstance(view, RunView):
        return (view,)
    if isinstance(view, ComparisonView):
        return view.cells
    return (*view.runs, *(cell for comparison in view.comparisons for cell in comparison.cells))


def changes_shown(view: AnyView) -> tuple[str, ...]:
    """A sentence for each file of these runs that has changed since the run wrote it."""
    why = "its SHA-256 differs from manifest.json"
    return tuple(
        f"{run.name}: {file} has changed since the run wrote it: {why}."
        for run in runs_shown(view)
        for file in run.changed
    )


def recorded_metrics(runs: Sequence[RunView]) -> list[str]:
    """Every metric that any of the runs recorded, in order."""
    found = dict.fromkeys(name for run in runs for line in run.evaluations for name in line)
    return [name for name in found if "/" in name]


def standing_for(runs: Sequence[RunView]) -> str:
    """The metric that represents these runs: the first accuracy that all have, else the first metric of the first."""
    each = [recorded_metrics([run]) for run in runs if run.records]
    if not each:
        return ""
    common = [name for name in each[0] if all(name in names for names in each)]
    return next(iter([*accuracies(common), *accuracies(each[0]), *common, *each[0]]), "")


def summary_of_run(run: RunView, metric: str) -> Summary | None:
    """Last, best and mean of the last ten values, once training has begun."""
    return summary_of_records(metric, run.evaluations)


class ClientScore(NamedTuple):
    """One client and the result of its model."""

    client: str
    value: float
    line: Mapping[str, str]


def ranked_clients(run: RunView) -> tuple[str, list[ClientScore]]:
    """The clients from worst to best, and by what: the first measured column that every run has."""
    column = next(
        (name for name in ("accuracy", "r2", "mae", "loss") if any(line.get(name) for line in run.clients)), ""
    )
    return column, clients_by(column, run)


def clients_by(column: str, run: RunView) -> list[ClientScore]:
    """The clients from worst to best by this column, without those that have no value in it."""
    scores = [ClientScore(client_name(line), float(line[column]), line) for line in run.clients if line.get(column)]
    return sorted(scores, key=lambda each: -each.value if lower_is_better(column) else each.value)


def client_name(line: Mapping[str, str]) -> str:
    """The name that the data gives a client, or its number."""
    return line.get("name") or line["client"]


def as_setting(value: Any) -> str:
    """A setting as it is written on the command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(as_setting(each) for each in value)}]"
    return str(value)


def at_point(axes: Sequence[str], place: Sequence[str]) -> str:
    """A point of the grid in words, such as ``partition.alpha = 0.1, local.lr = 0.05``."""
    return ", ".join(f"{axis} = {label}" for axis, label in zip(axes, place, strict=True))


def differing(runs: Sequence[RunView]) -> list[str]:
    """The settings in which runs differ, in order."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return [k for k in keys if len({as_setting(r.settings.get(k, "")) for r in runs}) > 1]
