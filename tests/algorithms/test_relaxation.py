"""FedProx + Relaxation against FedProx, and against what damping does to errors and to noise."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from fedloom.algorithm import Inbox, Model, Update
from fedloom.algorithms.relaxation import Relaxation
from fedloom.core.errors import ConfigError
from fedloom.engine.curvature import Moves
from fedloom.engine.diagnose import gamma
from fedloom.engine.local import train
from fedloom.engine.rounds import advance, advance_watched, begin
from fedloom.engine.store import RamStore
from fedloom.engine.training import groups_of
from fedloom.runs.settings import parse
from support.blobs import blobs
from support.quadratic import RAGGED, Bowl, after, bowls, play, vec


def relaxed(world, **settings):
    return after(world(algorithm={"kind": "relaxation", **settings}, local=RAGGED), 2).w


def prox(world, **settings):
    return after(world(algorithm={"kind": "fedprox", **settings}, local=RAGGED), 2).w


def test_hand_worked_numbers() -> None:
    # two clients at (11, 10) and (10, 12) with 1 and 3 examples: their average is (10.25, 11.5);
    # a fifth of (10, 10) and four fifths of the average
    heard = Inbox(Update(vec(1 * 1 + 3 * 0, 1 * 0 + 3 * 2)), vec(4)[0], vec(2)[0], vec(2)[0], vec(4)[0])
    found = Relaxation(alpha=0.2).update(Model(vec(10, 10)), heard).w
    torch.testing.assert_close(found, 0.2 * vec(10, 10) + 0.8 * vec(10.25, 11.5))


def test_r1_alpha_0_is_fedprox_bit_for_bit(world) -> None:
    assert torch.equal(relaxed(world, alpha=0.0, mu=0.3), prox(world, mu=0.3))


def test_r2_is_fedprox_with_a_server_rate_of_1_minus_alpha(world) -> None:
    torch.testing.assert_close(relaxed(world, alpha=0.3, mu=0.3), prox(world, mu=0.3, server_lr=0.7))


def test_r3_the_step_scales_by_1_minus_alpha(world) -> None:
    w0 = world().task.w0
    steps = {}
    for alpha in (0.0, 0.25, 0.9):
        exp = world(algorithm={"kind": "relaxation", "alpha": alpha}, local=RAGGED)
        steps[alpha] = (after(exp).w - w0).norm()
    assert steps[0.25] / steps[0.0] == pytest.approx(0.75, rel=1e-5)
    assert steps[0.9] / steps[0.0] == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.6, -0.5])
def test_r4_an_error_shrinks_by_its_factor_along_each_eigenvector(alpha) -> None:
    """All clients alike, exact proximal steps: 1 - (1 - alpha) lambda / (lambda + mu)."""
    client, mu, w = bowls(1, seed=4)[0], 1.0, vec(3, -1, 2)
    values, vectors = torch.linalg.eigh(client.A)
    method = Relaxation(alpha=alpha, mu=mu, allow_over_relaxation=True)
    path = play(method, [client, client], 3, steps=400, lr=0.2, w=w).path
    factor = 1 - (1 - alpha) * values / (values + mu)
    for before, now in pairwise(path):
        torch.testing.assert_close(vectors.T @ (now - client.b), factor * (vectors.T @ (before - client.b)))


def test_r4b_the_more_relaxed_the_slower_to_the_optimum() -> None:
    client, w = bowls(1, seed=4)[0], vec(3, -1, 2)
    left = [
        float((play(Relaxation(alpha=a), [client], 10, steps=100, lr=0.2, w=w).server.w - client.b).norm())
        for a in (0.0, 0.1, 0.5, 0.9)
    ]
    assert left == sorted(left)


def test_r5_near_alpha_1_nothing_moves_and_1_is_refused(world) -> None:
    assert (relaxed(world, alpha=1 - 1e-9) - world().task.w0).abs().max() < 1e-7
    with pytest.raises(ConfigError, match="alpha"):
        parse({"algorithm": {"kind": "relaxation", "alpha": 1.0}})


def test_r6_mu_0_and_alpha_0_is_fedavg_bit_for_bit(world) -> None:
    assert torch.equal(relaxed(world, alpha=0.0, mu=0.0), after(world(local=RAGGED), 2).w)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_r7_a_convex_loss_is_at_most_the_mean_of_the_ends(world, alpha) -> None:
    exp = world(algorithm={"kind": "relaxation", "alpha": alpha}, local={"batch": 3, "lr": 2.0, "epochs": 3})
    whole = world(algorithm={"kind": "relaxation", "alpha": 0.0}, local={"batch": 3, "lr": 2.0, "epochs": 3})
    x, y = exp.federation.examples(exp.federation.train.rows)

    def f(w):
        return nn.functional.cross_entropy(exp.task.apply(w, x, exp.task.buffers0), y)

    assert f(after(exp).w) <= alpha * f(exp.task.w0) + (1 - alpha) * f(after(whole).w) + 1e-6


@pytest.mark.slow
def test_r8_running_statistics_are_relaxed_like_the_model(world) -> None:
    arrays = blobs((8, 8, 8), features=16)
    images = arrays._replace(x=arrays.x.reshape(-1, 1, 4, 4).repeat(4, axis=2).repeat(4, axis=3))

    def statistics(alpha):
        exp = world(
            arrays=images,
            algorithm={"kind": "relaxation", "alpha": alpha},
            model={"kind": "resnet20", "norm": "batch"},
            local={"batch": 0, "lr": 0.01},
        )
        return exp.task.buffers0, advance(exp, begin(exp), RamStore(3))[0].buffers

    old, average = statistics(0.0)
    torch.testing.assert_close(statistics(0.5)[1], 0.5 * old + 0.5 * average)


@pytest.mark.parametrize("h", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_noise_of_the_cohort_is_damped_as_the_docstring_says(alpha, h) -> None:
    """With clients that go the part h of the way, by (1 - alpha) (2 - h) / (2 - (1 - alpha) h) in variance.

    The response to one unit of noise, summed in squares over all later rounds, is the stationary variance.
    """

    def variance(alpha):
        method, w, total = Relaxation(alpha=alpha), vec(0.0), 0.0
        for t in range(600):
            move = Update(1.0 - 0 * w if t == 0 else -h * w)
            w = method.update(Model(w), Inbox(move, *(vec(1)[0] for _ in range(4)))).w
            total += float(w.square().sum())
        return total

    ratio = variance(alpha) / variance(0.0)
    assert ratio == pytest.approx((1 - alpha) * (2 - h) / (2 - (1 - alpha) * h), rel=1e-9)
    ends = sorted([1 - alpha, (1 - alpha) / (1 + alpha)])
    assert ends[0] - 1e-12 <= ratio <= ends[1] + 1e-12
    if h == 1.0:
        assert ratio == pytest.approx((1 - alpha) / (1 + alpha))


def test_a_client_alone_is_mixed_with_what_it_was_sent() -> None:
    # lr 1/2, one step of 1/2 (v - 4)^2 from 0 is 2; a quarter of 0 and three quarters of 2
    client = Bowl(torch.eye(1).double(), vec(4))
    assert play(Relaxation(alpha=0.25), [client], 1, lr=0.5).server.w.item() == 1.5


def test_no_work_is_no_movement() -> None:
    assert torch.equal(play(Relaxation(), bowls(2), 1, steps=0, w=vec(1, 2, 3)).server.w, vec(1, 2, 3))


def test_server_rate_and_relaxation_multiply(world) -> None:
    ours = relaxed(world, alpha=0.5, server_lr=0.5, mu=0.3)
    torch.testing.assert_close(ours, prox(world, mu=0.3, server_lr=0.25))


def test_to_extrapolate_is_a_decision() -> None:
    with pytest.raises(ConfigError, match="allow_over_relaxation"):
        parse({"algorithm": {"kind": "relaxation", "alpha": -0.2}})
    assert parse({"algorithm": {"kind": "relaxation", "alpha": -0.2, "allow_over_relaxation": True}})
    with pytest.raises(ConfigError, match="alpha"):
        parse({"algorithm": {"kind": "relaxation", "alpha": -1.0, "allow_over_relaxation": True}})


@pytest.mark.parametrize("broadcast", ["cohort", "all"])
def test_broadcast_to_all_costs_downlink_and_changes_nothing_else(world, broadcast) -> None:
    def run(**settings):
        exp = world(algorithm={"kind": "relaxation", **settings}, cohort={"size": 2})
        return exp, advance(exp, begin(exp), RamStore(3))[0]

    exp, state = run(broadcast=broadcast)
    assert state.up == 2 * 4 * exp.task.size
    assert state.down == (3 if broadcast == "all" else 2) * 4 * exp.task.size
    assert torch.equal(state.server.w, run()[1].server.w)


# -- trained until the local problem is solved -------------------------------------------------------
def targeted(world, target, **table):
    settings = {"kind": "relaxation", "mu": 0.5}
    algorithm = settings if target is None else settings | {"gamma_target": target}
    return world(**({"algorithm": algorithm, "local": RAGGED | {"epochs": 6}} | table))


def per_client(exp, state):
    """The gamma of each client in the next round, by the diagnostic, which knows nothing of the target."""
    store, found = RamStore(exp.federation.clients), {}
    for group in groups_of(exp, state.round, exp.present(state.round)):
        with torch.no_grad():
            done = train(exp.algorithm, exp.federation, group, exp.given(state, store, group.ids), watched=True)
        for k, client in enumerate(group.ids.tolist()):
            moves = Moves(group.ids[k : k + 1], (done.models - state.server.w)[k : k + 1], done.weights[k : k + 1])
            found[client] = gamma(exp, moves, state.server.w)["gamma/max"], int(done.steps[k])
    return [found[client] for client in sorted(found)]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["lanes", "loop"])
def test_a_target_that_is_never_met_is_no_target(world, executor) -> None:
    engine = {"executor": executor}
    never, none = (after(targeted(world, target, engine=engine), 3).w for target in (1e-9, None))
    assert torch.equal(never, none)


@pytest.mark.parametrize("executor", ["lanes", "loop"])
def test_a_loose_target_is_met_after_one_epoch(world, executor) -> None:
    engine = {"executor": executor}
    exp = targeted(world, 1e9, engine=engine)
    one = targeted(world, None, engine=engine, local=RAGGED | {"epochs": 1})
    assert torch.equal(after(exp, 3).w, after(one, 3).w)
    done = advance_watched(exp, begin(exp), RamStore(3))
    assert [did.steps for did in sorted(done.work)] == [2, 4, 3]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["lanes", "loop"])
def test_who_stops_has_met_the_target_and_who_has_not_goes_on_to_the_end(world, executor) -> None:
    steps, epochs = set(), {"local": RAGGED | {"epochs": 30}, "engine": {"executor": executor}}
    for target in (0.9, 0.6, 0.3, 0.15):
        exp = targeted(world, target, **epochs)
        state = begin(exp)
        for (reached, taken), per_epoch in zip(per_client(exp, state), (2, 4, 3), strict=True):
            assert taken % per_epoch == 0
            assert reached <= target * (1 + 1e-4) or taken == 30 * per_epoch
            steps.add(taken // per_epoch)
        for client, (_, taken) in enumerate(per_client(exp, state)):
            epochs_done = taken // (2, 4, 3)[client]
            if epochs_done > 1:  # an epoch earlier it had not been met
                less = targeted(world, None, local=RAGGED | {"epochs": epochs_done - 1}, engine=epochs["engine"])
                assert per_client(less, state)[client][0] > target * (1 - 1e-4)
    assert len(steps) > 3


def test_steps_that_were_taken_are_what_a_round_tells(world) -> None:
    exp = targeted(world, 0.4, local=RAGGED | {"epochs": 20}, evaluate={"diagnostics": ["gamma"]})
    want = [taken for _, taken in per_client(exp, begin(exp))]
    done = advance_watched(exp, begin(exp), RamStore(3))
    assert [did.steps for did in sorted(done.work)] == want
    assert len(set(want)) > 1
    assert max(want) < 20 * 4
    assert done.found["gamma/max"] <= 0.4 * (1 + 1e-4)


def test_of_exact_steps_no_more_are_taken_than_asked_for(world) -> None:
    exp = targeted(world, 1e-9, local={"batch": 3, "lr": 0.2, "steps": 5})
    done = advance_watched(exp, begin(exp), RamStore(3))
    assert [did.steps for did in done.work] == [5, 5, 5]
    assert torch.equal(done.state.server.w, after(targeted(world, None, local={"batch": 3, "lr": 0.2, "steps": 5})).w)


def test_a_target_is_a_positive_number() -> None:
    with pytest.raises(ConfigError, match="gamma_target"):
        parse({"algorithm": {"kind": "relaxation", "gamma_target": 0.0}})
