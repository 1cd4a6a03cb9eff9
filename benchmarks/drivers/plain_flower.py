"""FedAvg as Flower's own examples write it: what benchmarks.deploy compares a deployment of fedloom with."""

from __future__ import annotations

import time
from itertools import pairwise
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
    """One step of SGD on a batch of digits, in PyTorch."""
    import torch  # as in Flower's examples: the server does not train
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    rows = np.load(str(context.run_config["rows"]))
    draw = np.random.default_rng().integers(len(rows["y"]), size=BATCH)
    x, y = torch.from_numpy(rows["x"][draw]), torch.from_numpy(rows["y"][draw])
    hidden = [int(width) for width in str(context.run_config["hidden"]).split()]
    layers: list[torch.nn.Module] = []
    for inputs, outputs in pairwise((FEATURES, *hidden, CLASSES)):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers[:-1])
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    vector_to_parameters(torch.from_numpy(w.copy()), net.parameters())
    torch.autograd.backward(torch.nn.functional.cross_entropy(net(x), y))
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    trained = parameters_to_vector(net.parameters()).detach().numpy()
    metrics = MetricRecord({"num-examples": len(rows["y"])})
    return Message(RecordDict({"arrays": ArrayRecord([trained]), "metrics": metrics}), reply_to=message)
