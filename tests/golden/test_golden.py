"""Every algorithm, a few rounds on digits: its numbers do not move, and a forecast knew what it records and spends.

The tolerance of the numbers is for other processors, which round differently. After a change that is meant to move
them: ``python tests/golden/test_golden.py`` writes them anew, and the difference is there to be reviewed.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from fedloom.compare.foreseen import metric_names, reports_itself
from fedloom.core.vocabulary import is_ours
from fedloom.engine.forecast import Spent, forecast
from fedloom.runs.find import algorithms
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import Config, parse
from fedloom.runs.start import start

FILE = Path(__file__).with_name("metrics.json")
KINDS = list(algorithms(own=False))
ROUNDS = 4
DYNAMIC = {"analytic", "fedala", "fedkd", "law_afl", "pfedala"}  # how much these train or send, only training tells


def configured(kind: str) -> Config:
    return parse({"algorithm": kind, "rounds": ROUNDS, "seed": 7})


@cache
def history(kind: str) -> Any:
    return start(configured(kind), out=None, root=Path("unused"))


def measured(kind: str) -> dict[str, float]:
    return {name: round(value.last, 6) for name, value in history(kind).summary.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_golden(kind: str) -> None:
    golden = json.loads(FILE.read_text())
    assert kind in golden, f"no golden numbers for {kind}: run python {Path(__file__).name}"
    found = measured(kind)
    assert found.keys() == golden[kind].keys()
    for name, value in found.items():
        # a rounding may push one of some dozen examples of a client over the line, not more
        assert value == pytest.approx(golden[kind][name], abs=0.02, rel=0.02), name
    _names_were_foreseen(configured(kind), history(kind).records)
    if kind not in DYNAMIC:
        _costs_were_foreseen(configured(kind), history(kind).records)


def _names_were_foreseen(config: Config, records: list[dict[str, Any]]) -> None:
    recorded = {name for line in records for name in line} - {"round", "excluded"}
    foreseen = metric_names(config)
    own = {name for name in recorded - foreseen if reports_itself(config) and not is_ours(name)}
    rare = {
        f"personal/{config.algorithm.traits.served}/test/diverged",
        "network/offline",
        "network/away",
        "network/dead",
    }
    assert recorded - own <= foreseen
    assert foreseen - recorded <= rare


def _costs_were_foreseen(config: Config, records: list[dict[str, Any]]) -> None:
    spent = [
        Spent(line["round"], line["work/gradients"], line["bytes/up"] + line["bytes/down"], line["bytes/busiest"])
        for line in records[1:]
    ]
    assert len(spent) == ROUNDS
    assert list(islice(forecast(prepare(config, Path("unused")).experiment), ROUNDS)) == spent


if __name__ == "__main__":
    FILE.write_text(json.dumps({kind: measured(kind) for kind in KINDS}, indent=1) + "\n")
