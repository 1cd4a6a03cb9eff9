"""The point of the grid that is chosen for each method by its value on validation rows, and its score.

The choice is one for all seeds, and is made for each value of the axes that are not chosen over, such as the partition.
The test rows are not used for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedloom.core.vocabulary import as_validation, leaf, lower_is_better, matching
from fedloom.report.comparison import latex as tex_table
from fedloom.report.comparison import statistics
from fedloom.report.comparison.numbers import as_dict
from fedloom.report.comparison.question import Place, Question, Result
from fedloom.report.comparison.statistics import Mean, Row, mean_of, recorded, summary_of
from fedloom.report.comparison.text import Section, markdown_table, number_words, sections
from fedloom.report.tables import csv_text


class Choice(NamedTuple):
    """What was chosen for a method."""

    place: Place  # of the whole grid
    settings: dict[str, str]  # those that were chosen, by axis
    value: Mean  # on validation rows, over seeds


class Selection(NamedTuple):
    """The chosen points, and the table of their scores."""

    metrics: Mapping[str, str]  # by which it was chosen, for each method
    over: tuple[str, ...]  # the axes that were chosen over
    choices: Mapping[tuple[Place, str], Choice]  # by the rest of the place, and the method
    values: Mapping[tuple[Place, str], Mean]  # on validation rows, at every place of the grid
    tried: Mapping[str, tuple[str, ...]]  # the values of the axes that were chosen over
    question: Question  # its points are those of the remaining axes
    rows: list[Row]

    def marked(self, rows: Sequence[Row]) -> list[Row]:
        """The table of all points, with their values on validation rows, and the choice."""
        chosen = {(choice.place, method) for (_, method), choice in self.choices.items()}
        return [
            row._replace(validation=self.values.get((row.place, row.method)), chosen=(row.place, row.method) in chosen)
            for row in rows
        ]


def select(question: Question, results: Sequence[Result], wanted: str, over: Sequence[str]) -> Selection:
    """Choose for each method among the points of the axes ``over`` that finished with every seed."""
    metrics = {
        m: validation_metric(wanted, question.metrics[m], recorded([r for r in results if r.method == m]))
        for m in question.methods
    }
    values = dict(_values(question, results, metrics))
    kept = [k for k, axis in enumerate(question.axes) if axis not in over]
    choices: dict[tuple[Place, str], Choice] = {}
    for (place, method), value in values.items():
        rest = tuple(place[k] for k in kept)
        best = choices.get((rest, method))
        if best is None or _is_better(metrics[method], value.mean, best.value.mean):
            chosen = {axis: label for axis, label in zip(question.axes, place, strict=True) if axis in over}
            choices[rest, method] = Choice(place, chosen, value)
    there = {(choice.place, method): rest for (rest, method), choice in choices.items()}
    mine = [r._replace(place=there[r.place, r.method]) for r in results if (r.place, r.method) in there]
    left = question._replace(
        axes=tuple(question.axes[k] for k in kept),
        places=tuple(dict.fromkeys(tuple(place[k] for k in kept) for place in question.places)),
        paper={},
        caveats=(),
        remarks=(),
        equal="rounds",
        budgets={},
    )
    tried = {
        axis: tuple(dict.fromkeys(place[k] for place in question.places))
        for k, axis in enumerate(question.axes)
        if axis in over
    }
    return Selection(metrics, tuple(over), choices, values, tried, left, statistics.rows(left, mine))


def validation_metric(wanted: str, metric: str, names: Sequence[str]) -> str:
    """The metric on validation rows among these names; a bare word is a quantity, of the models of ``metric``."""
    if "/" in wanted:
        return next(matching(wanted, names), wanted)
    twin = as_validation(metric)[: -len(leaf(metric))] + wanted
    others = (name for name in names if "/validation/" in name and leaf(name) == wanted)
    return twin if twin in names else next(others, twin)


def _values(
    question: Question, results: Sequence[Result], metrics: Mapping[str, str]
) -> Iterator[tuple[tuple[Place, str], Mean]]:
    """The mean over seeds at each point where all of them finished."""
    for place in question.places:
        for method in question.methods:
            mine = [r for r in results if r.place == place and r.method == method and r.seed in question.seeds]
            found = [s.mean_last_10 for s in (summary_of(r, metrics[method]) for r in mine) if s is not None]
            value = mean_of(found)
            if value is not None and len(found) == len(question.seeds):
                yield (place, method), value


def _is_better(metric: str, one: float, other: float) -> bool:
    return one < other if lower_is_better(metric) else one > other


# -- in words and numbers --------------------------------------------------------------------------
def selection_notes(selection: Selection) -> list[str]:
    """How the choice was made."""
    names = " / ".join(dict.fromkeys(selection.metrics.values()))
    what = f"chosen: for each method the {', '.join(selection.over)} with the best {names}"
    how = "the mean of its last evaluations, ten at most, over all seeds; the test rows are not used for the choice"
    lost = [m for m in selection.question.methods for p in selection.question.places if (p, m) not in selection.choices]
    none = f"{', '.join(dict.fromkeys(lost))}: nothing to choose from, since no grid point finished with every seed."
    return [f"{what} ({how}).", *([none] if lost else []), *_edges(selection)]


def _edges(selection: Selection) -> list[str]:
    """Where the best number of an axis is the smallest or the largest that was tried, so that others may be better."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for (_, method), choice in selection.choices.items():
        for axis, label in choice.settings.items():
            if end := end_of(label, selection.tried[axis]):
                found.setdefault((axis, end, label), []).append(method)
    return [
        f"chosen: the best {axis} of {', '.join(dict.fromkeys(methods))} is the {end} that was tried ({label})."
        for (axis, end, label), methods in found.items()
    ]


def end_of(value: Any, tried: Sequence[Any]) -> str:
    """Whether a number is the smallest or the largest of several; empty if it is neither, or they are no numbers."""
    try:
        numbers = sorted({float(each) for each in tried})
        ends = {numbers[-1]: "largest", numbers[0]: "smallest"} if len(numbers) > 1 else {}
        return ends.get(float(value), "")
    except ValueError:
        return ""


def chosen_words(selection: Selection, row: Row) -> list[str]:
    """The chosen settings of a row, and its value on validation rows."""
    choice = selection.choices.get((row.place, row.method))
    if choice is None:
        return ["-", "-"]
    metric = selection.metrics[row.method]
    return [", ".join(f"{k}={v}" for k, v in choice.settings.items()), number_words(metric, choice.value)]


def chosen_sections(selection: Selection) -> list[Section]:
    """The table of what was chosen, with the settings next to the methods."""
    out = []
    for section, place in zip(sections(selection.question, selection.rows), selection.question.places, strict=True):
        rows = [row for row in selection.rows if row.place == place]
        words = [chosen_words(selection, row) for row in rows]
        words += [["", ""]] * (len(section.lines) - len(words))  # a gain may follow the methods
        lines = [[line[0], *more, *line[1:]] for line, more in zip(section.lines, words, strict=True)]
        out.append(
            section._replace(header=[section.header[0], "chosen", "validation", *section.header[1:]], lines=lines)
        )
    return out


def as_dicts(selection: Selection) -> list[dict[str, Any]]:
    """The rows as plain numbers, with what was chosen and by what."""
    out = []
    for row in selection.rows:
        choice = selection.choices.get((row.place, row.method))
        settings = choice.settings if choice else dict.fromkeys(selection.over)
        by: dict[str, Any] = {"chosen": settings, "chosen_by": selection.metrics[row.method]}
        by |= {"validation": choice.value.mean if choice else None}
        out.append(as_dict(selection.question, row) | by | {"validation_std": choice.value.std if choice else None})
    return out


def table_csv(selection: Selection) -> str:
    """The table of what was chosen with one number in each column."""
    rows = as_dicts(selection)
    return csv_text([{key: row[key] for key in row if key != "chosen"} | row["chosen"] for row in rows])


def markdown(selection: Selection) -> str:
    """The table of what was chosen as Markdown, and how it was chosen."""
    tables = [markdown_table(section) for section in chosen_sections(selection)]
    return "\n".join(
        ["## Chosen by validation\n", *tables, "\n".join(f"- {note}" for note in selection_notes(selection)), ""]
    )


def latex(selection: Selection) -> str:
    """The table of what was chosen for LaTeX."""
    return tex_table.tabular(chosen_sections(selection), selection_notes(selection))
