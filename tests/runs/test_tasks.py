"""What is learned: numbers, classes that are rare, and losses of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.errors import ConfigError, DataError
from fedloom.runs.find import algorithms
from fedloom.runs.prepare import share
from fedloom.runs.settings import as_hashed, parse

pytestmark = pytest.mark.slow

FEW: dict[str, Any] = {"rounds": 2, "partition": {"clients": 4}, "model": {"kind": "mlp", "widths": [4]}}
FEW["checkpoint"] = {"curves": False}  # a picture takes longer than such a run


def numbers(n: int = 120) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A number that is nearly linear in the features, far from 0 and in a unit of its own."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 5)).astype(np.float32)
    return x, 300 + 40 * (x @ [1.0, -2.0, 0.5, 0.0, 1.0]) + rng.normal(size=n)


@pytest.mark.parametrize("kind", sorted(algorithms(own=False)))
def test_every_method_learns_numbers_or_says_why_not(kind: str, tmp_path: Path) -> None:
    data = numbers()
    if kind in ("fedkd", "fedbe", "feddf", "law_afl"):
        with pytest.raises(ConfigError, match=r"task\.kind: .* classes"):
            fedloom.run(kind, data=data, task="regression", **FEW)
        return
    done = fedloom.run(kind, data=data, task="regression", out=tmp_path / "r", **FEW)
    last = done.records[-1]
    place = next(name.removesuffix("/r2") for name in last if name.endswith("/r2"))
    assert last[f"{place}/rmse"] >= last[f"{place}/mae"] > 0
    assert not [name for name in last if "accuracy" in name]
    models = fedloom.load(tmp_path / "r")
    said = models.client("0") if not models.has_common_model else models
    assert 0 < said.predict(data[0]).mean() < 600  # in the unit of the target


def test_a_constant_number_is_refused_and_one_that_rarely_changes_is_learned() -> None:
    x, _ = numbers()
    with pytest.raises(DataError, match="the label is 3 in all 96 training rows"):
        fedloom.run(data=(x, np.full(len(x), 3.0)), task="regression", **FEW)
    rare = np.where(np.arange(len(x)) % 20, 3.0, 1.0)  # all of them are in one bin
    assert fedloom.run(data=(x, rare), task="regression", **FEW).rounds == 2


def test_numbers_are_learned_with_privacy_unless_it_counts_classes() -> None:
    private: dict[str, Any] = {"clip": 1, "noise": 1, "delta": 1e-2}
    few = FEW | {"algorithm": {"kind": "fedavg", "weighting": "uniform"}, "rounds": 1, "data": numbers()}
    done = fedloom.run(**few, task="regression", privacy=private)
    assert "global/test/rmse" in done.records[-1] or "global/test/r2" in done.records[-1]
    with pytest.raises(ConfigError, match=r"privacy\.heterogeneity: 'alpha' counts the classes"):
        fedloom.run(**few, task="regression", privacy=private | {"heterogeneity": "alpha"})


@pytest.mark.parametrize("kind", ["law_afl", "analytic", "proxy_ridge"])
def test_a_closed_form_refuses_a_frozen_bias_of_its_head(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.freeze: the method solves for the whole head"):
        fedloom.run(kind, rounds=1, model={"kind": "mlp", "widths": [4], "freeze": ["head.bias"]})


def test_a_linear_number_is_learned_in_its_unit(tmp_path: Path) -> None:
    x, y = numbers(400)
    settings = {"partition": {"clients": 4}, "model": "logistic", "rounds": 1, "task": "regression"}
    there = {"out": tmp_path / "a", "checkpoint": FEW["checkpoint"]}
    exact = fedloom.run("analytic", data=(x, y), cohort={"sampling": "all"}, **there, **settings)
    assert exact.records[-1]["global/test/r2"] > 0.99  # all but the ridge
    models = fedloom.load(tmp_path / "a")
    assert np.abs(models.predict(x) - y).mean() < 0.1 * y.std()
    assert models.evaluate(x, y)["r2"] > 0.99
    with torch.no_grad():
        assert np.allclose(models.module(torch.from_numpy(x)).squeeze(1), models.predict(x))
    with pytest.raises(DataError, match="no probabilities"):
        models.predict_proba(x)
    huber = fedloom.run(data=(x, y), **{**settings, "rounds": 15, "task": {"kind": "regression", "loss": "huber"}})
    assert huber.records[-1]["global/test/r2"] > 0.9


def test_numbers_that_look_like_classes_are_refused() -> None:
    x, y = numbers()
    with pytest.raises(ConfigError, match=r"different numbers in 120 rows.*task=regression"):
        fedloom.run(data=(x, y.round()), **FEW)
    with pytest.raises(ConfigError, match="has classes; task=regression needs a numeric label"):
        fedloom.run(task="regression", **FEW)
    wrong = {"task": {"kind": "regression", "loss": "cross_entropy"}, "evaluate": {"auc": ["macro_present"]}}
    with pytest.raises(ConfigError) as error:
        fedloom.run(data=(x, y), **FEW, **wrong)
    assert "it is for classification" in str(error.value)
    assert "evaluate.auc" in str(error.value)
    assert as_hashed(parse({})) == as_hashed(parse({"task": "classification"}))  # old results keep their names


def rare(n: int = 600) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    y = (rng.random(n) < 0.08).astype(int)
    return (rng.normal(size=(n, 3)) + 1.2 * y[:, None]).astype(np.float32), y


def test_weights_help_rare_classes_and_what_was_asked_for_is_shown(tmp_path: Path) -> None:
    asked = ["balanced_accuracy", "f1_macro", "auc", "brier", "ece"]
    few = {"rounds": 8, "partition": {"kind": "iid", "clients": 4}, "model": "logistic", "local": {"lr": 0.1}}
    few |= {"data": rare(), "evaluate": {"metrics": asked}}
    plain = fedloom.run(**few, out=tmp_path / "p")
    even = fedloom.run(task={"class_weights": "balanced"}, **few)
    for place in ("global/test", "personal/pre_fit/test"):
        assert {f"{place}/{name}" for name in asked} <= set(plain.records[-1])
    name = "global/test/balanced_accuracy"
    assert even.records[-1][name] > plain.records[-1][name] + 0.1
    x, y = rare()
    found = fedloom.load(tmp_path / "p").evaluate(x, y)
    assert np.array(found["confusion"]).sum() == len(y)
    assert "auc" in (tmp_path / "p" / "clients.csv").read_text().splitlines()[0]
    drawn = [axis.get_ylabel() for axis in plain.plot().axes if axis.axison]
    assert drawn == ["accuracy", "loss", *asked]


def test_a_loss_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import torch\n\ndef focal(outputs, y):\n"
        "    p = torch.log_softmax(outputs, -1).gather(-1, y[:, None]).squeeze(-1)\n"
        "    return -((1 - p.exp()) ** 2) * p\n\ndef mean(outputs, y):\n    return focal(outputs, y).mean()\n"
    )
    few = {"rounds": 2, "partition": {"clients": 4}, "model": "logistic", "data": rare()}
    own, plain = fedloom.run(task={"loss": "mine.py:focal"}, **few), fedloom.run(**few)
    assert own.records[-1]["global/test/loss"] < plain.records[-1]["global/test/loss"]
    with pytest.raises(ConfigError, match="one loss for each row"):
        fedloom.run(task={"loss": "mine.py:mean"}, **few)
    with pytest.raises(ConfigError, match="there is no loss 'focal'"):
        fedloom.run(task={"loss": "focal"}, **few)


def test_a_class_that_only_test_rows_have_is_pointed_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x_train=np.eye(4), y_train=[0, 1, 0, 1], x_test=np.eye(4), y_test=[0, 7, 7, 1])
    config = parse({"data": str(tmp_path / "d.npz"), "partition": {"clients": 2}})
    assert share(config, tmp_path).notes[-1] == "no model can learn '7': its 2 rows are all test rows"


def test_rare_classes_of_a_table_are_pointed_out_unless_they_are_measured_or_weighed(tmp_path: Path) -> None:
    (tmp_path / "rare.csv").write_text("x,label\n" + "1,no\n" * 36 + "2,yes\n" * 4)
    given = {"data": str(tmp_path / "rare.csv"), "partition": {"kind": "iid", "clients": 2}}

    def notes(**more: Any) -> str:
        return "\n".join(share(parse({**given, **more}), tmp_path).notes)

    assert "90% of the rows are 'no', so accuracy hides the rest" in notes()
    assert "hides" not in notes(task={"class_weights": "balanced"}) + notes(evaluate={"metrics": ["auc"]})
