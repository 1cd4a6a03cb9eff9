"""A comparison as a plan: methods x a grid of settings x seeds, every cell parsed and checked before anything runs.

All methods of a seed share the data split, the initial model and the cohorts, since these follow from the seed alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import tomli_w

from fedloom.compare import notes
from fedloom.compare.cells import Cell, all_cells, with_one_proxy
from fedloom.compare.foreseen import unrecorded
from fedloom.compare.grid import Axis, Method, axes_of, labels_named, methods_of
from fedloom.compare.rules import Asked, faults_of, faults_of_base
from fedloom.compare.table import Compare, Statement
from fedloom.core import disk
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.schema import read
from fedloom.report.comparison.question import Place


class ComparisonPlan(NamedTuple):
    """A valid comparison."""

    base: dict[str, Any]
    spec: Compare
    methods: tuple[Method, ...]
    axes: tuple[Axis, ...]
    baseline: str
    cells: tuple[Cell, ...]
    notes: tuple[str, ...]
    budgets: Mapping[Place, float] = MappingProxyType({})  # what a method may spend at each point, once that is known

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(itertools.product(*(axis.labels for axis in self.axes)))

    @property
    def name(self) -> str:
        """The default name of a folder of this comparison."""
        first = self.cells[0].config
        plain = "-".join([*(m.kind for m in self.methods), first.kinds["data"]])
        return disk.as_name(first.basics.name or plain)[:80]

    def as_toml(self) -> str:
        """The comparison with its labels, seeds and baseline written out; running it gives the same cells."""
        given = self.spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        given["algorithms"] = [
            {"kind": m.kind, "label": m.label, **m.settings, **({"with": m.beside} if m.beside else {})}
            for m in self.methods
        ]
        given |= {"seeds": list(self.spec.seeds), "baseline": self.baseline}
        table = {name: given[name] for name in Compare.model_fields if name in given}
        return tomli_w.dumps({**self.base, "compare": table})

    def spots(self, statement: Statement) -> Iterator[tuple[Place, str]]:
        """The points of the grid and the labels of the methods that a statement is about."""
        keys = [axis.key for axis in self.axes]
        wanted = {axis.key: axis.chosen(statement.where[axis.key]) for axis in self.axes if axis.key in statement.where}
        labels = (
            labels_named(statement.algorithm, self.methods) if statement.algorithm else [m.label for m in self.methods]
        )
        for place, label in itertools.product(self.places, labels):
            if all(value in wanted.get(key, (value,)) for key, value in zip(keys, place, strict=True)):
                yield place, label


def plan(table: Mapping[str, Any]) -> ComparisonPlan:
    """The comparison that ``table`` describes, every cell parsed, or one ConfigError with everything that is wrong."""
    given = table.get("compare", {})
    base = {k: v for k, v in table.items() if k != "compare"}
    faults = faults_of_base(base)
    written = given if isinstance(given, Mapping) else {"compare": given}
    spec, wrong = read(Compare, written, "compare")
    if spec is None:
        raise ConfigError(faults + wrong)
    asked = Asked(spec, methods_of(spec.algorithms), axes_of(spec.grid))
    laid = all_cells(base, asked)
    faults += faults_of(asked)
    faults += laid.faults or unrecorded(spec, [cell.config for cell in laid.cells])
    if faults:
        raise ConfigError(faults)
    baseline = labels_named(spec.baseline, asked.methods)[0] if spec.baseline else asked.methods[0].label
    cells, about_proxy = with_one_proxy(laid.cells)
    said = laid.notes + notes.about(base, asked.axes, cells, baseline) + about_proxy
    planned = ComparisonPlan(base, spec, asked.methods, asked.axes, baseline, tuple(cells), tuple(said))
    _check_reported(planned)
    return planned


def _check_reported(planned: ComparisonPlan) -> None:
    """Refuse caveats that match no value of the paper, and claims about values that the paper does not have."""
    spec = planned.spec
    reported = {spot for paper in spec.paper for spot in planned.spots(paper)}
    compared = {
        spot
        for paper in spec.paper
        if not isinstance(paper.value, list) or spec.metric in spec.metrics
        for spot in planned.spots(paper)
    }
    idle = [k for k, caveat in enumerate(spec.caveats) if reported.isdisjoint(planned.spots(caveat))]
    faults = [Fault(f"compare.caveats.{k}", "no paper value matches this caveat") for k in idle]
    what, fix = "needs a value of the paper at each of its points", "add it to [[compare.paper]], or set where"
    within = [(k, claim) for k, claim in enumerate(spec.claims) if claim.test == "within"]
    faults += [Fault(f"compare.claims.{k}", what, fix) for k, c in within if not compared.issuperset(planned.spots(c))]
    if faults:
        raise ConfigError(faults)
