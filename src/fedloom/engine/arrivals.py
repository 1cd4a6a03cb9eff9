"""An asynchronous server: it applies each upload when it arrives and sends the new model at once.

The devices and links are those of ``clock``, but there are no rounds: a client trains the model that it was sent,
however stale, while other clients change the server's. The simulation advances from arrival to arrival::

    t = the earliest arrival of all clients at work
    the clients that arrive at t have trained, each from the model that it was sent
    server = update(server, what they send)
    as many idle clients are sent the new model, and arrive at t + the time that the clock gives them

So arrivals depend only on the settings and the seed, never on the numbers or on the real time of training,
which is computed when its result is due. Clients that were sent the same model and arrive together train side by side.
A round is as many arrivals as there are clients at work at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithm.capabilities import sent_bytes, upload_bytes
from fedloom.core import rng, tree
from fedloom.core.errors import DivergedError
from fedloom.engine.clock import Present
from fedloom.engine.divergence import names_of, rate, refuse_divergence
from fedloom.engine.exchange import Tally, add, inbox, keep_finite
from fedloom.engine.lateness import client_work
from fedloom.engine.plan import Address, Drawn, Group, amounts, draw_cohort, plans
from fedloom.engine.state import ClientWork, Experiment, Round, RunState
from fedloom.engine.store import ClientStore
from fedloom.engine.training import keep, train_all
from fedloom.engine.uploads import as_sent, upload_size


class UnderWay(NamedTuple):
    """The clients at work, and the models they train."""

    ids: Tensor  # [M] long
    step: Tensor  # [M] long: how many steps the server had taken when it sent the model
    round: Tensor  # [M] long: the round of that moment, for the learning rate
    arrival: Tensor  # [M] float64: the second at which the upload arrives
    server: Any  # [M, ...] the server at that moment
    buffers: Tensor  # [M, Q] running statistics, likewise
    steps: Tensor  # [] long: the steps of the server so far

    def due(self) -> Tensor:
        """The indices of the clients that arrive next, all at one instant."""
        return (self.arrival == self.arrival.min()).nonzero().squeeze(1)


class Traffic(NamedTuple):
    """Bytes that one client receives and sends."""

    down: int
    up: int


def first_sent(exp: Experiment, state: RunState) -> UnderWay:
    """The clients that are sent the first model; as many are at work from then on."""
    ids = draw_cohort(exp.cohort, exp.federation.train.sizes, exp.seed, 0).ids
    count = len(ids)
    none = torch.zeros(count, dtype=torch.int64)
    server, buffers = tree.tmap(lambda x: x.expand(count, *x.shape).clone(), (state.server, state.buffers))
    blank = UnderWay(ids, none, none, none.double(), server, buffers, torch.tensor(0))
    return sent_out(exp, state._replace(under_way=blank), torch.arange(count), ids, traffic_of(exp, state))


def traffic_of(exp: Experiment, state: RunState) -> Traffic:
    if not exp.algorithm.traits.communicates:
        return Traffic(0, 0)
    sent = sent_bytes(exp.algorithm, exp.algorithm.send(state.server)) + tree.nbytes(exp.travelling(state.buffers))
    return Traffic(sent, upload_size(exp, state))


def sent_out(exp: Experiment, state: RunState, places: Tensor, ids: Tensor, traffic: Traffic) -> UnderWay:
    """The clients at work after the current server was sent to these clients, which take these ``places``."""
    now, sizes = state.under_way, exp.federation.train.sizes[ids]
    present = Present(Drawn(ids, torch.ones(len(ids))), amounts(exp.local, sizes).steps, len(ids))
    arrival = exp.timetable(int(now.steps), present, traffic.up, traffic.down).arrival

    def put(column: Tensor, value: Tensor) -> Tensor:
        at = places.to(column.device)
        return column.index_copy(0, at, value.expand(len(at), *column.shape[1:]).to(column))

    return UnderWay(
        ids=put(now.ids, ids),
        step=put(now.step, now.steps),
        round=put(now.round, torch.tensor(state.round)),
        arrival=put(now.arrival, state.seconds + arrival),
        server=tree.tmap(put, now.server, state.server),
        buffers=put(now.buffers, state.buffers),
        steps=now.steps,
    )


def free(exp: Experiment, under_way: UnderWay, places: Tensor) -> Tensor:
    """The clients that are sent the next model: as many as arrived, drawn from all idle ones; in order."""
    able = (exp.federation.train.sizes > 0).nonzero().squeeze(1)
    others = under_way.ids[~torch.isin(torch.arange(len(under_way.ids)), places)]
    idle = able[~torch.isin(able, others)]
    chance = rng.stream(exp.seed, "free", int(under_way.steps))
    chosen = torch.from_numpy(chance.choice(len(idle), len(places), replace=False))
    return idle[chosen].sort().values


def moved_on(exp: Experiment, state: RunState, places: Tensor, traffic: Traffic) -> RunState:
    """The state after those at these ``places`` have arrived, and the current server was sent to as many."""
    now = state.under_way
    after = state._replace(
        down=state.down + traffic.down * len(places),
        seconds=float(now.arrival[places[0]]) + exp.system.aggregation,
        under_way=now._replace(steps=now.steps + 1),
    )
    return after._replace(under_way=sent_out(exp, after, places, free(exp, after.under_way, places), traffic))


def arrivals_round(exp: Experiment, state: RunState, store: ClientStore) -> Round:
    """As many arrivals as there are clients at work, and their measurements."""
    traffic, busy, round_ = traffic_of(exp, state), len(state.under_way.ids), state.round
    staleness: list[int] = []
    excluded: list[int] = []
    did: list[ClientWork] = []
    while len(did) < busy:
        places = state.under_way.due()
        staleness += (state.under_way.steps - state.under_way.step[places]).tolist()
        state, came, lost = _taken(exp, state, store, places, traffic)
        did, excluded = [*did, *came], [*excluded, *lost]
    refuse_divergence(exp, round_, tuple(sorted(excluded)), nobody=len(excluded) == len(did))
    found = {}
    if exp.evaluate.due(round_ + 1, exp.rounds):
        stale = torch.tensor(staleness, dtype=torch.float64)
        found = {"staleness/mean": float(stale.mean()), "staleness/max": float(stale.max())}
    return Round(state._replace(round=round_ + 1), tuple(sorted(set(excluded))), found, tuple(did))


def _taken(
    exp: Experiment, state: RunState, store: ClientStore, places: Tensor, traffic: Traffic
) -> tuple[RunState, list[ClientWork], tuple[int, ...]]:
    """The state after the next instant, the clients that arrived, and those whose numbers are not finite."""
    alg, now = exp.algorithm, state.under_way
    tally, gradients, up = Tally(), 0.0, 0
    did: list[ClientWork] = []
    for step in sorted(set(now.step[places].tolist())):
        some = places[now.step[places] == step]
        at = int(some[0])  # all of them were sent the same model
        past = state._replace(server=tree.take(now.server, at), buffers=now.buffers[at])
        groups = _groups(exp, now.ids[some], step, int(now.round[at]), int(now.steps) - step)
        for trained in train_all(exp, past, store, groups):
            ids, outcome = trained.group.ids, as_sent(exp, step, trained.group.ids, trained.outcome, len(places))
            part = keep_finite(ids, outcome, torch.ones(len(ids)))
            keep(exp, store, trained, part.ids)
            tally = add(tally, part)
            gradients += float(outcome.gradients.sum())
            up += upload_bytes(alg, outcome.uploads) + tree.nbytes(exp.travelling(outcome.buffers))
            did += client_work(ids, outcome.steps.long().tolist(), None)
    after = state._replace(up=state.up + (up if alg.traits.communicates else 0), gradients=state.gradients + gradients)
    if tally.total is not None:
        received = inbox(tally, exp.federation.train.sizes, (exp.seed, int(now.steps)))
        after = after._replace(server=alg.update(state.server, received))
        if not bool(tree.finite_rows(tree.tmap(lambda x: x[None], after.server), 1)[0]):
            senders = names_of(now.ids[places].tolist())
            what = f"round {state.round + 1}: the model is no longer finite after {senders}"
            raise DivergedError(f"{what}; {rate(exp, state.round)}")
    return moved_on(exp, after, places, traffic), did, tally.excluded


def _groups(exp: Experiment, ids: Tensor, step: int, round_: int, staleness: int) -> Iterator[Group]:
    """The groups of clients that were sent the model of this ``step``, in this round."""
    lr, address = exp.local.lr_at(round_, exp.rounds), Address(exp.seed, step)
    for group in plans(exp.local, exp.federation.train, ids, address, lr=lr, lanes=exp.lanes, mixed=exp.captures):
        stale = torch.full((len(group.ids),), float(staleness))
        yield group._replace(work=group.work._replace(staleness=stale))
