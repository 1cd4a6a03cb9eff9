"""What a comparison came to: statistics over seeds, tables as text, CSV, Markdown and LaTeX, and curves with bands."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedloom.core import disk
from fedloom.core.metrics import Summary, lower_is_better, rounds_to_convergence, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Place = tuple[str, ...]  # one value of each axis of the grid, by its label
Along = Literal["rounds", "seconds", "bytes", "busiest", "gradients"]
Equal = Literal["rounds", "gradients", "bytes", "busiest"]
Floats = NDArray[np.float64]

_INK, _FAINT = "#2b2f36", "#e3e5e9"
# After Okabe and Ito, for readers with any kind of colour vision; the baseline is drawn in ink.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a63b8", "#7a5c45")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
_MOST_PANELS = 6
_RECORDED_AS: dict[Along, str] = {"seconds": "time/simulated", "gradients": "work/gradients"}
_X_NAMES: dict[Along, str] = {
    "rounds": "round",
    "seconds": "simulated seconds",
    "bytes": "MB sent",
    "busiest": "MB through the busiest end",
    "gradients": "gradients of a batch",
}


class Spent(NamedTuple):
    """What the privacy of one cell's clients cost."""

    data: str  # the fingerprint of the data
    unit: str  # what is hidden: client or example
    relation: str  # how neighbours differ
    epsilon: float
    delta: float
    warning: str = ""  # what must be told beside it


class Result(NamedTuple):
    """One cell: a method at a place of the grid with a seed, and what its run folder holds."""

    place: Place
    method: str
    kind: str
    seed: int
    hash: str
    state: str  # done, diverged or failed
    records: list[dict[str, Any]]
    partition: str  # the fingerprint of who has which row
    spent: Spent | None = None  # where it is private


class Doubt(NamedTuple):
    """Why some of what a paper reports cannot be, or hardly."""

    spots: frozenset[tuple[Place, str]]  # of which methods, where
    metric: str  # of which metric; "": of all
    why: str


class Versus(NamedTuple):
    """A method, and those with the best of which it is compared."""

    of: str
    over: tuple[str, ...]


class Question(NamedTuple):
    """What is compared, and how it is judged."""

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
    doubts: tuple[Doubt, ...] = ()
    equal: Equal = "rounds"  # what every method may spend as much of
    budgets: Mapping[Place, float] = MappingProxyType({})  # how much that is, unless it is rounds; bytes in MB
    gain: Versus | None = None  # whose relative gain is a row of the tables

    @property
    def metric(self) -> str:
        """The metric that ranks the methods."""
        return self.metrics[self.baseline]

    def is_ranked(self, metric: str) -> bool:
        """Whether methods with this metric are put beside the baseline: by name, or because it was asked for."""
        return metric == self.metric or "*" in self.wanted

    def doubted(self, place: Place, method: str, metric: str) -> tuple[int, ...]:
        """The doubts, by number, that there are about this value of the paper."""
        return tuple(
            number
            for number, doubt in enumerate(self.doubts, 1)
            if (place, method) in doubt.spots and doubt.metric in ("", metric)
        )

    def title(self, place: Place) -> str:
        return ", ".join(v if "=" in v else f"{k} = {v}" for k, v in zip(self.axes, place, strict=True))


class Mean(NamedTuple):
    """A mean over seeds and its sample standard deviation, which one seed does not have."""

    mean: float
    std: float | None


class Reached(NamedTuple):
    """What it took until the target, over the seeds that reached it."""

    cost: Mean | None
    seeds: int


class Cost(NamedTuple):
    """What the finished seeds of a method took, from the first round to the last; bytes in MB."""

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


class Gain(NamedTuple):
    """How much better than the best of the others a method is at a place, as a share of that; None: unknown."""

    place: Place
    last: float | None
    best: float | None
    tail: float | None
    paper: float | None  # by what the paper reports


_PERSONAL = "personal/*/test/accuracy"


# -- statistics ------------------------------------------------------------------------------------
def rows(question: Question, results: Sequence[Result]) -> list[Row]:
    """The table: places of the grid in order, and at each of them the methods in order."""
    return [row for place in question.places for row in _at(question, place, [r for r in results if r.place == place])]


def default_metric(methods: Iterable[str], results: Sequence[Result]) -> str:
    """What methods are compared by where nobody said: where one is about personal models and all were judged by
    these, by their accuracy, whenever in a round each is judged; else nothing in particular."""
    names = [accuracies([r for r in results if r.method == m]) for m in methods]
    personal = any(found and found[0].startswith("personal/") for found in names)
    shared = all(not found or any(meant(_PERSONAL, found)) for found in names)
    return _PERSONAL if personal and shared else ""


def choose_metrics(wanted: str, methods: Iterable[str], results: Sequence[Result]) -> dict[str, str]:
    """The metric of each method: the wanted one, else the first accuracy of all of them, else each one's first."""
    names = {m: accuracies([r for r in results if r.method == m]) for m in methods}
    if wanted:
        return {m: recorded_as(wanted, [r for r in results if r.method == m]) for m in names}
    known = [found for found in names.values() if found]
    common = [n for n in (known[0] if known else []) if all(n in found for found in known)]
    return {m: common[0] if common else (found or ["global/test/accuracy"])[0] for m, found in names.items()}


def recorded_as(wanted: str, results: Sequence[Result]) -> str:
    """The first metric of these cells that is meant; the name as it is where there is none."""
    return next(meant(wanted, recorded(results)), wanted)


def recorded(results: Sequence[Result]) -> list[str]:
    """Every name in the records, in order."""
    return list(dict.fromkeys(name for result in results for line in result.records for name in line))


def meant(wanted: str, names: Iterable[str]) -> Iterator[str]:
    """The names that are meant, where a * stands for one part of a name."""
    pattern = re.compile(re.escape(wanted).replace(r"\*", "[^/]+"))
    return (name for name in names if pattern.fullmatch(name))


def accuracies(results: Sequence[Result]) -> list[str]:
    """The accuracies that were recorded, in order."""
    return [name for name in recorded(results) if name.endswith("/accuracy")]


def series(records: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """The rounds and values of one metric."""
    return [(r["round"], r[name]) for r in records if name in r]


def summary_of(result: Result, metric: str) -> Summary | None:
    """Last, best and mean of the last ten of a finished cell, once training has begun."""
    points = series(result.records, metric)
    values = [v for round_, v in points if round_ > 0] or [v for _, v in points]
    return summarise(metric, values) if values and result.state == "done" else None


def reached(result: Result, metric: str, target: float) -> dict[str, Any] | None:
    """The first evaluation at which the metric is at the target or better."""
    if result.state != "done":
        return None
    good: Callable[[float], bool] = (lambda v: v <= target) if lower_is_better(metric) else (lambda v: v >= target)
    return next((r for r in result.records if metric in r and good(r[metric])), None)


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
    try:
        from scipy.stats import ttest_rel
    except ImportError:
        return None
    return float(ttest_rel(ours, theirs).pvalue)


def _at(question: Question, place: Place, results: Sequence[Result]) -> list[Row]:
    tails = {m: _tails(question, m, results) for m in question.methods}
    plain = [_row(question, place, m, [r for r in results if r.method == m], tails) for m in question.methods]
    whole = [r for r in plain if r.tail is not None and r.seeds == len(question.seeds) and question.is_ranked(r.metric)]
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
    own, base = tails[method], tails[question.baseline]
    common = sorted(set(own) & set(base)) if method != question.baseline and question.is_ranked(metric) else []
    ours, theirs = [own[s] for s in common], [base[s] for s in common]
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
        bytes=_cost(question, metric, mine, lambda r: r.get("bytes/up", 0) + r.get("bytes/down", 0)),
        seconds=_cost(question, metric, mine, lambda r: r["time/simulated"]) if _is_timed(mine) else None,
        rank=None,
        difference=mean_of([a - b for a, b in zip(ours, theirs, strict=True)]),
        p=paired_p(ours, theirs),
        paper=question.paper.get((place, method)),
        spent=_spent([r.records[-1] for r in mine if r.state == "done" and r.records]),
    )


def gains(question: Question, table: Sequence[Row]) -> list[Gain]:
    """The relative gains at each place, where they are asked for; who did not finish with every seed has none."""
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
    """How much better than the best of the others, as a share of that; for a loss, how much less."""
    lower = lower_is_better(metric)
    best = (min if lower else max)(others) if others else 0.0
    if ours is None or best <= 0:
        return None
    return 1 - ours / best if lower else ours / best - 1


def percent(gain: float | None) -> str:
    """A relative gain as tables have it."""
    return "-" if gain is None else f"{100 * gain:+.2f}%"


def _spent(ends: Sequence[dict[str, Any]]) -> Cost | None:
    """What runs took, by their last records."""
    columns = [[float(_along(x, line)) for line in ends] for x in get_args(Equal)]
    found = [mean for mean in map(mean_of, columns) if mean is not None]
    return Cost(*found) if found else None


def _is_timed(results: Sequence[Result]) -> bool:
    """Whether all have simulated seconds; a run of devices that are slow beyond measure has none."""
    return all("time/simulated" in line for r in results for line in r.records[-1:])


def _cost(
    question: Question, metric: str, mine: Sequence[Result], of: Callable[[dict[str, Any]], float]
) -> Reached | None:
    if question.target is None:
        return None
    hits = [hit for hit in (reached(r, metric, question.target) for r in mine) if hit is not None]
    return Reached(mean_of([float(of(hit)) for hit in hits]), len(hits))


# -- the table as text -----------------------------------------------------------------------------
class Section(NamedTuple):
    """The table of one place of the grid, ready to print."""

    title: str
    header: list[str]
    lines: list[list[str]]
    best: int | None  # which line has rank 1


def is_share(metric: str) -> bool:
    """Whether a metric is shown in percent."""
    return "accuracy" in metric.rpartition("/")[2]


def sections(question: Question, table: Sequence[Row]) -> list[Section]:
    """The table as words, a section for each place of the grid."""
    columns, better = _columns(question, table), {gain.place: gain for gain in gains(question, table)}
    out = []
    for place in question.places:
        here = [row for row in table if row.place == place]
        lines = [[show(row) for _, show in columns] for row in here]
        if place in better:
            lines.append(_gain_line(question, [name for name, _ in columns], better[place]))
        best = next((i for i, row in enumerate(here) if row.rank == 1), None)
        out.append(Section(question.title(place), [name for name, _ in columns], lines, best))
    return out


def _gain_line(question: Question, header: Sequence[str], gain: Gain) -> list[str]:
    """The words of a gain below those of the methods; columns in which there can be none are empty."""
    known = {"last": gain.last, "best": gain.best, "mean of last 10": gain.tail, "paper": gain.paper}
    stems = [name.removesuffix(" (%)") for name in header[1:]]
    return [gain_label(question), *(percent(known[stem]) if stem in known else "" for stem in stems)]


def gain_label(question: Question) -> str:
    """What the row of gains is called."""
    return f"gain of {question.gain.of}" if question.gain is not None else ""


def gain_note(question: Question) -> list[str]:
    """What the row of gains says, where there is one."""
    if question.gain is None:
        return []
    return [f"{gain_label(question)}: relative to the best of {', '.join(question.gain.over)} in the same column."]


def _columns(question: Question, table: Sequence[Row]) -> list[tuple[str, Callable[[Row], str]]]:
    unit = " (%)" if is_share(question.metric) else ""
    columns: list[tuple[str, Callable[[Row], str]]] = [("algorithm", lambda r: r.method)]
    if len(set(question.metrics.values())) > 1:
        columns.append(("metric", lambda r: r.metric))
    columns += [
        (f"last{unit}", lambda r: _score(r, r.last)),
        (f"best{unit}", lambda r: _score(r, r.best)),
        (f"mean of last 10{unit}", lambda r: _score(r, r.tail)),
    ]
    if question.target is not None:
        goal = f"{100 * question.target:g}%" if unit else f"{question.target:g}"
        columns.append((f"rounds to {goal}", lambda r: _reach(r, r.rounds, lambda v: f"{v:.1f}")))
        columns.append((f"MB to {goal}", lambda r: _reach(r, r.bytes, lambda v: f"{v / 1e6:.2f}")))
        if any(row.seconds is not None for row in table):
            columns.append((f"simulated s to {goal}", lambda r: _reach(r, r.seconds, lambda v: f"{v:.1f}")))
    if question.equal != "rounds" or _costs_differ(table):
        columns.append(("rounds", lambda r: _took(r.spent and r.spent.rounds, lambda v: f"{v:,.0f}")))
        columns.append(("gradients", lambda r: _took(r.spent and r.spent.gradients, lambda v: f"{v:,.0f}")))
        columns.append(("MB", lambda r: _took(r.spent and r.spent.bytes, lambda v: f"{v:,.2f}")))
        if question.equal == "busiest":
            columns.append(("MB, busiest", lambda r: _took(r.spent and r.spent.busiest, lambda v: f"{v:,.2f}")))
    columns.append(("rank", lambda r: f"{r.rank}" if r.rank is not None else "-"))
    if len(question.methods) > 1:
        columns.append((f"vs {question.baseline}", lambda r: _gap(question, r)))
        columns.append(("p", lambda r: "-" if r.p is None else "<0.001" if r.p < 0.001 else f"{r.p:.3f}"))
    if question.paper:
        columns.append((f"paper{unit}", lambda r: _claim(question, r)))
    return columns


def _costs_differ(table: Sequence[Row]) -> bool:
    """Whether methods took other numbers of gradients or bytes, so that rounds alone do not compare them."""
    known = [row.spent for row in table if row.spent is not None]
    return any(len({getattr(spent, what).mean for spent in known}) > 1 for what in ("gradients", "bytes"))


def narrowed(section: Section, width: int) -> Section:
    """The section without the columns that are least needed, until it fits into so many characters."""
    header, lines = section.header, section.lines
    for name in ("simulated", "MB", "best", "last", "gradients", "rounds", "vs"):
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        if sum(widths) + 2 * (len(widths) - 1) <= width:
            break
        keep = [i for i, word in enumerate(header) if not word.startswith(name)]
        header, lines = [header[i] for i in keep], [[line[i] for i in keep] for line in lines]
    return section._replace(header=header, lines=lines)


def _number(metric: str, value: float) -> str:
    return f"{100 * value:.2f}" if is_share(metric) else f"{value:.4g}"


def spread(value: Mean, show: Callable[[float], str]) -> str:
    """A mean and, if known, its deviation."""
    return show(value.mean) + (f" ± {show(value.std)}" if value.std is not None else "")


def _score(row: Row, value: Mean | None) -> str:
    lost = [f"{n} {word}" for n, word in ((row.diverged, "diverged"), (row.failed, "failed")) if n]
    if value is None:
        return "diverged" if row.diverged and not row.failed else "failed" if row.failed else "-"
    return spread(value, lambda v: _number(row.metric, v)) + (f" ({', '.join(lost)})" if lost else "")


def _reach(row: Row, value: Reached | None, show: Callable[[float], str]) -> str:
    of = row.seeds + row.diverged + row.failed
    if value is None or value.cost is None or value.seeds < of:
        return f"- ({value.seeds if value else 0}/{of} seeds)"
    return spread(value.cost, show)


def _claim(question: Question, row: Row) -> str:
    if row.paper is None:
        return "-"
    return _number(row.metric, row.paper) + marks(_doubts(question, row))


def _doubts(question: Question, row: Row) -> tuple[int, ...]:
    return question.doubted(row.place, row.method, row.metric) if row.paper is not None else ()


def marks(doubts: Sequence[int]) -> str:
    """What stands at a value that is in doubt: the numbers of the reasons, which are told below the table."""
    return f" ?{','.join(map(str, doubts))}" if doubts else ""


def reasons(doubts: Sequence[Doubt], shown: Collection[int]) -> list[str]:
    """Why values are in doubt: those of these numbers."""
    return [f"?{number}: {doubt.why}" for number, doubt in enumerate(doubts, 1) if number in shown]


def _took(value: Mean | None, show: Callable[[float], str]) -> str:
    return show(value.mean) if value is not None else "-"


def _gap(question: Question, row: Row) -> str:
    if row.difference is None:
        return "baseline" if row.method == question.baseline else "-"
    value = row.difference.mean * (100 if is_share(row.metric) else 1)
    return f"{value:+.2f}" if is_share(row.metric) else f"{value:+.4g}"


def notes(question: Question, table: Sequence[Row]) -> list[str]:
    """What a reader must know to read the table rightly."""
    count = len(question.seeds)
    spread = "mean ± sample standard deviation over" if count > 1 else "values of"
    names = " / ".join(dict.fromkeys(question.metrics.values()))
    out = [f"{names}: {spread} {count} seed{'s' if count > 1 else ''}; rank by the mean of the last ten evaluations."]
    if len(question.methods) > 1:
        test = f"p: paired t-test against {question.baseline} over the seeds, two-sided, not corrected for many methods"
        weak = f"; {count} seeds are few, so a p-value says little here" if count < 10 else ""
        out.append(f"{test}{weak}." if count > 1 else "p: one seed gives none; take more seeds to tell methods apart.")
    if len(set(question.metrics.values())) > 1 and "*" in question.wanted:
        out.append("Methods are judged at different moments of a round, as the metric's name says.")
    elif len(set(question.metrics.values())) > 1:
        out.append("The methods share no accuracy: only those with the baseline's metric are ranked and tested.")
    if question.target is not None:
        out.append('Until the target: at the first evaluation that reaches it; "-" where some seeds never do.')
    if question.equal != "rounds":
        out += [_terms(question), *_off(question, table)]
    if any(row.diverged or row.failed for row in table):
        out.append("A method that did not finish with every seed is not ranked; its values are of the other seeds.")
    if question.paper:
        out.append("paper: the value that the paper reports, not one that was measured here.")
    out += gain_note(question)
    out += reasons(question.doubts, {number for row in table for number in _doubts(question, row)})
    return [*out, *question.remarks]


def composed(results: Sequence[Result]) -> list[str]:
    """What private cells have spent by themselves, and together where they read the same data.

    By basic composition: whoever sees all of them learns as much of a client, or of an example, as the sum allows. A
    cell counts once, however often it stands in the table; clients are the same only where the partition is.
    """
    private = {r.hash: (r, r.spent) for r in results if r.spent is not None}
    groups: dict[tuple[str, ...], list[tuple[Result, Spent]]] = {}
    for result, spent in private.values():
        shared = result.partition if spent.unit == "client" else ""
        groups.setdefault((spent.data, shared, spent.unit, spent.relation), []).append((result, spent))
    out = []
    for (_, _, unit, relation), cells in groups.items():
        each = ", ".join(f"{r.method} (seed {r.seed}) {s.epsilon:.4g}" for r, s in cells)
        total, delta = sum(s.epsilon for _, s in cells), sum(s.delta for _, s in cells)
        many = f"; {len(cells)} cells on the same data add up to epsilon {total:.4g} at delta {delta:.2g}"
        warning = "".join(f" ({text})" for text in dict.fromkeys(s.warning for _, s in cells) if text)
        added = many if len(cells) > 1 else f" at delta {delta:.2g}"
        out.append(f"epsilon: {each}{added}, for each {unit} ({relation.replace('_', ' ')}){warning}.")
    if len({(data, partition) for data, partition, _, _ in groups}) > len({data for data, *_ in groups}):
        out.append(
            "epsilon: other seeds share the same data out to other clients; of an example, they all tell something."
        )
    return out


_UNITS: dict[Equal, str] = {
    "rounds": "rounds",
    "gradients": "gradients of a batch",
    "bytes": "MB sent by all together",
    "busiest": "MB through the busiest end",
}


def _terms(question: Question) -> str:
    """Of what, and of how much of it, methods may spend the same."""
    ends = dict.fromkeys([min(question.budgets.values()), max(question.budgets.values())])
    amount = " to ".join(f"{v:,.0f}" if question.equal == "gradients" else f"{v:,.2f}" for v in ends)
    what = f"each method trains for as many rounds as {amount} {_UNITS[question.equal]} allow"
    return f"Equal {question.equal}: {what}; rounds, gradients and MB are what it took."


def _off(question: Question, table: Sequence[Row]) -> Iterator[str]:
    """The methods that came out further than a twentieth from what they were to spend."""
    for row in table:
        budget = question.budgets.get(row.place)
        if row.spent is None or not budget:
            continue
        took = getattr(row.spent, question.equal).mean
        if took == 0:
            yield f"{row.method} takes none of it, and has the rounds of the experiment."
        elif abs(took / budget - 1) > 0.05:
            where = f" ({question.title(row.place)})" if row.place else ""
            why = "how much it trains only training tells"
            if row.spent.rounds.mean <= 1:
                why = "one round is more than that" if took > budget else "a second round would be more than that"
            yield f"{row.method}{where} came to {took / budget:.0%} of that: {why}."


def markdown(question: Question, table: Sequence[Row]) -> str:
    """The tables and their notes as Markdown."""
    parts = []
    for section in sections(question, table):
        lines = [section.header, [":--", *["--:"] * (len(section.header) - 1)]]
        for index, words in enumerate(section.lines):
            cells = [word.replace("|", "\\|") for word in words]
            lines.append([f"**{cells[0]}**", *cells[1:]] if index == section.best else cells)
        parts += [f"### {section.title}\n"] if section.title else []
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    parts.append("\n".join(f"- {note}" for note in notes(question, table)) + "\n")
    return "\n".join(parts)


_TEX = {c: f"\\{c}" for c in "&%$#_{}"} | {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}"}
_TEX |= {"^": "\\textasciicircum{}", "±": "$\\pm$", "<": "$<$", ">": "$>$", "−": "$-$"}
_TEX |= {"↓": "$\\downarrow$", "↑": "$\\uparrow$"}


def latex(question: Question, table: Sequence[Row]) -> str:
    """One tabular, a block for each place of the grid; the best of a block is bold."""
    found = sections(question, table)
    header = found[0].header
    lines = [
        "% needs \\usepackage{booktabs}",
        *(f"% {note}" for note in notes(question, table)),
        f"\\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
        "\\toprule",
        " & ".join(tex(word) for word in header) + " \\\\",
    ]
    for section in found:
        lines.append("\\midrule")
        if section.title:
            lines.append(f"\\multicolumn{{{len(header)}}}{{l}}{{{tex(section.title)}}} \\\\")
        for index, words in enumerate(section.lines):
            cells = [tex(word) for word in words]
            if index == section.best:
                cells[0] = f"\\textbf{{{cells[0]}}}"
            lines.append(" & ".join(cells) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def tex(text: str) -> str:
    """The text for LaTeX, with what has a meaning there escaped."""
    return "".join(_TEX.get(c, c) for c in text)


# -- the table as numbers --------------------------------------------------------------------------
def as_dict(question: Question, row: Row) -> dict[str, Any]:
    """A row as plain numbers; what is unknown is None."""
    out: dict[str, Any] = dict(zip(question.axes, row.place, strict=True))
    out |= {"algorithm": row.method, "metric": row.metric}
    out |= {"seeds": row.seeds, "diverged": row.diverged, "failed": row.failed}
    for name, value in (("last", row.last), ("best", row.best), ("mean_last_10", row.tail)):
        out |= {name: value.mean if value else None, f"{name}_std": value.std if value else None}
    for name, cost in (("rounds", row.rounds), ("bytes", row.bytes), ("simulated_seconds", row.seconds)):
        of = cost.cost if cost else None
        out |= {f"{name}_to_target": of.mean if of else None, f"{name}_to_target_std": of.std if of else None}
    out["reached_target"] = row.rounds.seeds if row.rounds else None
    out["rank"] = row.rank
    gap = row.difference
    out |= {"difference": gap.mean if gap else None, "difference_std": gap.std if gap else None}
    why = " ".join(question.doubts[number - 1].why for number in _doubts(question, row))
    out |= {"p": row.p, "paper": row.paper, "doubts": why}
    scale = {"bytes": 1e6, "busiest": 1e6}  # files have bytes, people read megabytes
    spent = row.spent._asdict() if row.spent else dict.fromkeys(Cost._fields)
    return out | {f"{k}_spent": v.mean * scale.get(k, 1.0) if v else None for k, v in spent.items()}


def as_dicts(question: Question, table: Sequence[Row]) -> list[dict[str, Any]]:
    """All rows, and the gain of each place below those of its methods."""
    out, better = [], {gain.place: gain for gain in gains(question, table)}
    for place in question.places:
        here = [as_dict(question, row) for row in table if row.place == place]
        out += here
        if place in better:
            gain = better[place]
            blank = dict.fromkeys(here[0]) | dict(zip(question.axes, place, strict=True))
            what = {"algorithm": gain_label(question), "metric": f"relative gain, {question.metric}"}
            out.append(
                blank | what | {"last": gain.last, "best": gain.best, "mean_last_10": gain.tail, "paper": gain.paper}
            )
    return out


def table_csv(question: Question, table: Sequence[Row]) -> str:
    """The table with every number in a column of its own."""
    return csv_text(as_dicts(question, table))


def cells_csv(question: Question, results: Sequence[Result], folder: str) -> str:
    """One line for each cell; their run folders lie in ``folder``."""
    return csv_text([_cell(question, result, folder) for result in results])


def _cell(question: Question, result: Result, folder: str) -> dict[str, Any]:
    metric = question.metrics[result.method]
    found = summary_of(result, metric)
    hit = reached(result, metric, question.target) if question.target is not None else None
    end = result.records[-1] if result.records else {}
    out: dict[str, Any] = dict(zip(question.axes, result.place, strict=True))
    out |= {"algorithm": result.method, "kind": result.kind, "seed": result.seed, "state": result.state}
    out |= {"metric": metric, **(found._asdict() if found else dict.fromkeys(Summary._fields))}
    out |= {"rounds": end.get("round"), "bytes_up": end.get("bytes/up"), "bytes_down": end.get("bytes/down")}
    out |= {"bytes_busiest": end.get("bytes/busiest"), "gradients": end.get("work/gradients")}
    out |= {"rounds_to_target": hit["round"] if hit else None}
    points = [(round_, value) for round_, value in series(result.records, metric) if round_ > 0]
    out |= {"rounds_to_convergence": rounds_to_convergence(metric, points) if result.state == "done" else None}
    return out | {"partition_sha256": result.partition[:16], "folder": f"{folder}/{result.hash}"}


def csv_text(lines: Sequence[dict[str, Any]]) -> str:
    """A header and a line for each of ``lines``, which have the same keys."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


# -- curves ----------------------------------------------------------------------------------------
def draw(question: Question, results: Sequence[Result], path: Path) -> None:
    """A panel for each place of the grid: of each method the mean over seeds, in a band of one deviation."""
    save(lambda: _figure(question, results), path)


def save(make: Callable[[], Figure], path: Path) -> None:
    """Write a figure, whole or not at all, and the same bytes whenever it is drawn again."""
    import matplotlib

    style: dict[Any, Any] = {"svg.hashsalt": "fedloom", "text.parse_math": False, "text.color": _INK}
    style |= {"font.family": "DejaVu Sans", "font.size": 9.0}
    with matplotlib.rc_context(style):
        figure, buffer = make(), io.BytesIO()
        dated = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(buffer, format=path.suffix[1:], dpi=160, metadata=dated)
    disk.write_bytes(path, buffer.getvalue())


def band(results: Sequence[Result], metric: str, x: Along = "rounds") -> tuple[Floats, Floats, Floats]:
    """Where, mean and sample standard deviation over the finished seeds, at the rounds that all of them evaluated.

    Seconds, bytes and gradients of a round differ from seed to seed; it is drawn at their mean.
    """
    done = [r.records for r in results if r.state == "done"]
    found = [{line["round"]: (_along(x, line), line[metric]) for line in lines if metric in line} for lines in done]
    rounds = sorted(set.intersection(*(set(f) for f in found))) if found else []
    shape = (len(found), len(rounds), 2)
    values = np.array([[f[r] for r in rounds] for f in found], dtype=np.float64).reshape(shape)
    deviation = values[..., 1].std(axis=0, ddof=1) if len(found) > 1 else np.zeros(len(rounds))
    where, mean = values.mean(axis=0).T if found else np.zeros((2, 0))
    return where, mean, deviation


def _along(x: Along, line: dict[str, Any]) -> float:
    if x == "bytes":
        return float(line.get("bytes/up", 0) + line.get("bytes/down", 0)) / 1e6
    if x == "busiest":
        return float(line.get("bytes/busiest", 0)) / 1e6
    return float(line["round"] if x == "rounds" else line.get(_RECORDED_AS[x], math.nan if x == "seconds" else 0.0))


def _figure(question: Question, results: Sequence[Result]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places = question.places[:_MOST_PANELS]
    wide = min(len(places), 3)
    high = math.ceil(len(places) / wide)
    across = min(len(question.methods), 3 if wide == 1 else 5)
    lines = math.ceil(len(question.methods) / across)
    width = {1: 6.8, 2: 9.6, 3: 12.6}[wide]
    figure = Figure(figsize=(width, 3.7 * high + 0.3 * lines + 0.3), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(high, wide, squeeze=False, sharey=False).ravel()
    for index, (axes, place) in enumerate(zip(panels, places, strict=False)):
        panel(question, place, [r for r in results if r.place == place], axes)
        if index % wide == 0:
            axes.set_ylabel(_axis_name(question), color=_INK)
    for axes in panels[len(places) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=across, frameon=False, handlelength=2.4)
    hidden = len(question.places) - _MOST_PANELS
    figure.suptitle(headline(question, hidden), x=0.01, ha="left", fontsize=9.5, color=_INK)
    return figure


def headline(question: Question, hidden: int) -> str:
    """How to read the curves, and how many panels there are not."""
    count = len(question.seeds)
    text = (
        f"mean over {count} seeds ± one standard deviation; at the right, the mean of the last ten"
        if count > 1
        else f"seed {question.seeds[0]}"
    )
    return text + (f"; {hidden} more of the grid in the table" if hidden > 0 else "")


def _axis_name(question: Question) -> str:
    names = set(question.metrics.values())
    name = question.metric if len(names) == 1 else question.metric.rpartition("/")[2]
    return f"{name} (%)" if is_share(question.metric) else name


def panel(question: Question, place: Place, results: Sequence[Result], axes: Axes) -> None:
    """One method's line beside the other's, at one place of the grid."""
    scale = 100.0 if is_share(question.metric) else 1.0
    lost: list[str] = []
    ends: list[tuple[str, float]] = []
    early: list[float] = []
    for method in question.methods:
        mine, metric = [r for r in results if r.method == method], question.metrics[method]
        where, mean, deviation = band(mine, metric, question.x)
        colour, dash, width = _look(question, method)
        name = f"{method} (baseline)" if method == question.baseline else method
        marker = "o" if 0 < len(where) <= 5 else ""
        line: dict[str, Any] = {
            "color": colour,
            "ls": dash,
            "lw": width,
            "label": name,
            "zorder": 3,
            "marker": marker,
            "ms": 3,
        }
        axes.plot(where, scale * mean, **line)  # also one without a point, for the legend
        if not len(where):
            lost.append(method)
            continue
        low, high = scale * (mean - deviation), scale * (mean + deviation)
        axes.fill_between(where, low, high, color=colour, alpha=0.13, lw=0, zorder=2)
        tails = [s.mean_last_10 for s in (summary_of(r, metric) for r in mine) if s is not None]
        ends.append((colour, scale * float(np.mean(tails))))
        early.append(scale * float(mean[len(mean) // 12]))
    if question.target is not None:
        axes.axhline(scale * question.target, color="#8a9299", lw=0.9, ls=(0, (2, 2)), zorder=1)
    if lost:
        axes.annotate(
            f"not finished: {', '.join(lost)}", (0.98, 0.03), xycoords="axes fraction", ha="right", fontsize=8
        )
    _frame(axes, question.x)
    if scale == 100.0 and early:
        # The first steps from chance are the same for everybody; what matters is above them.
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(0.0, bottom, min(early) - 5), min(100.0, top))
    _mark_ends(axes, ends)
    axes.set_title(question.title(place), loc="left", fontsize=10, color=_INK)


def _mark_ends(axes: Axes, ends: Sequence[tuple[str, float]]) -> None:
    """The mean of the last ten beside the end of each line, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    heights = [min(1.0, max(0.0, (value - low) / (high - low))) for _, value in ends]
    gap, used = 0.052, 2.0
    order = sorted(range(len(ends)), key=lambda i: -ends[i][1])
    for place, index in enumerate(order):
        used = max(min(heights[index], used - gap), gap * (len(order) - 1 - place))
        colour, value = ends[index]
        text = f"{value:.1f}" if high > 2 else f"{value:.3f}"
        at = (1.012, used)
        axes.annotate(text, at, xycoords="axes fraction", va="center", color=colour, fontsize=8, annotation_clip=False)


def _look(question: Question, method: str) -> tuple[str, Any, float]:
    """Colour, dashes and width of a method's line, the same in every panel."""
    if method == question.baseline:
        return _INK, "-", 2.0
    index = [m for m in question.methods if m != question.baseline].index(method)
    return _COLOURS[index % len(_COLOURS)], _DASHES[(index // len(_COLOURS)) % len(_DASHES)], 1.6


def _frame(axes: Axes, x: Along) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(_X_NAMES[x], color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=x == "rounds"))
    axes.grid(axis="y", color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=_INK)
    axes.margins(x=0.01)
    if x != "rounds":  # nothing lies below zero, even where a method sends nothing
        axes.set_xlim(left=0.0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c9cdd3")
