"""Notes that a user should read before a comparison runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedloom.algorithm.capabilities import defaults_of
from fedloom.compare.cells import Cell
from fedloom.compare.grid import Axis
from fedloom.core import tree
from fedloom.runs.settings import Config


def about(base: Mapping[str, Any], axes: Sequence[Axis], cells: Sequence[Cell], baseline: str) -> list[str]:
    """Every note about these cells."""
    return _unused(base, axes) + _unpaired(cells, baseline) + _unlike(cells)


def _unused(base: Mapping[str, Any], axes: Sequence[Axis]) -> list[str]:
    """Settings of the experiment that no cell has, because the grid sets the whole section."""
    found = []
    for axis in axes:
        section, values = base.get(axis.key), [v for v in axis.values if isinstance(v, Mapping)]
        if isinstance(section, Mapping) and len(values) == len(axis.values):
            lost = [k for k, v in section.items() if all(value.get(k) != v for value in values)]
            found += [f"{axis.key}.{k} = {section[k]!r} is in no cell: the grid sets all of {axis.key}" for k in lost]
    return found


def _unpaired(cells: Sequence[Cell], baseline: str) -> list[str]:
    """Methods whose rounds have other clients than the baseline's, so that their p-values are not paired."""
    cohorts = {
        (cell.method.label, cell.place): cell.config.cohort
        for cell in cells
        if cell.config.algorithm.family != "gossip"
    }
    other = {
        method: cohort.sampling
        for (method, place), cohort in cohorts.items()
        if cohort != cohorts.get((baseline, place), cohort)
    }
    return [f"{m} draws other clients than {baseline} (cohort.sampling = {s})" for m, s in other.items()]


def _unlike(cells: Sequence[Cell]) -> list[str]:
    """Settings of training in which methods differ by their own definitions, not by the user's choice."""
    found: dict[str, None] = {}
    by_place: dict[tuple[str, ...], dict[str, Cell]] = {}
    for cell in cells:
        by_place.setdefault(cell.place, {}).setdefault(cell.method.label, cell)
    for here in by_place.values():
        for section in ("local", "model"):
            keys = {key for cell in here.values() for key in defaults_of(cell.config.algorithm).get(section, {})}
            for key in sorted(keys):
                found |= dict.fromkeys(_apart(f"{section}.{key}", list(here.values())))
    return list(found)


def _apart(name: str, cells: Sequence[Cell]) -> list[str]:
    """The note about a setting that these cells do not share; a setting that the user gave for a method is intended."""
    section, _, key = name.partition(".")
    by_value: dict[str, list[str]] = {}
    for cell in cells:
        if name not in cell.method.beside and (name != "local.state" or _has_memory(cell.config)):
            value = getattr(getattr(cell.config, section), key, None)
            by_value.setdefault("unset" if value is None else str(value), []).append(cell.method.label)
    if len(by_value) < 2:
        return []
    said = "; ".join(f"{value} for {', '.join(labels)}" for value, labels in by_value.items())
    return [f"{name} differs by the methods' own definitions: {said}; set {name} to compare under one policy"]


def _has_memory(config: Config) -> bool:
    """Whether the local optimizer has a state that could be kept or reset; plain SGD has none."""
    return bool(tree.leaves(config.local.make_optimizer().init(torch.zeros(1))))
