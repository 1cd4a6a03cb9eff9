"""Claims of a paper, decided from paired differences over seeds: each holds, does not hold, or is undecided.

A difference is decided if its 95 % confidence interval over the seeds is on one side of what is claimed. One seed
decides nothing. A run that diverged or failed has no number, and the other seeds do not decide in favour of its side.
Without a seed with which both sides were run it was not run, and so was a claim that depends on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedloom.core.vocabulary import is_share, lower_is_better
from fedloom.report.comparison.latex import tex
from fedloom.report.comparison.question import Place, Question, Result
from fedloom.report.comparison.statistics import (
    COSTS,
    LESS_IS_BETTER,
    ClaimStatistic,
    Measured,
    claimed_number,
    confidence_interval,
    recorded_as,
)
from fedloom.report.tables import csv_text

Test = Literal["above", "best", "order", "within", "trend", "steadier"]
Verdict = Literal["holds", "does not hold", "undecided", "not run"]


class Claim(NamedTuple):
    """What a paper claims, and how it is tested."""

    says: str
    source: str  # where in the paper
    test: Test
    method: str
    others: tuple[str, ...]  # above, steadier: each of these; order: after the method, best first
    places: tuple[Place, ...]  # each separately
    paths: tuple[tuple[Place, ...], ...]  # of a trend, and of steadier: the places along the axis
    rises: bool  # of a trend
    by: float  # the least difference, or within: the largest
    reported: Mapping[Place, float]  # within: the paper's value
    metric: str  # empty: that of the comparison
    statistic: ClaimStatistic
    target: float | None = None  # of statistics such as rounds_to
    pairs: tuple[tuple[Place, Place], ...] = ()  # points of which the first must be better, instead of methods


class Difference(NamedTuple):
    """One difference that a claim depends on."""

    what: str
    mean: float | None  # None: no seed has it
    low: float | None  # end of the interval; None: fewer than two seeds
    high: float | None
    seeds: int
    verdict: Verdict
    lost: int = 0  # further seeds, without a number on one side: a run diverged or failed


class Decided(NamedTuple):
    """A claim with its verdict, and the differences that decide."""

    claim: Claim
    verdict: Verdict
    differences: tuple[Difference, ...]


Values = Mapping[int, Measured | None]  # by seed; None: the run ended without this number


def decide(question: Question, results: Sequence[Result], claims: Sequence[Claim]) -> list[Decided]:
    """The verdict of each claim: it holds if all of its differences do, and does not if one of them does not."""
    found = [(claim, tuple(_differences(question, results, claim))) for claim in claims]
    return [Decided(claim, _together([each.verdict for each in own]), own) for claim, own in found]


def _together(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of a claim that depends on all of these."""
    weakest: tuple[Verdict, ...] = ("does not hold", "not run", "undecided")
    return next((each for each in weakest if each in verdicts), "holds" if verdicts else "undecided")


def _differences(question: Question, results: Sequence[Result], claim: Claim) -> Iterator[Difference]:
    def values(place: Place, method: str) -> Values:
        return _values(question, [r for r in results if r.place == place and r.method == method], claim, method)

    sign = -1 if claim.statistic in LESS_IS_BETTER or lower_is_better(_metric(question, claim, claim.method)) else 1
    if claim.test == "trend":
        yield from _trend(question, claim, values)
    elif claim.test == "steadier":
        yield from _steadier(claim, values)
    elif claim.test == "within":
        for place in claim.places:
            gaps = _from_paper(values(place, claim.method), claim.reported[place])
            yield _at_most(f"{claim.method} - paper{_title(question, place)}", gaps, claim.by)
    elif claim.pairs:
        for better, worse in claim.pairs:
            gaps = _gaps(values(better, claim.method), values(worse, claim.method), sign)
            yield _at_least(f"{claim.method}, {question.title(better)} - {question.title(worse)}", gaps, claim.by)
    else:
        for place, (mine, other) in itertools.product(claim.places, _pairs(question, claim)):
            gaps = _gaps(values(place, mine), values(place, other), sign)
            yield _at_least(f"{mine} - {other}{_title(question, place)}", gaps, claim.by)


def _title(question: Question, place: Place) -> str:
    return f" ({question.title(place)})" if place else ""


def _trend(question: Question, claim: Claim, values: Callable[[Place, str], Values]) -> Iterator[Difference]:
    """Whether the value rises or falls from each point of a path to the next."""
    for before, after in (pair for path in claim.paths for pair in itertools.pairwise(path)):
        gaps = _gaps(values(after, claim.method), values(before, claim.method), 1 if claim.rises else -1)
        yield _at_least(f"{claim.method}, {question.title(before)} to {question.title(after)}", gaps, claim.by)


def _steadier(claim: Claim, values: Callable[[Place, str], Values]) -> Iterator[Difference]:
    """Whether the values of the method spread less along a path than those of others."""

    def ranges(path: Sequence[Place], method: str) -> Values:
        each = [values(place, method) for place in path]
        seeds = set(each[0]).intersection(*each)
        columns = {seed: [number.value for found in each if (number := found[seed]) is not None] for seed in seeds}
        whole = {seed: len(column) == len(path) for seed, column in columns.items()}
        return {seed: Measured(max(column) - min(column)) if whole[seed] else None for seed, column in columns.items()}

    for path, other in itertools.product(claim.paths, claim.others):
        gaps = _gaps(ranges(path, claim.method), ranges(path, other), -1)
        yield _at_least(f"range of {other} - of {claim.method}, {len(path)} points", gaps, claim.by)


def _pairs(question: Question, claim: Claim) -> list[tuple[str, str]]:
    """Pairs of methods of which the first must be better."""
    if claim.test == "order":
        return list(itertools.pairwise((claim.method, *claim.others)))
    others = claim.others if claim.test == "above" else [m for m in question.methods if m != claim.method]
    return [(claim.method, other) for other in others]


def _metric(question: Question, claim: Claim, method: str) -> str:
    return claim.metric or question.metrics[method]


def _values(question: Question, own: Sequence[Result], claim: Claim, method: str) -> Values:
    metric = recorded_as(_metric(question, claim, method), own)
    ended = [r for r in own if r.state != "missing"]
    return {r.seed: claimed_number(r, metric, claim.statistic, claim.target) for r in ended}


class Gaps(NamedTuple):
    """The known differences, one for each seed, and the seeds without a number."""

    known: list[float]
    ours: int = 0  # seeds that were lost by the method that is claimed to be better
    theirs: int = 0
    lost: int = 0  # by either of them


def _gaps(ours: Values, theirs: Values, sign: int) -> Gaps | None:
    """The differences seed by seed, positive if the method is better; None: no seed has both runs.

    A run that never reached the target needs more than it spent. So its difference is a bound, which says something if
    the other run reached the target and spent no more. Otherwise nothing is known.
    """
    both = [(ours[seed], theirs[seed]) for seed in sorted(set(ours) & set(theirs))]
    found = [(a.reached, b.reached, sign * (a.value - b.value)) for a, b in both if a is not None and b is not None]
    known = [gap for mine, other, gap in found if (mine or gap <= 0) and (other or gap >= 0) and (mine or other)]
    ours_lost, theirs_lost = sum(a is None for a, _ in both), sum(b is None for _, b in both)
    return Gaps(known, ours_lost, theirs_lost, sum(None in pair for pair in both)) if both else None


def _from_paper(values: Values, reported: float) -> Gaps | None:
    """The differences from the paper's value; None: no run has ended."""
    known = [each.value - reported for each in values.values() if each is not None]
    lost = len(values) - len(known)
    return Gaps(known, lost, 0, lost) if values else None


def _at_least(what: str, gaps: Gaps | None, least: float) -> Difference:
    """Better by at least the margin; ties do not count."""

    def judged(low: float, high: float) -> Verdict:
        better = low >= least - 1e-12 if least else low > 0
        worse = high < least if least else high <= 0
        return "holds" if better else "does not hold" if worse else "undecided"

    return _difference(what, gaps, judged)


def _at_most(what: str, gaps: Gaps | None, most: float) -> Difference:
    def judged(low: float, high: float) -> Verdict:
        inside = low >= -most - 1e-12 and high <= most + 1e-12
        return "holds" if inside else "does not hold" if low > most or high < -most else "undecided"

    return _difference(what, gaps, judged)


def _difference(what: str, gaps: Gaps | None, judged: Callable[[float, float], Verdict]) -> Difference:
    """The mean of these differences, judged by its confidence interval."""
    if gaps is None:
        return Difference(what, None, None, None, 0, "not run")
    known = gaps.known
    low, high = confidence_interval(known)
    verdict: Verdict = "undecided" if low is None or high is None else judged(low, high)
    if (verdict == "holds" and gaps.ours) or (verdict == "does not hold" and gaps.theirs):
        verdict = "undecided"  # the seeds that are left do not speak for those that were lost
    return Difference(what, float(np.mean(known)) if known else None, low, high, len(known), verdict, gaps.lost)


# -- as text ---------------------------------------------------------------------------------------
_HEADER = ("verdict", "claim", "in the paper", "differences")


def table_lines(question: Question, decided: Sequence[Decided]) -> list[list[str]]:
    """A line of text for each claim, with the columns of the header."""
    return [
        [d.verdict, d.claim.says, d.claim.source, "; ".join(_shown(question, d.claim, each) for each in d.differences)]
        for d in decided
    ]


def _is_in_points(question: Question, claim: Claim) -> bool:
    """Whether differences are of shares, which are shown in points of a hundred."""
    own = claim.statistic not in (*COSTS, "convergence")
    return own and is_share(_metric(question, claim, claim.method))


def without_number(statistic: str) -> str:
    """Why a difference has no number although its runs have ended."""
    return "no run reached the target" if statistic in COSTS else "no seed has this number"


def _shown(question: Question, claim: Claim, each: Difference) -> str:
    scale = 100 if _is_in_points(question, claim) else 1
    if each.verdict == "not run":
        return f"{each.what}: not run"
    if each.mean is None:
        return f"{each.what}: {without_number(claim.statistic)}"
    shown = f"{each.what}: {scale * each.mean:+z.4g}"
    lost = f", {each.lost} lost" if each.lost else ""
    if each.low is None or each.high is None:
        return f"{shown} (one seed{lost})"
    return f"{shown} [{scale * each.low:+z.4g}, {scale * each.high:+z.4g}] over {each.seeds} seeds{lost}"


def sentences(question: Question, decided: Sequence[Decided]) -> list[str]:
    """Each claim as one line of a terminal."""
    return [
        f"{verdict}: {says}{f' ({source})' if source else ''}. {differences}"
        for verdict, says, source, differences in table_lines(question, decided)
    ]


def markdown(question: Question, decided: Sequence[Decided]) -> str:
    """The claims as a table of Markdown, with how they are decided."""
    table = [_HEADER, [":--"] * len(_HEADER), *table_lines(question, decided)]
    rows = [f"| {' | '.join(word.replace('|', chr(92) + '|') for word in line)} |" for line in table]
    about = "Differences are paired by seed, positive as claimed, with 95 % confidence intervals; accuracies in points."
    return "\n".join(["### Claims of the paper\n", *rows, "", f"- {about}", ""])


def latex(question: Question, decided: Sequence[Decided]) -> str:
    """The claims as a tabular."""
    rows = [" & ".join(tex(word) for word in line) + " \\\\" for line in (_HEADER, *table_lines(question, decided))]
    head = ["% needs \\usepackage{booktabs}", "\\begin{tabular}{lp{5cm}lp{6cm}}", "\\toprule"]
    return "\n".join([*head, rows[0], "\\midrule", *rows[1:], "\\bottomrule", "\\end{tabular}", ""])


# -- as numbers ------------------------------------------------------------------------------------
def as_dicts(question: Question, decided: Sequence[Decided]) -> list[dict[str, Any]]:
    """Every claim with its verdict and the differences that decide."""
    return [
        {
            "claim": d.claim.says,
            "source": d.claim.source,
            "test": d.claim.test,
            "verdict": d.verdict,
            "statistic": d.claim.statistic,
            "by": d.claim.by,
            "points": _is_in_points(question, d.claim),
            "differences": [each._asdict() for each in d.differences],
        }
        for d in decided
    ]


def table_csv(question: Question, decided: Sequence[Decided]) -> str:
    """A line for each difference, with its claim."""
    plain = [{k: v for k, v in d.items() if k != "differences"} for d in as_dicts(question, decided)]
    blank = Difference("", None, None, None, 0, "undecided")
    return csv_text(
        [
            line | {f"difference_{k}": v for k, v in each._asdict().items()}
            for line, d in zip(plain, decided, strict=True)
            for each in d.differences or (blank,)
        ]
    )
