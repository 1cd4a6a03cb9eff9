"""FedAvg, FedALA and pFedALA on MNIST: seconds, and what comes out.

    python -m benchmarks.personal --data-root FOLDER [--rounds 20] [--batch 50] [--ranks 2] [--only pfedala]

Ten clients, Dirichlet 0.1 over the pooled data, a quarter of each client's rows held out, `cnn_fedavg`, plain SGD, one
local epoch, everybody in every round. Each method runs by itself, one after another, through the command line. What was
measured of other methods before stays in the result, with the commit that it was measured at.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w
import torch

from benchmarks.machine import RESULTS, write
from fedloom.runs.environment import environment

METHODS = ("fedavg", "fedala", "pfedala")
NAME = "personal/pre_fit/test/accuracy"


def one(method: str, root: str, rounds: int, batch: int, ranks: int) -> dict[str, Any]:
    """One run of one method."""
    table = {
        "rounds": rounds,
        "algorithm": {"kind": method},
        "data": {"source": "mnist", "pool": True, "normalise": "half"},
        "partition": {
            "kind": "dirichlet", "alpha": 0.1, "clients": 10, "holdout": 0.25, "min_size": 40, "guard": True,
        },
        "model": {"kind": "cnn_fedavg"},
        "local": {"lr": 0.1, "batch": batch, "drop_last": True, "state": "persist"},
        "cohort": {"sampling": "all"},
        "evaluate": {"every": 5},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        settings, run = Path(folder) / "experiment.toml", Path(folder) / "run"
        settings.write_text(tomli_w.dumps(table))
        command = [sys.executable, "-m", "fedloom", "run", str(settings), "--out", str(run), "--data-root", root]
        began = time.perf_counter()
        subprocess.run([*command, "--ranks", str(ranks)], check=True)
        seconds = time.perf_counter() - began
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        training = [json.loads(line)["train"] for line in (run / "timings.jsonl").read_text().splitlines()]
    return {
        "method": method,
        "rounds": rounds,
        "batch": batch,
        "ranks": ranks,
        "seconds": round(seconds, 1),
        "commit": environment(torch.device("cpu")).get("commit"),
        "training_seconds_per_round": round(sum(training) / rounds, 2),
        NAME: {str(line["round"]): round(line[NAME], 4) for line in lines if NAME in line},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=METHODS, default=METHODS)
    chosen = parser.parse_args()
    path = RESULTS / "personal-cpu.json"
    before = json.loads(path.read_text())["results"] if path.is_file() else []
    found = [row for row in before if row["method"] not in chosen.only]
    for method in chosen.only:
        found.append(one(method, chosen.data_root, chosen.rounds, chosen.batch, chosen.ranks))
        print(found[-1], flush=True)
        write("personal", found)


if __name__ == "__main__":
    main()
