"""A federation: one resident array of examples, and for each client a range of rows in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.arrays import Arrays, Ints


class Ranges(NamedTuple):
    """Client i has ``rows[start[i]:start[i + 1]]``; both are on the CPU, where plans are made."""

    rows: Tensor  # [n] long
    start: Tensor  # [N + 1] long

    @property
    def sizes(self) -> Tensor:
        return self.start[1:] - self.start[:-1]

    def owners(self) -> Tensor:
        """The client of each entry of ``rows``."""
        return torch.repeat_interleave(torch.arange(len(self.start) - 1), self.sizes)


class Federation(NamedTuple):
    """The examples, and the rows of each client, on the device."""

    x: Tensor  # [n, ...] as loaded: uint8 for images
    y: Tensor  # [n]
    scale: Tensor  # normalised x = x * scale - shift, per channel
    shift: Tensor
    classes: int
    train: Ranges  # each client's training rows
    test: Ranges  # each client's own held-out rows
    common: Tensor  # [m] the rows of the common test set
    augment: str
    validation: Ranges  # each client's rows for validation; none unless evaluate.validation asks for them

    @property
    def clients(self) -> int:
        return len(self.train.start) - 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    def examples(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised inputs and labels of these rows, in the shape of ``rows``."""
        if self.x.device.type != "cpu":
            return self._normalised(self.x[rows]), self.y[rows]
        flat = rows.reshape(-1)  # a CPU copies whole rows three times as fast as it looks up numbers
        x, y = (of.index_select(0, flat).view(*rows.shape, *of.shape[1:]) for of in (self.x, self.y))
        return self._normalised(x), y

    def _normalised(self, x: Tensor) -> Tensor:
        """``x``, which may be overwritten, normalised."""
        return x.to(torch.float32).mul_(self.scale).sub_(self.shift)


def federate(
    arrays: Arrays,
    owner: Ints,
    clients: int,
    held_out: NDArray[np.bool_],
    *,
    device: torch.device,
    augment: str = "none",
    validation: NDArray[np.bool_] | None = None,
) -> Federation:
    """Arrange ``arrays`` for training: ``owner``, ``held_out``, ``validation`` are of the rows that are not test rows.

    Test rows of data that names its clients belong to their client as well as to the common test set;
    where there is no common test set, it is the union of what the clients hold out.
    """
    train_rows = np.flatnonzero(~arrays.test)
    validates = np.zeros_like(held_out) if validation is None else validation
    trains = ~held_out & ~validates
    train = _ranges(train_rows[trains], owner[trains], clients)
    own_test, own_owner = train_rows[held_out], owner[held_out]
    common = np.flatnonzero(arrays.test)
    if arrays.client is not None and len(common) and not held_out.any():
        own_test, own_owner = _named_test_rows(arrays, train_rows, owner, common)
    test = _ranges(own_test, own_owner, clients)
    if not len(common):
        common = np.sort(own_test)
    trailing = [1] * max(0, arrays.x.ndim - 2)
    unit = 255.0 if arrays.x.dtype == np.uint8 else 1.0
    std, mean = torch.tensor(arrays.std, dtype=torch.float64), torch.tensor(arrays.mean, dtype=torch.float64)
    return Federation(
        x=torch.from_numpy(np.ascontiguousarray(arrays.x)).to(device),
        y=torch.from_numpy(arrays.y if arrays.target is None else arrays.target).to(device),
        scale=(1.0 / (unit * std)).float().view(-1, *trailing).to(device),
        shift=(mean / std).float().view(-1, *trailing).to(device),
        classes=arrays.outputs,
        train=train,
        test=test,
        common=torch.from_numpy(common).to(device),
        augment=augment,
        validation=_ranges(train_rows[validates], owner[validates], clients),
    )


def counted(rows: Tensor, client: int | None, sizes: Sequence[int]) -> Ranges:
    """Ranges of clients with ``sizes`` rows each; only the ``rows`` of one ``client`` are present.

    Without a client no rows are present, and each entry is the first of ``rows``, for its shape.
    """
    start = torch.tensor([0, *sizes]).cumsum(0)
    if client is None:
        return Ranges(rows[:1].expand(int(start[-1])), start)
    every = torch.zeros(int(start[-1]), dtype=torch.int64)  # rows of others are not here, and not used
    every[start[client] : start[client + 1]] = rows
    return Ranges(every, start)


def _ranges(rows: Ints, owner: Ints, clients: int) -> Ranges:
    order = np.argsort(owner, kind="stable")
    start = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=clients))])
    return Ranges(torch.from_numpy(rows[order]), torch.from_numpy(start))


def _named_test_rows(arrays: Arrays, train_rows: Ints, owner: Ints, common: Ints) -> tuple[Ints, Ints]:
    """The test rows of each client of the partition, by the name in the data."""
    assert arrays.client is not None
    named = arrays.client
    pairs = np.unique(np.stack([named[train_rows], owner]), axis=1)
    if len(np.unique(pairs[0])) != pairs.shape[1]:  # the partition is not the data's own: no client has a name
        return common[:0], common[:0]
    owner_of = np.full(int(named.max()) + 1, -1, dtype=np.int64)
    owner_of[pairs[0]] = pairs[1]
    owners = owner_of[named[common]]
    return common[owners >= 0], owners[owners >= 0]
