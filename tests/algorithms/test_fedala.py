"""FedALA against its definition written as a plain loop, and against FedAvg and local training where it is one of them.

Tests are named after the oracles of the method (a1 to a11).
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear
from torch import Tensor, nn

import fedloom
from fedloom.algorithm import Carry, Model, Setup
from fedloom.algorithms.fedala import FedALA, Mine, Walk
from fedloom.core import tree
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.core.task import Batch, Task
from fedloom.engine import checkpoint, local
from fedloom.engine.evaluate import evaluate
from fedloom.engine.lateness import foresee_lateness
from fedloom.engine.plan import again
from fedloom.engine.rounds import advance, advance_watched, begin
from fedloom.engine.store import DiskStore, RamStore
from fedloom.engine.training import groups_of
from fedloom.models.net import Net
from fedloom.runs.settings import as_table, parse
from support.ala import (
    EXECUTORS,
    HELD,
    LOCAL,
    MLP,
    NORMED,
    OPTIMIZERS,
    SHORT,
    Ran,
    laid_out,
    memory_of,
    ran,
    recorded,
    same,
)
from support.blobs import blobs
from support.quadratic import RAGGED, Quadratic, vec, work

EVERYBODY = torch.arange(3)


class Told(NamedTuple):
    """FedALA's client state, and how many passes of ALA its last round had."""

    v: Tensor
    W: Any
    seen: Tensor
    started: Tensor
    passes: Tensor


class Counting(FedALA):
    """FedALA whose clients remember how many passes they made: data, since lanes run the code once for many."""

    def join(self, down: Model) -> Any:
        return Told(*super().join(down), torch.zeros_like(down.w[0]))

    def finish(self, x, down, mine, work):
        upload, kept = super().finish(x, down, mine, work)
        return upload, Told(*kept, x.passes)


def replaced(exp, algorithm):
    """The same experiment with another algorithm object."""
    return dataclasses.replace(exp, algorithm=algorithm.bind(Setup(exp.task, exp.local.make_optimizer())))


# -- the definition, as anybody would write it ---------------------------------------------------------
class Aggregated(NamedTuple):
    hat: Tensor  # [P] where training begins
    W: Tensor  # [q]
    passes: int


def batches_of(exp, client: int, round_: int) -> list[Tensor]:
    """The rows of ALA's batches."""
    phase = exp.algorithm.ala()[0]
    present = exp.present(round_)
    groups = groups_of(exp, round_, present, foresee_lateness(exp, begin(exp), present, 0).extra)
    group = next(g for g in groups if client in g.ids.tolist())
    k = group.ids.tolist().index(client)
    plan = again(group, phase, 1)
    return [plan.rows[k, t][plan.mask[k, t] > 0] for t in range(plan.steps[k])]


def by_hand(exp, client: int, round_: int, w: Tensor, mine: Any) -> Aggregated:
    """ALA with a module, autograd and the plan's batches, following the published pseudo-code."""
    alg, low = exp.algorithm, exp.algorithm.low
    if not mine.seen:
        return Aggregated(w, mine.W, 0)
    net = exp.task.module(w, exp.task.buffers0)
    net.train(alg.model_mode == "train")
    W, losses = mine.W.clone(), []
    batches = batches_of(exp, client, round_)
    while True:
        for t, rows in enumerate(batches):
            at = torch.cat([w[:low], mine.v[low:] * (1 - W) + w[low:] * W])
            nn.utils.vector_to_parameters(at, net.parameters())
            net.zero_grad()
            x, y = exp.federation.examples(rows)
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            g = nn.utils.parameters_to_vector([p.grad for p in net.parameters()])[low:]
            if t == 0 or not mine.started or alg.later_passes == "epoch":
                W = (W - alg.eta * g * (w - mine.v)[low:]).clamp(0, 1)
        losses.append(loss.item())
        last = torch.tensor(losses[-alg.window :])
        steady = len(losses) > alg.window and float(last.std(correction=0)) < alg.threshold
        if mine.started or steady or len(losses) >= alg.max_start_passes:
            return Aggregated(torch.cat([w[:low], mine.v[low:] * (1 - W) + w[low:] * W]), W, len(losses))


SETTINGS = {
    "as it is": {},
    "two layers": {"layers": 2, "eta": 3.0},
    "all layers from zero": {"layers": "all", "w_init": 0.0, "eta": 5.0},
    "one batch later": {"later_passes": "step", "eta": 2.0},
    "a block": {"sampling": "block", "sample_percent": 50.0},
    "a strict start": {"threshold": 2e-3, "window": 3, "max_start_passes": 9, "eta": 10.0},
}


@pytest.mark.slow
@EXECUTORS
@pytest.mark.parametrize("name", SETTINGS)
def test_every_round_is_the_definition_written_as_a_loop(world, name, executor) -> None:
    exp = laid_out(world, algorithm=SETTINGS[name], engine={"executor": executor})
    now, moved = ran(replaced(exp, Counting(**SHORT | SETTINGS[name])), 0), 0.0
    for round_ in range(4):
        _, done = now.trained()
        for client in range(3):
            mine = tree.take(now.kept, client)
            want = by_hand(exp, client, round_, now.w, mine)
            torch.testing.assert_close(done.begun[client], want.hat, rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(done.states.W[client], want.W, rtol=1e-4, atol=5e-5)
            assert done.states.passes[client] == want.passes
            moved = max(moved, float((want.W - exp.algorithm.w_init).abs().max()))
        now = now.on()
    assert moved > 0.01


# -- a1 to a4: what it is where ALA does nothing -------------------------------------------------------
NEUTRAL = {"w_init": 1.0, "eta": 0.0, "window": 2}  # with a short start phase, whose length is not the point


@pytest.mark.slow
@EXECUTORS
@pytest.mark.parametrize("layers", [1, 2, 3, 99, "all", "none"])
def test_a1_with_w_at_1_and_no_step_it_is_fedavg_whatever_the_layers(world, layers, executor) -> None:
    more = {"local": LOCAL | {"momentum": 0.9}, "engine": {"executor": executor}}
    neutral = {"layers": "none"} if layers == "none" else NEUTRAL | {"layers": layers}
    ours = laid_out(world, algorithm=neutral, **more)
    assert torch.equal(ran(ours).w, ran(laid_out(world, kind="fedavg", **more)).w)


@pytest.mark.slow
@OPTIMIZERS
def test_a1_whatever_the_optimizer_that_remembers(world, optimizer) -> None:
    more = {"local": LOCAL | memory_of(optimizer)}
    ours = ran(laid_out(world, algorithm=NEUTRAL, **more))
    theirs = ran(laid_out(world, kind="fedavg", **more))
    assert torch.equal(ours.w, theirs.w)
    assert same(ours.given.memory, theirs.given.memory)
    assert not torch.equal(ours.w, ran(laid_out(world, algorithm=NEUTRAL | {"eta": 1.0}, **more)).w)  # it can differ


@pytest.mark.slow
def test_a1_under_partial_participation(world) -> None:
    more = {"cohort": {"size": 2}}
    ours = laid_out(world, (4, 12, 7, 9), algorithm={"eta": 0.0}, **more)
    assert torch.equal(ran(ours, 5).w, ran(laid_out(world, (4, 12, 7, 9), kind="fedavg", **more), 5).w)


def test_a1_where_the_models_are_of_very_different_size() -> None:
    """v + (w - v) * 1 is not w in float32; the point between must be exact at both ends."""
    alg = FedALA(layers="all").bind(Setup(Task(nn.Linear(40, 25)), sgd()))
    g = torch.Generator().manual_seed(0)
    v, w = 10 * torch.randn(1025, generator=g), 1e-3 * torch.randn(1025, generator=g)
    mine = Mine(v, (), torch.ones(()), torch.ones(()))
    assert not torch.equal(v + (w - v), w)
    assert torch.equal(alg.between(torch.ones(1025), Model(w), mine), w)
    assert torch.equal(alg.between(torch.zeros(1025), Model(w), mine), v)


ALONE = {"w_init": 0.0, "eta": 0.0, "layers": "all", "window": 2}


@pytest.mark.slow
@EXECUTORS
@pytest.mark.parametrize("cohort", [{"sampling": "all"}, {"size": 2}])
def test_a2_with_w_at_0_on_all_layers_every_client_trains_alone(world, executor, cohort) -> None:
    more = {"local": LOCAL | {"momentum": 0.9}, "engine": {"executor": executor}, "cohort": cohort}
    ours = ran(laid_out(world, algorithm=ALONE, **more), 4)
    theirs = ran(laid_out(world, kind="local_only", **more), 4)
    first = ours.exp.present(0).drawn.ids  # who joins later begins with the server's model of that moment
    assert torch.equal(ours.kept.v[first], theirs.kept.w[first])
    assert same(tree.take(ours.given.memory, first), tree.take(theirs.given.memory, first))


@pytest.mark.slow
@OPTIMIZERS
def test_a2_the_servers_model_is_then_the_weighted_mean_of_theirs(world, optimizer) -> None:
    more = {"local": LOCAL | memory_of(optimizer)}
    ours = ran(laid_out(world, algorithm=ALONE, **more))
    alone = ran(laid_out(world, kind="local_only", **more)).kept.w
    assert torch.equal(ours.kept.v, alone)
    mean = torch.tensor([4, 12, 7]).double() @ alone.double() / 23
    torch.testing.assert_close(ours.w.double(), mean, rtol=1e-6, atol=2e-7)


@pytest.mark.slow
def test_a3_with_w_at_0_on_the_last_layer_heads_are_private_and_bodies_common(world) -> None:
    now = ran(laid_out(world, algorithm={"w_init": 0.0, "eta": 0.0}), 0)
    low = now.exp.task.size - 3 * 6  # the head: 3 classes of 5 features and a bias
    for t in range(4):
        before, sent = now.kept.v, now.w
        _, done = now.trained()
        assert torch.equal(done.begun[:, :low], sent[:low].expand(3, -1))
        assert torch.equal(done.begun[:, low:], before[:, low:] if t else sent[low:].expand(3, -1))
        now = now.on()
    assert (now.kept.v[:, low:] - now.w[low:]).abs().max() > 0.01


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a4_without_layers_it_is_fedavg(world, weighting) -> None:
    ours = ran(laid_out(world, algorithm={"layers": "none", "weighting": weighting}))
    theirs = ran(laid_out(world, kind="fedavg", algorithm={"weighting": weighting}))
    assert torch.equal(ours.w, theirs.w)
    assert ours.kept.W == ()
    assert (ours.state.up, ours.state.down, ours.state.seconds) == (
        theirs.state.up,
        theirs.state.down,
        theirs.state.seconds,
    )


# -- a5: the weights ------------------------------------------------------------------------------------
TWO_LAYERS = Task(Net(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), 5, 3))


def batch_of(x: Tensor, y: Tensor) -> Batch:
    zero = torch.zeros((), dtype=x.dtype)
    return Batch(x, y, torch.ones(len(x), dtype=x.dtype), zero.long(), zero, zero, torch.zeros(0))


def drawn(seed: int, count: int = 6) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return batch_of(3 * torch.randn(count, 4, generator=g), torch.randint(0, 3, (count,), generator=g))


def walk(alg: FedALA, down: Model, mine: Mine) -> Carry:
    return Carry(alg.start(down, mine, work()), ())


@pytest.mark.slow
@given(
    st.integers(0, 2**31),
    st.floats(0, 1e4),
    st.floats(0, 1),
    st.sampled_from([1, 2, "all"]),
    st.floats(0.01, 100),
    st.integers(1, 4),
)
@settings(max_examples=40, deadline=None)
def test_a5_w_stays_between_0_and_1(seed, eta, w_init, layers, apart, steps) -> None:
    alg = FedALA(eta=eta, w_init=w_init, layers=layers).bind(Setup(TWO_LAYERS, sgd()))
    g = torch.Generator().manual_seed(seed)
    down = Model(TWO_LAYERS.w0 + apart * torch.randn(TWO_LAYERS.size, generator=g))
    mine = alg.join(down)._replace(v=TWO_LAYERS.w0 + apart * torch.randn(TWO_LAYERS.size, generator=g))
    at = walk(alg, down, mine._replace(seen=torch.ones(())))
    for t in range(steps):
        at = alg.aggregate(at, drawn(seed + t), down, mine._replace(seen=torch.ones(())))
        assert at.x.W.isfinite().all()
        assert ((at.x.W >= 0) & (at.x.W <= 1)).all()
        assert at.x.W.shape == (TWO_LAYERS.size - alg.low,)


@pytest.mark.slow
@EXECUTORS
def test_a5_in_a_run_with_a_great_step_it_does_too_and_moves(world, executor) -> None:
    exp = laid_out(world, algorithm={"eta": 100.0, "w_init": 0.5, "layers": "all"}, engine={"executor": executor})
    now = ran(exp, 1)
    for _ in range(3):
        now = now.on()
        W = now.kept.W
        assert W.shape == (3, exp.task.size)
        assert W.isfinite().all()
        assert ((W >= 0) & (W <= 1)).all()
        assert all(W.eq(end).any() for end in (0, 1))


@pytest.mark.slow
def test_a5_local_training_does_not_touch_w(world) -> None:
    now = ran(laid_out(world), 2)
    other = dataclasses.replace(now.exp, local=now.exp.local.model_copy(update={"lr": 1.0, "epochs": 5}))
    a, b = now.on(), Ran(other, *now[1:]).on()
    assert torch.equal(a.kept.W, b.kept.W)
    assert (a.kept.v - b.kept.v).abs().max() > 0.1


@pytest.mark.slow
def test_a5_w_is_kept_and_not_made_anew(world) -> None:
    """A third round that learns nothing keeps what the second has learned."""
    now = ran(laid_out(world), 2)
    learned = now.kept.W
    assert (learned != 1).any(1).all()
    still = Ran(replaced(now.exp, FedALA(eta=0.0)), *now[1:]).on(3)
    assert torch.equal(still.kept.W, learned)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a5_w_comes_through_a_resume(world, tmp_path, where) -> None:
    exp = laid_out(world, cohort={"size": 2})
    whole = ran(exp, 5)

    def store():
        return RamStore(3) if where == "ram" else DiskStore(tmp_path / "rows", 3)

    state, clients = begin(exp), store()
    for _ in range(3):
        state, _ = advance(exp, state, clients)
    (tmp_path / "saved").mkdir()
    checkpoint.save(tmp_path / "saved", state, clients, {})
    clients = store()
    state = checkpoint.load_state(tmp_path / "saved", begin(exp), clients).state
    now = Ran(exp, state, clients)
    assert (now.kept.W != 1).any()
    for _ in range(2):
        state, _ = advance(exp, state, clients)
    assert same(Ran(exp, state, clients).kept, whole.kept)
    assert torch.equal(state.server.w, whole.w)


# -- a6: below ALA's layers -----------------------------------------------------------------------------
@pytest.mark.slow
@EXECUTORS
@pytest.mark.parametrize("layers", [1, 2])
def test_a6_below_alas_layers_is_the_servers_model(world, layers, executor) -> None:
    now = ran(laid_out(world, algorithm={"layers": layers, "eta": 5.0}, engine={"executor": executor}), 1)
    low = now.exp.algorithm.low
    assert low == {1: 30 + 35, 2: 30}[layers]
    for _ in range(2):
        _, done = now.trained()
        assert torch.equal(done.begun[:, :low], now.w[:low].expand(3, -1))
        assert (done.begun[:, low:] != now.w[low:]).any(1).all()
        now = now.on()


@pytest.mark.slow
def test_a6_neither_the_servers_model_nor_the_data_change(world) -> None:
    now = ran(laid_out(world, algorithm={"eta": 5.0}), 2)
    before = [x.clone() for x in (now.w, now.exp.federation.x, now.exp.federation.y, now.exp.task.w0)]
    now.trained()
    assert same(before, [now.w, now.exp.federation.x, now.exp.federation.y, now.exp.task.w0])


def test_a6_what_is_below_goes_by_the_net_at_hand() -> None:
    """Also where an algorithm that has seen one net is given another."""
    alg = FedALA()
    for hidden in (5, 9):
        alg = alg.bind(Setup(Task(nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, 3))), sgd()))
        assert alg.low == 5 * hidden


def test_a6_no_gradient_is_taken_below(monkeypatch) -> None:
    task = Task(Net(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), 5, 3))
    alg = FedALA().bind(Setup(task, sgd()))
    down = Model(task.w0)
    seen = []
    whole = task.evaluate_and_differentiate
    monkeypatch.setattr(task, "evaluate_and_differentiate", lambda f, x: seen.append(x.shape) or whole(f, x))
    alg.aggregate(walk(alg, down, alg.join(down)), drawn(0), down, alg.join(down))
    assert seen == [(18,)]


# -- a7 to a9: one step --------------------------------------------------------------------------------
@pytest.mark.parametrize("layers", [1, "all"])
def test_a7_of_two_equal_models_nothing_is_learned(layers) -> None:
    alg = FedALA(eta=7.0, layers=layers).bind(Setup(TWO_LAYERS, sgd()))
    down = Model(TWO_LAYERS.w0)
    g = torch.Generator().manual_seed(1)
    W = torch.rand(TWO_LAYERS.size - alg.low, generator=g)
    mine = Mine(TWO_LAYERS.w0, W, torch.ones(()), torch.zeros(()))
    at = walk(alg, down, mine)
    for t in range(3):
        at = alg.aggregate(at, drawn(t), down, mine)
        assert torch.equal(at.x.W, W)
        assert torch.equal(alg.arrived(at, down, mine).x.w, down.w)
    assert alg.task.grad(down.w, drawn(0)).abs().max() > 0.01  # and not for want of a gradient


@pytest.mark.parametrize("layers", [1, 2])
def test_a8_one_step_is_autograds_gradient_of_w(layers) -> None:
    torch.manual_seed(0)
    task = Task(Net(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), 5, 3).double())
    alg = FedALA(eta=1e-3, layers=layers).bind(Setup(task, sgd()))
    g = torch.Generator().manual_seed(2)
    v, w = (task.w0 + 0.3 * torch.randn(task.size, generator=g).double() for _ in range(2))
    batch = batch_of(torch.randn(6, 4, generator=g).double(), torch.randint(0, 3, (6,), generator=g))
    W = 0.2 + 0.6 * torch.rand(task.size - alg.low, generator=g).double()
    mine = Mine(v, W, torch.ones(()).double(), torch.zeros(()).double())
    step = (W - alg.aggregate(walk(alg, Model(w), mine), batch, Model(w), mine).x.W) / alg.eta
    free = W.clone().requires_grad_()
    hat = torch.cat([w[: alg.low], (v + (w - v) * torch.cat([torch.zeros(alg.low).double(), free]))[alg.low :]])
    task.loss(hat, batch).backward()
    torch.testing.assert_close(step, free.grad, rtol=1e-5, atol=1e-12)
    assert free.grad.abs().min() > 0


def test_a8_and_the_finite_difference() -> None:
    """Two weights, two classes: the logits of x are (a x, b x)."""
    task = Task(nn.Linear(1, 2, bias=False).double())
    alg = FedALA(eta=1e-2, layers="all").bind(Setup(task, sgd()))
    v, w, W = vec(0.5, -1.0), vec(2.0, 0.3), vec(0.4, 0.7)
    batch = batch_of(vec(1.0, -2.0, 0.5)[:, None], torch.tensor([0, 1, 1]))
    mine = Mine(v, W, vec(1)[0], vec(0)[0])

    def loss(W):
        return float(task.loss(v + (w - v) * W, batch))

    found = (W - alg.aggregate(walk(alg, Model(w), mine), batch, Model(w), mine).x.W) / alg.eta
    h = 1e-6
    for k in range(2):
        e = h * torch.eye(2).double()[k]
        assert float(found[k]) == pytest.approx((loss(W + e) - loss(W - e)) / (2 * h), rel=1e-6)


class Bowls(Quadratic):
    """Quadratic losses as ALA asks for them: all of the model is on top."""

    lanes = False

    def __init__(self, size: int) -> None:
        self.size = size

    def below(self, layers: Any) -> int:
        return 0

    def loss(self, w, batch, *, training=True):
        return super().loss(torch.cat(w) if isinstance(w, tuple) else w, batch)

    def evaluate_and_differentiate(self, f, x):
        return f(x), torch.func.grad(f)(x)


@pytest.mark.parametrize(("bottom", "path"), [(0.25, [0.25, 0.25, 0.25]), (-1.0, [0.0, 0.0, 0.0])])
def test_a9_the_scalar_example(bottom, path) -> None:
    """Own model 0, the server's 1, the loss (x - 1/4)^2 / 2: the slope at 1 is 3/4, and W goes from 1 to 1/4."""
    alg = FedALA(layers="all").bind(Setup(Bowls(1), sgd()))
    batch = batch_of(torch.eye(1).double(), vec(bottom))
    down, mine = Model(vec(1)), Mine(vec(0), vec(1), vec(1)[0], vec(0)[0])
    at, found = walk(alg, down, mine), []
    for _ in path:
        at = alg.aggregate(at, batch, down, mine)
        found.append(at.x.W.item())
    assert found == path
    assert alg.arrived(at, down, mine).x.w.item() == path[-1]


# -- a10: how long it takes ------------------------------------------------------------------------------
@pytest.mark.slow
@EXECUTORS
@pytest.mark.parametrize(
    ("threshold", "window", "cap", "second"),
    [(1e9, 10, 100, 11), (1e9, 4, 100, 5), (1e-9, 10, 17, 17), (1e9, 10, 6, 6)],
)
def test_a10_no_pass_at_first_then_the_start_phase_and_then_one(
    world, executor, threshold, window, cap, second
) -> None:
    method = Counting(threshold=threshold, window=window, max_start_passes=cap, eta=20.0)
    now = ran(replaced(laid_out(world, engine={"executor": executor}), method), 0)
    for passes in (0, second, 1, 1):
        now = now.on()
        assert now.kept.passes.tolist() == [passes] * 3
        assert (now.kept.W == 1).all() == (passes == 0)


def test_a10_the_first_round_starts_from_the_servers_model(world) -> None:
    now = ran(laid_out(world, algorithm={"w_init": 0.3}), 0)
    _, done = now.trained()
    assert torch.equal(done.begun, now.w.expand(3, -1))
    assert torch.equal(now.on().w, ran(laid_out(world, kind="fedavg"), 1).w)


@pytest.mark.slow
@EXECUTORS
def test_a10_each_client_has_a_start_phase_of_its_own_length(world, executor) -> None:
    method = Counting(threshold=2e-3, window=3, max_start_passes=30, eta=3.0, layers="all")
    now = ran(replaced(laid_out(world, (4, 12, 7, 30, 9), engine={"executor": executor}), method), 2)
    passes = now.kept.passes.tolist()
    assert len(set(passes)) > 2
    assert all(4 <= p <= 30 for p in passes)


@pytest.mark.slow
@EXECUTORS
def test_who_has_settled_costs_nothing_more(world, monkeypatch, executor) -> None:
    """Of every pass of ALA only those clients are computed that are not done yet."""
    method = Counting(threshold=2e-3, window=3, max_start_passes=30, eta=3.0, layers="all")
    engine = {"executor": executor, "lanes": 5}
    exp = replaced(laid_out(world, (4, 12, 7, 30, 9), engine=engine, local=LOCAL | {"batch": 4}), method)
    now = ran(exp, 1)
    calls = recorded(monkeypatch)
    now = now.on()
    computed = [ids for name, ids, _ in calls if name == "ala"]
    assert [sum(client in ids for ids in computed) for client in range(5)] == now.kept.passes.tolist()
    if executor == "lanes":
        assert len({len(ids) for ids in computed}) > 2  # they become fewer and fewer
    calls.clear()
    now.on()
    assert sum(len(ids) for name, ids, _ in calls if name == "ala") == 5


def test_a_first_round_computes_no_ala(world, monkeypatch) -> None:
    calls = recorded(monkeypatch)
    ran(laid_out(world), 1)
    assert {name for name, _, _ in calls} == {"batches"}


# -- a11: what it converges to ---------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a11_on_a_convex_loss_it_descends_to_the_best_w_in_the_box(seed) -> None:
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(6, 6, generator=g).double()
    A = root.T @ root / 6 + torch.eye(6).double()
    v, free = torch.randn(6, generator=g).double(), 2 * torch.rand(6, generator=g).double() - 0.5
    apart = (0.5 + torch.rand(6, generator=g).double()) * (2 * torch.randint(0, 2, (6,), generator=g) - 1)
    w, b, D = v + apart, v + apart * free, torch.diag(apart)  # the best W of all is ``free``, some of it outside
    batch = batch_of(A, b)
    eta = 0.99 / float(torch.linalg.eigvalsh(D @ A @ D)[-1])
    alg = FedALA(eta=eta, layers="all").bind(Setup(Bowls(6), sgd()))
    mine = Mine(v, torch.full((6,), 0.5).double(), vec(1)[0], vec(0)[0])
    at, losses = walk(alg, Model(w), mine), []
    for _ in range(300):
        at = alg.aggregate(at, batch, Model(w), mine)
        losses.append(float(at.x.loss))
    assert all(later <= before + 1e-12 for before, later in pairwise(losses))
    assert losses[-1] < 0.9 * losses[0]
    # 1/2 ||L'(v + D W - b)||^2 for A = L L'
    L = torch.linalg.cholesky(A)
    best = lsq_linear((L.T @ D).numpy(), (L.T @ (b - v)).numpy(), bounds=(0, 1), method="bvls", tol=1e-14)
    there = alg.arrived(at, Model(w), mine).x.w
    assert float(Quadratic().loss(there, batch)) == pytest.approx(best.cost, rel=1e-9)
    torch.testing.assert_close(at.x.W, torch.from_numpy(best.x), rtol=0, atol=1e-6)
    assert ((at.x.W == 0) | (at.x.W == 1)).any()  # the box matters
    assert ((at.x.W > 0) & (at.x.W < 1)).any()


# -- which examples ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("percent", "want"),
    [(1.0, [1, 2, 3, 3]), (50.0, [1, 2, 6, 20]), (80.0, [1, 2, 9, 32]), (100.0, [1, 2, 12, 40])],
)
def test_a_share_of_the_data_but_at_least_a_batch_where_there_is_one(world, percent, want) -> None:
    exp = laid_out(world, (1, 2, 12, 40), algorithm={"sample_percent": percent})
    for client, count in enumerate(want):
        rows = torch.cat(batches_of(exp, client, 5))
        own = exp.federation.train.rows[slice(*exp.federation.train.start[client : client + 2])]
        assert len(rows) == len(set(rows.tolist())) == count
        assert torch.isin(rows, own).all()
        assert [len(b) for b in batches_of(exp, client, 5)[:-1]] == [3] * (-(-count // 3) - 1)


@pytest.mark.slow
@EXECUTORS
def test_clients_with_hardly_any_data_take_part(world, executor) -> None:
    method = Counting(sample_percent=1.0, layers="all", eta=5.0, **SHORT)
    exp = replaced(laid_out(world, (1, 2, 40), engine={"executor": executor}), method)
    once = ran(exp, 1)
    now = once.on()
    for client in range(3):
        mine = tree.take(once.kept, client)
        torch.testing.assert_close(now.kept.W[client], by_hand(exp, client, 1, once.w, mine).W, rtol=1e-4, atol=5e-5)
    assert now.on(2).w.isfinite().all()


def test_drop_last_leaves_nothing_of_alas_data_out(world) -> None:
    exp = laid_out(world, (4, 12, 7), local=LOCAL | {"drop_last": True}, algorithm={"sample_percent": 100.0})
    assert [len(torch.cat(batches_of(exp, k, 2))) for k in range(3)] == [4, 12, 7]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["draw", "block"])
def test_the_same_batches_in_every_pass_and_others_in_every_round(world, sampling, monkeypatch) -> None:
    exp = laid_out(world, algorithm={"sampling": sampling, "sample_percent": 50.0}, engine={"executor": "loop"})
    seen: list[list[int]] = []
    examples = type(exp.federation).examples
    now = ran(exp, 1)
    monkeypatch.setattr(type(exp.federation), "examples", lambda f, r: seen.append(r.tolist()) or examples(f, r))
    picked = []
    for round_ in (1, 2):
        now, _ = now.on(), None
        for client in range(3):
            batches = [b.tolist() for b in batches_of(exp, client, round_)]
            count = sum(rows == batches[0] for rows in seen)
            assert count == sum(rows == batches[-1] for rows in seen)
            assert count >= (4 if round_ == 1 else 1)  # a start phase of four passes
            picked.append(tuple(r for b in batches for r in b))
        seen.clear()
    assert set(picked[:3]) != set(picked[3:])


@pytest.mark.slow
def test_a_block_lies_together_in_stored_order_and_anywhere(world) -> None:
    exp = laid_out(world, algorithm={"sampling": "block", "sample_percent": 50.0})
    starts = exp.federation.train.start.tolist()
    for client, (n, m) in enumerate([(4, 3), (12, 6), (7, 3)]):
        offsets = set()
        for round_ in range(60):
            rows = torch.cat(batches_of(exp, client, round_)).tolist()
            at = exp.federation.train.rows.tolist().index(rows[0])
            assert rows == exp.federation.train.rows[at : at + m].tolist()
            offsets.add(at - starts[client])
        assert offsets == set(range(n - m + 1))


@pytest.mark.slow
def test_a_draw_is_without_replacement_and_of_any_example(world) -> None:
    exp = laid_out(world, algorithm={"sample_percent": 50.0})
    found = [torch.cat(batches_of(exp, 1, t)).tolist() for t in range(40)]
    assert all(len(set(rows)) == 6 for rows in found)
    assert len({r for rows in found for r in rows}) == 12
    assert any(rows != sorted(rows) for rows in found)


@pytest.mark.slow
def test_one_batch_in_later_rounds_moves_w_less(world) -> None:
    """The start phase is the same; afterwards one step of W instead of a pass."""
    whole, one = (ran(laid_out(world, algorithm={"later_passes": p}), 2) for p in ("epoch", "step"))
    assert same(whole.kept, one.kept)
    before, whole, one = whole.kept.W[1], whole.on().kept.W[1], one.on().kept.W[1]
    assert 0 < (one - before).norm() < (whole - before).norm()


# -- modes of the net -------------------------------------------------------------------------------------
class Dropped(nn.Module):
    """A net with dropout in its encoder."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Linear(shape[0], 20), nn.Tanh(), nn.Dropout(0.5)),
            nn.Linear(20, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


@pytest.mark.slow
@EXECUTORS
def test_in_evaluation_mode_ala_sees_the_net_without_dropout(world, executor) -> None:
    more = {"model": {"kind": "test_fedala:Dropped"}, "engine": {"executor": executor}}
    exp = laid_out(world, algorithm={"model_mode": "eval", "layers": "all"}, **more)
    now = ran(exp, 1)
    _, done = now.trained()
    for client in range(3):
        want = by_hand(exp, client, 1, now.w, tree.take(now.kept, client))
        torch.testing.assert_close(done.states.W[client], want.W, rtol=1e-4, atol=5e-5)
    noisy = Ran(replaced(exp, FedALA(layers="all")), *now[1:]).trained()[1]
    assert (noisy.states.W - done.states.W).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_ala_leaves_running_statistics_alone(world, mode) -> None:
    """What the server averages is what FedAvg's clients would send from the same point."""
    algorithm = {"eta": 0.0, "sample_percent": 100.0, "model_mode": mode}
    ours = ran(laid_out(world, (6, 12, 9), algorithm=algorithm, **NORMED))
    theirs = ran(laid_out(world, (6, 12, 9), kind="fedavg", **NORMED))
    assert torch.equal(ours.w, theirs.w)
    assert torch.equal(ours.state.buffers, theirs.state.buffers)
    assert not torch.equal(ours.state.buffers, ours.exp.task.buffers0)


# -- who takes part ----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_late_joiners_and_those_who_miss_rounds(world) -> None:
    """Each client counts its own rounds: none, the start phase, then one pass; nothing of an absent client changes."""
    exp = replaced(laid_out(world, (4, 12, 7, 9, 5), cohort={"size": 2}, seed=1), Counting(max_start_passes=12))
    now, rounds = ran(exp, 0), [0] * 5
    for t in range(9):
        here = exp.present(t).drawn.ids.tolist()
        before, now = now.kept, now.on()
        for client in range(5):
            mine = tree.take(now.kept, client)
            if client not in here:
                assert same(mine, tree.take(before, client))
                continue
            rounds[client] += 1
            assert (mine.seen, mine.started) == (1, rounds[client] > 1)
            assert 11 <= mine.passes <= 12 if rounds[client] == 2 else mine.passes == min(rounds[client] - 1, 1)
    assert max(rounds) > 3
    assert min(rounds) < 3


@pytest.mark.slow
def test_a_lost_client_keeps_the_state_of_its_last_round(world) -> None:
    exp = laid_out(world, (4, 12, 7, 9), system={"dropout": 0.5})
    now = ran(exp, 2)
    for t in range(2, 7):
        here, before, now = exp.present(t).drawn.ids.tolist(), now.kept, now.on()
        for client in range(4):
            assert same(tree.take(now.kept, client), tree.take(before, client)) == (client not in here)


@pytest.mark.slow
def test_n1_a_client_that_is_not_finite_is_left_out_and_keeps_nothing_of_it(world) -> None:
    arrays = blobs((4, 12, 7))
    x = arrays.x.copy()
    x[4:16] *= 1e25  # the second client's gradients overflow
    exp = laid_out(world, arrays=arrays._replace(x=x), algorithm={"layers": "all"})
    state, store = begin(exp), RamStore(3)
    for _ in range(3):
        state, excluded = advance(exp, state, store)
        assert excluded == (1,)
        assert state.server.w.isfinite().all()
    kept = Ran(exp, state, store).kept
    assert kept.seen.tolist() == [1, 0, 1]
    assert all(leaf.isfinite().all() for leaf in tree.leaves(kept))


@pytest.mark.slow
def test_n1_nor_one_that_breaks_down_later(world) -> None:
    """It keeps its last finite model and W, and joins again with them."""
    now = ran(laid_out(world), 2)
    wild = now.exp.federation.x.clone()
    rows = now.exp.federation.train.rows[4:16]
    wild[rows] *= 1e30
    broken = dataclasses.replace(now.exp, federation=now.exp.federation._replace(x=wild))
    after = Ran(broken, *now[1:]).on()
    assert same(tree.take(after.kept, 1), tree.take(now.kept, 1))
    assert not same(tree.take(after.kept, 0), tree.take(now.kept, 0))
    assert Ran(now.exp, *after[1:]).on().w.isfinite().all()


# -- f1: the mean --------------------------------------------------------------------------------------------
def test_f1_clients_alike_move_the_server_to_their_model(world) -> None:
    arrays = blobs((5, 5, 5))
    x, y = arrays.x.copy(), arrays.y.copy()
    for k in (1, 2):
        x[5 * k : 5 * k + 5], y[5 * k : 5 * k + 5] = x[:5], y[:5]
    full = {"batch": 0, "lr": 0.3, "state": "persist"}
    now = ran(laid_out(world, arrays=arrays._replace(x=x, y=y), local=full))
    torch.testing.assert_close(now.w.expand(3, -1), now.kept.v, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_f1_a_client_alone_trains_as_if_there_were_no_server(world) -> None:
    ours, theirs = (ran(laid_out(world, (9,), kind=kind), 3) for kind in ("fedala", "local_only"))
    torch.testing.assert_close(ours.kept.v, theirs.kept.w, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.w, theirs.kept.w[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_f1_the_order_in_which_clients_come_changes_no_bit(world, lanes) -> None:
    """The mean is summed in float64; one client at a time, they come in another order than three at once."""
    more = {"algorithm": {"weighting": "uniform"}, "local": {"batch": 0, "lr": 0.3}}
    engine = {"executor": "loop", "lanes": lanes}
    found = ran(laid_out(world, (7, 7, 7), engine=engine, **more), 2)
    assert torch.equal(found.w, ran(laid_out(world, (7, 7, 7), engine={"executor": "loop"}, **more), 2).w)


@pytest.mark.slow
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_f1_weights_sum_to_one(world, weighting) -> None:
    now = ran(laid_out(world, algorithm={"weighting": weighting}), 2)
    _, done = now.trained()
    a = torch.tensor([4, 12, 7]).double() if weighting == "samples" else torch.ones(3).double()
    moved = (a / a.sum()) @ done.uploads.dw.double()
    torch.testing.assert_close(now.on().w, now.w + moved.float(), rtol=1e-6, atol=1e-7)


# -- o1, o3, o4: what optimizers remember ------------------------------------------------------------------
@pytest.mark.slow
def test_o1_clients_remember_unless_set_otherwise(world) -> None:
    """The default of FedALA, where the user says nothing."""
    heavy = {"local": {"momentum": 0.9}}
    assert parse({"algorithm": "fedala", **heavy}).local.state == "persist"
    assert parse({"algorithm": "fedala", "local": {"momentum": 0.9, "state": "reset"}}).local.state == "reset"
    assert parse({"algorithm": "fedavg", **heavy}).local.state == "reset"
    momentum = RAGGED | {"momentum": 0.9}
    a, b = (ran(laid_out(world, local=momentum | more), 2) for more in ({}, {"state": "reset"}))
    assert (a.w - b.w).abs().max() > 1e-3


@pytest.mark.slow
def test_o3_adagrads_sum_grows_from_round_to_round_and_begins_anew_only_if_asked_to(world) -> None:
    adagrad = LOCAL | {"optimizer": "adagrad", "lr": 0.05}
    now = ran(laid_out(world, local=adagrad), 1)
    for _ in range(3):
        before, now = now.given.memory, now.on()
        assert (now.given.memory.sum >= before.sum).all()
        assert (now.given.memory.sum > before.sum).any(1).all()
    reset = ran(laid_out(world, local=adagrad | {"state": "reset"}), 2)
    assert reset.given.memory is None  # nothing is kept: a round begins with what init gives
    first = local._begin(reset.exp.algorithm, next(groups_of(reset.exp, 2, reset.exp.present(2))), reset.given)
    assert not first.at.memory.sum.any()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "radam", "adagrad", "asgd"])
def test_o4_a_counter_counts_the_steps_of_training_and_not_those_of_ala(world, optimizer) -> None:
    now = ran(laid_out(world, local=LOCAL | memory_of(optimizer)), 3)
    assert now.given.memory.step.tolist() == [3 * 4, 3 * 8, 3 * 6]


@pytest.mark.slow
def test_o4_who_is_absent_keeps_its_memory(world) -> None:
    exp = laid_out(world, local=LOCAL | memory_of("adam"), cohort={"size": 1})
    now, steps = ran(exp, 0), [0, 0, 0]
    for t in range(5):
        client = int(exp.present(t).drawn.ids)
        steps[client] += (4, 8, 6)[client]
        now = now.on()
        assert now.given.memory.step.tolist() == steps


# -- evaluation ---------------------------------------------------------------------------------------------
@pytest.mark.slow
@EXECUTORS
def test_a_participant_is_evaluated_with_the_model_its_next_round_begins_with(world, executor) -> None:
    exp = laid_out(world, (6, 14, 9, 11), cohort={"size": 2}, engine={"executor": executor}, partition=HELD)
    now = ran(exp, 3)
    for _ in range(3):
        ids, done = now.trained()
        if executor == "loop":
            assert torch.equal(now.served(ids), done.begun)
        torch.testing.assert_close(now.served(ids), done.begun, rtol=1e-5, atol=1e-6)
        assert not torch.equal(now.served(ids)[0], now.w)
        now = now.on()


def test_who_never_took_part_is_evaluated_with_the_servers_model(world) -> None:
    exp = laid_out(world, (6, 14, 9, 11), cohort={"size": 1}, partition=HELD, algorithm={"w_init": 0.4})
    now = ran(exp, 2)
    absent = (now.kept.seen == 0).nonzero().squeeze(1)
    assert len(absent) >= 2
    assert torch.equal(now.served(absent), now.w.expand(len(absent), -1))


@pytest.mark.slow
def test_without_anything_learned_personal_metrics_are_those_of_fedavg(world) -> None:
    found = []
    for kind, algorithm in (("fedala", {"eta": 0.0}), ("fedavg", {})):
        exp = laid_out(world, kind=kind, algorithm=algorithm, partition=HELD)
        found.append(evaluate(*ran(exp)))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert "personal/pre_fit/test/accuracy" in found[0]


@pytest.mark.slow
def test_evaluation_does_not_change_training(world) -> None:
    exp = laid_out(world, (6, 14, 9), cohort={"size": 2}, partition=HELD, local=LOCAL | {"momentum": 0.9})
    quiet = ran(exp, 4)
    state, store = begin(exp), RamStore(3)
    for _ in range(4):
        first = evaluate(exp, state, store)
        assert first == evaluate(exp, state, store)
        state, _ = advance(exp, state, store)
    assert torch.equal(state.server.w, quiet.w)
    assert same(Ran(exp, state, store).kept, quiet.kept)
    assert same(Ran(exp, state, store).given.memory, quiet.given.memory)


@pytest.mark.slow
def test_nor_how_often_there_is_one() -> None:
    arrays = blobs((6, 14, 9))
    models = [
        fedloom.run(
            "fedala",
            data=(arrays.x, arrays.y),
            rounds=3,
            model=MLP,
            local=RAGGED,
            partition={"clients": 3},
            evaluate={"every": n},
        ).model
        for n in (1, 100)
    ]
    assert same(*(tuple(m.state_dict().values()) for m in models))


@pytest.mark.slow
def test_participants_before_training_are_what_personal_evaluation_says(world) -> None:
    evaluation = {"participants": True}
    exp = laid_out(world, (6, 14, 9), partition=HELD, evaluate=evaluation, engine={"executor": "loop"})
    now = ran(exp, 2)
    before = evaluate(*now)
    found = advance_watched(exp, now.state, now.store).found
    for name in ("accuracy", "loss"):
        assert found[f"participants/pre_fit/test/{name}"] == before[f"personal/pre_fit/test/{name}"]
    assert found["participants/post_fit/test/loss"] != before["personal/pre_fit/test/loss"]


# -- settings, bytes ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["fedala", "pfedala"])
def test_the_profile_of_the_paper_sets_three_values_which_may_be_overridden(kind) -> None:
    def three(**given):
        alg = parse({"algorithm": {"kind": kind, **given}}).algorithm
        return alg.w_init, alg.sample_percent, alg.layers

    assert three() == three(profile="reference") == (1.0, 80.0, 1)
    assert three(profile="paper") == (0.0, 1.0, "all")
    assert three(profile="paper", w_init=0.5) == (0.5, 1.0, "all")
    assert three(profile="paper", layers=2, sample_percent=80.0) == (0.0, 80.0, 2)
    config = parse({"algorithm": {"kind": kind, "profile": "paper", "layers": 2}})
    assert parse(as_table(config)).algorithm == config.algorithm


@pytest.mark.parametrize(
    "wrong",
    [
        {"w_init": 1.5},
        {"layers": 0},
        {"layers": "top"},
        {"sample_percent": 0.0},
        {"sample_percent": 101.0},
        {"eta": -1.0},
        {"window": 1},
        {"threshold": 0.0},
        {"max_start_passes": 0},
        {"profile": "mine"},
    ],
)
def test_settings_out_of_bounds_are_refused(wrong) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        parse({"algorithm": {"kind": "fedala", **wrong}})


def test_a_client_drawn_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="sampling"):
        parse({"algorithm": "fedala", "cohort": {"sampling": "proportional"}})


@pytest.mark.slow
def test_it_sends_what_fedavg_sends_and_keeps_w_to_itself(world) -> None:
    now = ran(laid_out(world, algorithm={"layers": "all"}), 2)
    assert now.state.up == now.state.down == 2 * 3 * 4 * now.exp.task.size


@pytest.mark.slow
def test_ala_takes_time(world) -> None:
    """A later round's one pass costs a forward pass over its share, and two more on its part of the net."""
    system = {"speed": 100.0, "latency": 0.0, "up": 1e9, "down": 1e9}

    def third(kind):
        now = ran(laid_out(world, (5, 10, 5), kind=kind, system=system), 2)
        return now.on().state.seconds - now.state.seconds

    share = 15 / (24 + 30 + 15)  # multiplications of the head, of all
    assert third("fedala") - third("fedavg") == pytest.approx((1 + 2 * share) / 3 * 8 / 100, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ({"kind": "logistic"}, (7,)),
        ({"kind": "mlp", "widths": [6, 5], "projection": 4}, (1, 4, 4)),
        ({"kind": "cnn_fedavg"}, (1, 28, 28)),
        ({"kind": "lenet5"}, (3, 32, 32)),
    ],
    ids=lambda case: case["kind"] if isinstance(case, dict) else "",
)
def test_the_share_of_layers_is_that_of_torchs_own_counter(model, shape, monkeypatch) -> None:
    def shares():
        task = parse({"model": model}).model.task(shape, 3)
        return [task.work_above(task.below(layers)) for layers in (1, 2, 3, "all")]

    found = shares()
    with monkeypatch.context() as patch:
        patch.setattr("fedloom.core.task._work_by_torch", lambda *_: pytest.fail("the short way was not taken"))
        assert shares() == found
    monkeypatch.setattr("fedloom.core.task._work_of_layers", lambda *_: None)
    assert shares() == found


class Doubled(Net):
    """A net that multiplies outside of its layers, which its parent does not."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) @ torch.eye(3)
        return out


def test_arithmetic_outside_of_layers_counts_too() -> None:
    task = Task(Doubled(nn.Flatten(), 4, 3), shape=(4,))
    assert task.work_above(0) == pytest.approx(12 / (12 + 9))


def test_losses_that_are_not_numbers_end_the_start_phase_at_the_cap(world) -> None:
    method = Counting(max_start_passes=7, eta=0.0)
    now = ran(replaced(laid_out(world), method), 1)
    bad = Walk(now.w, now.kept.W[0], torch.tensor(math.nan), torch.zeros(10), torch.tensor(20.0))
    mine = tree.take(now.kept, 0)
    _, steady = now.exp.algorithm.settled(Carry(bad, ()), (), Model(now.w), mine, None)
    assert not steady
