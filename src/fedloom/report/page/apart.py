"""In which settings runs differ: of several runs side by side, and of a comparison what its titles do not say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.report.page.language import Say
from fedloom.report.page.parts import PageCell, PageColumn, PageLine, PageTable
from fedloom.report.view import RunView, as_setting

Found = Sequence[tuple[RunView, Mapping[str, Any]]]  # runs with what is known of each, by dotted key

_MOST_NAMES = 4


def apart(found: Found, keys: Sequence[str], axes: Sequence[str], say: Say) -> PageTable | None:
    """The values of the keys in which runs differ, and whose they are."""
    if any(run.method for run, _ in found):
        return _of_cells(found, [key for key in keys if key != "seed"], axes, say)
    return _side_by_side(found, keys, say)


def _side_by_side(found: Found, keys: Sequence[str], say: Say) -> PageTable | None:
    """A row for each key, and a column for each group of equal runs."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for run, values in found:
        groups.setdefault(tuple(_value(values, key) for key in keys), []).append(run.name)
    if not keys or len(groups) < 2:
        return None
    heads = [PageColumn(", ".join(dict.fromkeys(names))) for names in groups.values()]
    lines = [PageLine((PageCell(key), *(PageCell(values[k]) for values in groups))) for k, key in enumerate(keys)]
    return PageTable((PageColumn(say("setting")), *heads), tuple(lines))


def _of_cells(found: Found, keys: Sequence[str], axes: Sequence[str], say: Say) -> PageTable | None:
    """A row for each value, unless the names of all its cells say it: a column for each cell would be too many."""
    everyone, lines = [run for run, _ in found], []
    for key in keys:
        groups: dict[str, list[RunView]] = {}
        for run, values in found:
            groups.setdefault(_value(values, key), []).append(run)
        for value, runs in groups.items():
            if len(groups) > 1 and value != "–" and not all(_is_said(key, value, run, axes) for run in runs):
                lines.append(PageLine((PageCell(key), PageCell(value), PageCell(_named(runs, everyone, say)))))
    heads = (PageColumn(say("setting")), PageColumn(say("value")), PageColumn(say("runs")))
    return PageTable(heads, tuple(lines)) if lines else None


def _value(values: Mapping[str, Any], key: str) -> str:
    return as_setting(values[key]) if key in values else "–"


def _is_said(key: str, value: str, run: RunView, axes: Sequence[str]) -> bool:
    """Whether the method's name or the point of the grid has this value."""
    titles = [run.method] if key.startswith("algorithm.") else []
    titles += [label for axis, label in zip(axes, run.place, strict=False) if f"{key}.".startswith(f"{axis}.")]
    written = {value, f"{key.rpartition('.')[2]}={value}"}
    return any(not written.isdisjoint((title, *re.split(r"[ ,()]+", title))) for title in titles)


def _named(runs: Sequence[RunView], everyone: Sequence[RunView], say: Say) -> str:
    """These cells by what they have in common: their methods and points of the grid, where these are not all."""
    parts = []
    for own, of_all in zip(_sides(runs, say), _sides(everyone, say), strict=True):
        if len(own) < len(of_all):
            parts.append(", ".join(own[:_MOST_NAMES]) + (", …" if len(own) > _MOST_NAMES else ""))
    return " · ".join(parts)


def _sides(runs: Sequence[RunView], say: Say) -> list[list[str]]:
    """The methods of runs, their labels on each axis, and their seeds."""
    sides = [[run.method for run in runs], *map(list, zip(*(run.place for run in runs), strict=False))]
    sides.append([f"{say('seed')} {run.seed}" for run in runs])
    return [list(dict.fromkeys(side)) for side in sides]
