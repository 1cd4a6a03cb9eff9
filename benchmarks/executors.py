"""Executors against a plain hand-written PyTorch loop over clients that takes the same steps.

    python -m benchmarks.executors [--repeats 5]

Twenty clients with 500 examples each, one local epoch, for logistic regression (60 -> 10), a multilayer
perceptron and the FedALR paper's network on CIFAR-10-shaped data. The hand-written loop has what people
write: a module and ``torch.optim.SGD`` per client, inputs already normalised, a float32 average at the
end. The ratio is taken in one run, turn by turn. Also: what bookkeeping and an evaluation every ten
rounds (on 2,000 rows) add to a round, and how long it takes from starting Python to the first step.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.machine import interleaved, ratio, write
from fedloom.core import tree
from fedloom.data.arrays import Arrays
from fedloom.engine.evaluate import evaluate
from fedloom.engine.exchange import Tally, add, inbox, keep_finite
from fedloom.engine.local import train
from fedloom.engine.plan import Address, Group, plans
from fedloom.engine.rounds import advance, begin
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import Config, parse

CLIENTS, EXAMPLES, TEST = 20, 500, 2000
EVERY = 10  # rounds between evaluations, as usual in long runs
NETS: dict[str, dict[str, Any]] = {
    "logistic": {"model": {"kind": "logistic"}, "shape": (60,), "batch": 10},
    "mlp": {"model": {"kind": "mlp", "widths": [512, 256]}, "shape": (3, 32, 32), "batch": 64},
    "cnn64": {"model": {"kind": "cnn64"}, "shape": (3, 32, 32), "batch": 64},
}


def data(shape: tuple[int, ...]) -> Arrays:
    """Random examples of this shape: speed does not depend on what they mean."""
    rng, n = np.random.default_rng(0), CLIENTS * EXAMPLES + TEST
    if len(shape) == 3:
        x: Any = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
    else:
        x = rng.normal(size=(n, *shape)).astype(np.float32)
    y, test = rng.integers(0, 10, n), np.arange(n) >= CLIENTS * EXAMPLES
    return Arrays("random", x, y, test, tuple("0123456789"), (0.5,), (0.25,))


def config(net: dict[str, Any], executor: str) -> Config:
    return parse(
        {
            "rounds": 100,
            "partition": {"kind": "iid", "clients": CLIENTS, "holdout": 0.0},
            "model": net["model"],
            "local": {"lr": 0.01, "batch": net["batch"]},
            "cohort": {"sampling": "all"},
            "evaluate": {"every": EVERY},
            "engine": {"executor": "lanes", "compile": "on"} if executor == "compiled" else {"executor": executor},
        }
    )


def hand_written(exp: Experiment, batch: int) -> Any:
    """A round as people write it, and the net that it trains."""
    fed = exp.federation
    x, y = fed.examples(torch.arange(len(fed.y)))
    net = exp.task.module(exp.task.w0, exp.task.buffers0).train()
    mine = [fed.train.rows[fed.train.start[i] : fed.train.start[i + 1]] for i in range(CLIENTS)]

    def round_() -> None:
        total: dict[str, Any] = {}
        for rows in mine:
            local = copy.deepcopy(net)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.01)
            for chosen in torch.split(rows[torch.randperm(len(rows))], batch):
                optimizer.zero_grad()
                loss: Any = nn.functional.cross_entropy(local(x[chosen]), y[chosen])
                loss.backward()
                optimizer.step()
            for name, p in local.named_parameters():
                total[name] = total.get(name, 0) + p.detach() / CLIENTS
        net.load_state_dict(total, strict=False)

    return round_


def measure(name: str, repeats: int) -> dict[str, Any]:
    net = NETS[name]
    arrays = data(net["shape"])
    compiled = () if len(net["shape"]) == 3 and "widths" not in net["model"] else ("compiled",)  # convolutions: loop
    prepared = {e: prepare(config(net, e), Path(), arrays) for e in ("loop", "lanes", *compiled, "auto")}
    chosen = prepared.pop("auto").experiment.executor
    work = {"hand": hand_written(prepared["loop"].experiment, net["batch"])}
    for executor, ready in prepared.items():
        work[executor] = _rounds(ready.experiment)
    seconds = interleaved(work, repeats)
    best = max(prepared, key=lambda executor: ratio(seconds, executor, "hand"))
    found = {
        "parameters": prepared["loop"].experiment.task.size,
        "batch": net["batch"],
        "seconds": {k: round(median(v), 5) for k, v in seconds.items()},
        **{f"{each}_over_hand": round(ratio(seconds, each, "hand"), 3) for each in prepared},
        "best": best,
        "auto_chooses": chosen,
        "auto_over_hand": round(ratio(seconds, chosen, "hand"), 3),
        **overhead(prepared[chosen].experiment, max(3, repeats)),
    }
    print(name, found, flush=True)
    return found


def _rounds(exp: Experiment) -> Any:
    store = RamStore(CLIENTS)
    at = [begin(exp)]

    def round_() -> None:
        at[0], _ = advance(exp, at[0], store)

    return round_


def overhead(exp: Experiment, repeats: int) -> dict[str, Any]:
    """The share of a round that is not local training, each part timed by itself.

    A difference of two whole rounds would be mostly noise: the parts are a few per cent of one.
    """
    store, state, ids = RamStore(CLIENTS), begin(exp), torch.arange(CLIENTS)
    address, sizes = Address(0, 0), exp.federation.train.sizes

    def planned() -> list[Group]:
        return list(plans(exp.local, exp.federation.train, ids, address, lr=0.01, lanes=exp.lanes))

    with torch.no_grad():
        groups = planned()
        outcomes = [train(exp.algorithm, exp.federation, g, exp.given(state, store, g.ids)) for g in groups]

        def booked() -> None:
            planned()
            tally = Tally()
            for group, outcome in zip(groups, outcomes, strict=True):
                exp.given(state, store, group.ids)
                tally = add(tally, keep_finite(group.ids, outcome, torch.ones(len(group.ids))))
            server = exp.algorithm.update(state.server, inbox(tally, sizes))
            tree.finite_rows(tree.tmap(lambda x: x[None], server), 1)

        work = {"round": _rounds(exp), "books": booked, "evaluation": lambda: evaluate(exp, state, store)}
        seconds = {name: median(taken) for name, taken in interleaved(work, repeats).items()}
    whole = seconds["round"] + seconds["evaluation"] / EVERY
    return {
        "evaluation_seconds": round(seconds["evaluation"], 5),
        "bookkeeping_seconds": round(seconds["books"], 5),
        "overhead_share": round((seconds["books"] + seconds["evaluation"] / EVERY) / whole, 4),
    }


def start_up(repeats: int = 3) -> float:
    """Seconds from starting Python to the end of the first round of the default experiment."""
    code = "import fedloom; fedloom.run('fedavg', rounds=1)"
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        seconds.append(time.perf_counter() - began)
    return round(median(seconds), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    results: dict[str, Any] = {name: measure(name, repeats) for name in NETS}
    results["start_up_seconds"] = start_up()
    print("start-up", results["start_up_seconds"], "s")
    print(write("executors", results))


if __name__ == "__main__":
    main()
