"""The run: a pure step from one RunState to the next, and the state from which it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom import tree
from fedloom.algorithm import Algorithm, Inbox, Work
from fedloom.corruption import Corruption, mass, poisoned
from fedloom.data.federation import Federation
from fedloom.engine.clock import Load, Present, System, Timetable, attend, speeds, timetable
from fedloom.engine.diagnose import Watch, diagnose
from fedloom.engine.evaluate import Evaluate, Judged, judge
from fedloom.engine.exchange import Tally, add, inbox, sound
from fedloom.engine.local import AnyAlgorithm, Executor, Given, Outcome, mapped, plain_batch, train
from fedloom.engine.plan import Address, Cohort, Drawn, Group, amounts, draw, plans
from fedloom.engine.store import ClientStore
from fedloom.engine.topology import Moment, Topology
from fedloom.errors import ConfigError, DivergedError, Fault
from fedloom.metrics import Verdicts, summary
from fedloom.optim import Local
from fedloom.privacy import Guard, protected, silence
from fedloom.robust import Aggregation, replaced
from fedloom.task import Task


class RunState(NamedTuple):
    """All that a run is at the end of a round; client state lives beside it in the store."""

    round: int  # rounds done
    server: Any  # the server's state, or [N, ...] the state of every node
    buffers: Tensor  # [Q] mean running statistics, or [N, Q]
    up: int  # bytes that clients have sent so far
    down: int  # bytes that clients have received so far
    seconds: float = 0.0  # that the rounds would have taken on the devices described
    gradients: float = 0.0  # evaluated so far, each on one batch of one client
    nodes: Any = ()  # what the engine keeps for the nodes of a network: Nodes

    @property
    def busiest(self) -> int:
        """Bytes that have passed the busiest endpoint so far: a node of a network, or the server."""
        return int(self.nodes.traffic.max()) if self.nodes else self.up + self.down


class Nodes(NamedTuple):
    """What the engine keeps for each node of a network, beside what the algorithm does."""

    traffic: Tensor  # [N] bytes that it has sent and received so far
    away: Tensor  # [N] for how many rounds it has been offline
    mass: Tensor  # [N] float64, of push-sum; 1 where it is not used


class Kept(NamedTuple):
    """What the store keeps for a client."""

    mine: Any  # the algorithm's
    buffers: Any  # its running statistics, where they stay local
    memory: Any  # its optimiser's memory, where that is kept from round to round


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that a round needs, resolved: objects instead of names."""

    algorithm: AnyAlgorithm  # bound to the task
    task: Task
    federation: Federation
    local: Local
    cohort: Cohort
    evaluate: Evaluate
    rounds: int
    seed: int
    device: torch.device
    executor: Executor
    lanes: int  # clients side by side
    topology: Topology | None = None
    system: System = field(default_factory=System)
    corruption: Corruption = field(default_factory=Corruption)
    bad: tuple[int, ...] = ()  # clients, in order
    aggregation: Aggregation = field(default_factory=Aggregation)
    guard: Guard | None = None  # of what clients send, where it is private
    buffers: Literal["average", "local"] = "average"

    @property
    def is_network(self) -> bool:
        return self.algorithm.family == "gossip"

    @property
    def keeps_buffers(self) -> bool:
        """Whether running statistics stay with the clients."""
        return self.buffers == "local" and self.task.buffers0.numel() > 0

    @property
    def keeps_memory(self) -> bool:
        """Whether clients keep their optimisers' memory from round to round."""
        return self.local.state == "persist"

    def travelling(self, buffers: Tensor) -> Any:
        """Running statistics as far as they are sent: not at all where they stay with the clients."""
        return () if self.keeps_buffers else buffers

    def given(self, state: RunState, store: ClientStore, ids: Tensor) -> Given:
        """What these clients hold before they train in the next round."""
        at = ids.to(self.device)
        if self.is_network:
            nodes = tree.take(state.server, at)
            down, buffers = mapped(self.algorithm.send, (0,))(nodes), state.buffers[at]
            fresh = self.algorithm.join(tree.take(down, 0))
        else:
            down, buffers = self.algorithm.send(state.server), state.buffers.expand(len(ids), -1)
            fresh = self.algorithm.join(down)
        blank = Kept(fresh, self.task.buffers0 if self.keeps_buffers else (), ())
        if self.keeps_memory:
            start = self.algorithm.start(tree.take(down, 0) if self.is_network else down, fresh)
            blank = blank._replace(memory=self.algorithm.memory(start))
        kept = store.gather(ids, blank)
        buffers = kept.buffers if self.keeps_buffers else buffers
        return Given(down, kept.mine, buffers, not self.is_network, kept.memory if self.keeps_memory else None)

    def present(self, round_: int) -> Present:
        """Who takes part in this round, and how far; in a network without a server, everybody who can train."""
        sizes = self.federation.train.sizes
        if self.is_network:
            ids = torch.arange(len(sizes))
            if self.topology is not None and not self.topology.train_offline:
                ids = ids[torch.from_numpy(~self.topology.offline(len(sizes), Moment(self.seed, round_)))]
            return Present(Drawn(ids, torch.ones(len(ids))), amounts(self.local, sizes[ids]).steps, len(ids))
        drawn = draw(self.cohort, sizes, self.seed, round_)
        amount = amounts(self.local, sizes[drawn.ids])
        epochs = self.local.epochs if self.local.steps is None else 1
        partial = self.algorithm.partial_work
        return attend(self.system, drawn, amount, epochs, (self.seed, round_), partial=partial)

    def timetable(self, round_: int, present: Present, up: int, down: int) -> Timetable:
        """When what happens in this round, on the devices described."""
        ids = present.drawn.ids
        amount = amounts(self.local, self.federation.train.sizes[ids])
        epoch = amount.size.double()
        phases = self.algorithm.phases()
        beside = [p for p in phases if not p.waiting and not p.is_main]
        passes = sum(p.cost * (p.epochs or 0) for p in beside)
        steps = sum(p.cost * (p.steps or 0) for p in beside)
        cost = next((p.cost for p in phases if p.is_main), 0.0)
        main = cost * epoch * present.steps / amount.per_epoch.clamp(min=1)
        load = Load(main, cost * epoch, passes * epoch + steps * amount.width)
        return timetable(self.system, ids, load, self.speeds[ids], up, down, (self.seed, round_))

    @cached_property
    def speeds(self) -> Tensor:
        """Examples per second of every client.  ``[N]``"""
        return speeds(self.system, self.federation.clients, self.seed)


def begin(exp: Experiment) -> RunState:
    """The state before the first round: every node of a network starts from the same model."""
    server, buffers = exp.algorithm.init(exp.task.w0), exp.task.buffers0
    if exp.is_network:
        n = exp.federation.clients
        server = tree.tmap(lambda x: x.expand(n, *x.shape).contiguous(), server)
        buffers = buffers.expand(n, -1).contiguous()
        zero = torch.zeros(n, dtype=torch.int64)
        return RunState(0, server, buffers, 0, 0, nodes=Nodes(zero, zero, torch.ones(n, dtype=torch.float64)))
    return RunState(0, server, buffers, 0, 0)


class Round(NamedTuple):
    """A round that was done."""

    state: RunState  # after it
    excluded: tuple[int, ...]  # clients that were left out because their work was not finite
    found: dict[str, float]  # what was measured of it, where it is one that is evaluated
    work: tuple[Did, ...]  # who took part


class Did(NamedTuple):
    """What one client did in a round."""

    client: int
    steps: int
    extra: int  # epochs while it waited
    late: bool  # its upload came after the deadline, and was not used


def advance(exp: Experiment, state: RunState, store: ClientStore) -> tuple[RunState, tuple[int, ...]]:
    """One round; also the clients that were left out of it because their work was not finite."""
    done = advance_watched(exp, state, store)
    return done.state, done.excluded


def advance_watched(exp: Experiment, state: RunState, store: ClientStore) -> Round:
    """One round, and what was measured of it."""
    with torch.no_grad():
        if exp.is_network:
            from fedloom.engine.gossip import gossip_round  # which needs what is in here

            done = gossip_round(exp, state, store)
        else:
            done = _star_round(exp, state, store)
    after = done.state
    if not bool(tree.finite_rows(tree.tmap(lambda x: x[None], (after.server, after.buffers)), 1)[0]):
        raise DivergedError(
            f"round {state.round + 1}: the model is no longer finite; clients of the round: "
            f"{names_of(exp.present(state.round).drawn.ids.tolist())}; {rate(exp, state.round)}"
        )
    return done


def _star_round(exp: Experiment, state: RunState, store: ClientStore) -> Round:
    alg, present = exp.algorithm, exp.present(state.round)
    drawn = present.drawn
    down = alg.sent_bytes(alg.send(state.server)) + tree.nbytes(exp.travelling(state.buffers))
    down = down if alg.communicates else 0
    received = state.down + down * (exp.federation.clients if alg.sends_to_all else present.called)
    if not len(drawn.ids):  # everybody was late or lost: nothing is learned, and nothing else changes
        return Round(_unheard(exp, state)._replace(round=state.round + 1, down=received), (), {}, ())
    due = exp.evaluate.due(state.round + 1, exp.rounds)
    robust = exp.aggregation.rule != "mean"
    watched, judged = due and bool(exp.evaluate.diagnostics), due and exp.evaluate.participants
    times = dict(zip(drawn.ids.tolist(), drawn.times.tolist(), strict=True))
    ahead = look_ahead(exp, state, present, down)
    tally, watch, fits, did, up, sent, gradients = Tally(), Watch(), Fits(), [], 0, 0, 0.0
    for group in groups_of(exp, state.round, present, ahead.extra):
        given = exp.given(state, store, group.ids)
        outcome = train(alg, exp.federation, group, given, watched=watched or judged)
        fits = fits.seen(exp, group.ids, given.buffers, outcome) if judged else fits
        outcome = _sent(exp, state.round, group.ids, outcome, len(drawn.ids))
        did += _did(group, outcome, ahead)
        gradients += float(outcome.gradients.sum())
        count = torch.tensor([times[i] for i in group.ids.tolist()])
        part = sound(group.ids, outcome, count)
        keep(exp, store, part.ids, part.outcome)
        if len(ahead.late):  # who is late keeps what it has learned, and is not heard
            on_time = (~torch.isin(group.ids, ahead.late)).nonzero().squeeze(1)
            outcome = tree.take(outcome, on_time.to(exp.device))
            part = sound(group.ids[on_time], outcome, count[on_time])
        tally = add(tally, part, keep=watched or alg.hears_each or robust or (due and bool(exp.bad)))
        watch = watch.seen(part) if watched else watch
        up += alg.upload_bytes(outcome.uploads) + tree.nbytes(exp.travelling(outcome.buffers))
        sent += len(outcome.weights)
    each = up // sent if sent else _upload_size(exp, state)
    table = exp.timetable(state.round, present, each if alg.communicates else 0, down)
    after = state._replace(
        round=state.round + 1,
        up=state.up + (up if alg.communicates else 0),
        down=received,
        seconds=state.seconds + table.next_,
        gradients=state.gradients + gradients,
    )
    excluded = tuple(sorted(tally.excluded))
    if tally.total is None and len(ahead.late) < len(drawn.ids):
        raise DivergedError(
            f"round {state.round + 1}: no client returned finite numbers ({names_of(excluded)}); "
            f"{rate(exp, state.round)}"
        )
    if excluded and exp.guard is not None and exp.guard.release.noise:
        raise DivergedError(
            f"round {state.round + 1}: the work of {names_of(excluded)} is not finite; to leave it out would tell so, "
            f"and epsilon would no longer hold; {rate(exp, state.round)}"
        )
    found = fits.named()
    if tally.total is None:  # nobody was on time
        return Round(after, excluded, found, tuple(did))
    heard = inbox(tally, exp.federation.train.sizes, (exp.seed, state.round))
    heard = replaced(exp.aggregation, heard) if robust else heard
    if exp.guard is not None and exp.guard.weight is not None:
        heard = heard._replace(weight=torch.full_like(heard.weight, exp.guard.weight))
    server = alg.update(state.server, heard)
    if due and exp.bad:
        found |= _bad_weights(exp, state.server, heard, server)
    buffers = alg.statistics(state.buffers, (tally.buffers / tally.weight).to(state.buffers.dtype))
    if watched:
        moves = watch.closed(alg.send(state.server).w)
        found |= diagnose(exp, moves, state.server, heard, server, buffers)
    return Round(after._replace(server=server, buffers=buffers), excluded, found, tuple(did))


def _sent(exp: Experiment, round_: int, ids: Tensor, outcome: Outcome, senders: int) -> Outcome:
    """What these clients, among so many of the round, send: bad ones poison it, and all protect it if they are to."""
    address = (exp.seed, round_)
    if exp.bad and exp.corruption.changes:
        bad = torch.isin(ids, torch.tensor(exp.bad))
        outcome = outcome._replace(uploads=poisoned(exp.corruption, outcome.uploads, ids, bad, address))
    if exp.guard is None:
        return outcome
    weights = outcome.weights
    if type(exp.algorithm).weight is Algorithm.weight:
        weights = torch.ones_like(weights)
    elif not bool((weights == 1).all()):
        what = f"{type(exp.algorithm).__name__} weighs clients by what they did, which the weights would tell"
        raise ConfigError([Fault("privacy.clip", f"{what} (got {exp.guard.clip:g})", "let it count clients alike")])
    return outcome._replace(uploads=protected(exp.guard, outcome.uploads, ids, senders, address), weights=weights)


def _unheard(exp: Experiment, state: RunState) -> RunState:
    """The state after a round in which nobody took part: as it was, or moved by noise that hides just that."""
    guard = exp.guard
    if guard is None or guard.weight is None:
        return state
    address, sizes = (exp.seed, state.round), exp.federation.train.sizes
    total = silence(guard, specimen(exp, state), address)
    weight, senders, population, examples = torch.tensor(
        [guard.weight, 0, len(sizes), int(sizes.sum())], dtype=torch.float64, device=exp.device
    )
    nobody = torch.zeros(0, dtype=torch.int64, device=exp.device)
    heard = Inbox(total, weight, senders, population, examples, address=address, clients=nobody)
    return state._replace(server=exp.algorithm.update(state.server, heard))


def _bad_weights(exp: Experiment, before: Any, heard: Inbox[Any], after: Any) -> dict[str, float]:
    """How much bad clients counted in this round, where that is known."""
    weights = exp.algorithm.counted(before, heard, after)
    if weights is None:
        return {}
    found = mass(weights, torch.isin(heard.clients, torch.tensor(exp.bad, device=heard.clients.device)))
    return {} if found is None else {f"bad_clients/weight_{name}": value for name, value in found._asdict().items()}


class Fits(NamedTuple):
    """How the clients of a round did on their own rows, just before and just after their training."""

    before: tuple[Verdicts, ...] = ()
    after: tuple[Verdicts, ...] = ()

    def seen(self, exp: Experiment, ids: Tensor, buffers: Tensor, outcome: Outcome) -> Fits:
        before = judge(exp, Judged(ids, outcome.begun, buffers))
        after = judge(exp, Judged(ids, outcome.models, outcome.buffers))
        return Fits((*self.before, before), (*self.after, after))

    def named(self) -> dict[str, float]:
        before, after = Verdicts.cat(self.before), Verdicts.cat(self.after)
        return summary("participants/pre_fit/test", before) | summary("participants/post_fit/test", after)


class Ahead(NamedTuple):
    """What the devices described make of a round, known before anybody trains."""

    late: Tensor  # the clients that miss the deadline
    extra: dict[int, int] | None = None  # epochs that each client has time for while it waits


def look_ahead(exp: Experiment, state: RunState, present: Present, down: int) -> Ahead:
    """Who will be late, and who will wait how long; free where there is no deadline and nobody trains on."""
    ids, alg = present.drawn.ids, exp.algorithm
    if exp.system.deadline is None and not any(phase.waiting for phase in alg.phases()):
        return Ahead(ids[:0])
    table = exp.timetable(state.round, present, _upload_size(exp, state) if alg.communicates else 0, down)
    extra = alg.idle_epochs(ids, table.wait, table.epoch, (exp.seed, state.round))
    late = ids[~table.on_time]
    return Ahead(late, None if extra is None else dict(zip(ids.tolist(), extra.tolist(), strict=True)))


def _upload_size(exp: Experiment, state: RunState) -> int:
    """Bytes of an upload, from one of a client that has not trained: their number does not depend on its values."""
    upload = tree.tmap(lambda x: x[None], specimen(exp, state))
    return exp.algorithm.upload_bytes(upload) + tree.nbytes(exp.travelling(state.buffers))


def specimen(exp: Experiment, state: RunState) -> Any:
    """The upload of a client that has not trained, to see of what it consists."""
    alg, one = exp.algorithm, torch.ones((), device=exp.device)
    down = alg.send(state.server)
    mine = alg.join(down)
    survey: Any = ()
    if alg.surveys:
        survey = alg.survey(
            plain_batch(exp.federation, exp.federation.train.rows[:1], one[None], state.buffers), down, mine
        )
    work = Work(one, one, one, one, survey, one.long(), one)
    return alg.finish(alg.start(down, mine), down, mine, work)[0]


def _did(group: Group, outcome: Outcome, ahead: Ahead) -> list[Did]:
    late, extra = set(ahead.late.tolist()), ahead.extra or {}
    each = zip(group.ids.tolist(), outcome.steps.long().tolist(), strict=True)
    return [Did(client, steps, extra.get(client, 0), client in late) for client, steps in each]


def groups_of(
    exp: Experiment, round_: int, present: Present, extra: Mapping[int, int] | None = None
) -> Iterator[Group]:
    """The groups in which the clients of a round train."""
    lr, address = exp.local.lr_at(round_, exp.rounds), Address(exp.seed, round_)
    ids, steps = present.drawn.ids, present.steps
    for group in plans(exp.local, exp.federation.train, ids, address, lr=lr, lanes=exp.lanes, steps=steps):
        if extra is None:
            yield group
        else:
            epochs = torch.tensor([float(extra[i]) for i in group.ids.tolist()])
            yield group._replace(work=group.work._replace(extra=epochs))


def keep(exp: Experiment, store: ClientStore, ids: Tensor, outcome: Outcome) -> None:
    """Let the store keep what these clients keep from round to round."""
    if len(ids):
        store.scatter(ids, Kept(outcome.states, outcome.buffers if exp.keeps_buffers else (), outcome.memory))


def rate(exp: Experiment, round_: int) -> str:
    """The local learning rate of a round, and what to try where training diverged with it."""
    lr = exp.local.lr_at(round_, exp.rounds)
    return f"the local learning rate was {lr:g} (try local.lr={lr / 10:g}, or local.clip=10)"


def names_of(ids: Any) -> str:
    """The clients by number, the first ten of many."""
    listed = list(ids)
    shown = ", ".join(str(i) for i in listed[:10])
    return f"client {shown}" if len(listed) == 1 else f"clients {shown}" + (" ..." if len(listed) > 10 else "")
