"""Data passed in Python: arrays, torch data sets, one for each client, DataFrames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fedloom.core.errors import DataError
from fedloom.data.arrays import Arrays
from fedloom.data.files import numbered
from fedloom.data.sources import Table, array_of, examples_of, from_arrays, from_torch
from fedloom.data.table import table_of_frame

FORMS = (
    "(x, y), (x, y, client), a Dataset, (train, test) Datasets, a list or dict with one of these for each client, "
    "a DataFrame, {'frame': a DataFrame, 'label': ...} or {'x': ..., 'y': ...}"
)


class FrameTable(Table):
    """A pandas DataFrame; it has the settings of every table."""

    path: str = "DataFrame"


def is_frame(data: Any) -> bool:
    """Whether this is a DataFrame; pandas need not be installed."""
    return hasattr(data, "iloc") and hasattr(data, "columns")


def is_data(data: Any) -> bool:
    """Whether this is data itself, in one of the known forms, and not the settings of a source."""
    if isinstance(data, Mapping):
        return "frame" in data or {"x", "y"} <= set(data) or (bool(data) and all(_is_part(v) for v in data.values()))
    return is_frame(data) or (isinstance(data, tuple) and len(data) in (2, 3)) or _is_parts(data)


def _is_parts(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(_is_part(part) for part in data)


def _is_part(part: Any) -> bool:
    """Whether this can be the data of one client."""
    return isinstance(part, Dataset) or (isinstance(part, tuple) and len(part) == 2)


def _is_pair_of_arrays(part: Any) -> bool:
    return isinstance(part, tuple) and len(part) == 2 and all(getattr(value, "ndim", 0) for value in part)


def names_clients(data: Any) -> bool:
    """Whether the form of the data assigns rows to clients."""
    if isinstance(data, Mapping):
        return data.get("client") is not None or not ({"x", "y"} <= set(data) or "frame" in data)
    return isinstance(data, list) or (isinstance(data, tuple) and len(data) == 3)


def from_anything(data: Any, *, name: str = "data", seed: int = 0, numbers: bool = False) -> Arrays:
    """Data in any of the known forms."""
    if isinstance(data, Arrays):
        return data
    if is_frame(data) or (isinstance(data, Mapping) and "frame" in data):
        return _from_frame({"frame": data} if is_frame(data) else dict(data), seed, numbers)
    if isinstance(data, Mapping) and {"x", "y"} <= set(data):
        return _from_keywords(dict(data) | {"numbers": numbers}, name, seed)
    if isinstance(data, Dataset):
        return from_torch(data, seed=seed, numbers=numbers)
    if isinstance(data, tuple) and len(data) in (2, 3):
        return _from_tuple(data, name, seed, numbers)
    if isinstance(data, Mapping | list) and is_data(data):
        parts = data if isinstance(data, Mapping) else {str(k): part for k, part in enumerate(data)}
        return _joined(parts, name, seed, numbers, split=False)
    raise DataError(f"data '{name}': unsupported type {type(data).__name__}; expected one of {FORMS}")


def _from_tuple(data: tuple[Any, ...], name: str, seed: int, numbers: bool) -> Arrays:
    if len(data) == 2 and all(isinstance(part, Dataset) for part in data):
        return _joined({"train": data[0], "test": data[1]}, name, seed, numbers, split=True)
    if any(isinstance(part, Dataset) for part in data) or all(_is_pair_of_arrays(part) for part in data):
        fix = "use a list, as in data=[a, b, c], for one part for each client"
        raise DataError(f"data '{name}': a tuple of {len(data)} data sets is not a known form ({fix}; known: {FORMS})")
    x, y, *client = data
    return from_arrays(x, y, client=client[0] if client else None, name=_called(name), seed=seed, numbers=numbers)


def _from_frame(given: dict[str, Any], seed: int, numbers: bool) -> Arrays:
    from fedloom.core.errors import ConfigError
    from fedloom.core.schema import read

    frame = given.pop("frame")
    source, faults = read(FrameTable, given, "data")
    if source is None:
        raise ConfigError(faults)
    source = source.with_numbers() if numbers else source
    return source.arrays_of(table_of_frame(frame, source.wanted), seed)


def _from_keywords(given: dict[str, Any], name: str, seed: int) -> Arrays:
    known = ("x", "y", "client", "test", "labels", "test_fraction", "name", "standardise", "numbers")
    strangers = [key for key in given if key not in known]
    if strangers:
        raise DataError(f"data '{name}': unknown key '{strangers[0]}' (known: {', '.join(known)})")
    return from_arrays(**{"seed": seed, "name": _called(name), **given})


def _called(name: str) -> str:
    """The name of arrays: that of their loader, if they have one."""
    return "arrays" if name == "data" else name


class _Part(NamedTuple):
    """One of several data sets that are joined."""

    called: str
    at: str  # its name in messages
    x: NDArray[Any]
    y: list[Any]
    names: list[str] | None  # of its classes 0, 1, 2, ..., where it has them


def _joined(given: Mapping[str, Any], name: str, seed: int, numbers: bool, *, split: bool) -> Arrays:
    """Several data sets as one that records the origin of each row: its client, or training and test."""
    parts = [_part(name, called, part) for called, part in given.items()]
    first = parts[0]
    for part in parts:
        if part.x.shape[1:] != first.x.shape[1:]:
            what = f"rows of shape {part.x.shape[1:]}, the first part has {first.x.shape[1:]}"
            raise DataError(f"{part.at}: {what}")
        if part.x.ndim > 2 and (part.x.dtype == np.uint8) != (first.x.dtype == np.uint8):
            what = f"pixels of type {part.x.dtype}, the first part has {first.x.dtype}"
            raise DataError(f"{part.at}: {what}: they may not have the same range (convert all parts alike)")
    y, labels = ([each for part in parts for each in part.y], None) if numbers else _in_common_classes(parts)
    holder = np.repeat(np.array([part.called for part in parts]), [len(part.y) for part in parts])
    more: dict[str, Any] = {"test": holder == "test"} if split else {"client": holder}
    x = np.concatenate([part.x for part in parts])
    return from_arrays(x, y, name=name, labels=labels, seed=seed, numbers=numbers, **more)


def _in_common_classes(parts: Sequence[_Part]) -> tuple[list[Any], list[str] | None]:
    """The labels of all parts, and the names of the classes: where parts name them differently, those of any part."""
    y, named = [each for part in parts for each in part.y], [part for part in parts if part.names is not None]
    if all(part.names == named[0].names for part in named):
        return y, named[0].names if named else None
    unnamed = [part for part in parts if part.names is None]
    if unnamed:
        what = "its classes have no names, and those of other parts have different ones"
        raise DataError(f"{unnamed[0].at}: {what} (give every data set its .classes, or use words as labels)")
    union = list(dict.fromkeys(name for part in parts for name in part.names or []))
    codes: list[int] = []
    for part in named:
        names = part.names or []
        own = numbered(np.array(part.y), len(names), "label", lambda row, at=part.at: f"{at}, row {row}")  # type: ignore[misc]
        codes += np.array([union.index(name) for name in names])[own].tolist()
    return codes, union


def _part(name: str, called: str, part: Any) -> _Part:
    at = f"data '{name}', {called}"
    if isinstance(part, Dataset):
        return _Part(called, at, *examples_of(part, f"{name}, {called}"))
    x, y = (array_of(values, f"{at}: {what}") for what, values in zip("xy", part, strict=True))
    if y.ndim == 0:
        raise DataError(f"{at}: its label is the single value {y}, not an array (of rows, make arrays: data=(x, y))")
    if x.ndim == 0 or len(x) != len(y):
        raise DataError(f"{at}: x and y must have equally many rows (got shapes {x.shape} and {y.shape})")
    return _Part(called, at, x, y.tolist(), None)
