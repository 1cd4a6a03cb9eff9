"""A comparison in the layout of a paper's table, as text; the paper's values are below the measured ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fedloom.core.vocabulary import is_share, leaf
from fedloom.report.comparison.layout import CellPart, TableLayout
from fedloom.report.comparison.notes import marks, reasons
from fedloom.report.comparison.sheet import Block, Number, Sheet
from fedloom.report.comparison.text import mean_and_spread, percent

_MARKS = {"below": "↓", "above": "↑", "": ""}


class Word(NamedTuple):
    """One printed number."""

    text: str
    best: bool = False


class Line(NamedTuple):
    """A line of a table: the words of each cell."""

    label: str
    cells: list[list[Word]]
    is_paper: bool


def lines(found: Sheet, block: Block) -> list[Line]:
    """The lines of one table; what the paper reports is below what was measured."""
    out = []
    for label, cells in zip(found.rows, block.cells, strict=True):
        out.append(Line(label, [_ours(found.layout, numbers) for numbers in cells], False))
        if any(number.paper is not None for numbers in cells for number in numbers):
            out.append(Line("paper", [_theirs(found.layout, numbers) for numbers in cells], True))
    if block.gains:
        out.append(Line(found.gain, [[Word(percent(g.value)) for g in parts] for parts in block.gains], False))
        if any(g.paper is not None for parts in block.gains for g in parts):
            words = [[Word(percent(g.paper)) for g in parts] for parts in block.gains]
            out.append(Line("paper", words, True))
    return out


def _ours(layout: TableLayout, numbers: Sequence[Number]) -> list[Word]:
    first = numbers[0]
    lost = [f"{n} {word}" for n, word in ((first.diverged, "diverged"), (first.failed, "failed")) if n]
    if not any(n.value for n in numbers):
        return [Word(lost[0].partition(" ")[2] if lost else "-")]
    words = [_word(part, n) for part, n in zip(layout.cell, numbers, strict=True)]
    return [*words[:-1], words[-1]._replace(text=f"{words[-1].text} ({', '.join(lost)})")] if lost else words


def _word(part: CellPart, number: Number) -> Word:
    if number.value is None:
        return Word("-")
    return Word(mean_and_spread(number.value, lambda v: digits(part, v)) + _MARKS[number.missed], number.best)


def _theirs(layout: TableLayout, numbers: Sequence[Number]) -> list[Word]:
    if all(n.paper is None for n in numbers):
        return [Word("-")]
    pairs = zip(layout.cell, numbers, strict=True)
    return [Word("-" if n.paper is None else digits(part, n.paper) + marks(n.caveats)) for part, n in pairs]


def digits(part: CellPart, value: float) -> str:
    """A number in a table."""
    if is_share(part.metric):
        return f"{100 * value:.2f}"
    return f"{value:.4f}" if leaf(part.metric).startswith("auc") else f"{value:.4g}"


def joined_words(words: Sequence[Word]) -> str:
    """The numbers of a cell as the papers print them."""
    return " / ".join(word.text for word in words)


def across(header: Sequence[str], found: Sequence[Line], width: int) -> list[range]:
    """Columns in groups that fit into this number of characters, each with the labels of the lines."""
    first = max(len(line.label) + 2 for line in found)
    widths = [
        max(*(len(w) for w in head.split("\n")), *(len(joined_words(line.cells[i])) for line in found))
        for i, head in enumerate(header)
    ]
    groups, start = [], 0
    for i in range(1, len(widths) + 1):
        if i == len(widths) or first + sum(w + 2 for w in widths[start : i + 1]) > width:
            groups.append(range(start, i))
            start = i
    return groups


def legend(found: Sheet) -> list[str]:
    """How to read the table."""
    cell, count = found.layout.cell, found.seeds
    spread = f"mean ± sample standard deviation over {count} seeds" if count > 1 else "of one seed"
    out = [f"{' / '.join(part.name for part in cell)}: {spread}."]
    if sum(part.statistic == "best" for part in cell) > 1:
        out.append("The best over rounds is taken of each metric by itself: they may be of different rounds.")
    for part in cell:
        names = found.metrics[part.metric]
        out.append(f"{part.label or leaf(part.metric)}: {', '.join(names)}.")
    if len(found.rows) > 1:
        out.append("Bold: the best of a column.")
    out += _about_paper(found)
    out += found.about_gain
    out += caveat_reasons(found)
    if any(n.diverged or n.failed for n in _all(found)):
        out.append("A cell that did not finish with every seed has the values of the others, and is never bold.")
    return out


def caveat_reasons(found: Sheet) -> list[str]:
    """The caveats about values of the paper in this table."""
    return reasons(found.caveats, {number for n in _all(found) for number in n.caveats})


def _about_paper(found: Sheet) -> list[str]:
    if all(n.paper is None for n in _all(found)):
        return []
    limit = f"{found.layout.tolerance:g}"
    if any(is_share(part.metric) for part in found.layout.cell):
        limit += f" ({100 * found.layout.tolerance:g} points of accuracy)"
    return [f"paper: what the paper reports; ↓ and ↑: more than {limit} below or above it."]


def _all(found: Sheet) -> Iterator[Number]:
    return (n for block in found.blocks for line in block.cells for numbers in line for n in numbers)


def markdown(found: Sheet) -> str:
    """The tables and their legend as Markdown."""
    parts = []
    header = [found.layout.rows, *(", ".join(column) for column in found.columns)]
    for block in found.blocks:
        table = [header, [":--", *["--:"] * len(found.columns)]]
        for line in lines(found, block):
            cells = [" / ".join(f"**{w.text}**" if w.best else w.text for w in words) for words in line.cells]
            table.append([f"*{line.label}*" if line.is_paper else line.label, *cells])
        parts += [f"### {block.title}\n"] if block.title else []
        escaped = [" | ".join(word.replace("|", "\\|") for word in row) for row in table]
        parts.append("\n".join(f"| {row} |" for row in escaped) + "\n")
    parts.append("\n".join(f"- {note}" for note in [*legend(found), *found.remarks]) + "\n")
    return "\n".join(parts)
