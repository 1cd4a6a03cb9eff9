"""A setting in words: its type, its bounds and its default, for pages and for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_PLAIN = {"int": "whole number", "float": "number", "str": "text"}


def type_words(field: FieldInfo, code: Callable[[str], str] = str) -> str:
    """The type of a field and its bounds, such as ``number, >= 0, < 1``; ``code`` marks a value as such."""
    kind = field.annotation
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    words = [kind_words(part, code) for part in parts if part is not NoneType]
    inner = (m for part in get_args(kind) for m in getattr(part, "__metadata__", ()))
    bounds = _bounds(field.metadata) or _bounds(inner)
    return " or ".join(words) + (f", {bounds}" if bounds else "")


def kind_words(kind: Any, code: Callable[[str], str] = str) -> str:
    """A type in words."""
    if get_origin(kind) is Literal:
        return " | ".join(code(str(value)) for value in get_args(kind))
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        word = kind_words(inner, code)
        if get_origin(inner) is Literal:
            return f"list of {word}"
        return f"list of lists of {word[8:]}" if word.startswith("list of ") else f"list of {word}s"
    name = getattr(getattr(kind, "__origin__", kind), "__name__", str(kind))
    return f"{code('true')} | {code('false')}" if name == "bool" else _PLAIN.get(name, name)


def default_words(field: FieldInfo, code: Callable[[str], str] = str) -> str:
    """The default of a field in TOML; ``required`` or ``unset`` if there is none."""
    if field.is_required():
        return "required"
    return "unset" if field.default is None else code(toml_word(field.default))


def toml_word(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _bounds(metadata: Iterable[Any]) -> str:
    found = [(sign, getattr(m, key)) for m in metadata for key, sign in _SIGNS.items() if hasattr(m, key)]
    return ", ".join(f"{sign} {'2^63' if limit == 2**63 else f'{limit:g}'}" for sign, limit in found)
