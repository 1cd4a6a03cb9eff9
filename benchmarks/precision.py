"""Accuracy in each precision: what float32, TF32 and bf16 make of the same runs.

    python -m benchmarks.precision --cifar data_batch_1.bin [--rounds 100] [--seeds 3]

The first ten thousand images of CIFAR-10, 20 clients, Dirichlet 0.1, ten of them a round, ``cnn64``, a fifth of the
images held out. The difference between precisions should be compared with the spread over seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

import fedloom
from benchmarks.machine import write

ROW = 1 + 3072  # a label, and an image


def one(x: Any, y: Any, algorithm: str, precision: str, seed: int, rounds: int) -> float:
    """Accuracy in per cent, the mean of the last ten evaluations."""
    history = fedloom.run(
        algorithm,
        data=(x, y),
        seed=seed,
        rounds=rounds,
        partition={"kind": "dirichlet", "alpha": 0.1, "clients": 20, "holdout": 0.2},
        model="cnn64",
        local={"lr": 0.02, "batch": 64},
        cohort={"size": 10},
        evaluate={"every": 2},
        engine={"precision": precision},
    )
    accuracy: float = history.summary["global/test/accuracy"].mean_last_10
    return 100 * accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    rows = np.fromfile(chosen.cifar, dtype=np.uint8).reshape(-1, ROW)
    x, y = rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)
    found: dict[str, Any] = {"rounds": chosen.rounds}
    for algorithm in ("fedavg", "fedalr"):
        for precision in ("fp32", "tf32", "bf16"):
            each = [round(one(x, y, algorithm, precision, seed, chosen.rounds), 2) for seed in range(chosen.seeds)]
            said = {"accuracy": each, "mean": round(mean(each), 2), "std": round(stdev(each), 2)}
            found[f"{algorithm}/{precision}"] = said
            print(algorithm, precision, said, flush=True)
    print(write("precision", found))


if __name__ == "__main__":
    main()
