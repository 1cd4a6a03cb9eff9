"""The work that every driver is given, and what each says of it: no driver knows more of fedloom than this.

A folder holds ``work.json`` and the examples of all clients, client after client, in ``x.npy`` and ``y.npy``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

CLASSES, SHAPE = 10, (3, 32, 32)


class Work(NamedTuple):
    """A round of FedAvg: so many clients of so many examples, ``cohort`` of them a round, for one epoch of SGD."""

    clients: int = 100
    examples: int = 500
    cohort: int = 20
    batch: int = 64
    lr: float = 0.01

    @property
    def steps(self) -> int:
        """Steps that all clients of a round take together."""
        return self.cohort * -(-self.examples // self.batch)


class Count:
    """Steps and examples that a net was trained on in this process, by any of its threads."""

    steps = 0
    examples = 0
    lock = Lock()


class CNN64(nn.Module):
    """The net of the FedALR paper: two 5x5 convolutions of 64 channels, then 384, 192 and 10: 797,962 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with Count.lock:
                Count.steps += 1
                Count.examples += len(x)
        logits: Tensor = self.layers(x)
        return logits


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


class Task(NamedTuple):
    """What a driver was asked for."""

    folder: Path
    rounds: int  # that are timed, after one that is not
    processes: int  # that share out the clients of a round, if the simulator knows such
    threads: int | None  # of PyTorch in each of them; None: what the simulator chooses
    bf16: bool  # the net computes in 16 bits, by PyTorch's autocast; its parameters stay float32
    work: Work

    def rows(self, client: int) -> slice:
        return slice(client * self.work.examples, (client + 1) * self.work.examples)

    def client(self, client: int) -> tuple[Tensor, Tensor]:
        """The examples of one client, normalised; only they are read."""
        x, y = (np.load(self.folder / f"{name}.npy", mmap_mode="r")[self.rows(client)] for name in "xy")
        return normalised(x), torch.tensor(y)

    def everything(self) -> tuple[Tensor, Tensor]:
        """The examples of all clients, normalised."""
        return everything(self.folder)


def everything(folder: Path) -> tuple[Tensor, Tensor]:
    """The examples of all clients, normalised."""
    return normalised(np.load(folder / "x.npy")), torch.tensor(np.load(folder / "y.npy"))


def normalised(x: Any) -> Tensor:
    return torch.tensor(x).to(torch.float32).div_(127.5).sub_(1)


def asked(doc: str | None) -> Task:
    """The task from the command line of a driver."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="that are timed, after one that is not")
    parser.add_argument("--processes", type=int, default=1, help="that share out the clients of a round")
    parser.add_argument("--threads", type=int, help="of PyTorch in each of them; by default what the simulator chooses")
    parser.add_argument("--bf16", action="store_true", help="let the net compute in 16 bits, by PyTorch's autocast")
    given = parser.parse_args()
    folder = given.folder.resolve()
    work = Work(**json.loads((folder / "work.json").read_text()))
    return Task(folder, given.rounds, given.processes, given.threads, given.bf16, work)


def epoch(net: nn.Module, x: Tensor, y: Tensor, task: Task) -> None:
    """One epoch as people write it, where a simulator leaves it to its user."""
    optimizer = torch.optim.SGD(net.parameters(), lr=task.work.lr)
    for chosen in torch.split(torch.randperm(len(y)), task.work.batch):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=task.bf16):
            loss = nn.functional.cross_entropy(net(x[chosen]), y[chosen])
        cast(Any, loss).backward()
        optimizer.step()


def timed(round_: Callable[[], None], rounds: int) -> list[float]:
    """Seconds of so many rounds, after one to get warm; the counts are of the timed ones."""
    round_()
    Count.steps = Count.examples = 0
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        round_()
        seconds.append(time.perf_counter() - began)
    return seconds


def tell(
    net: nn.Module,
    seconds: list[float],
    packages: tuple[str, ...],
    settings: dict[str, Any],
    steps: float | None = None,
    examples: float | None = None,
) -> None:
    """The last line of a driver; ``steps`` and ``examples`` of all timed rounds, unless this process counted them."""
    steps, examples = Count.steps if steps is None else steps, Count.examples if examples is None else examples
    found = {
        "seconds": seconds,
        "steps_a_round": steps / len(seconds),
        "examples_a_round": examples / len(seconds),
        "parameters": parameters(net),
        "settings": settings | {"threads_of_torch": torch.get_num_threads()},
        "versions": {name: _version(name) for name in (*packages, "torch", "numpy")},
    }
    print(json.dumps(found), flush=True)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """In this folder, as some packages write into the one where they were started."""
    before = Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
