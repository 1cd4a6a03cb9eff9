"""A round with a server, as a sequence of stages: each is a value in, a value out.

``receive`` also puts the new states of clients into their store.

called     the clients of the round, what each is sent, which of them will be late    call_clients
trained    local work, one group after another                                        training.train_all
arrived    uploads as they reach the server: corrupted, protected, finite, on time    receive
accounted  bytes, simulated time and privacy                                          account
inbox      the sums of the uploads, or the result of a robust rule                    combine
server     the algorithm's own step                                                   step
recorded   diagnostics, participants' scores, the weight of bad clients               record
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedloom.algorithm import Inbox
from fedloom.algorithm.capabilities import (
    after_empty_round,
    contributions_of,
    sent_bytes,
    statistics_after,
    upload_bytes,
)
from fedloom.core import tree
from fedloom.engine.clock import Present
from fedloom.engine.curvature import Moves
from fedloom.engine.diagnose import diagnose
from fedloom.engine.divergence import refuse_divergence
from fedloom.engine.evaluate import ParticipantScores
from fedloom.engine.exchange import Received, Tally, add, inbox, keep_finite
from fedloom.engine.fleet import Fleet, Order
from fedloom.engine.lateness import Lateness, client_work, foresee_lateness
from fedloom.engine.local import Outcome
from fedloom.engine.state import Experiment, Round, RunState
from fedloom.engine.store import ClientStore
from fedloom.engine.training import TrainedGroup, groups_of, keep, train_all
from fedloom.engine.uploads import as_sent, example_upload, upload_size
from fedloom.trust.corruption import mass
from fedloom.trust.ledger import Ledger
from fedloom.trust.mechanism import empty_round_noise
from fedloom.trust.robust import replaced

Screen: TypeAlias = Callable[[Tensor, Outcome, Tensor], Received]


class Wanted(NamedTuple):
    """What is measured in this round in addition to its result."""

    diagnostics: bool
    participants: bool  # the clients' scores on their own rows, before and after their training
    bad_weights: bool  # the weight of bad clients


class Called(NamedTuple):
    """The clients of a round."""

    present: Present
    lateness: Lateness
    down: int  # bytes that each of them is sent
    received: int  # bytes that the server has sent since the run began
    wanted: Wanted

    @property
    def ids(self) -> Tensor:
        return self.present.drawn.ids

    def times(self, ids: Tensor) -> Tensor:
        """How often each of these clients was drawn."""
        drawn = dict(zip(self.ids.tolist(), self.present.drawn.times.tolist(), strict=True))
        return torch.tensor([drawn[i] for i in ids.tolist()])


class GroupWork(NamedTuple):
    """What the clients of a group did; on a GPU perhaps not computed yet."""

    ids: Tensor  # [K]
    steps: Tensor  # [K]
    gradients: Tensor  # [] of all of them


class Arrived(NamedTuple):
    """What has reached the server so far."""

    tally: Tally = Tally()
    moves: tuple[Any, ...] = ()  # of each group, for the diagnostics
    scores: ParticipantScores = ParticipantScores()
    bytes: int = 0
    senders: int = 0
    work: tuple[GroupWork, ...] = ()
    uploads: Any = ()  # of the last group
    finite: Any = ()  # [] whether the last group is finite, if that was not checked


class Finished(NamedTuple):
    """A round whose numbers may still be on the GPU: how much work it took is added by ``settled``."""

    state: RunState
    excluded: tuple[int, ...] = ()
    found: dict[str, float] = {}  # noqa: RUF012  (never mutated)
    work: tuple[GroupWork, ...] = ()
    lateness: Lateness | None = None
    finite: Any = ()  # [] whether all that arrived is finite, if that was not checked


def star_round(exp: Experiment, state: RunState, store: ClientStore, screen: Screen = keep_finite) -> Finished:
    """One round with a server; ``screen`` excludes clients whose numbers are not finite."""
    called = call_clients(exp, state)
    if not len(called.ids):  # all clients were late or lost
        return Finished(_without_clients(exp, state)._replace(round=state.round + 1, down=called.received))
    arrived = Arrived()
    for trained in _local_work(exp, state, store, called):
        arrived = receive(exp, state, store, called, arrived, trained, screen)
    excluded = tuple(sorted(arrived.tally.excluded))
    nobody = arrived.tally.total is None
    refuse_divergence(exp, state.round, excluded, nobody=nobody and len(called.lateness.late) < len(called.ids))
    after = account(exp, state, called, arrived)
    if nobody:  # all were late
        found = arrived.scores.named(exp)
        after = after._replace(server=after_empty_round(exp.algorithm, state.server))
    else:
        received = combine(exp, state, arrived.tally)
        after = step(exp, after, arrived.tally, received)
        found = record(exp, state, called.wanted, arrived, received, after)
    return Finished(after, excluded, found, arrived.work, called.lateness, arrived.finite)


def call_clients(exp: Experiment, state: RunState) -> Called:
    """The clients of the round, what each of them is sent, and which will be late."""
    alg, present = exp.algorithm, exp.present(state.round)
    down = 0
    if alg.traits.communicates:
        down = sent_bytes(alg, alg.send(state.server)) + tree.nbytes(exp.travelling(state.buffers))
    received = state.down + down * (exp.federation.clients if alg.traits.sends_to_all else present.called)
    due = exp.evaluate.due(state.round + 1, exp.rounds)
    wanted = Wanted(due and bool(exp.evaluate.diagnostics), due and exp.evaluate.participants, due and bool(exp.bad))
    none = present.drawn.ids[:0]
    lateness = foresee_lateness(exp, state, present, down) if len(present.drawn.ids) else Lateness(none)
    return Called(present, lateness, down, received, wanted)


def _local_work(exp: Experiment, state: RunState, store: ClientStore, called: Called) -> Iterator[TrainedGroup]:
    if exp.fleet is not None:
        return _work_elsewhere(exp, exp.fleet, state, called)
    groups = groups_of(exp, state.round, called.present, called.lateness.extra)
    watched = called.wanted.diagnostics or called.wanted.participants
    return train_all(exp, state, store, groups, watched=watched, models=called.wanted.diagnostics)


def _work_elsewhere(exp: Experiment, fleet: Fleet, state: RunState, called: Called) -> Iterator[TrainedGroup]:
    """What the clients of a deployment have sent, in the groups in which a simulation would have trained them, so that
    sums have the same numbers in the same order. Those that did not respond are left out."""
    extra = called.lateness.extra
    order = Order(state.round, exp.sent(state.server), state.buffers, len(called.ids), extra)
    outcomes = fleet.train(exp, order, called.ids.tolist())
    for group in groups_of(exp, state.round, called.present, extra):
        places = [k for k, client in enumerate(group.ids.tolist()) if client in outcomes]
        if places:
            part = group.pick(places)
            outcome = tree.cat([outcomes.pop(client) for client in part.ids.tolist()])
            here = tree.take(outcome, slice(0, 0))  # no client trained here
            yield TrainedGroup(part, outcome, part.ids[:0], here.buffers, here)


def receive(
    exp: Experiment,
    state: RunState,
    store: ClientStore,
    called: Called,
    arrived: Arrived,
    trained: TrainedGroup,
    screen: Screen,
) -> Arrived:
    """What has arrived, with one more group, whose clients keep their new states from now on.

    A late client keeps its new state, too, unless the state must agree with the server, which did not use the upload.
    """
    alg, ids, wanted, late = exp.algorithm, trained.group.ids, called.wanted, called.lateness
    outcome = trained.outcome
    if exp.fleet is None:  # remote clients have done so themselves
        outcome = as_sent(exp, state.round, ids, outcome, len(called.ids))
    times = called.times(ids)
    part = screen(ids, outcome, times)
    keep(exp, store, trained, late.on_time(part.ids) if alg.traits.mirrored else part.ids)
    work = GroupWork(ids, outcome.steps, outcome.gradients.sum())
    if len(late.late):
        rows = (~torch.isin(ids, late.late)).nonzero().squeeze(1)
        outcome = tree.take(outcome, rows.to(exp.device))
        part = keep_finite(ids[rows], outcome, times[rows])
    each = wanted.diagnostics or alg.traits.each_upload or exp.aggregation.rule != "mean" or wanted.bad_weights
    return Arrived(
        tally=add(arrived.tally, part, keep=each),
        moves=(*arrived.moves, (part.ids, part.outcome.models, part.weights)) if wanted.diagnostics else (),
        scores=arrived.scores.with_group(exp, trained) if wanted.participants else arrived.scores,
        bytes=arrived.bytes + upload_bytes(alg, outcome.uploads) + tree.nbytes(exp.travelling(outcome.buffers)),
        senders=arrived.senders + len(outcome.weights),
        work=(*arrived.work, work),
        uploads=outcome.uploads,
        finite=part.finite,
    )


def combine(exp: Experiment, state: RunState, tally: Tally) -> Inbox[Any]:
    """What the server reads: the sums, or the result of a robust rule."""
    received = inbox(tally, exp.federation.train.sizes, (exp.seed, state.round))
    if exp.aggregation.rule != "mean":
        received = replaced(exp.aggregation, received)
    if exp.guard is not None and exp.guard.weight is not None:
        received = received._replace(weight=torch.full_like(received.weight, exp.guard.weight))
    return received


def step(exp: Experiment, state: RunState, tally: Tally, received: Inbox[Any]) -> RunState:
    """The server after the algorithm's step, and the running statistics."""
    if not exp.algorithm.traits.each_upload:  # kept for diagnostics: with or without them a round is the same
        received = received._replace(uploads=(), weights=())
    server = exp.algorithm.update(state.server, received)
    mean = (tally.buffers / tally.weight).to(state.buffers.dtype)
    return state._replace(server=server, buffers=statistics_after(exp.algorithm, state.buffers, mean, server))


def record(
    exp: Experiment, before: RunState, wanted: Wanted, arrived: Arrived, received: Inbox[Any], after: RunState
) -> dict[str, float]:
    """What was measured in this round."""
    found = arrived.scores.named(exp)
    if wanted.bad_weights:
        found |= _bad_weights(exp, before.server, received, after.server)
    if wanted.diagnostics:
        moves = Moves.of(arrived.moves, exp.algorithm.send(before.server).w)
        found |= diagnose(exp, moves, before.server, received, after.server, after.buffers)
    return found


def settled(state: RunState, done: Finished) -> Round:
    """A finished round after ``state``, once its numbers are computed: with the work of its clients."""
    gradients, work = 0.0, []
    for group in done.work:
        gradients += float(group.gradients)
        work += client_work(group.ids, group.steps.long().tolist(), done.lateness)
    after = done.state._replace(gradients=state.gradients + gradients)
    return Round(after, done.excluded, done.found, tuple(work))


def account(exp: Experiment, state: RunState, called: Called, arrived: Arrived) -> RunState:
    """The round's number, bytes, simulated time and privacy; the server's step is not included yet."""
    each = 0
    if exp.algorithm.traits.communicates:
        each = arrived.bytes // arrived.senders if arrived.senders else upload_size(exp, state)
    return state._replace(
        round=state.round + 1,
        up=state.up + (arrived.bytes if exp.algorithm.traits.communicates else 0),
        down=called.received,
        seconds=state.seconds + exp.timetable(state.round, called.present, each, called.down).next_,
        ledger=_charged(exp, state, called.ids, arrived.uploads),
    )


def _charged(exp: Experiment, state: RunState, ids: Tensor, uploads: Any = ()) -> Ledger | None:
    """The ledger after a round to which these clients contributed; ``uploads`` are some of theirs."""
    if exp.guard is None or state.ledger is None:
        return None
    return exp.guard.charged(state.ledger, ids, uploads)


def _without_clients(exp: Experiment, state: RunState) -> RunState:
    """The state after a round without clients: unchanged, or moved by the noise that hides this."""
    guard = exp.guard
    if guard is None or guard.weight is None:
        return state._replace(server=after_empty_round(exp.algorithm, state.server))
    address, sizes = (exp.seed, state.round), exp.federation.train.sizes
    total = empty_round_noise(guard, example_upload(exp, state), state.round)
    weight, senders, population, examples = torch.tensor(
        [guard.weight, 0, len(sizes), int(sizes.sum())], dtype=torch.float64, device=exp.device
    )
    nobody = torch.zeros(0, dtype=torch.int64, device=exp.device)
    received = Inbox(total, weight, senders, population, examples, address=address, clients=nobody)
    return state._replace(server=exp.algorithm.update(state.server, received), ledger=_charged(exp, state, nobody))


def _bad_weights(exp: Experiment, before: Any, received: Inbox[Any], after: Any) -> dict[str, float]:
    """The weight of bad clients in this round, if known."""
    weights = contributions_of(exp.algorithm, before, received, after)
    if weights is None:
        return {}
    found = mass(weights, torch.isin(received.clients, torch.tensor(exp.bad, device=received.clients.device)))
    return {} if found is None else {f"bad_clients/weight_{name}": value for name, value in found._asdict().items()}
