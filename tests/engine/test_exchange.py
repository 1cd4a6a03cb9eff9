"""The exchange with a server: weighted sums, and clients whose numbers are not finite left out of them."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.algorithm import Inbox, Model, Update, Work
from fedloom.algorithms.fedavg import FedAvg
from fedloom.core import tree
from fedloom.core.errors import DivergedError
from fedloom.core.optim import Local
from fedloom.engine.exchange import Received, Tally, add, inbox, keep_finite
from fedloom.engine.local import Outcome, train
from fedloom.engine.plan import Address, Cohort, plans
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from support.worlds import experiment, federation

NAN = float("nan")


def outcome(values: Tensor, weights: Tensor | None = None, buffers: Tensor | None = None) -> Outcome:
    n = len(values)
    return Outcome(
        uploads=Model(values),
        states=(),
        weights=torch.ones(n) if weights is None else weights,
        buffers=torch.zeros(n, 2) if buffers is None else buffers,
    )


# -- a server --------------------------------------------------------------------------------------
def group(ids: list[int], values: Tensor, weights: list[float], times: list[float] | None = None) -> Received:
    out = outcome(values, torch.tensor(weights), buffers=values[:, :2])
    return keep_finite(torch.tensor(ids), out, torch.tensor(times or [1.0] * len(ids)))


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
    part = keep_finite(torch.tensor([4, 6, 8]), outcome(values, weights, buffers), torch.ones(3))
    assert part.excluded == (6,)
    assert part.ids.tolist() == [4, 8]
    tally = add(Tally(), part, keep=False)
    assert tally.weight == 2.0
    assert tally.excluded == (6,)
    assert bool(inbox(tally, torch.ones(9)).mean.w.isfinite().all())


PLACES = ("upload", "weight", "buffers", "state", "model")


@pytest.mark.slow
@given(st.integers(1, 6), st.data())
@settings(max_examples=80, deadline=None)
def test_the_sums_tell_exactly_what_a_look_at_every_row_would(clients: int, data: st.DataObject) -> None:
    """Whatever is not finite, wherever it is, and whatever the weights: zero may not hide it, nor may it cancel."""
    odd = st.sampled_from([NAN, float("inf"), -float("inf"), 3.4e38, -3.4e38])
    parts = {name: torch.randn(clients, 4, generator=torch.Generator().manual_seed(clients)) for name in PLACES}
    parts["weight"] = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 1.0, 1e-38, 3e38]), min_size=clients, max_size=clients))
    )
    for name, row in data.draw(st.sets(st.tuples(st.sampled_from(PLACES), st.integers(0, clients - 1)), max_size=3)):
        parts[name][row if name == "weight" else (row, 1)] = data.draw(odd)
    done = outcome(parts["upload"], parts["weight"], parts["buffers"])
    done = done._replace(states=(parts["state"],), models=parts["model"])
    ok, times = tree.finite_rows(done, clients), torch.arange(1.0, clients + 1)
    part = keep_finite(torch.arange(clients), done, times)
    assert part.ids.tolist() == ok.nonzero().squeeze(1).tolist()
    assert part.excluded == tuple((~ok).nonzero().squeeze(1).tolist())
    weights = parts["weight"][ok].double() * times[ok]
    want = tree.mix(weights[None], (Model(parts["upload"][ok]), parts["buffers"][ok]))
    assert torch.equal(part.weights, weights)
    assert torch.equal(part.sums[0].w, want[0].w)
    assert torch.equal(part.sums[1], want[1])


def test_what_is_in_the_sums_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    whole = tree.finite_rows
    monkeypatch.setattr(
        tree, "finite_rows", lambda t, n: looked.extend(x.numel() for x in tree.leaves(t)) or whole(t, n)
    )
    keep_finite(torch.arange(50), outcome(torch.randn(50, 1000)), torch.ones(50))
    assert sum(looked) < 2000  # one total and a few numbers for each client, not 50,000


def test_a_group_in_which_nobody_is_finite_adds_nothing() -> None:
    part = group([1, 2], torch.full((2, 3), NAN), [1.0, 1.0])
    tally = add(Tally(), part, keep=False)
    assert tally.total is None
    assert tally.excluded == (1, 2)
    more = add(tally, group([3], torch.ones(1, 3), [1.0]), keep=False)
    assert more.excluded == (1, 2)
    assert more.senders == 1.0


def test_a_group_of_nobody_adds_nothing() -> None:
    """Where everybody of a group came too late."""
    tally = add(Tally(), group([], torch.ones(0, 3), []), keep=True)
    assert (tally.total, tally.excluded) == (None, ())


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
