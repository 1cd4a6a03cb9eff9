"""Statistics over seeds: means, spreads, paired differences, ranks, costs and gains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from fedloom.core.metrics import Summary, rounds_to_convergence, summary_of_records
from fedloom.core.vocabulary import accuracies, bytes_exchanged, lower_is_better, matching
from fedloom.report.comparison.question import Along, Equal, Place, Question, Result

ClaimStatistic = Literal[
    "last", "best", "mean_last_10", "mean_all", "swing_last_20", "setbacks",
    "convergence", "rounds_to", "bytes_to", "seconds_to", "gradients_to",
]  # fmt: skip
# What a run spends until its metric reaches a target.
COSTS: dict[str, Along] = {
    "rounds_to": "rounds", "bytes_to": "bytes", "seconds_to": "seconds", "gradients_to": "gradients"
}  # fmt: skip
LESS_IS_BETTER = frozenset({"swing_last_20", "setbacks", "convergence", *COSTS})

_PERSONAL = "personal/*/test/accuracy"


class Mean(NamedTuple):
    """A mean over seeds and its sample standard deviation, which one seed does not have."""

    mean: float
    std: float | None


class Reached(NamedTuple):
    """The cost until the target, over the seeds that reached it."""

    cost: Mean | None
    seeds: int


class Cost(NamedTuple):
    """What the finished seeds of a method spent, from the first round to the last; bytes in MB."""

    rounds: Mean
    gradients: Mean
    bytes: Mean
    busiest: Mean


class Row(NamedTuple):
    """One line of the table."""

    place: Place
    method: str
    metric: str
    seeds: int  # that finished
    diverged: int
    failed: int
    last: Mean | None
    best: Mean | None
    tail: Mean | None  # the mean of the last ten evaluations
    rounds: Reached | None
    bytes: Reached | None
    seconds: Reached | None
    rank: int | None
    difference: Mean | None  # of the tail to the baseline's, seed by seed
    p: float | None
    paper: float | None
    spent: Cost | None = None
    evaluations: int = 0  # of the seed with the fewest, once training has begun
    validation: Mean | None = None  # by which a place of the grid is chosen
    chosen: bool = False  # whether it is the chosen one
    interval: tuple[float | None, float | None] = (None, None)  # of the difference: 95 % confidence


class Gain(NamedTuple):
    """The relative gain of a method over the best of the others at a point of the grid; None: unknown."""

    place: Place
    last: float | None
    best: float | None
    tail: float | None
    paper: float | None  # from the paper's values


def rows(question: Question, results: Sequence[Result]) -> list[Row]:
    """The table: points of the grid in order, and at each of them the methods in order."""
    return [row for place in question.places for row in _at(question, place, [r for r in results if r.place == place])]


def default_metric(methods: Iterable[str], results: Sequence[Result]) -> str:
    """The metric to compare by if none is requested; empty: no particular one.

    If one method trains personal models and all of them evaluated such models, it is their accuracy, at whatever
    moment of a round each method evaluates them.
    """
    names = [accuracies(recorded(_of(m, results))) for m in methods]
    personal = any(found and found[0].startswith("personal/") for found in names)
    shared = all(not found or any(matching(_PERSONAL, found)) for found in names)
    return _PERSONAL if personal and shared else ""


def choose_metrics(wanted: str, methods: Iterable[str], results: Sequence[Result]) -> dict[str, str]:
    """The metric of each method: the wanted one, else the first accuracy of all of them, else each one's first."""
    names = {m: accuracies(recorded(_of(m, results))) for m in methods}
    if wanted:
        return {m: recorded_as(wanted, _of(m, results)) for m in names}
    known = [found for found in names.values() if found]
    common = [n for n in (known[0] if known else []) if all(n in found for found in known)]
    return {m: common[0] if common else (found or ["global/test/accuracy"])[0] for m, found in names.items()}


def _of(method: str, results: Sequence[Result]) -> list[Result]:
    return [r for r in results if r.method == method]


def recorded_as(wanted: str, results: Sequence[Result]) -> str:
    """The first metric of these cells that matches; the name as it is if there is none."""
    return next(matching(wanted, recorded(results)), wanted)


def recorded(results: Sequence[Result]) -> list[str]:
    """Every name in the records, in order."""
    return list(dict.fromkeys(name for result in results for line in result.records for name in line))


def series(records: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """The rounds and values of one metric."""
    return [(r["round"], r[name]) for r in records if name in r]


def summary_of(result: Result, metric: str) -> Summary | None:
    """Last, best and mean of the last ten of a finished cell, once training has begun."""
    return summary_of_records(metric, result.records) if result.state == "done" else None


def evaluations(result: Result, metric: str) -> int:
    """How many evaluations of a metric there are, once training has begun."""
    return sum(round_ > 0 for round_, _ in series(result.records, metric))


def reached(result: Result, metric: str, target: float) -> dict[str, Any] | None:
    """The first evaluation at which the metric is at the target or better."""
    if result.state != "done":
        return None
    good: Callable[[float], bool] = (lambda v: v <= target) if lower_is_better(metric) else (lambda v: v >= target)
    return next((r for r in result.records if metric in r and good(r[metric])), None)


class Measured(NamedTuple):
    """One number of a run."""

    value: float
    reached: bool = True  # False: the target was not reached, and the value is that of the whole run


def claimed_number(
    result: Result, metric: str, statistic: ClaimStatistic, target: float | None = None
) -> Measured | None:
    """A statistic of a finished run, once training has begun; None: it has none.

    ``mean_all`` is the mean over all evaluations, which is better the faster a method learns. ``setbacks`` is the sum
    of all deteriorations from one evaluation to the next.
    """
    found = summary_of(result, metric)
    if found is None:
        return None
    if statistic in COSTS:
        hit = reached(result, metric, target) if target is not None else None
        return Measured(along(COSTS[statistic], hit or result.records[-1]), hit is not None)
    points = [(round_, value) for round_, value in series(result.records, metric) if round_ > 0]
    value = _over_rounds(metric, points, statistic) if statistic in _OVER_ROUNDS else getattr(found, statistic)
    return None if value is None else Measured(float(value))


_OVER_ROUNDS = ("mean_all", "swing_last_20", "setbacks", "convergence")


def _over_rounds(metric: str, points: Sequence[tuple[int, float]], statistic: ClaimStatistic) -> float | None:
    """A statistic of the whole curve; None: it has too few points."""
    values = np.array([value for _, value in points])
    if statistic == "convergence":
        return rounds_to_convergence(metric, points)
    if len(values) < 2:
        return None
    if statistic == "mean_all":
        return float(values.mean())
    if statistic == "swing_last_20":
        return float(np.abs(np.diff(values[-20:])).mean())
    moves = np.diff(values) * (1 if lower_is_better(metric) else -1)
    return float(moves[moves > 0].sum())


def mean_of(values: Sequence[float]) -> Mean | None:
    """Mean and sample standard deviation."""
    if not values:
        return None
    return Mean(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def paired_p(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The two-sided paired t-test; unknown for fewer than two pairs, 1 where nothing differs."""
    if len(ours) < 2:
        return None
    gaps = np.subtract(ours, theirs)
    if np.ptp(gaps) == 0:
        return 1.0 if gaps[0] == 0 else 0.0
    from scipy.stats import ttest_rel

    return float(ttest_rel(ours, theirs).pvalue)


def confidence_interval(gaps: Sequence[float]) -> tuple[float | None, float | None]:
    """The 95 % confidence interval of the mean by Student's t; unknown for fewer than two seeds."""
    if len(gaps) < 2:
        return None, None
    from scipy.stats import t

    mean, error = float(np.mean(gaps)), float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps))
    half = float(t.ppf(0.975, len(gaps) - 1)) * error
    return mean - half, mean + half


def _at(question: Question, place: Place, results: Sequence[Result]) -> list[Row]:
    tails = {m: _tails(question, m, results) for m in question.methods}
    plain = [_row(question, place, m, _of(m, results), tails) for m in question.methods]
    whole = [r for r in plain if r.tail is not None and r.seeds == len(question.seeds) and question.is_ranked(r.metric)]
    run = [r.seeds + r.diverged + r.failed for r in plain]
    if len(whole) == 1 and min(run) < len(question.seeds):  # the first of several, of which others are still to be run
        return plain
    sign = 1 if lower_is_better(question.metric) else -1
    order = sorted(sign * r.tail.mean for r in whole if r.tail is not None)
    ranks = {r.method: 1 + order.index(sign * r.tail.mean) for r in whole if r.tail is not None}
    return [row._replace(rank=ranks.get(row.method)) for row in plain]


def _tails(question: Question, method: str, results: Sequence[Result]) -> dict[int, float]:
    """The mean of the last ten of a method, by seed."""
    found = {r.seed: summary_of(r, question.metrics[method]) for r in results if r.method == method}
    return {seed: s.mean_last_10 for seed, s in found.items() if s is not None}


def _row(
    question: Question, place: Place, method: str, mine: Sequence[Result], tails: dict[str, dict[int, float]]
) -> Row:
    metric = question.metrics[method]
    found = [s for s in (summary_of(r, metric) for r in mine) if s is not None]
    comparable = method != question.baseline and question.is_ranked(metric)
    ours, theirs = _paired(tails[method], tails[question.baseline]) if comparable else ([], [])
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    return Row(
        place=place,
        method=method,
        metric=metric,
        seeds=len(found),
        diverged=sum(r.state == "diverged" for r in mine),
        failed=sum(r.state == "failed" for r in mine),
        last=mean_of([s.last for s in found]),
        best=mean_of([s.best for s in found]),
        tail=mean_of([s.mean_last_10 for s in found]),
        rounds=_cost(question, metric, mine, lambda r: r["round"]),
        bytes=_cost(question, metric, mine, bytes_exchanged),
        seconds=_cost(question, metric, mine, lambda r: r["time/simulated"]) if _is_timed(mine) else None,
        rank=None,
        difference=mean_of(gaps),
        p=paired_p(ours, theirs),
        paper=question.paper.get((place, method)),
        spent=_spent([r.records[-1] for r in mine if r.state == "done" and r.records]),
        evaluations=min((evaluations(r, metric) for r in mine if r.state == "done"), default=0),
        interval=confidence_interval(gaps),
    )


def _paired(ours: dict[int, float], theirs: dict[int, float]) -> tuple[list[float], list[float]]:
    """The values of the seeds that both have."""
    seeds = sorted(set(ours) & set(theirs))
    return [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]


def gains(question: Question, table: Sequence[Row]) -> list[Gain]:
    """The relative gains at each point, if requested; a method that lost a seed has none."""
    if question.gain is None:
        return []
    of, over = question.gain
    out = []
    for place in question.places:
        here = {row.method: row for row in table if row.place == place}
        whole = {m for m, r in here.items() if r.seeds == len(question.seeds) and question.is_ranked(r.metric)}
        columns = [
            {m: mean.mean for m in whole if (mean := getattr(here[m], name)) is not None}
            for name in ("last", "best", "tail")
        ]
        columns.append({m: row.paper for m, row in here.items() if row.paper is not None})
        found = [relative_gain(question.metric, c.get(of), [c[m] for m in over if m in c]) for c in columns]
        out.append(Gain(place, *found))
    return out


def relative_gain(metric: str, ours: float | None, others: Sequence[float]) -> float | None:
    """The relative gain over the best of the others; for a loss, the relative decrease."""
    lower = lower_is_better(metric)
    best = (min if lower else max)(others) if others else 0.0
    if ours is None or best <= 0:
        return None
    return 1 - ours / best if lower else ours / best - 1


def _spent(ends: Sequence[dict[str, Any]]) -> Cost | None:
    """What runs spent, by their last records."""
    columns = [[float(along(x, line)) for line in ends] for x in get_args(Equal)]
    found = [mean for mean in map(mean_of, columns) if mean is not None]
    return Cost(*found) if found else None


def _is_timed(results: Sequence[Result]) -> bool:
    """Whether all have simulated seconds; a run of devices that are too slow for a float has none."""
    return all("time/simulated" in line for r in results for line in r.records[-1:])


def _cost(
    question: Question, metric: str, mine: Sequence[Result], of: Callable[[dict[str, Any]], float]
) -> Reached | None:
    if question.target is None:
        return None
    hits = [hit for hit in (reached(r, metric, question.target) for r in mine) if hit is not None]
    return Reached(mean_of([float(of(hit)) for hit in hits]), len(hits))


_RECORDED_AS: dict[Along, str] = {"seconds": "time/simulated", "gradients": "work/gradients"}


def along(x: Along, line: dict[str, Any]) -> float:
    """The position of a record on this axis, bytes in MB."""
    if x == "bytes":
        return bytes_exchanged(line) / 1e6
    if x == "busiest":
        return float(line.get("bytes/busiest", 0)) / 1e6
    return float(line["round"] if x == "rounds" else line.get(_RECORDED_AS[x], math.nan if x == "seconds" else 0.0))
