"""The building blocks of the page: cells, tables, cards, and formatted numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedloom.core.vocabulary import is_share


class PageColumn(NamedTuple):
    """The head of a column."""

    label: str
    numeric: bool = False


class PageCell(NamedTuple):
    """One cell of a table."""

    text: str
    value: float | None = None  # the sort key, if that is not the text
    bar: float | None = None  # a share of one, drawn behind the text
    mark: str = ""  # a class of the style sheet
    tag: str = ""  # a word next to the text


class PageLine(NamedTuple):
    """One row of a table."""

    cells: tuple[PageCell, ...]
    mark: str = ""


class PageTable(NamedTuple):
    """A table with its heading."""

    columns: tuple[PageColumn, ...]
    lines: tuple[PageLine, ...]
    caption: str = ""
    sortable: bool = False


class Card(NamedTuple):
    """A headline number."""

    label: str
    value: str
    hint: str = ""
    mark: str = ""


def plain(rows: Sequence[tuple[str, str]], first: str, second: str) -> PageTable:
    """Names and values."""
    lines = tuple(PageLine((PageCell(name), PageCell(value))) for name, value in rows)
    return PageTable((PageColumn(first), PageColumn(second)), lines)


def number(value: Any, metric: str = "", digits: int = 4) -> PageCell:
    """A number of this metric; a dash if there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return PageCell("–")
    return PageCell(shown(float(value), metric, digits), float(value))


def shown(value: float, metric: str = "", digits: int = 4) -> str:
    """A share of one in percent, any other number with this many digits."""
    if metric.startswith("relative gain, "):
        return f"{100 * value:+z.2f} %"
    if is_share(metric):
        return f"{100 * value:.2f} %"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.{digits}g}"


def signed(value: Any, metric: str) -> PageCell:
    """A difference: of shares in points."""
    cell = number(value, metric)
    if cell.value is None:
        return cell
    return cell._replace(text=f"{100 * cell.value:+z.2f}" if is_share(metric) else f"{cell.value:+z.4g}")


def with_spread(mean: Any, std: Any, metric: str = "") -> PageCell:
    """A mean and its standard deviation."""
    cell = number(mean, metric)
    if cell.value is None or not isinstance(std, int | float) or not math.isfinite(std):
        return cell
    spread = f"{100 * std:.2f}" if is_share(metric) else f"{std:.4g}"
    return cell._replace(text=f"{cell.text.removesuffix(' %')} ± {spread}{' %' if is_share(metric) else ''}")
