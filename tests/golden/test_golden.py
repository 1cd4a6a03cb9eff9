"""Numbers that must not move unless somebody means them to: every algorithm, a few rounds on digits.

The tolerance is for other processors, which round differently. After a change that is meant to move
them: ``python tests/golden/test_golden.py`` writes them anew, and the difference is there to be reviewed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedloom
from fedloom.runs.find import algorithms

FILE = Path(__file__).with_name("metrics.json")
KINDS = list(algorithms(own=False))


def measured(kind: str) -> dict[str, float]:
    history = fedloom.run(kind, data="digits", rounds=6, seed=7)
    return {name: round(value.last, 6) for name, value in history.summary.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_golden(kind: str) -> None:
    golden = json.loads(FILE.read_text())
    assert kind in golden, f"no golden numbers for {kind}: run python {Path(__file__).name}"
    found = measured(kind)
    assert found.keys() == golden[kind].keys()
    for name, value in found.items():
        # a rounding may push one of some dozen examples of a client over the line, not more
        assert value == pytest.approx(golden[kind][name], abs=0.02, rel=0.02), name


if __name__ == "__main__":
    FILE.write_text(json.dumps({kind: measured(kind) for kind in KINDS}, indent=1) + "\n")
