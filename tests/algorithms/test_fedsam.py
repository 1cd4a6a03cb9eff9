"""FedSAM and MoFedSAM against steps that are worked out by hand."""

from __future__ import annotations

import pytest
import torch

from fedloom.algorithm import Model, Setup
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedsam import FedSAM, Moving, Walked
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.runs.settings import parse
from support.quadratic import RAGGED, Bowl, Quadratic, after, bowls, hear, play, vec, visit, work

LINE = Bowl(2 * torch.eye(1).double(), vec(4))  # f = (y - 4)^2


def fedsam(world, *args, **table):
    return world(*args, algorithm={"kind": "fedsam", **table.pop("algorithm", {})}, **table)


def test_hand_worked_numbers() -> None:
    # f = (y - 4)^2 from 0, rho = 1/2, lr 1/4: the gradient 2 (y - 4) is taken half a step uphill, at y - 1/2
    # y = 0 - 1/4 * 2 (-1/2 - 4) = 9/4;   y = 9/4 - 1/4 * 2 (7/4 - 4) = 27/8
    found = play(FedSAM(rho=0.5), [LINE], 1, steps=2, lr=0.25)
    assert found.server.w.item() == 27 / 8


@pytest.mark.slow
def test_without_a_radius_it_is_fedavg_bit_for_bit(world) -> None:
    ours = after(fedsam(world, algorithm={"rho": 0.0}, local=RAGGED), 3)
    assert torch.equal(ours.w, after(world(local=RAGGED), 3).w)
    assert not torch.allclose(after(fedsam(world, local=RAGGED), 3).w, ours.w, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_lanes_and_loop_agree(world, beta) -> None:
    ends = [
        after(fedsam(world, algorithm={"beta": beta}, local=RAGGED, engine={"executor": executor}), 3).w
        for executor in ("lanes", "loop")
    ]
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_weight_decay_is_outside_of_the_loss() -> None:
    """The perturbation does not see it: y <- y - eta (g~ + decay y)."""
    alg = FedSAM(rho=0.5).bind(Setup(Quadratic(), sgd(weight_decay=0.5)))
    upload, _, _ = visit(alg, LINE, Model(vec(2)), (), 1, 0.25)
    # g~ = 2 (2 - 1/2 - 4) = -5;   y = 2 - 1/4 (-5 + 1/2 * 2) = 3
    assert upload.dw.item() == 1


def test_a_point_without_a_gradient_is_kept() -> None:
    assert play(FedSAM(), [LINE], 1, steps=3, w=vec(4)).server.w.item() == 4


def test_mofedsam_by_hand() -> None:
    # beta = 1/4, rho = 1/2, lr 1/4, two clients f = (y - 4)^2 and f = (y - 8)^2 of one step each, from w = 0
    # round 1, D = 0:  g~ = -9 and -17;   y = 9/16 and 17/16;   mean move 13/16;   D = -(13/16) / (1 * 1/4) = -13/4
    # which is beta times the mean of g~
    alg = FedSAM(rho=0.5, beta=0.25)
    clients = [LINE, LINE._replace(b=vec(8))]
    one = play(alg, clients, 1, lr=0.25).server
    assert (one.w.item(), one.D.item()) == (13 / 16, -13 / 4)
    # round 2 from w = 13/16:  g~ = 2 (13/16 - 1/2 - b) = -59/8 and -123/8
    # y - w = -1/4 (g~ / 4 - 3/4 * 13/4) = (59/8 + 39/4) / 16 and (123/8 + 39/4) / 16
    # their mean is (91/8 + 39/4) / 16 = 169/128
    two = play(alg, clients, 2, lr=0.25).server
    assert (two.w.item(), two.D.item()) == (13 / 16 + 169 / 128, -169 / 32)


def test_momentum_is_divided_by_the_steps_that_were_taken() -> None:
    """One client of 1 step and one of 3, alike: the mean move by the mean of steps x rate."""
    moved = Walked(torch.stack([vec(1, 0), vec(0, 2)]), vec(0.1, 0.3))
    server = FedSAM(beta=0.5).update(Moving(vec(0, 0), vec(9, 9)), hear(moved, vec(1, 3)))
    torch.testing.assert_close(server.w, vec(0.25, 1.5))
    torch.testing.assert_close(server.D, -vec(0.25, 1.5) / 0.25)
    upload, _ = FedSAM(beta=0.5).finish(vec(2, 2), Moving(vec(0, 0), vec(9, 9)), (), work(steps=3, lr=0.1))
    assert (upload.dw.tolist(), upload.span.item()) == ([2, 2], pytest.approx(0.3))


def test_only_momentum_needs_more_than_a_model_at_the_server() -> None:
    assert FedSAM(beta=1.0).init(vec(1)) == Model(vec(1))
    assert FedSAM(rho=0.0, beta=0.5).init(vec(1)) == Moving(vec(1), vec(0))


def test_every_client_is_lifted_by_its_own_curvature() -> None:
    """Each by its own rho H g / ||g||, before they are averaged."""
    clients = bowls(2)
    w = vec(1, -1, 0.5)
    ours = play(FedSAM(rho=0.3), clients, 1, lr=0.1, w=w).server.w
    lifted = sum(0.3 * c.A @ c.gradient(w) / c.gradient(w).norm() for c in clients) / 2
    plain = play(FedAvg(), clients, 1, lr=0.1, w=w).server.w
    torch.testing.assert_close(ours, plain - 0.1 * lifted)


@pytest.mark.parametrize(("beta", "down", "up"), [(1.0, 1, 0), (0.1, 2, 1)])
def test_bytes_and_gradients(world, beta, down, up) -> None:
    """MoFedSAM is sent twice as much, and sends one number more."""
    exp = fedsam(world, algorithm={"beta": beta})
    state, _ = advance(exp, begin(exp), RamStore(3))
    size = 4 * exp.task.size
    assert (state.down, state.up) == (3 * down * size, 3 * (size + 4 * up))
    assert state.gradients == 3 * 2  # one step of two gradients each


def test_what_a_step_costs() -> None:
    assert FedSAM().traits.gradients_per_step == 2
    assert FedSAM(rho=0.0).traits.gradients_per_step == 1
    with pytest.raises(ConfigError, match="beta"):
        parse({"algorithm": {"kind": "fedsam", "beta": 0.0}})
