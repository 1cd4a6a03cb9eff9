"""``fedloom show``: finished and running runs on the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedloom.cli.console import harmless, plain_console
from fedloom.cli.options import Json, ResultFolders

if TYPE_CHECKING:
    from fedloom.report.page.content import Content, Split
    from fedloom.report.page.parts import PageTable
    from fedloom.report.view import AnyView

_MOST_COSTS = 18  # runs whose communication is listed
_ENDS = 5  # of the worst and of the best clients


def show(
    folders: ResultFolders,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves here (.png, .svg or .pdf).")] = None,
    json_: Json = False,
) -> None:
    """Show the final numbers of runs and comparisons.

    \b
    fedloom show runs/            an overview of all of them
    fedloom show first second     two runs side by side
    """
    from fedloom.compare.look import look_at
    from fedloom.report import side_by_side
    from fedloom.report.figure import suffix_of
    from fedloom.report.page.content import content_of
    from fedloom.report.view import FolderView, changes_shown

    if plot is not None:
        suffix_of(plot)
    view = look_at(folders)
    if plot is not None:
        side_by_side.draw(view, plot)
    code = 1 if changes_shown(view) else 0
    if json_:
        print(json.dumps(_as_json(view)))
        raise typer.Exit(code)
    console = plain_console()
    wide = console if console.is_terminal else plain_console(width=250)
    content = content_of(view, "en")
    _show(content._replace(splits=()) if isinstance(view, FolderView) else content, wide)
    if plot is not None:
        console.print(f"drawn in {plot}", markup=False)
    raise typer.Exit(code)


def _show(content: Content, console: Console) -> None:
    """The parts of the page that fit a terminal."""
    console.print(Text("  ".join((f"{content.kind}: {content.title}", *content.facts))), soft_wrap=True)
    for card in content.progress:
        parts = (f"{card.label}: {card.value}", card.hint)
        console.print(Text(" · ".join(filter(None, parts))), soft_wrap=True)
    for table in (*content.results, content.claims):
        if table is not None:
            _print(table, console)
    for note in content.notes:
        console.print(Text(note), style="dim", soft_wrap=True)
    for split in content.splits[:1]:
        _print(_ends(split), console)
    if content.settings_differ is not None:
        _print(content.settings_differ._replace(caption="what differs"), console)
    _print(_first(content.costs, "communication and time"), console)


def _first(costs: PageTable, caption: str) -> PageTable:
    """The first runs of very many, below which the results would be out of sight."""
    if len(costs.lines) <= _MOST_COSTS:
        return costs._replace(caption=caption)
    said = f"{caption} of {_MOST_COSTS} of {len(costs.lines):,} runs (all: fedloom report)"
    return costs._replace(lines=costs.lines[:_MOST_COSTS], caption=said)


def _ends(split: Split) -> PageTable:
    """The first and the last clients of a table, which may lack the best of very many."""
    lines, whole = split.table.lines, len(split.table.lines) == split.clients
    first, last = lines[:_ENDS], lines[_ENDS:][-_ENDS:] if whole else ()
    ends = (f"the {_ENDS} worst", f"the {_ENDS} best") if split.ranked else (f"the first {_ENDS}", f"the last {_ENDS}")
    which = " and ".join(ends if whole else ends[:1])
    by = f" with {split.method}" if split.ranked and split.method else ""
    said = f"{which} of {split.clients:,} clients{by}" if split.clients > 2 * _ENDS else "clients"
    return split.table._replace(lines=(*first, *last), caption=f"{said} ({split.label})")


def _print(table: PageTable, console: Console) -> None:
    out = Table(box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        out.add_column(Text(harmless(column.label)), justify="right" if column.numeric else "left", overflow="fold")
    for line in table.lines:
        words = [Text(harmless(f"{cell.text} ({cell.tag})" if cell.tag else cell.text)) for cell in line.cells]
        out.add_row(*words, style="bold" if line.mark == "first" else None)
    console.print(Text(f"\n{table.caption}" if table.caption else ""), style="bold", soft_wrap=True)
    console.print(out)


def _as_json(view: AnyView) -> dict[str, Any]:
    """Runs and comparisons with their summaries."""
    from fedloom.report.view import ComparisonView, RunView, recorded_metrics, summary_of_run

    def one(run: RunView) -> dict[str, Any]:
        found = {name: summary_of_run(run, name) for name in recorded_metrics([run])}
        metrics = {name: of._asdict() for name, of in found.items() if of is not None}
        about = {"name": run.name, "folder": run.folder, "state": run.state, "algorithm": run.algorithm}
        return (
            about
            | {"seed": run.seed, "round": run.round, "rounds": run.rounds, "metrics": metrics}
            | ({"changed": list(run.changed)} if run.changed else {})
        )

    if isinstance(view, RunView):
        return {"runs": [one(view)], "comparisons": []}
    comparisons = [view] if isinstance(view, ComparisonView) else view.comparisons
    runs = () if isinstance(view, ComparisonView) else view.runs
    about = [{"name": c.name, "folder": c.folder, "cells": [one(cell) for cell in c.cells]} for c in comparisons]
    return {"runs": [one(run) for run in runs], "comparisons": about}
