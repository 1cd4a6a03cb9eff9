"""A deployment computes what the simulation of it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedloom.core.errors import ConfigError
from fedloom.deploy.contract import undeployable
from fedloom.engine.evaluate import evaluate
from fedloom.engine.store import RamStore
from fedloom.runs.find import algorithms
from support.federation import Federation, config_of, same, simulated


def _deployable(kind: str) -> bool:
    try:
        return not undeployable(config_of(kind))
    except ConfigError:  # a network, say, which has no cohort
        return False


STAR = [kind for kind in algorithms(own=False) if _deployable(kind)]


@pytest.mark.parametrize("kind", STAR)
def test_simulation_is_deployment(kind: str, tmp_path: Path) -> None:
    """In the second round, nodes go on from what they have kept of the first."""
    config = config_of(kind, rounds=2)
    exp, state, store = simulated(config, 2)
    federation = Federation(tmp_path, config)
    after = federation.advanced(rounds=2)
    assert same((state.server, state.buffers), (after.server, after.buffers))
    assert (state.up, state.down, state.gradients) == (after.up, after.down, after.gradients)
    assert evaluate(exp, state, store) == evaluate(federation.exp, after, RamStore(3))


VARIANTS: dict[str, dict[str, Any]] = {
    "sampled": {"cohort": {"size": 2}},
    "drawn twice": {
        "cohort": {"sampling": "proportional", "size": 4},
        "algorithm": {"kind": "fedavg", "weighting": "uniform"},
    },
    "measures": {"evaluate": {"auc": ["micro_logits"], "metrics": ["f1_macro", "ece"]}},
    "robust": {"aggregation": {"rule": "median"}},
    "memory": {"local": {"batch": 32, "optimizer": "adam", "lr": 0.01, "state": "persist"}},
    "statistics": {
        "model": {"kind": "resnet20", "width": 4, "norm": "batch"},
        "data": {"source": "digits", "test": 0.97},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_mean_the_same_in_a_deployment(variant: str, tmp_path: Path) -> None:
    config = config_of("fedavg", **VARIANTS[variant])
    exp, state, store = simulated(config, 1)
    federation = Federation(tmp_path, config)
    after = federation.advanced(rounds=1)
    assert same((state.server, state.buffers), (after.server, after.buffers))
    assert evaluate(exp, state, store) == evaluate(federation.exp, after, RamStore(3))
