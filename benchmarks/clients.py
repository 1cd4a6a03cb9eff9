"""A million clients: rounds per second and peak memory against the number of clients.

    python -m benchmarks.clients [--largest 1000000]

Synthetic data, ten examples for each client, logistic regression, cohorts of 1,000 and 10,000; FedAvg, which
keeps nothing for a client, and local training, which keeps a model for each in the store on disk. Each size
runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import write

COHORTS, EXAMPLES, ROUNDS = (1_000, 10_000), 10, 10
SIZES = (1_000, 10_000, 100_000, 1_000_000)


def one(clients: int, cohort: int, algorithm: str) -> dict[str, Any]:
    """Ten rounds of one size, in this process."""
    from fedloom.data.arrays import Arrays
    from fedloom.engine.rounds import advance, begin
    from fedloom.engine.store import DiskStore
    from fedloom.runs.prepare import prepare
    from fedloom.runs.settings import parse

    rng, n = np.random.default_rng(0), clients * EXAMPLES + 1000
    x = rng.standard_normal((n, 20), dtype=np.float32)
    y = rng.integers(0, 10, n)
    arrays = Arrays("synthetic", x, y, np.arange(n) < 1000, tuple("0123456789"), client=np.arange(n) % clients)
    data_bytes = x.nbytes + y.nbytes
    began = time.perf_counter()
    table = {
        "rounds": ROUNDS,
        "partition": {"kind": "natural", "holdout": 0.1},
        "model": {"kind": "logistic"},
        "cohort": {"size": cohort},
        "algorithm": algorithm,
    }
    exp = prepare(parse(table), Path(), arrays).experiment
    ready = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        store, state = DiskStore(Path(folder), exp.federation.clients), begin(exp)
        state, _ = advance(exp, state, store)
        began = time.perf_counter()
        for _ in range(ROUNDS):
            state, _ = advance(exp, state, store)
        seconds = (time.perf_counter() - began) / ROUNDS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "clients": exp.federation.clients,
        "cohort": cohort,
        "algorithm": algorithm,
        "start_up_seconds": round(ready, 2),
        "rounds_per_second": round(1 / seconds, 2),
        "clients_per_second": round(cohort / seconds),
        "peak_memory_mb": round(peak / 1e6),
        "data_mb": round(data_bytes / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=SIZES[-1])
    parser.add_argument("--one", nargs=3, metavar=("CLIENTS", "COHORT", "ALGORITHM"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        clients, cohort, algorithm = options.one
        print(json.dumps(one(int(clients), int(cohort), algorithm)))
        return
    results = []
    for clients, cohort in product(SIZES, COHORTS):
        if not cohort <= clients <= options.largest:
            continue
        for algorithm in ("fedavg", "local_only"):
            command = [sys.executable, "-m", "benchmarks.clients", "--one", str(clients), str(cohort), algorithm]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            results.append(json.loads(done.stdout.strip().splitlines()[-1]))
            print(results[-1], flush=True)
    if options.largest >= SIZES[-1]:  # a part would replace the whole
        print(write("clients", results))


if __name__ == "__main__":
    main()
