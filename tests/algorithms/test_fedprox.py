"""FedProx against its proximal problem, solved another way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from fedloom.algorithm import Inbox, Model, Update
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedprox import FedProx
from fedloom.core.errors import ConfigError
from fedloom.core.task import Batch
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.runs.settings import parse
from support.quadratic import RAGGED, Bowl, after, bowls, optimum, play, vec
from support.terminal import Quick


def test_hand_worked_numbers() -> None:
    # f = 1/2 (v - 2)^2 from w = 0 with lr 1/2 and mu = 2; the second coordinate is at its optimum already
    # step 1: g = 0 - 2, no pull yet    -> v = 1
    # step 2: g = (1 - 2) + 2 (1 - 0)   -> v = 1 - 1/2 = 1/2
    # step 3: g = (1/2 - 2) + 2 (1/2)   -> v = 1/2 + 1/4 = 3/4
    found = play(FedProx(mu=2), [Bowl(torch.eye(2).double(), vec(2, 0))], 1, steps=3, lr=0.5)
    assert found.server.w.tolist() == [0.75, 0.0]


def test_p1_mu_0_is_fedavg_bit_for_bit(world) -> None:
    ours = after(world(algorithm={"kind": "fedprox", "mu": 0.0}, local=RAGGED), 3)
    assert torch.equal(ours.w, after(world(local=RAGGED), 3).w)


@pytest.mark.parametrize("mu", [0.1, 7.0])
def test_p2_one_step_is_fedavg_whatever_mu(world, mu) -> None:
    ours = after(world(algorithm={"kind": "fedprox", "mu": mu}), 3)
    assert torch.equal(ours.w, after(world(), 3).w)


def test_more_than_one_step_is_not(world) -> None:
    ours = after(world(algorithm={"kind": "fedprox", "mu": 0.5}, local=RAGGED))
    assert not torch.allclose(ours.w, after(world(local=RAGGED)).w, rtol=1e-3)


@pytest.mark.parametrize("mu", [0.1, 1.0, 10.0])
def test_p3_many_small_steps_reach_the_proximal_point(mu) -> None:
    client, w = bowls(1)[0], vec(1, -2, 0.5)
    found = play(FedProx(mu=mu), [client], 1, steps=1500, lr=0.05, w=w)
    torch.testing.assert_close(found.server.w, client.prox(w, mu), rtol=1e-10, atol=1e-10)


def test_p4_the_larger_mu_the_shorter_the_way() -> None:
    client, w = bowls(1, seed=3)[0], vec(1, -2, 0.5)
    moves = [
        float((play(FedProx(mu=mu), [client], 1, steps=800, lr=0.05, w=w).server.w - w).norm())
        for mu in (0, 0.01, 0.1, 1, 5, 20)
    ]
    assert moves == sorted(moves, reverse=True)
    assert moves[-1] < 0.2 * moves[0]


def test_p5_the_hook_is_the_gradient_of_the_loss_with_the_proximal_term(world) -> None:
    exp = world(algorithm={"kind": "fedprox", "mu": 0.7}, model={"kind": "mlp", "widths": [5]})
    x, y = exp.federation.examples(torch.arange(9))
    zero = torch.zeros(())
    batch = Batch(x, y, torch.ones(9), zero.long(), zero, zero, exp.task.buffers0)
    w = exp.task.w0
    v = (w + 0.1 * torch.randn(w.shape, generator=torch.Generator().manual_seed(0))).requires_grad_()
    (exp.task.loss(v, batch) + 0.35 * (v - w).square().sum()).backward()
    torch.testing.assert_close(exp.algorithm.gradient(v.detach(), batch, Model(w), ()), v.grad, rtol=1e-5, atol=1e-6)


def test_p6_gamma_and_the_bound_on_the_way() -> None:
    """||w_k - w|| <= (1 + gamma) ||grad F_k(w)|| / mu, gamma = ||grad F_k(w_k) + mu (w_k - w)|| / ||grad F_k(w)||"""
    client, w, mu = bowls(1, seed=2)[0], vec(1, -2, 0.5), 1.0
    start = client.gradient(w).norm()
    gammas = []
    for steps in (0, 1, 5, 20, 400):
        v = play(FedProx(mu=mu), [client], 1, steps=steps, lr=0.1, w=w).server.w
        gammas.append(float((client.gradient(v) + mu * (v - w)).norm() / start))
        assert (v - w).norm() <= (1 + gammas[-1]) * start / mu + 1e-12
    assert gammas[0] == pytest.approx(1)  # no work done
    assert gammas == sorted(gammas, reverse=True)
    assert gammas[-1] <= 1e-6


@pytest.mark.slow
def test_rounds_of_exact_proximal_steps_settle_where_they_balance() -> None:
    """At the fixed point sum_k (prox_k(w) - w) = 0, a linear system; the larger mu, the nearer the optimum."""
    clients, bias = bowls(4), {}
    for mu, rounds, lr in ((0.5, 60, 0.45), (5.0, 160, 0.2)):
        shrink = [torch.linalg.solve(c.A + mu * torch.eye(3).double(), c.A) for c in clients]
        fixed = torch.linalg.solve(sum(shrink), sum(s @ c.b for s, c in zip(shrink, clients, strict=True)))
        found = play(FedProx(mu=mu), clients, rounds, steps=15, lr=lr).server.w
        torch.testing.assert_close(found, fixed, rtol=1e-3, atol=1e-3)
        bias[mu] = (found - optimum(clients)).norm()
    assert 0.1 < bias[5.0] < bias[0.5] / 2


def test_unequal_work_and_unequal_data() -> None:
    # lr 1/2 on 1/2 (v - b)^2 halves the distance to b (mu = 0); mu = 1 adds a pull from the second step on
    # client 1, b = 8, 1 step:  0 -> 4                                                     counts 1
    # client 2, b = 4, 2 steps: 0 -> 2 -> 2 - 1/2 ((2 - 4) + 1 * 2) = 2                    counts 3
    clients = [Bowl(torch.eye(1).double(), vec(8), 1), Bowl(torch.eye(1).double(), vec(4), 3)]
    assert play(FedProx(mu=1), clients, 1, steps=[1, 2], lr=0.5).server.w.item() == (4 + 3 * 2) / 4
    assert play(FedProx(mu=1, weighting="uniform"), clients, 1, steps=[1, 2], lr=0.5).server.w.item() == 3


def test_the_server_is_fedavgs() -> None:
    heard = Inbox(Update(vec(1, 6)), vec(4)[0], vec(2)[0], vec(5)[0], vec(40)[0])
    for weighting in ("samples", "samples_com", "samples_scaled"):
        ours = FedProx(server_lr=0.5, weighting=weighting).update(Model(vec(10, 10)), heard)
        assert torch.equal(ours.w, FedAvg(server_lr=0.5, weighting=weighting).update(Model(vec(10, 10)), heard).w)


def test_presets_say_who_is_drawn_and_how_they_count() -> None:
    code, paper = (parse({"algorithm": {"kind": "fedprox", "preset": p}}) for p in ("code", "paper"))
    assert (code.cohort.sampling, code.algorithm.weighting) == ("uniform", "samples")
    assert (paper.cohort.sampling, paper.algorithm.weighting) == ("proportional", "uniform")
    own = parse({"algorithm": {"kind": "fedprox", "preset": "paper"}, "cohort": {"sampling": "uniform"}})
    assert (own.cohort.sampling, own.algorithm.weighting) == ("uniform", "uniform")


def test_mu_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="mu"):
        parse({"algorithm": {"kind": "fedprox", "mu": -0.1}})


# -- all seven ----------------------------------------------------------------------------------------
SEVEN = ("fedprox", "relaxation", "scaffold", "moon", "qfedavg", "fedmgda", "fedalr")


@pytest.mark.parametrize("kind", SEVEN)
def test_a_client_without_data_is_as_good_as_absent(world, kind) -> None:
    exp = world(algorithm={"kind": kind}, model={"kind": "mlp", "widths": [6]})
    train = exp.federation.train
    start = torch.tensor([0, 0, 4, 16, 23])  # client 0 has nothing, the others are shifted by one
    fed = exp.federation._replace(train=train._replace(start=start), test=train._replace(start=start))
    torch.testing.assert_close(after(dataclasses.replace(exp, federation=fed)).w, after(exp).w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", SEVEN)
def test_a_model_costs_its_bytes_once_each_way(world, kind) -> None:
    """Except for SCAFFOLD's control variates, twice each way, and q-FedAvg's one number more up."""
    exp = world(algorithm={"kind": kind}, model={"kind": "mlp", "widths": [6]})
    state, _ = advance(exp, begin(exp), RamStore(3))
    once = 3 * 4 * exp.task.size
    more = {"scaffold": (once, once), "qfedavg": (3 * 4, 0)}.get(kind, (0, 0))
    assert (state.up, state.down) == (once + more[0], once + more[1])


@pytest.mark.slow
def test_neutral_settings_through_the_command_line(tmp_path: Path) -> None:
    quick = Quick()
    small = ("rounds=3", "partition.clients=6", "cohort.size=3", "model.kind=mlp", "model.widths=[8]", "local.epochs=2")
    small += ("checkpoint.curves=false",)

    def metrics(name: str, *settings: str) -> bytes:
        done = quick("run", *small, *settings, "--out", name, cwd=tmp_path)
        assert done.code == 0, done.err
        return (tmp_path / name / "metrics.jsonl").read_bytes()

    def without_costs(text: bytes) -> list[dict[str, float]]:
        records = [json.loads(line) for line in text.splitlines()]
        costs = ("bytes/up", "bytes/busiest", "time/")
        return [{k: v for k, v in r.items() if not k.startswith(costs)} for r in records]

    try:
        plain = metrics("a")
        assert metrics("b", "algorithm.kind=fedprox", "algorithm.mu=0") == plain
        assert metrics("c", "algorithm.kind=relaxation", "algorithm.alpha=0", "algorithm.mu=0") == plain
        assert metrics("d", "algorithm.kind=moon", "algorithm.mu=0") == plain
        uniform = metrics("e", "algorithm.weighting=uniform")
        fair = metrics("f", "algorithm.kind=qfedavg", "algorithm.q=0")
        assert without_costs(fair) == without_costs(uniform)  # it sends one number more
        assert len(fair.splitlines()) == 4
        assert uniform != plain
    finally:
        quick.close()


def test_a_proximal_step_that_grows_is_warned_about() -> None:
    from fedloom.runs.settings import parse

    def notes(mu):
        return parse({"algorithm": {"kind": "fedprox", "mu": mu}, "local": {"lr": 0.1}}).notes

    assert notes(1.0) == ()
    assert "proximal steps diverge" in notes(30.0)[0]
