"""Configuration: strict TOML in, settings objects out, every fault at once.

An experiment is a table of sections. ``data``, ``partition``, ``model``, ``algorithm`` and ``topology``
are chosen by name, and the class of that name is the schema of the rest of the section; a name with a
colon, ``package.module:Class`` or ``file.py:Class``, is the user's own (see ``usercode``).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import tomli_w
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt
from torch import nn

from fedloom.algorithm import Algorithm
from fedloom.core import usercode
from fedloom.core.errors import ConfigError, DataError, Fault, nearest
from fedloom.core.optim import Local
from fedloom.core.schema import Lookup, Spec, defined_in, kinds, meant, modules, read, without_effect
from fedloom.core.task import Precision
from fedloom.data.arrays import Arrays, Ints
from fedloom.data.files import Rows, is_folder
from fedloom.data.partition import Assignment, Partition
from fedloom.data.proxy import Proxy
from fedloom.data.sources import Source, from_arrays, source_for_path
from fedloom.engine.clock import System, never_trains
from fedloom.engine.evaluate import Evaluate
from fedloom.engine.local import AnyAlgorithm
from fedloom.engine.plan import Cohort
from fedloom.engine.topology import Topology
from fedloom.models.net import Model
from fedloom.trust import corruption, privacy, robust
from fedloom.trust.corruption import Corruption
from fedloom.trust.privacy import Privacy
from fedloom.trust.robust import Aggregation

USER_ALGORITHMS = "algorithms"  # a folder of this name in the working folder is looked through, too


class Basics(Spec):
    """The settings outside any section."""

    seed: NonNegativeInt = Field(0, lt=1 << 63, description="all randomness follows from it")
    rounds: PositiveInt = Field(50, description="how many rounds to train")
    name: str = Field("", max_length=200, description="a name for the run folder; unset: algorithm, data and seed")


class Engine(Spec):
    """Where and how the work is done; it changes what is computed by no more than rounding."""

    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto: a GPU where there is one")
    executor: Literal["auto", "loop", "lanes"] = Field("auto", description="one client at a time, or many side by side")
    lanes: PositiveInt | None = Field(None, description="most clients side by side; unset: by the net's size")
    store: Literal["ram", "disk"] = Field("ram", description="where clients' states and nodes' models are kept")
    threads: PositiveInt | None = Field(None, description="threads of torch; unset: torch's own choice")
    precision: Precision = Field(
        "tf32",
        description="of local training: fp32; tf32, float32 with short products on a GPU that has them; "
        "or bf16, 16 bits in the net and float32 parameters",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="on a GPU, whether steps are compiled and recorded (on) or run as they are (off); "
        "auto: as much of it as the length of the run pays for",
    )


class Checkpoints(Spec):
    """When a run is saved; it is also saved at its end and when it is interrupted."""

    every: PositiveInt = Field(10, description="rounds between checkpoints")


class Config(NamedTuple):
    """A complete, valid experiment."""

    basics: Basics
    data: Source
    partition: Partition
    model: Model
    local: Local
    cohort: Cohort
    algorithm: AnyAlgorithm
    evaluate: Evaluate
    engine: Engine
    checkpoint: Checkpoints
    system: System
    proxy: Proxy
    corruption: Corruption
    aggregation: Aggregation
    privacy: Privacy
    topology: Topology | None
    kinds: dict[str, str]  # the name by which each chosen thing was called
    notes: tuple[str, ...] = ()  # what was left out, in words


SECTIONS: dict[str, type[Spec]] = {
    "local": Local,
    "cohort": Cohort,
    "evaluate": Evaluate,
    "engine": Engine,
    "checkpoint": Checkpoints,
    "system": System,
    "proxy": Proxy,
    "corruption": Corruption,
    "aggregation": Aggregation,
    "privacy": Privacy,
}
_TRUST = ("corruption", "aggregation", "privacy")  # sections that do nothing unless they are asked to
_DEFAULTS = {"data": "digits", "partition": "dirichlet", "model": "mlp", "algorithm": "fedavg", "topology": "ring"}
_KEYS = {"data": "source", "partition": "kind", "model": "kind", "algorithm": "kind", "topology": "kind"}


# -- from text to a table ------------------------------------------------------------------------
def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file."""
    try:
        return toml_of(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError([Fault(str(path), "no such experiment file")]) from error
    except (ValueError, OSError) as error:
        raise ConfigError([Fault(str(path), f"not readable as TOML: {error}")]) from error


def toml_of(text: str) -> dict[str, Any]:
    """The table that a text in TOML stands for; ValueError for what is none, or is beyond any use."""
    try:
        table = tomllib.loads(text)
        _refuse_long_numbers(table)
    except RecursionError:
        raise ValueError("its tables or lists lie too deep in each other") from None
    return table


def _refuse_long_numbers(value: Any) -> None:
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"a whole number has 64 bits at most (got one of {value.bit_length()})")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _refuse_long_numbers(each)


def override(table: Mapping[str, Any], settings: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """``table`` with ``section.key=value`` settings applied, and what had to be left out for them.

    Where a setting changes a section's kind, the settings of the old kind that the new one does not
    know are left out, and said to be. So are those of the table that had an effect before, and have none any more.
    """
    faults: list[Fault] = []
    given: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            faults.append(Fault(setting, "is not of the form key=value", "as in local.lr=0.05"))
            continue
        given[key.strip()] = value_of(text.strip())
    usercode.vouch(given)  # who writes the name of code just now means it to run
    try:
        out, notes = assign(table, given)
    except ConfigError as error:
        raise ConfigError(faults + error.faults) from error
    if faults:
        raise ConfigError(faults)
    notes += _unsuited(out, given)
    out, left_out = without_idle(out, {*given, *idle(table)})
    return out, notes + left_out


def _unsuited(table: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Take out the section that a newly chosen algorithm has no use for, unless it was asked for just now."""
    chosen = given.get("algorithm.kind", given.get("algorithm"))
    if not isinstance(chosen, str):
        return []
    try:
        gossip = find_algorithm(chosen, "algorithm.kind").family == "gossip"
    except ConfigError:
        return []
    section = "cohort" if gossip else "topology"
    if section not in table or any(key.split(".")[0] == section for key in given):
        return []
    del table[section]
    return [f"the section {section} is of no use to {chosen} and was left out"]


def assign(table: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``table`` with the value of each ``section.key`` put in its place, whole sections and kinds first."""
    out = {k: dict(v) if isinstance(v, Mapping) else v for k, v in table.items()}
    faults, notes = [], []
    for key in sorted(given, key=lambda k: k.partition(".")[2] not in ("", "kind", "source")):
        section, _, leaf = key.partition(".")
        if section in _KEYS and leaf in ("", _KEYS[section]):
            out[section], dropped = _switch(section, out.get(section, {}), given[key])
            notes += [f"{section}.{k} is not a setting of {given[key]} and was left out" for k in dropped]
        elif leaf:
            home = out.setdefault(section, {})
            if isinstance(home, str):
                home = out[section] = {_KEYS.get(section, "kind"): home}
            if not isinstance(home, dict):
                faults.append(Fault(key, f"'{section}' is not a section"))
                continue
            home[leaf] = given[key]
        else:
            out[key] = dict(given[key]) if isinstance(given[key], Mapping) else given[key]
    if faults:
        raise ConfigError(faults)
    return out, notes


def without_idle(table: Mapping[str, Any], keep: Iterable[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """``table`` without the settings that have no effect, unless they are to be kept, and what was left out."""
    gone = {key: why for key, why in idle(table).items() if key not in keep}
    out = {
        section: {k: v for k, v in given.items() if f"{section}.{k}" not in gone}
        if isinstance(given, Mapping)
        else given
        for section, given in table.items()
    }
    return out, [f"{key} {why}; it was left out" for key, why in gone.items()]


def idle(table: Mapping[str, Any]) -> dict[str, str]:
    """The written settings, as ``section.key``, that have no effect, and why; none of a section that cannot be read."""
    return {
        f"{section}.{key}": why
        for section, given in table.items()
        if isinstance(given, Mapping) and (cls := _class_of(section, given)) is not None
        for key, why in without_effect(cls, meant(cls, given), given, _lookup(table)).items()
    }


def _class_of(section: str, given: Mapping[str, Any]) -> type[Spec] | None:
    """The class whose settings the section has; None where there is no telling."""
    if section not in _KEYS:
        return SECTIONS.get(section)
    try:
        found: type[Spec] = _CHOOSE[section](str(given.get(_KEYS[section], _DEFAULTS[section])), section)
    except ConfigError:
        return None
    return found


def _lookup(table: Mapping[str, Any]) -> Lookup:
    """Settings of other sections as they are written, and what the algorithm says of itself."""

    def value(name: str) -> Any:
        section, _, key = name.partition(".")
        given = table.get(section, {})
        given = {_KEYS[section]: given} if isinstance(given, str) and section in _KEYS else given
        cls = _class_of(section, given) if isinstance(given, Mapping) else None
        if cls is None:
            raise KeyError(name)
        if section == "algorithm":
            spec, _ = read(cls, {k: v for k, v in meant(cls, given).items() if k != "kind"}, section)
            if spec is None:
                raise KeyError(name)
            return getattr(spec, key)
        return meant(cls, given).get(key, cls.model_fields[key].default)

    return value


def _switch(section: str, old: Any, name: Any) -> tuple[dict[str, Any], list[str]]:
    key = _KEYS[section]
    if isinstance(name, Mapping):
        return dict(name), []
    old = {key: old} if isinstance(old, str) else dict(old)
    if old.get(key, _DEFAULTS[section]) == name:
        return old | {key: name}, []
    try:
        cls = _CHOOSE[section](str(name), f"{section}.{key}")
    except ConfigError:
        return old | {key: name}, []  # parse will say so, together with whatever else is wrong
    known = {field.alias or n for n, field in cls.model_fields.items()}
    keep = {k: v for k, v in old.items() if k in known}
    return {key: name, **keep}, sorted(k for k in old if k not in known and k != key)


def value_of(text: str) -> Any:
    """What is meant by a value written on the command line."""
    try:
        return toml_of(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        pass
    except ValueError:  # a whole number beyond 64 bits, maybe in a list: whoever is given it says what is wrong
        return int(text) if re.fullmatch(r"[+-]?\d{1,4000}", text) else text
    try:
        return float(text)  # .5 is a number to everybody but TOML
    except ValueError:
        return text


# -- from a table to settings --------------------------------------------------------------------
def parse(table: Mapping[str, Any], notes: Iterable[str] = ()) -> Config:
    """The experiment that ``table`` describes, or one ConfigError with everything that is wrong with it."""
    faults: list[Fault] = []
    sections = {*SECTIONS, *_KEYS}
    basics, wrong = read(Basics, {k: v for k, v in table.items() if k in Basics.model_fields}, "")
    faults += wrong
    for key in table:
        if key not in Basics.model_fields and key not in sections:
            hint = nearest(key, [*Basics.model_fields, *sections])
            faults.append(Fault(key, f"unknown key (got {table[key]!r})", hint))
    chosen: dict[str, Any] = {}
    names: dict[str, str] = {}
    for section in _KEYS:
        given, algorithm = table.get(section, {}), chosen.get("algorithm")
        if section == "topology":
            if section not in table and (algorithm is None or algorithm.family != "gossip"):
                continue
            given = _suggested(given, algorithm)
        names[section], chosen[section], wrong = _chosen(section, given)
        faults += wrong
    if chosen.get("algorithm") is not None and chosen.get("model") is not None:
        own = chosen["algorithm"].defaults().get("model", {})
        silent = {k: v for k, v in own.items() if k in type(chosen["model"]).model_fields}
        silent = {k: v for k, v in silent.items() if k not in chosen["model"].model_fields_set}
        chosen["model"] = chosen["model"].model_copy(update=silent)
    for section, cls in SECTIONS.items():
        given = _with_defaults(section, table.get(section, {}), chosen.get("algorithm"))
        if not isinstance(given, Mapping):
            faults.append(Fault(section, f"should be a table of settings (got {given!r})"))
            continue
        chosen[section], wrong = read(cls, given, section)
        faults += wrong
    faults += _contradictions(table, chosen)
    if not faults:
        faults = _idle_elsewhere(table, chosen)
    if faults:
        raise ConfigError(faults)
    assert basics is not None
    chosen.setdefault("topology", None)
    algorithm = chosen["algorithm"]
    notes = [*notes, *algorithm.doubts(chosen["local"].lr, basics.rounds), *_changes_of_privacy(chosen)]
    notes += corruption.idle(chosen["corruption"], algorithm)
    return Config(basics=basics, kinds=names, notes=tuple(notes), **chosen)


def _idle_elsewhere(table: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[Fault]:
    """Written settings that have no effect because of another section."""
    found = []
    for section, spec in chosen.items():
        given = table.get(section, {})
        written = spec.model_fields_set if isinstance(given, Spec) else given if isinstance(given, Mapping) else {}
        for key, why in without_effect(type(spec), dict(spec), written, partial(_resolved, chosen)).items():
            found.append(Fault(f"{section}.{key}", f"{why} (got {getattr(spec, key)!r})", "leave it out"))
    return found


def _resolved(chosen: Mapping[str, Any], name: str) -> Any:
    """A setting of any section, or what the algorithm says of itself."""
    section, _, key = name.partition(".")
    if chosen.get(section) is None:
        raise KeyError(name)
    return getattr(chosen[section], key)


def _changes_of_privacy(chosen: Mapping[str, Any]) -> list[str]:
    """What privacy makes of an algorithm that would count clients by their data, and leaves that to the engine."""
    changed = chosen["privacy"].clip is not None and chosen["algorithm"].weighs_examples
    return ["every client counts alike, since weights would tell how much data it has"] if changed else []


def _chosen(section: str, given: Any) -> tuple[str, Any, list[Fault]]:
    key = _KEYS[section]
    if isinstance(given, Algorithm) and section == "algorithm":  # handed over in Python
        return name_of(type(given)), given, []
    table = {key: given} if isinstance(given, str) else given
    if not isinstance(table, Mapping):
        return "", None, [Fault(section, f"should be a name or a table of settings (got {given!r})")]
    rest = {k: v for k, v in table.items() if k != key}
    name = table.get(key, _DEFAULTS[section])
    if not isinstance(name, str):
        return "", None, [Fault(f"{section}.{key}", f"should be a name (got {name!r})")]
    try:
        if section == "data" and _is_path(name):
            name, found = source_for_path(name)
            rest = found | rest
        in_memory = section == "data" and name == InMemory.kind
        cls = InMemory if in_memory else _CHOOSE[section](name, f"{section}.{key}")
    except ConfigError as error:
        return name, None, error.faults
    except DataError as error:
        return name, None, [Fault(f"{section}.{key}", str(error))]
    value, faults = read(cls, rest, section)
    return name, value, faults


def topology_of(given: Mapping[str, Any]) -> Topology:
    """The network that a table of settings describes, without an experiment around it."""
    _, value, faults = _chosen("topology", given)
    if faults:
        raise ConfigError(faults)
    assert isinstance(value, Topology)
    return value


def name_of(cls: type[AnyAlgorithm]) -> str:
    """The name by which a config can find this class again."""
    package, _, name = cls.__module__.rpartition(".")
    return name if package == "fedloom.algorithms" else f"{cls.__module__}:{cls.__qualname__}"


def _is_path(name: str) -> bool:
    if ".py:" in name and usercode.is_reference(name):
        return False
    return name.endswith((".npz", ".csv", ".parquet")) or os.sep in name or is_folder(name)


def _with_defaults(section: str, given: Any, algorithm: AnyAlgorithm | None) -> Any:
    """A section with what the algorithm's own definition says, where the user said nothing of it."""
    if not isinstance(given, Mapping) or algorithm is None:
        return given
    own = dict(algorithm.defaults().get(section, {}))
    if section == "local" and {"steps", "epochs"} & set(given):  # the one excludes the other
        own.pop("steps", None)
    if section == "cohort" and "size" in given and own.get("sampling") == "all":  # who says how many means not all
        own.pop("sampling")
    return {**{k: v for k, v in own.items() if not without_effect(SECTIONS[section], {**own, **given}, [k])}, **given}


def _suggested(given: Any, algorithm: AnyAlgorithm | None) -> Any:
    """The network with what the algorithm's own definition says of it, where the user said nothing of it."""
    own = dict(algorithm.defaults().get("topology", {})) if algorithm is not None else {}
    table = {"kind": given} if isinstance(given, str) else given
    if not own or not isinstance(table, Mapping):
        return given
    kind = table.get("kind", own.pop("kind", _DEFAULTS["topology"]))
    try:
        known = _CHOOSE["topology"](str(kind), "topology.kind").model_fields
    except ConfigError:
        return given
    return {"kind": kind, **{k: v for k, v in own.items() if k in known}, **table}


def _contradictions(table: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[Fault]:
    """Settings that are each valid and cannot hold together."""
    local, cohort, alg, partition = (chosen.get(k) for k in ("local", "cohort", "algorithm", "partition"))
    faults = _against_the_algorithm(alg, local, cohort)
    if cohort is not None and cohort.size is not None:
        clients = partition.clients if partition is not None else _written(table, "partition", "clients", 20)
        if cohort.sampling in ("uniform", "poisson") and clients is not None and cohort.size > clients:
            fix = f"at most {clients}, or sampling = 'proportional', which draws with replacement"
            faults.append(Fault("cohort.size", f"{cohort.size} of partition.clients = {clients}", fix))
    if alg is not None and cohort is not None:
        if cohort.sampling == "proportional" and alg.weighs_examples and not alg.distinct:
            why = f"counts a client's data twice: once in the draw, once in the mean of {type(alg).__name__}"
            fix = "set algorithm.weighting=uniform" if hasattr(alg, "weighting") else "use uniform or all"
            faults.append(Fault("cohort.sampling", f"'proportional' {why}", fix))
        if alg.family == "gossip" and cohort.model_fields_set:
            why = "a network without a server trains every node in every round"
            faults.append(Fault("cohort", f"{why} (got {table['cohort']!r})", "leave the section out"))
        system = chosen.get("system")
        if alg.family == "gossip" and system is not None:
            what = "is for algorithms with a server, which can be late for it"
            of_a_server = ("stragglers", "dropout", "deadline", "aggregation")
            given = [(key, getattr(system, key)) for key in of_a_server if getattr(system, key)]
            faults += [Fault(f"system.{key}", f"{what} (got {value})", "leave it out") for key, value in given]
        if alg.family != "gossip" and system is not None:
            everybody = cohort.sampling in ("all", "poisson")
            most = getattr(partition, "clients", None) if everybody else cohort.size or 10
            if never_trains(system, most, partial=alg.partial_work):
                what = f"late clients are left out, and so many are late that nobody trains (got {system.stragglers})"
                faults.append(Fault("system.stragglers", what, "lower it, or set system.policy=partial"))
        evaluate = chosen.get("evaluate")
        if evaluate is not None and evaluate.diagnostics and not (alg.communicates and alg.common):
            what = f"there is no common model with {type(alg).__name__}, which diagnostics are about"
            faults.append(Fault("evaluate.diagnostics", f"{what} (got {list(evaluate.diagnostics)})", "leave them out"))
        if evaluate is not None and evaluate.flatness and not (alg.communicates and alg.common):
            what = f"there is no common model with {type(alg).__name__} whose loss could be flat"
            faults.append(Fault("evaluate.flatness", f"{what} (got {evaluate.flatness:g})", "leave it out"))
        faults += _against_arrivals(alg, chosen)
        faults += _against_trust(alg, cohort, chosen) + _against_the_network(alg, chosen.get("topology"))
        if alg.family != "gossip" and "topology" in table:
            faults.append(Fault("topology", "is only for algorithms without a server", "leave the section out"))
        if (
            not (alg.communicates and alg.common)
            and getattr(partition, "holdout", None) == 0
            and _kind(partition) != "natural"
        ):
            why = "there is no common model to judge, and no client holds out rows of its own"
            faults.append(Fault("partition.holdout", why, "set partition.holdout=0.2"))
    return faults


_OF_ROUNDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "system.stragglers": ((0.0,), "nobody is late for it"),
    "system.dropout": ((0.0,), "it would never hear again of a client that is lost"),
    "system.deadline": ((None,), "nobody is late for it"),
    "cohort.sampling": (("uniform", "all"), "clients are drawn one by one, as they are needed"),
    "aggregation.rule": (("mean",), "it mostly hears one client at a time"),
    "privacy.clip": ((None,), "epsilon is counted in rounds, in each of which a client comes once at most"),
    "evaluate.diagnostics": (((),), "they are of a round whose clients begin with one model"),
    "evaluate.participants": ((False,), "a client may come several times in a round, or never"),
}  # what is allowed, and why nothing else is, where the server waits for nobody


def _against_arrivals(alg: Any, chosen: Mapping[str, Any]) -> list[Fault]:
    """What has a meaning only where the server waits for the clients of a round."""
    faults = []
    for key, (allowed, why) in _OF_ROUNDS.items() if not alg.waits else ():
        section, _, leaf = key.partition(".")
        value = getattr(chosen.get(section), leaf, allowed[0])
        if value not in allowed:
            what = f"the server of {type(alg).__name__} waits for nobody: {why} (got {value!r})"
            faults.append(
                Fault(key, what, f"set it to {' or '.join(map(str, allowed))}" if allowed[0] else "leave it out")
            )
    return faults


def _against_trust(alg: Any, cohort: Any, chosen: Mapping[str, Any]) -> list[Fault]:
    """What bad clients, robust rules and privacy cannot be combined with."""
    bad, rule, private = (chosen.get(section) for section in _TRUST)
    faults = corruption.conflicts(bad, alg) if bad is not None else []
    faults += robust.conflicts(rule, alg, cohort.sampling) if rule is not None else []
    if private is not None and rule is not None and chosen.get("system") is not None:
        faults += privacy.conflicts(private, alg, cohort.sampling, chosen["system"], rule.rule)
    return faults


def _against_the_network(alg: Any, topology: Any) -> list[Fault]:
    """Networks for which the algorithm's messages are not made."""
    if topology is None:
        return []
    faults, name = [], type(alg).__name__
    if alg.sends_once and topology.gossip_steps > 1:
        what = f"what {name} sends here cannot be passed on in the same round (got {topology.gossip_steps})"
        faults.append(Fault("topology.gossip_steps", what, "leave it at 1"))
    if alg.sends_once and topology.mixing == "push_sum":
        what = f"push_sum changes models on their way, and what {name} sends here is none"
        faults.append(Fault("topology.mixing", what, "leave it at average"))
    if alg.remembers_neighbours and (topology.redrawn or topology.fails):
        how = "has links that fail" if topology.fails else "is not the same in every round"
        why = f"{name} keeps copies of what each neighbour has sent so far, but this network {how}"
        fix = "take a static graph without failures" + (", as with refresh=0" if hasattr(topology, "refresh") else "")
        faults.append(Fault("topology", why, fix))
    return faults


def _written(table: Mapping[str, Any], section: str, key: str, default: int) -> int | None:
    """A whole number as it was written, or the default; None where something else stands there."""
    given = table.get(section)
    value = given.get(key, default) if isinstance(given, Mapping) else default
    return value if isinstance(value, int) else None


def _against_the_algorithm(alg: Any, local: Any, cohort: Any) -> list[Fault]:
    """Settings that the algorithm's definition excludes."""
    faults = []
    if alg is not None and local is not None and alg.plain_sgd:
        if local.optimizer != "sgd":
            what = f"{type(alg).__name__} is defined for plain SGD steps (got '{local.optimizer}')"
            faults.append(Fault("local.optimizer", what, "leave optimizer at sgd"))
        for key in ("momentum", "weight_decay", "clip"):
            if getattr(local, key):
                what = f"{type(alg).__name__} is defined for plain SGD steps (got {getattr(local, key)})"
                faults.append(Fault(f"local.{key}", what, f"leave {key} at 0"))
    if alg is not None and cohort is not None and alg.distinct and cohort.sampling == "proportional":
        what = f"{type(alg).__name__} keeps a state for each client, which a second draw in a round would break"
        faults.append(Fault("cohort.sampling", what, "use uniform or all"))
    return faults


def _kind(spec: Any) -> str:
    return getattr(type(spec), "kind", "")


# -- finding things by name ----------------------------------------------------------------------
class InMemory(Source):
    """Data that was handed over in Python; it cannot be loaded again from its name."""

    kind: ClassVar[str] = "in-memory"

    def read(self, root: Path) -> Rows:  # noqa: ARG002
        raise DataError("the data of this experiment was handed over in Python: pass it again with data=...")


def algorithms(*, own: bool = True) -> dict[str, type[AnyAlgorithm]]:
    """Every algorithm on disk: the package's by file name, then those of the working folder, if ``own``."""
    found = {m.__name__.rpartition(".")[2]: _only(m) for m in modules("fedloom.algorithms")[1:]}
    for path in user_algorithms() if own else []:
        found.setdefault(path.stem, _only(usercode.load_file(str(path), path.name, called=path.stem)))
    return found


def user_algorithms() -> list[Path]:
    """The user's algorithm files in the working folder."""
    folder = Path(USER_ALGORITHMS)
    return sorted(p for p in folder.glob("*.py") if not p.name.startswith("_")) if folder.is_dir() else []


def _only(module: Any) -> type[AnyAlgorithm]:
    classes: list[type[AnyAlgorithm]] = [
        c
        for c in vars(module).values()
        if defined_in(c, Algorithm, module) and c.__pydantic_generic_metadata__["origin"] is None  # not Algorithm[...]
    ]
    if len(classes) != 1:
        what = f"should define one subclass of fedloom.Algorithm (it has {[c.__name__ for c in classes] or 'none'})"
        raise ConfigError([Fault(str(getattr(module, "__file__", module.__name__)), what)])
    return classes[0]


def find_algorithm(name: str, at: str) -> type[AnyAlgorithm]:
    if usercode.is_reference(name):
        thing = usercode.load(name, at)
        if not _is_kind_of(thing, Algorithm):
            raise ConfigError([Fault(at, f"'{name}' is not a subclass of fedloom.Algorithm")])
        found: type[AnyAlgorithm] = thing
        return found
    if name.endswith(".py"):
        return _only(usercode.load_file(name, at, called=name))
    packaged = [m for m in modules("fedloom.algorithms")[1:] if m.__name__.rpartition(".")[2] == name]
    own = {path.stem: path for path in user_algorithms()}
    if packaged and name in own:
        fix = f"rename the file, or write algorithm.kind={own[name]}"
        raise ConfigError([Fault(at, f"'{name}' is both fedloom's and yours ({own[name]})", fix)])
    if packaged:
        return _only(packaged[0])
    if name in own:
        return _only(usercode.load_file(str(own[name]), at, called=name))
    known = [m.__name__.rpartition(".")[2] for m in modules("fedloom.algorithms")[1:]]
    raise ConfigError([Fault(at, f"there is no algorithm '{name}'", nearest(name, [*known, *own]))])


def _is_kind_of(thing: Any, base: type[Any]) -> bool:
    """Whether ``thing`` is a subclass of ``base`` that can be made."""
    return inspect.isclass(thing) and issubclass(thing, base) and thing is not base and not inspect.isabstract(thing)


def _finder(base: type[Any], package: str, word: str, wrap: Callable[[Any, str], Any] | None) -> Callable[..., Any]:
    def find(name: str, at: str) -> Any:
        if usercode.is_reference(name):
            thing = usercode.load(name, at)
            if _is_kind_of(thing, base):
                return thing
            wrapped = wrap(thing, name) if wrap is not None else None
            if wrapped is None:
                fix = f"a subclass of {base.__name__}{_OR.get(base, '')} is needed"
                raise ConfigError([Fault(at, f"'{name}' is not a {word}", fix)])
            return wrapped
        known = kinds(base, package)
        if name not in known:
            raise ConfigError([Fault(at, f"there is no {word} '{name}'", nearest(name, known))])
        return known[name]

    return find


_FUNCTION = " or a function that a .py file defines, as file.py:function,"
_OR: dict[type[Any], str] = {Source: _FUNCTION, Partition: _FUNCTION, Model: " or of torch.nn.Module"}


def _wrap_module(thing: Any, name: str) -> type[Model] | None:
    """A user's ``nn.Module`` class as a model: its settings are the arguments of its constructor."""
    if not _is_kind_of(thing, nn.Module):
        return None

    class Own(Model):
        model_config = ConfigDict(extra="allow")
        kind: ClassVar[str] = name
        buffers: Literal["average", "local"] = "average"

        def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
            offered = {"shape": shape, "classes": classes}
            net: nn.Module = _call(thing, dict(self.__pydantic_extra__ or {}), offered, "model")
            return net

    return Own


def _wrap_partition(thing: Any, name: str) -> type[Partition] | None:
    """A user's function as a partition: ``f(y, clients, rng, **settings)`` returns the owner of each row."""
    if not usercode.is_written(thing, name):
        return None

    class Own(Partition):
        model_config = ConfigDict(extra="allow")
        kind: ClassVar[str] = name

        def assign(self, y: Ints, classes: int, rng: np.random.Generator, client: Ints | None) -> Assignment:
            offered = {"y": y, "classes": classes, "rng": rng, "client": client, "clients": self.clients}
            owner = np.asarray(_call(thing, dict(self.__pydantic_extra__ or {}), offered, "partition"))
            if owner.shape != y.shape or owner.dtype.kind not in "iu" or owner.min() < 0 or owner.max() >= self.clients:
                what = f"'{name}' must return for each of the {len(y)} rows a client in 0..{self.clients - 1}"
                got = f"got {owner.dtype} of shape {owner.shape}"
                raise ConfigError([Fault("partition.kind", f"{what} ({got})")])
            return Assignment(owner.astype(np.int64), self.clients, ())

    return Own


def _wrap_source(thing: Any, name: str) -> type[Source] | None:
    """A user's function as a data source: it returns ``Arrays``, or (x, y)."""
    if not usercode.is_written(thing, name):
        return None

    class Own(Source):
        model_config = ConfigDict(extra="allow")
        kind: ClassVar[str] = name

        def load(self, root: Path, seed: int) -> Arrays:
            result = _call(thing, dict(self.__pydantic_extra__ or {}), {"root": root, "seed": seed}, "data")
            return result if isinstance(result, Arrays) else from_arrays(*result, name=name, seed=seed)

    return Own


def _call(thing: Any, settings: dict[str, Any], offered: dict[str, Any], section: str) -> Any:
    """Call the user's ``thing`` with its settings and whatever of ``offered`` it has a parameter for."""
    takes = inspect.signature(thing).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
    unknown = [] if anything else [k for k in settings if k not in takes]
    if unknown:
        raise ConfigError([Fault(f"{section}.{k}", "unknown key", nearest(k, takes)) for k in unknown])
    given = {k: v for k, v in offered.items() if anything or k in takes} | settings
    missing = [n for n, p in takes.items() if p.default is p.empty and n not in given and p.kind not in (2, 4)]
    if missing:
        raise ConfigError([Fault(f"{section}.{n}", "required") for n in missing])
    return thing(**given)


_CHOOSE: dict[str, Callable[[str, str], Any]] = {
    "data": _finder(Source, "fedloom.data.sources", "data source", _wrap_source),
    "partition": _finder(Partition, "fedloom.data.partition", "partition", _wrap_partition),
    "model": _finder(Model, "fedloom.models", "model", _wrap_module),
    "algorithm": find_algorithm,
    "topology": _finder(Topology, "fedloom.engine.topology", "topology", None),
}


# -- from settings back to text ------------------------------------------------------------------
def as_table(config: Config) -> dict[str, Any]:
    """The complete experiment, every default that has an effect written out; parsing it gives the same config."""
    table: dict[str, Any] = _plain(config.basics)
    for section in (*_KEYS, *SECTIONS):
        spec = getattr(config, section)
        if spec is not None:
            name = {_KEYS[section]: config.kinds[section]} if section in _KEYS else {}
            of_no_use = _idle_in(config, section)
            table[section] = name | {k: v for k, v in _plain(spec).items() if k not in of_no_use}
    if config.algorithm.family == "gossip":
        table.pop("cohort")
    return table


def _idle_in(config: Config, section: str) -> set[str]:
    """The settings of a section that have no effect."""
    spec = getattr(config, section)
    lookup = partial(_resolved, config._asdict())
    return set(without_effect(type(spec), dict(spec), type(spec).model_fields, lookup)) if spec is not None else set()


def _plain(spec: Spec) -> dict[str, Any]:
    return {k: v for k, v in spec.model_dump(mode="json").items() if v is not None}


def as_toml(config: Config) -> str:
    """The complete experiment as TOML; settings that are unset, for which TOML has no word, in a comment."""
    unset = [
        f"{section}.{key}"
        for section in (*_KEYS, *SECTIONS)
        if section != "cohort" or config.algorithm.family != "gossip"
        for key, value in (getattr(config, section) or Basics()).model_dump().items()
        if value is None and key not in _idle_in(config, section)
    ]
    note = f"\n# unset, so chosen by rule: {', '.join(unset)}\n" if unset else ""
    return tomli_w.dumps(as_table(config)) + note


def config_hash(config: Config) -> str:
    """The name of what is computed: settings that cannot change a number are not in it."""
    table = as_table(config)
    for section in ("checkpoint", "name"):
        table.pop(section, None)
    for section in _TRUST:
        if getattr(config, section) == SECTIONS[section]():
            table.pop(section)
    table["engine"].pop("store")
    table["data"].pop("limit_gb", None)
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
