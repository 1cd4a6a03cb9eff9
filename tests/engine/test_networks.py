"""Networks on digits, 16 nodes, every method: they agree as fast as theory says, and no failure moves their mean."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.engine.local import train
from fedloom.engine.rounds import advance, begin
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.engine.topology.facts import facts, faults
from fedloom.engine.topology.kinds import Custom, RandomDirected, Star
from fedloom.engine.topology.network import Moment
from fedloom.engine.training import groups_of
from fedloom.runs.folder import read_metrics
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse
from support.terminal import fedloom

METHODS = {"dpsgd": 1, "dfedavg": 1, "dfedavgm": 1, "dfedsam": 2, "dfedgam": 3}  # gradients in a step
NODES = ("partition.clients=16", "partition.alpha=0.5", "model.kind=logistic", "local.steps=5", "local.batch=20")


@pytest.mark.slow
@pytest.mark.parametrize("kind", METHODS)
def test_nodes_agree_at_least_as_fast_as_theory_says(kind: str, tmp_path: Path) -> None:
    """On a torus of 4 x 4 psi is (3 + 2 cos(pi / 2)) / 5; and the ledger counts what the method is said to cost."""
    words = (f"algorithm.kind={kind}", "topology.kind=torus", "rounds=6", "evaluate.personal=false", *NODES)
    done = fedloom("run", *words, "--out", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    first, *lines = read_metrics(tmp_path / "run")
    for line in lines:
        assert line["consensus/psi"] == pytest.approx((3 + 2 * math.cos(math.pi / 2)) / 5, abs=1e-9)
        before, after = line["consensus/pre_mix/distance"], line["consensus/post_mix/distance"]
        assert after <= line["consensus/psi"] * before * (1 + 1e-4) + 1e-12
        assert line["work/gradients"] == line["round"] * 16 * 5 * METHODS[kind]
        assert line["bytes/up"] == line["round"] * 16 * 4 * 4 * 650  # each message once, at its sender
        assert line["bytes/down"] == 0
        assert line["bytes/busiest"] == line["round"] * 2 * 4 * 4 * 650
    assert lines[-1]["consensus/test/accuracy"] > first["consensus/test/accuracy"] + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("kind", METHODS)
def test_links_and_nodes_that_fail_do_not_move_the_mean(kind: str) -> None:
    """The bar: 20 % of the links and 10 % of the nodes, in every round; what nodes have is mixed, and their mean stays.

    Nodes that are offline stand still, and count with the model that they have.
    """
    exp = _failing(kind)
    state, store = begin(exp), RamStore(16)
    for _ in range(6):
        want = _sent(exp, state, store).double().mean(0)
        state, _ = advance(exp, state, store)
        assert float((state.server.w.double().mean(0) - want).abs().max()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpsgd", "dfedgam"])  # the least and the most work in a step
def test_networks_that_fail_converge(kind: str, tmp_path: Path) -> None:
    bad = ("topology.kind=random", "topology.max_degree=4", "topology.link_loss=0.2", "topology.node_loss=0.1")
    more = ("rounds=20", "evaluate.every=5", "evaluate.personal=false", f"algorithm.kind={kind}", "local.lr=0.1")
    done = fedloom("run", *bad, *more, *NODES, "--out", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    lines = read_metrics(tmp_path / "run")
    assert lines[-1]["consensus/test/accuracy"] > 0.8
    assert lines[-1]["nodes/test/accuracy_min"] > 0.5
    assert all(line["consensus/contraction"] <= line["consensus/psi"] * (1 + 1e-4) for line in lines[1:])


@pytest.mark.slow
def test_rounds_in_which_nobody_was_there_say_so(tmp_path: Path) -> None:
    """All nodes but the one that dies before the third round are offline all the time; every second round is judged."""
    bad = ("topology.kind=ring", "topology.node_loss=0.999999", "topology.deaths=[[3, 3]]")
    words = ("algorithm.kind=dpsgd", *bad, "rounds=4", "evaluate.every=2", *NODES)
    done = fedloom("run", *words, "--out", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    _, second, fourth = read_metrics(tmp_path / "run")
    names = ("network/offline", "network/away", "network/dead", "work/gradients", "bytes/up")
    assert [second[name] for name in names] == [16, 2, 0, 0, 0]
    assert [fourth[name] for name in names] == [15, 4, 1, 0, 0]


# -- what is said of a network ---------------------------------------------------------------------
def test_weights_of_ones_own_that_do_not_preserve_the_mean_are_named_as_such() -> None:
    """They follow no rule, and neither another rule nor push-sum would take them."""
    links = ((0, 1), (1, 0), (1, 2), (2, 1))
    (fault,) = faults(Custom(links=links, link_weights=(0.2, 0.5, 0.3, 0.3)), 3, 0)
    assert fault.where == "topology.weights"
    assert fault.what.startswith("the weights of the links do not preserve the mean: the matrix has columns that sum")
    assert "each link in both directions, with the same weight" in fault.fix
    assert not any(word in str(fault) for word in ("metropolis", "push_sum"))
    assert faults(Custom(links=links, link_weights=(0.2, 0.2, 0.3, 0.3)), 3, 0) == []  # as it is advised


def test_the_contraction_of_push_sum_is_that_after_the_division() -> None:
    """The middle of three keeps a third and gives the others one each; these keep a half. Then all divide by mass."""
    split = np.array([[2, 3, 3], [2, 3, 0], [2, 0, 3]]) / 6
    divided = np.array([[2 / 8, 3 / 8, 3 / 8], [2 / 5, 3 / 5, 0], [2 / 5, 0, 3 / 5]])
    star = Star(mixing="push_sum")
    assert star.weigh(3).dense() == pytest.approx(split)
    assert facts(star, 3).psi == facts(star, 3).psi_rate == pytest.approx(np.linalg.norm(divided - 1 / 3, 2))
    assert facts(Star(), 3).psi == pytest.approx(2 / 3)


def test_push_sum_comes_to_the_mean_on_graphs_that_change() -> None:
    """Shares of mass stay unequal for ever; what nodes make of them comes to the mean, as plain averages would."""
    graph = RandomDirected(max_degree=3, refresh=1, mixing="push_sum")
    found = facts(graph, 16)
    product = np.eye(16)
    for step in range(found.steps):
        product = graph.weigh(16, Moment(0, step)).dense() @ product
    assert found.steps >= 10
    assert np.linalg.norm(product - 1 / 16, 2) > 0.1
    assert found.psi_steps == pytest.approx(np.linalg.norm(product / product.sum(1, keepdims=True) - 1 / 16, 2))
    assert found.psi_steps < 0.01


def _failing(kind: str) -> Experiment:
    order = {"order": "atc"} if kind == "dpsgd" else {}  # so that its models are what it mixed
    table: dict[str, Any] = {
        "algorithm": {"kind": kind, **order},
        "partition": {"clients": 16, "alpha": 0.5},
        "model": "logistic",
        "local": {"steps": 5, "batch": 20},
        "topology": {"kind": "random", "max_degree": 4, "link_loss": 0.2, "node_loss": 0.1},
        "engine": {"threads": 1},
    }
    return prepare(parse(table), Path("unused")).experiment


def _sent(exp: Experiment, state: Any, store: RamStore) -> torch.Tensor:
    """The models of all nodes once those that are there have trained.  [N, P]"""
    models = state.server.w.clone()
    with torch.no_grad():
        for group in groups_of(exp, state.round, exp.present(state.round)):
            given = exp.given(state, store, group.ids)
            models[group.ids] = train(exp.algorithm, exp.federation, group, given).uploads.w
    assert np.isfinite(models.numpy()).all()
    return models
