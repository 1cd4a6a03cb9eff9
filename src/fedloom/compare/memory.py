"""How many cells run side by side: as many as cores and memory allow."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from fedloom.algorithm import Setup
from fedloom.algorithm.capabilities import lane_size
from fedloom.compare.gpu import can_share
from fedloom.core import tree
from fedloom.data.sources import Digits, File, PublishedSet, Source, Synthetic
from fedloom.engine.local import lane_limit
from fedloom.runs.prepare import pick_device
from fedloom.runs.settings import Config

_PROCESS = 0.6e9  # bytes of a process that trains a small net: 0.54e9 were measured on Linux
# On a GPU: cells side by side at most, and bytes for each. On an H200 eight cells, three of cnn64 and five of a
# logistic regression, took 25e9 bytes together; large nets need more.
_ON_GPU, _GPU_PROCESS = 4, 12e9
_MATRICES = 6  # matrices of the size of all models side by side that a gradient step allocates: see engine.local
_MOST = 1.6e9  # bytes of these if the size of the net is unknown: the rule for lanes allows no more on a CPU


def on_gpu(configs: Iterable[Config]) -> bool:
    """Whether any of these cells computes on a GPU."""
    return any(device.type == "cuda" for device in {pick_device(c.engine.device) for c in configs})


def default_jobs(configs: Iterable[Config]) -> int:
    """How many cells run side by side: as many as cores and memory allow, on a GPU at most four, or one without MPS."""
    used = list(configs)
    if on_gpu(used):
        return _gpu_jobs(used) if can_share() else 1
    return _fitting(used, _free_memory())


def _fitting(used: Sequence[Config], free: float) -> int:
    """How many such cells fit cores and memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fitting = cores // max((c.engine.threads or 1 for c in used), default=1)
    if fitting < 2:
        return 1
    alike = {repr((c.data, c.partition, c.model, c.algorithm, c.cohort, c.engine)): c for c in used}
    needed = max(map(cell_bytes, alike.values()), default=_PROCESS)
    return max(1, int(min(fitting, free / needed)))


def _gpu_jobs(used: Sequence[Config]) -> int:
    free = torch.cuda.mem_get_info(pick_device(used[0].engine.device))[0]
    return min(_ON_GPU, _fitting(used, _free_memory()), max(1, int(free / _GPU_PROCESS)))


def cell_bytes(config: Config) -> float:
    """About how many bytes a cell takes on a CPU: the process, its data, and its clients.

    For each client side by side six times its model and its state, and, if these are kept in memory, the state
    of every client and three models of every node of a network: before, sent and after. What cannot be sized before
    the data is read counts as much as the rule for lanes allows.
    """
    data = _extent(config.data)
    clients = config.partition.clients or getattr(config.data, "devices", 1)
    unknown = _PROCESS + data.bytes + _MOST
    if not data.shape:
        return unknown
    try:
        with torch.random.fork_rng(devices=[]):
            task = config.model.task(data.shape, data.classes)
        setup = Setup(task, config.local.make_optimizer(), torch.ones(clients))
        alg = config.algorithm.bind(setup._replace(rounds=config.basics.rounds, local=config.local))
        state = tree.nbytes(alg.join(alg.send(alg.init(task.w0))))
    except Exception:  # a fault of the configuration or of a user's code: the cell itself will report it
        return unknown
    together = clients if alg.family == "gossip" else config.cohort.size or min(10, clients)
    lanes = min(together, config.engine.lanes or lane_limit(task, torch.device("cpu"), lane_size(alg)))
    nodes = 3 * tree.nbytes(task.w0) if alg.family == "gossip" else 0
    kept = clients * (state + nodes) if config.engine.store == "ram" else 0
    return _PROCESS + data.bytes + lanes * _MATRICES * (tree.nbytes(task.w0) + 4 * lane_size(alg) + state) + kept


class Extent(NamedTuple):
    """How much data there is, as far as a source can tell without reading it."""

    bytes: float = 0.0
    shape: tuple[int, ...] = ()  # of a row; empty: unknown
    classes: int = 0


def _extent(source: Source) -> Extent:
    if isinstance(source, PublishedSet):
        layout = source.layout
        rows = sum(part.rows for part in layout.parts)
        return Extent(rows * math.prod(layout.shape), layout.shape, max(map(len, layout.classes)))
    if isinstance(source, Synthetic):
        rows = 450 * source.devices  # the mean of its lognormal sizes
        return Extent(4 * rows * source.features, (source.features,), source.classes)
    if isinstance(source, Digits):
        return Extent(1797 * 64, (1, 8, 8), 10)
    if isinstance(source, File):
        files = source.place.rglob("*") if source.place.is_dir() else [source.place]
        return Extent(4.0 * sum(f.stat().st_size for f in files if f.is_file()))  # on disk they are packed
    return Extent()


def _free_memory() -> float:
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024.0 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    return float("inf")
