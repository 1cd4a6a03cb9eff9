"""Values to search: ``local.lr=0.001..1:log``, ``local.epochs=1..5`` or ``local.batch=16,32,64``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from fedloom.core.errors import ConfigError, Fault
from fedloom.report.comparison.selected import end_of
from fedloom.runs.overrides import value_of

_DIGITS = 4  # digits of a tried number: enough to distinguish two, and few enough to write
_FORMS = "a range is LOW..HIGH or LOW..HIGH:log, and a choice A,B,C"


class Range(NamedTuple):
    """The values that a setting may take: all between two bounds, or one of a few."""

    key: str
    low: float = 0
    high: float = 0
    log: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values that suffice to check whether all are allowed."""
        return self.choices or (self.low, self.high)

    def setting(self, drawn: Any) -> Any:
        """The value as it is set, rounded to few digits if it was drawn between two bounds."""
        if self.choices or self.whole:
            return drawn
        return min(max(float(f"{drawn:.{_DIGITS}g}"), self.low), self.high)

    def end_of(self, value: Any) -> str:
        """Whether a value is the smallest or the largest that is tried; of a continuous range, within a twentieth."""
        if self.choices:
            return "" if any(isinstance(each, bool) for each in self.choices) else end_of(value, self.choices)
        if self.whole:
            return end_of(value, (self.low, self.high))
        low, at, high = ((math.log(x) if self.log else x) for x in (self.low, value, self.high))
        share = (at - low) / (high - low)
        return "smallest" if share < 0.05 else "largest" if share > 0.95 else ""

    def words(self) -> str:
        """The range as it is written on the command line."""
        if self.choices:
            return f"{self.key}={','.join(map(str, self.choices))}"
        return f"{self.key}={self.low}..{self.high}{':log' if self.log else ''}"


def is_range(word: str) -> bool:
    """Whether a command-line argument gives a setting several values."""
    _, equals, text = word.partition("=")
    text = text.strip()
    return bool(equals) and (".." in text or ("," in text and text[:1] not in ("[", "{", '"', "'")))


def ranges_of(words: Iterable[str]) -> tuple[Range, ...]:
    """The ranges in these arguments, or one ConfigError with all faults."""
    faults: list[Fault] = []
    found: dict[str, Range] = {}
    for word in words:
        key, _, text = word.partition("=")
        try:
            if key in found:
                raise ValueError("is given twice")
            found[key] = _range(key, text.strip())
        except ValueError as error:
            faults.append(Fault(key, f"{error} (got '{text}')", _FORMS))
    if faults:
        raise ConfigError(faults)
    return tuple(found.values())


def _range(key: str, text: str) -> Range:
    if key in ("seed", "name") or key.partition(".")[0] == "evaluate":
        raise ValueError("is not a setting to search")
    if ".." not in text:
        choices = tuple(value_of(word.strip()) for word in text.split(","))
        if any(isinstance(value, dict | list) or value == "" for value in choices):
            raise ValueError("each choice is a number, a word, true or false")
        if len(set(map(repr, choices))) < len(choices):
            raise ValueError("two choices are the same")
        return Range(key, choices=choices)
    bounds, colon, scale = text.partition(":")
    if colon and scale != "log":
        raise ValueError(f"there is no scale '{scale}'")
    low, high = (_number(word) for word in bounds.split("..", 1))
    if low >= high:
        raise ValueError("the first bound must be below the second")
    if colon and low <= 0:
        raise ValueError("on a log scale both bounds are above 0")
    if not (isinstance(low, int) and isinstance(high, int)):
        low, high = float(low), float(high)
    return Range(key, low, high, bool(colon))


def _number(word: str) -> float:
    value = value_of(word.strip())
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"'{word}' is not a number")
    return value
