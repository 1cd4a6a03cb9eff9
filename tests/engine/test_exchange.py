"""The exchange: fair matrices, weighted sums, and clients whose numbers are not finite left out of them."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from worlds import experiment, federation

from fedloom.algorithm import Inbox, Model, Update, Work
from fedloom.algorithms.dpsgd import DPSGD
from fedloom.algorithms.fedavg import FedAvg
from fedloom.engine.evaluate import models_of
from fedloom.engine.exchange import Full, Ring, Sound, Tally, Topology, add, gossip, inbox, sound
from fedloom.engine.local import Outcome, train
from fedloom.engine.plan import Address, Cohort, plans
from fedloom.engine.run import advance, begin
from fedloom.engine.store import RamStore
from fedloom.errors import DivergedError
from fedloom.optim import Local

NAN = float("nan")


# -- topologies ------------------------------------------------------------------------------------
@pytest.mark.parametrize("topology", [Ring(), Full()], ids=lambda t: t.kind)
@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 16, 33])
def test_matrices_are_symmetric_and_doubly_stochastic(topology: Topology, nodes: int) -> None:
    m = topology.matrix(nodes)
    assert m.dtype == torch.float64
    assert torch.equal(m, m.T)
    assert torch.allclose(m.sum(0), torch.ones(nodes, dtype=torch.float64), rtol=0, atol=1e-12)
    assert bool((m >= 0).all())
    assert bool((m.diagonal() > 0).all())
    eigenvalues = torch.linalg.eigvalsh(m)
    assert float(eigenvalues[-1]) == pytest.approx(1)
    assert float(eigenvalues[:-1].abs().max()) < 1 - 1e-6  # connected, so that the nodes agree in the end


def test_a_ring_hears_its_two_neighbours_and_full_everybody() -> None:
    ring = Ring().matrix(6)
    assert [(row > 0).nonzero().squeeze(1).tolist() for row in ring] == [
        sorted({(k - 1) % 6, k, (k + 1) % 6}) for k in range(6)
    ]
    assert torch.allclose(ring[0, [0, 1, 5]], torch.full((3,), 1 / 3, dtype=torch.float64))
    assert torch.allclose(Full().matrix(5), torch.full((5, 5), 0.2, dtype=torch.float64))


# -- gossip ----------------------------------------------------------------------------------------
def outcome(values: Tensor, weights: Tensor | None = None, buffers: Tensor | None = None) -> Outcome:
    n = len(values)
    return Outcome(
        uploads=Model(values),
        states=(),
        weights=torch.ones(n) if weights is None else weights,
        buffers=torch.zeros(n, 2) if buffers is None else buffers,
    )


@given(st.integers(2, 12), st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_mixing_preserves_the_mean(nodes: int, seed: int) -> None:
    values = torch.randn(nodes, 5, generator=torch.Generator().manual_seed(seed))
    heard, buffers, ok = gossip(Ring().matrix(nodes), outcome(values, buffers=values[:, :2]), torch.ones(nodes))
    assert bool(ok.all())
    assert torch.allclose(heard.total.w.mean(0), values.double().mean(0), atol=1e-12)
    assert torch.allclose(buffers.mean(0), values[:, :2].double().mean(0), atol=1e-12)


@given(st.integers(3, 10), st.data())
@settings(max_examples=40, deadline=None)
def test_a_node_that_is_not_finite_is_cut_off_and_the_others_keep_their_mean(nodes: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, nodes - 1), min_size=1, max_size=nodes - 1))
    topology = data.draw(st.sampled_from([Ring(), Full()]))
    values = torch.randn(nodes, 4, generator=torch.Generator().manual_seed(nodes))
    for node in bad:
        values[node, 1] = data.draw(st.sampled_from([NAN, float("inf"), -float("inf")]))
    heard, _, ok = gossip(topology.matrix(nodes), outcome(values), torch.ones(nodes))
    good = [k for k in range(nodes) if k not in bad]
    assert ok.tolist() == [k not in bad for k in range(nodes)]
    mixed = heard.total.w[good]
    assert bool(mixed.isfinite().all())
    assert torch.allclose(mixed.mean(0), values[good].double().mean(0), atol=1e-12)
    assert torch.allclose(heard.weight, torch.ones(nodes, dtype=torch.float64))


def test_senders_are_the_neighbours_that_were_heard() -> None:
    values = torch.zeros(5, 1)
    heard, _, _ = gossip(Ring().matrix(5), outcome(values), torch.ones(5))
    assert heard.senders.tolist() == [3.0] * 5
    values[2] = NAN
    heard, _, _ = gossip(Ring().matrix(5), outcome(values), torch.ones(5))
    assert heard.senders.tolist() == [3.0, 2.0, 1.0, 2.0, 3.0]


class OneBadNode(DPSGD):
    """Node 2 computes nonsense in its second round."""

    def finish(self, x: Tensor, down: Model, mine: Any, work: Work) -> Any:
        hit = (work.examples == 7) & (work.round == 1)
        return super().finish(torch.where(hit, torch.full_like(x, NAN), x), down, mine, work)


@pytest.mark.parametrize("order", ["lian", "atc"])
@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_a_bad_node_keeps_what_it_had_and_the_network_goes_on(order: Any, executor: Any) -> None:
    fed = federation((5, 9, 7, 6))
    net = nn.Linear(5, 3)
    exp = experiment(fed, net, OneBadNode(order=order), executor=executor, topology=Ring())
    state, store = begin(exp), RamStore(4)
    named = []
    for _ in range(3):
        before = state
        state, excluded = advance(exp, state, store)
        named.append(excluded)
        if excluded:
            assert torch.equal(state.server.w[2], before.server.w[2])
        models = torch.cat([part.w for part in models_of(exp, state, store, torch.arange(4))])
        assert bool(models.isfinite().all())
    assert named == [(), (2,), ()]


# -- a server --------------------------------------------------------------------------------------
def group(ids: list[int], values: Tensor, weights: list[float], times: list[float] | None = None) -> Sound:
    out = outcome(values, torch.tensor(weights), buffers=values[:, :2])
    return sound(torch.tensor(ids), out, torch.tensor(times or [1.0] * len(ids)))


def test_the_mean_is_weighted_by_weight_and_by_times() -> None:
    values = torch.randn(3, 4)
    tally = add(Tally(), group([4, 1, 9], values, [10.0, 1.0, 5.0], [1.0, 3.0, 2.0]), keep=False)
    heard = inbox(tally, torch.ones(50))
    share = torch.tensor([10.0, 3.0, 10.0]).double()
    assert torch.allclose(heard.mean.w, share @ values.double() / 23, atol=1e-12)
    assert (float(heard.weight), float(heard.senders), float(heard.population)) == (23, 6, 50)
    assert torch.allclose(tally.buffers / tally.weight, share @ values[:, :2].double() / 23, atol=1e-12)
    assert heard.uploads == ()


@given(st.integers(1, 8), st.integers(1, 7))
@settings(max_examples=30, deadline=None)
def test_groups_add_up_to_the_whole(clients: int, cut: int) -> None:
    values, weights = torch.randn(clients, 3), (torch.rand(clients) + 0.1).tolist()
    ids = list(range(clients))
    whole = add(Tally(), group(ids, values, weights), keep=True)
    parts = Tally()
    for some in (ids[:cut], ids[cut:]):
        if some:
            parts = add(parts, group(some, values[some], [weights[i] for i in some]), keep=True)
    a, b = inbox(whole, torch.ones(9)), inbox(parts, torch.ones(9))
    assert torch.allclose(a.mean.w, b.mean.w, atol=1e-12)
    assert torch.equal(a.uploads.w, b.uploads.w)
    assert torch.equal(a.weights, b.weights)


def test_an_algorithm_that_is_not_linear_gets_every_upload_in_client_order() -> None:
    values = torch.arange(8.0).view(4, 2)
    tally = Tally()
    for ids in ([5, 2], [7, 0]):
        rows = values[[[0, 2, 5, 7].index(i) for i in ids]]
        tally = add(tally, group(ids, rows, [float(i) for i in ids]), keep=True)
    heard = inbox(tally, torch.ones(8))
    assert torch.equal(heard.uploads.w, values)
    assert heard.weights.tolist() == [0.0, 2.0, 5.0, 7.0]


@pytest.mark.parametrize("place", ["upload", "weight", "buffers"])
def test_a_client_that_is_not_finite_anywhere_is_left_out_and_named(place: str) -> None:
    values, weights, buffers = torch.ones(3, 2), torch.ones(3), torch.ones(3, 2)
    {"upload": values, "weight": weights, "buffers": buffers}[place][1] = NAN
    part = sound(torch.tensor([4, 6, 8]), outcome(values, weights, buffers), torch.ones(3))
    assert part.excluded == (6,)
    assert part.ids.tolist() == [4, 8]
    tally = add(Tally(), part, keep=False)
    assert tally.weight == 2.0
    assert tally.excluded == (6,)
    assert bool(inbox(tally, torch.ones(9)).mean.w.isfinite().all())


def test_a_group_in_which_nobody_is_sound_adds_nothing() -> None:
    part = group([1, 2], torch.full((2, 3), NAN), [1.0, 1.0])
    tally = add(Tally(), part, keep=False)
    assert tally.total is None
    assert tally.excluded == (1, 2)
    more = add(tally, group([3], torch.ones(1, 3), [1.0]), keep=False)
    assert more.excluded == (1, 2)
    assert more.senders == 1.0


class Faulty(FedAvg):
    """The client with seven examples uploads nonsense."""

    bad: ClassVar[tuple[int, ...]] = (7,)

    def finish(self, x: Tensor, down: Model, mine: Any, work: Work) -> Any:
        hit = torch.stack([work.examples == n for n in self.bad]).any()
        return Update(torch.where(hit, torch.full_like(x, NAN), x - down.w)), ()


class AllFaulty(Faulty):
    bad: ClassVar[tuple[int, ...]] = (5, 9, 7, 6)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_the_round_is_that_of_the_others(executor: Any) -> None:
    fed, net = federation((5, 9, 7, 6)), nn.Linear(5, 3)
    exp = experiment(fed, net, Faulty(), executor=executor)
    state, excluded = advance(exp, begin(exp), RamStore(4))
    assert excluded == (2,)
    rows = fed.train._replace(start=torch.tensor([0, 5, 14, 14, 20]), rows=fed.train.rows[[*range(14), *range(21, 27)]])
    others = experiment(fed._replace(train=rows), net, FedAvg(), executor=executor)
    expected, _ = advance(others, begin(others), RamStore(4))
    assert torch.allclose(state.server.w, expected.server.w, atol=1e-6)


def test_when_nobody_is_finite_the_run_stops_with_round_clients_and_rate() -> None:
    exp = experiment(federation((5, 9, 7, 6)), nn.Linear(5, 3), AllFaulty(), local=Local(lr=0.25))
    with pytest.raises(DivergedError, match=r"round 1: .*clients 0, 1, 2, 3.*learning rate was 0\.25") as caught:
        advance(exp, begin(exp), RamStore(4))
    assert caught.value.exit_code == 3


class Exploding(FedAvg):
    def update(self, server: Model, inbox: Inbox[Update]) -> Model:
        return Model(server.w * float("inf"))


def test_a_server_that_is_not_finite_stops_the_run() -> None:
    exp = experiment(federation((5, 9)), nn.Linear(5, 3), Exploding(), cohort=Cohort(size=1))
    with pytest.raises(DivergedError, match=r"round 1: the model is no longer finite; .*client \d.*learning rate"):
        advance(exp, begin(exp), RamStore(2))


def test_repeated_draws_count_as_often_as_they_were_drawn() -> None:
    fed = federation((30, 2, 1))
    exp = experiment(fed, nn.Linear(5, 3), FedAvg(weighting="uniform"), cohort=Cohort(size=7, sampling="proportional"))
    drawn = exp.present(0).drawn
    assert float(drawn.times.sum()) == 7
    assert float(drawn.times.max()) > 1
    state, _ = advance(exp, begin(exp), RamStore(3))
    parts = [moved_alone(exp, client) for client in drawn.ids.tolist()]
    want = exp.task.w0.double() + (drawn.times.double() @ torch.stack(parts).double()) / 7
    assert torch.allclose(state.server.w.double(), want, atol=1e-6)


def moved_alone(exp: Any, client: int) -> Tensor:
    (one,) = plans(exp.local, exp.federation.train, torch.tensor([client]), Address(3, 0), lr=0.05, lanes=1)
    with torch.no_grad():
        done = train(exp.algorithm, exp.federation, one, exp.given(begin(exp), RamStore(3), one.ids))
    return Tensor(done.uploads.dw[0])
