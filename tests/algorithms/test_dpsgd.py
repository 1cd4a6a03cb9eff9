"""D-PSGD against its definition, written with dense matrices."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import pytest
import torch

from fedloom.core import tree
from fedloom.engine.evaluate import evaluate
from fedloom.engine.gossip import _rejoined, pulled
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.engine.topology.network import Moment, Topology
from fedloom.runs.settings import parse
from support.gossip import gradient, models

SIZES = (6, 6, 6, 6, 6)


def network(world, order, topology="ring", **more):
    return world(
        SIZES, algorithm={"kind": "dpsgd", "order": order}, topology=topology, local={"batch": 0, "lr": 0.3}, **more
    )


@pytest.mark.parametrize("order", ["lian", "atc", "mix_then_train"])
def test_five_rounds_on_a_ring_by_definition(world, order) -> None:
    exp = network(world, order)
    W = exp.topology.matrix(len(SIZES)).float()
    X = exp.task.w0.expand(len(SIZES), -1)
    state, store = begin(exp), RamStore(len(SIZES))
    for _ in range(5):
        if order == "mix_then_train":
            X = W @ X
        G = torch.stack([gradient(exp, i, X[i]) for i in range(len(SIZES))])
        X = {"lian": W @ X - 0.3 * G, "atc": W @ (X - 0.3 * G), "mix_then_train": X - 0.3 * G}[order]
        state, _ = advance(exp, state, store)
        torch.testing.assert_close(models(exp, state, store), X, rtol=1e-4, atol=1e-6)


class Lopsided(Topology):
    """Node 0 is heard by two others, all else goes round: a graph on which masses differ."""

    kind: ClassVar[str] = "lopsided"

    @property
    def directed(self) -> bool:
        return True

    def drawn(self, nodes, at):
        return np.array([[i, (i + 1) % nodes] for i in range(nodes)] + [[0, 2]])


@pytest.mark.parametrize("order", ["lian", "atc", "mix_then_train"])
def test_five_rounds_of_push_sum_by_definition(world, order) -> None:
    """x, the models times their masses, moves by the bare step; gradients are taken at the models x / mass."""
    exp = dataclasses.replace(network(world, order), topology=Lopsided(mixing="push_sum"))
    A = exp.topology.matrix(len(SIZES)).float()
    mass = torch.ones(len(SIZES), 1)
    X = exp.task.w0.repeat(len(SIZES), 1)
    state, store = begin(exp), RamStore(len(SIZES))
    for t in range(5):
        if order == "mix_then_train" and t:
            X, mass = A @ X, A @ mass
        step = -0.3 * torch.stack([gradient(exp, i, X[i] / mass[i]) for i in range(len(SIZES))])
        if order == "lian":
            X, mass = A @ X + step, A @ mass
        elif order == "atc":
            X, mass = A @ (X + step), A @ mass
        else:
            X = X + step
        state, _ = advance(exp, state, store)
        torch.testing.assert_close(models(exp, state, store), X / mass, rtol=1e-4, atol=1e-6)
    assert (mass - 1).abs().max() > 0.2


def test_full_graph_atc_is_parallel_sgd(world) -> None:
    exp = network(world, "atc", "full")
    w = exp.task.w0
    state, store = begin(exp), RamStore(len(SIZES))
    for _ in range(3):
        w = w - 0.3 * torch.stack([gradient(exp, i, w) for i in range(len(SIZES))]).mean(0)
        state, _ = advance(exp, state, store)
        found = models(exp, state, store)
        torch.testing.assert_close(found, w.expand_as(found), rtol=1e-4, atol=1e-6)
    assert evaluate(exp, state, store)["consensus/distance"] < 1e-6


def test_a_round_is_one_step_unless_set_otherwise(world) -> None:
    assert parse({"algorithm": "dpsgd"}).local.steps == 1
    assert parse({"algorithm": "dpsgd", "local": {"epochs": 2}}).local.steps is None
    epoch = {"kind": "dpsgd", "local": "epoch"}
    assert (parse({"algorithm": epoch}).local.steps, parse({"algorithm": epoch}).local.epochs) == (None, 1)
    assert parse({"algorithm": epoch, "local": {"steps": 3}}).local.steps == 3


@pytest.mark.slow
def test_mixing_before_training_is_mixing_after_it_half_a_round_later(world) -> None:
    """A2: what adapt-then-combine shows after a round is the mixture of what combine-then-adapt shows."""
    after, before = network(world, "atc"), network(world, "mix_then_train")
    W = after.topology.matrix(len(SIZES)).float()
    b, c = (begin(exp) for exp in (after, before))
    one, two = RamStore(len(SIZES)), RamStore(len(SIZES))
    for _ in range(4):
        b, _ = advance(after, b, one)
        c, _ = advance(before, c, two)
        torch.testing.assert_close(models(after, b, one), W @ models(before, c, two), rtol=1e-5, atol=1e-6)
        assert torch.equal(b.server.w, c.server.w)


def test_lian_is_parallel_sgd_only_in_its_first_step(world) -> None:
    """A1, its second half: the mean agrees once, then the gradients are taken at other points."""
    exp = network(world, "lian", "full")
    w, gaps = exp.task.w0, []
    state, store = begin(exp), RamStore(len(SIZES))
    for _ in range(3):
        w = w - 0.3 * torch.stack([gradient(exp, i, w) for i in range(len(SIZES))]).mean(0)
        state, _ = advance(exp, state, store)
        gaps.append(float((models(exp, state, store).mean(0) - w).abs().max()))
    assert gaps[0] < 1e-6
    assert gaps[-1] > 1e-4


@pytest.mark.parametrize("order", ["lian", "atc", "mix_then_train"])
def test_one_node_is_sgd(world, order) -> None:
    """A3, with two nodes that never hear each other, since a network has at least two."""
    alone = {"kind": "ring", "link_loss": 0.999}
    exp = network(world, order, alone)
    w = exp.task.w0
    state, store = begin(exp), RamStore(len(SIZES))
    for _ in range(3):
        w = w - 0.3 * gradient(exp, 0, w)
        state, _ = advance(exp, state, store)
    torch.testing.assert_close(models(exp, state, store)[0], w, rtol=1e-4, atol=1e-6)


def test_bytes_count_every_directed_link(world) -> None:
    exp = network(world, "lian")
    state, _ = advance(exp, begin(exp), RamStore(len(SIZES)))
    assert state.up == 2 * len(SIZES) * 4 * exp.task.size


@pytest.mark.parametrize("topology", ["ring", "full"])
def test_mixing_preserves_the_mean(world, topology) -> None:
    W = network(world, "lian", topology).topology.matrix(len(SIZES))
    torch.testing.assert_close(W.sum(0), torch.ones(len(SIZES), dtype=torch.float64))
    torch.testing.assert_close(W.sum(1), torch.ones(len(SIZES), dtype=torch.float64))
    assert torch.equal(W, W.T)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["lian", "atc", "mix_then_train"])
def test_a_node_that_comes_back_takes_its_neighbours_models(world, order) -> None:
    """It starts from the mean of the models that these would predict with, and its own last move is forgotten."""
    ring = {"kind": "ring", "node_loss": 0.4, "stale_after": 0}
    exp = network(world, order, ring | {"rejoin": "pull"}, rounds=30)
    state, store, checked = begin(exp), RamStore(len(SIZES)), 0
    for _ in range(12):
        offline = exp.topology.offline(len(SIZES), Moment(exp.seed, state.round))
        to, by = pulled(exp, state.round, offline, state.nodes.away.numpy())
        before = models(exp, state, store)
        after = _rejoined(exp, state, store, offline)
        now = models(exp, after, store)
        for node in range(len(SIZES)):
            asked = by[to == node]
            expected = before[torch.from_numpy(asked)].mean(0) if len(asked) else before[node]
            torch.testing.assert_close(now[node], expected, rtol=1e-5, atol=1e-6)
            start = exp.algorithm.point(*tree.take(exp.given(after, store, torch.tensor([node]))[:2], 0))
            if len(asked):
                torch.testing.assert_close(start, expected, rtol=1e-5, atol=1e-6)
            checked += len(asked) > 0
        state, _ = advance(exp, state, store)
    assert checked > 4
