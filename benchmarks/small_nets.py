"""Rounds of a small net on a CPU, with steps compiled or as they are.

    python -m benchmarks.small_nets [--rounds 20]

The setting of the paper on relaxation (``experiments/relaxation``): softmax regression with 610 parameters, ten clients
of very unequal size in a round, 20 epochs in batches of ten. Each round is done by both in turns, in one thread.
Seconds are those of the processor, so that other work on the machine counts less; compiling is left out, and
reported beside.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import ratio, write
from fedloom.engine.cuda_graphs import built
from fedloom.engine.rounds import begin, rounds
from fedloom.engine.state import Experiment, Round
from fedloom.engine.store import RamStore
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse

WARM = 12  # rounds in which every width is met, and compiled


def experiment(compile_: str) -> Experiment:
    table: dict[str, Any] = {
        "rounds": 1000,
        "data": {"source": "synthetic", "b": 0.5, "devices": 30},
        "partition": {"kind": "natural", "holdout": 0},
        "model": {"kind": "logistic"},
        "local": {"lr": 1e-4, "batch": 10, "epochs": 20},
        "cohort": {"size": 10},
        "algorithm": {"kind": "fedprox", "mu": 1.0, "weighting": "uniform"},
        "engine": {"compile": compile_, "threads": 1},
    }
    return prepare(parse(table), Path()).experiment


def started(exp: Experiment) -> Iterator[Round]:
    """The rounds of a run, which has met what it compiles."""
    coming = rounds(exp, begin(exp), RamStore(exp.federation.clients))
    for _ in range(WARM):
        next(coming)
    return coming


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    exps = {"compiled": experiment("on"), "plain": experiment("off")}
    runs = {name: started(exp) for name, exp in exps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(asked.rounds):
        for name, coming in runs.items():
            began = time.process_time()
            next(coming)
            seconds[name].append(time.process_time() - began)
    found = {
        "seconds": {name: median(each) for name, each in seconds.items()},
        "compiled is faster by": ratio(seconds, "compiled", "plain"),
        "compiling": built(exps["compiled"].task)._asdict(),
    }
    print(found)
    print(write("small_nets", found))


if __name__ == "__main__":
    main()
