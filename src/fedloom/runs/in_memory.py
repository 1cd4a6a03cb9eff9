"""Data that is handed over in Python instead of being named."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from torch.utils.data import Dataset

from fedloom.core.errors import DataError
from fedloom.data.arrays import Arrays
from fedloom.data.files import Rows
from fedloom.data.sources import Source, from_arrays, from_torch


class InMemory(Source):
    """Data that was handed over in Python; it cannot be loaded again from its name."""

    kind: ClassVar[str] = "in-memory"

    def read(self, root: Path) -> Rows:  # noqa: ARG002
        raise DataError("the data of this experiment was handed over in Python: pass it again with data=...")


def is_handed_over(data: Any) -> bool:
    """Whether ``data`` is the data itself, and not where to find it."""
    return isinstance(data, Arrays | Dataset) or (isinstance(data, tuple) and len(data) == 2)


def as_arrays(data: Any, seed: int) -> Arrays | None:
    if isinstance(data, Arrays) or not is_handed_over(data):
        return data if isinstance(data, Arrays) else None
    return from_torch(data, seed=seed) if isinstance(data, Dataset) else from_arrays(*data, seed=seed)
