"""The table of a comparison in the layout of a paper's: methods down, settings across, the paper's values below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.report.page.language import Say
from fedloom.report.page.parts import PageCell, PageColumn, PageLine, PageTable, number, with_spread
from fedloom.report.view import ComparisonView

Spots = Sequence[Mapping[str, Any]]  # the numbers of summary.json, each with its position


def paper_tables(view: ComparisonView, say: Say) -> tuple[PageTable, ...]:
    """A table for each point of the axes that go neither down nor across; none if the recipe has no layout."""
    down, across = view.layout.get("rows"), view.layout.get("columns")
    found = view.summary.get("layout")
    if not isinstance(down, str) or not isinstance(across, list) or not isinstance(found, list):
        return ()
    spots = [spot for spot in found if isinstance(spot, Mapping)]
    outer = [axis for axis in ("algorithm", *view.axes) if axis not in (down, *across)]
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for spot in spots:
        groups.setdefault(_at(spot, outer), []).append(spot)
    return tuple(
        _table(view, group, down, across, ", ".join(f"{a} = {v}" for a, v in zip(outer, place, strict=True)), say)
        for place, group in groups.items()
    )


def caveat_marks(view: ComparisonView, spot: Mapping[str, Any]) -> str:
    """The numbers of the caveats about a value of the paper, as in the notes: summary.json has their reasons."""
    own = str(spot.get("caveats") or "")
    notes = [str(note).partition(": ") for note in view.summary.get("notes") or ()]
    return ", ".join(mark for mark, _, why in notes if mark.startswith("?") and why and why in own)


def _table(view: ComparisonView, spots: Spots, down: str, across: Sequence[str], caption: str, say: Say) -> PageTable:
    columns = list(dict.fromkeys(_at(spot, across) for spot in spots))
    lines = []
    for row in dict.fromkeys(str(spot.get(down)) for spot in spots):
        own = [[s for s in spots if str(s.get(down)) == row and _at(s, across) == column] for column in columns]
        lines.append(PageLine((PageCell(row), *(_ours(each, say) for each in own))))
        if any(spot.get("paper") is not None for cell in own for spot in cell):
            lines.append(PageLine((PageCell(say("paper")), *(_theirs(view, each) for each in own)), "paper"))
    heads = (PageColumn(down), *(PageColumn(", ".join(column), True) for column in columns))
    title = ", ".join(part for part in (say("in the paper's layout"), caption) if part)
    return PageTable(heads, tuple(lines), title)


def _ours(spots: Spots, say: Say) -> PageCell:
    words = [with_spread(s.get("mean"), s.get("std"), str(s.get("metric"))).text for s in spots]
    lost = [f"{spots[0][key]} {say(key)}" for key in ("diverged", "failed") if spots and spots[0].get(key)]
    best = any(s.get("best") is True for s in spots)
    return PageCell(" / ".join(words), mark="best" if best else "", tag=", ".join(lost))


def _theirs(view: ComparisonView, spots: Spots) -> PageCell:
    words = [number(s.get("paper"), str(s.get("metric"))).text for s in spots]
    return PageCell(
        " / ".join(words), tag=", ".join(dict.fromkeys(filter(None, (caveat_marks(view, s) for s in spots))))
    )


def _at(spot: Mapping[str, Any], axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(spot.get(axis)) for axis in axes)
