"""Contradictions in a ``[compare]`` table: one small rule for each, all checked at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedloom.compare.grid import Axis, Method, chosen_over, labels_named, names, versus, word
from fedloom.compare.table import ClaimEntry, Compare, Statement
from fedloom.core.errors import Fault, nearest
from fedloom.core.vocabulary import as_validation, leaf
from fedloom.report.comparison.statistics import COSTS
from fedloom.runs.in_memory import InMemory

# Keys of a claim that some tests need and others do not have.
_NEEDED = {"over": ("above", "order", "steadier"), "direction": ("trend",)}
_NOT_AXES = ("seed", "algorithm", "algorithm.kind", "name")


class Asked(NamedTuple):
    """A ``[compare]`` table with its methods and axes."""

    spec: Compare
    methods: tuple[Method, ...]
    axes: tuple[Axis, ...]


def faults_of_base(base: Mapping[str, Any]) -> list[Fault]:
    """Keys of the experiment that a comparison sets itself."""
    faults = []
    if "seed" in base:
        faults.append(Fault("seed", "is set by compare.seeds", f"use compare.seeds = [{base['seed']}]"))
    data = base.get("data")
    if InMemory.kind in (data, data.get("source") if isinstance(data, Mapping) else None):
        faults.append(Fault("data.source", "data from Python cannot be compared yet", "write it to an .npz file"))
    return faults


def faults_of(asked: Asked) -> list[Fault]:
    """All contradictions in the table."""
    return [fault for rule in _RULES for fault in rule(asked)]


def is_algorithm_setting(key: str) -> bool:
    """Whether a key of the grid is a setting of the algorithm."""
    return key.startswith("algorithm.")


# -- the rules -------------------------------------------------------------------------------------
def _labels(asked: Asked) -> Iterator[Fault]:
    labels = [m.label for m in asked.methods]
    for label in dict.fromkeys(labels):
        if labels.count(label) > 1:
            yield Fault("compare.algorithms", f"duplicate label '{label}'", "give each a label")


def _seeds(asked: Asked) -> Iterator[Fault]:
    seeds = asked.spec.seeds
    if len(set(seeds)) < len(seeds):
        yield Fault("compare.seeds", f"duplicate seed (got {seeds})", "name each once")


def _baseline(asked: Asked) -> Iterator[Fault]:
    if asked.spec.baseline:
        yield from _unknown_method("compare.baseline", asked.spec.baseline, asked.methods)


def _gain(asked: Asked) -> Iterator[Fault]:
    gain, methods = asked.spec.gain, asked.methods
    if gain is None:
        return
    faults = [*_unknown_method("compare.gain.of", gain.of, methods)]
    faults += [fault for name in gain.over for fault in _unknown_method("compare.gain.over", name, methods)]
    yield from faults
    if (not faults and gain.of in versus(gain, methods).over) or len(methods) == 1:
        yield Fault("compare.gain", f"needs another method than '{gain.of}' to be better than", "name others in over")


def _select(asked: Asked) -> Iterator[Fault]:
    select, keys = asked.spec.select, [axis.key for axis in asked.axes]
    if select is None:
        return
    for key in (key for key in select.over if key not in keys):
        yield Fault("compare.select.over", f"'{key}' is not an axis of the grid", nearest(key, keys))
    if not chosen_over(select, asked.axes):
        fix = "add one, such as --grid local.lr=0.03,0.1,0.3"
        yield Fault("compare.select", "there is nothing to choose from: no axis of the grid is a setting to tune", fix)
    if "/" in select.metric and "/validation/" not in select.metric:
        fix = f"{as_validation(select.metric)}, or {leaf(select.metric)}"
        yield Fault("compare.select", f"'{select.metric}' is not measured on validation rows", f"use {fix}")


def _equal_terms(asked: Asked) -> Iterator[Fault]:
    spec, methods = asked.spec, asked.methods
    given = [(key, value) for key in ("reference", "budget") if (value := getattr(spec, key))]
    if spec.equal == "rounds":
        fix = "set compare.equal to gradients, bytes or busiest"
        yield from (Fault(f"compare.{key}", f"methods have equal rounds (got {value!r})", fix) for key, value in given)
        return
    if len(given) > 1:
        yield Fault("compare.budget", "reference and budget both set how much may be spent", "keep one of them")
    if spec.reference:
        yield from _unknown_method("compare.reference", spec.reference, methods)
    sized = [m for m in methods if "rounds" in m.beside and [m.label] != labels_named(spec.reference, methods)]
    what = f"its rounds follow from compare.equal = '{spec.equal}'"
    for method in sized:
        yield Fault("compare.algorithms.with.rounds", f"{what} [in {method.label}]", "leave it out")


def _axes(asked: Asked) -> Iterator[Fault]:
    for axis in asked.axes:
        at = f"compare.grid.{axis.key}"
        if not axis.values:
            yield Fault(at, "has no values", "give it at least one, or leave the axis out")
        if len(set(axis.labels)) < len(axis.labels):
            yield Fault(at, f"two values have the same label (got {list(axis.labels)})", "give each its own")
        if axis.key in _NOT_AXES:
            yield Fault(at, "cannot be an axis", "see compare.seeds and compare.algorithms")


def _set_twice(asked: Asked) -> Iterator[Fault]:
    """Companion settings of a value of the grid or of a method that are also set elsewhere in the comparison."""
    own = {axis.key: {key for given in axis.beside for key in given} for axis in asked.axes}
    own["algorithms"] = {key for method in asked.methods for key in method.beside}
    for name, keys in own.items():
        at = "compare.algorithms" if name == "algorithms" else f"compare.grid.{name}"
        others = {*own, *(k for other, its in own.items() if other != name for k in its)}
        for key in sorted(keys & others):
            yield Fault(f"{at}.with.{key}", "is also set by another axis or by a method", "set it in one place")
        for key in sorted(key for key in keys if _is_fixed(key, name)):
            yield Fault(f"{at}.with.{key}", "cannot be set here", "see compare.seeds and compare.algorithms")


def _is_fixed(key: str, name: str) -> bool:
    """Whether a setting cannot be a companion of a value of this axis, or of a method."""
    return key in ("seed", "name", "algorithm.kind") or (is_algorithm_setting(key) and name == "algorithms")


def _layout(asked: Asked) -> Iterator[Fault]:
    if asked.spec.layout is not None:
        yield from asked.spec.layout.faults(["algorithm", *(axis.key for axis in asked.axes)])


def _paper(asked: Asked) -> Iterator[Fault]:
    layout = asked.spec.layout
    for number, paper in enumerate(asked.spec.paper):
        yield from _unmatched(paper, f"compare.paper.{number}", asked)
        if isinstance(paper.value, list) and len(paper.value) != len(layout.cell if layout else ()):
            what = f"a list has one number for each metric of compare.layout.cell (got {paper.value})"
            yield Fault(f"compare.paper.{number}.value", what)


def _caveats(asked: Asked) -> Iterator[Fault]:
    metrics = asked.spec.metrics
    for number, caveat in enumerate(asked.spec.caveats):
        yield from _unmatched(caveat, f"compare.caveats.{number}", asked)
        if caveat.metric and caveat.metric not in metrics:
            what = f"no value of a paper is of '{caveat.metric}'"
            yield Fault(f"compare.caveats.{number}.metric", what, nearest(caveat.metric, metrics))


def _claims(asked: Asked) -> Iterator[Fault]:
    for number, claim in enumerate(asked.spec.claims):
        at = f"compare.claims.{number}"
        yield from _unmatched(claim, at, asked)
        yield from _unknown_method(f"{at}.algorithm", claim.algorithm, asked.methods)
        if not claim.value:
            for name in claim.over:
                yield from _unknown_method(f"{at}.over", str(name), asked.methods)
        for key, tests in _NEEDED.items():
            given = bool(getattr(claim, key))
            if given != (claim.test in tests):
                what = "has no effect" if given else "is needed"
                yield Fault(f"{at}.{key}", f"{what} with test = '{claim.test}'")
        yield from _axis_of_claim(claim, at, asked)
        yield from _statistic_of_claim(claim, at)


def _axis_of_claim(claim: ClaimEntry, at: str, asked: Asked) -> Iterator[Fault]:
    """Whether a claim names an axis, its values, or points if its test needs them."""
    walks = claim.test in ("trend", "steadier")
    if walks and bool(claim.along) == bool(claim.among):
        yield Fault(f"{at}.along", f"test = '{claim.test}' needs either along, an axis, or among, a list of points")
    if not walks and bool(claim.along) != bool(claim.value):
        yield Fault(f"{at}.along", f"with test = '{claim.test}', along and value go together", "set both, or neither")
    if claim.value and claim.test not in ("above", "best", "order"):
        yield Fault(f"{at}.value", f"has no effect with test = '{claim.test}'")
    if claim.among and not walks:
        yield Fault(f"{at}.among", f"has no effect with test = '{claim.test}'")
    if claim.along:
        yield from _along(claim, at, {axis.key: axis for axis in asked.axes})
    keys = {axis.key for axis in asked.axes}
    for where in claim.among:
        whole = claim.where | where
        yield from _unmatched(claim.model_copy(update={"where": whole}), f"{at}.among", asked)
        if set(whole) != keys or any(isinstance(value, list) for value in where.values()):
            yield Fault(f"{at}.among", f"each names one point, by all of {', '.join(sorted(keys))} (got {where})")


def _along(claim: ClaimEntry, at: str, axes: Mapping[str, Axis]) -> Iterator[Fault]:
    """The axis of a claim must be free, at least in part, and have the values that are named."""
    given = claim.where.get(claim.along, [])
    if claim.along not in axes or not isinstance(given, list):
        yield Fault(f"{at}.along", f"'{claim.along}' is not a free axis of the grid", nearest(claim.along, axes))
        return
    free = axes[claim.along].chosen(given) if given else axes[claim.along].labels
    named = [word(value) for value in (*claim.value, *(claim.over if claim.value else ()))]
    for label in (label for label in named if label not in free):
        yield Fault(f"{at}.value", f"there is no '{label}' on '{claim.along}'", nearest(label, free))


def _statistic_of_claim(claim: ClaimEntry, at: str) -> Iterator[Fault]:
    if claim.test == "within" and (claim.metric or not claim.by):
        what = "with test = 'within', 'by' is the largest distance, and the metric is that of the comparison"
        yield Fault(at, what, "set by, and no metric")
    if claim.test == "within" and claim.statistic not in ("last", "best", "mean_last_10"):
        what = f"a paper's value is not of '{claim.statistic}'"
        yield Fault(f"{at}.statistic", what, "last, best or mean_last_10")
    if (claim.target is not None) != (claim.statistic in COSTS):
        what = "has no effect" if claim.target is not None else "is needed"
        yield Fault(f"{at}.target", f"{what} with statistic = '{claim.statistic}'")


_RULES = (
    _labels,
    _seeds,
    _baseline,
    _gain,
    _select,
    _equal_terms,
    _axes,
    _set_twice,
    _layout,
    _paper,
    _caveats,
    _claims,
)


def _unknown_method(at: str, name: str, methods: Sequence[Method]) -> Iterator[Fault]:
    """The name, unless it names exactly one method."""
    if len(labels_named(name, methods)) != 1:
        yield Fault(at, f"'{name}' is not one of the methods", nearest(name, names(methods)))


def _unmatched(statement: Statement, at: str, asked: Asked) -> Iterator[Fault]:
    """A method or a point of the grid that the comparison does not have."""
    if statement.algorithm and not labels_named(statement.algorithm, asked.methods):
        fix = nearest(statement.algorithm, names(asked.methods))
        yield Fault(f"{at}.algorithm", f"there is no method '{statement.algorithm}'", fix)
    axes = {axis.key: axis for axis in asked.axes}
    for key, value in statement.where.items():
        if key not in axes:
            yield Fault(f"{at}.where.{key}", "is not an axis of the grid", nearest(key, axes))
            continue
        for label in axes[key].chosen(value):
            if label not in axes[key].labels:
                yield Fault(f"{at}.where.{key}", f"there is no '{label}'", nearest(label, axes[key].labels))
