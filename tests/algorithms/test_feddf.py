"""FedDF, and distillation, against what must not happen: labels that are used, students that learn nothing new."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import kl_div, log_softmax

from fedloom.algorithm import Held, Model, Setup
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.feddf import FedDF
from fedloom.core import rng
from fedloom.core.errors import ConfigError
from fedloom.core.optim import adam, sgd
from fedloom.core.task import Task
from fedloom.engine.local import train
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.engine.training import groups_of
from fedloom.maths import distill
from fedloom.maths.distill import Lessons
from fedloom.runs.settings import parse
from support.distillation import AT, Line, heard, setup
from support.quadratic import RAGGED, after, vec

PROXY = {"size": 40}


def feddf(world, **table):
    return world((60, 80, 30), algorithm={"kind": "feddf", **table.pop("algorithm", {})}, proxy=PROXY, **table)


def line(**settings) -> FedDF:
    """On a net of one weight with two classes: f(x; w) = (w x, 0)."""
    return FedDF(**settings).bind(Setup(Task(Line()), sgd(), proxy=Held(torch.tensor([[1.0], [2.0]]), torch.zeros(2))))


# -- FedDF ---------------------------------------------------------------------------------------------
def test_hand_worked_numbers() -> None:
    # moves 1 and 3 from w = 0 with 3 and 1 examples: FedAvg's mean is 1.5, the teachers' mean logits are those of w = 2
    # one step of sgd with lr 1/2 on x = 1, 2:  dKL/dw = mean of x (sigma(1.5 x) - sigma(2 x))
    alg = line(rule="sgd", lr=0.5, epochs=1, held_out=0.0)
    found = alg.update(Model(torch.zeros(1)), heard(1.0, 3.0, weights=vec(3, 1))).w.item()
    sigma = lambda v: 1 / (1 + math.exp(-v))  # noqa: E731
    slope = sum(x * (sigma(1.5 * x) - sigma(2 * x)) for x in (1, 2)) / 2
    assert found == pytest.approx(1.5 - 0.5 * slope, rel=1e-6)


def test_temperature_is_on_both_sides() -> None:
    alg = line(rule="sgd", lr=0.5, epochs=1, held_out=0.0, temperature=4.0)
    found = alg.update(Model(torch.zeros(1)), heard(1.0, 3.0, weights=vec(3, 1))).w.item()
    sigma = lambda v: 1 / (1 + math.exp(-v))  # noqa: E731
    slope = sum(x / 4 * (sigma(1.5 * x / 4) - sigma(2 * x / 4)) for x in (1, 2)) / 2
    assert found == pytest.approx(1.5 - 0.5 * slope, rel=1e-6)


@pytest.mark.slow
def test_the_student_reaches_its_teachers_where_it_can() -> None:
    """The mean of these teachers' logits is that of a model, w = 2, and the student finds it."""
    alg = line(epochs=400, lr=0.05, held_out=0.5)
    found = alg.update(Model(torch.zeros(1)), heard(1.0, 3.0, weights=vec(3, 1))).w.item()
    assert found == pytest.approx(2.0, abs=1e-3)


@pytest.mark.slow
def test_no_epochs_are_fedavg_bit_for_bit(world) -> None:
    ours = after(feddf(world, algorithm={"epochs": 0}, local=RAGGED), 3)
    theirs = after(world((60, 80, 30), proxy=PROXY, local=RAGGED), 3)
    assert torch.equal(ours.w, theirs.w)
    assert not torch.equal(after(feddf(world, local=RAGGED), 3).w, theirs.w)


@pytest.mark.slow
def test_labels_of_the_proxy_are_not_used(world) -> None:
    exp = feddf(world, local=RAGGED)
    held = exp.algorithm.proxy
    assert len(held.y) == 40
    ends = []
    for y in (held.y, held.y.flip(0), held.y[:0]):
        other = exp.algorithm.bind(exp.algorithm.setup._replace(proxy=Held(held.x, y)))
        ends.append(after(dataclasses.replace(exp, algorithm=other), 2).w)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("moves", [(0.7,), (0.7, 0.7, 0.7)])
@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_one_teacher_or_identical_ones_have_nothing_to_teach(moves, rule) -> None:
    for held_out in (0.0, 0.5):
        alg = line(rule=rule, lr=0.1, held_out=held_out)
        inbox = heard(*moves, weights=vec(*range(1, len(moves) + 1)))
        student = FedAvg().update(Model(torch.zeros(1)), inbox)
        said = distill.averaged(distill.logits(alg.task, dw, alg.proxy.x) for dw in inbox.uploads.dw)
        assert distill.kl_to_target(alg.task, student.w, alg.proxy.x, log_softmax(said, -1)) == 0
        assert torch.equal(alg.update(Model(torch.zeros(1)), inbox).w, student.w)


@pytest.mark.slow
def test_one_client_in_a_run_is_fedavg(world) -> None:
    table = {"local": RAGGED, "cohort": {"size": 1, "sampling": "uniform"}}
    ours, theirs = after(feddf(world, **table), 3), after(world((60, 80, 30), proxy=PROXY, **table), 3)
    assert torch.equal(ours.w, theirs.w)


def test_teachers_have_equal_voices_unless_drawn_more_than_once() -> None:
    inbox = heard(1.0, 3.0, weights=vec(3, 1))
    assert FedDF()._voices(inbox) == [1, 1]
    assert FedDF(weighting="uniform")._voices(inbox) == [3, 1]  # then a weight is how often it was drawn


def test_a_client_without_data_teaches_nothing(world) -> None:
    exp = feddf(world)
    train = exp.federation.train
    start = torch.cat([torch.zeros(1, dtype=torch.long), train.start])
    fed = exp.federation._replace(train=train._replace(start=start), test=train._replace(start=start))
    torch.testing.assert_close(after(dataclasses.replace(exp, federation=fed)).w, after(exp).w, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_student_is_nearer_to_its_teachers_on_rows_that_it_never_saw(world) -> None:
    exp = feddf(world, local={"batch": 10, "epochs": 5, "lr": 0.5}, algorithm={"lr": 0.01}, model={"kind": "mlp"})
    state, store = begin(exp), RamStore(3)
    plain = world((60, 80, 30), proxy=PROXY, local={"batch": 10, "epochs": 5, "lr": 0.5}, model={"kind": "mlp"})
    start, _ = advance(plain, begin(plain), RamStore(3))
    state, _ = advance(exp, state, store)
    group = next(iter(groups_of(exp, 0, exp.present(0))))  # the teachers again
    moves = train(exp.algorithm, exp.federation, group, exp.given(begin(exp), store, group.ids)).uploads.dw
    x, _ = exp.federation.examples(exp.federation.common)
    z = distill.averaged(distill.logits(exp.task, exp.task.w0 + dw, x) for dw in moves)
    target = log_softmax(z, -1)
    assert distill.kl_to_target(exp.task, state.server.w, x, target) < distill.kl_to_target(
        exp.task, start.server.w, x, target
    )


def test_bytes_are_fedavgs(world) -> None:
    exp = feddf(world)
    state, _ = advance(exp, begin(exp), RamStore(3))
    assert state.up == state.down == 3 * 4 * exp.task.size


def test_a_net_with_running_statistics_is_refused() -> None:
    with pytest.raises(ConfigError, match="running statistics"):
        FedDF().bind(Setup(Task(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))), sgd()))


def test_settings() -> None:
    alg = parse({"algorithm": {"kind": "feddf", "rule": "sgd", "lr": 0.08, "decay": 0.99}}).algorithm
    assert alg._lessons(10).lr == pytest.approx(0.08 * 0.99**10)
    with pytest.raises(ConfigError, match="temperature"):
        parse({"algorithm": {"kind": "feddf", "temperature": 0}})


# -- distillation --------------------------------------------------------------------------------------
def test_the_divergence_is_torchs_and_never_negative() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        p, q = (log_softmax(3 * torch.randn(7, 5, generator=g).double(), -1) for _ in range(2))
        ours = distill.divergence(q, p)
        torch.testing.assert_close(ours, kl_div(q, p, reduction="batchmean", log_target=True))
        assert ours >= 0
        assert distill.divergence(p, p) == 0


def test_steps_are_those_of_torchs_adam_in_this_order_of_batches() -> None:
    task, x, target = setup(11)
    how = Lessons(adam(), 0.01, epochs=3, batch=4, temperature=2.0)
    ours = list(distill.distilled(task, task.w0, x, target, how, AT))
    assert len(ours) == 3 * how.steps(11) == 9
    net = task.module(task.w0, task.buffers0)
    theirs = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(3):
        order = torch.from_numpy(rng.stream(3, "distill", 1, epoch).permutation(11))
        for rows in torch.split(order, 4):
            theirs.zero_grad()
            said = log_softmax(net(x[rows]) / 2, -1)
            kl_div(said, target[rows].float(), reduction="batchmean", log_target=True).backward()
            theirs.step()
    end = torch.cat([p.detach().flatten() for p in net.parameters()])
    torch.testing.assert_close(ours[-1], end, rtol=1e-4, atol=1e-5)


def test_the_address_makes_the_order_and_nothing_else_does() -> None:
    task, x, target = setup()
    how = Lessons(adam(), 0.01, epochs=2, batch=8)
    ends = [distill.last_student(task, task.w0, x, target, how, at) for at in ((3, 1), (3, 1), (3, 2), (4, 1))]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
    assert not torch.equal(ends[0], ends[3])
    by_lanes = Task(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)), lanes=True)
    torch.testing.assert_close(
        distill.last_student(by_lanes, task.w0, x, target, how, (3, 1)), ends[0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_cosine_ends_at_zero_and_starts_at_the_rate() -> None:
    task, x, target = setup()
    how = Lessons(sgd(), 0.1, epochs=100, batch=30)
    cosine = how._replace(schedule="cosine")
    ours, theirs = (list(distill.distilled(task, task.w0, x, target, h, AT)) for h in (cosine, how))
    assert torch.equal(ours[0], theirs[0])
    assert (ours[-1] - ours[-2]).norm() < 0.01 * (theirs[-1] - theirs[-2]).norm()


def test_the_best_on_held_out_rows_is_kept() -> None:
    """With steps that are far too long, every epoch is worse than none; with good ones, the last is best."""
    task, x, target = setup(60)
    wild = Lessons(sgd(), 500.0, epochs=3, batch=8)
    assert torch.equal(distill.best_student(task, task.w0, x, target, wild, AT), task.w0)
    good = Lessons(adam(), 0.01, epochs=10, batch=8)
    found = distill.best_student(task, task.w0, x, target, good, AT)
    order = torch.from_numpy(rng.stream(3, "distill_held_out").permutation(60))
    aside, rows = order[:6], order[6:]
    way = list(distill.distilled(task, task.w0, x[rows], target[rows], good, AT))[6::7]
    assert len(way) == 10
    gaps = [distill.kl_to_target(task, w, x[aside], target[aside]) for w in way]
    assert torch.equal(found, way[gaps.index(min(gaps))])
    assert min(gaps) < 0.5 * distill.kl_to_target(task, task.w0, x[aside], target[aside])


def test_patience_stops_a_student_that_does_not_gain(monkeypatch) -> None:
    task, x, target = setup(60)
    idle, seen = Lessons(sgd(), 1.0, epochs=30, batch=60), []
    monkeypatch.setattr(distill, "_slope", lambda task, w, *_: seen.append(1) or torch.zeros_like(w))
    distill.best_student(task, task.w0, x, target, idle, AT, patience=2)
    assert len(seen) == 2
    distill.best_student(task, task.w0, x, target, idle, AT)
    assert len(seen) == 2 + 30


def test_a_single_row_is_learned_from() -> None:
    task, x, target = setup(1)
    found = distill.best_student(task, task.w0, x, target, Lessons(adam(), 0.01, epochs=50, batch=8), AT)
    assert distill.kl_to_target(task, found, x, target) < 0.1 * distill.kl_to_target(task, task.w0, x, target)


def test_chunks_change_nothing(monkeypatch) -> None:
    task, x, _ = setup(30)
    whole = distill.logits(task, task.w0, x)
    monkeypatch.setattr(distill, "_CHUNK", 7)
    torch.testing.assert_close(distill.logits(task, task.w0, x), whole, rtol=1e-5, atol=1e-6)
