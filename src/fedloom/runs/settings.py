"""Configuration: strict TOML in, settings objects out, every fault at once.

An experiment is a table of sections. ``data``, ``partition``, ``model``, ``algorithm`` and ``topology``
are chosen by name, and the class of that name is the schema of the rest of the section; a name with a
colon, ``package.module:Class`` or ``file.py:Class``, is the user's own (see ``usercode``).
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import tomli_w
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from fedloom.algorithm import Algorithm, AnyAlgorithm
from fedloom.algorithm.capabilities import TrainsWhileWaiting, defaults_of, needs_proxy, takes_steps, warnings_of
from fedloom.core.errors import SYNONYMS, ConfigError, DataError, Fault, nearest
from fedloom.core.objective import Objective
from fedloom.core.optim import Local
from fedloom.core.schema import Spec, as_given, names_without_effect, other_than, read, when, without_effect
from fedloom.core.task import Precision
from fedloom.data.partition import Partition
from fedloom.data.proxy import Proxy
from fedloom.data.sources import Source, source_for_path
from fedloom.engine.clock import System
from fedloom.engine.plan import Cohort
from fedloom.engine.settings import Evaluate
from fedloom.engine.topology.network import Topology
from fedloom.models.net import NetSpec
from fedloom.runs.contradictions import contradictions
from fedloom.runs.find import CHOOSE, DEFAULTS, KEYS, is_path, kinds_with, name_of
from fedloom.runs.in_memory import GivenNet, InMemory
from fedloom.trust import corruption
from fedloom.trust.corruption import Corruption
from fedloom.trust.privacy import Privacy
from fedloom.trust.robust import Aggregation

_S = TypeVar("_S", bound=Spec)


class Basics(Spec):
    """The settings outside any section."""

    seed: NonNegativeInt = Field(0, lt=1 << 63, description="all randomness follows from it")
    rounds: PositiveInt = Field(50, description="how many rounds to train")
    name: str = Field("", max_length=200, description="a name for the run folder; unset: algorithm, data and seed")
    track: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = Field(
        (),
        description="also send evaluations to these, as track=tensorboard: see docs/run-folder.md; changes no number",
    )


class Engine(Spec):
    """Where and how the work is done; it changes what is computed by no more than rounding."""

    device: str = Field("auto", description="auto, cpu, cuda, or cuda:1 and so on; auto: a GPU where there is one")
    executor: Literal["auto", "loop", "lanes"] = Field("auto", description="one client at a time, or many side by side")
    lanes: PositiveInt | None = Field(
        None, description="most clients side by side, or in a group of a loop; unset: by the net's size"
    )
    store: Literal["ram", "disk"] = Field("ram", description="where clients' states and nodes' models are kept")
    threads: PositiveInt | None = Field(None, le=1024, description="threads of torch; unset: torch's own choice")
    precision: Precision = Field(
        "tf32",
        description="of local training: fp32; tf32, float32 with short products on a GPU that has them; "
        "or bf16, 16 bits in the net and float32 parameters",
    )
    compile: Annotated[Literal["auto", "on", "off"], when(executor=other_than("loop"))] = Field(
        "auto",
        description="whether the steps of clients side by side are compiled, and captured on a GPU (on), or run as "
        "they are (off); auto: on a GPU as much of it as the length of the run pays for, on a CPU off",
    )

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, name: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
            raise ValueError(f"no such device, {nearest(name, ('auto', 'cpu', 'cuda'))}")
        return name


class Checkpoints(Spec):
    """When a run is saved, and with what; it is also saved at its end and when it is interrupted."""

    every: PositiveInt = Field(10, description="rounds between checkpoints")
    personal: Literal["auto", "all", "none"] = Field(
        "auto", description="whether the clients' own models are saved at the end; auto: up to 1 GB of them"
    )
    curves: bool = Field(True, description="whether curves.png is drawn at the end; in a comparison's cells: false")


class Config(NamedTuple):
    """A complete, valid experiment."""

    basics: Basics
    data: Source
    partition: Partition
    model: NetSpec
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
    task: Objective
    topology: Topology | None
    kinds: dict[str, str]  # the name by which each kind was chosen
    notes: tuple[str, ...] = ()  # notes on settings that were dropped
    alike: int = 1  # how many runs of a comparison use the same compiled code, this one included


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
    "task": Objective,
}

# The settings that may name the user's code, in addition to the kinds of sections.
NAMED_CODE = (("local", "optimizer"), ("task", "loss"), ("aggregation", "rule"), ("cohort", "sampling"))


def code_names(config: Config) -> list[str]:
    """The names of everything that may be the user's own code."""
    functions = [getattr(getattr(config, section), key) for section, key in NAMED_CODE]
    return [*config.kinds.values(), *functions, *config.evaluate.metrics]


# -- from text to a table ------------------------------------------------------------------------
def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file."""
    try:
        return toml_of(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark of its encoding
    except FileNotFoundError as error:
        raise ConfigError([Fault(str(path), "no such experiment file")]) from error
    except IsADirectoryError as error:
        own = path / "config.toml"
        fix = f"did you mean {own}?" if own.is_file() else ""
        raise ConfigError([Fault(str(path), "is a folder, not an experiment file", fix)]) from error
    except (ValueError, OSError) as error:
        raise ConfigError([Fault(str(path), f"not readable as TOML: {error}")]) from error


def toml_of(text: str) -> dict[str, Any]:
    """The table in a TOML text; ValueError if it is invalid or out of bounds."""
    try:
        table = tomllib.loads(text)
        _refuse_odd_values(table)
    except RecursionError:
        raise ValueError("its tables or lists are nested too deeply") from None
    return table


def _refuse_odd_values(value: Any) -> None:
    """Refuse what TOML can write and no setting can be: it would be found out where it is used, or not at all."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"an integer has at most 64 bits (got one of {value.bit_length()})")
    if isinstance(value, str) and "\0" in value:
        raise ValueError(f"a text has no zero bytes (got {value[:200]!r})")
    for each in (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ():
        _refuse_odd_values(each)


# -- from a table to settings --------------------------------------------------------------------
def parse(table: Mapping[str, Any], notes: Iterable[str] = ()) -> Config:
    """The experiment that ``table`` describes, or one ConfigError with everything that is wrong with it."""
    basics, faults = _basics(table)
    names, chosen, wrong = _by_name(table)
    faults += wrong
    for section, cls in SECTIONS.items():
        chosen[section], wrong = _section(cls, section, table, chosen.get("algorithm"))
        faults += wrong
    faults += contradictions(table, chosen)
    if not faults:
        faults = _idle_elsewhere(table, chosen)
    if faults:
        raise ConfigError(faults)
    assert basics is not None
    chosen.setdefault("topology", None)
    algorithm = chosen["algorithm"]
    notes = [*notes, *warnings_of(algorithm, chosen["local"].lr, basics.rounds), *_changes_of_privacy(chosen)]
    notes += corruption.ineffective(chosen["corruption"], algorithm)
    return Config(basics=basics, kinds=names, notes=tuple(notes), **chosen)


def _basics(table: Mapping[str, Any]) -> tuple[Basics | None, list[Fault]]:
    """The settings outside any section, and what is neither one of them nor a section."""
    basics, faults = read(Basics, {k: v for k, v in table.items() if k in Basics.model_fields}, "")
    known = [*Basics.model_fields, *SECTIONS, *KEYS]
    strangers = [key for key in table if key not in known]
    return basics, faults + [Fault(k, f"unknown key (got {table[k]!r})", _instead(k, known)) for k in strangers]


def _instead(key: str, known: Iterable[str]) -> str:
    """A hint at the setting that was meant by an unknown key outside any section."""
    if key == "seeds":
        return "for several seeds: fedloom compare METHOD --seeds N, or fedloom.compare(METHOD, seeds=N)"
    meant = full_name(key)
    return f"did you mean {meant}?" if meant else nearest(key, known)


def full_name(key: str) -> str:
    """The setting that a bare word means, with its section, such as ``local.lr``; empty where there is none."""
    key = SYNONYMS.get(key, key)
    if key in Basics.model_fields or key in KEYS:
        return key
    usual = ("local", "partition", "cohort", "engine")  # asked first
    for section in dict.fromkeys((*usual, *SECTIONS, *KEYS)):
        if key in SECTIONS[section].model_fields if section in SECTIONS else kinds_with(section, key):
            return f"{section}.{key}"
    return ""


def _by_name(table: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any], list[Fault]]:
    """The sections that are chosen by name: their names, their settings, and what is wrong with them."""
    names: dict[str, str] = {}
    chosen: dict[str, Any] = {}
    faults: list[Fault] = []
    for section in KEYS:
        given, algorithm = table.get(section, {}), chosen.get("algorithm")
        if section == "topology":
            if section not in table and (algorithm is None or algorithm.family != "gossip"):
                continue
            given = _suggested(given, algorithm)
        if section == "partition" and getattr(chosen.get("data"), "client", None) is not None:
            given = _natural(given)
        names[section], chosen[section], wrong = _chosen(section, given)
        faults += wrong
    if chosen["algorithm"] is not None and chosen["model"] is not None:
        chosen["model"] = _suggested_model(chosen["model"], chosen["algorithm"])
    return names, chosen, faults


def _natural(given: Any) -> Any:
    """The partition of data that names its clients, where the user chose none: each client keeps its rows."""
    return {"kind": "natural", **given} if isinstance(given, Mapping) else given


def _section(
    cls: type[Spec], section: str, table: Mapping[str, Any], algorithm: AnyAlgorithm | None
) -> tuple[Spec | None, list[Fault]]:
    """A section that is not chosen by name."""
    given = with_defaults(section, table.get(section, {}), algorithm)
    given = {"kind": given} if section == "task" and isinstance(given, str) else given
    if not isinstance(given, Mapping):
        some = ", ".join(f"{section}.{name}" for name in list(cls.model_fields)[:4])
        return None, [Fault(section, f"should be a table of settings (got {given!r})", f"set one of them, as {some}")]
    return read(cls, given, section) if given else (_as_usual(cls), [])


@cache
def _as_usual(cls: type[Spec]) -> Spec:
    """A section in which nothing is set: a comparison has many in each of its cells."""
    return cls()


def _idle_elsewhere(table: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[Fault]:
    """Written settings that have no effect because of another section."""
    found = []
    for section, spec in chosen.items():
        given = table.get(section, {})
        written = spec.model_fields_set if isinstance(given, Spec) else given if isinstance(given, Mapping) else {}
        for key, why in without_effect(type(spec), dict(spec), written, partial(_resolved, chosen)).items():
            got = getattr(spec, key)
            found.append(
                Fault(
                    f"{section}.{key}", f"{why} (got {list(got) if isinstance(got, tuple) else got!r})", "leave it out"
                )
            )
    return found


def _resolved(chosen: Mapping[str, Any], name: str) -> Any:
    """A setting of any section, or a trait of the algorithm."""
    section, _, key = name.partition(".")
    if chosen.get(section) is None:
        raise KeyError(name)
    return fact(chosen[section], key) if section == "algorithm" else getattr(chosen[section], key)


# What conditions of settings ask of an algorithm, in addition to its settings and its family.
_FACTS: dict[str, Callable[[AnyAlgorithm], bool]] = {
    "has_global_model": lambda alg: alg.traits.common_model,
    "communicates": lambda alg: alg.traits.communicates,
    "partial_work": lambda alg: alg.traits.partial_work,
    "reads_waiting_time": lambda alg: isinstance(alg, TrainsWhileWaiting) and alg.reads_waiting_time,
    "takes_steps": takes_steps,
    "uses_proxy": needs_proxy,
}


def fact(algorithm: AnyAlgorithm, key: str) -> Any:
    """What a condition such as ``when({"algorithm.uses_proxy": True})`` asks."""
    return _FACTS[key](algorithm) if key in _FACTS else getattr(algorithm, key)


def _changes_of_privacy(chosen: Mapping[str, Any]) -> list[str]:
    """The algorithm under privacy: if it would weight clients by their data and leaves this to the engine, equally."""
    changed = chosen["privacy"].clip is not None and chosen["algorithm"].traits.weighs_examples
    return ["all clients have equal weights, since others would reveal how much data each has"] if changed else []


# What may be passed in Python instead of being named.
_HANDED: dict[str, type[Any]] = {"algorithm": Algorithm, "model": GivenNet}


def _chosen(section: str, given: Any) -> tuple[str, Any, list[Fault]]:
    """The name of what a section chooses, its settings, and what is wrong with them."""
    key = KEYS[section]
    if section in _HANDED and isinstance(given, _HANDED[section]):
        return name_of(type(given)) if isinstance(given, Algorithm) else GivenNet.kind, given, []
    table = {key: given} if isinstance(given, str) else given
    if faults := _no_choice(section, table):
        return "", None, faults
    rest = {k: v for k, v in table.items() if k != key}
    name = table.get(key, DEFAULTS[section])
    if not isinstance(name, str):
        return "", None, [Fault(f"{section}.{key}", f"should be a name (got {name!r})")]
    try:
        if section == "data" and is_path(name):
            name, found = source_for_path(name)
            rest = found | rest
        cls = _class_called(section, name, f"{section}.{key}")
    except ConfigError as error:
        return name, None, error.faults
    except DataError as error:
        return name, None, [Fault(f"{section}.{key}", str(error))]
    value, faults = read(cls, rest, section)
    return name, value, [_of_another_kind(fault, section, name) for fault in faults]


def _no_choice(section: str, table: Any) -> list[Fault]:
    """What is wrong with a table that should choose something and set it."""
    key = KEYS[section]
    if not isinstance(table, Mapping):
        fix = "pass arrays as (x, y) or (x, y, client), and the dataset of a loader" if section == "data" else ""
        return [
            Fault(section, f"should be a name or a table of settings (got {' '.join(as_given(table).split())})", fix)
        ]
    if key not in table and "kind" in table:  # as all other sections call it
        what = f"is called {section}.{key} here (got {table['kind']!r})"
        return [Fault(f"{section}.kind", what, f"write {section}.{key} = {json.dumps(str(table['kind']))}")]
    return []


def _class_called(section: str, name: str, at: str) -> Any:
    """The class of this name; an object that was passed in Python cannot be found again by name."""
    if section == "model" and name == GivenNet.kind:
        raise ConfigError([Fault("model", "the net was passed in Python", "pass it again with model=...")])
    return InMemory if section == "data" and name == InMemory.kind else CHOOSE[section](name, at)


def _of_another_kind(fault: Fault, section: str, name: str) -> Fault:
    """The fault, reworded if the setting is not unknown but belongs to other kinds."""
    owners = (
        kinds_with(section, fault.where.removeprefix(f"{section}.")) if fault.what.startswith("unknown key") else []
    )
    if not owners:
        return fault
    named = ", ".join(owners[:4]) + (" and others" if len(owners) > 4 else "")
    return fault._replace(
        what=fault.what.replace("unknown key", f"is a setting of {named}, not of {name}"), fix="leave it out"
    )


def net_spec_of(given: Mapping[str, Any]) -> NetSpec:
    """The net that a table of settings describes, without an experiment around it."""
    return _chosen_alone("model", NetSpec, given)


def topology_of(given: Mapping[str, Any]) -> Topology:
    """The network that a table of settings describes, without an experiment around it."""
    return _chosen_alone("topology", Topology, given)


def _chosen_alone(section: str, kind: type[_S], given: Mapping[str, Any]) -> _S:
    _, value, faults = _chosen(section, given)
    if faults:
        raise ConfigError(faults)
    assert isinstance(value, kind)
    return value


def with_defaults(section: str, given: Any, algorithm: AnyAlgorithm | None) -> Any:
    """A section with the algorithm's own defaults where the user has set nothing."""
    if not isinstance(given, Mapping) or algorithm is None:
        return given
    own = dict(defaults_of(algorithm).get(section, {}))
    if section == "local" and {"steps", "epochs"} & set(given):  # the one excludes the other
        own.pop("steps", None)
    if section == "cohort" and "size" in given and own.get("sampling") == "all":  # a size means: not all
        own.pop("sampling")
    return {**{k: v for k, v in own.items() if not without_effect(SECTIONS[section], {**own, **given}, [k])}, **given}


def _suggested_model(model: NetSpec, algorithm: AnyAlgorithm) -> NetSpec:
    """The model with the algorithm's own defaults where the user has set nothing."""
    own = defaults_of(algorithm).get("model", {})
    return model.model_copy(
        update={k: v for k, v in own.items() if k in type(model).model_fields and k not in model.model_fields_set}
    )


def _suggested(given: Any, algorithm: AnyAlgorithm | None) -> Any:
    """The network with the algorithm's own defaults where the user has set nothing."""
    own = dict(defaults_of(algorithm).get("topology", {})) if algorithm is not None else {}
    table = {"kind": given} if isinstance(given, str) else given
    if not own or not isinstance(table, Mapping):
        return given
    kind = table.get("kind", own.pop("kind", DEFAULTS["topology"]))
    try:
        known = CHOOSE["topology"](str(kind), "topology.kind").model_fields
    except ConfigError:
        return given
    return {"kind": kind, **{k: v for k, v in own.items() if k in known}, **table}


# -- from settings back to text ------------------------------------------------------------------
def as_table(config: Config) -> dict[str, Any]:
    """The complete experiment, every default that has an effect written out; parsing it gives the same config."""
    table: dict[str, Any] = _plain(config.basics)
    lookup = partial(_resolved, config._asdict())
    for section in (*KEYS, *SECTIONS):
        spec = getattr(config, section)
        if spec is not None:
            name = {KEYS[section]: config.kinds[section]} if section in KEYS else {}
            of_no_use = names_without_effect(type(spec), dict(spec), lookup)
            table[section] = name | {k: v for k, v in _plain(spec).items() if k not in of_no_use}
    if config.algorithm.family == "gossip":
        table.pop("cohort")
    return {section: given for section, given in table.items() if given != {}}


def idle_in(config: Config, section: str) -> set[str]:
    """The settings of a section that have no effect."""
    spec = getattr(config, section)
    lookup = partial(_resolved, config._asdict())
    return names_without_effect(type(spec), dict(spec), lookup) if spec is not None else set()


def _plain(spec: Spec) -> dict[str, Any]:
    return {k: v for k, v in spec.model_dump(mode="json").items() if v is not None}


def as_toml(config: Config) -> str:
    """The complete experiment as TOML; unset settings, which TOML cannot express, are in a comment."""
    unset = [
        f"{section}.{key}"
        for section in (*KEYS, *SECTIONS)
        if section != "cohort" or config.algorithm.family != "gossip"
        for of_no_use in [idle_in(config, section)]
        for key, value in (getattr(config, section) or Basics()).model_dump().items()
        if value is None and key not in of_no_use
    ]
    note = f"\n# unset, so chosen by rule: {', '.join(unset)}\n" if unset else ""
    return tomli_w.dumps(as_table(config)) + note


def config_hash(config: Config) -> str:
    """The name of what is computed: settings that cannot change a number are not in it."""
    return hash_of(as_hashed(config))


def hash_of(hashed: Mapping[str, Any]) -> str:
    """The hash of a table that ``as_hashed`` made."""
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def as_hashed(config: Config) -> dict[str, Any]:
    """The experiment without the settings that cannot change a number."""
    table = as_table(config)
    for section in ("checkpoint", "name", "track"):
        table.pop(section, None)
    for section in ("corruption", "aggregation", "privacy", "task"):  # which do nothing by default
        if getattr(config, section) == SECTIONS[section]():
            table.pop(section, None)
    table["engine"].pop("store")
    if not config.evaluate.metrics:  # added later: earlier results keep their hash
        table["evaluate"].pop("metrics", None)
    table["local"] = _hashed_local(config.local)
    if not config.evaluate.validation:
        table["evaluate"].pop("validation", None)
    table["data"].pop("limit_gb", None)
    return table


def _hashed_local(local: Local) -> dict[str, Any]:
    """Local training as hashed before it was refused for methods without steps: earlier runs keep their hash."""
    idle = names_without_effect(Local, dict(local))
    return {key: value for key, value in _plain(local).items() if key not in idle or key == "state"}
