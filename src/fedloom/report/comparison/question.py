"""The question of a comparison, and the results of its cells: plain values for all tables and curves."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Place = tuple[str, ...]  # one value of each axis of the grid, by its label


Along = Literal["rounds", "seconds", "bytes", "busiest", "gradients"]


Equal = Literal["rounds", "gradients", "bytes", "busiest"]


class PrivacyCost(NamedTuple):
    """The privacy cost of one cell."""

    data: str  # the fingerprint of the data
    unit: str  # what is protected: client or example
    relation: str  # how neighbours differ
    epsilon: float
    delta: float
    warning: str = ""  # to be shown with it


class Result(NamedTuple):
    """One cell: a method at a point of the grid with a seed, and the contents of its run folder."""

    place: Place
    method: str
    kind: str
    seed: int
    hash: str
    state: str  # done, diverged, failed or missing
    records: list[dict[str, Any]]
    partition: str  # the fingerprint of the partition
    spent: PrivacyCost | None = None  # if it is private
    repairs: tuple[str, ...] = ()  # the notes of its partition
    source: str = ""  # the settings of its data, if these are the same rows for every seed
    natural: bool = False  # whether its clients are those of the data, for every seed


class Caveat(NamedTuple):
    """Why values of a paper are impossible or unlikely."""

    spots: frozenset[tuple[Place, str]]  # of which methods, where
    metric: str  # of which metric; "": of all
    why: str


class Versus(NamedTuple):
    """A method, and those against the best of which it is compared."""

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
    wanted: str = ""  # the requested metric, perhaps with a *
    x: Along = "rounds"  # what curves are drawn against
    remarks: tuple[str, ...] = ()  # its author's description
    caveats: tuple[Caveat, ...] = ()
    equal: Equal = "rounds"  # the budget that all methods share
    budgets: Mapping[Place, float] = MappingProxyType({})  # how much that is, unless it is rounds; bytes in MB
    gain: Versus | None = None  # whose relative gain is a row of the tables
    selected_by: Mapping[str, str] = MappingProxyType({})  # metrics on validation rows by which places are chosen

    @property
    def metric(self) -> str:
        """The metric that ranks the methods."""
        return self.metrics[self.baseline]

    def is_ranked(self, metric: str) -> bool:
        """Whether methods with this metric are compared with the baseline: by name, or because it was requested."""
        return metric == self.metric or "*" in self.wanted

    def caveats_about(self, place: Place, method: str, metric: str) -> tuple[int, ...]:
        """The caveats about this value of the paper, by number."""
        return tuple(
            number
            for number, caveat in enumerate(self.caveats, 1)
            if (place, method) in caveat.spots and caveat.metric in ("", metric)
        )

    def title(self, place: Place) -> str:
        return ", ".join(v if "=" in v else f"{k} = {v}" for k, v in zip(self.axes, place, strict=True))
