"""Code, weights and tasks of the user's own, between a server and its nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedloom.core import usercode
from fedloom.core.errors import ConfigError, DataError
from fedloom.deploy.conduct import conduct
from fedloom.deploy.contract import read_contract, read_outline
from fedloom.deploy.own_data import own_rows
from fedloom.runs.settings import parse, read_toml
from fedloom.runs.start import start
from support.federation import a_site, config_of, here, same, table_of, weights

pytest.importorskip("flwr")

OWN = {
    "lab/method.py": """
        from typing import Any
        from fedloom.algorithms.fedprox import FedProx
        from helpers.halves import half
        class Mine(FedProx):
            def update(self, server: Any, inbox: Any) -> Any:
                return super().update(server, inbox._replace(total=half(inbox.total)))
        """,
    "lab/helpers/__init__.py": "",
    "lab/helpers/halves.py": """
        from fedloom.core import tree
        def half(x):
            return tree.tmap(lambda leaf: leaf / 2, x)
        """,
    "net.py": """
        from torch import nn
        class Net(nn.Sequential):
            def __init__(self, shape, classes, wide=4):
                super().__init__(nn.Flatten(), nn.Linear(shape[-1] * shape[-2], wide), nn.Linear(wide, classes))
        """,
    "loss.py": """
        from torch.nn.functional import cross_entropy
        def smooth(outputs, y):
            return cross_entropy(outputs, y, reduction="none", label_smoothing=0.1)
        """,
    "steps.py": """
        from fedloom.core.optim import sgd
        def heavy():
            return sgd(momentum=0.5)
        """,
}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An experiment with a method, a net, a loss, an optimizer and weights of the user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, text in OWN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        lines = text.splitlines()[1:] or [""]
        (tmp_path / name).write_text("\n".join(line[8:] for line in lines) + "\n")
    shapes = {"1.weight": (4, 64), "1.bias": (4,), "2.weight": (10, 4), "2.bias": (10,)}
    draw = torch.Generator().manual_seed(7)
    save_file({name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}, "start.safetensors")
    own = {
        "algorithm": {"kind": "lab/method.py:Mine"},
        "model": {"kind": str(tmp_path / "net.py:Net"), "weights": "start.safetensors"},
        "task": {"loss": "loss.py:smooth"},
        "local": {"batch": 32, "optimizer": "steps.py:heavy"},
        "evaluate": {"personal": False},
    }
    return table_of("fedprox", **own)


def test_own_code_and_weights_travel_and_compute_the_same(table: dict[str, Any], tmp_path: Path) -> None:
    usercode.vouch(table, lasting=False)
    home = a_site(tmp_path / "site", parse(table))
    bundle = tmp_path / "site" / "ada"
    names = ["code/helpers/__init__.py", "code/helpers/halves.py", "code/loss.py", "code/method.py", "code/net.py"]
    assert list(json.loads((bundle / "federation.json").read_text())["files"]) == [
        *names,
        "code/steps.py",
        "weights/start.safetensors",
    ]
    written = read_toml(bundle / "experiment.toml")
    assert written["algorithm"]["kind"] == "code/method.py:Mine"
    with pytest.raises(ConfigError, match=r"ada/code/net\.py:Net' is code in .* you have not run before .*--trust"):
        read_contract(bundle)
    assert read_outline(bundle) == (("Ada", "Bea", "Cem"), 3)  # to look costs no consent
    conduct(home, here(home, trust=True), 1, print)
    start(parse(table), out=tmp_path / "lab-run", root=Path())
    assert same(weights(home / "runs" / "1"), weights(tmp_path / "lab-run"))
    assert read_contract(bundle).parts == read_contract(home).parts  # trusted from now on


def test_a_bundle_with_other_code_is_refused(table: dict[str, Any], tmp_path: Path) -> None:
    usercode.vouch(table, lasting=False)
    home = a_site(tmp_path / "site", parse(table))
    (home.parent / "bea" / "code" / "loss.py").write_text("raise SystemExit\n")
    with pytest.raises(DataError, match=r"bea/code/loss\.py: has changed since the contract was made"):
        read_contract(home.parent / "bea", trust=True)
    facts = json.loads((home.parent / "cem" / "federation.json").read_text())
    facts["files"] = {"../server/server.key": "0" * 64}
    (home.parent / "cem" / "federation.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match="outside its folder"):
        read_contract(home.parent / "cem", trust=True)


def test_code_that_cannot_travel_is_refused(table: dict[str, Any], tmp_path: Path) -> None:
    table["task"] = {"loss": "loss:smooth"}
    usercode.vouch(table, lasting=False)
    with pytest.raises(ConfigError, match=r"task\.loss: 'loss:smooth' is a module.*file\.py:Name"):
        a_site(tmp_path / "site", parse(table))


def test_numbers_are_learned_as_in_the_laboratory(tmp_path: Path) -> None:
    draw = np.random.default_rng(4)
    x = draw.normal(50, 9, 120)
    rows = [f"{a:.3f},{'red' if a > 50 else 'blue'},{2 * a + draw.normal():.3f}" for a in x]
    (tmp_path / "lab.csv").write_text("\n".join(["age,colour,cost", *rows]))
    asked = {
        "data": {"source": str(tmp_path / "lab.csv"), "label": "cost", "test": 0.3},
        "partition": {"kind": "iid", "clients": 3, "holdout": 0.2},
        "task": {"kind": "regression", "loss": "huber"},
    }
    home = a_site(tmp_path / "site", config_of("fedprox", **asked))
    conduct(home, here(home), 1, print)
    start(read_contract(home).config, out=tmp_path / "run", root=Path())
    deployed = (home / "runs" / "1" / "metrics.jsonl").read_text()
    assert deployed == (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "personal/pre_fit/test/mae" in deployed
    contract = read_contract(home)
    assert contract.form.unit is not None
    mean, std = contract.form.unit
    (tmp_path / "mine.csv").write_text("colour,cost,age\nred,120,60\nblue,80,40\nblue,100.5,51\n")
    own = own_rows(contract, str(tmp_path / "mine.csv"))
    assert own.arrays.target is not None
    assert (own.arrays.target * std + mean).tolist() == pytest.approx([120, 80, 100.5], abs=1e-3)
    (tmp_path / "words.csv").write_text("colour,cost,age\nred,much,60\nblue,80,40\n")
    with pytest.raises(DataError, match="must be a number"):
        own_rows(contract, str(tmp_path / "words.csv"))
