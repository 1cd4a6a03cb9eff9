"""What a server computes on its own labelled examples: batches, losses, gradients, features, running statistics."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fedloom.core import rng, tree
from fedloom.core.replay import Recorder
from fedloom.core.task import Batch, Task
from fedloom.maths.linear_head import body_features

_CHUNK = 512  # examples of one forward pass

ProxyFeatures: TypeAlias = tuple[Tensor, Tensor]  # features [n, d] in float64, and labels [n]


class ProxySet(Protocol):
    """The server's own examples, normalised."""

    @property
    def x(self) -> Tensor: ...  # [n, ...]

    @property
    def y(self) -> Tensor: ...  # [n]


def proxy_batches(rows: int, batch: int, seed: int, *path: int) -> list[Tensor]:
    """The proxy examples in the order of this address, cut into batches."""
    order = torch.from_numpy(rng.stream(seed, "proxy_batches", *path).permutation(rows))
    return list(torch.split(order, batch))


class ProxyBatch(NamedTuple):
    """Which of the proxy examples a step is taken on."""

    rows: Tensor  # [b]
    key: Tensor  # [] of the random numbers of dropout


def proxy_epochs(
    task: Task, proxy: ProxySet, epochs: int, batch: int, address: tuple[int, int]
) -> list[list[ProxyBatch]]:
    """The batches of each epoch."""
    found: list[list[ProxyBatch]] = []
    for epoch in range(epochs):
        parts = proxy_batches(len(proxy.y), batch, *address, epoch)
        # BatchNorm cannot normalise a single example.
        parts = [rows for rows in parts if len(rows) > 1 or not task.has_statistics]
        keys = rng.bits(address[0], "proxy_dropout", address[1], epoch, torch.arange(len(parts)))
        pairs = zip(parts, keys, strict=True)
        found.append([tree.on_device(ProxyBatch(*pair), proxy.y.device) for pair in pairs])
    return found


class Gradient(Protocol):
    """A loss of a model w ``[P]`` on a batch, and its gradient  ``[P]``"""

    def __call__(self, w: Tensor, batch: Any, /) -> tuple[Tensor, Tensor]: ...


class ProxyGradient(NamedTuple):
    """The loss on a batch of the proxy set, in training mode, and its gradient."""

    task: Task
    proxy: ProxySet

    def __call__(self, w: Tensor, batch: ProxyBatch) -> tuple[Tensor, Tensor]:
        examples = _batch(self.task, self.proxy, batch.rows, batch.key)
        return self.task.evaluate_and_differentiate(lambda v: self.task.loss(v, examples), w)

    @property
    def recorder(self) -> Recorder | None:
        """Where steps along this gradient are recorded."""
        return self.task.recorder(self.proxy.x, self.proxy.y)


def _batch(task: Task, proxy: ProxySet, rows: Tensor, key: Tensor) -> Batch:
    zero = torch.zeros((), device=rows.device)
    ones = torch.ones(len(rows), device=rows.device)
    return Batch(proxy.x[rows], proxy.y[rows], ones, key, zero, zero, task.buffers0)


def proxy_loss(task: Task, proxy: ProxySet, w: Tensor) -> Tensor:
    """The loss on all proxy examples, in evaluation mode unless statistics of the batch are needed.  ``[]``"""
    parts = torch.split(torch.arange(len(proxy.y), device=w.device), _CHUNK)
    training, key = task.has_statistics, torch.zeros((), dtype=torch.int64, device=w.device)
    losses = [len(rows) * task.loss(w, _batch(task, proxy, rows, key), training=training).double() for rows in parts]
    return torch.stack(losses).sum() / len(proxy.y)


def proxy_statistics(task: Task, proxy: ProxySet, w: Tensor, buffers: Tensor, batch: int, passes: int) -> Tensor:
    """The running statistics of a net after this many passes over the proxy set at ``w``.  ``[Q]``"""
    key = torch.zeros((), dtype=torch.int64, device=w.device)
    parts = [rows for rows in torch.split(torch.arange(len(proxy.y), device=w.device), batch) if len(rows) > 1]
    for rows in parts * passes:
        buffers = task.statistics(w, _batch(task, proxy, rows, key)._replace(buffers=buffers))
    return buffers


def proxy_features(task: Task, w: Tensor, proxy: ProxySet, bias: bool) -> ProxyFeatures:
    """Features of the proxy examples in float64, and their labels."""
    parts = [body_features(task, w, x, task.buffers0, bias) for x in torch.split(proxy.x, _CHUNK)]
    return torch.cat(parts).double(), proxy.y
