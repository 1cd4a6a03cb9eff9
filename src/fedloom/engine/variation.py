"""Other values of settings: what to try in order to find out whether a setting has an effect.

Values come from a field's type and are kept if the class accepts them, so that bounds need not be known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from fedloom.core.schema import Spec, Test, conditions, read, without_effect

Settings = Mapping[str, Any]
_WHOLE = (1, 2, 0, 3, 5, 50, 1000)
_REAL = (0.0, 0.5, 1.0, 0.1, 2.0, 0.9, 1e-3, 10.0, 1e-6, 1e3, 100.0)
_FEW = 3  # values of a number under which other settings are tried


def accepted(cls: type[Spec], settings: Settings) -> bool:
    """Whether these settings are valid, alone and together."""
    return read(cls, settings, "")[0] is not None


def others(cls: type[Spec], name: str, settings: Settings, words: tuple[str, ...] = ()) -> Iterator[Any]:
    """Values of a setting that are valid with ``settings`` and differ from its own; ``words`` are for texts."""
    here = getattr(cls(**settings), name)
    seen: list[Any] = [here]
    for value in _values(cls.model_fields[name], words):
        if value not in seen and accepted(cls, {**settings, name: value}):
            seen.append(value)
            yield value


def beside(
    cls: type[Spec], name: str, settings: dict[str, Any], words: tuple[str, ...] = ()
) -> Iterator[dict[str, Any]]:
    """``settings`` with one more choice from a list, if this one still has an effect."""
    for other, field in cls.model_fields.items():
        if other != name and other not in settings and is_choice(field):
            for value in others(cls, other, settings, words):
                if applies(cls, name, {**settings, other: value}):
                    yield {**settings, other: value}


def applies(cls: type[Spec], name: str, settings: Settings) -> bool:
    """Whether the setting has an effect with these, according to its class."""
    return not without_effect(cls, dict(cls(**settings)), [name])


def is_choice(field: FieldInfo) -> bool:
    """Whether a setting is chosen from a list."""
    parts = list(_parts(field.annotation))
    return bool in parts or any(get_origin(part) is Literal for part in parts)


def needed(cls: type[Spec], name: str, words: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """The fewest settings other than the defaults under which this one has an effect, according to its field, in every
    possible way."""
    if applies(cls, name, {}):
        yield {}
        return
    for tests in conditions(cls)[name].alternatives:
        found: list[dict[str, Any]] = [{}]
        for other, test in ((o, t) for o, t in tests.items() if "." not in o):
            found = [more for sofar in found for more in _meeting(cls, other, sofar, test, words)]
        yield from (each for each in found if accepted(cls, each) and applies(cls, name, each))


def _meeting(
    cls: type[Spec], name: str, settings: dict[str, Any], test: Test, words: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """``settings`` with this one as the test needs it, and the settings that it depends on."""
    field = cls.model_fields[name]
    if test.holds(settings.get(name, field.default)):
        yield settings
        return
    fitting = [value for value in _values(field, words) if test.holds(value)]
    for first in needed(cls, name, words):
        valid = (value for value in fitting if accepted(cls, {**first, **settings, name: value}))
        yield from ({**first, **settings, name: value} for value in islice(valid, None if is_choice(field) else _FEW))


def _values(field: FieldInfo, words: tuple[str, ...]) -> Iterator[Any]:
    default = field.default
    if isinstance(default, float) and default:
        yield from (3 * default, default / 3)
    for part in _parts(field.annotation):
        yield from _of(part, words)


def _of(kind: Any, words: tuple[str, ...]) -> Iterator[Any]:
    """Values of a type."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif kind is bool:
        yield from (True, False)
    elif kind is int:
        yield from _WHOLE
    elif kind is float:
        yield from _REAL
    elif kind is str:
        yield from words
    elif kind is type(None):
        yield None
    elif get_origin(kind) is tuple:
        each = [value for part in _parts(get_args(kind)[0]) for value in _of(part, words)]
        yield from ((value,) for value in each)
        yield from pairwise(each)


def _parts(kind: Any) -> Iterator[Any]:
    """The types of which this one is a union."""
    if get_origin(kind) is Annotated:
        yield from _parts(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for part in get_args(kind):
            yield from _parts(part)
    else:
        yield kind
