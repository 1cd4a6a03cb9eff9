"""From the run folders of cells to tables and curves."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.compare.claims import claims_of
from fedloom.compare.grid import chosen_over, versus
from fedloom.compare.plan import ComparisonPlan
from fedloom.compare.read import LeftOut, read_results
from fedloom.core.errors import ConfigError, Fault, nearest
from fedloom.core.vocabulary import is_share, matching
from fedloom.report.comparison import (
    claims,
    curves,
    latex,
    numbers,
    selected,
    sheet_curves,
    sheet_latex,
    sheet_numbers,
    sheet_text,
    statistics,
)
from fedloom.report.comparison import notes as table_notes
from fedloom.report.comparison import text as text_table
from fedloom.report.comparison.claims import Decided
from fedloom.report.comparison.layout import TableLayout
from fedloom.report.comparison.question import Caveat, Place, Question, Result
from fedloom.report.comparison.selected import Selection
from fedloom.report.comparison.sheet import Sheet, sheet_of
from fedloom.report.comparison.statistics import Row
from fedloom.report.figure import PICTURES
from fedloom.runs.folder import as_json, write_text


class Comparison(NamedTuple):
    """A finished comparison."""

    folder: Path
    cells: Path  # the folder of its runs
    question: Question
    rows: list[Row]
    results: list[Result]
    failures: dict[str, str]  # by the cell's name
    sheet: Sheet | None = None  # the same in the layout of the recipe
    decided: tuple[Decided, ...] = ()  # the claims of the recipe
    selection: Selection | None = None  # what was chosen on validation rows, if requested

    def summary(self) -> dict[str, Any]:
        """The numbers of the table; the same whenever the comparison is repeated."""
        q = self.question
        terms = {"equal": q.equal, "budgets": {q.title(p) or "all": v for p, v in q.budgets.items()}}
        return (
            {
                "metric": q.metric,
                "baseline": q.baseline,
                "seeds": list(q.seeds),
                "target": q.target,
                "cells": len(self.results),
                "diverged": sum(r.state == "diverged" for r in self.results),
                "failed": sum(r.state == "failed" for r in self.results),
                "table": numbers.as_dicts(q, self.rows),
                "notes": self._notes(),
            }
            | (terms if q.equal != "rounds" else {})
            | ({"claims": claims.as_dicts(q, self.decided)} if self.decided else {})
            | (_selected(self.selection) if self.selection is not None else {})
            | ({"layout": sheet_numbers.as_dicts(self.sheet)} if self.sheet is not None else {})
        )

    def _notes(self) -> list[str]:
        """The notes of the table, and the caveats about values of the paper that only its layout has."""
        about_layout = sheet_text.caveat_reasons(self.sheet) if self.sheet is not None else []
        return list(dict.fromkeys([*table_notes.notes(self.question, self.rows), *about_layout]))

    def __repr__(self) -> str:
        return f"<Comparison in {self.folder}>\n\n{text_table.markdown(self.question, self.rows)}"

    def as_json(self) -> dict[str, Any]:
        """What ``fedloom compare --json`` prints."""
        return {"folder": str(self.folder), **self.summary(), "failures": self.failures}


def write_results(
    planned: ComparisonPlan, folder: Path, cells: Path, failures: dict[str, str], without: LeftOut
) -> Comparison:
    """Read the cells, and write tables and curves into ``folder``."""
    results, damaged = read_results(planned, cells, without)
    lacking = len({result.hash for result in results if result.state == "missing"})
    every = len({cell.hash for cell in planned.cells})
    remarks = [f"{lacking} of {every} cells were left out: {without.why}"] if lacking else []
    comparison = drawn(planned, folder, cells, results, failures | damaged, remarks)
    write_tables(planned, comparison)
    return comparison


def drawn(
    planned: ComparisonPlan,
    folder: Path,
    cells: Path,
    results: list[Result],
    failures: dict[str, str] | None = None,
    remarks: Sequence[str] = (),
) -> Comparison:
    """The tables of these results, followed by ``remarks``."""
    question = _question(planned, results, remarks)
    remarks = (*_about_other_splits(planned, results), *table_notes.about_partitions(question, results))
    question = question._replace(remarks=(*remarks, *question.remarks))
    rows = statistics.rows(question, results)
    layout, wanted = planned.spec.layout, planned.spec.select
    selection = None
    if wanted is not None:
        selection = selected.select(question, results, wanted.metric, chosen_over(wanted, planned.axes))
        question, rows = question._replace(selected_by=selection.metrics), selection.marked(rows)
    sheet = sheet_of(question, layout, results, _of_layout(planned, layout)) if layout is not None else None
    decided = tuple(claims.decide(question, results, claims_of(planned, question)))
    return Comparison(folder, cells, question, rows, results, failures or {}, sheet, decided, selection)


def _about_other_splits(planned: ComparisonPlan, results: Sequence[Result]) -> list[str]:
    """Where methods with the same settings of data and partition were given different splits: code drew them anew."""
    splits: dict[tuple[Place, int, str], dict[str, list[str]]] = {}
    for cell, result in zip(planned.cells, results, strict=True):
        config = cell.config
        settings = repr((config.data, config.partition, config.proxy, config.evaluate.validation))
        if result.partition:
            by_split = splits.setdefault((cell.place, cell.seed, settings), {})
            by_split.setdefault(result.partition, []).append(cell.method.label)
    apart = [(seed, methods) for (_, seed, _), methods in splits.items() if len(methods) > 1]
    if not apart:
        return []
    seed, methods = apart[0]
    named = " and ".join(labels[0] for labels in methods.values())
    where = f"with seed {seed}" + (f", and in {len(apart) - 1} more cases" if len(apart) > 1 else "")
    why = "its partition, or its data, draws random numbers that no seed sets: draw from the rng that it is given"
    return [f"{named} have different splits of the data {where}, so they cannot be compared; {why}"]


def _selected(selection: Selection) -> dict[str, Any]:
    """What a summary records of the choice."""
    return {
        "selected": {
            "over": list(selection.over),
            "table": selected.as_dicts(selection),
            "notes": selected.selection_notes(selection),
        }
    }


def write_tables(planned: ComparisonPlan, comparison: Comparison) -> None:
    """Write the tables and curves of a comparison into its folder."""
    folder, question, rows, results = comparison.folder, comparison.question, comparison.rows, comparison.results
    texts = {
        "table.csv": numbers.table_csv(question, rows),
        "table.md": text_table.markdown(question, rows),
        "table.tex": latex.latex(question, rows),
        "cells.csv": numbers.cells_csv(question, results, os.path.relpath(comparison.cells, folder)),
        "curves.csv": numbers.curves_csv(question, results),
        "summary.json": as_json(comparison.summary(), indent=1) + "\n",
    }
    if decided := comparison.decided:
        texts["table.md"] += "\n" + claims.markdown(question, decided)
        texts |= {"claims.csv": claims.table_csv(question, decided), "claims.tex": claims.latex(question, decided)}
    if selection := comparison.selection:
        texts["table.md"] = selected.markdown(selection) + "\n## All grid points\n\n" + texts["table.md"]
        texts |= {"selected.csv": selected.table_csv(selection), "selected.tex": selected.latex(selection)}
    if sheet := comparison.sheet:
        texts |= {"layout.csv": sheet_numbers.table_csv(sheet), "layout.md": sheet_text.markdown(sheet)}
        texts |= {"layout.tex": sheet_latex.latex(sheet)}
    for suffix in PICTURES:
        curves.draw(question, results, folder / f"curves{suffix}")
        if planned.spec.layout is not None:
            sheet_curves.draw(question, planned.spec.layout, results, folder / f"layout{suffix}")
    for name, text in texts.items():
        write_text(folder / name, text)


def _question(planned: ComparisonPlan, results: Sequence[Result], remarks: Sequence[str]) -> Question:
    spec, labels = planned.spec, tuple(m.label for m in planned.methods)
    metric = spec.metric or statistics.default_metric(labels, results)
    metrics = statistics.choose_metrics(metric, labels, results)
    recorded = statistics.recorded(results)
    if spec.metric and recorded and not any(matching(spec.metric, recorded)):
        what = f"no method recorded '{spec.metric}'"
        raise ConfigError([Fault("compare.metric", what, nearest(spec.metric, recorded))])
    share = is_share(metrics[planned.baseline])
    return Question(
        axes=tuple(axis.key for axis in planned.axes),
        places=planned.places,
        methods=labels,
        seeds=tuple(s for s in spec.seeds if any(r.seed == s and r.state != "missing" for r in results)),
        baseline=planned.baseline,
        metrics=metrics,
        target=_unit(spec.target, share) if spec.target is not None else None,
        paper=_of_metric(planned, share),
        wanted=metric,
        x=spec.x or spec.equal,
        remarks=(*table_notes.composed(results), *spec.notes, *remarks),
        caveats=tuple(Caveat(frozenset(planned.spots(d)), d.metric, d.why) for d in spec.caveats),
        equal=spec.equal,
        budgets=planned.budgets,
        gain=versus(spec.gain, planned.methods) if spec.gain is not None else None,
    )


def _unit(value: float, share: bool) -> float:
    """An accuracy above 1.5 is in percent."""
    return value / 100 if share and value > 1.5 else value


def _of_metric(planned: ComparisonPlan, share: bool) -> dict[tuple[Place, str], float]:
    """The paper's values of the metric of the comparison."""
    parts = planned.spec.layout.cell if planned.spec.layout is not None else []
    mine = next((i for i, part in enumerate(parts) if part.metric == planned.spec.metric), None)
    out = {}
    for spot, value in _placed_values(planned):
        if not isinstance(value, list):
            out[spot] = _unit(value, share)
        elif mine is not None:
            out[spot] = _unit(value[mine], share)
    return out


def _of_layout(planned: ComparisonPlan, layout: TableLayout) -> dict[tuple[Place, str], list[float | None]]:
    """The paper's values of each part of the layout's cell; a single number is of the metric of the comparison."""
    out: dict[tuple[Place, str], list[float | None]] = {}
    for spot, value in _placed_values(planned):
        each = (
            value
            if isinstance(value, list)
            else [value if part.metric == planned.spec.metric else None for part in layout.cell]
        )
        pairs = zip(layout.cell, each, strict=True)
        out[spot] = [v if v is None else _unit(v, is_share(part.metric)) for part, v in pairs]
    return out


def _placed_values(planned: ComparisonPlan) -> Iterator[tuple[tuple[Place, str], float | list[float]]]:
    """Each value of a paper, with its point of the grid and its method."""
    return ((spot, paper.value) for paper in planned.spec.paper for spot in planned.spots(paper))
