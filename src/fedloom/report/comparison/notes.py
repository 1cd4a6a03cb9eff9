"""Notes that explain the table of a comparison."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fedloom.report.comparison.question import Caveat, Equal, Place, PrivacyCost, Question, Result
from fedloom.report.comparison.statistics import Cost, Row

# What the choice by validation rows looks like: in the tables of files and of the terminal, and on the page.
STARRED, TAGGED = (
    f"validation: on rows used neither for training nor for the test; {mark} marks the choice."
    for mark in ("*", '"chosen"')
)

_ENOUGH = 20  # evaluations of a run, of which the last ten are the second half


def notes(question: Question, table: Sequence[Row]) -> list[str]:
    """Notes that explain the table."""
    out = (
        _about_statistics(question)
        + short_note([row.evaluations for row in table if row.seeds])
        + _unequally_often(question, table)
        + _about_metrics(question)
    )
    if question.selected_by:
        out.append(STARRED)
    if question.target is not None:
        out.append('Until the target: at the first evaluation that reaches it; "-" where some seeds never do.')
    if question.equal != "rounds":
        out += [_terms(question), *_off(question, table)]
    if any(row.diverged or row.failed for row in table):
        out.append(
            "A method that did not finish with every seed is not ranked; its values are those of the other seeds."
        )
    if question.paper:
        out.append("paper: the value that the paper reports, not one that was measured here.")
    out += gain_note(question)
    out += reasons(question.caveats, {number for row in table for number in caveats_about(question, row)})
    return [*out, *question.remarks]


def _about_statistics(question: Question) -> list[str]:
    count = len(question.seeds)
    spread = "mean ± sample standard deviation over" if count > 1 else "values of"
    names = " / ".join(dict.fromkeys(question.metrics.values()))
    out = [f"{names}: {spread} {count} seed{'s' if count > 1 else ''}; rank by the mean of the last ten evaluations."]
    if len(question.methods) == 1:
        return out
    if count == 1:
        return [*out, "p: not available for one seed; use more seeds to separate methods."]
    test = f"p: paired t-test against {question.baseline} over the seeds, two-sided, not corrected for many methods"
    weak = f"; {count} seeds are few, so a p-value says little here" if count < 10 else ""
    return [*out, f"{test}{weak}."]


def short_note(counts: Collection[int]) -> list[str]:
    """A note if the last ten of these numbers of evaluations are most of a run, and not only its end."""
    fewest, most = min(counts, default=_ENOUGH), max(counts, default=_ENOUGH)
    if fewest >= _ENOUGH:
        return []
    count = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    part = (
        "the whole curve" if most <= 10 else "most of the curve" if fewest > 10 else "most of the curve, or all of it"
    )
    why = f"the mean of the last ten is the mean of {part}, and favours methods that learn fast at first"
    return [f"Evaluations of a run: only {count}; {why}. More rounds, or a smaller evaluate.every, give more."]


def _unequally_often(question: Question, table: Sequence[Row]) -> list[str]:
    """A note if methods that spend the same could not be evaluated equally often."""
    if question.equal == "rounds":
        return []
    found: dict[str, None] = {}
    for place in question.places:
        here = sorted((row.evaluations, row.method) for row in table if row.place == place and row.evaluations)
        if here and here[-1][0] > 1.25 * here[0][0]:
            (fewest, one), (most, other) = here[0], here[-1]
            counts = f"{fewest} of {one}, {most} of {other}"
            why = "the last ten are at other shares of training for one than for the other, so compare 'last', too"
            found[f"Evaluations of a run: {counts}; {why}."] = None
    return list(found)


def _about_metrics(question: Question) -> list[str]:
    if len(set(question.metrics.values())) == 1:
        return []
    if "*" in question.wanted:
        return ["Methods are evaluated at different moments of a round, as the metric's name says."]
    return ["The methods share no accuracy: only those with the baseline's metric are ranked and tested."]


_UNITS: dict[Equal, str] = {
    "rounds": "rounds",
    "gradients": "gradients of a batch",
    "bytes": "MB sent by all together",
    "busiest": "MB through the busiest end",
}


def _terms(question: Question) -> str:
    """The budget that methods share, and its amount."""
    ends = dict.fromkeys([min(question.budgets.values()), max(question.budgets.values())])
    amount = " to ".join(f"{v:,.0f}" if question.equal == "gradients" else f"{v:,.2f}" for v in ends)
    what = f"each method trains for as many rounds as {amount} {_UNITS[question.equal]} allow"
    return f"Equal {question.equal}: {what}; rounds, gradients and MB are what it spent."


def _off(question: Question, table: Sequence[Row]) -> Iterator[str]:
    """The methods that missed their budget by more than a twentieth."""
    for row in table:
        budget = question.budgets.get(row.place)
        if row.spent is None or not budget:
            continue
        spent, spread = getattr(row.spent, question.equal)
        if spent == 0:
            yield f"{row.method} spends none of it, and keeps the rounds of the experiment."
        elif abs(spent / budget - 1) > 0.05:
            where = f" ({question.title(row.place)})" if row.place else ""
            why = _why_off(spent, spread, budget, row.spent)
            yield f"{row.method}{where} spent {spent / budget:.0%} of the budget: {why}."


def _why_off(amount: float, spread: float | None, budget: float, spent: Cost) -> str:
    """Why a method missed its budget: it trains for whole rounds, seeds differ, or only training shows how much."""
    rounds = spent.rounds.mean
    if amount > budget and rounds <= 1:
        return "one round already exceeds it"
    if amount < budget < amount * (1 + 1 / max(rounds, 1)):
        return "one more round would exceed it"
    if spread:
        return "rounds are counted for the first seed, and seeds differ"
    return "how much it trains is known only after training"


def composed(results: Sequence[Result]) -> list[str]:
    """What private cells have spent separately, and together if they read the same data.

    By basic composition: an observer of all of them learns as much about a client, or an example, as the sum allows. A
    cell counts once, however often it is in the table. Other seeds test on other rows of the same data; clients are the
    same only if the partition is, or if they are those of the data.
    """
    private = {r.hash: (r, r.spent) for r in results if r.spent is not None}
    groups: dict[tuple[str, ...], list[tuple[Result, PrivacyCost]]] = {}
    for result, spent in private.values():
        shared = result.partition if spent.unit == "client" and not result.natural else ""
        groups.setdefault((result.source or spent.data, shared, spent.unit, spent.relation), []).append((result, spent))
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
            "epsilon: other seeds assign the same data to other clients; all of them reveal something about an example."
        )
    return out


def about_partitions(question: Question, results: Sequence[Result]) -> list[str]:
    """The notes of partitions, once for all points of the grid with the same ones; numbers are of their first seed."""
    found: dict[Place, dict[int, tuple[str, ...]]] = {}
    for result in results:
        if result.repairs:
            found.setdefault(result.place, {}).setdefault(result.seed, result.repairs)
    groups: dict[tuple[tuple[int, tuple[str, ...]], ...], list[Place]] = {}
    for place, by_seed in found.items():
        groups.setdefault(tuple(sorted(by_seed.items())), []).append(place)
    out: dict[str, None] = {}
    for noted, places in groups.items():
        seed, repairs = noted[0]
        alike = len({each for _, each in noted}) == 1 and len(noted) == len(question.seeds)
        parts = [] if len(places) == len(question.places) else [_title_of_all(question, places)]
        parts += [] if alike else [f"numbers of seed {seed}"]
        where = f" ({'; '.join(parts)})" if parts else ""
        out |= dict.fromkeys(f"partition{where}: {note}" for note in repairs)
    return list(out)


def _title_of_all(question: Question, places: Sequence[Place]) -> str:
    """The values of the grid that these points share; their number if they share none."""
    axes = [k for k, values in enumerate(zip(*places, strict=True)) if len(set(values)) == 1]
    shared = question._replace(axes=tuple(question.axes[k] for k in axes))
    return shared.title(tuple(places[0][k] for k in axes)) or f"{len(places)} points"


def gain_label(question: Question) -> str:
    """The label of the row of gains."""
    return f"gain of {question.gain.of}" if question.gain is not None else ""


def gain_note(question: Question) -> list[str]:
    """The note on the row of gains, if there is one."""
    if question.gain is None:
        return []
    return [f"{gain_label(question)}: relative to the best of {', '.join(question.gain.over)} in the same column."]


def caveats_about(question: Question, row: Row) -> tuple[int, ...]:
    """The numbers of the caveats about the paper's value in this row."""
    return question.caveats_about(row.place, row.method, row.metric) if row.paper is not None else ()


def marks(caveats: Sequence[int]) -> str:
    """The marks at a value: the numbers of its caveats, which are below the table."""
    return f" ?{','.join(map(str, caveats))}" if caveats else ""


def reasons(caveats: Sequence[Caveat], shown: Collection[int]) -> list[str]:
    """The caveats of these numbers, for below the table."""
    return [f"?{number}: {caveat.why}" for number, caveat in enumerate(caveats, 1) if number in shown]
