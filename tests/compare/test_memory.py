"""How many cells run side by side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.compare import memory
from fedloom.compare.memory import cell_bytes, default_jobs
from fedloom.core import usercode
from fedloom.runs.settings import parse


def of(**sections: Any) -> float:
    return cell_bytes(parse(sections))


def test_memory_of_a_cell_by_hand(tmp_path: Path) -> None:
    base, floats = 0.6e9, 4
    wide = {"kind": "mlp", "widths": [512, 256]}
    parameters = 64 * 512 + 512 + 512 * 256 + 256 + 256 * 10 + 10
    assert of(model=wide) == base + 1797 * 64 + 10 * 6 * floats * parameters
    assert of(model=wide, cohort={"size": 4}) == base + 1797 * 64 + 4 * 6 * floats * parameters
    assert of(model=wide, engine={"lanes": 3}) == base + 1797 * 64 + 3 * 6 * floats * parameters
    stateful = of(model=wide, algorithm="scaffold")
    assert stateful == base + 1797 * 64 + 10 * 6 * 2 * floats * parameters + 20 * floats * parameters
    assert of(model=wide, algorithm="scaffold", engine={"store": "disk"}) == stateful - 20 * floats * parameters
    network = of(model=wide, algorithm="dfedavg")
    assert network == base + 1797 * 64 + 20 * (6 + 3) * floats * parameters
    assert of(model=wide, algorithm="dfedavg", engine={"store": "disk"}) == network - 20 * 3 * floats * parameters
    pixels = 60_000 * 3072
    assert of(data="cifar10", model="logistic") == base + pixels + 10 * 6 * floats * 30_730
    rows = {"source": "synthetic", "devices": 30}
    natural = {"kind": "natural", "holdout": 0.0}
    assert of(data=rows, partition=natural, model="logistic") == base + 30 * 450 * 240 + 10 * 6 * floats * 610


def test_models_side_by_side_never_take_more_than_the_rule_for_lanes_allows() -> None:
    many = {"clients": 1000}
    most = of(model={"kind": "mlp", "widths": [2000, 2000]}, partition=many, cohort={"size": 1000})
    assert 0.9 * memory._MOST < most - 0.6e9 < 1.1 * memory._MOST


def test_memory_of_files_and_of_what_cannot_be_estimated(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, x=np.zeros((100, 5), np.float32), y=np.arange(100) % 2)
    assert of(data=str(path)) == 0.6e9 + 4 * path.stat().st_size + 1.6e9
    own = tmp_path / "breaks.py"
    own.write_text(
        "from fedloom.algorithms.fedavg import FedAvg\n\n\n"
        "class Breaks(FedAvg):\n    def init(self, w):\n        raise ValueError\n"
    )
    usercode.vouch(str(own))
    assert of(algorithm=str(own)) == 0.6e9 + 1797 * 64 + 1.6e9


def test_jobs_follow_cores_threads_and_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    small = parse({"model": "logistic", "engine": {"device": "cpu"}})
    for free, jobs in ((100e9, 8), (3.1e9, 5), (0.1e9, 1), (float("inf"), 8)):
        monkeypatch.setattr(memory, "_free_memory", lambda free=free: free)
        assert default_jobs([small]) == jobs
    threads = parse({"model": "logistic", "engine": {"device": "cpu", "threads": 3}})
    assert default_jobs([small, threads]) == 2
    large = parse({"model": {"kind": "mlp", "widths": [4000, 4000]}, "engine": {"device": "cpu"}})
    monkeypatch.setattr(memory, "_free_memory", lambda: 5e9)
    assert default_jobs([small, large]) == 2


def test_cells_side_by_side_on_a_gpu_follow_its_free_memory_and_need_mps(monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(memory, "_free_memory", lambda: 100e9)
    monkeypatch.setattr(memory, "pick_device", lambda _: torch.device("cuda"))
    small = parse({"model": "logistic"})
    for free, jobs in ((139e9, 4), (30e9, 2), (5e9, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 139e9))
        for shares, expected in ((True, jobs), (False, 1)):
            monkeypatch.setattr(memory, "can_share", lambda shares=shares: shares)
            assert default_jobs([small]) == expected
