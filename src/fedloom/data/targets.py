"""Regression targets: their values, their unit, and the bins by which rows are drawn and partitioned like classes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.core.errors import DataError
from fedloom.data.arrays import Arrays, Ints
from fedloom.data.files import Place, number_of, refuse_empty

_BINS = 10
_MANY = 20  # more distinct integers than this, with few rows each, are probably not classes
_ROWS = 10
_DECIMAL_COMMA = re.compile(r"(?<=\d),(?=\d+$)")


def numbers_in(column: NDArray[Any], what: str, where: Place) -> NDArray[np.float64]:
    """The column as finite numbers."""
    if column.dtype.kind in "biuf":
        values = column.astype(np.float64)
    else:
        words = [str(word) for word in column.tolist()]
        refuse_empty(np.array(words), what, where)
        found = [number_of(word) for word in words]
        odd = next((row for row, number in enumerate(found) if number is None), None)
        if odd is not None:
            got = str(column[odd])
            raise DataError(f"{where(odd)}: the {what} must be a number (got {got!r})")
        values = np.array(found, np.float64)
    if not np.isfinite(values).all():
        row = int(np.argmax(~np.isfinite(values)))
        raise DataError(f"{where(row)}: the {what} must be a finite number (got {values[row]})")
    return values


def binned(target: NDArray[np.float64]) -> tuple[Ints, tuple[str, ...]]:
    """The bin of each number, with about equally many rows in each, and the names of the bins."""
    edges = np.unique(np.quantile(target, np.linspace(0, 1, _BINS + 1)[1:-1]))
    bins = np.searchsorted(edges, target, side="left")
    _, codes = np.unique(bins, return_inverse=True)
    first = [target[codes == k].min() for k in range(int(codes.max()) + 1)]
    return codes.astype(np.int64), tuple(f"from {value:g}" for value in first)


def decoded(column: NDArray[Any], what: str, where: Place) -> tuple[Ints, tuple[str, ...], NDArray[np.float64] | None]:
    """Labels that are numbers: their bins, the names of these, and the numbers themselves."""
    target = numbers_in(column, what, where)
    return *binned(target), target


def with_unit(arrays: Arrays) -> Arrays:
    """The arrays with their target in deviations from its mean, both of the training rows."""
    assert arrays.target is not None
    train = arrays.target[~arrays.test].astype(np.float64)
    mean, std = float(train.mean()), float(train.std()) or 1.0
    return arrays._replace(target=((arrays.target - mean) / std).astype(np.float32), unit=(mean, std))


def looks_like_numbers(arrays: Arrays) -> str:
    """Why classes are probably regression targets, in words; empty if they are not."""
    rows = int((~arrays.test).sum())
    few = arrays.classes > _MANY and rows < _ROWS * arrays.classes
    if not few or any(number_of(_DECIMAL_COMMA.sub(".", label)) is None for label in arrays.labels):
        return ""
    return f"the label has {arrays.classes} different numbers in {len(arrays.y)} rows, too many to be classes"
