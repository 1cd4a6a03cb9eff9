"""The class is the schema: settings are typed fields, read strictly, and found by name without a registry."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar, get_origin

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from fedloom.errors import ConfigError, Fault, nearest


class Spec(BaseModel):
    """A frozen record of settings; an unknown key or a wrong type is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_python_has_it(cls, given: Any) -> Any:
        """TOML has lists where settings are tuples, and NumPy has numbers of its own; nothing else is converted."""
        if not isinstance(given, dict):
            return given
        tuples = {name for name, field in cls.model_fields.items() if get_origin(field.annotation) is tuple}
        return {key: _plain(value, key in tuples) for key, value in given.items()}


def _plain(value: Any, as_tuple: bool) -> Any:
    if as_tuple and isinstance(value, list):
        return tuple(value)
    if as_tuple and isinstance(value, str):  # one of them needs no brackets, which a shell would not like
        return (value,)
    return value.item() if isinstance(value, np.generic) else value


class Kind(Spec):
    """A spec that is chosen by name: ``kind = "dirichlet"``."""

    kind: ClassVar[str]


M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


def read(cls: type[M], table: Mapping[str, Any], at: str) -> tuple[M | None, list[Fault]]:
    """``table`` as a ``cls``, or every fault in it, each with its place below ``at``."""
    try:
        return cls.model_validate(dict(table)), []
    except ValidationError as error:
        return None, [_fault(cls, item, at) for item in error.errors(include_url=False)]


def kinds(base: type[T], package: str) -> dict[str, type[T]]:
    """Every concrete ``base`` defined in the modules of ``package``, by its ``kind``."""
    found: dict[str, type[T]] = {}
    for module in modules(package):
        for cls in vars(module).values():
            if defined_in(cls, base, module) and "kind" in vars(cls):
                found[cls.kind] = cls
    return found


def modules(package: str) -> list[ModuleType]:
    """The package itself and its modules, in order of name."""
    root = importlib.import_module(package)
    names = sorted(info.name for info in pkgutil.iter_modules(getattr(root, "__path__", [])))
    return [root, *(importlib.import_module(f"{package}.{name}") for name in names if not name.startswith("_"))]


def defined_in(thing: Any, base: type[Any], module: ModuleType) -> bool:
    """Whether ``thing`` is a subclass of ``base`` written in ``module`` (not merely imported there)."""
    return (
        inspect.isclass(thing)
        and issubclass(thing, base)
        and thing is not base
        and thing.__module__ == module.__name__
        and not inspect.isabstract(thing)
    )


def load(reference: str, at: str) -> Any:
    """The object that ``package.module:name`` or ``path/to/file.py:name`` refers to."""
    place, _, name = reference.partition(":")
    module = load_module(place, at)
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError([Fault(at, f"'{place}' has no '{name}'", nearest(name, public))])
    return getattr(module, name)


def load_module(place: str, at: str) -> ModuleType:
    """The module named ``package.module`` (the working folder counts) or lying at ``path/to/file.py``."""
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise ConfigError([Fault(at, f"no such file: {place}", f"looked in {path.parent}")])
        name = f"fedloom_user_{path.stem}"
        known = sys.modules.get(name)
        if known is not None and known.__file__ == str(path):
            return known
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ConfigError([Fault(at, f"{place} failed to load: {type(error).__name__}: {error}")]) from error
        return module
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ConfigError([Fault(at, f"cannot import '{place}': {error}", "is it on PYTHONPATH?")]) from error
    except Exception as error:
        raise ConfigError([Fault(at, f"'{place}' failed to load: {type(error).__name__}: {error}")]) from error


def _fault(cls: type[BaseModel], item: Any, at: str) -> Fault:
    path = [str(part) for part in item["loc"]]
    where = ".".join([at, *path]) if at else ".".join(path)
    if item["type"] == "extra_forbidden":
        return Fault(where, f"unknown key (got {item['input']!r})", nearest(path[-1], cls.model_fields))
    if item["type"] == "missing":
        return Fault(where, "required")
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return Fault(where, f"{message} (got {item['input']!r})")
