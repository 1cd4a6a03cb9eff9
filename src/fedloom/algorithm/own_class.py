"""Mistakes in a user's class that Python does not see: nothing would fail, or not before the middle of a round."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from types import CodeType
from typing import Any

from fedloom.algorithm.capabilities import CAPABILITIES
from fedloom.core.errors import Fault, OwnCodeError
from fedloom.core.own_line import undecorated, written_at

_NOT_OVERRIDDEN = ("bind", "setup", "task", "optimizer")
_SIMILAR = 0.75  # as difflib measures it


def is_own(cls: type[Any]) -> bool:
    """Whether a class is the user's, and not fedloom's."""
    return not f"{cls.__module__}.".startswith("fedloom.")


@cache
def refuse_mistakes(cls: type[Any], base: type[Any]) -> None:
    """One error with every mistake in the class of a user's method; ``base``: the class of the contract."""
    written = [each for each in cls.__mro__ if is_own(each)]
    known = _overridable(base)
    faults = [fault for each in written if issubclass(each, base) for fault in _faults(each, written, known)]
    if faults:
        raise OwnCodeError(faults)


def settings_instead(cls: type[Any]) -> str:
    """How to write the arguments of a class's own ``__init__`` as settings; empty if it has none."""
    made = vars(cls).get("__init__")
    if not is_own(cls) or not inspect.isfunction(made):
        return ""
    takes = list(inspect.signature(made).parameters.values())[1:]
    named = [p for p in takes if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return "; ".join(map(_as_setting, named))


def _overridable(base: type[Any]) -> dict[str, Any]:
    """The functions and properties that a method may override."""
    every = {name: thing for part in (base, *CAPABILITIES) for name, thing in vars(part).items()}
    return {
        name: thing
        for name, thing in every.items()
        if not name.startswith("_") and name not in _NOT_OVERRIDDEN and _is_code(thing)
    }


def _is_code(thing: Any) -> bool:
    return inspect.isfunction(thing) or isinstance(thing, property)


def _faults(cls: type[Any], written: list[type[Any]], known: dict[str, Any]) -> Iterator[Fault]:
    if settings := settings_instead(cls):
        fix = f"leave it out, and write in the class: {settings}"
        yield Fault(written_at(vars(cls)["__init__"]), "a method has no __init__; its settings are fields", fix)
    for name, thing in vars(cls).items():
        if name.startswith("_") or not _is_code(thing):
            continue
        if name in known:
            yield from _misfits(name, thing, known[name])
        elif not any(hasattr(base, name) for base in cls.__bases__) and (meant := _meant(name, cls, written, known)):
            fix = f"did you mean '{meant}'? Otherwise begin its name with an underscore"
            yield Fault(written_at(thing), f"nothing calls '{name}'", fix)


def _misfits(name: str, thing: Any, base: Any) -> Iterator[Fault]:
    """Whether a function that overrides one of the contract is called with what it takes."""
    if isinstance(base, property):
        if not isinstance(thing, property):
            yield Fault(written_at(thing), f"'{name}' is a property", "write @property above it")
        return
    if isinstance(thing, property):
        yield Fault(written_at(thing), f"'{name}' is a function", "leave out @property")
        return
    if not _takes_the_same(thing, base):
        has, wanted = (", ".join(inspect.signature(each).parameters) for each in (thing, base))
        yield Fault(written_at(thing), f"has the arguments ({has})", f"write def {name}({wanted})")


def _takes_the_same(thing: Any, base: Any) -> bool:
    """Whether it can be called as ``base`` is; a property as a property."""
    if isinstance(thing, property) or isinstance(base, property):
        return isinstance(thing, property) and isinstance(base, property)
    try:
        inspect.signature(thing).bind(*inspect.signature(base).parameters)
    except TypeError:
        return False
    return True


def _meant(name: str, cls: type[Any], written: list[type[Any]], known: dict[str, Any]) -> str:
    """The function of the contract whose name is misspelt; empty for a function that other code of the class uses."""
    free = [each for each in known if each not in vars(cls) and _takes_the_same(vars(cls)[name], known[each])]
    close = difflib.get_close_matches(name.lower(), free, 1, cutoff=_SIMILAR)
    return close[0] if close and not _is_used(name, cls, written) else ""


def _is_used(name: str, cls: type[Any], written: list[type[Any]]) -> bool:
    """Whether the class, or anything else in its file, reads this name of an object."""
    module: Any = inspect.getmodule(cls)
    with suppress(OSError, TypeError):  # written at a prompt
        if re.search(rf"[.\"']{name}\b", inspect.getsource(module)):
            return True
    return any(name in _names(code) for each in written for code in _codes(each))


def _codes(cls: type[Any]) -> Iterator[CodeType]:
    for thing in vars(cls).values():
        function = undecorated(thing) if _is_code(thing) else None
        if inspect.isfunction(function):
            yield function.__code__


def _names(code: CodeType) -> Iterator[str]:
    """The names that code reads, also in functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _as_setting(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return f"{parameter.name}: float"
    return f"{parameter.name}: {type(parameter.default).__name__} = {parameter.default!r}"
