"""What a comparison asks, and the results of its cells: plain values that all tables and curves are made from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Place = tuple[str, ...]  # one value of each axis of the grid, by its label


Along = Literal["rounds", "seconds", "bytes", "busiest", "gradients"]


Equal = Literal["rounds", "gradients", "bytes", "busiest"]


class PrivacyCost(NamedTuple):
    """What the privacy of one cell's clients cost."""

    data: str  # the fingerprint of the data
    unit: str  # what is hidden: client or example
    relation: str  # how neighbours differ
    epsilon: float
    delta: float
    warning: str = ""  # to be shown beside it


class Result(NamedTuple):
    """One cell: a method at a place of the grid with a seed, and what its run folder holds."""

    place: Place
    method: str
    kind: str
    seed: int
    hash: str
    state: str  # done, diverged, failed or missing
    records: list[dict[str, Any]]
    partition: str  # the fingerprint of the partition
    spent: PrivacyCost | None = None  # if it is private


class Caveat(NamedTuple):
    """Why values of a paper are impossible or unlikely."""

    spots: frozenset[tuple[Place, str]]  # of which methods, where
    metric: str  # of which metric; "": of all
    why: str


class Versus(NamedTuple):
    """A method, and those with the best of which it is compared."""

    of: str
    over: tuple[str, ...]


class Question(NamedTuple):
    """What is compared, and by what."""

    axes: tuple[str, ...]
    places: tuple[Place, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    baseline: str
    metrics: dict[str, str]  # by method
    target: float | None
    paper: dict[tuple[Place, str], float]
    wanted: str = ""  # the metric as it was asked for, perhaps with a * in it
    x: Along = "rounds"  # what curves are drawn against
    remarks: tuple[str, ...] = ()  # what its author says of it
    caveats: tuple[Caveat, ...] = ()
    equal: Equal = "rounds"  # what every method may spend as much of
    budgets: Mapping[Place, float] = MappingProxyType({})  # how much that is, unless it is rounds; bytes in MB
    gain: Versus | None = None  # whose relative gain is a row of the tables
    selected_by: Mapping[str, str] = MappingProxyType({})  # metrics on validation rows by which places are chosen

    @property
    def metric(self) -> str:
        """The metric that ranks the methods."""
        return self.metrics[self.baseline]

    def is_ranked(self, metric: str) -> bool:
        """Whether methods with this metric are put beside the baseline: by name, or because it was asked for."""
        return metric == self.metric or "*" in self.wanted

    def caveats_about(self, place: Place, method: str, metric: str) -> tuple[int, ...]:
        """The caveats, by number, that there are about this value of the paper."""
        return tuple(
            number
            for number, caveat in enumerate(self.caveats, 1)
            if (place, method) in caveat.spots and caveat.metric in ("", metric)
        )

    def title(self, place: Place) -> str:
        return ", ".join(v if "=" in v else f"{k} = {v}" for k, v in zip(self.axes, place, strict=True))
