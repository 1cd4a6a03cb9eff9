"""Data passed in Python: arrays, torch data sets, one for each client, DataFrames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fedloom.core.errors import DataError
from fedloom.data.arrays import Arrays
from fedloom.data.sources import Table, examples_of, from_arrays, from_torch
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


def _joined(parts: Mapping[str, Any], name: str, seed: int, numbers: bool, *, split: bool) -> Arrays:
    """Several data sets as one that records the origin of each row: its client, or training and test."""
    xs: list[NDArray[Any]] = []
    ys: list[Any] = []
    labels: list[str] | None = None
    sizes: list[int] = []
    for called, part in parts.items():
        x, y, own = examples_of(part, f"{name}, {called}") if isinstance(part, Dataset) else (*_arrays(part), None)
        if xs and x.shape[1:] != xs[0].shape[1:]:
            raise DataError(
                f"data '{name}', {called}: rows of shape {x.shape[1:]}, the first part has {xs[0].shape[1:]}"
            )
        xs.append(x)
        ys += list(y)
        labels = labels or own
        sizes.append(len(x))
    holder = np.repeat(np.array(list(parts)), sizes)
    more: dict[str, Any] = {"test": holder == "test"} if split else {"client": holder}
    return from_arrays(np.concatenate(xs), ys, name=name, labels=labels, seed=seed, numbers=numbers, **more)


def _arrays(part: Sequence[Any]) -> tuple[Any, list[Any]]:
    x, y = (np.asarray(values.detach().cpu() if hasattr(values, "detach") else values) for values in part)
    return x, y.tolist()
