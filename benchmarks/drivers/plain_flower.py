"""FedAvg as Flower's own examples write it: what benchmarks.deploy compares a deployment of fedloom with."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

BATCH, FEATURES, CLASSES = 8, 64, 10

server = ServerApp()  # two lines: Flower reads them without running them
client = ClientApp()


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Rounds of FedAvg; when each of them ended goes to a file, a line each."""
    asked = context.run_config
    nodes, ends = int(asked["nodes"]), Path(str(asked["ends"]))

    def write_down(round_: int, _arrays: ArrayRecord) -> MetricRecord:
        with ends.open("a") as file:
            file.write(f"{time.time()}\n")
        return MetricRecord({"round": round_})

    first = ArrayRecord([np.random.default_rng(0).standard_normal(int(asked["size"]), np.float32) / 100])
    counts = {"min_train_nodes": nodes, "min_available_nodes": nodes, "min_evaluate_nodes": nodes}
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, **counts)
    strategy.start(grid=grid, initial_arrays=first, num_rounds=int(asked["rounds"]), evaluate_fn=write_down)


@client.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """A step of softmax regression in NumPy; of a larger net, on its first numbers, and the others shrink a little.

    Flower sends and stores equal pieces of arrays once: numbers that nobody changes would cost nothing.
    """
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    rows = np.load(str(context.run_config["rows"]))
    random = np.random.default_rng()
    draw = random.integers(len(rows["y"]), size=BATCH)
    x, y = rows["x"][draw], rows["y"][draw]
    w = w * np.float32(1 - 1e-3 * random.random())
    weight = w[: CLASSES * FEATURES].reshape(CLASSES, FEATURES)
    scores = x @ weight.T
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(BATCH), y] -= 1
    weight -= np.float32(0.1) * (p.T @ x) / BATCH
    metrics = MetricRecord({"num-examples": len(rows["y"])})
    return Message(RecordDict({"arrays": ArrayRecord([w]), "metrics": metrics}), reply_to=message)
