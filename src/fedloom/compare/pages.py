"""A recipe on a page of Markdown: measured values next to the paper's, and the verdict of every claim.

Everything is read from the recipe and its kept results; nothing is trained, and no data are needed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.compare.collect import KeptResults, coverage, missing_words, origin_words, redrawn
from fedloom.compare.plan import plan
from fedloom.compare.write import Comparison
from fedloom.core.schema import dotted
from fedloom.core.vocabulary import is_share
from fedloom.report.comparison.claims import table_lines
from fedloom.report.comparison.layout import CellPart, TableLayout
from fedloom.report.comparison.notes import marks, reasons
from fedloom.report.comparison.sheet import Block, Number, Sheet, sheet_of
from fedloom.report.comparison.sheet_text import digits
from fedloom.report.comparison.text import mean_and_spread
from fedloom.report.words import plural
from fedloom.runs.settings import read_toml

_ACROSS = 3  # columns of a paper's table side by side; each takes up to three


class RecipeReport(NamedTuple):
    """The state of one recipe."""

    name: str  # paper/recipe
    title: str
    cells: frozenset[str]  # their hashes
    there: frozenset[str]  # of those with a result, in this recipe's folder or in another's
    seeds: tuple[int, int]  # with results, and planned by the recipe
    verdicts: Mapping[str, int]
    text: str  # a section of a page; empty if no results are collected for this recipe


def report_of(recipe: Path, results: Path, link: str) -> RecipeReport:
    """The report of a recipe from the folder of all results, which ``link`` leads to from the page."""
    table, name = read_toml(recipe), f"{recipe.parent.name}/{recipe.stem}"
    own = results / name
    ran = table
    changed: list[str] = []
    if (own / "compare.toml").is_file():
        ran, changed = _as_run(table, read_toml(own / "compare.toml"))
    planned = plan(ran)
    covered = coverage(planned, results)
    counts = covered.seeds.values()
    seeds = (sum(there > 0 for there, _ in counts), len(counts))
    report = RecipeReport(name, title_of(recipe), frozenset(covered.cells), covered.kept, seeds, {}, "")
    drawn = redrawn(planned, own)
    if drawn is None:
        return report._replace(verdicts={"not run": len(table["compare"].get("claims", []))})
    kept, comparison = drawn
    verdicts = Counter(str(decided.verdict) for decided in comparison.decided)
    return report._replace(verdicts=verdicts, text=_section(kept, comparison, changed, f"{link}/{name}"))


def recipes_in(queue: Path) -> list[Path]:
    """The recipes that a list names, one on a line, from the folder of the list; ``#`` begins a comment."""
    lines = [line.partition("#")[0].strip() for line in queue.read_text(encoding="utf-8").splitlines()]
    return [queue.parent / line for line in lines if line]


def title_of(recipe: Path) -> str:
    """The first sentence of the comment at the top of a recipe."""
    lines = itertools.takewhile(lambda line: line.startswith("# "), recipe.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("# ").strip() for line in lines)


def _as_run(recipe: Mapping[str, Any], ran: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The recipe with the settings that its results were made with, and those that differ, in words."""
    base = {key: value for key, value in ran.items() if key != "compare"}
    a, b = dotted({key: value for key, value in recipe.items() if key != "compare"}), dotted(base)
    differ = [key for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)]
    changed = [f"`{key}` is {b.get(key, 'unset')} (recipe: {a.get(key, 'unset')})" for key in differ]
    return {**base, "compare": recipe["compare"]}, changed


# -- the section -----------------------------------------------------------------------------------
def _section(kept: KeptResults, comparison: Comparison, changed: Sequence[str], link: str) -> str:
    question, spec = comparison.question, kept.planned.spec
    facts = [*(missing_words(kept) or [f"All {kept.cells} cells are finished."]), *origin_words(kept)]
    reduced = [*(f"{change}." for change in changed), *_fewer_seeds(kept, comparison), *spec.reductions]
    facts += [f"Reduced: {sentence}" for sentence in reduced]
    sheet = comparison.sheet or _plain_sheet(comparison)
    picture = "layout" if comparison.sheet is not None else "curves"
    shown = {number for n in _numbers(sheet) for number in n.caveats}
    notes = [*reasons(sheet.caveats, shown), *sheet.about_gain, *spec.notes]
    parts = [
        "\n".join(f"- {fact}" for fact in facts),
        *_tables(sheet),
        f"![{picture}]({link}/{picture}.png)",
        *([_claims(comparison)] if comparison.decided else []),
        "\n".join(f"- {note}" for note in notes),
        f"Metric: `{question.wanted or question.metric}`. [All numbers]({link}/table.md), [cells]({link}/cells.csv).",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _fewer_seeds(kept: KeptResults, comparison: Comparison) -> list[str]:
    """How many seeds were run where anything was, if fewer than the recipe has."""
    asked, counts = len(kept.planned.spec.seeds), {row.seeds + row.diverged for row in comparison.rows} - {0}
    some = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(max(counts, default=0))
    return [f"{some} of {asked} seeds."] if min(counts, default=0) < asked else []


def _plain_sheet(comparison: Comparison) -> Sheet:
    """Methods down and places across, for a comparison without a layout."""
    question = comparison.question
    part = CellPart(metric=question.wanted or question.metric, statistic="mean_last_10")
    layout = TableLayout.model_construct(rows="algorithm", columns=list(question.axes), cell=[part], tolerance=0.01)
    papers = {spot: [value] for spot, value in question.paper.items()}
    return sheet_of(question, layout, comparison.results, papers)


def _numbers(sheet: Sheet) -> Iterator[Number]:
    return (n for block in sheet.blocks for line in block.cells for numbers in line for n in numbers)


def _tables(sheet: Sheet) -> list[str]:
    """A table for each block and each number of a cell, if anything was measured in it."""
    out, left_out = [], 0
    for block in sheet.blocks:
        for index, part in enumerate(sheet.layout.cell):
            ran = [k for k in range(len(sheet.columns)) if any(line[k][index].value for line in block.cells)]
            left_out += len(sheet.columns) - len(ran)
            title = ", ".join(word for word in (block.title, part.name) if word)
            for some in _batched(ran, _ACROSS):
                out.append(f"**{title}**\n\n{_table(sheet, block, index, some)}")
    words = f"Without any result, and left out: {plural(left_out, 'column')}."
    return [*out, words] if left_out else out


def _batched(values: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (values[k : k + size] for k in range(0, len(values), size))


def _table(sheet: Sheet, block: Block, index: int, columns: Sequence[int]) -> str:
    """Measured value, the paper's and their difference, for these columns."""
    part = sheet.layout.cell[index]
    reported = {k for k in columns if any(line[k][index].paper is not None for line in block.cells)}
    header = [sheet.layout.rows]
    for k in columns:
        name = ", ".join(sheet.columns[k]) or "ours"
        header += [name, "paper", "difference"] if k in reported else [name]
    rows = [header, [":--", *["--:"] * (len(header) - 1)]]
    for label, line in zip(sheet.rows, block.cells, strict=True):
        words = [label]
        for k in columns:
            words += _words(part, line[k][index])[: 3 if k in reported else 1]
        rows.append(words)
    if block.gains:
        rows.append(_gain_row(sheet, block, index, columns, reported))
    return "\n".join(f"| {' | '.join(word.replace('|', chr(92) + '|') for word in row)} |" for row in rows)


def _words(part: CellPart, number: Number) -> list[str]:
    """Measured value, the paper's, and their difference."""
    value, reported = number.value, number.paper
    lost = [f"({n} {word})" for n, word in ((number.diverged, "diverged"), (number.failed, "failed")) if n]
    ours = mean_and_spread(value, lambda v: digits(part, v)) if value else "" if lost else "-"
    gap = value.mean - reported if value is not None and reported is not None else None
    return [
        " ".join([f"**{ours}**" if number.best else ours, *lost]).strip(),
        digits(part, reported) + marks(number.caveats) if reported is not None else "-",
        "-" if gap is None else f"{'+' if gap >= 0 else ''}{digits(part, gap)}",
    ]


def _gain_row(sheet: Sheet, block: Block, index: int, columns: Sequence[int], reported: set[int]) -> list[str]:
    out = [sheet.gain]
    for k in columns:
        gained = block.gains[k][index]
        shown = ["-" if share is None else f"{100 * share:+.2f}%" for share in (gained.value, gained.paper)]
        out += [*shown, ""] if k in reported else shown[:1]
    return out


def _claims(comparison: Comparison) -> str:
    lines = table_lines(comparison.question, comparison.decided)
    rows = [[f"**{verdict}**", *rest] for verdict, *rest in lines]
    table = [["verdict", "claim", "in the paper", "differences, paired by seed"], [":--"] * 4, *rows]
    scale = " in points" if is_share(comparison.question.metric) else ""
    about = f"Claims; differences{scale} with 95 % confidence intervals, positive as claimed."
    escaped = [" | ".join(word.replace("|", "\\|") for word in row) for row in table]
    return about + "\n\n" + "\n".join(f"| {row} |" for row in escaped)
