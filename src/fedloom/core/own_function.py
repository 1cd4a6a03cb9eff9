"""The user's own functions: a setting names one as ``file.py:function``, and its other arguments are settings, too.

What fedloom passes comes first, by position (``rule(uploads, weights, ...)``), or by name where a function may leave
out what it does not need (``sampling(round, rng, clients, ...)``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from fedloom.core import usercode
from fedloom.core.errors import ConfigError, Fault, nearest
from fedloom.core.own_line import said
from fedloom.core.schema import Spec, reported_again

_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class MayNameFunction(Spec):
    """A section in which one setting may name the user's own function; further keys are arguments of this function."""

    model_config = ConfigDict(extra="allow")  # for those arguments; other unknown keys are refused below

    section: ClassVar[str]
    naming: ClassVar[str]  # the setting that may name a function
    positions: ClassVar[int] = 0  # how many arguments fedloom passes by position,
    offered: ClassVar[tuple[str, ...]] = ()  # and which ones by name

    @property
    def is_own(self) -> bool:
        """Whether the setting names the user's own function."""
        return usercode.is_reference(getattr(self, self.naming))

    def own_function(self) -> Callable[..., Any]:
        """The user's function, with its settings, which are checked here: a configuration is read without its code."""
        name, given = getattr(self, self.naming), self.__pydantic_extra__ or {}
        found = find_function(name, f"{self.section}.{self.naming}")
        if faults := list(_misfits(self, found, name, given)):
            raise ConfigError(faults)
        return partial(found, **given)

    @model_validator(mode="wrap")
    @classmethod
    def _only_known_settings(cls, given: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        """Refuse unknown settings where no function is named of which they could be arguments."""
        strangers: list[InitErrorDetails] = []
        if isinstance(given, Mapping) and not usercode.is_reference(str(given.get(cls.naming, ""))):
            unknown = [key for key in given if key not in cls.model_fields]
            strangers = [InitErrorDetails(type="extra_forbidden", loc=(key,), input=given[key]) for key in unknown]
        try:
            made = make(given)
        except ValidationError as error:
            strangers = [reported_again(fault) for fault in error.errors()] + strangers
        if strangers:
            raise ValidationError.from_exception_data(cls.__name__, strangers)
        return made


def named_or_own(name: str, known: Iterable[str], word: str) -> str:
    """The name, if it is known or names the user's own function; else ValueError."""
    if name in known or usercode.is_reference(name):
        return name
    if name.endswith(".py"):
        raise ValueError(f"'{name}' is a file; name a function of it: {name}:NAME")
    raise ValueError(f"there is no {word} '{name}', {nearest(name, known)}; your own is named as file.py:function")


def find_function(name: str, at: str) -> Callable[..., Any]:
    """The function of the user that a setting names."""
    found: Callable[..., Any] = usercode.load_code(name, at)
    if not (usercode.is_written(found, name) or usercode.is_in_program(found, name)):
        raise ConfigError([Fault(at, f"'{name}' is not a function that a .py file defines", "as file.py:function")])
    return found


def called(function: Callable[..., Any], name: str, at: str, *given: Any, **offered: Any) -> Any:
    """What the user's function returns; an error in it is reported with its line."""
    try:
        return function(*given, **offered)
    except ConfigError:
        raise
    except Exception as error:  # whatever the function does
        raise ConfigError([Fault(at, f"'{name}' failed: {said(error)}")]) from error


def arguments_among(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``offered`` a function has an argument for."""
    takes = inspect.signature(function).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
    return {name: value for name, value in offered.items() if anything or name in takes}


def call_by_name(thing: Any, settings: Mapping[str, Any], offered: Mapping[str, Any], section: str, name: str) -> Any:
    """Call the user's ``thing`` with its settings and whatever of ``offered`` it has an argument for."""
    takes = inspect.signature(thing).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
    unknown = [] if anything else [k for k in settings if k not in takes]
    if unknown:
        raise ConfigError([Fault(f"{section}.{k}", "unknown key", nearest(k, takes)) for k in unknown])
    given = {**arguments_among(thing, offered), **settings}
    missing = [n for n, p in takes.items() if p.default is p.empty and n not in given and p.kind not in _ANY_NUMBER]
    if missing:
        fix = f"set it, give it a default, or use what fedloom passes: {', '.join(offered)}"
        raise ConfigError([Fault(f"{section}.{n}", f"required: '{name}' has an argument '{n}'", fix) for n in missing])
    return thing(**given)


def _misfits(
    spec: MayNameFunction, function: Callable[..., Any], name: str, given: Mapping[str, Any]
) -> Iterator[Fault]:
    """What is wrong between the arguments of a function and the settings of its section."""
    takes, fields = list(inspect.signature(function).parameters.values()), type(spec).model_fields
    mine = {p.name: p for p in takes[spec.positions :] if p.name not in spec.offered and p.kind not in _ANY_NUMBER}
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes):
        for key in given:
            if key not in mine:
                what = f"is neither a setting nor an argument of '{name}' (got {given[key]!r})"
                yield Fault(f"{spec.section}.{key}", what, nearest(key, [*fields, *mine]))
    for key, parameter in mine.items():
        if key in fields:
            what = f"'{name}' has an argument '{key}', which is another setting of this section"
            yield Fault(f"{spec.section}.{spec.naming}", what, "rename the argument")
        elif parameter.default is parameter.empty and key not in given:
            yield Fault(f"{spec.section}.{key}", f"required: it is an argument of '{name}'", "or give it a default")
