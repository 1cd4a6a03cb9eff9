"""DFedAvg against its definition with dense matrices, FedAvg, and gossip alone; and what its kin share with it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedloom.algorithm import Model, Setup
from fedloom.algorithms.dfedavg import DFedAvg
from fedloom.core.optim import sgd
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from support.blobs import blobs
from support.gossip import RAGGED, SIZES, gradient, models, network, run, trained
from support.quadratic import Bowl, Quadratic, after, vec, visit


class Sloping(Quadratic):
    """A loss with the same gradient everywhere."""

    def grad(self, w, batch):
        return batch.y

    def differentiate(self, f, x):
        return vec(3, -1)


@pytest.mark.slow
def test_five_rounds_on_a_ring_by_definition(world) -> None:
    exp = network(world, local={"batch": 0, "steps": 2, "lr": 0.3})
    W, X = exp.topology.matrix(len(SIZES)).float(), exp.task.w0.expand(len(SIZES), -1)
    for t in range(1, 6):
        for _ in range(2):
            X = X - 0.3 * torch.stack([gradient(exp, i, X[i]) for i in range(len(SIZES))])
        X = W @ X
        torch.testing.assert_close(run(exp, t), X, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dfedavg", "dfedavgm", "dfedsam", "dfedgam"])
def test_a4_mixing_preserves_the_mean(world, kind) -> None:
    exp = network(world, kind)
    state, store = begin(exp), RamStore(len(SIZES))
    for _ in range(3):
        sent = trained(exp, state, store)
        state, _ = advance(exp, state, store)
        mixed = models(exp, state, store)
        torch.testing.assert_close(mixed.mean(0), sent.mean(0), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(mixed, sent, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "server"), [("dfedavg", "fedavg"), ("dfedsam", "fedsam")])
def test_a5_on_the_full_graph_it_is_the_method_with_a_server(world, kind, server) -> None:
    sizes = (8, 8, 8, 8)
    ours = run(network(world, kind, sizes, topology={"kind": "full"}), 4)
    theirs = after(world(sizes, algorithm={"kind": server, "weighting": "uniform"}, local=RAGGED), 4).w
    torch.testing.assert_close(ours, theirs.expand(4, -1), rtol=1e-5, atol=1e-6)


def test_a6_local_steps_go_on_from_each_other() -> None:
    """With a constant gradient c a node ends at x - K eta c; were it set back in each step, at x - eta c."""
    alg = DFedAvg().bind(Setup(Sloping(), sgd()))
    upload, _, _ = visit(alg, Bowl(torch.eye(2).double(), vec(3, -1)), Model(vec(1, 1)), (), 8, 0.125)
    torch.testing.assert_close(upload.w - vec(1, 1), -8 * 0.125 * vec(3, -1))


@pytest.mark.slow
def test_a7_without_steps_it_is_gossip_alone(world) -> None:
    exp = network(world)
    nobody = exp.federation.train._replace(start=torch.zeros(len(SIZES) + 1, dtype=torch.long))
    still = dataclasses.replace(exp, federation=exp.federation._replace(train=nobody))
    X = torch.randn(len(SIZES), exp.task.size, generator=torch.Generator().manual_seed(0))
    state, store = begin(still)._replace(server=Model(X)), RamStore(len(SIZES))
    W = exp.topology.matrix(len(SIZES)).float()
    for _ in range(3):
        state, _ = advance(still, state, store)
        X = W @ X
        torch.testing.assert_close(state.server.w, X, rtol=1e-5, atol=1e-6)


def test_a_node_without_data_only_averages(world) -> None:
    exp = network(world, local={"batch": 0, "lr": 0.3})
    start = torch.tensor([0, 0, 6, 15, 19, 31])  # the first has nothing
    fed = exp.federation._replace(train=exp.federation.train._replace(start=start))
    exp = dataclasses.replace(exp, federation=fed)
    state, store = begin(exp), RamStore(len(SIZES))
    state, _ = advance(exp, state, store)
    X = exp.task.w0.expand(len(SIZES), -1)
    G = torch.stack([0 * X[0], *(gradient(exp, i, X[i]) for i in range(1, len(SIZES)))])
    expected = exp.topology.matrix(len(SIZES)).float() @ (X - 0.3 * G)
    torch.testing.assert_close(models(exp, state, store), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["dfedavg", "dfedavgm", "dfedsam", "dfedgam"])
def test_a8_other_numbers_for_the_nodes_change_nothing(world, kind) -> None:
    """Nodes, their data and the graph are permuted together."""
    sizes, order = (6, 6, 6, 6, 6), [3, 0, 4, 1, 2]
    links = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 2)]
    place = {old: new for new, old in enumerate(order)}
    arrays = blobs(sizes)
    rows = [6 * old + k for old in order for k in range(6)] + list(range(30, 50))
    client = torch.tensor(rows[:30]).div(6, rounding_mode="floor")
    named = arrays.client.copy()
    named[:30] = [place[int(old)] for old in client]
    moved = arrays._replace(x=arrays.x[rows], y=arrays.y[rows], client=named)
    local = {"batch": 0, "steps": 3, "lr": 0.3}
    ours = run(network(world, kind, sizes, topology={"kind": "custom", "links": links}, local=local), 3)
    other = [tuple(sorted((place[i], place[j]))) for i, j in links]
    theirs = run(network(world, kind, sizes, topology={"kind": "custom", "links": other}, local=local, arrays=moved), 3)
    torch.testing.assert_close(theirs, ours[order], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(theirs, ours, rtol=1e-3)


@pytest.mark.parametrize("kind", ["dfedavg", "dfedavgm", "dfedsam", "dfedgam"])
def test_a9_nodes_with_the_same_data_stay_equal(world, kind) -> None:
    arrays = blobs((6, 6, 6, 6))
    x, y = arrays.x.copy(), arrays.y.copy()
    for i in range(1, 4):
        x[6 * i : 6 * i + 6], y[6 * i : 6 * i + 6] = x[:6], y[:6]
    local = {"batch": 0, "steps": 3, "lr": 0.3}
    found = run(network(world, kind, (6, 6, 6, 6), arrays=arrays._replace(x=x, y=y), local=local), 4)
    torch.testing.assert_close(found, found[:1].expand(4, -1), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found[0], network(world).task.w0, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dfedavg", "dfedavgm", "dfedsam", "dfedgam"])
def test_lanes_and_loop_agree(world, kind) -> None:
    net = {"kind": "mlp", "widths": [5]}
    ends = [run(network(world, kind, model=net, engine={"executor": e}), 3) for e in ("lanes", "loop")]
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "cost"), [("dfedavg", 1), ("dfedavgm", 1), ("dfedsam", 2), ("dfedgam", 3)])
def test_bytes_and_gradients(world, kind, cost) -> None:
    exp = network(world, kind)
    state, _ = advance(exp, begin(exp), RamStore(len(SIZES)))
    assert state.up == 2 * len(SIZES) * 4 * exp.task.size  # each message once, at its sender
    assert state.down == 0
    assert state.gradients == cost * sum(2 * -(-n // 3) for n in SIZES)
