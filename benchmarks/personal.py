"""FedAvg, FedALA and pFedALA on MNIST: seconds, and what comes out.

    python -m benchmarks.personal --data-root FOLDER [--rounds 20] [--batch 10]

Ten clients, Dirichlet 0.1 over the pooled data, a quarter of each client's rows held out, `cnn_fedavg`, plain SGD, one
local epoch, everybody in every round. Each method runs by itself, one after another, through the Python interface.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import fedloom
from benchmarks.machine import write

METHODS = ("fedavg", "fedala", "pfedala")


def one(method: str, root: str, rounds: int, batch: int) -> dict[str, Any]:
    """One run of one method."""
    began = time.perf_counter()
    history = fedloom.run(
        method,
        data={"source": "mnist", "pool": True, "normalise": "half"},
        data_root=root,
        partition={"kind": "dirichlet", "alpha": 0.1, "clients": 10, "holdout": 0.25, "min_size": 40, "guard": True},
        model="cnn_fedavg",
        local={"lr": 0.1, "batch": batch, "drop_last": True, "state": "persist"},
        cohort={"sampling": "all"},
        evaluate={"every": 5},
        rounds=rounds,
    )
    name = "personal/pre_fit/test/accuracy"
    return {
        "method": method,
        "rounds": rounds,
        "batch": batch,
        "seconds": round(time.perf_counter() - began, 1),
        "seconds_per_round": round(history.seconds / rounds, 2),
        name: {key: round(value, 4) for key, value in history.summary[name]._asdict().items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=10)
    options = parser.parse_args()
    results = []
    for method in METHODS:
        results.append(one(method, options.data_root, options.rounds, options.batch))
        print(results[-1], flush=True)
    print(write("personal", results))


if __name__ == "__main__":
    main()
