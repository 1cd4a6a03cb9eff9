"""What gossip adds to a round: 100 nodes, 800,000 parameters, 10 neighbours each.

    python -m benchmarks.gossip [--repeats 3] [--nodes 100]

One local epoch of a multilayer perceptron over 500 examples at each node, five of them, as a round of the recipes has,
and the mixing of what comes out, taken in turns in one run, so that load slows all of them equally. A perceptron
does least work for each of its parameters: with convolutions gossip is a smaller part. Also: the same mixing as one
product of dense matrices, and over a ring.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.machine import interleaved, ratio, write
from fedloom.core import tree
from fedloom.data.arrays import Arrays
from fedloom.engine.gossip import Mail, delivered, envelopes
from fedloom.engine.local import train
from fedloom.engine.rounds import begin
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.engine.topology.kinds import Random, Ring
from fedloom.engine.topology.weights import Weights
from fedloom.engine.training import groups_of
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse

EXAMPLES, DEGREE, EPOCHS = 500, 10, 5


def world(nodes: int, epochs: int) -> Experiment:
    """Random examples: speed does not depend on what they mean."""
    rng, n = np.random.default_rng(0), nodes * EXAMPLES + 100
    x = rng.standard_normal((n, 784), dtype=np.float32)
    arrays = Arrays("random", x, rng.integers(0, 10, n), np.arange(n) < 100, tuple("0123456789"))
    table = {
        "partition": {"kind": "iid", "clients": nodes, "holdout": 0.0},
        "model": {"kind": "mlp", "widths": [800, 200]},
        "local": {"epochs": epochs, "batch": 128},
        "algorithm": {"kind": "dpsgd", "order": "atc"},
        "topology": {"kind": "random", "max_degree": DEGREE},
    }
    return prepare(parse(table), Path(), arrays).experiment


def local(exp: Experiment) -> Any:
    """The local training of a round."""
    state, store = begin(exp), RamStore(exp.federation.clients)
    with torch.no_grad():
        done = [
            train(exp.algorithm, exp.federation, group, exp.given(state, store, group.ids)).uploads
            for group in groups_of(exp, 0, exp.present(0))
        ]
    return tree.cat(done)


def mixed(exp: Experiment, weights: Weights, uploads: Any) -> Any:
    """Its gossip: every node mixes what it received, in float32 again."""
    ok = np.ones(weights.nodes, dtype=bool)
    mail = Mail(weights, uploads, envelopes(exp, weights, None, 0), ok)
    with torch.no_grad():
        return delivered(exp, begin(exp), RamStore(weights.nodes), mail)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=100)
    options = parser.parse_args()
    exp, whole = world(options.nodes, 1), world(options.nodes, EPOCHS)
    uploads = local(exp)
    weights = Random(max_degree=DEGREE).weigh(options.nodes)
    dense = torch.from_numpy(weights.dense())
    seconds = interleaved(
        {
            "epoch": lambda: local(exp),
            "round": lambda: local(whole),
            "gossip": lambda: mixed(exp, weights, uploads),
            "gossip_ring": lambda: mixed(exp, Ring().weigh(options.nodes), uploads),
            "gossip_dense": lambda: tree.tmap(lambda x: x.float(), tree.mix(dense, uploads)),
        },
        options.repeats,
    )
    results = {
        "nodes": options.nodes,
        "parameters": exp.task.size,
        "degree": DEGREE,
        "local_steps": int(exp.present(0).steps[0]),
        "batch": 128,
        "seconds": {name: round(median(values), 3) for name, values in seconds.items()},
        "epochs": EPOCHS,
        "gossip_over_epoch": round(ratio(seconds, "epoch", "gossip"), 4),
        "gossip_over_round": round(ratio(seconds, "round", "gossip"), 4),
    }
    print(results)
    print(write("gossip", results))


if __name__ == "__main__":
    main()
