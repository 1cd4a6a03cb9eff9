"""The curves of a comparison in the layout of a paper's table."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.core import disk
from fedloom.report.comparison.curves import caption, complete, panel
from fedloom.report.comparison.layout import CellPart, TableLayout
from fedloom.report.comparison.question import Question, Result
from fedloom.report.comparison.sheet import blocks_of, cell_of, values_of
from fedloom.report.comparison.statistics import recorded_as
from fedloom.report.figure import canvas, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MOST_HIGH, _MOST_WIDE = 14, 4  # panels of a picture


def draw(question: Question, layout: TableLayout, results: Sequence[Result], path: Path) -> None:
    """A line for each row of the table, a panel for each column, one below the other for metrics and blocks."""
    disk.write_bytes(path, styled(lambda: _figure(question, layout, results), path.suffix))


def _figure(question: Question, layout: TableLayout, results: Sequence[Result]) -> Figure:
    values = values_of(question)
    columns = list(itertools.product(*(values[key] for key in layout.columns)))
    stripes = list(itertools.product(blocks_of(layout, values), layout.cell))
    high, wide = min(len(stripes), _MOST_HIGH), min(len(columns), _MOST_WIDE)
    figure = canvas(1.2 + 3.8 * wide, 3.2 * high + 0.9)
    panels = figure.subplots(high, wide, squeeze=False)
    for (block, part), stripe in zip(stripes, panels, strict=False):
        found = []
        for column, axes in zip(columns, stripe, strict=False):
            where = block | dict(zip(layout.columns, column, strict=True))
            runs = {row: cell_of(question, results, where | {layout.rows: row}) for row in values[layout.rows]}
            found.append(panel(_asked(question, part, runs), (), _renamed(runs), axes))
            axes.set_title(", ".join(where.values()), loc="left", fontsize=9)
        complete(found)
        stripe[0].set_ylabel(part.name.removeprefix(f"{part.statistic} "))
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 2 * wide), frameon=False)
    hidden = len(stripes) * len(columns) - high * wide
    figure.suptitle(caption(question, results, hidden), x=0.01, ha="left", fontsize=9.5)
    return figure


def _asked(question: Question, part: CellPart, runs: Mapping[str, Sequence[Result]]) -> Question:
    """The question of one panel, which compares the rows of the table."""
    metrics = {row: recorded_as(part.metric, own) for row, own in runs.items()}
    return question._replace(
        axes=(), places=((),), methods=tuple(runs), baseline="", metrics={"": part.metric, **metrics}, target=None
    )


def _renamed(runs: Mapping[str, Sequence[Result]]) -> list[Result]:
    return [result._replace(method=row) for row, own in runs.items() for result in own]
