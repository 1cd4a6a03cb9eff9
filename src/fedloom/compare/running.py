"""Comparisons: methods x a grid of settings x seeds, each cell an ordinary run, in one folder that can be resumed.

All methods of a seed share the data split, the initial model and the cohorts, since these follow from
the seed alone. Cells are named by the hash of their config, so what is finished is never computed twice.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple, Protocol, get_args

import tomli_w
import torch
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, field_validator

from fedloom.algorithm import Algorithm
from fedloom.compare.budget import Forecaster, stretched
from fedloom.core import disk, tree, usercode
from fedloom.core.errors import CheckpointError, ConfigError, DivergedError, Fault, FedloomError, StorageError, nearest
from fedloom.core.metrics import Auc
from fedloom.core.schema import Spec, read
from fedloom.data.files import default_root, places_below
from fedloom.data.sources import Digits, File, PublishedSet, Source, Synthetic
from fedloom.engine.diagnose import RECORDED
from fedloom.engine.local import lane_limit
from fedloom.report import comparison as report
from fedloom.report import grid as layouts
from fedloom.report.comparison import Along, Equal, Place, Question, Result, Row, Spent
from fedloom.report.grid import Layout, Sheet
from fedloom.runs import loop
from fedloom.runs.environment import changed_files, other_versions
from fedloom.runs.find import find_algorithm
from fedloom.runs.folder import as_json, read_ended, write_text
from fedloom.runs.in_memory import InMemory
from fedloom.runs.loop import InterruptedRun, Progress
from fedloom.runs.overrides import assign, idle, without_idle
from fedloom.runs.prepare import pick_device
from fedloom.runs.resume import resume
from fedloom.runs.settings import Config, as_table, config_hash, parse, read_toml
from fedloom.runs.start import start

# How names begin that are the evaluation's own, and not an algorithm's.
_JUDGED = ("global", "personal", "participants", "consensus", "nodes", "network", "bytes", "work", "time")
_PROCESS = 0.6e9  # bytes of a process that trains a small net: 0.54e9 were measured on Linux
_MATRICES = 6  # as large as all models side by side, that a gradient step holds: see engine.local
_MOST = 1.6e9  # bytes of these where the size of the net is unknown: the rule for lanes allows no more on a CPU


# -- the [compare] table ---------------------------------------------------------------------------
class Entry(Spec):
    """A method: its kind, its settings, and what the table calls it."""

    model_config = ConfigDict(extra="allow")
    kind: str
    label: str = ""
    beside: dict[str, Any] = Field(default_factory=dict, alias="with")

    @field_validator("beside", mode="before")
    @classmethod
    def _dotted(cls, given: Any) -> Any:
        return _flat(given)


class Claim(Spec):
    """Something about what a paper reports for a method at some places of the grid."""

    algorithm: str
    where: dict[str, Any] = Field(default_factory=dict)

    @field_validator("where", mode="before")
    @classmethod
    def _dotted(cls, given: Any) -> Any:
        return _flat(given)


class Paper(Claim):
    """What it reports: one number, or each of the layout's cell."""

    value: float | list[float]


class Doubt(Claim):
    """Why that cannot be, or hardly; of all methods, and all numbers of a cell, unless it says of which."""

    algorithm: str = ""
    metric: str = ""
    why: str = Field(min_length=1)


class Gain(Spec):
    """The method whose gain is shown, and over the best of which others; of none: of all of other kinds."""

    of: str
    over: list[str] = Field(default_factory=list)


_MOST_SEEDS = 10_000


class Compare(Spec):
    """The settings of a comparison."""

    algorithms: list[Entry] = Field(min_length=1)
    seeds: list[NonNegativeInt] = Field([0, 1, 2], min_length=1)
    baseline: str = ""
    gain: Gain | None = None
    metric: str = ""
    target: float | None = None
    x: Along | None = None
    equal: Equal = "rounds"
    reference: str = ""
    budget: PositiveFloat | None = None
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    layout: Layout | None = None
    cells: str = ""
    notes: list[str] = Field(default_factory=list)
    paper: list[Paper] = Field(default_factory=list)
    doubts: list[Doubt] = Field(default_factory=list)

    @field_validator("algorithms", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return [{"kind": x} if isinstance(x, str) else x for x in given] if isinstance(given, list) else given

    @field_validator("gain", mode="before")
    @classmethod
    def _of_one(cls, given: Any) -> Any:
        return {"of": given} if isinstance(given, str) else given

    @field_validator("seeds", mode="before")
    @classmethod
    def _counted(cls, given: Any) -> Any:
        if isinstance(given, int) and given > _MOST_SEEDS:
            raise ValueError(f"at most {_MOST_SEEDS:,} seeds")
        return list(range(given)) if isinstance(given, int) else given

    @field_validator("grid", mode="before")
    @classmethod
    def _dotted(cls, given: Any) -> Any:
        return _flat(given)


def _flat(given: Any) -> Any:
    """Keys with dots instead of tables in tables: TOML reads ``partition.alpha = 1`` as the latter."""
    if not isinstance(given, Mapping):
        return given
    out: dict[str, Any] = {}
    for key, value in given.items():
        inner = _flat(value) if isinstance(value, Mapping) else None
        out |= {f"{key}.{k}": v for k, v in inner.items()} if inner is not None else {key: value}
    return out


# -- from a table to cells -------------------------------------------------------------------------
class Method(NamedTuple):
    """One of the methods that are compared."""

    label: str
    kind: str
    settings: dict[str, Any]
    beside: dict[str, Any]  # settings of other sections that go with it


class Axis(NamedTuple):
    """A config key and the values that it takes."""

    key: str
    values: tuple[Any, ...]
    labels: tuple[str, ...]
    beside: tuple[dict[str, Any], ...]  # settings of other sections that go with each value


class Cell(NamedTuple):
    """One run of the comparison."""

    method: Method
    place: Place
    seed: int
    config: Config
    hash: str

    @property
    def name(self) -> str:
        return " · ".join([self.method.label, *self.place, f"seed {self.seed}"])


class Plan(NamedTuple):
    """A valid comparison."""

    base: dict[str, Any]
    spec: Compare
    methods: tuple[Method, ...]
    axes: tuple[Axis, ...]
    baseline: str
    cells: tuple[Cell, ...]
    notes: tuple[str, ...]
    budgets: Mapping[Place, float] = MappingProxyType({})  # what a method may spend there, once that is known

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(itertools.product(*(axis.labels for axis in self.axes)))

    @property
    def name(self) -> str:
        """What a folder of this comparison is called, unless its user says otherwise."""
        first = self.cells[0].config
        plain = "-".join([*(m.kind for m in self.methods), first.kinds["data"]])
        return disk.as_name(first.basics.name or plain)[:80]

    def as_toml(self) -> str:
        """The comparison with its labels, seeds and baseline written out; running it gives the same cells."""
        given = self.spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        given["algorithms"] = [
            {"kind": m.kind, "label": m.label, **m.settings, **({"with": m.beside} if m.beside else {})}
            for m in self.methods
        ]
        given |= {"seeds": list(self.spec.seeds), "baseline": self.baseline}
        table = {name: given[name] for name in Compare.model_fields if name in given}
        return tomli_w.dumps({**self.base, "compare": table})


def plan(table: Mapping[str, Any]) -> Plan:
    """The comparison that ``table`` describes, every cell parsed, or one ConfigError with everything that is wrong."""
    given = table.get("compare", {})
    base = {k: v for k, v in table.items() if k != "compare"}
    faults = _beside_the_base(base)
    spec, wrong = read(Compare, given if isinstance(given, Mapping) else {"compare": given}, "compare")
    if spec is None:
        raise ConfigError(faults + wrong)
    methods, axes = _methods(spec.algorithms), _axes(spec.grid)
    faults += _inconsistencies(spec, methods, axes)
    cells, notes, wrong = _cells(base, spec, methods, axes)
    wanted = [("compare.metric", spec.metric)]
    wanted += [("compare.layout.cell", part.metric) for part in (spec.layout.cell if spec.layout else ())]
    faults += wrong or [f for at, name in wanted for f in _unrecorded(name, [cell.config for cell in cells], at)]
    if faults:
        raise ConfigError(faults)
    baseline = _named(spec.baseline, methods)[0] if spec.baseline else methods[0].label
    cells, kept = _with_one_proxy(cells)
    notes += _unused(base, axes) + _unpaired(cells, baseline) + _unlike(cells) + kept
    planned = Plan(base, spec, methods, axes, baseline, tuple(cells), tuple(notes))
    reported = {spot for paper in spec.paper for spot in _spots(planned, paper)}
    vain = [k for k, doubt in enumerate(spec.doubts) if reported.isdisjoint(_spots(planned, doubt))]
    if vain:
        raise ConfigError([Fault(f"compare.doubts.{k}", "no value of a paper is there to be doubted") for k in vain])
    return planned


# -- equal terms -----------------------------------------------------------------------------------
def equalised(planned: Plan, root: Path) -> Plan:
    """The comparison with as many rounds for each method as it may spend; it takes the data to know that.

    Rounds are those of the first seed for all seeds, so that all of them have the same ones.
    """
    spec = planned.spec
    if spec.equal == "rounds":
        return planned
    forecaster, first = Forecaster(root), spec.seeds[0]
    reference = _named(spec.reference, planned.methods)[0] if spec.reference else planned.baseline
    samples = {(cell.place, cell.method.label): cell.config for cell in planned.cells if cell.seed == first}
    budgets, rounds = {}, {}
    for place in planned.places:
        budget = budgets[place] = spec.budget or forecaster.cost(samples[place, reference], spec.equal)
        if not budget:
            what = f"{reference} spends no {spec.equal}, which methods are to spend alike"
            raise ConfigError([Fault("compare.reference", what, "name another, or set compare.budget")])
        for method in planned.methods:
            rounds[place, method.label] = forecaster.rounds(samples[place, method.label], spec.equal, budget)
    cells = []
    for cell in planned.cells:
        config = stretched(cell.config, rounds[cell.place, cell.method.label])
        cells.append(cell._replace(config=config, hash=config_hash(config)[:16]))
    return planned._replace(cells=tuple(cells), budgets=budgets)


# -- what the cells can record ---------------------------------------------------------------------
def metric_names(config: Config) -> set[str]:
    """Every metric that a run may record, but for what an algorithm tells of itself."""
    alg, evaluate = config.algorithm, config.evaluate
    plain = ["accuracy", "loss"]
    judged = plain + [f"auc_{variant}" for variant in evaluate.auc]
    spread = [f"{name}{end}" for name in judged for end in ("", "_mean", "_std", "_worst10")] + ["diverged"]
    found = {"bytes": ["up", "down", "busiest"], "work": ["gradients"], "time": ["simulated"]}
    simulated = config.privacy.noise_from == "seed"
    found |= {"privacy": ["epsilon_simulated" if simulated else "epsilon"]} if config.privacy.on else {}
    found |= {"bad_clients": ["weight_mean", "weight_total", "weight_ratio"]} if config.corruption.any else {}
    if alg.family == "gossip":
        nodes = [*plain, "accuracy_min", "accuracy_std"]
        found |= {"consensus/test": judged, "nodes/test": nodes, "network": ["offline", "away", "dead"]}
        found |= {"consensus": ["distance", "relative", "psi", "contraction"]}
        found |= {"consensus/pre_mix": ["distance"], "consensus/post_mix": ["distance"]}
        found |= {"nodes/pre_mix/test": nodes} if evaluate.pre_mix else {}
    elif alg.communicates and alg.common:
        found |= {"global/test": judged} | ({"global/train": plain} if evaluate.train else {})
    if evaluate.flatness is not None:
        found |= {f"{'consensus' if alg.family == 'gossip' else 'global'}/flatness": ["R0", "R1"]}
    if _may_have_own_rows(config) and evaluate.personal:
        found |= {f"personal/{alg.served}/test": spread}
    if _may_have_own_rows(config) and evaluate.participants:
        found |= {"participants/pre_fit/test": spread, "participants/post_fit/test": spread}
    found |= {} if alg.waits else {"staleness": ["mean", "max"]}
    names = {f"{place}/{name}" for place, ends in found.items() for name in ends}
    return names.union(*(RECORDED[name] for name in evaluate.diagnostics if alg.family != "gossip"))


def _may_have_own_rows(config: Config) -> bool:
    """Whether clients may have rows of their own to be tested on: held out, or marked by data that names clients."""
    kind = config.kinds["partition"]
    return config.partition.holdout > 0 or kind == "natural" or ":" in kind


def _unrecorded(metric: str, configs: Sequence[Config], at: str) -> list[Fault]:
    """The metric that is asked for, if no cell can record it."""
    names = {name for config in configs for name in metric_names(config)}
    if not metric or not configs or any(report.meant(metric, names)):
        return []
    if any(map(_tells, configs)) and metric.partition("/")[0] not in _JUDGED:
        return []
    asked = (f"it takes evaluate.{key}={json.dumps(value)}" for key, value in _more(metric, configs))
    return [Fault(at, f"no method records '{metric}'", next(asked, nearest(metric, names)))]


def _tells(config: Config) -> bool:
    """Whether the algorithm also records what it tells of itself, under names that only a run shows."""
    return "updates" in config.evaluate.diagnostics and type(config.algorithm).told is not Algorithm.told


def _more(metric: str, configs: Sequence[Config]) -> Iterator[tuple[str, Any]]:
    """Settings of ``evaluate`` with which the metric would be recorded."""
    switches: list[tuple[str, Any]] = [(key, True) for key in ("train", "personal", "participants")]
    switches += [("auc", [variant]) for variant in get_args(Auc)] + [("diagnostics", [name]) for name in RECORDED]
    for key, value in switches:
        given = {key: tuple(value) if isinstance(value, list) else value}
        others = (c._replace(evaluate=c.evaluate.model_copy(update=given)) for c in configs)
        if any(any(report.meant(metric, metric_names(other))) for other in others):
            yield key, value


# -- what is told beside the table -----------------------------------------------------------------
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
    """Methods whose rounds have other clients than the baseline's, so that their p-values are not of pairs."""
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
    """Settings of training in which methods differ by their own definitions, and not because the user said so."""
    found: dict[str, None] = {}
    for place in dict.fromkeys(cell.place for cell in cells):
        here = {cell.method.label: cell for cell in reversed(cells) if cell.place == place}
        for section in ("local", "model"):
            keys = {key for cell in here.values() for key in cell.config.algorithm.defaults().get(section, {})}
            for key in sorted(keys):
                found |= dict.fromkeys(_apart(f"{section}.{key}", [here[label] for label in reversed(here)]))
    return list(found)


def _apart(name: str, cells: Sequence[Cell]) -> list[str]:
    """What is to be said of a setting that these cells do not share; who sets it for a method means it."""
    section, _, key = name.partition(".")
    by_value: dict[str, list[str]] = {}
    for cell in cells:
        if name not in cell.method.beside and (name != "local.state" or _remembers(cell.config)):
            value = getattr(getattr(cell.config, section), key, None)
            by_value.setdefault("unset" if value is None else str(value), []).append(cell.method.label)
    if len(by_value) < 2:
        return []
    said = "; ".join(f"{value} for {', '.join(labels)}" for value, labels in by_value.items())
    return [f"{name} differs by the methods' own definitions: {said}; set {name} to compare under one policy"]


def _remembers(config: Config) -> bool:
    """Whether the local optimiser has a memory that could be kept or reset; plain SGD has none."""
    return bool(tree.leaves(config.local.optimiser().init(torch.zeros(1))))


def _with_one_proxy(cells: Sequence[Cell]) -> tuple[list[Cell], list[str]]:
    """Cells whose methods all leave the server its own rows, where one of them uses these: else they would train on
    different ones."""
    uses = [cell for cell in cells if cell.config.algorithm.needs_proxy]
    kept = {(cell.place, cell.seed): cell.config.proxy for cell in reversed(uses)}
    out, changed = [], False
    for cell in cells:
        config, proxy = cell.config, kept.get((cell.place, cell.seed))
        if proxy is not None and not config.algorithm.needs_proxy and config.proxy.size is None:
            proxy = proxy.model_copy(update={"size": "auto"} if proxy.size is None else {})
            config, changed = config._replace(proxy=proxy), True
        out.append(cell._replace(config=config, hash=config_hash(config)[:16]))
    names = ", ".join(dict.fromkeys(cell.method.label for cell in uses))
    return out, [f"all methods train without the server's proxy rows, used by {names} alone"] if changed else []


def _beside_the_base(base: Mapping[str, Any]) -> list[Fault]:
    """Keys of an experiment that a comparison sets itself."""
    faults = []
    if "seed" in base:
        faults.append(Fault("seed", "is set by compare.seeds", f"use compare.seeds = [{base['seed']}]"))
    data = base.get("data")
    if InMemory.kind in (data, data.get("source") if isinstance(data, Mapping) else None):
        faults.append(Fault("data.source", "data from Python cannot be compared yet", "write it to an .npz file"))
    return faults


def _methods(entries: Sequence[Entry]) -> tuple[Method, ...]:
    """The methods with their labels: as given, else the kind, with the settings where that alone is not enough."""
    kinds = [entry.kind for entry in entries]
    out = []
    for entry in entries:
        own = dict(entry.__pydantic_extra__ or {})
        many = kinds.count(entry.kind) > 1 and own
        label = f"{entry.kind} ({', '.join(f'{k}={_word(v)}' for k, v in own.items())})" if many else entry.kind
        out.append(Method(entry.label or label, entry.kind, own, entry.beside))
    return tuple(out)


def _axes(grid: Mapping[str, list[Any]]) -> tuple[Axis, ...]:
    out = []
    for key, values in grid.items():
        plain = [_plain(v) for v in values]
        kinds = [_kind(v) for v in values]
        short = [kind if kind and kinds.count(kind) == 1 else _word(p) for kind, p in zip(kinds, plain, strict=True)]
        given = [str(v.get("label", "")) if isinstance(v, Mapping) else "" for v in values]
        beside = tuple(_flat(v.get("with", {})) if isinstance(v, Mapping) else {} for v in values)
        out.append(Axis(key, tuple(plain), tuple(g or s for g, s in zip(given, short, strict=True)), beside))
    return tuple(out)


def _plain(value: Any) -> Any:
    """A value of the grid without what is said about it; a table with ``value`` stands for a name or a number."""
    if not isinstance(value, Mapping):
        return value
    return value["value"] if "value" in value else {k: v for k, v in value.items() if k not in ("label", "with")}


def _kind(value: Any) -> str:
    return str(value.get("kind", value.get("source", ""))) if isinstance(value, Mapping) else ""


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(_word(v) if k in ("kind", "source") else f"{k}={_word(v)}" for k, v in value.items())
    return json.dumps(value) if isinstance(value, bool | list) else str(value)


def _named(name: str, methods: Sequence[Method]) -> list[str]:
    """The labels that a label or a kind stands for."""
    return [m.label for m in methods if m.label == name] or [m.label for m in methods if m.kind == name]


def _without_gain(gain: Gain, methods: Sequence[Method]) -> list[Fault]:
    """Why there is no such gain."""
    known = {*(m.label for m in methods), *(m.kind for m in methods)}
    named = [("compare.gain.of", gain.of), *(("compare.gain.over", name) for name in gain.over)]
    strange = [(at, name) for at, name in named if len(_named(name, methods)) != 1]
    faults = [Fault(at, f"'{name}' is not one of the methods", nearest(name, known)) for at, name in strange]
    if (not faults and gain.of in _versus(gain, methods).over) or len(methods) == 1:
        faults.append(Fault("compare.gain", f"needs another method than '{gain.of}' to be better than"))
    return faults


def _versus(gain: Gain, methods: Sequence[Method]) -> report.Versus:
    """The labels of these methods: variants of the one that gains are no baselines, unless they are named."""
    (of,) = _named(gain.of, methods)
    kind = next(m.kind for m in methods if m.label == of)
    others = [m.label for m in methods if m.kind != kind] or [m.label for m in methods if m.label != of]
    return report.Versus(of, tuple(_named(name, methods)[0] for name in gain.over) or tuple(others))


def _inconsistencies(spec: Compare, methods: Sequence[Method], axes: Sequence[Axis]) -> list[Fault]:
    labels = [m.label for m in methods]
    known = {*labels, *(m.kind for m in methods)}
    twice = [x for x in dict.fromkeys(labels) if labels.count(x) > 1]
    faults = [Fault("compare.algorithms", f"'{x}' is there twice", "give each a label") for x in twice]
    if len(set(spec.seeds)) < len(spec.seeds):
        faults.append(Fault("compare.seeds", f"a seed is there twice (got {spec.seeds})"))
    if spec.baseline and len(_named(spec.baseline, methods)) != 1:
        faults.append(
            Fault("compare.baseline", f"'{spec.baseline}' is not one of the methods", nearest(spec.baseline, known))
        )
    faults += _without_gain(spec.gain, methods) if spec.gain is not None else []
    faults += _unequal(spec, methods)
    for axis in axes:
        at = f"compare.grid.{axis.key}"
        if not axis.values:
            faults.append(Fault(at, "has no values"))
        if len(set(axis.labels)) < len(axis.labels):
            faults.append(Fault(at, f"two values have the same label (got {list(axis.labels)})"))
        if axis.key in ("seed", "algorithm", "algorithm.kind", "name"):
            faults.append(Fault(at, "cannot be an axis", "see compare.seeds and compare.algorithms"))
    faults += _twice_set(methods, axes)
    if spec.layout is not None:
        faults += spec.layout.faults(["algorithm", *(axis.key for axis in axes)])
    for number, paper in enumerate(spec.paper):
        faults += _unmatched(paper, f"compare.paper.{number}", methods, axes)
        if isinstance(paper.value, list) and len(paper.value) != len(spec.layout.cell if spec.layout else ()):
            what = f"a list has one number for each metric of compare.layout.cell (got {paper.value})"
            faults.append(Fault(f"compare.paper.{number}.value", what))
    for number, doubt in enumerate(spec.doubts):
        faults += _unmatched(doubt, f"compare.doubts.{number}", methods, axes)
        metrics = [part.metric for part in spec.layout.cell] if spec.layout else [spec.metric]
        if doubt.metric and doubt.metric not in metrics:
            what = f"no value of a paper is of '{doubt.metric}'"
            faults.append(Fault(f"compare.doubts.{number}.metric", what, nearest(doubt.metric, metrics)))
    return faults


def _unequal(spec: Compare, methods: Sequence[Method]) -> list[Fault]:
    """What does not go together in the terms of a comparison."""
    faults = []
    given = [(key, value) for key in ("reference", "budget") if (value := getattr(spec, key))]
    if spec.equal == "rounds":
        fix = "set compare.equal to gradients, bytes or busiest"
        return [Fault(f"compare.{key}", f"methods have equal rounds (got {value!r})", fix) for key, value in given]
    if len(given) > 1:
        faults.append(
            Fault("compare.budget", "reference and budget both say how much may be spent", "keep one of them")
        )
    known = {m.label for m in methods} | {m.kind for m in methods}
    if spec.reference and len(_named(spec.reference, methods)) != 1:
        what = f"'{spec.reference}' is not one of the methods"
        faults.append(Fault("compare.reference", what, nearest(spec.reference, known)))
    sized = [m for m in methods if "rounds" in m.beside and [m.label] != _named(spec.reference, methods)]
    what = f"how many it has follows from compare.equal = '{spec.equal}'"
    faults += [Fault("compare.algorithms.with.rounds", f"{what} [in {m.label}]", "leave it out") for m in sized]
    return faults


def _twice_set(methods: Sequence[Method], axes: Sequence[Axis]) -> list[Fault]:
    """Settings that come with a value of the grid or with a method, and are set elsewhere in the comparison, too."""
    faults = []
    own = {axis.key: {key for given in axis.beside for key in given} for axis in axes}
    own["algorithms"] = {key for method in methods for key in method.beside}
    for name, keys in own.items():
        at = "compare.algorithms" if name == "algorithms" else f"compare.grid.{name}"
        others = [k for other, its in own.items() if other != name for k in its] + list(own)
        faults += [Fault(f"{at}.with.{k}", "is set by another axis or by a method, too") for k in keys if k in others]
        faults += [
            Fault(f"{at}.with.{k}", "cannot be set here", "see compare.seeds and compare.algorithms")
            for k in keys
            if k in ("seed", "name") or (_is_setting(k) and name == "algorithms") or k == "algorithm.kind"
        ]
    return faults


def _unmatched(claim: Claim, at: str, methods: Sequence[Method], axes: Sequence[Axis]) -> list[Fault]:
    faults = []
    if claim.algorithm and not _named(claim.algorithm, methods):
        names = [x for m in methods for x in (m.label, m.kind)]
        faults.append(
            Fault(f"{at}.algorithm", f"there is no method '{claim.algorithm}'", nearest(claim.algorithm, names))
        )
    keys = {axis.key: axis for axis in axes}
    for key, value in claim.where.items():
        if key not in keys:
            faults.append(Fault(f"{at}.where.{key}", "is not an axis of the grid", nearest(key, keys)))
        elif _word(value) not in keys[key].labels:
            faults.append(
                Fault(f"{at}.where.{key}", f"there is no '{_word(value)}'", nearest(_word(value), keys[key].labels))
            )
    return faults


def _cells(
    base: Mapping[str, Any], spec: Compare, methods: Sequence[Method], axes: Sequence[Axis]
) -> tuple[list[Cell], list[str], list[Fault]]:
    """Every cell, seed by seed, with notes and faults; a fault that many cells share is told once."""
    shared = base.get("algorithm", {})
    shared = {k: v for k, v in shared.items() if k != "kind"} if isinstance(shared, Mapping) else {}
    notes: dict[str, None] = {}
    faults: dict[Fault, list[str]] = {}
    cells: list[Cell] = []
    used: set[str] = set()
    in_vain: list[dict[str, str]] = []
    places = list(itertools.product(*(zip(a.labels, a.values, a.beside, strict=True) for a in axes)))
    for seed, place, method in itertools.product(spec.seeds, places, methods):
        labels = tuple(label for label, *_ in place)
        chosen = {axis.key: value for axis, (_, value, _) in zip(axes, place, strict=True)}
        chosen |= {key: value for *_, beside in place for key, value in beside.items()} | method.beside
        try:
            used |= _known(method.kind)
            table, said, left_out = _experiment(base, method, shared, chosen)
            in_vain.append(left_out)
            config = parse(table | {"seed": seed}, said)
            pick_device(config.engine.device)
        except ConfigError as error:
            for fault in error.faults:
                faults.setdefault(fault, []).append(" · ".join([method.label, *labels]))
            continue
        notes |= dict.fromkeys(said)
        cells.append(Cell(method, labels, seed, config, config_hash(config)[:16]))
    set_by_axes = [key for a in axes for key in (a.key, *(k for given in a.beside for k in given))]
    keys = [*shared, *(key.removeprefix("algorithm.") for key in set_by_axes if _is_setting(key))]
    unknown = [] if faults else [Fault(f"algorithm.{k}", "no method has this setting") for k in keys if k not in used]
    everywhere_idle = set(in_vain[0]).intersection(*in_vain) if in_vain and not faults else set()
    unknown += [Fault(key, in_vain[0][key], "leave it out") for key in sorted(everywhere_idle)]
    everywhere = len(places) * len(methods)
    return cells, list(notes), [*unknown, *(_placed(f, list(dict.fromkeys(w)), everywhere) for f, w in faults.items())]


def _experiment(
    base: Mapping[str, Any], method: Method, shared: Mapping[str, Any], chosen: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """The experiment of a method at a place of the grid, what had to be left out for it, and what of that which all
    methods share has no effect here, and why."""
    known = _known(method.kind)
    table, said = assign(_fitting(base, method.kind), {k: v for k, v in chosen.items() if not _is_setting(k)})
    grid = {k.removeprefix("algorithm."): v for k, v in chosen.items() if _is_setting(k)}
    # A value of the grid goes before a method's own, and that before what all methods share.
    common, axis = ({k: v for k, v in given.items() if k in known} for given in (shared, grid))
    table["algorithm"] = {"kind": method.kind, **common, **method.settings, **axis}
    # One thread, so that numbers do not depend on how many cells run side by side.
    if isinstance(table.setdefault("engine", {}), Mapping):
        table["engine"] = {"threads": 1, **table["engine"]}
    own = {*chosen, *(f"algorithm.{key}" for key in method.settings)}
    in_vain = {key: why for key, why in idle(table).items() if key not in own}
    table, _ = without_idle(table, keep=own)
    return table, said, in_vain


def _is_setting(key: str) -> bool:
    return key.startswith("algorithm.")


def _placed(fault: Fault, where: list[str], everywhere: int) -> Fault:
    if len(where) == everywhere:
        return fault
    more = f" and {len(where) - 3} more" if len(where) > 3 else ""
    return fault._replace(what=f"{fault.what} [in {'; '.join(where[:3])}{more}]")


def _known(kind: str) -> set[str]:
    return {field.alias or name for name, field in find_algorithm(kind, "compare.algorithms").model_fields.items()}


def _fitting(base: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The base without sections that are not for this method: networks have no cohort, servers no topology."""
    network = find_algorithm(kind, "compare.algorithms").family == "gossip"
    return {k: v for k, v in base.items() if k not in ("algorithm", "cohort" if network else "topology")}


# -- running the cells -----------------------------------------------------------------------------
class Standing(NamedTuple):
    """How far a comparison is."""

    done: int
    cells: int
    reused: int
    running: tuple[tuple[str, int, int], ...]  # name, round and rounds of each cell at work
    seconds_left: float | None
    ended: str = ""  # the cell that has just ended, and how


class Watcher(Protocol):
    """Somebody who watches a comparison; it never prints itself."""

    def started(self, plan: Plan, folder: Path, jobs: int, standing: Standing) -> None: ...

    def moved(self, standing: Standing) -> None: ...

    def stopping(self) -> None: ...


class Silence:
    """A watcher that says nothing."""

    def started(self, plan: Plan, folder: Path, jobs: int, standing: Standing) -> None: ...

    def moved(self, standing: Standing) -> None: ...

    def stopping(self) -> None: ...


class InterruptedComparison(KeyboardInterrupt):
    """A comparison that was asked to stop; its cells were saved."""

    def __init__(self, folder: Path, done: int, cells: int) -> None:
        super().__init__(f"stopped with {done} of {cells} cells done")
        self.folder, self.done, self.cells = folder, done, cells


class Comparison(NamedTuple):
    """A finished comparison."""

    folder: Path
    cells: Path  # the folder of its runs
    question: Question
    rows: list[Row]
    results: list[Result]
    failures: dict[str, str]  # by the cell's name
    sheet: Sheet | None = None  # the same in the layout that was asked for

    def summary(self) -> dict[str, Any]:
        """The numbers of the table; the same whenever the comparison is repeated."""
        q = self.question
        terms = {"equal": q.equal, "budgets": {q.title(p) or "all": v for p, v in q.budgets.items()}}
        return (
            {
                "metric": q.metric,
                "baseline": q.baseline,
                "seeds": list(q.seeds),
                "target": q.target,
                "cells": len(self.results),
                "diverged": sum(r.state == "diverged" for r in self.results),
                "failed": sum(r.state == "failed" for r in self.results),
                "table": report.as_dicts(q, self.rows),
                "notes": report.notes(q, self.rows),
            }
            | (terms if q.equal != "rounds" else {})
            | ({"layout": layouts.as_dicts(self.sheet)} if self.sheet is not None else {})
        )

    def as_json(self) -> dict[str, Any]:
        """What ``fedloom compare --json`` prints."""
        return {"folder": str(self.folder), **self.summary(), "failures": self.failures}


def run(
    table: Mapping[str, Any] | Plan,
    out: str | Path | None = None,
    *,
    data_root: str | Path | None = None,
    jobs: int | None = None,
    trust: bool = False,
    watcher: Watcher | None = None,
) -> Comparison:
    """Run what is missing of a comparison in the folder ``out``, and write its tables and curves there.

    ``table`` is an experiment with a ``compare`` table beside its other sections. ``trust``: the code that a
    comparison in this folder names may run, although you have not run it before.
    """
    if not isinstance(table, Plan):
        usercode.vouch(table)
    planned = table if isinstance(table, Plan) else plan(table)
    folder = Path(out) if out is not None else Path("runs") / f"compare-{planned.name}"
    root = Path(data_root) if data_root is not None else default_root()
    _find_data(planned, root)
    planned = equalised(planned, root)
    with _storage(folder), _held(folder):
        _refuse_another(planned, folder, root, trust=trust)
        write_text(folder / "compare.toml", planned.as_toml())
        with _cells_of(planned, folder) as cells:
            planned = planned._replace(notes=(*planned.notes, *_cleared(planned, cells)))
            failures = _run_missing(planned, folder, cells, root, jobs, watcher or Silence())
            return _write(planned, folder, cells, failures)


def _find_data(planned: Plan, root: Path) -> None:
    """Refuse at once what every cell would refuse: a published data set that is not here."""
    published = [c.config.data for c in planned.cells if isinstance(c.config.data, PublishedSet)]
    for layout in {data.kind: data.layout for data in published}.values():
        places_below(layout, root)


@contextmanager
def _storage(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"writing below {folder} failed: {error.strerror or error}") from error


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder, made where it is not there, for this process alone."""
    if folder.exists() and (not folder.is_dir() or not _is_ours(folder)):
        raise ConfigError([Fault("--out", f"{folder} already exists and is not of a comparison", "choose another")])
    with _alone(folder, "--out"):
        yield


@contextmanager
def _cells_of(planned: Plan, folder: Path) -> Iterator[Path]:
    """Where the cells lie: in the comparison's own folder, or in one that it shares with other comparisons."""
    if not planned.spec.cells:
        disk.make_folder(folder / "cells")
        yield folder / "cells"
        return
    shared = Path(planned.spec.cells)
    with _alone(shared, "compare.cells"):
        yield shared


@contextmanager
def _alone(folder: Path, at: str) -> Iterator[None]:
    """A folder that one process uses at a time."""
    disk.make_folder(folder)
    try:
        lock = disk.lock(folder / ".lock")
    except BlockingIOError as error:
        raise ConfigError([Fault(at, f"another process is using {folder}")]) from error
    try:
        disk.refuse_links(folder)
        yield
    finally:
        os.close(lock)


def _is_ours(folder: Path) -> bool:
    inside = {p.name for p in folder.iterdir()}
    return "compare.toml" in inside or inside <= {".lock", "compare.toml.part"}


def _refuse_another(planned: Plan, folder: Path, root: Path, *, trust: bool) -> None:
    """A folder keeps its tables: a comparison may grow there, but not give way to another."""
    if not (folder / "compare.toml").is_file():
        return
    try:
        table = read_toml(folder / "compare.toml")
        if trust:
            usercode.vouch(table)
        there = equalised(plan(table), root)
    except ConfigError as error:
        for fault in error.faults:
            if usercode.NEEDS_TRUST in str(fault):
                raise ConfigError([Fault(f"{folder}/compare.toml", str(fault))]) from error
        what = f"{folder} holds a comparison that can no longer be read ({error.faults[0]})"
        raise ConfigError([Fault("--out", what, "choose another folder, or delete that one")]) from error
    mine = {cell.hash for cell in planned.cells}
    lost = sum(cell.hash not in mine for cell in there.cells)
    if lost:
        labels = ", ".join(m.label for m in there.methods)
        what = f"{folder} holds another comparison, of {labels} with seeds {', '.join(map(str, there.spec.seeds))}"
        gone = f"{lost} of its {len(there.cells)} cells are not in this one"
        apart = "".join(f"; {word}" for word in _differences(there.base, planned.base))
        raise ConfigError([Fault("--out", f"{what}: {gone}{apart}", "choose another folder, or delete that one")])


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The first settings in which two experiments differ, in words."""
    a, b = _flat(there), _flat(here)
    differ = [key for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)]
    return [f"{key} is {a.get(key, 'unset')} there and {b.get(key, 'unset')} here" for key in differ[:3]]


def _cleared(planned: Plan, cells: Path) -> list[str]:
    """Delete the cells that were made with other code or weights of the user's, so that they run again; say so."""
    homes = [home for home in dict.fromkeys(cells / cell.hash for cell in planned.cells) if home.is_dir()]
    stale = {home: changed for home in homes if (changed := changed_files(home))}
    for home in stale:
        shutil.rmtree(home)
    files = sorted({file for changed in stale.values() for file in changed})
    notes = [f"{_counted(len(stale), 'cell')} begun with other {', '.join(files)}: run again"] if stale else []
    words = [word for home in homes if home not in stale for word in other_versions(home)]
    return notes + [f"{word} in {_counted(words.count(word), 'cell')}" for word in dict.fromkeys(words)]


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _state(folder: Path) -> str:
    """How a cell stands: done, diverged, or neither."""
    return next((s for s, f in (("done", "summary.json"), ("diverged", "diverged.json")) if (folder / f).is_file()), "")


def default_jobs(configs: Iterable[Config]) -> int:
    """How many cells run side by side: one on a GPU, else as many as cores and memory allow."""
    used = list(configs)
    if any(pick_device(c.engine.device).type == "cuda" for c in used):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fitting = cores // max((c.engine.threads or 1 for c in used), default=1)
    if fitting < 2:
        return 1
    alike = {repr((c.data, c.partition, c.model, c.algorithm, c.cohort, c.engine)): c for c in used}
    needed = max(map(memory_of, alike.values()), default=_PROCESS)
    return max(1, int(min(fitting, _free_memory() / needed)))


def memory_of(config: Config) -> float:
    """About how many bytes a cell takes on a CPU: the process, its data, and its clients.

    For each client side by side six times its model and its state, and, where these are kept in memory, the state
    of every client and three models of every node of a network: before, sent and after. What cannot be sized before
    the data is read counts as much as the rule for lanes allows.
    """
    data = _extent(config.data)
    clients = config.partition.clients or getattr(config.data, "devices", 1)
    unknown = _PROCESS + data.bytes + _MOST
    if not data.shape:
        return unknown
    try:
        with torch.random.fork_rng(devices=[]):
            task = config.model.task(data.shape, data.classes)
        alg = config.algorithm.bind(task, config.local.optimiser(), torch.ones(clients))
        state = tree.nbytes(alg.join(alg.send(alg.init(task.w0))))
    except Exception:  # a fault of the config or of a user's code, which the cell itself will tell
        return unknown
    together = clients if alg.family == "gossip" else config.cohort.size or min(10, clients)
    lanes = min(together, config.engine.lanes or lane_limit(task, torch.device("cpu"), alg.lane_size))
    nodes = 3 * tree.nbytes(task.w0) if alg.family == "gossip" else 0
    kept = clients * (state + nodes) if config.engine.store == "ram" else 0
    return _PROCESS + data.bytes + lanes * _MATRICES * (tree.nbytes(task.w0) + 4 * alg.lane_size + state) + kept


class Extent(NamedTuple):
    """How much data there is, as far as a source can tell without reading it."""

    bytes: float = 0.0
    shape: tuple[int, ...] = ()  # of a row; empty: unknown
    classes: int = 0


def _extent(source: Source) -> Extent:
    if isinstance(source, PublishedSet):
        layout = source.layout
        rows = sum(part.rows for part in layout.parts)
        return Extent(rows * math.prod(layout.shape), layout.shape, max(map(len, layout.classes)))
    if isinstance(source, Synthetic):
        rows = 450 * source.devices  # the mean of its lognormal sizes
        return Extent(4 * rows * source.features, (source.features,), source.classes)
    if isinstance(source, Digits):
        return Extent(1797 * 64, (1, 8, 8), 10)
    if isinstance(source, File):
        files = source.place.rglob("*") if source.place.is_dir() else [source.place]
        return Extent(4.0 * sum(f.stat().st_size for f in files if f.is_file()))  # on disk they are packed
    return Extent()


def _free_memory() -> float:
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024.0 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    return float("inf")


def _run_missing(
    planned: Plan, folder: Path, cells: Path, root: Path, jobs: int | None, watcher: Watcher
) -> dict[str, str]:
    """Run every cell that has not ended yet; what failed, by name."""
    by_hash = {cell.hash: cell for cell in reversed(planned.cells)}  # two labels may stand for one config
    missing = [c for c in planned.cells if by_hash[c.hash] is c and not _state(cells / c.hash)]
    jobs = min(jobs or default_jobs(c.config for c in planned.cells), max(1, len(missing)))
    crew = Crew(folder, cells, root, missing, done=len(by_hash) - len(missing), watcher=watcher)
    watcher.started(planned, folder, jobs, crew.standing())
    return crew.work(jobs) if missing else {}


class Worker:
    """A process that runs one cell after another; when this process ends, however rudely, so does it."""

    def __init__(self, events: queue.SimpleQueue[tuple[Worker, dict[str, Any] | None]], threads: int) -> None:
        count = str(threads)
        env = {**os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count}
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  read if the process dies
        # Its own session: Ctrl-C on the terminal reaches the parent alone, which asks each worker once.
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "fedloom.compare.running",
            ],  # no module of the working folder hides an installed one
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=env,
            start_new_session=True,
        )
        self.cell: Cell | None = None
        self.round = 0
        self._thread = threading.Thread(target=self._listen, args=(events,), daemon=True)
        self._thread.start()

    def _listen(self, events: queue.SimpleQueue[tuple[Worker, dict[str, Any] | None]]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            events.put((self, json.loads(line)))
        events.put((self, None))

    def give(self, cell: Cell, folder: Path, root: Path) -> None:
        self.cell, self.round = cell, 0
        job = {"config": as_table(cell.config), "folder": str(folder), "root": str(root)}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a dead worker is reported by its listener
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def epitaph(self) -> str:
        """Why a dead worker died, as far as it said."""
        code = self._process.wait()
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        ended = f"ended with code {code}" if code != -9 else "was killed, perhaps for want of memory: try fewer --jobs"
        return ": ".join([f"its process {ended}", *last])

    def ask_to_stop(self) -> None:
        self._process.terminate()

    def wait(self) -> None:
        self._process.wait()

    def close(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()


class Crew:
    """Workers that go through a list of cells side by side."""

    def __init__(
        self, folder: Path, cells: Path, root: Path, missing: Sequence[Cell], *, done: int, watcher: Watcher
    ) -> None:
        self._folder, self._cells, self._root, self._watcher = folder, cells, root, watcher
        self._waiting = deque(missing)
        self._reused, self._done, self._all = done, done, done + len(missing)
        self._rounds_left = sum(c.config.basics.rounds for c in missing)
        self._rounds_done, self._began = 0, time.perf_counter()
        self._events: queue.SimpleQueue[tuple[Worker, dict[str, Any] | None]] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._failures: dict[str, str] = {}

    def standing(self, ended: str = "") -> Standing:
        busy = [(w.cell.name, w.round, w.cell.config.basics.rounds) for w in self._workers if w.cell is not None]
        spent = time.perf_counter() - self._began
        left = self._rounds_left * spent / self._rounds_done if self._rounds_done else None
        return Standing(self._done, self._all, self._reused, tuple(busy), left, ended)

    def work(self, jobs: int) -> dict[str, str]:
        """Until no cell is left; what failed, by name."""
        try:
            for _ in range(jobs):
                self._hire()
            while any(w.cell is not None for w in self._workers):
                self._hear(*self._events.get())
        except KeyboardInterrupt as stop:
            self._stop()
            raise InterruptedComparison(self._folder, self._done, self._all) from stop
        finally:
            for worker in self._workers:
                worker.close()
        return self._failures

    def _hire(self) -> None:
        cell = self._waiting.popleft() if self._waiting else None
        if cell is not None:
            worker = Worker(self._events, cell.config.engine.threads or 1)
            self._workers.append(worker)
            worker.give(cell, self._cells / cell.hash, self._root)

    def _hear(self, worker: Worker, message: dict[str, Any] | None) -> None:
        cell = worker.cell
        if cell is None:
            return
        if message is None:
            self._workers.remove(worker)
            self._ended(worker, "failed", worker.epitaph())
            worker.close()
            self._hire()
        elif "round" in message:
            step = message["round"] - worker.round
            worker.round = message["round"]
            self._rounds_left -= step
            self._rounds_done += 0 if message.get("resumed") else step
            self._watcher.moved(self.standing())
        else:
            self._ended(worker, message["state"], message.get("message", ""))
            if self._waiting:
                following = self._waiting.popleft()
                worker.give(following, self._cells / following.hash, self._root)

    def _ended(self, worker: Worker, state: str, message: str) -> None:
        assert worker.cell is not None
        cell, worker.cell = worker.cell, None
        self._rounds_left -= cell.config.basics.rounds - worker.round
        self._done += 1
        if state == "failed":
            self._failures[cell.name] = message
        self._watcher.moved(self.standing(f"{cell.name}: {state}" + (f" ({message})" if message else "")))

    def _stop(self) -> None:
        """Let every worker finish its round and save; a second Ctrl-C does not wait for it."""
        self._watcher.stopping()
        for worker in self._workers:
            worker.ask_to_stop()
        with suppress(KeyboardInterrupt):
            for worker in self._workers:
                worker.wait()


# -- in a worker -----------------------------------------------------------------------------------
class Teller(loop.Silence):
    """Tells the parent about rounds, a few times a second."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers, self._told = answers, 0.0

    def started(self, prepared: Any, folder: Path | None, done: int) -> None:  # noqa: ARG002
        self.tell({"round": done, "resumed": True})

    def advanced(self, progress: Progress) -> None:
        now = time.perf_counter()
        if now - self._told > 0.2:
            self._told = now
            self.tell({"round": progress.round})

    def tell(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


def work() -> None:
    """Run the cells that come in as lines of stdin, and answer on stdout, until the parent is gone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a user's algorithm prints must not get among the answers
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    teller = Teller(answers)
    while True:
        teller.tell(_outcome(jobs.get(), teller))


def _listen(jobs: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(1)  # every state on disk can be resumed, so there is nothing to wait for


def _outcome(job: dict[str, Any], teller: Teller) -> dict[str, Any]:
    folder, root = Path(job["folder"]), Path(job["root"])
    usercode.vouch(job["config"])  # the parent has loaded it; what the cell's own config.toml may name instead is not
    try:
        if (folder / "config.toml").is_file():
            resume(folder, data_root=root, listener=teller)
        else:
            start(parse(job["config"]), out=folder, root=root, listener=teller)
    except InterruptedRun:
        os._exit(130)
    except DivergedError as error:
        write_text(folder / "diverged.json", json.dumps({"message": str(error)}) + "\n")
        return {"state": "diverged", "message": str(error)}
    except FedloomError as error:
        return {"state": "failed", "message": str(error)}
    except Exception as error:  # one broken cell must not stop the others
        return {"state": "failed", "message": f"{type(error).__name__}: {error}"}
    return {"state": "done"}


# -- from cells to tables --------------------------------------------------------------------------
def _write(planned: Plan, folder: Path, cells: Path, failures: dict[str, str]) -> Comparison:
    results, damaged = _results(planned, cells)
    failures = failures | damaged
    question = _question(planned, results)
    rows = report.rows(question, results)
    layout = planned.spec.layout
    sheet = layouts.sheet(question, layout, results, _claims(planned, layout)) if layout is not None else None
    comparison = Comparison(folder, cells, question, rows, results, failures, sheet)
    texts = {
        "table.csv": report.table_csv(question, rows),
        "table.md": report.markdown(question, rows),
        "table.tex": report.latex(question, rows),
        "cells.csv": report.cells_csv(question, results, os.path.relpath(cells, folder)),
        "summary.json": as_json(comparison.summary(), indent=1) + "\n",
    }
    if sheet is not None:
        texts |= {"layout.csv": layouts.table_csv(sheet), "layout.md": layouts.markdown(sheet)}
        texts |= {"layout.tex": layouts.latex(sheet)}
    for end in ("png", "svg"):
        report.draw(question, results, folder / f"curves.{end}")
        if layout is not None:
            layouts.draw(question, layout, results, folder / f"layout.{end}")
    for name, text in texts.items():
        write_text(folder / name, text)
    return comparison


def _results(planned: Plan, cells: Path) -> tuple[list[Result], dict[str, str]]:
    """What every cell came to; those whose files were changed since have failed, and are named with the reason."""
    results, damaged = [], {}
    for cell in planned.cells:
        home = cells / cell.hash
        try:
            results.append(_result(cell, home))
        except CheckpointError as error:
            damaged[cell.name] = f"{error}; delete {home}, and the same command runs it again"
            results.append(_as_result(cell, "failed"))
    return results, damaged


def _as_result(
    cell: Cell, state: str, records: Sequence[dict[str, Any]] = (), partition: str = "", spent: Spent | None = None
) -> Result:
    own = (cell.place, cell.method.label, cell.method.kind, cell.seed, cell.hash)
    return Result(*own, state, list(records), partition, spent)


def _result(cell: Cell, home: Path) -> Result:
    """What the run folder of a cell holds, refused where that is not what the run wrote."""
    state = _state(home) or "failed"
    records = read_ended(home) if (home / "metrics.jsonl").is_file() else []
    described = home / "partition.json"
    shared = json.loads(described.read_text()) if described.is_file() else {"sha256": "", "data_sha256": ""}
    return _as_result(cell, state, records, shared["sha256"], _spent(home, records, shared["data_sha256"]))


def _spent(home: Path, records: Sequence[dict[str, Any]], data: str) -> Spent | None:
    """What the privacy of a cell has cost so far, where there is any."""
    path = home / "privacy.json"
    if not path.is_file() or not records:
        return None
    told = json.loads(path.read_text())
    newest: dict[str, Any] = next((line for line in reversed(records) if "bytes/up" in line), {})
    found = [value for name, value in newest.items() if name.startswith("privacy/epsilon")]
    epsilon = found[0] if found else math.inf  # for which JSON has no word
    return Spent(data, told["unit"], told["relation"], epsilon, told["delta"], told.get("warning", ""))


def _question(planned: Plan, results: Sequence[Result]) -> Question:
    labels = tuple(m.label for m in planned.methods)
    metric = planned.spec.metric or report.default_metric(labels, results)
    metrics = report.choose_metrics(metric, labels, results)
    recorded = report.recorded(results)
    wanted = planned.spec.metric
    if wanted and recorded and not any(report.meant(wanted, recorded)):
        raise ConfigError([Fault("compare.metric", f"no method recorded '{wanted}'", nearest(wanted, recorded))])
    share = report.is_share(metrics[planned.baseline])
    target = planned.spec.target
    return Question(
        axes=tuple(axis.key for axis in planned.axes),
        places=planned.places,
        methods=labels,
        seeds=tuple(planned.spec.seeds),
        baseline=planned.baseline,
        metrics=metrics,
        target=_unit(target, share) if target is not None else None,
        paper=_paper(planned, share),
        wanted=metric,
        x=planned.spec.x or planned.spec.equal,
        remarks=(*report.composed(results), *planned.spec.notes),
        doubts=tuple(report.Doubt(frozenset(_spots(planned, d)), d.metric, d.why) for d in planned.spec.doubts),
        equal=planned.spec.equal,
        budgets=planned.budgets,
        gain=_versus(planned.spec.gain, planned.methods) if planned.spec.gain is not None else None,
    )


def _unit(value: float, share: bool) -> float:
    """An accuracy above 1.5 is meant in percent."""
    return value / 100 if share and value > 1.5 else value


def _paper(planned: Plan, share: bool) -> dict[tuple[Place, str], float]:
    """What a paper reports of the metric of the comparison."""
    parts = planned.spec.layout.cell if planned.spec.layout is not None else []
    mine = next((i for i, part in enumerate(parts) if part.metric == planned.spec.metric), None)
    out = {}
    for spot, value in _placed_values(planned):
        if not isinstance(value, list):
            out[spot] = _unit(value, share)
        elif mine is not None:
            out[spot] = _unit(value[mine], share)
    return out


def _claims(planned: Plan, layout: Layout) -> dict[tuple[Place, str], list[float | None]]:
    """What a paper reports of each part of the layout's cell; one number is of the metric of the comparison."""
    out: dict[tuple[Place, str], list[float | None]] = {}
    for spot, value in _placed_values(planned):
        each = (
            value
            if isinstance(value, list)
            else [value if part.metric == planned.spec.metric else None for part in layout.cell]
        )
        pairs = zip(layout.cell, each, strict=True)
        out[spot] = [v if v is None else _unit(v, report.is_share(part.metric)) for part, v in pairs]
    return out


def _placed_values(planned: Plan) -> Iterator[tuple[tuple[Place, str], float | list[float]]]:
    """Each value of a paper, with the place of the grid and the method that it belongs to."""
    return ((spot, paper.value) for paper in planned.spec.paper for spot in _spots(planned, paper))


def _spots(planned: Plan, claim: Claim) -> Iterator[tuple[Place, str]]:
    """The places of the grid and the methods that something is said of."""
    keys = [axis.key for axis in planned.axes]
    wanted = {k: _word(v) for k, v in claim.where.items()}
    methods = _named(claim.algorithm, planned.methods) if claim.algorithm else [m.label for m in planned.methods]
    for place, label in itertools.product(planned.places, methods):
        if wanted.items() <= dict(zip(keys, place, strict=True)).items():
            yield place, label


if __name__ == "__main__":
    work()
