"""Flower's Ray simulation: its FedAvg strategy, and a client that trains with the hand-written loop.

    python -m benchmarks.drivers.flwr FOLDER [--rounds 3] [--processes 1]

Flower leaves the local training to its user. Each client gets the cores divided by ``--processes``, so that many are
trained side by side; with 1 that is Flower's own choice on two cores (2 for each client).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from benchmarks.drivers.work import CNN64, Count, Task, asked, epoch, tell

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


def train(task: Task, message: Message, context: Context) -> Message:
    """What a client does: the model in, one epoch on its own examples, the model out."""
    net = CNN64()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = task.client(int(context.node_config["partition-id"]))
    before = Count.steps, Count.examples
    epoch(net.train(), x, y, task)
    did = {
        "num-examples": Count.examples - before[1],
        "steps": Count.steps - before[0],
        "threads": torch.get_num_threads(),
    }
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(did)}
    return Message(content=RecordDict(content), reply_to=message)


class Timed(FedAvg):
    """FedAvg that notes when each round begins, and what its clients did."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.began: list[float] = []
        self.did: list[list[dict[str, int]]] = []

    def configure_train(self, *given: Any, **named: Any) -> Iterable[Message]:
        self.began.append(time.perf_counter())
        messages: Iterable[Message] = super().configure_train(*given, **named)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        self.did.append([dict(r.content["metrics"]) for r in replies if not r.has_error()])
        return super().aggregate_train(server_round, replies)


def main(task: Task) -> None:
    work, cores = task.work, len(os.sched_getaffinity(0))
    net = CNN64()
    few = {"min_train_nodes": work.cohort, "min_available_nodes": work.clients}
    strategy = Timed(fraction_train=work.cohort / work.clients, fraction_evaluate=0.0, **few)
    ended: list[float] = []
    server, client = ServerApp(), ClientApp()

    def serve(grid: Grid, _context: Context) -> None:
        strategy.start(grid=grid, initial_arrays=ArrayRecord(net.state_dict()), num_rounds=1 + task.rounds)
        ended.append(time.perf_counter())

    server.main()(serve)
    client.train()(partial(train, task))
    each = max(1, cores // task.processes)
    backend = {
        "client_resources": {"num_cpus": each, "num_gpus": 0.0},
        "init_args": {"num_cpus": cores, "include_dashboard": False, "logging_level": logging.WARNING},
    }
    run_simulation(server, client, num_supernodes=work.clients, backend_config=backend)

    times = [*strategy.began, *ended]
    did = [each for round_ in strategy.did[1:] for each in round_]
    assert len(times) == task.rounds + 2, times
    settings = {
        "num_cpus_of_a_client": each,
        "clients_at_once": cores // each,
        "threads_of_a_client": sorted({each["threads"] for each in did}),
        "bf16": task.bf16,
        "local_training": "the hand-written loop",
        "data": "a client reads its own rows from a memory-mapped file and normalises them",
    }
    seconds = [b - a for a, b in pairwise(times[1:])]
    examples = sum(each["num-examples"] for each in did)
    tell(net, seconds, ("flwr", "ray"), settings, sum(each["steps"] for each in did), examples)


if __name__ == "__main__":
    main(asked(__doc__))
