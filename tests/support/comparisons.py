"""Comparisons that tests share: small tables, and results made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedloom.report.comparison.question import Question, Result

SMALL: dict[str, Any] = {
    "rounds": 3,
    "partition": {"kind": "dirichlet", "clients": 6},
    "cohort": {"size": 3},
    "model": "logistic",
}
THREE = ["fedavg", "fedprox", "fedopt"]
GRID = {"partition.alpha": [0.1, 1.0]}
TABLES = ("compare.toml", "table.csv", "table.md", "table.tex", "cells.csv", "summary.json")
TABLES += ("curves.csv", "curves.png", "curves.svg", "curves.pdf")

# A method that waits in its fifth round in a process, as long as there is a file ``hold``.
HELD = """
import time
from pathlib import Path

from fedloom import FedAvg

rounds = 0


class Held(FedAvg):
    def update(self, server, inbox):
        global rounds
        rounds += 1
        while rounds > 4 and Path("hold").exists():
            time.sleep(0.01)
        return super().update(server, inbox)
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TABLES}


def table(**settings: Any) -> dict[str, Any]:
    return {**SMALL, "compare": {"algorithms": THREE, "seeds": 2, **settings}}


def result(method: str, seed: int, values: list[float], state: str = "done", **more: float) -> Result:
    lines = [
        {"round": i, "global/test/accuracy": v, "bytes/up": 10 * i, "bytes/down": 30 * i}
        | {k.replace("_", "/"): x * i for k, x in more.items()}
        for i, v in enumerate(values)
    ]
    return Result((), method, method, seed, "", state, lines, "")


def question(methods: tuple[str, ...], seeds: int, **more: Any) -> Question:
    metrics = dict.fromkeys(methods, "global/test/accuracy")
    plain = Question((), ((),), methods, tuple(range(seeds)), methods[0], metrics, None, {})
    return plain._replace(**more)
