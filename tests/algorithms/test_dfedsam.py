"""DFedSAM: DFedAvg with other gradients, and several averages in a round."""

from __future__ import annotations

import pytest
import torch

from fedloom.algorithm import Model, Setup
from fedloom.algorithms.dfedsam import DFedSAM
from fedloom.core.optim import sgd
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from support.gossip import SIZES, gradient, models, network, run
from support.quadratic import Quadratic, bowls, vec, visit


@pytest.mark.slow
def test_a15_without_a_radius_it_is_dfedavg_bit_for_bit(world) -> None:
    ours = run(network(world, "dfedsam", algorithm={"rho": 0.0}), 3)
    assert torch.equal(ours, run(network(world, "dfedavg"), 3))
    assert not torch.allclose(ours, run(network(world, "dfedsam"), 3), rtol=1e-3)
    assert DFedSAM(rho=0.0).traits.gradients_per_step == 1


def test_a17_steps_on_a_quadratic() -> None:
    bowl, y = bowls(1)[0], vec(1, -2, 0.5)
    alg = DFedSAM(rho=0.3).bind(Setup(Quadratic(), sgd(weight_decay=0.1)))
    found, _, _ = visit(alg, bowl, Model(y), (), 2, 0.1)
    for _ in range(2):
        g = bowl.gradient(y)
        y = y - 0.1 * (g + 0.3 * bowl.A @ g / g.norm() + 0.1 * y)
    torch.testing.assert_close(found.w, y)


def test_decay_inside_is_in_both_gradients() -> None:
    bowl, y = bowls(1)[0], vec(1, -2, 0.5)
    alg = DFedSAM(rho=0.3, wd_inside=0.1).bind(Setup(Quadratic(), sgd()))
    found, _, _ = visit(alg, bowl, Model(y), (), 2, 0.1)
    for _ in range(2):
        g = bowl.gradient(y) + 0.1 * y
        there = y + 0.3 * g / g.norm()
        y = y - 0.1 * (bowl.gradient(there) + 0.1 * there)
    torch.testing.assert_close(found.w, y)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dfedsam", "dfedgam", "fedsam"])
@pytest.mark.parametrize("executor", ["lanes", "loop"])
def test_a_radius_in_proportion_to_the_learning_rate(world, kind, executor) -> None:
    """In the first round it is rho; in a later one it has shrunk with the rate."""
    schedule = {"batch": 0, "lr": 0.3, "schedule": "exponential", "decay": 0.5}
    more = {"engine": {"executor": executor}, "local": schedule} | ({} if kind == "fedsam" else {"topology": "ring"})
    falls, stays, half = (
        world(SIZES, algorithm={"kind": kind, "rho": rho, "rho_schedule": how}, **more)
        for rho, how in ((0.4, "prop_lr"), (0.4, "const"), (0.2, "const"))
    )
    first, _ = advance(falls, begin(falls), RamStore(len(SIZES)))
    same, _ = advance(stays, begin(stays), RamStore(len(SIZES)))
    torch.testing.assert_close(first.server.w, same.server.w)
    ends = [advance(exp, first, RamStore(len(SIZES)))[0].server.w for exp in (falls, half, stays)]
    torch.testing.assert_close(ends[0], ends[1])
    assert not torch.allclose(ends[0], ends[2], rtol=1e-4)


def test_three_rounds_on_a_ring_by_definition(world) -> None:
    exp = network(world, "dfedsam", local={"batch": 0, "lr": 0.3}, algorithm={"rho": 0.5})
    W, X = exp.topology.matrix(len(SIZES)).float(), exp.task.w0.expand(len(SIZES), -1)
    state, store = begin(exp), RamStore(len(SIZES))
    for _ in range(3):
        G = [gradient(exp, i, X[i]) for i in range(len(SIZES))]
        G = [gradient(exp, i, X[i] + 0.5 * g / g.norm()) for i, g in enumerate(G)]
        X = W @ (X - 0.3 * torch.stack(G))
        state, _ = advance(exp, state, store)
        torch.testing.assert_close(models(exp, state, store), X, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [2, 4])
def test_a16_several_averages_in_a_round_are_one_with_a_power_of_the_matrix(world, steps) -> None:
    exp = network(world, "dfedsam", topology={"kind": "ring", "gossip_steps": steps}, local={"batch": 0, "lr": 0.3})
    once = network(world, "dfedsam", local={"batch": 0, "lr": 0.3})
    W = torch.linalg.matrix_power(exp.topology.matrix(len(SIZES)), steps).float()
    X = torch.stack([exp.task.w0 - 0.3 * _sam(exp, i, 0.1) for i in range(len(SIZES))])
    torch.testing.assert_close(run(exp, 1), W @ X, rtol=1e-5, atol=1e-6)
    more, less = (advance(e, begin(e), RamStore(len(SIZES)))[0] for e in (exp, once))
    assert (more.up, more.gradients) == (steps * less.up, less.gradients)


def _sam(exp, node, rho):
    g = gradient(exp, node, exp.task.w0)
    return gradient(exp, node, exp.task.w0 + rho * g / g.norm())
