"""Finding things by name: algorithms, data, partitions, models and topologies, fedloom's or the user's own."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import ConfigDict
from torch import nn

from fedloom.algorithm import Algorithm, AnyAlgorithm
from fedloom.core import usercode
from fedloom.core.errors import ConfigError, Fault, FedloomError, nearest
from fedloom.core.hidden_random import from_a_seed, seed_of
from fedloom.core.own_function import arguments_among, call_by_name, called
from fedloom.core.own_line import said
from fedloom.core.schema import defined_in, kinds, module_names
from fedloom.data.arrays import Arrays, Ints
from fedloom.data.files import SPREADSHEETS, is_file, is_folder
from fedloom.data.handed import from_anything
from fedloom.data.partition import Assignment, Inputs, Partition
from fedloom.data.sources import Source
from fedloom.engine.topology.network import Topology
from fedloom.models.net import NetSpec

KEYS = {"data": "source", "partition": "kind", "model": "kind", "algorithm": "kind", "topology": "kind"}
DEFAULTS = {"data": "digits", "partition": "dirichlet", "model": "mlp", "algorithm": "fedavg", "topology": "ring"}
_PACKAGE = "fedloom.algorithms"
USER_ALGORITHMS = "algorithms"  # a folder of this name in the working folder is searched, too


def algorithms(*, own: bool = True) -> dict[str, type[AnyAlgorithm]]:
    """Every algorithm on disk: the package's by file name, then those of the working folder, if ``own``."""
    found = {name: _packaged(name) for name in module_names(_PACKAGE)}
    for path in user_algorithms() if own else []:
        found.setdefault(path.stem, _only(usercode.load_file(str(path), path.name, called=path.stem)))
    return found


def user_algorithms() -> list[Path]:
    """The user's algorithm files in the working folder."""
    folder = Path(USER_ALGORITHMS)
    return sorted(p for p in folder.glob("*.py") if not p.name.startswith("_")) if folder.is_dir() else []


@functools.cache  # a comparison calls it for each of its cells
def _packaged(name: str) -> type[AnyAlgorithm]:
    """The algorithm in the package's file of this name; no other file is imported."""
    return _only(importlib.import_module(f"{_PACKAGE}.{name}"))


def _only(module: ModuleType) -> type[AnyAlgorithm]:
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
    """The algorithm that a setting names: ``file.py:Class``, ``package.module:Class``, ``file.py`` or a bare name."""
    if usercode.is_reference(name):
        thing = usercode.load_code(name, at)
        if not _is_kind_of(thing, Algorithm):
            raise ConfigError(
                [Fault(at, f"'{name}' is not a subclass of fedloom.Algorithm", "derive it from fedloom.FedAvg")]
            )
        found: type[AnyAlgorithm] = thing
        return found
    if name.endswith(".py"):
        return _only(usercode.load_file(name, at, called=name))
    packaged, own = module_names(_PACKAGE), {path.stem: path for path in user_algorithms()}
    if name in packaged and name in own:
        fix = f"rename the file, or write algorithm.kind={own[name]}"
        raise ConfigError([Fault(at, f"'{name}' is both fedloom's and yours ({own[name]})", fix)])
    if name in packaged:
        return _packaged(name)
    if name in own:
        return _only(usercode.load_file(str(own[name]), at, called=name))
    raise ConfigError([Fault(at, f"there is no algorithm '{name}'", nearest(name, [*packaged, *own]))])


def name_of(cls: type[AnyAlgorithm]) -> str:
    """The name by which a config can find this class again."""
    package, _, name = cls.__module__.rpartition(".")
    return name if package == _PACKAGE else f"{cls.__module__}:{cls.__qualname__}"


def as_choice(algorithm: Any) -> Any:
    """An algorithm that was passed in Python as what another process can read: its name, or a table with settings."""
    if _is_kind_of(algorithm, Algorithm):
        return name_of(algorithm)
    if isinstance(algorithm, Algorithm):
        return {"kind": name_of(type(algorithm)), **algorithm.model_dump(mode="json", exclude_defaults=True)}
    return algorithm


def _is_kind_of(thing: Any, base: type[Any]) -> bool:
    """Whether ``thing`` is a subclass of ``base`` that can be instantiated."""
    return inspect.isclass(thing) and issubclass(thing, base) and thing is not base and not inspect.isabstract(thing)


def _finder(base: type[Any], package: str, word: str, wrap: Callable[[Any, str], Any] | None) -> Callable[..., Any]:
    def find(name: str, at: str) -> Any:
        if usercode.is_reference(name):
            thing = usercode.load_code(name, at)
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
_OR: dict[type[Any], str] = {Source: _FUNCTION, Partition: _FUNCTION, NetSpec: " or of torch.nn.Module"}


def _wrap_module(thing: Any, name: str) -> type[NetSpec] | None:
    """A user's ``nn.Module`` class as a model: its settings are the arguments of its constructor."""
    if not _is_kind_of(thing, nn.Module):
        return None

    class Own(NetSpec):
        model_config = ConfigDict(extra="allow")
        kind: ClassVar[str] = name
        buffers: Literal["average", "local"] = "average"

        def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
            offered = {"shape": shape, "classes": classes}
            try:
                with from_a_seed(torch.initial_seed(), with_torch=False):
                    net: nn.Module = call_by_name(thing, self.__pydantic_extra__ or {}, offered, "model", name)
            except FedloomError:
                raise
            except Exception as error:  # whatever its constructor does
                what = f"'{name}' cannot be made for inputs of shape {list(shape)} and {classes} outputs: {said(error)}"
                fix = "it is given the settings of this section, and shape and classes if it accepts them"
                raise ConfigError([Fault("model.kind", what, fix)]) from error
            return net

    return Own


def _wrap_partition(thing: Any, name: str) -> type[Partition] | None:
    """A user's function as a partition: ``f(y, clients, ...)`` returns the client of each row, or the rows of each."""
    if not usercode.is_written(thing, name):
        return None

    class Own(Partition):
        model_config = ConfigDict(extra="allow")
        kind: ClassVar[str] = name

        def assign(
            self, y: Ints, classes: int, rng: np.random.Generator, client: Ints | None, x: Inputs | None = None
        ) -> Assignment:
            offered = {"y": y, "clients": self.clients, "classes": classes, "rng": rng, "client": client}
            if "x" in arguments_among(thing, {"x": x}) and x is not None:
                offered["x"] = x()
            given = (thing, self.__pydantic_extra__ or {}, offered, "partition", name)
            with from_a_seed(seed_of(rng)):
                returned = called(call_by_name, name, "partition.kind", *given)
            owner = _owners(returned, len(y), self.clients, name)
            return Assignment(owner.astype(np.int64), self.clients, ())

    return Own


def _owners(found: Any, rows: int, clients: int, name: str) -> Ints:
    """The client of each row, from what a user's function returned: that, or the rows of each client."""
    if isinstance(found, Mapping):
        return _dealt([found.get(k, ()) for k in range(clients)] if _is_complete(found, clients) else [], rows, name)
    if isinstance(found, np.ndarray) and (found.ndim == 2 or found.dtype == object):
        found = list(found)
    if isinstance(found, list | tuple) and len(found) == clients and any(np.ndim(part) for part in found[:1]):
        return _dealt(found, rows, name)
    try:
        owner = np.asarray(found)
    except ValueError:  # lists of different lengths
        owner = np.empty(len(found), dtype=object)
    if owner.shape == (rows,) and owner.dtype.kind in "iu" and owner.min() >= 0 and owner.max() < clients:
        return owner.astype(np.int64)
    got = f"got {owner.dtype} of shape {owner.shape}"
    if owner.shape == (rows,) and owner.dtype.kind in "iu":
        got = f"got {owner.min()} to {owner.max()}"
    what = f"'{name}' must return for each of the {rows} rows a client in 0..{clients - 1}"
    fix = f"or a list of {clients} arrays: the rows of each client"
    raise ConfigError([Fault("partition.kind", f"{what} ({got})", fix)])


def _is_complete(found: Mapping[Any, Any], clients: int) -> bool:
    """Whether the keys of a table are numbers of clients."""
    return all(isinstance(key, int | np.integer) and 0 <= key < clients for key in found)


def _dealt(parts: Sequence[Any], rows: int, name: str) -> Ints:
    """The client of each row, from the rows of each client."""
    at, given = "partition.kind", [np.asarray(part) for part in parts]
    if not given or any(part.ndim != 1 or (len(part) and part.dtype.kind not in "iu") for part in given):
        fix = "a list with one array of row numbers for each client, or the client of each row"
        raise ConfigError([Fault(at, f"'{name}' returned neither the rows of each client nor the client of rows", fix)])
    every = np.concatenate([part.astype(np.int64) for part in given])
    if len(every) and (every.min() < 0 or every.max() >= rows):
        what = f"'{name}' must return rows in 0..{rows - 1} (got {every.min()} to {every.max()})"
        raise ConfigError([Fault(at, what)])
    counts = np.bincount(every, minlength=rows)
    if (counts != 1).any():
        row = int(np.argmax(counts != 1))
        what = f"'{name}' must give each of the {rows} rows to one client (row {row} has {counts[row]})"
        raise ConfigError([Fault(at, what)])
    owner = np.empty(rows, dtype=np.int64)
    for client, part in enumerate(given):
        owner[part.astype(np.int64)] = client
    return owner


def _wrap_source(thing: Any, name: str) -> type[Source] | None:
    """A user's function as a data source: it returns data in any form that ``fedloom.run`` takes."""
    if not usercode.is_written(thing, name):
        return None

    class Own(Source):
        model_config = ConfigDict(extra="allow")
        kind: ClassVar[str] = name

        def load(self, root: Path, seed: int) -> Arrays:
            offered = {"root": root, "seed": seed}
            with from_a_seed(seed):
                result = call_by_name(thing, self.__pydantic_extra__ or {}, offered, "data", name)
            return from_anything(result, name=name, seed=seed, numbers=self._decode is not None)

    return Own


_HOMES: dict[str, tuple[type[Any], str]] = {
    "data": (Source, "fedloom.data.sources"),
    "partition": (Partition, "fedloom.data.partition"),
    "model": (NetSpec, "fedloom.models"),
    "topology": (Topology, "fedloom.engine.topology"),
}
CHOOSE: dict[str, Callable[[str, str], Any]] = {
    "data": _finder(*_HOMES["data"], "data source", _wrap_source),
    "partition": _finder(*_HOMES["partition"], "partition", _wrap_partition),
    "model": _finder(*_HOMES["model"], "model", _wrap_module),
    "algorithm": find_algorithm,
    "topology": _finder(*_HOMES["topology"], "topology", None),
}


def is_packaged(section: str, thing: Any) -> bool:
    """Whether a thing is of one of fedloom's own kinds of this section, and not of the user's."""
    return type(thing) in kinds(*_HOMES[section]).values()


def kinds_with(section: str, setting: str) -> list[str]:
    """The names of fedloom's own kinds of this section that have the setting."""
    every = algorithms(own=False) if section == "algorithm" else kinds(*_HOMES[section])
    return sorted(name for name, cls in every.items() if setting in cls.model_fields)


def choices_named(word: str) -> list[str]:
    """The settings that choose what has this name, or the nearest one, such as ``algorithm=fedavg``."""
    own = [path.stem for path in user_algorithms()]
    names = {section: [*kinds(*home)] for section, home in _HOMES.items()}
    names = {"algorithm": [*module_names(_PACKAGE), *own], **names}
    near = difflib.get_close_matches(word, [name for every in names.values() for name in every], 1, cutoff=0.75)
    return [f"{section}={name}" for section, every in names.items() for name in every if name in (near or [word])]


def is_path(name: str) -> bool:
    """Whether this name is a file or folder; ``mnist`` is the published set even if a folder has its name."""
    if name in kinds(*_HOMES["data"]) or (".py:" in name and usercode.is_reference(name)):
        return False
    is_named_so = name.endswith((".npz", ".csv", ".parquet", *SPREADSHEETS)) or os.sep in name
    return is_named_so or is_folder(name) or is_file(name)
