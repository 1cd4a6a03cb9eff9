"""What every benchmark shares: interleaved timing, and a result file that says where it was measured."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fedloom.runs.environment import environment

RESULTS = Path(__file__).parent / "results"


def interleaved(work: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each piece of work, taken in turns, so that load slows all of them equally."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for run in work.values():
        run()  # warm
    for _ in range(repeats):
        for name, run in work.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, against: str) -> float:
    """How many times faster ``name`` is than ``against``: the median over turns, each turn its own pair."""
    return median(b / a for a, b in zip(seconds[name], seconds[against], strict=True))


def read(name: str) -> dict[str, Any]:
    """The results of this name that were written last on this kind of device."""
    path = _path(name)
    return dict(json.loads(path.read_text())["results"]) if path.exists() else {}


def write(name: str, results: Any) -> Path:
    """Results as JSON, with the machine and versions that gave them."""
    RESULTS.mkdir(exist_ok=True)
    path = _path(name)
    where = environment(_device()) | {"machine": platform.machine(), "cores": _cores()}
    path.write_text(json.dumps({"environment": where, "results": results}, indent=1) + "\n")
    return path


def commit() -> str:
    """The commit that is measured."""
    return str(environment(_device())["commit"])


def _path(name: str) -> Path:
    return RESULTS / f"{name}-{_device().type}.json"


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _cores() -> int:
    return len(os.sched_getaffinity(0))
