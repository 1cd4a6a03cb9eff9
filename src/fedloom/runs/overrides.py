"""Settings on top of an experiment: ``key=value`` arguments, and switching a section from one kind to another."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from fedloom.algorithm import Algorithm, AnyAlgorithm
from fedloom.core import usercode
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.schema import Lookup, Spec, as_python_has_it, read, with_presets, without_effect
from fedloom.runs.find import CHOOSE, DEFAULTS, KEYS, find_algorithm
from fedloom.runs.settings import SECTIONS, fact, toml_of, with_defaults


def override(table: Mapping[str, Any], settings: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """``table`` with ``section.key=value`` settings applied, and what had to be dropped for them.

    Where a setting changes a section's kind, the settings of the old kind that the new one does not
    have are dropped and reported. So are those of the table that lose their effect.
    """
    given = read_pairs(settings)
    usercode.vouch(given)  # naming code on the command line is consent to run it
    out, notes = assign(table, given)
    notes += _unsuited(out, given)
    out, left_out = without_idle(out, {*given, *idle(table)})
    return out, notes + left_out


def read_pairs(settings: Iterable[str]) -> dict[str, Any]:
    """The values of ``key=value`` arguments by their keys."""
    faults: list[Fault] = []
    given: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if equals and key.strip():
            given[key.strip()] = value_of(text.strip())
        else:
            faults.append(Fault(setting, "is not of the form key=value", "as in local.lr=0.05"))
    if faults:
        raise ConfigError(faults)
    return given


def _unsuited(table: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Take out the section that the new algorithm does not use, unless it was set on the same command line."""
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
    return [f"the section {section} is not used by {chosen} and was left out"]


def assign(table: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``table`` with the value of each ``section.key`` put in its place, whole sections and kinds first."""
    out = {k: dict(v) if isinstance(v, Mapping) else v for k, v in table.items()}
    faults, notes = [], []
    for key in sorted(given, key=lambda k: k.partition(".")[2] not in ("", "kind", "source")):
        section, _, leaf = key.partition(".")
        if section in KEYS and leaf in ("", KEYS[section]):
            out[section], dropped = _switch(section, out.get(section, {}), given[key])
            notes += [f"{section}.{k} is not a setting of {given[key]} and was left out" for k in dropped]
        elif leaf:
            home = out.setdefault(section, {})
            if isinstance(home, str):
                home = out[section] = {KEYS.get(section, "kind"): home}
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
    return without_settings(table, gone), [f"{key} {why}; it was left out" for key, why in gone.items()]


def without_settings(table: Mapping[str, Any], gone: Collection[str]) -> dict[str, Any]:
    """``table`` without these settings, named as ``section.key``."""
    return {
        section: {k: v for k, v in given.items() if f"{section}.{k}" not in gone}
        if isinstance(given, Mapping)
        else given
        for section, given in table.items()
    }


def idle(table: Mapping[str, Any]) -> dict[str, str]:
    """The written settings, as ``section.key``, that have no effect, and why; none of a section that cannot be read."""
    lookup = _lookup(table)
    return {
        f"{section}.{key}": why
        for section, given in table.items()
        if isinstance(given, Mapping) and (cls := _class_of(section, given)) is not None
        for key, why in without_effect(cls, _read(cls, given), given, lookup).items()
    }


def _class_of(section: str, given: Mapping[str, Any]) -> type[Spec] | None:
    """The class whose settings the section has; None if unknown."""
    if section not in KEYS:
        return SECTIONS.get(section)
    try:
        found: type[Spec] = CHOOSE[section](str(given.get(KEYS[section], DEFAULTS[section])), section)
    except ConfigError:
        return None
    return found


def _lookup(table: Mapping[str, Any]) -> Lookup:
    """Settings of other sections as they are written, and what the algorithm says of itself and of them."""

    def written(section: str) -> tuple[type[Spec], Mapping[str, Any]]:
        given = table.get(section, {})
        given = {KEYS[section]: given} if isinstance(given, str) and section in KEYS else given
        cls = _class_of(section, given) if isinstance(given, Mapping) else None
        if cls is None:
            raise KeyError(section)
        return cls, given

    @cache
    def algorithm() -> AnyAlgorithm:
        cls, given = written("algorithm")
        spec, _ = read(cls, {k: v for k, v in with_presets(cls, given).items() if k != "kind"}, "algorithm")
        if not isinstance(spec, Algorithm):
            raise KeyError("algorithm")
        return spec

    def value(name: str) -> Any:
        section, _, key = name.partition(".")
        if section == "algorithm":
            return fact(algorithm(), key)
        cls, given = written(section)
        given = with_defaults(section, given, algorithm()) if section in SECTIONS else given
        return _read(cls, given).get(key, cls.model_fields[key].default)

    return value


def _read(cls: type[Spec], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a section of a file, its lists as tuples."""
    return with_presets(cls, as_python_has_it(cls, given))


def _switch(section: str, old: Any, name: Any) -> tuple[dict[str, Any], list[str]]:
    key = KEYS[section]
    if isinstance(name, Mapping):
        return dict(name), []
    old = {key: old} if isinstance(old, str) else dict(old)
    if old.get(key, DEFAULTS[section]) == name:
        return old | {key: name}, []
    try:
        cls = CHOOSE[section](str(name), f"{section}.{key}")
    except ConfigError:
        return old | {key: name}, []  # parse will report it with all other faults
    known = {field.alias or n for n, field in cls.model_fields.items()}
    keep = {k: v for k, v in old.items() if k in known}
    usual = _usual(section, old.get(key, DEFAULTS[section]))
    lost = sorted(k for k in old if k not in known and k != key)
    return {key: name, **keep}, [k for k in lost if k not in usual or usual[k] != old[k]]


def _usual(section: str, kind: Any) -> dict[str, Any]:
    """The settings of a kind that are at their defaults unless they are set."""
    try:
        fields = CHOOSE[section](str(kind), f"{section}.{KEYS[section]}").model_fields
    except ConfigError:
        return {}
    return {field.alias or name: field.get_default() for name, field in fields.items() if not field.is_required()}


def value_of(text: str) -> Any:
    """The value that a text on the command line means."""
    try:
        return toml_of(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        pass
    except ValueError:  # an integer beyond 64 bits, perhaps in a list: its validator reports it
        return int(text) if re.fullmatch(r"[+-]?\d{1,4000}", text) else text
    if text.startswith("[") and text.endswith("]") and not set("[]{}") & set(text[1:-1]):
        return [value_of(word.strip()) for word in text[1:-1].split(",") if word.strip()]  # a shell removes quotes
    try:
        return float(text)  # TOML alone does not read .5 as a number
    except ValueError:
        return text
