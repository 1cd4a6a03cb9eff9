"""D-PSGD against its definition, written with dense matrices."""

from __future__ import annotations

import pytest
import torch

from fedloom.engine.evaluate import evaluate
from fedloom.engine.run import advance, begin
from fedloom.engine.store import RamStore

SIZES = (6, 6, 6, 6, 6)


def network(world, order, topology="ring", **more):
    return world(
        SIZES, algorithm={"kind": "dpsgd", "order": order}, topology=topology, local={"batch": 0, "lr": 0.3}, **more
    )


def gradient(exp, node, w):
    rows = exp.federation.train.rows[exp.federation.train.start[node] : exp.federation.train.start[node + 1]]
    net = exp.task.module(w, exp.task.buffers0)
    x, y = exp.federation.examples(rows)
    torch.nn.functional.cross_entropy(net(x), y).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def models(exp, state, store):
    given = exp.given(state, store, torch.arange(len(SIZES)))
    return given.down.w + given.mine.dx


@pytest.mark.parametrize("order", ["lian", "atc"])
def test_five_rounds_on_a_ring_by_definition(world, order) -> None:
    exp = network(world, order)
    W = exp.topology.matrix(len(SIZES)).float()
    X = exp.task.w0.expand(len(SIZES), -1)
    state, store = begin(exp), RamStore(len(SIZES))
    for _ in range(5):
        G = torch.stack([gradient(exp, i, X[i]) for i in range(len(SIZES))])
        X = W @ X - 0.3 * G if order == "lian" else W @ (X - 0.3 * G)
        state, _ = advance(exp, state, store)
        torch.testing.assert_close(models(exp, state, store), X, rtol=1e-4, atol=1e-6)


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


def test_a_round_is_one_step_unless_told_otherwise(world) -> None:
    from fedloom.config import parse

    assert parse({"algorithm": "dpsgd"}).local.steps == 1
    assert parse({"algorithm": "dpsgd", "local": {"epochs": 2}}).local.steps is None


def test_bytes_count_every_directed_link(world) -> None:
    exp = network(world, "lian")
    state, _ = advance(exp, begin(exp), RamStore(len(SIZES)))
    assert state.up == state.down == 2 * len(SIZES) * 4 * exp.task.size


@pytest.mark.parametrize("topology", ["ring", "full"])
def test_mixing_preserves_the_mean(world, topology) -> None:
    W = network(world, "lian", topology).topology.matrix(len(SIZES))
    torch.testing.assert_close(W.sum(0), torch.ones(len(SIZES), dtype=torch.float64))
    torch.testing.assert_close(W.sum(1), torch.ones(len(SIZES), dtype=torch.float64))
    assert torch.equal(W, W.T)
