"""The cells that a comparison leaves out: those with results elsewhere, and those that were not asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.compare.collect import kept_below
from fedloom.compare.grid import Axis, labels_named, names, word
from fedloom.compare.plan import ComparisonPlan
from fedloom.compare.read import LeftOut
from fedloom.core.errors import ConfigError, Fault, nearest
from fedloom.runs.overrides import value_of

Only = Mapping[str, Sequence[Any]]  # what to run: methods, as "algorithm", and values of the grid's axes


def left_out(planned: ComparisonPlan, kept: str | Path | None, only: Only) -> LeftOut:
    """The cells whose results are kept below a folder, and those that ``only`` does not choose."""
    if kept is not None and not Path(kept).is_dir():
        raise ConfigError([Fault("--kept", f"there is no folder {kept}", "the one that fedloom collect writes")])
    if faults := list(_faults(planned, only)):
        raise ConfigError(faults)
    found = kept_below(planned, Path(kept)) if kept is not None else frozenset()
    reasons = ["their results are kept elsewhere"] if found else []
    if only:
        chosen = " and ".join(f"{key}={' or '.join(map(word, values))}" for key, values in only.items())
        reasons.append(f"only {chosen} was asked for")
    return LeftOut(found | ({cell.hash for cell in planned.cells} - _chosen(planned, only)), " or ".join(reasons))


def _chosen(planned: ComparisonPlan, only: Only) -> set[str]:
    """The hashes of the cells of these methods at these points of the grid; of all where nothing is named."""
    asked = only.get("algorithm", [method.label for method in planned.methods])
    methods = {label for name in asked for label in labels_named(str(name), planned.methods)}
    points = [{_label(axis, value) for value in only.get(axis.key, axis.labels)} for axis in planned.axes]
    return {
        cell.hash
        for cell in planned.cells
        if cell.method.label in methods and all(at in wanted for at, wanted in zip(cell.place, points, strict=True))
    }


def _faults(planned: ComparisonPlan, only: Only) -> Iterator[Fault]:
    """What ``only`` names and the comparison does not have."""
    axes = {axis.key: axis for axis in planned.axes}
    for key, values in only.items():
        for value in values:
            if key == "algorithm":
                if not labels_named(str(value), planned.methods):
                    fix = nearest(str(value), names(planned.methods))
                    yield Fault("--only algorithm", f"there is no method '{value}'", fix)
            elif key not in axes:
                yield Fault(f"--only {key}", "is not an axis of the grid", nearest(key, ["algorithm", *axes]))
            elif not _label(axes[key], value):
                yield Fault(f"--only {key}", f"there is no '{word(value)}'", nearest(word(value), axes[key].labels))


def _label(axis: Axis, value: Any) -> str:
    """The label of a value on an axis; a text may be the label, or mean the value. Empty if there is none."""
    if word(value) in axis.labels:
        return word(value)
    meant = value_of(value) if isinstance(value, str) else value
    return next((label for label, each in zip(axis.labels, axis.values, strict=True) if each == meant), "")
