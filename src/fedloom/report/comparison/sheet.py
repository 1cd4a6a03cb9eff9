"""A comparison in the layout of a paper's table.

There is a block for each value of the keys that are neither rows nor columns. Each number is next to the one that
the paper reports.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from fedloom.core.vocabulary import lower_is_better
from fedloom.report.comparison.layout import CellPart, TableLayout
from fedloom.report.comparison.notes import gain_label, gain_note
from fedloom.report.comparison.question import Caveat, Place, Question, Result
from fedloom.report.comparison.statistics import Mean, mean_of, recorded_as, relative_gain, summary_of


class Number(NamedTuple):
    """One number of a cell, over seeds."""

    value: Mean | None
    seeds: int  # that finished
    diverged: int
    failed: int
    paper: float | None
    missed: Literal["", "below", "above"]  # if the difference to the paper's exceeds the tolerance
    caveats: tuple[int, ...] = ()  # about the paper's value, by number
    best: bool = False  # of its column


class Gained(NamedTuple):
    """A relative gain over the best of other rows, as a share of that; None: unknown."""

    value: float | None
    paper: float | None


class Block(NamedTuple):
    """One of the tables: what it is about, and its numbers by row, column and part."""

    where: dict[str, str]
    cells: list[list[list[Number]]]
    gains: list[list[Gained]]  # by column and part; empty if not requested

    @property
    def title(self) -> str:
        return ", ".join(f"{key} = {value}" for key, value in self.where.items())


class Sheet(NamedTuple):
    """A whole comparison in its layout."""

    layout: TableLayout
    rows: tuple[str, ...]
    columns: tuple[Place, ...]
    blocks: list[Block]
    metrics: dict[str, list[str]]  # what methods recorded under a name with a *
    seeds: int
    remarks: tuple[str, ...]
    caveats: tuple[Caveat, ...]
    gain: str = ""  # the label of the row of gains
    about_gain: tuple[str, ...] = ()  # and its note


Papers = Mapping[tuple[Place, str], Sequence[float | None]]  # of each part of the cell at a place, by method


def sheet_of(question: Question, layout: TableLayout, results: Sequence[Result], papers: Papers) -> Sheet:
    """The comparison in this layout."""
    values = values_of(question)
    columns = tuple(itertools.product(*(values[key] for key in layout.columns)))
    blocks = []
    for where in blocks_of(layout, values):
        cells = []
        for row in values[layout.rows]:
            at = [where | {layout.rows: row} | dict(zip(layout.columns, column, strict=True)) for column in columns]
            cells.append([_numbers(question, layout, results, papers, spot) for spot in at])
        blocks.append(Block(where, _with_best(layout, cells), _gains(question, layout, values[layout.rows], cells)))
    return Sheet(
        layout=layout,
        rows=values[layout.rows],
        columns=columns,
        blocks=blocks,
        metrics={part.metric: _recorded(part.metric, question, results) for part in layout.cell},
        seeds=len(question.seeds),
        remarks=question.remarks,
        caveats=question.caveats,
        gain=gain_label(question),
        about_gain=tuple(gain_note(question)) if any(block.gains for block in blocks) else (),
    )


def values_of(question: Question) -> dict[str, tuple[str, ...]]:
    """The labels of each key, in order."""
    axes = zip(question.axes, zip(*question.places, strict=True), strict=True) if question.axes else ()
    return {"algorithm": question.methods} | {key: tuple(dict.fromkeys(labels)) for key, labels in axes}


def blocks_of(layout: TableLayout, values: Mapping[str, tuple[str, ...]]) -> Iterator[dict[str, str]]:
    rest = [key for key in values if key != layout.rows and key not in layout.columns]
    return (dict(zip(rest, chosen, strict=True)) for chosen in itertools.product(*(values[key] for key in rest)))


def cell_of(question: Question, results: Sequence[Result], spot: Mapping[str, str]) -> list[Result]:
    """The runs of one cell, one for each seed."""
    place = tuple(spot[key] for key in question.axes)
    return [r for r in results if r.place == place and r.method == spot["algorithm"]]


def _numbers(
    question: Question, layout: TableLayout, results: Sequence[Result], papers: Papers, spot: Mapping[str, str]
) -> list[Number]:
    own = cell_of(question, results, spot)
    place = tuple(spot[key] for key in question.axes)
    claims = papers.get((place, spot["algorithm"]), [None] * len(layout.cell))
    return [
        _number(layout, part, own, claim)._replace(
            caveats=question.caveats_about(place, spot["algorithm"], part.metric) if claim is not None else ()
        )
        for part, claim in zip(layout.cell, claims, strict=True)
    ]


def _number(layout: TableLayout, part: CellPart, own: Sequence[Result], paper: float | None) -> Number:
    metric = recorded_as(part.metric, own)
    found = [s for s in (summary_of(r, metric) for r in own) if s is not None]
    value = mean_of([getattr(s, part.statistic) for s in found])
    gap = value.mean - paper if value is not None and paper is not None else 0.0
    far = abs(gap) > layout.tolerance + 1e-12
    return Number(
        value=value,
        seeds=len(found),
        diverged=sum(r.state == "diverged" for r in own),
        failed=sum(r.state == "failed" for r in own),
        paper=paper,
        missed=("below" if gap < 0 else "above") if far else "",
    )


def _with_best(layout: TableLayout, cells: list[list[list[Number]]]) -> list[list[list[Number]]]:
    """The same numbers, the best of each column marked; a cell that has fewer seeds than others does not compete.

    One alone is not the best while others are still to be run.
    """
    if len(cells) < 2:
        return cells
    out = [[list(numbers) for numbers in line] for line in cells]
    for column, k in itertools.product(range(len(cells[0])), range(len(layout.cell))):
        sign = -1 if lower_is_better(layout.cell[k].metric) else 1
        here = [line[column][k] for line in cells]
        scores = [float("-inf") if mean is None else sign * mean for mean in _whole(here)]
        run = [n.seeds + n.diverged + n.failed for n in here]
        competes = sum(score > float("-inf") for score in scores) > 1 or min(run) == max(run)
        for line, score in zip(out, scores, strict=True):
            line[column][k] = line[column][k]._replace(best=competes and max(scores) == score > float("-inf"))
    return out


def _whole(numbers: Sequence[Number]) -> list[float | None]:
    """The means of a column; unknown for cells with fewer seeds than others, since seeds differ."""
    most = max(n.seeds + n.diverged + n.failed for n in numbers)
    return [n.value.mean if n.value and n.seeds == most else None for n in numbers]


def _gains(
    question: Question, layout: TableLayout, rows: Sequence[str], cells: Sequence[Sequence[Sequence[Number]]]
) -> list[list[Gained]]:
    """The relative gain in each column, if methods are the rows and it is requested."""
    if question.gain is None or layout.rows != "algorithm":
        return []
    at = {row: index for index, row in enumerate(rows)}
    ours, others = at[question.gain.of], [at[method] for method in question.gain.over]

    def gained(column: int, k: int) -> Gained:
        metric, here = layout.cell[k].metric, [line[column][k] for line in cells]
        means = _whole(here)
        papers = [n.paper for n in here]
        value, paper = (
            relative_gain(metric, v[ours], [x for i in others if (x := v[i]) is not None]) for v in (means, papers)
        )
        return Gained(value, paper)

    return [[gained(column, k) for k in range(len(layout.cell))] for column in range(len(cells[0]))]


def _recorded(metric: str, question: Question, results: Sequence[Result]) -> list[str]:
    """Under which names the methods recorded this metric, where that can differ."""
    if "*" not in metric:
        return [metric]
    names = [recorded_as(metric, [r for r in results if r.method == m]) for m in question.methods]
    return list(dict.fromkeys(names))
