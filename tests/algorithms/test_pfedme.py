"""pFedMe against the Moreau envelope whose gradient it follows, and against FedAvg, which it is in a limit."""

from __future__ import annotations

import pytest
import torch

import fedloom
from fedloom.algorithm import Carry, Model, Setup, Update
from fedloom.algorithm.capabilities import warnings_of
from fedloom.algorithms.pfedme import Mine, Pair, PFedMe
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.runs.settings import parse
from support.personal import run, served
from support.quadratic import RAGGED, Bowl, Quadratic, after, bowls, hear, play, vec, visit, work

MLP = {"kind": "mlp", "widths": [5]}
LINE = Bowl(torch.eye(1).double(), vec(4))  # f = 1/2 (y - 4)^2


def pfedme(world, *args, **table):
    return world(*args, algorithm={"kind": "pfedme", **table.pop("algorithm", {})}, **table)


def test_hand_worked_numbers() -> None:
    # w = 0, lam = 1, inner_lr 1/4, lr 1/2, K = 2 inner steps
    # batch 1:  theta = 0 - 1/4 ((0 - 4) + (0 - 0)) = 1;          1 - 1/4 ((1 - 4) + (1 - 0)) = 3/2
    #           w = 0 - 1/2 (0 - 3/2) = 3/4
    # batch 2:  theta = 3/2 - 1/4 ((3/2 - 4) + (3/2 - 3/4)) = 31/16
    #           theta = 31/16 - 1/4 ((31/16 - 4) + (31/16 - 3/4)) = 31/16 + 1/4 * 7/8 = 69/32
    #           w = 3/4 - 1/2 (3/4 - 69/32) = 93/64
    alg = PFedMe(lam=1.0, inner_steps=2, inner_lr=0.25).bind(Setup(Quadratic(), sgd()))
    down = Model(vec(0))
    upload, mine, counts = visit(alg, LINE, down, Mine(vec(100)), 1, 0.5)  # the theta of the last round is not used
    assert (upload.dw.item(), mine.theta.item(), counts.item()) == (0.75, 1.5, 1)
    upload, mine, _ = visit(alg, LINE, down, Mine(vec(100)), 2, 0.5)
    assert (upload.dw.item(), mine.theta.item()) == (93 / 64, 69 / 32)
    assert alg.serve(down, mine).item() == 69 / 32


def test_the_server_goes_beta_of_the_way_to_the_mean() -> None:
    # from 10, models 11 and 15: their mean is 13, by 1 and 3 examples it is 14
    both = Update(vec(1, 5)[:, None])
    for beta, weights, expected in ((1.0, vec(1, 1), 13), (0.5, vec(1, 1), 11.5), (2.0, vec(1, 1), 16)):
        assert PFedMe(beta=beta).update(Model(vec(10)), hear(both, weights)).w.item() == expected
    assert PFedMe().update(Model(vec(10)), hear(both, vec(1, 3))).w.item() == 14
    assert PFedMe().weight(both, work(examples=7)) == 1
    assert PFedMe(weighting="samples").weight(both, work(examples=7)) == 7


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["lanes", "loop"])
def test_lambda_0_leaves_the_common_model_where_it_was(world, executor) -> None:
    exp = pfedme(world, algorithm={"lam": 0.0}, model=MLP, local=RAGGED, engine={"executor": executor})
    state, theta = run(exp, 3)
    assert torch.equal(state.server.w, exp.task.w0)
    assert (theta != exp.task.w0).any(1).all()


def test_lambda_0_trains_theta_by_k_plain_steps_on_each_batch(world) -> None:
    """On all data at once that is K epochs of FedAvg at the inner rate, each client alone."""
    exp = pfedme(world, algorithm={"lam": 0.0, "inner_steps": 4, "inner_lr": 0.2}, model=MLP)
    alone = world(algorithm="local_only", model=MLP, local={"batch": 0, "lr": 0.2, "epochs": 4})
    torch.testing.assert_close(run(exp, 1)[1], run(alone, 1)[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lam", [0.5, 2.0, 15.0])
def test_with_many_inner_steps_a_client_descends_its_moreau_envelope(lam) -> None:
    client, w, lr = bowls(1)[0], vec(1, -2, 0.5), 0.1
    alg = PFedMe(lam=lam, inner_steps=1500, inner_lr=0.05).bind(Setup(Quadratic(), sgd()))
    upload, mine, _ = visit(alg, client, Model(w), alg.join(Model(w)), 1, lr)
    point = client.prox(w, lam)
    torch.testing.assert_close(mine.theta, point, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(upload.dw, -lr * lam * (w - point), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_rounds_end_where_the_mean_envelope_is_least() -> None:
    """The envelope of 1/2 (w - b)' A (w - b) is 1/2 (w - b)' E (w - b) with E = lam A (A + lam)^-1."""
    clients, lam = bowls(4), 2.0
    E = [lam * c.A @ torch.linalg.inv(c.A + lam * torch.eye(3).double()) for c in clients]
    best = torch.linalg.solve(sum(E), sum(e @ c.b for e, c in zip(E, clients, strict=True)))
    found = play(PFedMe(lam=lam, inner_steps=80, inner_lr=0.1), clients, 60, lr=0.5)
    torch.testing.assert_close(found.server.w, best, rtol=1e-6, atol=1e-6)
    for k, client in enumerate(clients):
        torch.testing.assert_close(found.kept[k].theta, client.prox(best, lam), rtol=1e-5, atol=1e-5)


def test_one_inner_step_and_lr_lambda_1_is_fedavg_at_the_inner_rate(world) -> None:
    """Then w_k is theta after every batch, and the pull is never felt."""
    settings = {"inner_steps": 1, "inner_lr": 0.2, "lam": 4.0}
    ours = pfedme(world, algorithm=settings, model=MLP, local=RAGGED | {"lr": 0.25})
    theirs = world(algorithm={"kind": "fedavg", "weighting": "uniform"}, model=MLP, local=RAGGED)
    torch.testing.assert_close(after(ours, 3).w, after(theirs, 3).w, rtol=1e-5, atol=1e-6)


def test_the_local_optimizer_moves_w_only() -> None:
    alg = PFedMe(lam=1.0, inner_steps=1, inner_lr=0.25).bind(Setup(Quadratic(), sgd(momentum=0.5)))
    down, batch = Model(vec(0)), LINE.batch._replace(lr=vec(0.5)[0])
    x = alg.start(down, alg.join(down), work())
    at = Carry(x, alg.memory(x))
    at = alg.step(at, batch, down, alg.join(down))
    assert (at.x, at.memory) == (Pair(vec(0.5), vec(1)), vec(-1))  # theta = 1; the direction of w is 0 - 1
    at = alg.step(at, batch, down, alg.join(down))
    # theta = 1 - 1/4 ((1 - 4) + (1 - 1/2)) = 13/8;  direction 1/2 (-1) + (1/2 - 13/8) = -13/8;  w = 1/2 + 13/16
    assert at.x == Pair(vec(0.5 + 13 / 16), vec(13 / 8))


@pytest.mark.slow
def test_what_is_served_is_theta_and_it_changes_only_when_its_client_takes_part(world) -> None:
    exp = pfedme(world, model=MLP, local=RAGGED, cohort={"size": 1})
    state, store = begin(exp), RamStore(3)
    seen: set[int] = set()
    before = served(exp, state, store)
    for _ in range(8):
        now = exp.present(state.round).drawn.ids.tolist()
        state, _ = advance(exp, state, store)
        seen.update(now)
        theta = served(exp, state, store)
        for i in range(3):
            if i in now:
                assert not torch.equal(theta[i], before[i])
                assert not torch.equal(theta[i], state.server.w)  # not the model that is downloaded next
            else:
                assert torch.equal(theta[i], before[i] if i in seen else state.server.w)
        before = theta
    assert seen == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["lanes", "loop"])
def test_a_client_with_one_example_learns_it(world, executor) -> None:
    table = {"algorithm": {"inner_lr": 0.05}, "model": MLP, "local": RAGGED | {"lr": 0.1}}
    exp = pfedme(world, (1, 12, 7), engine={"executor": executor}, **table)
    _, theta = run(exp, 15)
    x, y = exp.federation.examples(exp.federation.train.rows[:1])
    assert exp.task.apply(theta[0], x, exp.task.buffers0).argmax(1) == y


def test_one_model_travels_each_way(world) -> None:
    exp = pfedme(world, model=MLP)
    state, _ = run(exp, 2)
    assert state.up == state.down == 2 * 3 * 4 * exp.task.size


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"algorithm": {"kind": "pfedme", "lam": -1.0}}, "lam"),
        ({"algorithm": {"kind": "pfedme", "beta": 0.0}}, "beta"),
        ({"algorithm": {"kind": "pfedme", "inner_steps": 0}}, "inner_steps"),
        ({"algorithm": "pfedme", "cohort": {"sampling": "proportional"}}, "sampling"),
    ],
)
def test_what_its_definition_excludes_is_refused(table, match) -> None:
    with pytest.raises(ConfigError, match=match):
        parse(table)


def test_steps_that_grow_are_warned_about() -> None:
    assert warnings_of(PFedMe(), 0.1, 10) == []
    assert [said.split()[0] for said in warnings_of(PFedMe(inner_lr=0.5), 0.2, 10)] == [
        "local.lr",
        "algorithm.inner_lr",
    ]


@pytest.mark.slow
def test_it_learns_digits_of_which_each_client_has_four() -> None:
    table = {
        "rounds": 10,
        "seed": 1,
        "partition": {"kind": "pathological", "clients": 10, "per_client": 4, "holdout": 0.25},
        "evaluate": {"every": 10},
    }
    ours, theirs = fedloom.run("pfedme", **table).summary, fedloom.run("fedavg", **table).summary
    assert ours["global/test/accuracy"].last > 0.8
    assert ours["personal/post_fit/test/accuracy"].last > theirs["personal/pre_fit/test/accuracy"].last
    assert ours["personal/post_fit/test/accuracy"].last > 0.93
