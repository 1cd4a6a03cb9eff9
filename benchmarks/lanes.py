"""Rounds on a GPU against their floor: one central model that sees the same examples.

    python -m benchmarks.lanes [--turns 7] [--work fedalr ragged pfl pfedala seeds resnet lenet ...]
    python -m benchmarks.lanes --work pfl --ways compiled best                  # only these columns
    python -m benchmarks.lanes --work --profile FOLDER [--kinds pfl qfedavg]    # only where the time of rounds goes

There are two floors, each one net, its step recorded as a CUDA graph, the data on the GPU, as many examples in a batch
as all clients of a round together have in theirs: ``central`` is eager PyTorch, as most users have it; ``best`` is the
fastest that PyTorch offers, compiled and channels-last. A round of fedloom is a whole round: the plan,
local training of all clients, their sums in float64, the server's step. The data is random, as speed does not depend
on what it means.

- fedalr: the round of the FedALR paper, 20 of 100 clients with 500 images each, ``cnn64``, batch 64
- ragged: the same with clients of 10 to 2,000 images (Dirichlet 0.1)
- pfl: the CIFAR-10 benchmark of pfl-research, 50 clients with 50 images each, batch 10
- pfedala: the round of the pFedALA paper, 10 clients, ``cnn_fedavg``, batch 10, on images of MNIST's and CIFAR-10's
  size; also with 210 clients, as many as 21 such runs have together
- seeds: a round of pFedALA's with unequal clients, of one run, and of several that share their steps, for each of them
- resnet: ResNet-18 with group normalisation, 10 clients, batch 64
- lenet: LeNet-5, 100 clients, batch 64
- cohorts: FedAvg on ``cnn64``, 5 to 100 clients in a round
- algorithms: a round of each algorithm against a round of FedAvg
- servers: likewise for methods whose servers take steps of their own, in the round of LAW-AFL's Table 8
- gossip: DFedSAM and DFedGAM against DFedAvg
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.machine import commit, interleaved, read, write
from fedloom.core import usercode
from fedloom.core.replay import recording_notes
from fedloom.core.task import KeyedDropout
from fedloom.data.arrays import Arrays
from fedloom.engine import cuda_graphs
from fedloom.engine.local import arithmetic
from fedloom.engine.rounds import begin, rounds
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.engine.together import together
from fedloom.models.net import Net, NetSpec
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse

SERVED = ("fedavg", "fedprox", "scaffold", "fedalr", "fedopt", "fedmgda", "qfedavg", "moon", "feddyn", "fedsam")
BLOCK = 10  # rounds that are timed at once: while a GPU does one, the CPU makes the next ready
STEPS = 50  # of a client in a round of pFedALA
COHORTS = (5, 20, 50, 100)
TOGETHER = (1, 3, 7)  # runs that share their steps


FLOORS = ("central", "best")
WAYS = ("graph", "compiled", *FLOORS)


class How(NamedTuple):
    """How rounds are measured."""

    turns: int
    ways: tuple[str, ...]


class PflCNN(NetSpec):
    """The CNN of pfl-research's CIFAR-10 benchmark: 1,626,442 parameters."""

    kind = "cnn_pfl"

    def build(self, shape: tuple[int, ...], classes: int) -> Net:
        assert shape == (3, 32, 32), shape
        body = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
            nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5),
        )  # fmt: skip
        return Net(body, 128, classes)


def images(count: int, shape: tuple[int, int, int] = (3, 32, 32)) -> Arrays:
    """So many random images of ten classes, and a hundred to test."""
    rng, n = np.random.default_rng(0), count + 100
    x = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
    return Arrays("random", x, rng.integers(0, 10, n), np.arange(n) >= count, tuple("0123456789"), (0.5,), (0.25,))


def experiment(arrays: Arrays, **settings: Any) -> Experiment:
    """An experiment on these images, whose run is long enough for what ``engine.compile`` says."""
    table = {"rounds": 10_000, "local": {"lr": 0.01, "batch": 64}, "evaluate": {"every": 10_000}} | settings
    usercode.vouch(table, lasting=False)  # pfl's net is code of this file
    return prepare(parse(table), Path(), arrays).experiment


def rounds_of(exp: Experiment) -> Callable[[], None]:
    """A function that takes the next rounds, to their end."""
    store, at = RamStore(exp.federation.clients), [begin(exp)]

    def some() -> None:
        for done in rounds(exp, at[0], store, at[0].round + BLOCK):
            at[0] = done.state
        torch.cuda.synchronize()

    return some


def central(exp: Experiment, examples: Callable[[int], int], batch: int, *, best: bool) -> Callable[[], None]:
    """One model on as many examples as the clients of each round have, in batches of ``batch``.

    ``best``: compiled and channels-last; otherwise eager and channels-first.
    """
    fed, short = exp.federation, exp.task.precision == "bf16"
    net = exp.task.module(exp.task.w0, exp.task.buffers0).train().to(exp.device)
    for parent in net.modules():  # a plain dropout is what a user has
        for name, child in parent.named_children():
            if isinstance(child, KeyedDropout):
                setattr(parent, name, nn.Dropout(child.p))
    parameters = list(net.parameters())
    x, y = fed.examples(torch.arange(len(fed.y), device=exp.device))
    rows = torch.zeros(batch, dtype=torch.int64, device=exp.device)

    def loss_at(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=short, cache_enabled=False):
            return nn.functional.cross_entropy(net(x).float(), y)

    if best:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.to(memory_format=torch.channels_last)
        loss_at = torch.compile(loss_at, fullgraph=True, dynamic=False)

    def step() -> None:
        with torch.enable_grad():
            loss = loss_at(x[rows], y[rows])
        gradients = torch.autograd.grad(loss, parameters)
        torch._foreach_sub_([p.data for p in parameters], torch._foreach_mul(gradients, 0.01))

    with arithmetic(exp.task):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
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


def compared(arrays: Arrays, batch: int, how: How, precisions: tuple[str, ...], **settings: Any) -> dict[str, Any]:
    """A round, recorded and compiled, compared with its floor, in each precision."""
    found: dict[str, Any] = {}
    work: dict[str, Callable[[], None]] = {}
    tasks = {}
    for precision in precisions:
        for name, compile_ in (("graph", "auto"), ("compiled", "on")):
            length = {"rounds": 100} if name == "graph" else {}
            exp = experiment(arrays, **(settings | {"engine": {"precision": precision, "compile": compile_}} | length))
            assert exp.task.capture == name, exp.task.capture
            if name in how.ways:
                work[f"{precision}/{name}"], tasks[f"{precision}/{name}"] = rounds_of(exp), exp.task

        def examples(turn: int, exp: Experiment = exp) -> int:
            return int(exp.federation.train.sizes[exp.present(turn).drawn.ids].sum())

        for name in set(how.ways) & set(FLOORS):
            work[f"{precision}/{name}"] = central(exp, examples, batch, best=name == "best")
    found["seconds"] = measured(work, how.turns)
    mean = sum(map(examples, range(BLOCK))) / BLOCK
    found["examples_per_second"] = {name: round(mean / s) for name, s in found["seconds"].items()}
    for floor in (each for each in FLOORS if each in how.ways):
        found[f"over_{floor}"] = {
            name: round(s / found["seconds"][f"{name.split('/')[0]}/{floor}"], 3)
            for name, s in found["seconds"].items()
            if not name.endswith(FLOORS)
        }
    found["ticks"] = -(-int(mean) // batch)
    found["built"] = {name: cuda_graphs.built(task)._asdict() for name, task in tasks.items()}
    found["parameters"] = exp.task.size
    return found


def profiled(exp: Experiment, path: Path) -> None:
    """Where the time of some rounds goes, kernel by kernel, as a table."""
    run = rounds_of(exp)
    run()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        run()
    path.write_text(
        profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=80)
        + profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60)
    )


BOTH: tuple[str, ...] = ("tf32", "bf16")
EVEN = {"partition": {"kind": "iid", "clients": 100, "holdout": 0.0}, "cohort": {"size": 20}, "model": "cnn64"}
UNEQUAL = EVEN | {"partition": {"kind": "dirichlet", "alpha": 0.1, "clients": 100, "holdout": 0.0, "min_size": 10}}
PFL = {
    "partition": {"kind": "iid", "clients": 1000, "holdout": 0.0},
    "cohort": {"size": 50},
    "local": {"lr": 0.1, "batch": 10},
    "model": f"{__file__}:PflCNN",
}
RESNET = {"partition": {"kind": "iid", "clients": 10, "holdout": 0.0}, "model": "resnet18"}
PFEDALA_SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


def fedalr(how: How) -> dict[str, Any]:
    return compared(images(50_000), 1280, how, BOTH, algorithm="fedalr", **EVEN)


def ragged(how: How) -> dict[str, Any]:
    return compared(images(50_000), 1280, how, ("tf32",), **UNEQUAL)


def pfl(how: How) -> dict[str, Any]:
    return compared(images(50_000), 500, how, BOTH, **PFL)


def pfedala(how: How) -> dict[str, Any]:
    found = {}
    for name, shape in PFEDALA_SHAPES.items():
        for clients in (10, 210):
            arrays = images(STEPS * 10 * clients, shape)
            found[f"{name}/{clients}"] = compared(arrays, 10 * clients, how, ("tf32",), **pfedala_round(clients))
    return found


def pfedala_round(clients: int) -> dict[str, Any]:
    """The settings of the pFedALA paper's round."""
    all_ = {"partition": {"kind": "iid", "clients": clients, "holdout": 0.0}, "model": "cnn_fedavg"}
    return all_ | {"local": {"lr": 0.005, "batch": 10}, "cohort": {"sampling": "all"}}


def seeds(how: How) -> dict[str, Any]:
    arrays = images(STEPS * 100, PFEDALA_SHAPES["mnist"])
    unequal = {"kind": "pathological", "clients": 10, "per_client": 2, "holdout": 0.0, "min_size": 40}
    settings = pfedala_round(10) | {"partition": unequal, "engine": {"compile": "on"}}
    runs = [rounds_of(experiment(arrays, seed=seed, **settings)) for seed in range(max(TOGETHER))]

    def some(n: int) -> None:
        together(runs[:n])

    taken = measured({str(n): partial(some, n) for n in TOGETHER}, how.turns)
    each = {n: round(s / int(n), 6) for n, s in taken.items()}
    return {"seconds_for_each": each, "over_alone": _over(each, "1")}


def resnet(how: How) -> dict[str, Any]:
    return compared(images(6_400), 640, how, BOTH, **RESNET)


def lenet(how: How) -> dict[str, Any]:
    wide = {"partition": EVEN["partition"], "cohort": {"size": 100}, "model": "lenet5"}
    return compared(images(50_000), 6400, how, BOTH, **wide)


def cohorts(how: How) -> dict[str, Any]:
    arrays, sized = images(50_000), {n: EVEN | {"cohort": {"size": n}} for n in COHORTS}
    return {str(n): compared(arrays, 64 * n, how, ("tf32",), **own) for n, own in sized.items()}


def algorithms(how: How) -> dict[str, Any]:
    return algorithms_of(SERVED, how.turns)


def algorithms_of(kinds: Sequence[str], turns: int) -> dict[str, Any]:
    """A round of each of these, by turns, against FedAvg."""
    arrays = images(50_000)
    work = {a: rounds_of(experiment(arrays, algorithm=a, engine={"compile": "on"}, **EVEN)) for a in kinds}
    seconds = measured(work, turns)
    return {"seconds": seconds, "over_fedavg": _over(seconds, "fedavg")}


def servers(how: How) -> dict[str, Any]:
    arrays = images(10_000, PFEDALA_SHAPES["mnist"])
    table8 = {"partition": {"kind": "dirichlet", "clients": 100, "alpha": 0.1, "holdout": 0.0}, "proxy": {"size": 1000}}
    table8 |= {"model": {"kind": "mlp", "widths": [512, 256]}, "local": {"lr": 0.05, "batch": 64}}
    law_afl = {"kind": "law_afl", "schedule": "per_round"}
    kinds = {"law_afl": law_afl} | {kind: kind for kind in ("fedavg", "fedlaw", "server_finetune", "feddf", "fedbe")}
    exps = {name: experiment(arrays, algorithm=kind, **table8) for name, kind in kinds.items()}
    seconds = measured({name: rounds_of(exp) for name, exp in exps.items()}, how.turns)
    notes = {name: list(recording_notes(exp.task)) for name, exp in exps.items()}
    return {"seconds": seconds, "over_fedavg": _over(seconds, "fedavg"), "notes": notes}


def gossip(how: How) -> dict[str, Any]:
    """DFedGAM takes differences of gradients, for which TF32 is too short: all three in float32."""
    arrays = images(10_000)
    ring = {"partition": {"kind": "iid", "clients": 20, "holdout": 0.0}, "model": "cnn64", "rounds": 500}
    ring |= {"engine": {"precision": "fp32"}}
    work = {a: rounds_of(experiment(arrays, algorithm=a, **ring)) for a in ("dfedavg", "dfedsam", "dfedgam")}
    seconds = measured(work, how.turns)
    return {"seconds": seconds, "over_dfedavg": _over(seconds, "dfedavg")}


def profiles(folder: Path, kinds: list[str]) -> None:
    """A profile of rounds of these kinds, compiled; of every kind if none is named."""
    many = images(50_000)
    small = {(name, n): images(STEPS * 10 * n, shape) for name, shape in PFEDALA_SHAPES.items() for n in (10, 210)}
    rounds: dict[str, tuple[Arrays, str, dict[str, Any]]] = {
        "fedalr": (many, "tf32", EVEN | {"algorithm": "fedalr"}),
        "ragged": (many, "tf32", UNEQUAL),
        "pfl": (many, "tf32", PFL),
        "pfl-bf16": (many, "bf16", PFL),
        **{f"pfedala-{name}-{n}": (arrays, "tf32", pfedala_round(n)) for (name, n), arrays in small.items()},
        "resnet": (images(6_400), "tf32", RESNET),
        "resnet-bf16": (images(6_400), "bf16", RESNET),
        **{kind: (many, "tf32", EVEN | {"algorithm": kind}) for kind in ("moon", "fedmgda", "qfedavg")},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name in kinds or rounds:
        arrays, precision, settings = rounds[name]
        exp = experiment(arrays, engine={"compile": "on", "precision": precision}, **settings)
        profiled(exp, folder / f"{name}.txt")


WORK = {
    f.__name__: f for f in (fedalr, ragged, pfl, pfedala, seeds, resnet, lenet, cohorts, algorithms, servers, gossip)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="*", choices=list(WORK), default=list(WORK))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="what is measured, fedloom's and floors")
    parser.add_argument("--profile", type=Path, help="also write where the time of rounds goes into this folder")
    parser.add_argument("--algorithms", nargs="+", choices=SERVED, help="only what these cost against FedAvg")
    parser.add_argument("--kinds", nargs="*", default=[], help="of the profiles, such as pfl-bf16; all if not given")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    if chosen.algorithms:
        _keep(
            "+".join(("algorithms/fedavg", *chosen.algorithms)),
            algorithms_of(("fedavg", *chosen.algorithms), chosen.turns),
        )
        return
    if chosen.profile:
        profiles(chosen.profile, chosen.kinds)
    for name in chosen.work:
        found = WORK[name](How(chosen.turns, tuple(chosen.ways)))
        _keep(name if set(chosen.ways) == set(WAYS) else f"{name}/{'+'.join(chosen.ways)}", found)


def _keep(name: str, found: dict[str, Any]) -> None:
    """Print a result and add it to the file; a part of the columns stands beside all of them, not in their place."""
    print(name, found, flush=True)
    print(write("lanes", read("lanes") | {name: found | {"commit": commit()}}))


def _over(seconds: dict[str, float], against: str) -> dict[str, float]:
    return {name: round(s / seconds[against], 3) for name, s in seconds.items()}


if __name__ == "__main__":
    main()
