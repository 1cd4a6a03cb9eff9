"""What tests of several algorithms share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fedloom.engine.state import Experiment
from support.proxies import SIZES


@pytest.fixture
def laid_out(world: Callable[..., Experiment]) -> Callable[..., Experiment]:
    """Lay out an experiment with a proxy set of 20 rows: ``laid_out(algorithm, ...)``."""

    def make(algorithm: Any, **table: Any) -> Experiment:
        table = {"proxy": {"size": 20}, "local": {"lr": 0.5, "batch": 5}} | table
        return world(SIZES, algorithm=algorithm, **table)

    return make
