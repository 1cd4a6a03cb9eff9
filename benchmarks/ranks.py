"""Ranks: the FedALR paper's net on one process, and shared out over two.

    python -m benchmarks.ranks [--repeats 5] [--ranks 2]

A round of ``cnn64`` on CIFAR-10-shaped data: 100 clients of 500 examples, 20 of them a round, batch 64, the loop
executor. Compared are one process with one thread, as many ranks as ``--ranks`` says with one thread each, and one
process with as many threads as there are ranks. The processes live side by side, wait for each other, and take their
rounds in turns, so that load slows all of them equally. Measured are wall seconds and CPU seconds; on a busy machine
the latter say more. Also: an evaluation on 10,000 rows, and the bytes that each rank hands over in a round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any

import numpy as np

from benchmarks.machine import interleaved, ratio, write
from fedloom.data.arrays import Arrays
from fedloom.engine.evaluate import evaluate
from fedloom.engine.ranks import joined
from fedloom.engine.rounds import advance, begin
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.runs import launch
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse

CLIENTS, EXAMPLES, COHORT, TEST = 100, 500, 20, 10_000


def experiment() -> Experiment:
    rng, n = np.random.default_rng(0), CLIENTS * EXAMPLES + TEST
    x, y = rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8), rng.integers(0, 10, n)
    test = np.arange(n) >= CLIENTS * EXAMPLES
    config = parse(
        {
            "rounds": 1000,
            "partition": {"kind": "iid", "clients": CLIENTS, "holdout": 0.0},
            "model": {"kind": "cnn64"},
            "local": {"lr": 0.01, "batch": 64},
            "cohort": {"size": COHORT},
            "engine": {"executor": "loop", "device": "cpu"},
        }
    )
    arrays = Arrays("random", x, y, test, tuple("0123456789"), (0.5,), (0.25,))
    return replace(prepare(config, Path(), arrays).experiment, ranks=joined())


def work() -> None:
    """One process: a round, or an evaluation, for every line that it reads."""
    exp = experiment()
    state, store = begin(exp), RamStore(CLIENTS)
    print(exp.task.size, flush=True)
    for line in sys.stdin:
        began = time.process_time()
        if line.strip() == "round":
            state, _ = advance(exp, state, store)
        else:
            evaluate(exp, state, store)
        print(time.process_time() - began, flush=True)


def crew(ranks: int, threads: int) -> tuple[Callable[[str], float], int]:
    """A function that lets ``ranks`` processes do a piece of work together, and the number of parameters of their net.

    The function takes the name of the work, and returns the most CPU seconds that one of the processes took.
    """
    folder = launch.meeting() if ranks > 1 else Path()
    threaded = {"OMP_NUM_THREADS": str(threads)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ranks", "--work"],
            env={**(launch.rank_environment(rank, ranks, folder) if ranks > 1 else os.environ), **threaded},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]

    def do(word: str) -> float:
        for process in processes:
            _pipe(process.stdin).write(word + "\n")
            _pipe(process.stdin).flush()
        return max(float(_pipe(process.stdout).readline()) for process in processes)

    sizes = [int(_pipe(process.stdout).readline()) for process in processes]
    return do, sizes[0]


def _timed(do: Callable[[str], float], word: str, took: list[float]) -> None:
    took.append(do(word))


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work()
        return
    count = given.ranks
    names = {"one": (1, 1), "ranks": (count, 1), "threads": (1, count)}
    crews, parameters = {}, 0
    for name, (ranks, threads) in names.items():
        crews[name], parameters = crew(ranks, threads)
    load = round(os.getloadavg()[0], 2)
    results: dict[str, Any] = {"parameters": parameters, "clients": COHORT, "ranks": count, "load_before": load}
    for what in ("round", "evaluation"):
        took: dict[str, list[float]] = {name: [] for name in crews}
        turns = {name: partial(_timed, do, what, took[name]) for name, do in crews.items()}
        seconds = interleaved(turns, given.repeats)
        results[what] = {
            "seconds": {name: round(median(taken), 4) for name, taken in seconds.items()},
            "each": {name: [round(s, 4) for s in taken] for name, taken in seconds.items()},
            "ranks_over_one": round(ratio(seconds, "ranks", "one"), 3),
            "threads_over_one": round(ratio(seconds, "threads", "one"), 3),
            "ranks_over_threads": round(ratio(seconds, "ranks", "threads"), 3),
            # Of one process and of the busiest rank: the speed-up on an idle machine without waiting.
            "processor_seconds": {name: round(median(took[name]), 4) for name in ("one", "ranks")},
            "processor_ranks_over_one": round(ratio(took, "ranks", "one"), 3),
        }
        print(what, results[what], flush=True)
    results["bytes_of_a_rank"] = 4 * parameters * -(-COHORT // count)
    print(write("ranks", results))


if __name__ == "__main__":
    main()
