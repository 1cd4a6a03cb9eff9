"""How the columns of a new table compare with those that a recipe was fitted on: other words, other units, gaps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.columns import Feature, Recipe
from fedloom.data.table import Column, ColumnKind, RawTable

_FAR, _WIDE = 3.0, 5.0  # a mean so many deviations away, and so many times the deviation, are worth a look
_TOO_FAR, _HALF = 10.0, 0.5  # a mean so far away, or more unknown words, is another unit or another code
_SHOWN = 3  # unknown words


class ColumnCheck(NamedTuple):
    """One column of a new table, next to what its recipe expects."""

    name: str
    kind: ColumnKind
    missing: float  # share of the rows
    gaps_are_new: bool = False  # no row that the recipe was fitted on had a gap here
    unknown: float = 0.0  # share of the words that the recipe does not know
    words: tuple[str, ...] = ()  # the most frequent of these
    known: tuple[str, ...] = ()  # the words of the recipe
    mean: float = math.nan  # as written
    shift: float = math.nan  # the mean after scaling: its distance from the recipe's mean, in deviations
    spread: float = math.nan  # the deviation after scaling; both are unknown if the recipe does not scale

    @property
    def is_wrong(self) -> bool:
        """Whether the column must mean something else than it did."""
        return self.unknown > _HALF or abs(self.shift) > _TOO_FAR

    @property
    def suspicion(self) -> str:
        """What is suspicious; empty if nothing is."""
        found = []
        if self.missing > _HALF or (self.missing and self.gaps_are_new):
            before = ", of which none was missing before" if self.gaps_are_new else ""
            found.append(f"{_percent(self.missing)} of its values are missing{before}")
        if self.unknown:
            known = ", ".join(self.known[:5]) + (", ..." if len(self.known) > 5 else "")
            words = ", ".join(f"'{word}'" for word in self.words)
            found.append(f"{_percent(self.unknown)} of its words are unknown, such as {words} (known: {known})")
        if abs(self.shift) > _FAR:
            found.append(f"its mean, {self.mean:.6g}, is {abs(self.shift):,.1f} standard deviations from the expected")
        elif self.spread > _WIDE:
            found.append(f"its values are spread {self.spread:.3g} times as wide as expected")
        return "; ".join(found)


def checked_columns(table: RawTable, recipe: Recipe) -> tuple[ColumnCheck, ...]:
    """Every feature of a table, compared with the recipe."""
    found, at = [], 0
    for feature in recipe.features:
        column = table.columns[feature.name]
        words = feature.kind == "words"
        found.append(_checked_words(feature, column) if words else _checked_numbers(feature, column, recipe, at))
        at += feature.width
    return tuple(found)


def suspicions(checks: Sequence[ColumnCheck]) -> list[str]:
    """A line for each suspicious column."""
    return [f"column '{check.name}': {check.suspicion}" for check in checks if check.suspicion]


def refuse_wrong(checks: Sequence[ColumnCheck], accepted: Sequence[str], at: str, fix: str) -> None:
    """One error with every column that must mean something else than in the contract, unless it is accepted."""
    wrong = [check for check in checks if check.is_wrong and check.name not in accepted]
    if wrong:
        names = ", ".join(f'"{check.name}"' for check in wrong)
        what = f"{len(wrong)} column{'s do' if len(wrong) > 1 else ' does'} not mean what the contract says"
        details = "\n".join(f"  {line}" for line in suspicions(wrong))
        raise DataError(f"{at}: {what}\n{details}\n  correct the file, or accept it: {fix} [{names}]")


def _checked_words(feature: Feature, column: Column) -> ColumnCheck:
    missing = _share_missing(column)
    given = Counter(str(word) for word in column.values[~column.missing].tolist())
    strange = Counter({word: count for word, count in given.items() if word not in feature.words})
    if feature.rare or not feature.words:  # then words without a column are expected
        strange.clear()
    first = tuple(word for word, _ in strange.most_common(_SHOWN))
    unknown = strange.total() / max(1, given.total())
    return ColumnCheck(feature.name, feature.kind, missing, feature.missing == 0, unknown, first, feature.words)


def _checked_numbers(feature: Feature, column: Column, recipe: Recipe, at: int) -> ColumnCheck:
    check = ColumnCheck(feature.name, feature.kind, _share_missing(column), feature.missing == 0)
    values = column.values[~column.missing]
    if not len(values):
        return check
    mean, std = recipe.scaling.mean[at], recipe.scaling.std[at]
    check = check._replace(mean=float(values.mean()))
    if recipe.statistics == "own" or (mean, std) == (0.0, 1.0) or std == 0:  # its unit may differ, or does not matter
        return check
    return check._replace(shift=(float(values.mean()) - mean) / std, spread=float(np.std(values)) / std)


def _share_missing(column: Column) -> float:
    return float(column.missing.mean()) if len(column.missing) else 0.0


def _percent(share: float) -> str:
    return "100%" if share == 1 else f"{min(99.0, max(1.0, 100 * share)):.0f}%"
