"""pfl-research: its FederatedAveraging on its SimulatedBackend, with its own local training.

    python -m benchmarks.drivers.pfl FOLDER [--rounds 3]
    torchrun --standalone --nproc-per-node 2 -m benchmarks.drivers.pfl FOLDER [--rounds 3] --processes 2

Several processes share out the clients of a round, as the package does it under torchrun.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.drivers.work import CNN64, Count, Task, asked, tell

os.environ.setdefault("PFL_PYTORCH_DEVICE", "cpu")

from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Net(CNN64):
    """The net with the two functions that the package asks for."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Asked for in the first round alone, which is not timed."""
        self.eval()
        return {"loss": Weighted(nn.functional.cross_entropy(self(x), y, reduction="sum").item(), len(y))}


class Clock(TrainingProcessCallback):
    """When each round ended; counts begin anew after the first."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def after_central_iteration(
        self, _metrics: Metrics, _model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        if central_iteration == 0:
            Count.steps = Count.examples = 0
        self.ended.append(time.perf_counter())
        return False, Metrics()


def main(task: Task) -> None:
    work, net, clock = task.work, Net(), Clock()
    if task.threads:
        torch.set_num_threads(task.threads)
    x, y = task.everything()
    short = torch.bfloat16 if task.bf16 else None
    users = {client: [x[task.rows(client)], y[task.rows(client)]] for client in range(work.clients)}
    data = FederatedDataset.from_slices(users, MinimizeReuseUserSampler(list(users)))
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0), amp_dtype=short)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=1 + task.rounds,
            evaluation_frequency=1 + task.rounds,
            train_cohort_size=work.cohort,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=None),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch),
        NNEvalHyperParams(local_batch_size=work.batch),
        [clock],
    )
    counts = torch.tensor([Count.steps, Count.examples])
    processes, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    assert processes == task.processes, (processes, task.processes)
    if processes > 1:
        dist.all_reduce(counts)
    seconds = [b - a for a, b in pairwise(clock.ended)]
    settings = {
        "processes": processes,
        "bf16": task.bf16,
        "local_training": "its own; batches in the order of the rows, as the package does not shuffle them",
        "data": "float32 in memory, normalised beforehand",
    }
    if rank == 0:
        tell(net, seconds, ("pfl",), settings, *counts.tolist())


if __name__ == "__main__":
    main(asked(__doc__))
