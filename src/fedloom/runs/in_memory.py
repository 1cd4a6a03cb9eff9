"""Data and nets that are passed in Python instead of being named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr
from torch import nn
from torch.utils.data import Dataset

from fedloom.core.errors import DataError
from fedloom.core.task import copied
from fedloom.data.arrays import Arrays
from fedloom.data.files import Rows
from fedloom.data.handed import from_anything, is_data, names_clients
from fedloom.data.sources import Source
from fedloom.models.net import NetSpec


class InMemory(Source):
    """Data that was passed in Python; it cannot be loaded again by name."""

    kind: ClassVar[str] = "in-memory"

    def read(self, root: Path) -> Rows:  # noqa: ARG002
        raise DataError("the data of this experiment was passed in Python: pass it again with data=...")


class GivenNet(NetSpec):
    """A net that was passed in Python; training starts from its parameters."""

    kind: ClassVar[str] = "in-memory"
    buffers: Literal["average", "local"] = "average"

    _net: nn.Module | None = PrivateAttr(None)

    @staticmethod
    def of(net: nn.Module) -> GivenNet:
        made = GivenNet()
        made._net = net
        return made

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:  # noqa: ARG002
        assert self._net is not None
        return copied(self._net)


def is_handed_over(data: Any) -> bool:
    """Whether ``data`` is the data itself, and not where to find it."""
    return isinstance(data, Arrays | Dataset) or is_data(data)


def as_arrays(data: Any, seed: int, *, numbers: bool = False) -> Arrays | None:
    """The data itself, if it was passed; ``numbers``: its labels are regression targets."""
    return from_anything(data, seed=seed, numbers=numbers) if is_handed_over(data) else None


def section_of(data: Any, partition: Any) -> dict[str, Any]:
    """The sections of an experiment that follow from data that was passed in Python."""
    found: dict[str, Any] = {"data": {"source": InMemory.kind}}
    if names_clients(data) and (partition is None or isinstance(partition, Mapping)):
        found["partition"] = {"kind": "natural", **(partition or {})}
    return found
