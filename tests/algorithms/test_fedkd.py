"""FedKD: the losses against their definition, the truncation against linear algebra, the bytes against its ranks."""

from __future__ import annotations

import dataclasses
import math
from itertools import islice

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss, softmax

import fedloom
from fedloom.algorithm import Carry, Inbox, Setup, like
from fedloom.algorithms.fedkd import Factored, FedKD, Mine, Pair, Server, factored, rank, truncated
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.core.task import Batch, Task
from fedloom.engine.evaluate import evaluate, models_of
from fedloom.engine.forecast import forecast
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.models.net import Net
from fedloom.runs.settings import parse
from support.blobs import blobs
from support.quadratic import RAGGED, vec, work

MLP = {"kind": "mlp", "widths": [5]}
WIDE = {"kind": "mlp", "widths": [24]}
HOLDOUT = {"kind": "natural", "holdout": 0.3}
HALF = torch.tensor(0.5).double()


def batch_of(x, y, mask=None, lr: float = 0.1) -> Batch:
    zero = torch.zeros(())
    mask = torch.ones(len(x)) if mask is None else mask
    return Batch(x, y, mask, zero.long(), zero, zero + lr, torch.zeros(0))


def fedkd(body: nn.Module, features: int, classes: int, **settings) -> FedKD:
    torch.manual_seed(0)
    return FedKD(**settings).bind(Setup(Task(Net(body, features, classes)), sgd()))


def nowhere(alg) -> tuple[Server, Mine]:
    """What a step is given and has no use for."""
    down = alg.init(alg.task.w0)
    return down, alg.join(down)


def pair_of(alg, seed: int = 0) -> Pair:
    """A mentor, a mentee and a projection that disagree."""
    g = torch.Generator().manual_seed(seed)
    w, F = alg.task.w0, alg.features()
    away = [w + 0.5 * torch.randn(w.shape, generator=g) for _ in range(2)]
    return Pair(away[0], torch.eye(F) + 0.3 * torch.randn(F, F, generator=g), away[1])


def run(exp, rounds: int):
    state, store = begin(exp), RamStore(exp.federation.clients)
    for _ in range(rounds):
        state, _ = advance(exp, state, store)
    return state, store


def kept(exp, state, store) -> Mine:
    return exp.given(state, store, torch.arange(exp.federation.clients)).mine


# -- what is learned -------------------------------------------------------------------------------
def test_hand_worked_losses() -> None:
    # one input x = 1 through a body of one weight and a head without bias terms in it: the mentor's hidden state
    # is 2 and its logits (0, 0); the mentee's is 1 and its logits (log 3, 0); the class is 0, and W_h = 3
    alg = fedkd(nn.Linear(1, 1, bias=False), 1, 2)
    mentor = torch.tensor([2.0, 0, 0, 0, 0])  # body, head's weights, head's biases
    mentee = torch.tensor([1.0, math.log(3), 0, 0, 0])
    x = Pair(mentor, torch.tensor([[3.0]]), mentee)
    batch = batch_of(torch.ones(1, 1), torch.zeros(1, dtype=torch.long))
    c_t, c_s = math.log(2), math.log(4 / 3)
    to_mentee = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)  # KL(mentee || mentor), of L_t
    to_mentor = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)  # KL(mentor || mentee), of L_s
    hidden = (2 - 3 * 1) ** 2
    expected = c_t + c_s + (to_mentee + to_mentor + hidden) / (c_t + c_s)
    assert alg.loss(x, batch, *nowhere(alg)).item() == pytest.approx(expected, rel=1e-6)
    # W_h moves along c times the slope of (2 - 3)^2, which is -2 (2 - 3) * 1
    g = alg.gradient(x, batch, *nowhere(alg))
    assert g.W_h.item() == pytest.approx(2 / (c_t + c_s), rel=1e-6)
    # the biases of the mentor's head: p - onehot from C_t, and c (p - q) from the divergence, p = 1/2, q = (3/4, 1/4)
    assert g.w[3].item() == pytest.approx(0.5 - 1 + (0.5 - 0.75) / (c_t + c_s), rel=1e-6)
    assert g.mentee[3].item() == pytest.approx(0.75 - 1 + (0.75 - 0.5) / (c_t + c_s), abs=1e-6)


def test_each_model_follows_its_own_loss() -> None:
    """The three gradients are those of L_t by the mentor, L_s by the mentee and L_h by W_h, the weight c held."""
    alg = fedkd(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), 6, 3)
    g = torch.Generator().manual_seed(1)
    batch = batch_of(torch.randn(9, 4, generator=g), torch.randint(0, 3, (9,), generator=g))
    x, task = pair_of(alg), alg.task
    c = 1 / (task.loss(x.w, batch) + task.loss(x.mentee, batch))

    def total(own, other, hidden):
        divergence = kl_div(
            log_softmax(task.logits(own, batch), 1), softmax(task.logits(other, batch), 1), reduction="batchmean"
        )
        return cross_entropy(task.logits(own, batch), batch.y) + c * divergence + c * hidden

    def apart(mentor, W, mentee):
        return mse_loss(task.encode(mentor, batch), task.encode(mentee, batch) @ W.T)

    found = alg.gradient(x, batch, *nowhere(alg))
    for ours, theirs in (
        (found.w, task.differentiate(lambda v: total(v, x.mentee, apart(v, x.W_h, x.mentee)), x.w)),
        (found.mentee, task.differentiate(lambda v: total(v, x.w, apart(x.w, x.W_h, v)), x.mentee)),
        (found.W_h, task.differentiate(lambda W: c * apart(x.w, W, x.mentee), x.W_h)),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_models_that_agree_learn_only_from_their_data() -> None:
    alg = fedkd(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), 6, 3)
    batch = batch_of(torch.randn(5, 4, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 1, 2, 0, 1]))
    down, mine = nowhere(alg)
    x = alg.start(down, mine, work())  # both start from the initial model, W_h from the identity
    assert torch.equal(x.w, x.mentee)
    g = alg.gradient(x, batch, down, mine)
    plain = alg.task.grad(x.w, batch)
    torch.testing.assert_close(g.w, plain)
    torch.testing.assert_close(g.mentee, plain)
    assert not g.W_h.any()


def test_mentor_and_projection_step_at_lr_and_the_mentee_at_its_own() -> None:
    alg = fedkd(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), 6, 3, mentee_lr=0.03)
    batch = batch_of(torch.randn(5, 4, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 1, 2, 0, 1]))
    x, given = pair_of(alg), nowhere(alg)
    g = alg.gradient(x, batch, *given)
    after = alg.step(Carry(x, ()), batch, *given).x
    torch.testing.assert_close(after.w, x.w - 0.1 * g.w)
    torch.testing.assert_close(after.W_h, x.W_h - 0.1 * g.W_h)
    torch.testing.assert_close(after.mentee, x.mentee - 0.03 * g.mentee)
    # with momentum too, each has its own memory and its own rate
    heavy = alg.bind(Setup(alg.task, sgd(momentum=0.5)))
    at = Carry(x, heavy.optimizer.init(x))
    first = heavy.step(at, batch, *given)
    again = heavy.gradient(first.x, batch, *given)
    second = heavy.step(first, batch, *given).x
    torch.testing.assert_close(second.mentee, first.x.mentee - 0.03 * (0.5 * g.mentee + again.mentee))
    torch.testing.assert_close(second.w, first.x.w - 0.1 * (0.5 * g.w + again.w))


def test_padding_does_not_count() -> None:
    alg = fedkd(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), 6, 3)
    g = torch.Generator().manual_seed(4)
    rows, y = torch.randn(6, 4, generator=g), torch.randint(0, 3, (6,), generator=g)
    padded = batch_of(rows, y, torch.tensor([1.0, 1, 1, 1, 0, 0]))
    x, given = pair_of(alg), nowhere(alg)
    torch.testing.assert_close(alg.loss(x, padded, *given), alg.loss(x, batch_of(rows[:4], y[:4]), *given))


def test_models_that_are_certain_and_right_do_not_divide_by_zero() -> None:
    alg = fedkd(nn.Linear(1, 1, bias=False), 1, 2)
    sure = torch.tensor([1.0, 200, -200, 0, 0])
    batch = batch_of(torch.ones(1, 1), torch.zeros(1, dtype=torch.long))
    assert alg.task.loss(sure, batch) == 0
    g = alg.gradient(Pair(sure, torch.eye(1), sure), batch, *nowhere(alg))
    assert g.w.isfinite().all()
    assert not g.mentee.any()


# -- what travels ----------------------------------------------------------------------------------
def test_hand_worked_ranks() -> None:
    # squares 16, 9, 0 of 25: one value holds 0.64 of them
    s = torch.tensor([4.0, 3.0, 0.0])
    found = [rank(s, torch.tensor(T).double()).item() for T in (0.1, 0.64, 0.65, 1.0)]
    assert found == [1, 1, 2, 2]
    assert rank(torch.zeros(3), HALF) == 1  # of nothing, one is enough


def test_the_rank_is_full_where_no_shorter_sum_is_enough() -> None:
    """Nine of ten equal values hold 0.9 of the squares: less than 0.95, and the rank is ten, not zero."""
    enough = torch.tensor(0.95).double()
    assert rank(torch.ones(10), enough) == 10
    head = torch.randn(10, 512, generator=torch.Generator().manual_seed(0))
    s = torch.linalg.svdvals(head)
    assert s[:9].square().sum() / s.square().sum() < 0.95
    assert rank(s, enough) == 10
    sent = truncated(head, enough)
    assert torch.equal(sent.dw, head)
    assert sent.numbers == 5120  # the matrix itself, which is less than 10 * (10 + 512 + 1)


@pytest.mark.parametrize("energy", [0.3, 0.9, 0.95, 0.999])
def test_truncation_is_the_best_matrix_of_the_least_rank(energy) -> None:
    g = torch.Generator().manual_seed(1)
    M = torch.randn(40, 30, generator=g) @ torch.diag(0.6 ** torch.arange(30.0)) @ torch.randn(30, 30, generator=g)
    sent = truncated(M, torch.tensor(energy).double())
    U, s, Vh = torch.linalg.svd(M.double())
    share = s.square().cumsum(0) / s.square().sum()
    r = next(k for k in range(1, 31) if share[k - 1] >= energy)
    torch.testing.assert_close(sent.dw.double(), (U[:, :r] * s[:r]) @ Vh[:r], rtol=1e-4, atol=1e-5)
    assert sent.numbers == r * (40 + 30 + 1)
    assert sent.dw.square().sum() >= (energy - 1e-6) * M.square().sum()


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_with_all_the_energy_nothing_is_lost(rows) -> None:
    g = torch.Generator().manual_seed(2)
    tall = torch.randn(rows, 3, generator=g) @ torch.randn(3, 50, generator=g)  # of rank 3: factors are shorter
    small = tall + 1e-3 * torch.randn(rows, 50, generator=g)  # of full rank, most values small
    for M in (tall, small, torch.randn(rows, 50, generator=g)):
        sent = truncated(M, torch.ones(()).double())
        torch.testing.assert_close(sent.dw, M, rtol=1e-5, atol=1e-5)
        assert sent.numbers <= M.numel()


def test_kernels_are_matrices_and_vectors_are_whole() -> None:
    g = torch.Generator().manual_seed(3)
    kernel = torch.randn(8, 1, generator=g) * torch.randn(1, 2 * 3 * 3, generator=g)  # 8 outputs, of rank 1
    bias = torch.randn(8, generator=g)
    shapes = [torch.Size((8, 2, 3, 3)), torch.Size((8,))]
    sent = factored(torch.cat([kernel.flatten(), bias]), shapes, HALF)
    torch.testing.assert_close(sent.dw[:144], kernel.flatten(), rtol=1e-5, atol=1e-6)
    assert torch.equal(sent.dw[144:], bias)
    assert sent.numbers == 1 * (8 + 18 + 1) + 8


def test_many_updates_at_once_are_each_alone() -> None:
    g = torch.Generator().manual_seed(4)
    shapes = [torch.Size((12, 9)), torch.Size((12,)), torch.Size((4, 12)), torch.Size((4,))]
    many = torch.randn(5, 172, generator=g) * 0.1 ** torch.arange(5)[:, None]
    energy = torch.tensor(0.6).double()
    together = vmap(lambda dw: factored(dw, shapes, energy))(many)
    for k in range(5):
        alone = factored(many[k], shapes, energy)
        torch.testing.assert_close(together.dw[k], alone.dw, rtol=1e-4, atol=1e-6)
        assert together.numbers[k] == alone.numbers
        assert torch.equal(alone.dw, factored(many[k], shapes, energy).dw)
        assert alone.numbers < 172


def test_what_is_not_finite_passes_and_does_not_raise() -> None:
    """The engine leaves such a client out; the decomposition must not stop the others."""
    M = torch.eye(30)
    for bad in (math.nan, math.inf):
        broken = M.clone()
        broken[3, 4] = bad
        sent = vmap(lambda A: truncated(A, HALF))(torch.stack([M, broken]))
        assert sent.dw[0].isfinite().all()
        assert not sent.dw[1].isfinite().all()


def test_the_energy_rises_over_the_rounds_and_stays() -> None:
    alg = FedKD(energy_rounds=10)
    found = [alg.energy(torch.tensor(float(t))).item() for t in (0, 5, 10, 20)]
    assert found == pytest.approx([0.95, 0.965, 0.98, 0.98])


def test_the_server_cuts_the_plain_mean_down() -> None:
    alg = fedkd(nn.Linear(20, 20, bias=False), 20, 3, energy_start=0.5, energy_end=0.5)
    g = torch.Generator().manual_seed(5)
    moves = torch.randn(2, alg.task.size, generator=g)
    heard = Factored(moves.double().sum(0), torch.tensor(100.0).double())
    one = vec(1)[0]
    server = Server(alg.task.w0, torch.tensor(3.0), torch.tensor(7))
    after = alg.update(server, Inbox(heard, 2 * one, 2 * one, one, one))
    expected = factored(moves.mean(0), alg.shapes(), HALF)
    torch.testing.assert_close(after.w, server.w + expected.dw, rtol=1e-5, atol=1e-5)
    assert (after.t, after.numbers) == (4, expected.numbers)
    assert alg.weight(Factored(moves[0], one), work(examples=7)) == 1


def test_bytes_are_those_of_the_factors(world) -> None:
    exp = world((4, 12, 7), algorithm="fedkd", model=WIDE, local=RAGGED, cohort={"size": 2})
    state, store, P = begin(exp), RamStore(3), exp.task.size
    sent = [P]  # the initial model is sent whole
    for t in range(3):
        before = state
        state, _ = advance(exp, state, store)
        sent.append(int(state.server.numbers))
        assert state.down - before.down == 3 * 4 * sent[t]  # to all three, so that nobody falls behind
        assert 0 < state.up - before.up < 2 * 4 * P
    assert max(sent[1:]) < P
    foreseen = next(islice(forecast(exp), 2, None)).bytes  # which only knows the most that it can be
    assert state.up + state.down < foreseen == 3 * 4 * P * (3 + 2)
    uploads = Factored(torch.zeros(2, P), torch.tensor([10, 30]))
    assert exp.algorithm.upload_bytes(uploads) == 160


class Whole(FedKD):
    """FedKD that sends updates as they are."""

    def finish(self, x, down, mine, work):
        return Factored(x.mentee - down.w, torch.tensor(len(down.w))), Mine(x.w, x.W_h)

    def update(self, server, inbox):
        return Server(server.w + like(inbox.mean.dw, server.w), server.t + 1, server.numbers)


@pytest.mark.slow
def test_with_all_the_energy_a_run_loses_nothing(world) -> None:
    rest = {"model": WIDE, "local": RAGGED}
    exp = world((9, 12, 7), algorithm={"kind": "fedkd", "energy_start": 1.0, "energy_end": 1.0}, **rest)
    plain = Whole().bind(Setup(exp.task, exp.algorithm.optimizer, exp.algorithm.setup.sizes))
    whole = dataclasses.replace(exp, algorithm=plain)
    (ours, our_store), (theirs, their_store) = run(exp, 3), run(whole, 3)
    torch.testing.assert_close(ours.server.w, theirs.server.w, rtol=0, atol=1e-5)
    torch.testing.assert_close(kept(exp, ours, our_store).w, kept(whole, theirs, their_store).w, rtol=0, atol=1e-5)
    assert ours.up <= theirs.up
    # with less it loses some of the update, and less than it keeps
    cut, _ = run(world((9, 12, 7), algorithm="fedkd", **rest), 3)
    assert 1e-5 < (cut.server.w - theirs.server.w).norm() < 0.5 * (theirs.server.w - exp.task.w0).norm()
    assert cut.up < ours.up


# -- who keeps what --------------------------------------------------------------------------------
def test_mentors_are_private_and_change_only_when_their_client_trains(world) -> None:
    exp = world((6, 12, 7), algorithm="fedkd", model=MLP, local=RAGGED, cohort={"size": 1}, partition=HOLDOUT)
    state, store = begin(exp), RamStore(3)
    before = kept(exp, state, store)
    assert torch.equal(before.w, exp.task.w0.expand(3, -1))
    seen = set()
    for t in range(5):
        state, _ = advance(exp, state, store)
        here = int(exp.present(t).drawn.ids)
        seen.add(here)
        now = kept(exp, state, store)
        assert (now.w != before.w).any(1).nonzero().flatten().tolist() == [here]
        before = now
    served = torch.cat([part.w for part in models_of(exp, state, store, torch.arange(3))])
    assert torch.equal(served, before.w)
    assert len(seen) > 1
    assert (before.W_h != torch.eye(5)).any((1, 2)).nonzero().flatten().tolist() == sorted(seen)


def test_a_late_joiner_has_a_mentor_of_its_own_beside_the_mentee_of_all(world) -> None:
    exp = world((6, 12, 7), algorithm="fedkd", model=MLP, local=RAGGED, cohort={"size": 1})
    state, store = run(exp, 2)
    seen = {int(exp.present(t).drawn.ids) for t in range(2)}
    new = next(k for k in range(3) if k not in seen)
    given = exp.given(state, store, torch.tensor([new]))
    x = exp.algorithm.start(given.down, Mine(given.mine.w[0], given.mine.W_h[0]), work())
    assert torch.equal(x.w, exp.task.w0)
    assert torch.equal(x.W_h, torch.eye(5))
    assert torch.equal(x.mentee, state.server.w)
    assert not torch.equal(x.mentee, exp.task.w0)


@pytest.mark.slow
def test_one_client_of_one_example(world) -> None:
    exp = world((1,), algorithm="fedkd", model=MLP, local=RAGGED)
    state, store = run(exp, 20)
    mentor = kept(exp, state, store).w[0]
    rows = exp.federation.examples(exp.federation.train.rows)
    batch = batch_of(*rows)
    assert exp.task.loss(mentor, batch) < 0.5 * exp.task.loss(exp.task.w0, batch)
    assert exp.task.loss(state.server.w, batch) < exp.task.loss(exp.task.w0, batch)


def test_a_client_that_diverges_is_left_out(world) -> None:
    arrays = blobs((4, 12, 7))
    x = arrays.x.copy()
    x[4:16] *= 1e25
    exp = world(arrays=arrays._replace(x=x), algorithm="fedkd", model=MLP, local=RAGGED)
    state, store = begin(exp), RamStore(3)
    for _ in range(2):
        state, excluded = advance(exp, state, store)
        assert excluded == (1,)
    assert torch.equal(kept(exp, state, store).w[1], exp.task.w0)
    assert state.server.w.isfinite().all()


def test_convolutions_travel_too(world) -> None:
    arrays = blobs((6, 5), features=64)
    images = arrays._replace(x=arrays.x.reshape(-1, 1, 8, 8))
    exp = world(arrays=images, algorithm="fedkd", model="lenet_law", local=RAGGED)
    state, store = run(exp, 1)
    assert 0 < state.up < 2 * 4 * exp.task.size
    assert kept(exp, state, store).w.isfinite().all()


def test_what_it_cannot_do_is_refused(world) -> None:
    exp = world(algorithm="fedkd", model="logistic")
    with pytest.raises(ConfigError, match="encoder"):
        advance(exp, begin(exp), RamStore(3))
    with pytest.raises(ConfigError, match="head"):
        FedKD().bind(Setup(Task(nn.Linear(2, 3)), sgd())).features()
    with pytest.raises(ConfigError, match="sampling"):
        parse({"algorithm": "fedkd", "cohort": {"sampling": "proportional"}})


def test_mentors_are_evaluated_after_training_and_the_mentee_is_the_common_model(world) -> None:
    exp = world((8, 12, 7), algorithm="fedkd", model=MLP, partition=HOLDOUT, local=RAGGED)
    found = evaluate(exp, *run(exp, 1))
    assert {name.rpartition("/")[0] for name in found} == {"personal/post_fit/test", "global/test"}


@pytest.mark.slow
def test_it_learns_digits() -> None:
    history = fedloom.run(
        "fedkd",
        data="digits",
        rounds=6,
        partition={"kind": "pathological", "clients": 10, "holdout": 0.25},
        cohort={"sampling": "all"},
    )
    assert history.summary["personal/post_fit/test/accuracy"].last > 0.95
    common = history.metrics["global/test/loss"]
    assert common[-1] < common[0]
