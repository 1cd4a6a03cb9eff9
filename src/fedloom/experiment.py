"""From settings to objects: load the data, share it out, build the net, choose the executor."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom import rng
from fedloom.config import Config
from fedloom.data.arrays import Arrays, Ints
from fedloom.data.federation import federate
from fedloom.data.partition import Summary, fingerprint, split, summary
from fedloom.engine.local import Executor, choose, lane_limit, reuse_memory
from fedloom.engine.run import Experiment
from fedloom.errors import ConfigError, Fault
from fedloom.models.net import Model
from fedloom.task import Task


class Shared(NamedTuple):
    """The data, and who has which of it."""

    arrays: Arrays
    owner: Ints  # [n] the client of each row that is not a test row
    held_out: NDArray[np.bool_]  # [n] whether its client keeps it for its own test
    clients: int
    notes: tuple[str, ...]  # the repairs that the partition needed

    @property
    def labels(self) -> Ints:
        return self.arrays.y[~self.arrays.test]

    def summary(self) -> Summary:
        return summary(self.labels, self.owner, self.clients, self.arrays.classes)

    def described(self) -> dict[str, Any]:
        """What a run folder says of its partition."""
        return {
            "sha256": fingerprint(self.owner, self.held_out),
            "data_sha256": _digest(self.arrays),
            "notes": list(self.notes),
            **self.summary()._asdict(),
        }


class Prepared(NamedTuple):
    """An experiment that is ready to run."""

    experiment: Experiment
    shared: Shared
    config: Config
    reason: str  # why the executor is what it is


def share(config: Config, root: Path, arrays: Arrays | None = None) -> Shared:
    """Load the data (unless it is given) and partition it."""
    seed, partition = config.basics.seed, config.partition
    if arrays is None:
        arrays = config.data.load(root, seed)
    train = ~arrays.test
    client = arrays.client[train] if arrays.client is not None else None
    chance = rng.stream(seed, "partition")
    found = partition.assign(arrays.y[train], arrays.classes, chance, client)
    held_out = split(found.owner, found.clients, partition.holdout, seed)
    return Shared(arrays, found.owner, held_out, found.clients, tuple(found.notes))


def prepare(config: Config, root: Path, arrays: Arrays | None = None) -> Prepared:
    """Everything that the first round needs."""
    reuse_memory()
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    device = pick_device(config.engine.device)
    shared = share(config, root, arrays)
    federation = federate(
        shared.arrays,
        shared.owner,
        shared.clients,
        shared.held_out,
        device=device,
        augment=getattr(config.data, "augment", "none"),
    )
    _check_fit(config, shared, len(federation.common))
    task = initial_task(config.model, shared.arrays, config.basics.seed)
    cohort = shared.clients if config.algorithm.family == "gossip" else config.cohort.size or min(10, shared.clients)
    executor, reason = _executor(config, task, device, cohort)
    task = task.to(device, lanes=executor == "lanes")
    lanes = config.engine.lanes or lane_limit(task, device)
    experiment = Experiment(
        algorithm=config.algorithm.bind(task, config.local.optimiser()),
        task=task,
        federation=federation,
        local=config.local,
        cohort=config.cohort,
        evaluate=config.evaluate,
        rounds=config.basics.rounds,
        seed=config.basics.seed,
        device=device,
        executor=executor,
        lanes=lanes,
        topology=config.topology,
        system=config.system,
        # Where nothing is sent, running statistics are not sent either.
        buffers=getattr(config.model, "buffers", "average") if config.algorithm.communicates else "local",
    )
    return Prepared(experiment, shared, config, reason)


def initial_task(model: Model, arrays: Arrays, seed: int) -> Task:
    """The net with the initial parameters of this seed; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.stream(seed, "init").integers(1 << 62)))
        return Task(model.net(arrays.shape, arrays.classes))


def pick_device(name: str) -> torch.device:
    """The device of this name; ``auto`` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError([Fault("engine.device", f"torch sees no GPU here (got '{name}')", "use cpu or auto")])
    return torch.device(name)


def _executor(config: Config, task: Task, device: torch.device, cohort: int) -> tuple[Executor, str]:
    wanted = config.engine.executor
    if wanted == "auto":
        return choose(task, device, cohort)
    if wanted == "lanes" and task.has_statistics:
        why = "lanes pads batches, and padding would enter the statistics of BatchNorm"
        raise ConfigError([Fault("engine.executor", why, 'use loop, or a net with norm = "group"')])
    return wanted, "as configured"


def _check_fit(config: Config, shared: Shared, common: int) -> None:
    """What can only be known once the data is there."""
    faults = []
    size = config.cohort.size
    if config.cohort.sampling == "uniform" and size is not None and size > shared.clients:
        faults.append(Fault("cohort.size", f"{size}, but the data has {shared.clients} clients"))
    if config.algorithm.family == "gossip" and shared.clients < 2:
        faults.append(Fault("partition.clients", "a network needs at least two nodes (got 1)"))
    if not common and config.algorithm.communicates:
        fix = "set partition.holdout=0.2, or data.test=0.2"
        faults.append(Fault("data", f"'{shared.arrays.name}' has no test rows, and no client holds any out", fix))
    if faults:
        raise ConfigError(faults)


def _digest(arrays: Arrays) -> str:
    sha = hashlib.sha256()
    for part in (arrays.x, arrays.y, arrays.test):
        sha.update(np.ascontiguousarray(part).view(np.uint8).data)
    return sha.hexdigest()
