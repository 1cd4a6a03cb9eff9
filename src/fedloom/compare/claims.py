"""The claims of a recipe, placed in its grid."""

from __future__ import annotations

from fedloom.compare.grid import labels_named
from fedloom.compare.plan import ComparisonPlan
from fedloom.compare.table import ClaimEntry
from fedloom.report.comparison.claims import Claim
from fedloom.report.comparison.question import Place, Question


def claims_of(planned: ComparisonPlan, question: Question) -> list[Claim]:
    """The claims with the methods and the places of the grid that they are about."""
    return [_placed(planned, question, entry) for entry in planned.spec.claims]


def _placed(planned: ComparisonPlan, question: Question, entry: ClaimEntry) -> Claim:
    (method,) = labels_named(entry.algorithm, planned.methods)
    places = tuple(place for place, _ in planned.spots(entry))
    return Claim(
        says=entry.says,
        source=entry.source,
        test=entry.test,
        method=method,
        others=tuple(label for name in entry.over for label in labels_named(name, planned.methods)),
        places=places,
        paths=_paths(planned, entry.along, places) if entry.along else (),
        rises=entry.direction == "rises",
        by=entry.by,
        reported={place: question.paper[place, method] for place in places} if entry.test == "within" else {},
        metric=entry.metric,
        statistic=entry.statistic,
    )


def _paths(planned: ComparisonPlan, along: str, places: tuple[Place, ...]) -> tuple[tuple[Place, ...], ...]:
    """The places in groups that differ only along this axis, in its order."""
    at = [axis.key for axis in planned.axes].index(along)
    paths: dict[Place, list[Place]] = {}
    for place in places:
        paths.setdefault((*place[:at], *place[at + 1 :]), []).append(place)
    order = planned.axes[at].labels
    return tuple(tuple(sorted(path, key=lambda place: order.index(place[at]))) for path in paths.values())
