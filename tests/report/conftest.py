"""Results for all tests of the page: a run of data with hostile names, and a small comparison with a claim."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedloom
from fedloom.compare.run import run as run_comparison
from support import warm
from support.comparisons import table
from support.markup import EVIL


@pytest.fixture(scope="session")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table whose classes and clients are called like markup."""
    home = tmp_path_factory.mktemp("hostile")
    rows = [f"{k % 7},{k % 3},{EVIL if k % 2 else 'plain'},{EVIL if k % 3 else 'B & C'}" for k in range(90)]
    (home / "data.csv").write_text("\n".join(["a,b,label,site", *rows]) + "\n")
    data = {"source": str(home / "data.csv"), "label": "label", "client": "site"}
    fedloom.run("fedavg", data=data, out=home / "<b>run", rounds=3, model="logistic", partition="natural")
    return home / "<b>run"


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, two seeds, two partitions, and a claim."""
    folder = tmp_path_factory.mktemp("compared") / "two methods"
    claim = {"says": "FedProx is <better>", "source": "Table 1", "test": "above"}
    claims = [claim | {"algorithm": "fedprox", "over": ["fedavg"]}]
    settings = {"algorithms": ["fedavg", "fedprox"], "grid": {"partition.alpha": [0.1, 1.0]}, "claims": claims}
    with warm.processes():
        run_comparison(table(**settings), folder, jobs=2)
    return folder
