"""Small federations for the tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fedloom.algorithm import AnyAlgorithm, Setup
from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.optim import Local
from fedloom.core.task import Capture, Task
from fedloom.data.arrays import Arrays
from fedloom.data.federation import Federation, Ranges, federate
from fedloom.engine.local import Executor
from fedloom.engine.plan import Cohort
from fedloom.engine.settings import Evaluate
from fedloom.engine.state import Experiment

CPU = torch.device("cpu")


def ranges(sizes: Sequence[int], offset: int = 0) -> Ranges:
    """Clients with so many rows each; the rows are numbered from ``offset``, in order."""
    start = torch.tensor([0, *np.cumsum(sizes)])
    return Ranges(torch.arange(int(start[-1])) + offset, start)


def federation(
    sizes: Sequence[int], *, shape: tuple[int, ...] = (5,), classes: int = 3, augment: str = "none", holdout: int = 0
) -> Federation:
    """Clients with ``sizes`` training rows each (and ``holdout`` of their own to test), and 30 test rows."""
    rng = np.random.default_rng(5)
    owner = np.repeat(np.arange(len(sizes)), [n + holdout for n in sizes])
    held_out = np.concatenate([np.arange(n + holdout) < holdout for n in sizes])
    n = len(owner) + 30
    y = rng.integers(0, classes, n)
    if len(shape) == 3:
        x: Any = rng.integers(0, 256, (n, *shape)).astype(np.uint8)
    else:
        x = rng.normal(size=(n, *shape)).astype(np.float32) + 2 * np.eye(classes, shape[0], dtype=np.float32)[y]
    test = np.arange(n) >= len(owner)
    channels = shape[0] if len(shape) == 3 else 1
    labels = tuple(str(c) for c in range(classes))
    arrays = Arrays("world", x, y, test, labels, (0.4,) * channels, (0.5,) * channels)
    return federate(arrays, owner, len(sizes), held_out, device=CPU, augment=augment)


def experiment(
    fed: Federation,
    net: nn.Module,
    algorithm: AnyAlgorithm | None = None,
    *,
    executor: Executor = "lanes",
    capture: Capture = "eager",
    lanes: int = 64,
    local: Local | None = None,
    frozen: Sequence[str] = (),
    **settings: Any,
) -> Experiment:
    """An experiment on ``fed``; the net's parameters are taken as they are."""
    local = local or Local(batch=10, lr=0.05)
    task = Task(net, frozen=frozen).to(CPU, lanes=executor == "lanes", capture=capture)
    chosen = {"cohort": Cohort(sampling="all"), "evaluate": Evaluate(), "rounds": 4, "seed": 3, **settings}
    return Experiment(
        algorithm=(algorithm or FedAvg()).bind(Setup(task, local.make_optimizer(), fed.train.sizes, first_lr=local.lr)),
        task=task,
        federation=fed,
        local=local,
        device=CPU,
        executor=executor,
        lanes=lanes,
        **chosen,
    )
