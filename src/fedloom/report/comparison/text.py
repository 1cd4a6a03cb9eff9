"""The table of a comparison as text: a section for each point of the grid, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedloom.core.vocabulary import is_share, last_ten
from fedloom.report.comparison.notes import caveats_about, gain_label, marks, notes
from fedloom.report.comparison.question import Question
from fedloom.report.comparison.statistics import Gain, Mean, Reached, Row, gains


class Section(NamedTuple):
    """The table of one point of the grid, ready to print."""

    title: str
    header: list[str]
    lines: list[list[str]]
    best: tuple[int, ...]  # the lines of rank 1


def sections(question: Question, table: Sequence[Row]) -> list[Section]:
    """The table as text, a section for each point of the grid."""
    columns, better = _columns(question, table), {gain.place: gain for gain in gains(question, table)}
    out = []
    for place in question.places:
        here = [row for row in table if row.place == place]
        lines = [[show(row) for _, show in columns] for row in here]
        if place in better:
            lines.append(_gain_line(question, [name for name, _ in columns], better[place]))
        best = tuple(i for i, row in enumerate(here) if row.rank == 1)
        out.append(Section(question.title(place), [name for name, _ in columns], lines, best))
    return out


def _gain_line(question: Question, header: Sequence[str], gain: Gain) -> list[str]:
    """The row of gains below the methods; columns without a gain are empty."""
    known = {"last": gain.last, "best": gain.best, "mean": gain.tail, "paper": gain.paper}
    stems = [name.removesuffix(" (%)") for name in header[1:]]
    stems = ["mean" if stem.startswith("mean of") else stem for stem in stems]
    return [gain_label(question), *(percent(known[stem]) if stem in known else "" for stem in stems)]


def percent(gain: float | None) -> str:
    """A relative gain in a table."""
    return "-" if gain is None else f"{100 * gain:+z.2f}%"


Column = tuple[str, Callable[[Row], str]]  # its name, and what it shows of a row


def _columns(question: Question, table: Sequence[Row]) -> list[Column]:
    unit = " (%)" if is_share(question.metric) else ""
    tail, count = last_ten(row.evaluations for row in table)
    columns: list[Column] = [("algorithm", lambda r: r.method)]
    if len(set(question.metrics.values())) > 1:
        columns.append(("metric", lambda r: r.metric))
    columns += [
        (f"last{unit}", lambda r: _score(r, r.last)),
        (f"best{unit}", lambda r: _score(r, r.best)),
        (f"{tail.format(count)}{unit}", lambda r: _score(r, r.tail)),
    ]
    if any(row.validation is not None for row in table):
        columns.append(("validation", lambda r: _validated(question, r)))
    columns += _until_target(question, table) + _costs(question, table)
    columns.append(("rank", lambda r: f"{r.rank}" if r.rank is not None else "-"))
    if len(question.methods) > 1:
        columns.append((f"vs {question.baseline}", lambda r: _gap(question, r)))
        columns.append(("95 % interval", _interval))
        columns.append(("p", lambda r: _p_value(r.p)))
    if question.paper:
        columns.append((f"paper{unit}", lambda r: _reported(question, r)))
    return columns


def _until_target(question: Question, table: Sequence[Row]) -> list[Column]:
    """The cost until the target, if there is one."""
    if question.target is None:
        return []
    goal = f"{100 * question.target:g}%" if is_share(question.metric) else f"{question.target:g}"
    columns: list[Column] = [
        (f"rounds to {goal}", lambda r: _reach(r, r.rounds, lambda v: f"{v:.1f}")),
        (f"MB to {goal}", lambda r: _reach(r, r.bytes, lambda v: f"{v / 1e6:.2f}")),
    ]
    if any(row.seconds is not None for row in table):
        columns.append((f"simulated s to {goal}", lambda r: _reach(r, r.seconds, lambda v: f"{v:.1f}")))
    return columns


def _costs(question: Question, table: Sequence[Row]) -> list[Column]:
    """What the runs spent, if their rounds are not comparable."""
    if question.equal == "rounds" and not _costs_differ(table):
        return []
    columns: list[Column] = [
        ("rounds", lambda r: _mean(r.spent and r.spent.rounds, lambda v: f"{v:,.0f}")),
        ("gradients", lambda r: _mean(r.spent and r.spent.gradients, lambda v: f"{v:,.0f}")),
        ("MB", lambda r: _mean(r.spent and r.spent.bytes, lambda v: f"{v:,.2f}")),
    ]
    if question.equal == "busiest":
        columns.append(("MB, busiest", lambda r: _mean(r.spent and r.spent.busiest, lambda v: f"{v:,.2f}")))
    return columns


def _costs_differ(table: Sequence[Row]) -> bool:
    """Whether methods spent different numbers of gradients or bytes, so that their rounds are not comparable."""
    known = [row.spent for row in table if row.spent is not None]
    return any(len({getattr(spent, what).mean for spent in known}) > 1 for what in ("gradients", "bytes"))


def narrowed(section: Section, width: int) -> Section:
    """The section without the columns that are least needed, until it fits into this number of characters."""
    header, lines = section.header, section.lines
    for name in ("simulated", "MB", "best", "last", "gradients", "rounds", "95 %", "vs"):
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        if sum(widths) + 2 * (len(widths) - 1) <= width:
            break
        keep = [i for i, word in enumerate(header) if not word.startswith(name)]
        header, lines = [header[i] for i in keep], [[line[i] for i in keep] for line in lines]
    return section._replace(header=header, lines=lines)


def _number(metric: str, value: float) -> str:
    return f"{100 * value:.2f}" if is_share(metric) else f"{value:.4g}"


def mean_and_spread(value: Mean, show: Callable[[float], str]) -> str:
    """A mean and, if known, its deviation."""
    return show(value.mean) + (f" ± {show(value.std)}" if value.std is not None else "")


def _score(row: Row, value: Mean | None) -> str:
    lost = [f"{n} {word}" for n, word in ((row.diverged, "diverged"), (row.failed, "failed")) if n]
    if value is None:
        return "diverged" if row.diverged and not row.failed else "failed" if row.failed else "-"
    return number_words(row.metric, value) + (f" ({', '.join(lost)})" if lost else "")


def number_words(metric: str, value: Mean) -> str:
    """A mean of this metric and its deviation in a table."""
    return mean_and_spread(value, lambda v: _number(metric, v))


def _validated(question: Question, row: Row) -> str:
    """The value on validation rows, with a mark if it was chosen."""
    if row.validation is None:
        return "-"
    metric = question.selected_by.get(row.method, row.metric)
    return number_words(metric, row.validation) + (" *" if row.chosen else "")


def _reach(row: Row, value: Reached | None, show: Callable[[float], str]) -> str:
    of = row.seeds + row.diverged + row.failed
    if value is None or value.cost is None or value.seeds < of:
        return f"- ({value.seeds if value else 0}/{of} seeds)"
    return mean_and_spread(value.cost, show)


def _reported(question: Question, row: Row) -> str:
    if row.paper is None:
        return "-"
    return _number(row.metric, row.paper) + marks(caveats_about(question, row))


def _mean(value: Mean | None, show: Callable[[float], str]) -> str:
    return show(value.mean) if value is not None else "-"


def _p_value(p: float | None) -> str:
    return "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def _gap(question: Question, row: Row) -> str:
    if row.difference is None:
        return "baseline" if row.method == question.baseline else "-"
    return _signed(row.metric, row.difference.mean)


def _interval(row: Row) -> str:
    """The 95 % confidence interval of the difference to the baseline."""
    low, high = row.interval
    return "-" if low is None or high is None else f"[{_signed(row.metric, low)}, {_signed(row.metric, high)}]"


def _signed(metric: str, difference: float) -> str:
    return f"{100 * difference:+z.2f}" if is_share(metric) else f"{difference:+z.4g}"


def markdown(question: Question, table: Sequence[Row]) -> str:
    """The tables and their notes as Markdown."""
    parts = [markdown_table(section) for section in sections(question, table)]
    parts.append("\n".join(f"- {note}" for note in notes(question, table)) + "\n")
    return "\n".join(parts)


def markdown_table(section: Section) -> str:
    """A section as Markdown; the best of it is bold."""
    lines = [section.header, [":--", *["--:"] * (len(section.header) - 1)]]
    for index, words in enumerate(section.lines):
        cells = [word.replace("|", "\\|") for word in words]
        lines.append([f"**{cells[0]}**", *cells[1:]] if index in section.best else cells)
    title = [f"### {section.title}\n"] if section.title else []
    return "\n".join([*title, "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"])
