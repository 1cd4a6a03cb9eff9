"""The cells of a comparison: a parsed configuration for each method, point of the grid and seed.

Cells are named by the hash of their configuration, so that no cell is ever computed twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedloom.algorithm.capabilities import needs_proxy
from fedloom.compare.grid import Axis, Method, Point, points
from fedloom.compare.rules import Asked, is_algorithm_setting
from fedloom.core.errors import ConfigError, Fault, FedloomError
from fedloom.report.comparison.question import Place
from fedloom.runs.find import find_algorithm
from fedloom.runs.overrides import assign, idle, without_idle, without_settings
from fedloom.runs.prepare import pick_device
from fedloom.runs.settings import Config, as_hashed, hash_of, parse


class Cell(NamedTuple):
    """One run of the comparison."""

    method: Method
    place: Place
    seed: int
    config: Config
    hash: str  # of the configuration

    @property
    def name(self) -> str:
        return " · ".join([self.method.label, *self.place, f"seed {self.seed}"])

    def with_config(self, config: Config) -> Cell:
        """The cell with another configuration."""
        return self if config is self.config else self._replace(config=config, hash=_short(as_hashed(config)))


class Laid(NamedTuple):
    """The cells of a comparison, what was dropped from their configurations, and all faults."""

    cells: list[Cell]
    notes: list[str]
    faults: list[Fault]


# Defaults of cells: numbers do not depend on how many cells run side by side, and a comparison draws its own
# curves.
_IN_CELLS: dict[str, dict[str, Any]] = {"engine": {"threads": 1}, "checkpoint": {"curves": False}}


class _Spot(NamedTuple):
    """A method at a point of the grid: what all its seeds share."""

    method: Method
    place: Place
    config: Config
    left_out: list[str]
    without_effect: dict[str, str]  # shared settings without effect here, and why
    hashed: dict[str, Any]  # the configuration as it is hashed


def all_cells(base: Mapping[str, Any], asked: Asked) -> Laid:
    """Every cell, seed by seed; a fault that many cells share is reported once."""
    shared = base.get("algorithm", {})
    shared = {k: v for k, v in shared.items() if k != "kind"} if isinstance(shared, Mapping) else {}
    grid = points(asked.axes)
    faults: dict[Fault, list[str]] = {}
    spots: list[_Spot] = []
    for point in grid:
        for method in asked.methods:
            try:
                spots.append(_spot(base, method, shared, point))
            except ConfigError as error:
                for fault in error.faults:
                    faults.setdefault(fault, []).append(" · ".join([method.label, *point.place]))
    if faults:
        everywhere = len(grid) * len(asked.methods)
        return Laid([], [], [_with_places(fault, where, everywhere) for fault, where in faults.items()])
    cells = [_cell(spot, seed) for seed in asked.spec.seeds for spot in spots]
    notes = dict.fromkeys(note for spot in spots for note in spot.left_out)
    return Laid(cells, list(notes), [*_unknown_settings(shared, asked), *_without_effect_anywhere(spots)])


def _spot(base: Mapping[str, Any], method: Method, shared: Mapping[str, Any], point: Point) -> _Spot:
    """The experiment of a method at a point of the grid.

    A value of the grid overrides a method's own setting, which overrides what all methods share. A setting
    of several cells, or of other sections than the algorithm's, is dropped from cells in which it has no effect.
    """
    chosen = point.settings | method.beside
    known = setting_names(method.kind)
    table, left_out = assign(
        _fitting(base, method.kind), {k: v for k, v in chosen.items() if not is_algorithm_setting(k)}
    )
    grid = {k.removeprefix("algorithm."): v for k, v in chosen.items() if is_algorithm_setting(k)}
    common, axis = ({k: v for k, v in given.items() if k in known} for given in (shared, grid))
    table["algorithm"] = {"kind": method.kind, **common, **method.settings, **axis}
    for section, usual in _IN_CELLS.items():
        if isinstance(given := table.get(section, {}), Mapping):
            table[section] = {**usual, **given}
    own = {f"algorithm.{key}" for key in method.settings}
    without_effect = {key: why for key, why in idle(table).items() if key not in own}
    config = parse(without_settings(table, without_effect), left_out)
    pick_device(config.engine.device)
    return _Spot(method, point.place, config, left_out, without_effect, as_hashed(config))


def _cell(spot: _Spot, seed: int) -> Cell:
    config = spot.config._replace(basics=spot.config.basics.model_copy(update={"seed": seed}))
    return Cell(spot.method, spot.place, seed, config, _short(spot.hashed | {"seed": seed}))


def counted_alike(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, and for each how many use the same compiled code: seeds, rounds and learning rates are not in it."""
    kinds = [(step_settings(cell.config), repr(cell.config.partition)) for cell in cells]
    counts = Counter(dict(zip((cell.hash for cell in cells), kinds, strict=True)).values())  # each hash is run once
    return [
        cell._replace(config=cell.config._replace(alike=counts[kind])) for cell, kind in zip(cells, kinds, strict=True)
    ]


def step_settings(config: Config) -> str:
    """The settings that decide what a client computes in a step: not seeds, partitions, rounds and learning rates."""
    local = config.local.model_copy(update={"lr": 1.0})
    net = (config.data, config.model, config.task, config.algorithm, config.topology)
    return repr((net, local, config.cohort, config.system, config.corruption, config.privacy, config.engine))


def single_cell(label: str, config: Config) -> Cell:
    """A cell outside a grid."""
    method = Method(label, config.kinds["algorithm"], {}, {})
    return Cell(method, (), config.basics.seed, config, _short(as_hashed(config)))


def _short(hashed: Mapping[str, Any]) -> str:
    """The name of a cell. Whether steps are compiled is not part of it: like the machine, it changes only rounding."""
    engine = hashed["engine"]
    if "compile" in engine:
        hashed = {**hashed, "engine": engine | {"compile": "auto"}}
    return hash_of(hashed)[:16]


def hash_of_settings(table: Mapping[str, Any]) -> str:
    """The hash of the cell with these settings, as this version reads them; empty if it cannot.

    An earlier version may have known fewer settings, all of which have a default, or some that have no effect now.
    """
    try:
        return _short(as_hashed(parse(without_idle(table)[0])))
    except FedloomError:
        return ""


def _unknown_settings(shared: Mapping[str, Any], asked: Asked) -> list[Fault]:
    """Settings of algorithms, shared or of the grid, that no method has."""
    used = {key for method in asked.methods for key in setting_names(method.kind)}
    keys = [*shared, *(key.removeprefix("algorithm.") for key in _set_by(asked.axes) if is_algorithm_setting(key))]
    return [Fault(f"algorithm.{key}", "no method has this setting") for key in keys if key not in used]


def _set_by(axes: Sequence[Axis]) -> list[str]:
    return [key for axis in axes for key in (axis.key, *(k for given in axis.beside for k in given))]


def _without_effect_anywhere(spots: Sequence[_Spot]) -> list[Fault]:
    """Settings without effect in any cell, or that a method sets in other sections without effect."""
    found = _in_all(spots)
    for label in dict.fromkeys(spot.method.label for spot in spots):
        own = [spot for spot in spots if spot.method.label == label]
        found |= {key: why for key, why in _in_all(own).items() if key in own[0].method.beside}
    return [Fault(key, found[key], "leave it out") for key in sorted(found)]


def _in_all(spots: Sequence[_Spot]) -> dict[str, str]:
    """The settings without effect at all of these points, and why."""
    each = [spot.without_effect for spot in spots]
    return {key: why for key, why in each[0].items() if all(key in other for other in each)} if each else {}


def _with_places(fault: Fault, where: Sequence[str], everywhere: int) -> Fault:
    """The fault with the first cells that have it, unless all have it."""
    where = list(dict.fromkeys(where))
    if len(where) == everywhere:
        return fault
    more = f" and {len(where) - 3} more" if len(where) > 3 else ""
    return fault._replace(what=f"{fault.what} [in {'; '.join(where[:3])}{more}]")


def setting_names(kind: str) -> set[str]:
    """The settings that an algorithm has."""
    return {field.alias or name for name, field in find_algorithm(kind, "compare.algorithms").model_fields.items()}


def _fitting(base: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The base without sections that are not for this method: networks have no cohort, servers no topology."""
    network = find_algorithm(kind, "compare.algorithms").family == "gossip"
    return {k: v for k, v in base.items() if k not in ("algorithm", "cohort" if network else "topology")}


def with_one_proxy(cells: Sequence[Cell]) -> tuple[list[Cell], list[str]]:
    """The cells with the same rows reserved for the server in all methods, if any method uses such rows.

    Otherwise the clients of different methods would train on different rows.
    """
    uses = [cell for cell in cells if needs_proxy(cell.config.algorithm)]
    kept = {(cell.place, cell.seed): cell.config.proxy for cell in reversed(uses)}
    out, changed = [], False
    for cell in cells:
        config, proxy = cell.config, kept.get((cell.place, cell.seed))
        if proxy is not None and not needs_proxy(config.algorithm) and config.proxy.size is None:
            proxy = proxy.model_copy(update={"size": "auto"} if proxy.size is None else {})
            config, changed = config._replace(proxy=proxy), True
        out.append(cell.with_config(config))
    names = ", ".join(dict.fromkeys(cell.method.label for cell in uses))
    return out, [f"all methods train without the server's proxy rows, needed only by {names}"] if changed else []
