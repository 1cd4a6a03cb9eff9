"""APPLE against its steps worked by hand, against automatic differentiation, and where it is training alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.func import grad

import fedloom
from fedloom.algorithm import Carry, Inbox, Setup
from fedloom.algorithms.apple import Apple, Core, Mine, Server, mixed, scheduled
from fedloom.core.errors import ConfigError
from fedloom.core.optim import adam, sgd
from fedloom.engine import laws
from fedloom.engine.evaluate import evaluate, models_of
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse
from support import shared_laws
from support.blobs import blobs
from support.quadratic import RAGGED, Bowl, Quadratic, vec, work

OWN = {"kind": "apple", "p_init": "own", "p_lr": 0.0}
HOLDOUT = {"kind": "natural", "holdout": 0.3}


class Bowls(Quadratic):
    """Quadratic clients that all start at zero."""

    def __init__(self, size: int) -> None:
        self.w0 = torch.zeros(size).double()


def bound(size: int = 1, sizes=(1, 3), optimizer=None, **settings) -> Apple:
    return Apple(**settings).bind(Setup(Bowls(size), optimizer or sgd(), torch.tensor(sizes)))


def called(alg, down, mine, client: int, round_: int = 0) -> Carry:
    """A client that knows its number and the round."""
    x = alg.start(down, mine, work()._replace(client=torch.tensor(client), round=vec(round_)[0]))
    return Carry(x, alg.memory(x))


def run(exp, rounds: int, store=None):
    state, store = begin(exp), store or RamStore(exp.federation.clients)
    for _ in range(rounds):
        state, _ = advance(exp, state, store)
    return state, store


def kept(exp, state, store) -> Mine:
    return exp.given(state, store, torch.arange(exp.federation.clients)).mine


def served(exp, state, store) -> torch.Tensor:
    return torch.cat([part.w for part in models_of(exp, state, store, torch.arange(exp.federation.clients))])


def test_hand_worked_numbers() -> None:
    # client 0 of two with 1 and 3 examples: p0 = (1/4, 3/4); f = 1/2 (w - 4)^2; cores 2 and -2; p = (1/2, 1/4)
    # w = 1/2 * 2 - 1/4 * 2 = 1/2,  g = -7/2,  lr 1/2, p_lr 1/4, lambda mu = 1/2 in round 0:
    # c_0 = 2 + 1/2 * 1/2 * 7/2 = 23/8
    # p = (1/2, 1/4) - 1/4 ((-7, 7) + 1/2 (1/4, -1/2)) = (1/2 + 55/32, 1/4 - 27/16) = (71/32, -23/16)
    alg = bound(p_lr=0.25, mu=0.5)
    down = Server(vec(2, -2)[:, None], vec(0.25, 0.75))
    mine = Mine(vec(0.5, 0.25), vec(1, 0))
    batch = Bowl(torch.eye(1).double(), vec(4)).batch._replace(lr=vec(0.5)[0])
    at = alg.step(called(alg, down, mine, 0), batch, down, mine)
    assert (at.x.core.item(), at.x.p.tolist()) == (2.875, [2.21875, -1.4375])
    # the mixture has the new core in it, the other one as it was received
    assert at.x.w.item() == 2.21875 * 2.875 + 1.4375 * 2
    # and so has the next slope: <g, c_0> with the new c_0
    g = at.x.w.item() - 4
    then = alg.step(at, batch, down, mine).x
    assert then.core.item() == pytest.approx(2.875 - 0.5 * 2.21875 * g)
    assert then.p[0].item() == pytest.approx(2.21875 - 0.25 * (g * 2.875 + 0.5 * (2.21875 - 0.25)))
    assert then.p[1].item() == pytest.approx(-1.4375 - 0.25 * (g * -2 + 0.5 * (-1.4375 - 0.75)))
    upload, state = alg.finish(then, down, mine, work()._replace(client=torch.tensor(0)))
    assert (upload.core.item(), upload.client.item()) == (then.core.item(), 0)
    assert torch.equal(state.p, then.p)
    # the pull has faded to half of mu after L / 2 rounds, and is gone after L
    assert [called(alg, down, mine, 0, r).x.pull.item() for r in (0, 5, 10)] == pytest.approx([0.5, 0.25, 0])


def test_the_pull_fades_along_a_cosine() -> None:
    found = scheduled(torch.arange(6.0), 4).tolist()
    assert found == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0], abs=1e-7)


@pytest.mark.slow
def test_a_step_descends_the_loss_of_the_mixture_in_core_and_relationships() -> None:
    g = torch.Generator().manual_seed(0)
    cores, p = torch.randn(4, 3, generator=g).double(), torch.randn(4, generator=g).double()
    A = torch.randn(3, 3, generator=g).double()
    client, me = Bowl(A @ A.T, torch.randn(3, generator=g).double()), vec(0, 0, 1, 0)
    alg = bound(3, (1, 2, 3, 4), p_lr=0.3, mu=0.7)
    down, mine = Server(cores, vec(0.1, 0.2, 0.3, 0.4)), Mine(p, me)

    def objective(core, p):
        w = mixed(p, me, core, cores)
        return client.loss(w) + 0.7 / 2 * (p - down.p0).square().sum()

    by_core, by_p = grad(objective, (0, 1))(cores[2], p)
    x = alg.step(called(alg, down, mine, 2), client.batch._replace(lr=vec(0.1)[0]), down, mine).x
    torch.testing.assert_close(x.core, cores[2] - 0.1 * by_core)
    torch.testing.assert_close(x.p, p - 0.3 * by_p)
    torch.testing.assert_close(x.w, (p - 0.3 * by_p) @ torch.cat([cores[:2], x.core[None], cores[3:]]))


def test_the_server_puts_each_core_in_its_place() -> None:
    alg = bound(2, (1, 1, 2))
    server = alg.init(vec(5, 6))
    assert server.cores.tolist() == [[5, 6]] * 3
    assert server.p0.tolist() == [0.25, 0.25, 0.5]
    heard = Core(vec(1, 2, 3, 4).view(2, 2), torch.tensor([2, 0]))
    one = vec(1)[0]
    after = alg.update(server, Inbox(heard, one, one, one, one, heard, vec(1, 1)))
    assert after.cores.tolist() == [[3, 4], [5, 6], [1, 2]]
    assert after.w.tolist() == [0.25 * 3 + 0.25 * 5 + 0.5 * 1, 0.25 * 4 + 0.25 * 6 + 0.5 * 2]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["lanes", "loop"])
@pytest.mark.parametrize("cohort", [{"sampling": "all"}, {"size": 2}])
def test_all_its_own_with_fixed_relationships_it_is_training_alone(world, executor, cohort) -> None:
    rest = {"local": RAGGED, "partition": HOLDOUT, "engine": {"executor": executor}, "cohort": cohort}
    ours, alone = world((8, 12, 7, 5), algorithm=OWN, **rest), world((8, 12, 7, 5), algorithm="local_only", **rest)
    for rounds in (0, 1, 2, 4):
        mixture, own = (served(exp, *run(exp, rounds)) for exp in (ours, alone))
        assert torch.equal(mixture, own)
    found, expected = (evaluate(exp, *run(exp, 3)) for exp in (ours, alone))
    assert found["personal/pre_fit/test/loss"] == expected["personal/post_fit/test/loss"]


def test_every_core_comes_down_and_one_goes_up(world) -> None:
    exp = world((4, 12, 7, 5), algorithm="apple", local=RAGGED, cohort={"size": 2})
    state, store = begin(exp), RamStore(4)
    for t in (1, 2, 3):
        state, _ = advance(exp, state, store)
        assert state.up == t * 2 * 4 * exp.task.size
        assert state.down == t * 2 * 4 * (4 * exp.task.size)


def test_who_is_absent_keeps_its_core_and_its_relationships(world) -> None:
    exp = world((4, 12, 7, 5), algorithm={"kind": "apple", "p_lr": 0.01}, local=RAGGED, cohort={"size": 1})
    state, store = begin(exp), RamStore(4)
    cores, mine = state.server.cores, kept(exp, state, store)
    seen = set()
    for t in range(6):
        state, _ = advance(exp, state, store)
        here = int(exp.present(t).drawn.ids)
        seen.add(here)
        now = kept(exp, state, store)
        assert (state.server.cores != cores).any(1).nonzero().flatten().tolist() == [here]
        assert (now.p != mine.p).any(1).nonzero().flatten().tolist() == [here]
        cores, mine = state.server.cores, now
    assert len(seen) > 1
    assert mine.me.any(1).nonzero().flatten().tolist() == sorted(seen)  # each has learned its own number, and no other
    assert mine.me.argmax(1)[sorted(seen)].tolist() == sorted(seen)


@pytest.mark.parametrize("p_init", ["size", "own"])
def test_a_late_joiner_starts_from_what_it_would_have_started_from(world, p_init) -> None:
    exp = world((4, 12, 7, 5), algorithm={"kind": "apple", "p_init": p_init}, local=RAGGED, cohort={"size": 1})
    state, store = run(exp, 2)
    seen = {int(exp.present(t).drawn.ids) for t in range(2)}
    new = next(k for k in range(4) if k not in seen)
    fresh = served(exp, state, store)[new]
    if p_init == "own":
        assert torch.equal(fresh, exp.task.w0)
    else:  # what others have learned reaches it before it has trained
        torch.testing.assert_close(fresh, exp.federation.train.sizes / 28.0 @ state.server.cores)
        assert not torch.allclose(fresh, exp.task.w0)
    assert torch.equal(state.server.cores[new], exp.task.w0)
    at = called(exp.algorithm, state.server, exp.algorithm.join(state.server), new)
    expected = state.server.p0 if p_init == "size" else torch.eye(4)[new]
    assert torch.equal(at.x.p, expected)
    torch.testing.assert_close(at.x.w, fresh)


def test_one_client_of_one_example(world) -> None:
    """A federation of one: p0 = (1), and with fixed relationships it is training alone."""
    ours = world((1,), algorithm={"kind": "apple", "p_lr": 0.0}, local=RAGGED)
    alone = world((1,), algorithm="local_only", local=RAGGED)
    assert torch.equal(served(ours, *run(ours, 3)), served(alone, *run(alone, 3)))
    free = world((1,), algorithm="apple", local=RAGGED)
    state, store = run(free, 3)
    assert not torch.equal(kept(free, state, store).p, torch.ones(1, 1))
    assert served(free, state, store).isfinite().all()


@pytest.mark.slow
def test_without_a_pull_from_round_l_on_mu_does_not_matter(world) -> None:
    def after(mu, rounds, algorithm):
        exp = world(algorithm={"kind": "apple", "mu": mu, **algorithm}, local=RAGGED)
        return kept(exp, *run(exp, rounds)).p

    free = {"pull_rounds": 1, "p_lr": 0.1}
    assert not torch.allclose(after(0.0, 3, free), after(5.0, 3, free), rtol=1e-3)
    # in round 0 the pull is zero while p is p0 still, and the first step of each client is its only one
    one = {**free, "p_lr": 0.01}
    first = [world(algorithm={"kind": "apple", "mu": mu, **one}) for mu in (0.0, 5.0)]  # one full batch a round
    found = [kept(exp, *run(exp, 4)).p for exp in first]
    assert torch.equal(*found)


def test_the_optimizer_moves_the_core_and_remembers_only_it(world) -> None:
    alg = bound(2, optimizer=adam())
    server = alg.init(vec(1, 2))
    at = called(alg, server, alg.join(server), 1)
    assert at.memory.m.shape == (2,)
    exp = world(algorithm="apple", local={**RAGGED, "momentum": 0.9, "state": "persist"})
    state, store = run(exp, 2)
    memory = exp.given(state, store, torch.arange(3)).memory
    assert memory.shape == state.server.cores.shape
    assert memory.any()


def test_a_client_that_diverges_keeps_what_it_had(world) -> None:
    arrays = blobs((4, 12, 7))
    x = arrays.x.copy()
    x[4:16] *= 1e25
    exp = world(arrays=arrays._replace(x=x), algorithm="apple", local=RAGGED)
    state, store = begin(exp), RamStore(3)
    for _ in range(2):
        state, excluded = advance(exp, state, store)
        assert excluded == (1,)
    assert torch.equal(state.server.cores[1], exp.task.w0)
    assert not kept(exp, state, store).me[1].any()


def test_there_is_no_common_model_and_nobody_is_drawn_twice(world) -> None:
    exp = world((8, 12, 7), algorithm="apple", partition=HOLDOUT, local=RAGGED)
    found = evaluate(exp, *run(exp, 1))
    assert found
    assert all(name.startswith("personal/pre_fit/") for name in found)
    with pytest.raises(ConfigError, match="sampling"):
        parse({"algorithm": "apple", "cohort": {"sampling": "proportional"}})


TWINS = {"kind": "pathological", "clients": 10, "holdout": 0.25}  # 0 and 1 hold the same two classes, 2 and 3, ...


@pytest.mark.slow
def test_it_learns_which_clients_to_weigh() -> None:
    """Of two clients with the same classes the second has more data, and both come to take most of its core."""
    table = {"data": "digits", "algorithm": "apple", "partition": TWINS, "cohort": {"sampling": "all"}}
    exp = prepare(parse(table), Path()).experiment
    state, store = run(exp, 8)
    assert kept(exp, state, store).p.argmax(1).tolist() == [1, 1, 3, 3, 5, 5, 7, 7, 9, 9]


@pytest.mark.slow
def test_it_learns_digits() -> None:
    history = fedloom.run("apple", data="digits", rounds=12, partition=TWINS, cohort={"sampling": "all"})
    assert history.summary["personal/pre_fit/test/accuracy"].last > 0.97


# -- a limit on downloads --------------------------------------------------------------------------
def test_a_client_receives_the_cores_of_which_it_takes_the_most() -> None:
    alg = bound(sizes=(1, 1, 1, 1), downloads=2)
    down = Server(vec(10, 20, 30, 40)[:, None], vec(0.25, 0.25, 0.25, 0.25))
    mine = Mine(vec(0.9, -0.5, 0.1, 0.2), vec(1, 0, 0, 0), vec(1, 2, 3, 4)[:, None])
    # its own it has, and of the others the second and the fourth count most; the third is as it was
    assert alg.held(down, mine)[:, 0].tolist() == [10, 20, 3, 40]
    assert alg.serve(down, mine).item() == pytest.approx(0.9 * 10 - 0.5 * 20 + 0.1 * 3 + 0.2 * 40)
    _, after = alg.finish(called(alg, down, mine, 0).x, down, mine, work()._replace(client=torch.tensor(0)))
    assert after.cores[:, 0].tolist() == [10, 20, 3, 40]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["lanes", "loop"])
def test_limited_downloads_cost_so_many_bytes_and_all_of_them_change_nothing(world, executor) -> None:
    table = {"local": RAGGED, "engine": {"executor": executor}}
    free, all_, one = (
        world(algorithm={"kind": "apple", "p_lr": 0.1, **own}, **table)
        for own in ({}, {"downloads": 3}, {"downloads": 1})
    )
    (plain, _), (whole, _), (limited, _) = (run(exp, 3) for exp in (free, all_, one))
    torch.testing.assert_close(plain.server.cores, whole.server.cores)
    assert not torch.allclose(plain.server.cores, limited.server.cores)
    assert plain.down == whole.down == 3 * limited.down == 3 * 3 * 3 * 4 * free.task.size


class Limited(Apple):
    downloads: int | None = 1
    p_lr: float = 0.1


@pytest.mark.slow
@pytest.mark.usefixtures("shared_laws")
@shared_laws.EVERY
def test_laws_with_limited_downloads(law) -> None:
    assert laws.verdict(law, Limited) == ""
