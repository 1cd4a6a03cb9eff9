"""A data set as arrays: the only form in which fedloom passes data around."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.core.errors import DataError

Ints: TypeAlias = NDArray[np.int64]


class Arrays(NamedTuple):
    """Examples, labels and which of them are in the common test set."""

    name: str
    x: NDArray[Any]  # [n, ...] uint8 for images [n, C, H, W] in 0..255, else float32
    y: Ints  # [n] in 0..classes-1
    test: NDArray[np.bool_]  # [n] True: the publisher's (or the user's) test row; never trained on
    labels: tuple[str, ...]  # the name of each class
    mean: tuple[float, ...] = (0.0,)  # per channel, subtracted on use, after uint8 was scaled to [0, 1]
    std: tuple[float, ...] = (1.0,)
    client: Ints | None = None  # [n] in 0..clients-1, where the data names the client of a row
    clients: tuple[str, ...] = ()  # the names of these clients
    recipe: Any = None  # data.columns.Recipe: how a table became x
    notes: tuple[str, ...] = ()  # notes for the user
    target: NDArray[Any] | None = None  # [n] the regression targets, where y are only their bins
    unit: tuple[float, float] = (0.0, 1.0)  # mean and deviation of the target, by which it was scaled

    @property
    def classes(self) -> int:
        return len(self.labels)

    @property
    def outputs(self) -> int:
        """How many outputs a net needs."""
        return self.classes if self.target is None else 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])


def checked(arrays: Arrays, *, of_one_client: bool = False) -> Arrays:
    """The same arrays, if they are valid; else a DataError that says what is wrong.

    ``of_one_client``: the rows of one client may be of one class.
    """
    n, at = len(arrays.x), f"data '{arrays.name}'"
    _check_examples(arrays.x, at)
    for name, column in (("y", arrays.y), ("test", arrays.test), ("client", arrays.client)):
        if column is not None and column.shape != (n,):
            raise DataError(f"{at}: {name} must have one entry for each of the {n} rows of x (got {column.shape})")
    if arrays.y.min() < 0 or arrays.y.max() >= arrays.classes:
        raise DataError(f"{at}: labels must be in 0..{arrays.classes - 1} (got {arrays.y.min()}..{arrays.y.max()})")
    if arrays.test.all():
        raise DataError(f"{at}: every row is a test row, so there is nothing to train on")
    if not of_one_client:
        _check_variety(arrays, at)
    channels = arrays.x.shape[1] if arrays.x.ndim in (2, 4) else 1
    for name, values in (("mean", arrays.mean), ("std", arrays.std)):
        if len(values) not in (1, channels):
            raise DataError(f"{at}: {name} must have 1 or {channels} entries (got {len(values)})")
    if min(arrays.std) <= 0:
        raise DataError(f"{at}: std must be positive (got {arrays.std})")
    if arrays.client is not None and arrays.client.min() < 0:
        raise DataError(f"{at}: client ids must not be negative (got {arrays.client.min()})")
    return arrays


def _check_variety(arrays: Arrays, at: str) -> None:
    train = (arrays.y if arrays.target is None else arrays.target)[~arrays.test]
    if (train == train[0]).all():
        what = f"all {len(train)} training rows are of one class, '{arrays.labels[arrays.y[~arrays.test][0]]}'"
        if arrays.target is not None:
            what = f"the label is {train[0]:g} in all {len(train)} training rows"
        raise DataError(f"{at}: {what}, so there is nothing to learn (is y the right column?)")


def _check_examples(x: NDArray[Any], at: str) -> None:
    if len(x) == 0:
        raise DataError(f"{at}: has no rows")
    if x.ndim < 2:
        raise DataError(f"{at}: x must have at least two dimensions [rows, features] (got shape {x.shape})")
    if x.size == 0:
        raise DataError(f"{at}: its rows have no features (x has shape {x.shape})")
    if x.dtype not in (np.uint8, np.float32):
        raise DataError(f"{at}: x must be uint8 or float32 (got {x.dtype})")
    if x.dtype == np.float32 and not np.isfinite(x).all():
        bad = int(np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(1))[0])
        raise DataError(f"{at}: x has values that are not finite (first in row {bad})")
