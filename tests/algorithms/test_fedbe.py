"""FedBE: its posteriors against their moments, its target by hand, its average against the points it is made of."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import softmax

from fedloom.algorithm import Held, Model, Setup, Update
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedbe import FedBE
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.core.task import Task
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.maths import distill
from fedloom.maths.distill import Lessons
from fedloom.runs.settings import parse
from support.distillation import AT, Line, heard, setup, small
from support.quadratic import RAGGED, after, hear, vec

PROXY = {"size": 40}
ONLY_SAMPLES = {"with_mean": False, "with_clients": False}


def fedbe(world, **table):
    return world((60, 80, 30), algorithm={"kind": "fedbe", **table.pop("algorithm", {})}, proxy=PROXY, **table)


def bound(task=None, x=None, **settings) -> FedBE:
    task = small() if task is None else task
    x = torch.zeros(2, 3) if x is None else x
    return FedBE(**settings).bind(Setup(task, sgd(), proxy=Held(x, torch.zeros(len(x)))))


def moves(count: int, size: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    weights = 0.5 + torch.rand(count, generator=g).double()
    return hear(Update(torch.randn(count, size, generator=g)), weights)._replace(address=AT)


def drawn(alg: FedBE, w, inbox):
    mean = FedAvg().update(Model(w), inbox).w
    return torch.stack(list(alg.teachers(w, mean, inbox)))


# -- the posterior -------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_gaussian_has_the_weighted_mean_and_variance_of_the_clients() -> None:
    w, inbox = torch.tensor([1.0, -1.0, 0.5]), moves(4, 3)
    found = drawn(FedBE(samples=10_000, **ONLY_SAMPLES), w, inbox).double()
    share = inbox.weights / inbox.weights.sum()
    models = w + inbox.uploads.dw.double()
    mean = share @ models
    variance = share @ (models - mean).square()
    torch.testing.assert_close(found.mean(0), mean, rtol=0, atol=4 * float(variance.max().sqrt()) / 100)
    torch.testing.assert_close(found.var(0), variance, rtol=0.06, atol=0)
    assert np.abs(np.corrcoef(found.T.numpy()) - np.eye(3)).max() < 0.04  # the coordinates are independent


@pytest.mark.slow
@pytest.mark.parametrize(("centre", "concentration"), [("alike", 1.0), ("share", 1.0), ("share", 20.0)])
def test_the_dirichlet_has_its_moments_and_stays_among_the_clients(centre, concentration) -> None:
    w, count = torch.zeros(3), 3
    inbox = hear(Update(torch.eye(3)), vec(1, 2, 5))._replace(address=AT)  # the samples are the pi themselves
    alg = FedBE(posterior="dirichlet", samples=10_000, centre=centre, concentration=concentration, **ONLY_SAMPLES)
    found = drawn(alg, w, inbox).double()
    assert (found >= 0).all()
    torch.testing.assert_close(found.sum(1), torch.ones(10_000).double(), rtol=1e-6, atol=1e-6)
    mean = torch.full((3,), 1 / 3).double() if centre == "alike" else vec(1, 2, 5) / 8
    variance = mean * (1 - mean) / (count * concentration + 1)
    torch.testing.assert_close(found.mean(0), mean, rtol=0, atol=0.02)
    torch.testing.assert_close(found.var(0), variance, rtol=0.06, atol=1e-4)


@pytest.mark.parametrize("posterior", ["gaussian", "dirichlet"])
def test_identical_clients_are_all_that_is_ever_drawn(posterior) -> None:
    dw = torch.randn(6, generator=torch.Generator().manual_seed(0)).expand(3, -1)
    inbox = hear(Update(dw), vec(1, 2, 3))._replace(address=AT)
    found = drawn(FedBE(posterior=posterior), torch.ones(6), inbox)
    assert len(found) == 1 + 3 + 10
    torch.testing.assert_close(found, (1 + dw[:1]).expand(14, -1), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_normalised_samples_are_those_of_the_authors_code() -> None:
    """For each tensor: unit moves, their mean plus spread times deviation times noise, times the mean length."""
    task, inbox = small(), moves(3, small().size)
    alg = bound(task, sampling="normalised", samples=4000, **ONLY_SAMPLES)
    found = drawn(alg, task.w0, inbox).double() - task.w0.double()
    first = 0
    for name in task.names:
        size = dict(task.module(task.w0, task.buffers0).named_parameters())[name].numel()
        at = slice(first, first + size)
        dw = inbox.uploads.dw[:, at].double()
        norms = dw.norm(dim=1)
        unit = dw / norms[:, None]
        sd = 0.1 * unit.var(0, correction=0).clamp(min=1e-5).sqrt() * norms.mean()
        torch.testing.assert_close(found[:, at].mean(0), unit.mean(0) * norms.mean(), rtol=0, atol=5 * sd.max() / 63)
        torch.testing.assert_close(found[:, at].std(0), sd, rtol=0.1, atol=1e-6)
        first += size
    assert first == task.size


def test_normalised_samples_bear_a_tensor_that_did_not_move() -> None:
    task = small()
    still = hear(Update(torch.zeros(2, task.size)), vec(1, 1))._replace(address=AT)
    found = drawn(bound(task, sampling="normalised", **ONLY_SAMPLES), task.w0, still)
    assert torch.equal(found, task.w0.expand(10, -1))


def test_draws_go_by_seed_round_and_number() -> None:
    w, inbox, alg = torch.zeros(5), moves(3, 5), FedBE(samples=3, **ONLY_SAMPLES)
    ours = drawn(alg, w, inbox)
    assert torch.equal(ours, drawn(alg, w, inbox))
    assert torch.equal(ours[:2], drawn(FedBE(samples=2, **ONLY_SAMPLES), w, inbox))
    assert len({tuple(row) for row in ours.tolist()}) == 3
    assert not torch.equal(ours, drawn(alg, w, inbox._replace(address=(AT[0], AT[1] + 1))))


# -- what the teachers say -----------------------------------------------------------------------------
def test_the_target_by_hand() -> None:
    # f(x; w) = (w x, 0) at x = 1; teachers w = 0 and w = ln 3 say (1/2, 1/2) and (3/4, 1/4): together (5/8, 3/8)
    # T = 1/2 squares: 25 : 9.   Mean logits are (ln 3 / 2, 0), twice that: e^{ln 3} = 3 : 1
    x, two = torch.tensor([[1.0]]), [torch.zeros(1), torch.tensor([math.log(3)])]
    alg = bound(Task(Line()), x)
    torch.testing.assert_close(alg.target(iter(two), x).exp(), vec(25 / 34, 9 / 34)[None], rtol=1e-6, atol=1e-7)
    alg = bound(Task(Line()), x, voice="logits")
    torch.testing.assert_close(alg.target(iter(two), x).exp(), vec(3 / 4, 1 / 4)[None], rtol=1e-6, atol=1e-7)
    alg = bound(Task(Line()), x, temperature=1.0)
    torch.testing.assert_close(alg.target(iter(two), x).exp(), vec(5 / 8, 3 / 8)[None], rtol=1e-6, atol=1e-7)


def test_the_ensemble_is_the_mean_the_clients_and_the_samples() -> None:
    w, inbox = torch.ones(1), heard(1.0, 3.0, weights=vec(3, 1))
    mean = FedAvg().update(Model(w), inbox).w
    found = drawn(FedBE(samples=2), w, inbox)
    assert torch.equal(found[:3], torch.tensor([[2.5], [2.0], [4.0]]))
    assert torch.equal(mean, found[0])
    for settings, size in (({"with_mean": False}, 4), ({"with_clients": False}, 3), ({"samples": 0}, 3)):
        assert len(drawn(FedBE(**({"samples": 2} | settings)), w, inbox)) == size


def test_a_step_by_hand() -> None:
    # the student starts from m = 1.5; teachers are the clients, w = 1 and w = 3, at x = 1 and 2; T = 1, lr 1/2
    x = torch.tensor([[1.0], [2.0]])
    alg = bound(Task(Line()), x, samples=0, with_mean=False, temperature=1.0, epochs=1, lr=0.5, weight_decay=0.1)
    found = alg.update(Model(torch.zeros(1)), heard(1.0, 3.0, weights=vec(3, 1))).w.item()
    sigma = lambda v: 1 / (1 + math.exp(-v))  # noqa: E731
    slope = sum(v * (sigma(1.5 * v) - (sigma(v) + sigma(3 * v)) / 2) for v in (1, 2)) / 2
    assert found == pytest.approx(1.5 - 0.5 * (slope + 0.1 * 1.5), rel=1e-6)


def test_self_distillation_keeps_the_greatest() -> None:
    """With no samples and no clients, the student learns to be surer of what it says."""
    task, x, _ = setup(40)
    alg = bound(task, x, samples=0, with_clients=False, lr=0.1, swa=False)
    inbox = moves(2, task.size)._replace(total=Update(torch.zeros(task.size).double()))
    found = alg.update(Model(task.w0), inbox).w
    before, now = (softmax(distill.logits(task, w, x), -1) for w in (task.w0, found))
    sure = before.topk(2).values
    sure = sure[:, 0] - sure[:, 1] > 0.02  # where it was in two minds, either may win
    assert torch.equal(before.argmax(1)[sure], now.argmax(1)[sure])
    assert now.max(1).values.mean() > before.max(1).values.mean()


# -- the average of the way ------------------------------------------------------------------------------
def test_the_mean_is_of_the_points_that_it_names() -> None:
    task, x, target = setup(30)
    how = Lessons(sgd(momentum=0.9), 0.05, epochs=5, batch=8)  # 20 steps
    way = [w.double() for w in distill.distilled(task, task.w0, x, target, how, AT)]

    def mean(*steps):
        return (sum(way[step - 1] for step in steps) / len(steps)).float()

    def ours(start, every):
        return distill.swa(task, task.w0, x, target, how, AT, start=start, every=every)

    assert torch.equal(ours(12, 3), mean(12, 15, 18, 20))
    assert torch.equal(ours(10, 5), mean(10, 15, 20))
    assert torch.equal(ours(500, 25), mean(10, 20))  # too late for so few steps: half-way
    assert torch.equal(ours(0, 1), mean(*range(1, 21)))


def test_the_mean_of_points_that_stand_still_is_the_point(monkeypatch) -> None:
    task, x, target = setup(30)
    monkeypatch.setattr(distill, "_slope", lambda task, w, *_: torch.zeros_like(w))
    how = Lessons(sgd(), 0.05, epochs=9, batch=8)
    assert torch.equal(distill.swa(task, task.w0, x, target, how, AT, start=1, every=1), task.w0)


# -- in a run --------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_no_epochs_are_fedavg_bit_for_bit(world) -> None:
    ours = after(fedbe(world, algorithm={"epochs": 0}, local=RAGGED), 3)
    theirs = after(world((60, 80, 30), proxy=PROXY, local=RAGGED), 3)
    assert torch.equal(ours.w, theirs.w)
    assert not torch.equal(after(fedbe(world, local=RAGGED), 3).w, theirs.w)


@pytest.mark.slow
@pytest.mark.parametrize("posterior", ["gaussian", "dirichlet"])
def test_labels_of_the_proxy_are_not_used(world, posterior) -> None:
    exp = fedbe(world, local=RAGGED, algorithm={"posterior": posterior})
    held, ends = exp.algorithm.proxy, []
    for y in (held.y, held.y.flip(0), held.y[:0]):
        other = exp.algorithm.bind(exp.algorithm.setup._replace(proxy=Held(held.x, y)))
        ends.append(after(dataclasses.replace(exp, algorithm=other), 2).w)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.slow
def test_one_client_teaches_itself(world) -> None:
    """Alone, it is mean, client and sample in one; without sharpening and decay there is nothing to learn."""
    table = {"local": RAGGED, "cohort": {"size": 1, "sampling": "uniform"}}
    ours = after(fedbe(world, algorithm={"temperature": 1.0, "weight_decay": 0.0}, **table), 3)
    theirs = after(world((60, 80, 30), proxy=PROXY, **table), 3)
    torch.testing.assert_close(ours.w, theirs.w, rtol=1e-4, atol=1e-5)


def test_a_client_without_data_teaches_nothing(world) -> None:
    exp = fedbe(world)
    train = exp.federation.train
    start = torch.cat([torch.zeros(1, dtype=torch.long), train.start])
    fed = exp.federation._replace(train=train._replace(start=start), test=train._replace(start=start))
    torch.testing.assert_close(after(dataclasses.replace(exp, federation=fed)).w, after(exp).w, rtol=1e-5, atol=1e-6)


def test_the_student_is_nearer_to_the_ensemble() -> None:
    task, x, _ = setup(60)
    inbox = moves(4, task.size)
    alg = bound(task, x, lr=0.02)
    mean = FedAvg().update(Model(task.w0), inbox).w
    target = alg.target(alg.teachers(task.w0, mean, inbox), x)
    assert torch.allclose(target.exp().sum(1), torch.ones(60).double())
    found = alg.update(Model(task.w0), inbox).w
    assert distill.kl_to_target(task, found, x, target) < 0.7 * distill.kl_to_target(task, mean, x, target)


def test_bytes_are_fedavgs(world) -> None:
    exp = fedbe(world)
    state, _ = advance(exp, begin(exp), RamStore(3))
    assert state.up == state.down == 3 * 4 * exp.task.size


def test_settings() -> None:
    with pytest.raises(ConfigError, match="no teacher"):
        parse({"algorithm": {"kind": "fedbe", "samples": 0, "with_mean": False, "with_clients": False}})
    with pytest.raises(ConfigError, match="running statistics"):
        FedBE().bind(Setup(Task(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))), sgd()))
