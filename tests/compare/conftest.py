"""One finished comparison for all tests that only look at it, and workers that start fast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.compare import write
from fedloom.compare.run import run
from fedloom.report.figure import PICTURES
from support import warm
from support.comparisons import GRID, table


@pytest.fixture(autouse=True)
def _warm_workers() -> Iterator[None]:
    """Workers are forked from a warm process; a test that starts a ``fresh`` command has fresh workers too."""
    with warm.processes():
        yield


@pytest.fixture
def all_pictures() -> None:
    """For tests that look at the pictures of a comparison in all formats."""


@pytest.fixture(autouse=True)
def _one_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing a picture in three formats takes longer than most comparisons here, and fails in one as in three."""
    if "all_pictures" not in request.fixturenames:
        monkeypatch.setattr(write, "PICTURES", (".png",))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods on two partitions with two seeds."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    paper = [{"algorithm": "fedopt", "where": {"partition.alpha": 0.1}, "value": 72.15}]
    with warm.processes(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "PICTURES", PICTURES)
        run(table(grid=GRID, target=0.3, paper=paper), folder, jobs=2)
    return folder
