"""The claims of a recipe, placed in its grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fedloom.compare.grid import labels_named, word
from fedloom.compare.plan import ComparisonPlan
from fedloom.compare.table import ClaimEntry
from fedloom.core.vocabulary import is_share
from fedloom.report.comparison.claims import Claim
from fedloom.report.comparison.question import Place, Question


def claims_of(planned: ComparisonPlan, question: Question) -> list[Claim]:
    """The claims with the methods and the points of the grid that they are about."""
    return [_placed(planned, question, entry) for entry in planned.spec.claims]


def _placed(planned: ComparisonPlan, question: Question, entry: ClaimEntry) -> Claim:
    (method,) = labels_named(entry.algorithm, planned.methods)
    places = tuple(place for place, _ in planned.spots(entry))
    share = is_share(entry.metric or question.metrics[method])
    return Claim(
        says=entry.says,
        source=entry.source,
        test=entry.test,
        method=method,
        others=() if entry.value else tuple(m for name in entry.over for m in labels_named(name, planned.methods)),
        places=places,
        paths=_paths(planned, entry, places),
        rises=entry.direction == "rises",
        by=entry.by,
        reported={place: question.paper[place, method] for place in places} if entry.test == "within" else {},
        metric=entry.metric,
        statistic=entry.statistic,
        target=entry.target / 100 if entry.target is not None and share and entry.target > 1.5 else entry.target,
        pairs=tuple(_pairs(planned, entry, places)) if entry.value else (),
    )


def _paths(planned: ComparisonPlan, entry: ClaimEntry, places: tuple[Place, ...]) -> tuple[tuple[Place, ...], ...]:
    """The points in groups that differ only along the axis, in its order; or the named points."""
    if entry.among:
        named = [entry.model_copy(update={"where": entry.where | where, "among": []}) for where in entry.among]
        return (tuple(place for each in named for place, _ in planned.spots(each)),)
    if not entry.along:
        return ()
    at = [axis.key for axis in planned.axes].index(entry.along)
    paths: dict[Place, list[Place]] = {}
    for place in places:
        paths.setdefault((*place[:at], *place[at + 1 :]), []).append(place)
    order = planned.axes[at].labels
    return tuple(tuple(sorted(path, key=lambda place: order.index(place[at]))) for path in paths.values())


def _pairs(planned: ComparisonPlan, entry: ClaimEntry, places: tuple[Place, ...]) -> Iterator[tuple[Place, Place]]:
    """The points of which the first is claimed to be better: values of one axis, at each value of the others."""
    at = [axis.key for axis in planned.axes].index(entry.along)
    for path in _paths(planned, entry, places):
        here = {place[at]: place for place in path}
        better, worse = [word(value) for value in entry.value], [word(value) for value in entry.over]
        if entry.test == "order":
            labels = list(itertools.pairwise([*better, *worse]))
        else:
            rest = worse if entry.test == "above" else [label for label in here if label not in better]
            labels = list(itertools.product(better, rest))
        yield from ((here[first], here[second]) for first, second in labels)
