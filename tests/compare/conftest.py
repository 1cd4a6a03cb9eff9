"""One finished comparison for all tests that only look at it, and workers that start fast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.compare.run import run
from support import warm
from support.comparisons import GRID, table


@pytest.fixture(autouse=True)
def _warm_workers() -> Iterator[None]:
    """Workers are forked from a warm process; a test that starts a ``fresh`` command has fresh workers too."""
    with warm.processes():
        yield


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods on two partitions with two seeds."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    paper = [{"algorithm": "fedopt", "where": {"partition.alpha": 0.1}, "value": 72.15}]
    with warm.processes():
        run(table(grid=GRID, target=0.3, paper=paper), folder, jobs=2)
    return folder
