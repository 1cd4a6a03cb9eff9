"""The methods of a comparison and the axes of its grid, with their labels."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedloom.compare.table import GainEntry, MethodEntry, SelectEntry, on_one_line
from fedloom.core.schema import dotted
from fedloom.report.comparison.question import Place, Versus


class Method(NamedTuple):
    """One of the methods that are compared."""

    label: str
    kind: str
    settings: dict[str, Any]
    beside: dict[str, Any]  # settings of other sections that go with it


class Axis(NamedTuple):
    """A configuration key and the values that it takes."""

    key: str
    values: tuple[Any, ...]
    labels: tuple[str, ...]
    beside: tuple[dict[str, Any], ...]  # settings of other sections that go with each value

    def chosen(self, value: Any) -> tuple[str, ...]:
        """The labels of a value: its own, or those of each value of a list."""
        if word(value) in self.labels or not isinstance(value, list):
            return (word(value),)
        return tuple(word(each) for each in value)


class Point(NamedTuple):
    """A point of the grid, with its settings."""

    place: Place
    settings: dict[str, Any]


def methods_of(entries: Sequence[MethodEntry]) -> tuple[Method, ...]:
    """The methods with their labels: as given, else the kind, followed by the settings if several share the kind."""
    kinds = [entry.kind for entry in entries]
    out = []
    for entry in entries:
        own = dict(entry.__pydantic_extra__ or {})
        many = kinds.count(entry.kind) > 1 and own
        label = f"{entry.kind} ({', '.join(f'{k}={word(v)}' for k, v in own.items())})" if many else entry.kind
        out.append(Method(entry.label or label, entry.kind, own, entry.beside))
    return tuple(out)


def axes_of(grid: Mapping[str, list[Any]]) -> tuple[Axis, ...]:
    """The axes with the labels of their values: as given, else the kind if no other value has it, else the value."""
    out = []
    for key, values in grid.items():
        plain = [_plain(v) for v in values]
        kinds = [_kind(v) for v in values]
        short = [kind if kind and kinds.count(kind) == 1 else word(p) for kind, p in zip(kinds, plain, strict=True)]
        given = [on_one_line(str(v.get("label", ""))) if isinstance(v, Mapping) else "" for v in values]
        beside = tuple(dotted(v.get("with", {})) if isinstance(v, Mapping) else {} for v in values)
        out.append(Axis(key, tuple(plain), tuple(g or s for g, s in zip(given, short, strict=True)), beside))
    return tuple(out)


def points(axes: Sequence[Axis]) -> list[Point]:
    """Every point of the grid."""
    out = []
    for chosen in itertools.product(*(zip(a.labels, a.values, a.beside, strict=True) for a in axes)):
        settings = {axis.key: value for axis, (_, value, _) in zip(axes, chosen, strict=True)}
        settings |= {key: value for *_, beside in chosen for key, value in beside.items()}
        out.append(Point(tuple(label for label, *_ in chosen), settings))
    return out


def _plain(value: Any) -> Any:
    """A value of the grid without its label and companions; a table with ``value`` means a name or a number."""
    if not isinstance(value, Mapping):
        return value
    return value["value"] if "value" in value else {k: v for k, v in value.items() if k not in ("label", "with")}


def _kind(value: Any) -> str:
    return str(value.get("kind", value.get("source", ""))) if isinstance(value, Mapping) else ""


def word(value: Any) -> str:
    """A value as a label shows it."""
    if isinstance(value, Mapping):
        return " ".join(word(v) if k in ("kind", "source") else f"{k}={word(v)}" for k, v in value.items())
    return json.dumps(value) if isinstance(value, bool | list) else str(value)


def labels_named(name: str, methods: Sequence[Method]) -> list[str]:
    """The labels of the methods with this label, or else of this kind."""
    return [m.label for m in methods if m.label == name] or [m.label for m in methods if m.kind == name]


def names(methods: Sequence[Method]) -> list[str]:
    """Every label and kind by which a method can be named."""
    return list(dict.fromkeys(name for m in methods for name in (m.label, m.kind)))


# Sections that define the problem: their axes are never tuned over unless they are named.
_PROBLEM = ("data", "partition", "task", "system", "corruption", "privacy", "proxy", "evaluate")


def chosen_over(select: SelectEntry, axes: Sequence[Axis]) -> list[str]:
    """The axes over which each method is tuned: those that are named, else all that do not define the
    problem."""
    return select.over or [axis.key for axis in axes if axis.key.partition(".")[0] not in _PROBLEM]


def versus(gain: GainEntry, methods: Sequence[Method]) -> Versus:
    """The labels of these methods: variants of the gaining method do not compete, unless they are named."""
    (of,) = labels_named(gain.of, methods)
    kind = next(m.kind for m in methods if m.label == of)
    others = [m.label for m in methods if m.kind != kind] or [m.label for m in methods if m.label != of]
    return Versus(of, tuple(labels_named(name, methods)[0] for name in gain.over) or tuple(others))
