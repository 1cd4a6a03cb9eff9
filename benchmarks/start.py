"""From the start of a process to the end of its first compiled round on a GPU: with an empty cache, and a filled one.

    python -m benchmarks.start [--turns 3]

The round is that of the pFedALA paper on images of MNIST's size: 10 clients, ``cnn_fedavg``, batch 10. The first
process compiles and chooses the tiles of convolutions; the others find both in the compiler's cache, as the second cell
of a comparison does. Seconds are counted from before Python starts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

STEPS = 50  # of each client


def child(started: float) -> dict[str, float]:
    """One round in this process: seconds since it was started at which each part was done."""
    at: dict[str, float] = {}

    def mark(name: str) -> None:
        at[name] = round(time.time() - started, 2)

    mark("Python")
    import torch

    mark("torch")
    from benchmarks.lanes import PFEDALA_SHAPES, experiment, images, pfedala_round
    from fedloom.engine import cuda_graphs
    from fedloom.engine.rounds import begin, rounds
    from fedloom.engine.store import RamStore

    mark("fedloom")
    settings = pfedala_round(10) | {"engine": {"compile": "on"}}
    exp = experiment(images(STEPS * 100, PFEDALA_SHAPES["mnist"]), **settings)
    state = begin(exp)
    mark("prepared")
    for _ in rounds(exp, state, RamStore(exp.federation.clients), 1):
        pass
    torch.cuda.synchronize()
    mark("first round")
    spent = cuda_graphs.built(exp.task)
    return at | {"of that compiling": round(spent.compiling, 2), "of that capturing": round(spent.capturing, 2)}


def process(cache: str) -> dict[str, float]:
    """The same in a process of its own."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    line = [sys.executable, "-m", "benchmarks.start", "--child", repr(time.time())]
    done = subprocess.run(line, env=env, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="processes that find everything in the cache")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(child(chosen.child)))
        return
    from benchmarks.machine import write

    with tempfile.TemporaryDirectory() as cache:
        cold, *warm = [process(cache) for _ in range(1 + chosen.turns)]
    found = {"empty cache": cold, "filled cache": {k: round(median(turn[k] for turn in warm), 2) for k in cold}}
    print(json.dumps(found, indent=1))
    print(write("start", found))


if __name__ == "__main__":
    main()
