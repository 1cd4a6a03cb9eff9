"""A comparison in the layout of a paper's table: one key down, others across, one or more metrics in a cell.

Where neither rows nor columns say what the algorithm is, or another axis of the grid, there is a block for each.
Below each line of what was measured stands what the paper reports.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat

from fedloom.core.errors import Fault, nearest
from fedloom.core.metrics import lower_is_better
from fedloom.core.schema import Spec
from fedloom.report import comparison as report
from fedloom.report.comparison import Mean, Place, Question, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKS = {"below": "↓", "above": "↑", "": ""}
_MOST_HIGH, _MOST_WIDE = 14, 4  # panels of a picture


# -- what is asked ---------------------------------------------------------------------------------
class Part(Spec):
    """One number of a cell."""

    metric: str
    statistic: Literal["last", "best", "mean_last_10"] = "best"
    label: str = ""

    @property
    def name(self) -> str:
        what = self.label or self.metric.rpartition("/")[2]
        unit = " (%)" if report.is_share(self.metric) else ""
        return f"{self.statistic.replace('mean_last_10', 'mean of last 10')} {what}{unit}"


class Layout(Spec):
    """Which keys go down and across, and what stands in a cell; ``algorithm`` is a key, too."""

    rows: str
    columns: list[str] = Field(min_length=1)
    cell: list[Part] = Field(min_length=1)
    tolerance: NonNegativeFloat = 0.01  # of the difference to the paper, in the unit of the metric

    def faults(self, keys: Sequence[str]) -> list[Fault]:
        """What is no key of the comparison, or is there twice."""
        used = [("compare.layout.rows", self.rows), *(("compare.layout.columns", key) for key in self.columns)]
        found = [Fault(at, f"'{key}' is not an axis of the grid", nearest(key, keys)) for at, key in used]
        found = [fault for fault, (_, key) in zip(found, used, strict=True) if key not in keys]
        twice = {key for _, key in used if [k for _, k in used].count(key) > 1}
        return found + [Fault("compare.layout", f"'{key}' is there twice") for key in sorted(twice)]


# -- what was found --------------------------------------------------------------------------------
class Number(NamedTuple):
    """One number of a cell, over seeds."""

    value: Mean | None
    seeds: int  # that finished
    diverged: int
    failed: int
    paper: float | None
    missed: Literal["", "below", "above"]  # where the paper's is further away than the tolerance
    doubts: tuple[int, ...] = ()  # that there are about the paper's, by number
    best: bool = False  # of its column


class Gained(NamedTuple):
    """A relative gain over the best of other rows, as a share of that; None: unknown."""

    value: float | None
    paper: float | None


class Block(NamedTuple):
    """One of the tables: what it is about, and its numbers by row, column and part."""

    where: dict[str, str]
    cells: list[list[list[Number]]]
    gains: list[list[Gained]]  # by column and part; empty where none are asked for

    @property
    def title(self) -> str:
        return ", ".join(f"{key} = {value}" for key, value in self.where.items())


class Sheet(NamedTuple):
    """A whole comparison in its layout."""

    layout: Layout
    rows: tuple[str, ...]
    columns: tuple[Place, ...]
    blocks: list[Block]
    metrics: dict[str, list[str]]  # what methods recorded under a name with a *
    seeds: int
    remarks: tuple[str, ...]
    doubts: tuple[report.Doubt, ...]
    gain: str = ""  # what the row of gains is called
    about_gain: tuple[str, ...] = ()  # and what it says


Papers = Mapping[tuple[Place, str], Sequence[float | None]]  # of each part of the cell at a place, by method


def sheet(question: Question, layout: Layout, results: Sequence[Result], papers: Papers) -> Sheet:
    """The comparison in this layout."""
    values = _values(question)
    columns = tuple(itertools.product(*(values[key] for key in layout.columns)))
    blocks = []
    for where in _blocks(layout, values):
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
        doubts=question.doubts,
        gain=report.gain_label(question),
        about_gain=tuple(report.gain_note(question)) if any(block.gains for block in blocks) else (),
    )


def _values(question: Question) -> dict[str, tuple[str, ...]]:
    """The labels of each key, in order."""
    axes = zip(question.axes, zip(*question.places, strict=True), strict=True) if question.axes else ()
    return {"algorithm": question.methods} | {key: tuple(dict.fromkeys(labels)) for key, labels in axes}


def _blocks(layout: Layout, values: Mapping[str, tuple[str, ...]]) -> Iterator[dict[str, str]]:
    rest = [key for key in values if key != layout.rows and key not in layout.columns]
    return (dict(zip(rest, chosen, strict=True)) for chosen in itertools.product(*(values[key] for key in rest)))


def _cell_of(question: Question, results: Sequence[Result], spot: Mapping[str, str]) -> list[Result]:
    """The runs of one cell, one for each seed."""
    place = tuple(spot[key] for key in question.axes)
    return [r for r in results if r.place == place and r.method == spot["algorithm"]]


def _numbers(
    question: Question, layout: Layout, results: Sequence[Result], papers: Papers, spot: Mapping[str, str]
) -> list[Number]:
    own = _cell_of(question, results, spot)
    place = tuple(spot[key] for key in question.axes)
    claims = papers.get((place, spot["algorithm"]), [None] * len(layout.cell))
    return [
        _number(layout, part, own, claim)._replace(
            doubts=question.doubted(place, spot["algorithm"], part.metric) if claim is not None else ()
        )
        for part, claim in zip(layout.cell, claims, strict=True)
    ]


def _number(layout: Layout, part: Part, own: Sequence[Result], paper: float | None) -> Number:
    metric = report.recorded_as(part.metric, own)
    found = [s for s in (report.summary_of(r, metric) for r in own) if s is not None]
    value = report.mean_of([getattr(s, part.statistic) for s in found])
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


def _with_best(layout: Layout, cells: list[list[list[Number]]]) -> list[list[list[Number]]]:
    """The same numbers, the best of each column marked; a cell that lost a seed does not compete."""
    if len(cells) < 2:
        return cells
    out = [[list(numbers) for numbers in line] for line in cells]
    for column, k in itertools.product(range(len(cells[0])), range(len(layout.cell))):
        sign = -1 if lower_is_better(layout.cell[k].metric) else 1
        here = [line[column][k] for line in cells]
        scores = [sign * n.value.mean if n.value and not n.diverged + n.failed else float("-inf") for n in here]
        for line, score in zip(out, scores, strict=True):
            line[column][k] = line[column][k]._replace(best=max(scores) == score > float("-inf"))
    return out


def _gains(
    question: Question, layout: Layout, rows: Sequence[str], cells: Sequence[Sequence[Sequence[Number]]]
) -> list[list[Gained]]:
    """The relative gain in each column, where methods are the rows and it is asked for."""
    if question.gain is None or layout.rows != "algorithm":
        return []
    at = {row: index for index, row in enumerate(rows)}
    ours, others = at[question.gain.of], [at[method] for method in question.gain.over]

    def gained(column: int, k: int) -> Gained:
        metric, here = layout.cell[k].metric, [line[column][k] for line in cells]
        means = [n.value.mean if n.value and not n.diverged + n.failed else None for n in here]
        papers = [n.paper for n in here]
        value, paper = (
            report.relative_gain(metric, v[ours], [x for i in others if (x := v[i]) is not None])
            for v in (means, papers)
        )
        return Gained(value, paper)

    return [[gained(column, k) for k in range(len(layout.cell))] for column in range(len(cells[0]))]


def _recorded(metric: str, question: Question, results: Sequence[Result]) -> list[str]:
    """Under which names the methods recorded this metric, where that can differ."""
    if "*" not in metric:
        return [metric]
    names = [report.recorded_as(metric, [r for r in results if r.method == m]) for m in question.methods]
    return list(dict.fromkeys(names))


# -- as text ---------------------------------------------------------------------------------------
class Word(NamedTuple):
    """One number as it is printed."""

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
        out.append(Line(found.gain, [[Word(report.percent(g.value)) for g in parts] for parts in block.gains], False))
        if any(g.paper is not None for parts in block.gains for g in parts):
            words = [[Word(report.percent(g.paper)) for g in parts] for parts in block.gains]
            out.append(Line("paper", words, True))
    return out


def _ours(layout: Layout, numbers: Sequence[Number]) -> list[Word]:
    first = numbers[0]
    lost = [f"{n} {word}" for n, word in ((first.diverged, "diverged"), (first.failed, "failed")) if n]
    if not any(n.value for n in numbers):
        return [Word(lost[0].partition(" ")[2] if lost else "-")]
    words = [_word(part, n) for part, n in zip(layout.cell, numbers, strict=True)]
    return [*words[:-1], words[-1]._replace(text=f"{words[-1].text} ({', '.join(lost)})")] if lost else words


def _word(part: Part, number: Number) -> Word:
    if number.value is None:
        return Word("-")
    return Word(report.spread(number.value, lambda v: _digits(part, v)) + _MARKS[number.missed], number.best)


def _theirs(layout: Layout, numbers: Sequence[Number]) -> list[Word]:
    if all(n.paper is None for n in numbers):
        return [Word("-")]
    pairs = zip(layout.cell, numbers, strict=True)
    return [Word("-" if n.paper is None else _digits(part, n.paper) + report.marks(n.doubts)) for part, n in pairs]


def _digits(part: Part, value: float) -> str:
    if report.is_share(part.metric):
        return f"{100 * value:.2f}"
    return f"{value:.4f}" if part.metric.rpartition("/")[2].startswith("auc") else f"{value:.4g}"


def joined(words: Sequence[Word]) -> str:
    """The numbers of a cell as the papers print them."""
    return " / ".join(word.text for word in words)


def across(header: Sequence[str], found: Sequence[Line], width: int) -> list[range]:
    """Columns in groups that fit into so many characters, each beside the labels of the lines."""
    first = max(len(line.label) + 2 for line in found)
    widths = [
        max(*(len(w) for w in head.split("\n")), *(len(joined(line.cells[i])) for line in found))
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
        out.append(f"{part.label or part.metric.rpartition('/')[2]}: {', '.join(names)}.")
    if len(found.rows) > 1:
        out.append("Bold: the best of a column.")
    if any(n.paper is not None for n in _all(found)):
        limit = f"{found.layout.tolerance:g}"
        if any(report.is_share(part.metric) for part in cell):
            limit += f" ({100 * found.layout.tolerance:g} points of accuracy)"
        out.append(f"paper: what the paper reports; ↓ and ↑: more than {limit} below or above it.")
    out += found.about_gain
    out += report.reasons(found.doubts, {number for n in _all(found) for number in n.doubts})
    if any(n.diverged or n.failed for n in _all(found)):
        out.append("A cell that did not finish with every seed has the values of the others, and is never bold.")
    return out


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


def latex(found: Sheet) -> str:
    """One tabular; the keys of the columns are lines of its header."""
    out = [
        "% needs \\usepackage{booktabs}",
        *(f"% {note}" for note in [*legend(found), *found.remarks]),
        f"\\begin{{tabular}}{{l{'c' * len(found.columns)}}}",
        "\\toprule",
        *_heads(found),
    ]
    for block in found.blocks:
        out.append("\\midrule")
        if block.title:
            out.append(f"\\multicolumn{{{len(found.columns) + 1}}}{{l}}{{{report.tex(block.title)}}} \\\\")
        for line in lines(found, block):
            label = f"\\quad \\emph{{{line.label}}}" if line.is_paper else report.tex(line.label)
            out.append(" & ".join([label, *(_tex_cell(words) for words in line.cells)]) + " \\\\")
    return "\n".join([*out, "\\bottomrule", "\\end{tabular}", ""])


def _heads(found: Sheet) -> list[str]:
    """The labels of the columns, level by level; what neighbours share stands once above them."""
    out = []
    for level in range(len(found.layout.columns)):
        first = report.tex(found.layout.rows) if level == len(found.layout.columns) - 1 else ""
        words = [first]
        for shared, group in itertools.groupby(column[: level + 1] for column in found.columns):
            wide, word = len(list(group)), report.tex(shared[-1])
            words.append(f"\\multicolumn{{{wide}}}{{c}}{{{word}}}" if wide > 1 else word)
        out.append(" & ".join(words) + " \\\\")
    return out


def _tex_cell(words: Sequence[Word]) -> str:
    return " / ".join(f"\\textbf{{{report.tex(w.text)}}}" if w.best else report.tex(w.text) for w in words)


# -- as numbers ------------------------------------------------------------------------------------
def as_dicts(found: Sheet) -> list[dict[str, Any]]:
    """Every number of the tables in a line of its own."""
    out = []
    for block in found.blocks:
        for row, cells in zip(found.rows, block.cells, strict=True):
            for column, numbers in zip(found.columns, cells, strict=True):
                spot = {**block.where, found.layout.rows: row, **dict(zip(found.layout.columns, column, strict=True))}
                out += [spot | _as_dict(found, part, n) for part, n in zip(found.layout.cell, numbers, strict=True)]
        for column, parts in zip(found.columns, block.gains, strict=False):
            spot = {**block.where, "algorithm": found.gain, **dict(zip(found.layout.columns, column, strict=True))}
            for part, gained in zip(found.layout.cell, parts, strict=True):
                what = {"metric": f"relative gain, {part.metric}", "statistic": part.statistic}
                out.append(dict.fromkeys(out[0]) | spot | what | {"mean": gained.value, "paper": gained.paper})
    return out


def _as_dict(found: Sheet, part: Part, number: Number) -> dict[str, Any]:
    mean, std = number.value or (None, None)
    gap = mean - number.paper if mean is not None and number.paper is not None else None
    return {
        "metric": part.metric,
        "statistic": part.statistic,
        "mean": mean,
        "std": std,
        "seeds": number.seeds,
        "diverged": number.diverged,
        "failed": number.failed,
        "best": number.best,
        "paper": number.paper,
        "difference": gap,
        "missed": number.missed,
        "doubts": " ".join(found.doubts[k - 1].why for k in number.doubts),
    }


def table_csv(found: Sheet) -> str:
    """Every number of the tables, accuracies as shares of one."""
    return report.csv_text(as_dicts(found))


# -- as a picture ----------------------------------------------------------------------------------
def draw(question: Question, layout: Layout, results: Sequence[Result], path: Path) -> None:
    """A line for each row of the table, a panel for each column, one below the other for metrics and blocks."""
    report.save(lambda: _figure(question, layout, results), path)


def _figure(question: Question, layout: Layout, results: Sequence[Result]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    values = _values(question)
    columns = list(itertools.product(*(values[key] for key in layout.columns)))
    stripes = list(itertools.product(_blocks(layout, values), layout.cell))
    high, wide = min(len(stripes), _MOST_HIGH), min(len(columns), _MOST_WIDE)
    figure = Figure(figsize=(1.2 + 3.8 * wide, 3.2 * high + 0.9), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(high, wide, squeeze=False)
    for (block, part), stripe in zip(stripes, panels, strict=False):
        for column, axes in zip(columns, stripe, strict=False):
            where = block | dict(zip(layout.columns, column, strict=True))
            runs = {row: _cell_of(question, results, where | {layout.rows: row}) for row in values[layout.rows]}
            report.panel(_asked(question, part, runs), (), _renamed(runs), axes)
            axes.set_title(", ".join(where.values()), loc="left", fontsize=9)
        stripe[0].set_ylabel(part.name.removeprefix(f"{part.statistic} "))
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 2 * wide), frameon=False)
    hidden = len(stripes) * len(columns) - high * wide
    figure.suptitle(report.headline(question, hidden), x=0.01, ha="left", fontsize=9.5)
    return figure


def _asked(question: Question, part: Part, runs: Mapping[str, Sequence[Result]]) -> Question:
    """The question of one panel, in which the rows of the table are what is compared."""
    metrics = {row: report.recorded_as(part.metric, own) for row, own in runs.items()}
    return question._replace(
        axes=(), places=((),), methods=tuple(runs), baseline="", metrics={"": part.metric, **metrics}, target=None
    )


def _renamed(runs: Mapping[str, Sequence[Result]]) -> list[Result]:
    return [result._replace(method=row) for row, own in runs.items() for result in own]
