"""DFedGAM: DFedAvg with the gradients of tests/maths/test_sharpness.py, here as nodes take them."""

from __future__ import annotations

import pytest
import torch

from fedloom.algorithm import Model, Setup
from fedloom.algorithms.dfedgam import DFedGAM
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.maths.sharpness import Gam
from fedloom.runs.settings import parse
from support.gossip import RAGGED, SIZES, network, run
from support.quadratic import Quadratic, bowls, vec, visit

RULES = ("paper", "gam_exact", "gam_fd", "gam_repo")
MLP = {"kind": "mlp", "widths": [5]}


class Curved(Quadratic):
    def hvp(self, w, batch, v):
        return batch.x @ v


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_g9_without_a_radius_it_is_dfedavg_bit_for_bit(world, rule) -> None:
    ours = run(network(world, "dfedgam", algorithm={"rho": 0.0, "rule": rule}), 3)
    assert torch.equal(ours, run(network(world, "dfedavg"), 3))
    flat = {"rule": rule} | ({"alpha": 1.0} if rule in ("gam_exact", "gam_fd") else {})
    assert not torch.allclose(ours, run(network(world, "dfedgam", algorithm=flat), 3), rtol=1e-3)


@pytest.mark.parametrize("hvp", ["fd", "central", "exact"])
def test_g2_steps_on_a_quadratic(hvp) -> None:
    bowl, y = bowls(1)[0], vec(1, -2, 0.5)
    alg = DFedGAM(rho=0.3, hvp=hvp).bind(Setup(Curved(), sgd(weight_decay=0.1)))
    found, _, _ = visit(alg, bowl, Model(y), (), 2, 0.1)
    for _ in range(2):
        g = bowl.gradient(y)
        f = bowl.A @ g
        y = y - 0.1 * (g + 0.3 * bowl.A @ f / f.norm() + 0.1 * y)
    torch.testing.assert_close(found.w, y)


def test_the_step_is_clipped_and_not_the_gradient_that_points_the_way() -> None:
    """Clipping and decay come last: ||g~|| is at most the limit, and delta is as without it."""
    bowl, y = bowls(1)[0], vec(10, -20, 5)
    alg = DFedGAM(rho=0.3).bind(Setup(Curved(), sgd(clip=1.0)))
    found, _, _ = visit(alg, bowl, Model(y), (), 1, 0.1)
    g = bowl.gradient(y)
    f = bowl.A @ g
    whole = g + 0.3 * bowl.A @ f / f.norm()
    torch.testing.assert_close(found.w, y - 0.1 * whole / whole.norm())


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "hvp"), [(r, "fd") for r in RULES] + [("paper", "central"), ("paper", "exact")])
def test_lanes_and_loop_agree(world, rule, hvp) -> None:
    """Norms are each node's own; a difference of float32 gradients leaves about three digits of a direction."""
    settings = {"rule": rule, "hvp": hvp} if rule == "paper" else {"rule": rule}
    ends = [
        run(network(world, "dfedgam", algorithm=settings, model=MLP, engine={"executor": e}), 2)
        for e in ("lanes", "loop")
    ]
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "cost"),
    [
        ({}, 3),
        ({"hvp": "central"}, 4),
        ({"hvp": "exact"}, 4),
        ({"rule": "gam_exact"}, 6),
        ({"rule": "gam_fd"}, 4),
        ({"rule": "gam_repo"}, 4),
        ({"rho": 0.0}, 1),
    ],
)
def test_g8_gradients_are_counted(world, settings, cost) -> None:
    exp = network(world, "dfedgam", algorithm=settings)
    state, _ = advance(exp, begin(exp), RamStore(len(SIZES)))
    assert state.gradients == cost * sum(2 * -(-n // RAGGED["batch"]) for n in SIZES)


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ({}, "fp32"),
        ({"hvp": "central"}, "fp32"),
        ({"rule": "gam_fd"}, "fp32"),
        ({"rule": "gam_repo"}, "fp32"),
        ({"hvp": "exact"}, "tf32"),
        ({"rule": "gam_exact"}, "tf32"),
        ({"rho": 0.0}, "tf32"),
    ],
)
def test_differences_are_of_whole_numbers(settings, precision) -> None:
    """TF32 and bf16 round gradients by about as much as a difference is long."""
    assert parse({"algorithm": {"kind": "dfedgam", **settings}}).engine.precision == precision
    chosen = {"engine": {"precision": "bf16"}, "algorithm": {"kind": "dfedgam", **settings}}
    assert parse(chosen).engine.precision == "bf16"


def test_settings_reach_the_step() -> None:
    alg = parse(
        {
            "algorithm": {"kind": "dfedgam", "rho": 0.5, "rule": "gam_repo", "rho_fd": 0.02}
            | {"beta0": 0.5, "beta1": 0.6, "gamma": 0.03, "tau": 1e-5}
        }
    ).algorithm
    assert alg.how == Gam(0.5, "gam_repo", reach=0.02, beta0=0.5, beta1=0.6, gamma=0.03, tau=1e-5)
    assert parse({"algorithm": {"kind": "dfedgam", "rule": "gam_fd", "alpha": 0.3}}).algorithm.how.alpha == 0.3
    assert parse({"algorithm": {"kind": "dfedgam", "hvp": "exact"}}).algorithm.how.product == "exact"
    assert DFedGAM().how == Gam(0.2)
    for key, value in (("rho", -1.0), ("rho_fd", 0.0), ("rho_fd", 0.6), ("beta1", 1.5)):
        with pytest.raises(ConfigError, match=key):
            parse({"algorithm": {"kind": "dfedgam", "rule": "gam_repo", key: value}})
