"""Rounds on a GPU against their floor: one central model that sees the same examples.

    python -m benchmarks.lanes [--work fedalr ragged pfl lenet cohorts algorithms gossip] [--turns 7]

The floor is what a user knows: one net, eager PyTorch, its step recorded as a CUDA graph, the data on the GPU, as many
examples in a batch as all clients of a round together have in theirs. A round of fedloom is a whole round: the plan,
local training of all clients, their sums in float64, the server's step. The data is random, as speed does not depend
on what it means.

- fedalr: the round of the FedALR paper, 20 of 100 clients with 500 images each, ``cnn64``, batch 64
- ragged: the same with clients of 10 to 2,000 images (Dirichlet 0.1)
- pfl: the CIFAR-10 benchmark of pfl-research, 50 clients with 50 images each, batch 10
- lenet: LeNet-5, 100 clients, batch 64
- cohorts: FedAvg on ``cnn64``, 5 to 100 clients in a round
- algorithms: a round of each algorithm against a round of FedAvg
- gossip: DFedSAM and DFedGAM against DFedAvg
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.machine import interleaved, write
from fedloom.config import parse
from fedloom.data.arrays import Arrays
from fedloom.engine import captured
from fedloom.engine.local import arithmetic
from fedloom.engine.run import Experiment, begin, rounds
from fedloom.engine.store import RamStore
from fedloom.experiment import prepare
from fedloom.models.net import Model, Net
from fedloom.task import KeyedDropout

SERVED = ("fedavg", "fedprox", "scaffold", "fedalr", "fedopt", "fedmgda", "qfedavg", "moon", "feddyn", "fedsam")
BLOCK = 10  # rounds that are timed at once: while a GPU does one, the CPU makes the next ready
WHOLE = {"fedalr", "ragged", "pfl", "lenet", "cohorts", "algorithms", "gossip"}
COHORTS = (5, 20, 50, 100)


class PflCNN(Model):
    """The CNN of pfl-research's CIFAR-10 benchmark: 1,626,442 parameters."""

    kind = "cnn_pfl"

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        assert shape == (3, 32, 32), shape
        body = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
            nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5),
        )  # fmt: skip
        return Net(body, 128, classes)


def images(count: int) -> Arrays:
    """So many random images of ten classes, and a hundred to test."""
    rng, n = np.random.default_rng(0), count + 100
    x = rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)
    return Arrays("random", x, rng.integers(0, 10, n), np.arange(n) >= count, tuple("0123456789"), (0.5,), (0.25,))


def experiment(arrays: Arrays, **settings: Any) -> Experiment:
    """An experiment on these images, whose run is long enough for what ``engine.compile`` says."""
    table = {"rounds": 10_000, "local": {"lr": 0.01, "batch": 64}, "evaluate": {"every": 10_000}} | settings
    return prepare(parse(table), Path(), arrays).experiment


def rounds_of(exp: Experiment) -> Callable[[], None]:
    """A function that takes the next rounds, to their end."""
    store, at = RamStore(exp.federation.clients), [begin(exp)]

    def some() -> None:
        for done in rounds(exp, at[0], store, at[0].round + BLOCK):
            at[0] = done.state
        torch.cuda.synchronize()

    return some


def central(exp: Experiment, examples: Callable[[int], int], batch: int) -> Callable[[], None]:
    """One model on as many examples as the clients of each round have, in batches of ``batch``."""
    fed, short = exp.federation, exp.task.precision == "bf16"
    net = exp.task.module(exp.task.w0, exp.task.buffers0).train().to(exp.device)
    for parent in net.modules():  # a plain dropout is what a user has
        for name, child in parent.named_children():
            if isinstance(child, KeyedDropout):
                setattr(parent, name, nn.Dropout(child.p))
    parameters = list(net.parameters())
    x, y = fed.examples(torch.arange(len(fed.y), device=exp.device))
    rows = torch.zeros(batch, dtype=torch.int64, device=exp.device)

    def step() -> None:
        with torch.enable_grad(), torch.autocast("cuda", torch.bfloat16, enabled=short, cache_enabled=False):
            loss = nn.functional.cross_entropy(net(x[rows]).float(), y[rows])
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.data.sub_(0.01 * g)

    with arithmetic(exp.task):
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    turn = [0]

    def some(_held: Any = step) -> None:  # the graph works on what the step refers to
        for _ in range(BLOCK):
            order = torch.randperm(len(fed.train.rows), device=exp.device)
            for t in range(-(-examples(turn[0]) // batch)):
                rows.copy_(order[(t * batch) % (len(order) - batch) :][:batch])
                graph.replay()
            turn[0] += 1
        torch.cuda.synchronize()

    return some


def measured(work: dict[str, Callable[[], None]], turns: int) -> dict[str, float]:
    """Median seconds of a round of each kind, taken in turns of some rounds."""
    for run in work.values():  # every width of ragged clients should have been met
        run()
    return {name: round(median(taken) / BLOCK, 6) for name, taken in interleaved(work, turns).items()}


def compared(arrays: Arrays, batch: int, turns: int, precisions: tuple[str, ...], **settings: Any) -> dict[str, Any]:
    """A round, recorded and compiled, beside its floor, in each precision."""
    found: dict[str, Any] = {}
    work: dict[str, Callable[[], None]] = {}
    tasks = {}
    for precision in precisions:
        for name, compile_ in (("graph", "auto"), ("compiled", "on")):
            length = {"rounds": 500} if name == "graph" else {}
            exp = experiment(arrays, **(settings | {"engine": {"precision": precision, "compile": compile_}} | length))
            assert exp.task.capture == name, exp.task.capture
            work[f"{precision}/{name}"], tasks[f"{precision}/{name}"] = rounds_of(exp), exp.task

        def examples(turn: int, exp: Experiment = exp) -> int:
            return int(exp.federation.train.sizes[exp.present(turn).drawn.ids].sum())

        work[f"{precision}/central"] = central(exp, examples, batch)
    found["seconds"] = measured(work, turns)
    mean = sum(map(examples, range(BLOCK))) / BLOCK
    found["examples_per_second"] = {name: round(mean / s) for name, s in found["seconds"].items()}
    found["over_central"] = {
        name: round(s / found["seconds"][f"{name.split('/')[0]}/central"], 3)
        for name, s in found["seconds"].items()
        if not name.endswith("central")
    }
    found["built"] = {name: captured.built(task)._asdict() for name, task in tasks.items()}
    found["parameters"] = exp.task.size
    return found


def profiled(exp: Experiment, path: str) -> None:
    """Where the time of some rounds goes, as a table."""
    run = rounds_of(exp)
    run()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    began = time.perf_counter()
    with torch.profiler.profile(activities=kinds) as profile:
        run()
    print("profiled", time.perf_counter() - began)
    Path(path).write_text(
        profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=80)
        + profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="*", choices=sorted(WHOLE), default=sorted(WHOLE))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--profile", help="also write where the time of the FedALR round goes into this file")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    both: tuple[str, ...] = ("tf32", "bf16")
    even = {"partition": {"kind": "iid", "clients": 100, "holdout": 0.0}, "cohort": {"size": 20}, "model": "cnn64"}
    found: dict[str, Any] = {}

    def tell(name: str, value: Any) -> None:
        found[name] = value
        print(name, value, flush=True)

    if "fedalr" in chosen.work:
        tell("fedalr", compared(images(50_000), 1280, chosen.turns, both, algorithm="fedalr", **even))
    if chosen.profile:
        profiled(experiment(images(50_000), algorithm="fedalr", engine={"compile": "on"}, **even), chosen.profile)
    if "ragged" in chosen.work:
        ragged = even | {
            "partition": {"kind": "dirichlet", "alpha": 0.1, "clients": 100, "holdout": 0.0, "min_size": 10}
        }
        tell("ragged", compared(images(50_000), 1280, chosen.turns, ("tf32",), **ragged))
    if "pfl" in chosen.work:
        small = {
            "partition": {"kind": "iid", "clients": 1000, "holdout": 0.0},
            "cohort": {"size": 50},
            "local": {"lr": 0.1, "batch": 10},
            "model": "benchmarks/lanes.py:PflCNN",
        }
        tell("pfl", compared(images(50_000), 500, chosen.turns, both, **small))
    if "lenet" in chosen.work:
        wide = {"partition": even["partition"], "cohort": {"size": 100}, "model": "lenet5"}
        tell("lenet", compared(images(50_000), 6400, chosen.turns, both, **wide))
    if "cohorts" in chosen.work:
        arrays, sized = images(50_000), {n: even | {"cohort": {"size": n}} for n in COHORTS}
        tell("cohorts", {n: compared(arrays, 64 * n, chosen.turns, ("tf32",), **own) for n, own in sized.items()})
    if "algorithms" in chosen.work:
        arrays = images(50_000)
        work = {a: rounds_of(experiment(arrays, algorithm=a, **even, rounds=500)) for a in SERVED}
        seconds = measured(work, chosen.turns)
        tell("algorithms", {"seconds": seconds, "over_fedavg": _over(seconds, "fedavg")})
    if "gossip" in chosen.work:
        arrays = images(10_000)
        # DFedGAM takes differences of gradients, for which TF32 is too short: all three in float32.
        ring = {"partition": {"kind": "iid", "clients": 20, "holdout": 0.0}, "model": "cnn64", "rounds": 500}
        ring |= {"engine": {"precision": "fp32"}}
        names = ("dfedavg", "dfedsam", "dfedgam")
        work = {a: rounds_of(experiment(arrays, algorithm=a, **ring)) for a in names}
        seconds = measured(work, chosen.turns)
        tell("gossip", {"seconds": seconds, "over_dfedavg": _over(seconds, "dfedavg")})
    if set(chosen.work) == WHOLE:  # a part would replace the whole
        print(write("lanes", found))


def _over(seconds: dict[str, float], against: str) -> dict[str, float]:
    return {name: round(s / seconds[against], 3) for name, s in seconds.items()}


if __name__ == "__main__":
    main()
