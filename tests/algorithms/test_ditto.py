"""Ditto against FedAvg, local training and the proximal problem, each of which it must be in a limit."""

from __future__ import annotations

import pytest
import torch

import fedloom
from fedloom.algorithm import Carry, Model, Setup
from fedloom.algorithm.capabilities import warnings_of
from fedloom.algorithms.ditto import Both, Ditto, Mine
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.runs.settings import parse
from support.personal import full_gradient, run, served
from support.quadratic import RAGGED, Bowl, Quadratic, after, bowls, vec, work

MLP = {"kind": "mlp", "widths": [5]}
OPTIMIZERS = [
    {},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.9, "state": "persist"},
    {"optimizer": "adam", "lr": 0.01, "state": "persist"},
]


def ditto(world, *args, **table):
    return world(*args, algorithm={"kind": "ditto", **table.pop("algorithm", {})}, **table)


def test_hand_worked_numbers() -> None:
    # f = 1/2 (y - 4)^2, received w = 0, own v = 2, lr 1/4, mu = 2
    # w:  0 - 1/4 (0 - 4) = 1
    # v:  2 - 1/4 ((2 - 4) + 2 (2 - 0)) = 3/2;   3/2 - 1/4 ((3/2 - 4) + 2 (3/2)) = 11/8: the pull is to 0, not to 1
    alg = Ditto(mu=2.0).bind(Setup(Quadratic(), sgd()))
    down, mine = Model(vec(0)), Mine(vec(2))
    batch = Bowl(torch.eye(1).double(), vec(4)).batch._replace(lr=vec(0.25)[0])
    x = alg.start(down, mine, work())
    at = alg.step(Carry(x, alg.memory(x)), batch, down, mine)
    for _ in range(2):
        at = alg.personal_step(at, batch, down, mine)
    assert (at.x.w.item(), at.x.v.item()) == (1, 1.375)
    upload, kept = alg.finish(at.x, down, mine, work(examples=3))
    assert (upload.dw.item(), kept.v.item(), alg.weight(upload, work(examples=3))) == (1, 1.375, 3)
    assert alg.serve(down, kept).item() == 1.375
    assert Ditto(weighting="uniform").weight(upload, work(examples=3)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["lanes", "loop"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_common_model_is_fedavgs_bit_for_bit(world, optimizer, executor) -> None:
    table = {"model": MLP, "local": RAGGED | optimizer, "engine": {"executor": executor}}
    ours = ditto(world, algorithm={"mu": 0.7, "personal_epochs": 3}, **table)
    assert torch.equal(after(ours, 3).w, after(world(**table), 3).w)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["lanes", "loop"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_mu_0_is_local_training_bit_for_bit(world, optimizer, executor) -> None:
    table = {"model": MLP, "local": RAGGED | optimizer, "engine": {"executor": executor}}
    ours = ditto(world, algorithm={"mu": 0.0, "personal_epochs": RAGGED["epochs"]}, **table)
    alone = run(world(algorithm="local_only", **table), 3)[1]
    assert torch.equal(run(ours, 3)[1], alone)
    held = ditto(world, algorithm={"mu": 0.5, "personal_epochs": RAGGED["epochs"]}, **table)
    assert not torch.allclose(run(held, 3)[1], alone, rtol=1e-3)


def test_where_lr_mu_is_1_a_step_starts_from_the_common_model(world) -> None:
    """v - lr (g(v) + mu (v - w)) = w - lr g(v), whatever v was."""
    exp = ditto(world, algorithm={"mu": 2.0}, model=MLP)  # lr 1/2, one step on all data
    state, store = begin(exp), RamStore(3)
    for _ in range(3):
        w, before = state.server.w, served(exp, state, store)
        state, _ = advance(exp, state, store)
        for client, v in enumerate(served(exp, state, store)):
            expected = w - 0.5 * full_gradient(exp, client, before[client])
            torch.testing.assert_close(v, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mu", [0.1, 1.0, 10.0])
def test_many_small_steps_reach_the_proximal_point(mu) -> None:
    client, w = bowls(1)[0], vec(1, -2, 0.5)
    alg = Ditto(mu=mu).bind(Setup(Quadratic(), sgd()))
    down, mine = Model(w), Mine(vec(5, 5, 5))  # a start far away is forgotten
    x = alg.start(down, mine, work())
    at, batch = Carry(x, alg.memory(x)), client.batch._replace(lr=vec(0.05)[0])
    for _ in range(1500):
        at = alg.personal_step(at, batch, down, mine)
    torch.testing.assert_close(at.x.v, client.prox(w, mu), rtol=1e-10, atol=1e-10)
    assert torch.equal(at.x.w, w)


@pytest.mark.slow
def test_the_larger_mu_the_nearer_the_common_model(world) -> None:
    far = []
    for mu in (0.0, 0.1, 1.0, 4.0):
        state, v = run(ditto(world, algorithm={"mu": mu}, model=MLP, local=RAGGED), 8)
        far.append(float((v - state.server.w).norm()))
    assert far == sorted(far, reverse=True)
    assert far[-1] < 0.5 * far[0]


def test_each_model_has_an_optimizer_of_its_own() -> None:
    alg = Ditto(mu=0.0).bind(Setup(Quadratic(), sgd(momentum=0.5)))
    batch = Bowl(torch.eye(1).double(), vec(4)).batch._replace(lr=vec(0.25)[0])
    down, mine = Model(vec(0)), Mine(vec(8))
    x = alg.start(down, mine, work())
    at = alg.step(Carry(x, alg.memory(x)), batch, down, mine)
    assert at.memory == Both(vec(-4), vec(0))
    assert alg.personal_step(at, batch, down, mine).memory == Both(vec(-4), vec(4))


def test_personal_epochs_are_passes_over_all_data(world) -> None:
    """Two passes in one round are two rounds of one pass, where the common model stands still and batches are whole."""
    one = ditto(world, algorithm={"mu": 0.3, "server_lr": 1e-30}, model=MLP)
    two = ditto(world, algorithm={"mu": 0.3, "server_lr": 1e-30, "personal_epochs": 2}, model=MLP)
    torch.testing.assert_close(run(two, 1)[1], run(one, 2)[1], rtol=1e-5, atol=1e-6)


def test_who_does_not_take_part_keeps_its_model_and_a_late_joiner_starts_from_the_common_one(world) -> None:
    exp = ditto(world, model=MLP, local=RAGGED, cohort={"size": 1})
    state, store = begin(exp), RamStore(3)
    seen: set[int] = set()
    before = served(exp, state, store)
    for _ in range(8):
        now = exp.present(state.round).drawn.ids.tolist()
        sent = state.server.w
        newcomer = [i for i in now if i not in seen]
        assert all(torch.equal(before[i], sent) for i in newcomer)
        state, _ = advance(exp, state, store)
        seen.update(now)
        v = served(exp, state, store)
        for i in range(3):
            if i in now:
                assert not torch.equal(v[i], before[i])
            else:
                assert torch.equal(v[i], before[i] if i in seen else state.server.w)
        before = v
    assert seen == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["lanes", "loop"])
def test_a_client_with_one_example_learns_it(world, executor) -> None:
    exp = ditto(world, (1, 12, 7), model=MLP, local=RAGGED, engine={"executor": executor})
    _, v = run(exp, 10)
    assert v.isfinite().all()
    x, y = exp.federation.examples(exp.federation.train.rows[:1])
    assert exp.task.apply(v[0], x, exp.task.buffers0).argmax(1) == y


def test_only_the_common_model_travels(world) -> None:
    exp = ditto(world, model=MLP)
    state, _ = run(exp, 2)
    assert state.up == state.down == 2 * 3 * 4 * exp.task.size


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"algorithm": {"kind": "ditto", "mu": -1.0}}, "mu"),
        ({"algorithm": {"kind": "ditto", "personal_epochs": 0}}, "personal_epochs"),
        ({"algorithm": "ditto", "cohort": {"sampling": "proportional"}}, "sampling"),
    ],
)
def test_what_its_definition_excludes_is_refused(table, match) -> None:
    with pytest.raises(ConfigError, match=match):
        parse(table)


def test_a_pull_that_grows_is_warned_about() -> None:
    assert warnings_of(Ditto(mu=1.0), 0.1, 10) == []
    assert "local.lr x algorithm.mu is 2: proximal steps diverge" in warnings_of(Ditto(mu=20.0), 0.1, 10)[0]


@pytest.mark.slow
def test_it_learns_digits_of_which_each_client_has_four() -> None:
    table = {
        "rounds": 5,
        "seed": 1,
        "partition": {"kind": "pathological", "clients": 10, "per_client": 4, "holdout": 0.25},
        "evaluate": {"every": 5},
    }
    ours, theirs = fedloom.run("ditto", **table).summary, fedloom.run("fedavg", **table).summary
    assert ours["global/test/accuracy"].last == theirs["global/test/accuracy"].last
    assert ours["personal/post_fit/test/accuracy"].last > theirs["personal/pre_fit/test/accuracy"].last + 0.02
    assert ours["personal/post_fit/test/accuracy"].last > 0.93
