"""What a run shows, and to whom: it does not need a reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.terminal import HANG, SMALL, started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("run", "rounds=3", *SMALL, "--out", "out"), "out/summary.json"),
        (("compare", "fedavg", "fedprox", "rounds=2", *SMALL, "--jobs", "1", "--out", "out"), "out/summary.json"),
    ],
    ids=["run", "compare"],
)
def test_a_reader_that_leaves_does_not_end_it(words: tuple[str, ...], found: str, tmp_path: Path) -> None:
    """As with ``| head -1``."""
    with started(*words, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("fedloom ")
        process.stdout.close()
        assert process.wait(HANG) == 0
        assert process.stderr.read() == ""
    assert json.loads((tmp_path / found).read_text())
