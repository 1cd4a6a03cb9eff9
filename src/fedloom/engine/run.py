"""The run: a pure step from one RunState to the next, and the state from which it starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Work
from fedloom.core import tree
from fedloom.core.errors import ConfigError, DivergedError, Fault
from fedloom.core.metrics import Verdicts, summary
from fedloom.core.optim import Local
from fedloom.core.task import Task
from fedloom.data.federation import Federation
from fedloom.engine.clock import Load, Present, System, Timetable, attend, speeds, timetable
from fedloom.engine.diagnose import Watch, diagnose
from fedloom.engine.evaluate import Evaluate, Judged, joint, judge
from fedloom.engine.exchange import Sound, Tally, add, hoped, inbox, sound
from fedloom.engine.local import AnyAlgorithm, Executor, Given, Outcome, mapped, plain_batch, train
from fedloom.engine.plan import Address, Cohort, Drawn, Group, amounts, draw, plans
from fedloom.engine.ranks import ALONE, Ranks, dealt
from fedloom.engine.store import ClientStore
from fedloom.engine.topology import Moment, Topology
from fedloom.trust.corruption import Corruption, mass, poisoned
from fedloom.trust.privacy import Guard, Ledger, protected, silence
from fedloom.trust.robust import Aggregation, replaced


class RunState(NamedTuple):
    """All that a run is at the end of a round; client state lives beside it in the store."""

    round: int  # rounds done
    server: Any  # the server's state, or [N, ...] the state of every node
    buffers: Tensor  # [Q] mean running statistics, or [N, Q]
    up: int  # bytes that clients, or nodes, have sent so far
    down: int  # bytes that the server has sent so far; 0 in a network, whose messages are all in ``up``
    seconds: float = 0.0  # that the rounds would have taken on the devices described
    gradients: float = 0.0  # evaluated so far, each on one batch of one client
    nodes: Any = ()  # what the engine keeps for the nodes of a network: Nodes
    ledger: Ledger | None = None  # what has been released of clients, where that is private
    under_way: Any = ()  # who is at work on which model, where the server waits for nobody: UnderWay

    @property
    def busiest(self) -> int:
        """Bytes that have passed the busiest endpoint so far: a node of a network, or the server."""
        return int(self.nodes.traffic.max()) if self.nodes else self.up + self.down


class Nodes(NamedTuple):
    """What the engine keeps for each node of a network, beside what the algorithm does."""

    traffic: Tensor  # [N] bytes that it has sent and received so far
    away: Tensor  # [N] for how many rounds it has been offline
    mass: Tensor  # [N] float64, of push-sum; 1 where it is not used
    past: Any = ()  # what nodes may use again where a message is lost: Past


class Past(NamedTuple):
    """What nodes have sent before, and who heard it."""

    last: Tensor  # [N, N] the last round in which the first heard the second; -1: never
    sent: Any  # uploads and running statistics [N, ...] of the last round, of the one before, and so on


class Kept(NamedTuple):
    """What the store keeps for a client."""

    mine: Any  # the algorithm's
    buffers: Any  # its running statistics, where they stay local
    memory: Any  # its optimiser's memory, where that is kept from round to round


class Made(NamedTuple):
    """The plan of a round."""

    present: Present
    groups: tuple[Group, ...]  # on the device


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
    starts: Tensor | None = None  # [N, P] the models with which nodes begin, where each has one of its own
    ranks: Ranks = ALONE  # which of how many processes this is; no result depends on it

    @property
    def is_network(self) -> bool:
        return self.algorithm.family == "gossip"

    @property
    def is_asynchronous(self) -> bool:
        """Whether the server takes each upload when it arrives."""
        return not self.algorithm.waits

    @property
    def captures(self) -> bool:
        """Whether steps are recorded on a GPU, and replayed."""
        return self.task.capture != "eager"

    @property
    def may_hope(self) -> bool:
        """Whether a round can be done to its end before anybody looks if its numbers are finite."""
        unusual = self.guard is not None or bool(self.bad) or self.system.deadline is not None
        together = self.local.batch > 0  # else clients of unequal width train in groups of their own
        return self.captures and self.ranks.size == 1 and together and not unusual

    @property
    def keeps_buffers(self) -> bool:
        """Whether running statistics stay with the clients."""
        return self.buffers == "local" and self.task.buffers0.numel() > 0

    @property
    def keeps_memory(self) -> bool:
        """Whether clients keep their optimisers' memory from round to round."""
        return self.local.state == "persist"

    def keeps_state(self, state: RunState) -> bool:
        """Whether clients keep anything at all from round to round."""
        down = self.algorithm.send(tree.take(state.server, 0) if self.is_network else state.server)
        return self.keeps_buffers or self.keeps_memory or bool(tree.leaves(self.algorithm.join(down)))

    def travelling(self, buffers: Tensor) -> Any:
        """Running statistics as far as they are sent: not at all where they stay with the clients."""
        return () if self.keeps_buffers else buffers

    def given(self, state: RunState, store: ClientStore, ids: Tensor) -> Given:
        """What these clients hold before they train in the next round."""
        if self.is_network:
            at = ids.to(self.device)
            nodes = tree.take(state.server, at)
            down, buffers = mapped(self.algorithm.send, (0,))(nodes), state.buffers[at]
        else:
            down, buffers = self.algorithm.send(state.server), state.buffers.expand(len(ids), -1)
        if self.is_network and self.starts is not None:
            first = [self.algorithm.send(self.algorithm.init(self.starts[node])) for node in ids.tolist()]
            kept = tree.cat([store.gather(ids[k : k + 1], self.blank(one)) for k, one in enumerate(first)])
        else:
            first = self.algorithm.send(self.algorithm.init(self.task.w0)) if self.is_network else down
            kept = store.gather(ids, self.blank(first))
        buffers = kept.buffers if self.keeps_buffers else buffers
        return Given(down, kept.mine, buffers, not self.is_network, kept.memory if self.keeps_memory else None)

    def blank(self, down: Any) -> Kept:
        """What is kept of a client that was sent ``down`` and has not trained yet."""
        mine = self.algorithm.join(down)
        memory = self.algorithm.memory(self.algorithm.start(down, mine)) if self.keeps_memory else ()
        return Kept(mine, self.task.buffers0 if self.keeps_buffers else (), memory)

    @cached_property
    def made_ahead(self) -> dict[int, Made]:
        """The plans of this round and the next, where they were made while a GPU was at work."""
        return {}

    def plan_ahead(self, round_: int) -> None:
        """Plan a round while a GPU is at work on the one before, which it may be for as long as that takes."""
        made = self.made_ahead
        if not self.captures or self.is_network or self.is_asynchronous or round_ >= self.rounds or round_ in made:
            return
        present = self.present(round_)
        if 0 < len(present.drawn.ids) <= self.lanes:
            groups = tuple(group.to(self.device) for group in groups_of(self, round_, present))
            for old in [r for r in made if r < round_ - 2]:
                del made[old]
            made[round_] = Made(present, groups)

    def present(self, round_: int) -> Present:
        """Who takes part in this round, and how far; in a network without a server, everybody who can train."""
        if round_ in self.made_ahead:
            return self.made_ahead[round_].present
        sizes = self.federation.train.sizes
        if self.is_network:
            ids = torch.arange(len(sizes))
            if self.topology is not None:
                ids = ids[torch.from_numpy(~self.topology.resting(len(sizes), Moment(self.seed, round_)))]
            return Present(Drawn(ids, torch.ones(len(ids))), amounts(self.local, sizes[ids]).steps, len(ids))
        chance = self.seed if self.guard is None else self.guard.lottery(self.seed)
        drawn = draw(self.cohort, sizes, chance, round_)
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
        beside = [p for p in phases if not p.waiting and not p.is_main and not p.rare]
        trains = self.algorithm.trains_in(round_)
        passes = sum(p.cost * (p.epochs or 0) for p in beside) + trains * self.algorithm.survey_gradients
        steps = sum(p.cost * (p.steps or 0) for p in beside)
        each = self.algorithm.gradients_per_step
        cost = next((each + p.look_gradients for p in phases if p.is_main and trains), 0.0)
        main = cost * epoch * present.steps / amount.per_epoch.clamp(min=1)
        load = Load(main, cost * epoch, passes * epoch + steps * amount.width)
        return timetable(self.system, ids, load, self.speeds[ids], up, down, (self.seed, round_))

    @cached_property
    def speeds(self) -> Tensor:
        """Examples per second of every client.  ``[N]``"""
        return speeds(self.system, self.federation.clients, self.seed)


def begin(exp: Experiment) -> RunState:
    """The state before the first round: every node of a network starts from the same model, or from its own."""
    server, buffers = exp.algorithm.init(exp.task.w0), exp.task.buffers0
    if exp.is_network:
        n = exp.federation.clients
        if exp.starts is not None:
            server = mapped(exp.algorithm.init, (0,))(exp.starts)
        else:  # as many rows as there are nodes, all in one place
            server = tree.tmap(lambda x: x.expand(n, *x.shape), server)
        buffers = buffers.expand(n, -1)
        zero = torch.zeros(n, dtype=torch.int64)
        nodes = Nodes(zero, zero, torch.ones(n, dtype=torch.float64), _past(exp))
        return RunState(0, server, buffers, 0, 0, nodes=nodes)
    state = RunState(0, server, buffers, 0, 0, ledger=None if exp.guard is None else exp.guard.opened())
    if exp.is_asynchronous:
        from fedloom.engine.arrivals import first_sent  # which needs what is in here

        return state._replace(under_way=first_sent(exp, state))
    return state


def _past(exp: Experiment) -> Any:
    """Nothing heard yet, where nodes may use again what they heard."""
    count = exp.federation.clients
    if exp.topology is None or exp.topology.link_policy != "stale":
        return ()
    one = specimen(exp, RunState(0, exp.algorithm.init(exp.task.w0), exp.task.buffers0, 0, 0))
    blank = tree.tmap(lambda x: torch.zeros_like(x).expand(count, *x.shape), (one, exp.task.buffers0))
    return Past(torch.full((count, count), -1), (blank,) * exp.topology.stale_after)


class Round(NamedTuple):
    """A round that was done."""

    state: RunState  # after it
    excluded: tuple[int, ...]  # clients that were left out because their work was not finite
    found: dict[str, float]  # what was measured of it, where it is one that is evaluated
    work: tuple[Did, ...]  # who took part
    hoped: Hoped | None = None  # what nobody has looked at yet


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
    return _settled(exp, state, store, _begun(exp, state, store))


def rounds(exp: Experiment, state: RunState, store: ClientStore, last: int | None = None) -> Iterator[Round]:
    """The rounds of a run from here to its end, or to the ``last`` that is wanted.

    Where a GPU is at work and clients keep nothing, it is given the next round before anybody looks how the last one
    came out, so that it never waits. What it did in vain, if that one has to be done again, is forgotten.
    """
    alone, following = exp.may_hope and not exp.keeps_state(state), None
    last = exp.rounds if last is None else last
    while state.round < last:
        begun = following or _begun(exp, state, store)
        following = None
        if alone and begun.hoped is not None and begun.state.round < last:
            following = _begun(exp, begun.state, store)
        done = _settled(exp, state, store, begun)
        following = following if done.state.server is begun.state.server else None
        state = done.state
        yield done


def _begun(exp: Experiment, state: RunState, store: ClientStore) -> Round:
    """One round; on a GPU perhaps only what it has been given to do."""
    with torch.no_grad():
        if exp.is_network:
            from fedloom.engine.gossip import gossip_round  # which needs what is in here

            return gossip_round(exp, state, store)
        if exp.is_asynchronous:
            from fedloom.engine.arrivals import arrivals_round

            return arrivals_round(exp, state, store)
        return _star_round(exp, state, store)


def _settled(exp: Experiment, state: RunState, store: ClientStore, done: Round) -> Round:
    """A round after ``state`` that was done to its end, and is what it should be."""
    if done.hoped is not None:
        gradients, did = done.hoped.looked()
        if did is not None:
            keep(exp, store, done.hoped.trained, done.hoped.trained.ids)
            after = done.state._replace(gradients=state.gradients + gradients)
            return Round(after, done.excluded, done.found, did)
        with torch.no_grad():
            done = _star_round(exp, state, store, hope=False)
    after = done.state
    if not bool(tree.finite_rows(tree.tmap(lambda x: x[None], (after.server, after.buffers)), 1)[0]):
        raise DivergedError(
            f"round {state.round + 1}: the model is no longer finite; clients of the round: "
            f"{names_of(exp.present(state.round).drawn.ids.tolist())}; {rate(exp, state.round)}"
        )
    return done


def _star_round(exp: Experiment, state: RunState, store: ClientStore, *, hope: bool = True) -> Round:
    """One round with a server; ``hope``: on a GPU look only at its end whether all was finite, which it mostly is."""
    alg, present = exp.algorithm, exp.present(state.round)
    drawn = present.drawn
    down = (
        alg.sent_bytes(alg.send(state.server)) + tree.nbytes(exp.travelling(state.buffers)) if alg.communicates else 0
    )
    received = state.down + down * (exp.federation.clients if alg.sends_to_all else present.called)
    if not len(drawn.ids):  # everybody was late or lost: nothing is learned, and nothing else changes
        return Round(_unheard(exp, state)._replace(round=state.round + 1, down=received), (), {}, ())
    due = exp.evaluate.due(state.round + 1, exp.rounds)
    robust = exp.aggregation.rule != "mean"
    watched, judged = due and bool(exp.evaluate.diagnostics), due and exp.evaluate.participants
    times = dict(zip(drawn.ids.tolist(), drawn.times.tolist(), strict=True))
    ahead = look_ahead(exp, state, present, down)
    hope = hope and exp.may_hope and len(drawn.ids) <= exp.lanes and not (watched or judged)
    tally, watch, fits, up, sent, books = Tally(), Watch(), Fits(), 0, 0, Books()
    groups = groups_of(exp, state.round, present, ahead.extra)
    for trained in train_all(exp, state, store, groups, watched=watched or judged, models=watched):
        group = trained.group
        fits = fits.seen(exp, trained) if judged else fits
        outcome = as_sent(exp, state.round, group.ids, trained.outcome, len(drawn.ids))
        count = torch.tensor([times[i] for i in group.ids.tolist()])
        part = (hoped if hope else sound)(group.ids, outcome, count)
        if not hope:
            books = books.kept(exp, store, trained, outcome, part, ahead)
        if len(ahead.late):
            on_time = (~torch.isin(group.ids, ahead.late)).nonzero().squeeze(1)
            outcome = tree.take(outcome, on_time.to(exp.device))
            part = sound(group.ids[on_time], outcome, count[on_time])
        tally = add(tally, part, keep=watched or alg.hears_each or robust or (due and bool(exp.bad)))
        watch = watch.seen(part) if watched else watch
        up += alg.upload_bytes(outcome.uploads) + tree.nbytes(exp.travelling(outcome.buffers))
        sent += len(outcome.weights)
    each = (up // sent if sent else upload_size(exp, state)) if alg.communicates else 0
    after = state._replace(
        round=state.round + 1,
        up=state.up + (up if alg.communicates else 0),
        down=received,
        seconds=state.seconds + exp.timetable(state.round, present, each, down).next_,
        gradients=state.gradients + books.gradients,
        ledger=_charged(exp, state, drawn.ids, outcome.uploads),
    )
    excluded = tuple(sorted(tally.excluded))
    refuse(exp, state.round, excluded, unheard=tally.total is None and len(ahead.late) < len(drawn.ids))
    found = fits.named(exp)
    if tally.total is None:  # nobody was on time
        return Round(after._replace(server=alg.unheard(state.server)), excluded, found, books.did)
    heard = inbox(tally, exp.federation.train.sizes, (exp.seed, state.round))
    heard = replaced(exp.aggregation, heard) if robust else heard
    if exp.guard is not None and exp.guard.weight is not None:
        heard = heard._replace(weight=torch.full_like(heard.weight, exp.guard.weight))
    server = alg.update(state.server, heard)
    if due and exp.bad:
        found |= _bad_weights(exp, state.server, heard, server)
    buffers = alg.statistics(state.buffers, (tally.buffers / tally.weight).to(state.buffers.dtype), server)
    if watched:
        moves = watch.closed(alg.send(state.server).w)
        found |= diagnose(exp, moves, state.server, heard, server, buffers)
    after = after._replace(server=server, buffers=buffers)
    looks = Hoped.told(trained, part, (server, buffers), ahead) if hope else None
    return Round(after, excluded, found, books.did, looks)


def refuse(exp: Experiment, round_: int, excluded: tuple[int, ...], *, unheard: bool) -> None:
    """End a run where to leave out the clients whose work is not finite leaves nobody, or would tell who they are."""
    if unheard:
        raise DivergedError(
            f"round {round_ + 1}: no client returned finite numbers ({names_of(excluded)}); {rate(exp, round_)}"
        )
    if excluded and exp.guard is not None and exp.guard.release.noise:
        raise DivergedError(
            f"round {round_ + 1}: the work of {names_of(excluded)} is not finite; to leave it out would tell so, "
            f"and epsilon would no longer hold; {rate(exp, round_)}"
        )


class Hoped(NamedTuple):
    """What is to be looked at of a round that a GPU may still be doing."""

    trained: Part
    ahead: Ahead
    numbers: Tensor  # [2 + K] on the CPU, once ``ready``: whether all is finite, the gradients, and each one's steps
    ready: Any  # an event

    @classmethod
    def told(cls, trained: Part, part: Sound, after: Any, ahead: Ahead) -> Hoped:
        """Ask for it, so that it comes as soon as it is known, and not after what the GPU is given next."""
        outcome = part.outcome
        sums = [leaf.sum(dtype=torch.float64) for leaf in tree.leaves(after) if leaf.is_floating_point()]
        fine = torch.stack(sums).isfinite().all() & part.fine
        found = torch.cat([torch.stack([fine.double(), outcome.gradients.sum()]), outcome.steps.double()])
        if found.device.type != "cuda":
            return cls(trained, ahead, found, None)
        numbers = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        numbers.copy_(found, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return cls(trained, ahead, numbers, ready)

    def looked(self) -> tuple[float, tuple[Did, ...] | None]:
        """Gradients, and who did what; None where not all is finite."""
        if self.ready is not None:
            self.ready.synchronize()
        fine, gradients, *steps = self.numbers.tolist()
        did = _did(self.trained.group.ids.tolist(), [int(n) for n in steps], self.ahead)
        return gradients, tuple(did) if fine else None


class Books(NamedTuple):
    """What the clients of a round did."""

    did: tuple[Did, ...] = ()
    gradients: float = 0.0

    def kept(
        self, exp: Experiment, store: ClientStore, trained: Part, outcome: Outcome, part: Sound, ahead: Ahead
    ) -> Books:
        """These books with one more group in them, whose clients' states are kept from now on.

        A late client keeps what it has learned, unless its state has to agree with a server that did not hear it.
        """
        keep(exp, store, trained, ahead.heard(part.ids) if exp.algorithm.mirrored else part.ids)
        did = _did(trained.group.ids.tolist(), outcome.steps.long().tolist(), ahead)
        return Books((*self.did, *did), self.gradients + float(outcome.gradients.sum()))


def as_sent(exp: Experiment, round_: int, ids: Tensor, outcome: Outcome, senders: int) -> Outcome:
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
    return outcome._replace(uploads=protected(exp.guard, outcome.uploads, ids, senders, round_), weights=weights)


def _charged(exp: Experiment, state: RunState, ids: Tensor, uploads: Any = ()) -> Ledger | None:
    """The ledger after a round in which these clients were heard, of which ``uploads`` are some."""
    if exp.guard is None or state.ledger is None:
        return None
    return exp.guard.charged(state.ledger, ids, uploads)


def _unheard(exp: Experiment, state: RunState) -> RunState:
    """The state after a round in which nobody took part: as it was, or moved by noise that hides just that."""
    guard = exp.guard
    if guard is None or guard.weight is None:
        return state._replace(server=exp.algorithm.unheard(state.server))
    address, sizes = (exp.seed, state.round), exp.federation.train.sizes
    total = silence(guard, specimen(exp, state), state.round)
    weight, senders, population, examples = torch.tensor(
        [guard.weight, 0, len(sizes), int(sizes.sum())], dtype=torch.float64, device=exp.device
    )
    nobody = torch.zeros(0, dtype=torch.int64, device=exp.device)
    heard = Inbox(total, weight, senders, population, examples, address=address, clients=nobody)
    return state._replace(server=exp.algorithm.update(state.server, heard), ledger=_charged(exp, state, nobody))


def _bad_weights(exp: Experiment, before: Any, heard: Inbox[Any], after: Any) -> dict[str, float]:
    """How much bad clients counted in this round, where that is known."""
    weights = exp.algorithm.counted(before, heard, after)
    if weights is None:
        return {}
    found = mass(weights, torch.isin(heard.clients, torch.tensor(exp.bad, device=heard.clients.device)))
    return {} if found is None else {f"bad_clients/weight_{name}": value for name, value in found._asdict().items()}


class Fits(NamedTuple):
    """How the clients of a round did on their own rows, just before and just after their training."""

    ids: tuple[Tensor, ...] = ()
    before: tuple[Verdicts, ...] = ()
    after: tuple[Verdicts, ...] = ()

    def seen(self, exp: Experiment, part: Part) -> Fits:
        before = judge(exp, Judged(part.ids, part.own.begun, part.buffers))
        after = judge(exp, Judged(part.ids, part.own.models, part.own.buffers))
        return Fits((*self.ids, part.group.ids), (*self.before, before), (*self.after, after))

    def named(self, exp: Experiment) -> dict[str, float]:
        if not self.ids:
            return {}
        before, after = (joint(exp, torch.cat(self.ids), Verdicts.cat(x)) for x in (self.before, self.after))
        return summary("participants/pre_fit/test", before) | summary("participants/post_fit/test", after)


class Ahead(NamedTuple):
    """What the devices described make of a round, known before anybody trains."""

    late: Tensor  # the clients that miss the deadline
    extra: dict[int, int] | None = None  # epochs that each client has time for while it waits

    def heard(self, ids: Tensor) -> Tensor:
        """Those of these clients that meet it."""
        return ids[~torch.isin(ids, self.late)]


def look_ahead(exp: Experiment, state: RunState, present: Present, down: int) -> Ahead:
    """Who will be late, and who will wait how long; free where there is no deadline and nobody trains on."""
    ids, alg = present.drawn.ids, exp.algorithm
    if exp.system.deadline is None and not any(phase.waiting for phase in alg.phases()):
        return Ahead(ids[:0])
    table = exp.timetable(state.round, present, upload_size(exp, state) if alg.communicates else 0, down)
    extra = alg.idle_epochs(ids, table.wait, table.epoch, (exp.seed, state.round))
    late = ids[~table.on_time]
    return Ahead(late, None if extra is None else dict(zip(ids.tolist(), extra.tolist(), strict=True)))


def upload_size(exp: Experiment, state: RunState) -> int:
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
    first = torch.zeros((), dtype=torch.int64, device=exp.device)
    work = Work(one, one, one, one, survey, first, one)
    return alg.finish(alg.start(down, mine), down, mine, work)[0]


def _did(ids: list[int], steps: list[int], ahead: Ahead) -> list[Did]:
    late, extra = set(ahead.late.tolist()), ahead.extra or {}
    return [Did(i, count, extra.get(i, 0), i in late) for i, count in zip(ids, steps, strict=True)]


def groups_of(
    exp: Experiment, round_: int, present: Present, extra: Mapping[int, int] | None = None
) -> Iterator[Group]:
    """The groups in which the clients of a round train."""
    lr, address = exp.local.lr_at(round_, exp.rounds), Address(exp.seed, round_)
    ids, steps = present.drawn.ids, present.steps
    how: dict[str, Any] = {"lr": lr, "lanes": exp.lanes, "steps": steps, "mixed": exp.captures}
    made = exp.made_ahead.get(round_)
    for group in plans(exp.local, exp.federation.train, ids, address, **how) if made is None else made.groups:
        if extra is None:
            yield group
        else:
            epochs = torch.tensor([float(extra[i]) for i in group.ids.tolist()])
            yield group._replace(work=group.work._replace(extra=epochs))


# -- local training, shared out --------------------------------------------------------------------
class Part(NamedTuple):
    """A group that has trained, on this rank and on others."""

    group: Group
    outcome: Outcome  # of all of its clients; where there are other ranks, without what clients keep
    ids: Tensor  # [k] those of them that trained here
    buffers: Tensor  # [k, Q] the running statistics with which these began
    own: Outcome  # [k, ...] what these did, and all that they keep


def train_all(
    exp: Experiment,
    state: RunState,
    store: ClientStore,
    groups: Iterator[Group],
    *,
    watched: bool = False,
    models: bool = False,
) -> Iterator[Part]:
    """Local training of one group after another, each client on one rank; ``models``: also those of other ranks.

    Groups are those of one process, so that sums are made of the same numbers in the same order. As many groups as
    there are ranks are trained before the rows of the first are exchanged: where a net is so large that a group is a
    client or two, there is work for every rank all the same.
    """
    if exp.ranks.size == 1:
        for group in groups:
            buffers, outcome = _trained(exp, state, store, group, watched=watched)
            exp.plan_ahead(state.round + 1)
            yield Part(group, outcome, group.ids, buffers, outcome)
        return
    stays = exp.keeps_state(state)
    while window := list(islice(groups, exp.ranks.size)):
        whose = _shared_out(exp.ranks, window, stays=stays)
        with exp.ranks.agreed():
            mine = [[k for k, rank in enumerate(at) if rank == exp.ranks.rank] for at in whose]
            shares = [
                _trained_here(exp, state, store, group, places, watched=watched) if places else None
                for group, places in zip(window, mine, strict=True)
            ]
            form = next((share for share in shares if share is not None), None)
            if form is None:
                # Only an outcome shows the form of one, so the shortest client trains here, too, and is not counted.
                last = window[-1]
                form = _trained_here(exp, state, store, last, [len(last.ids) - 1], watched=watched)
            exp.plan_ahead(state.round + 1)
        for group, at, share in zip(window, whose, shares, strict=True):
            part = share or Part(group, form.outcome, *tree.take(form[2:], slice(0, 0)))
            rows = _travelling_rows(form.own if share is None else share.own, models=models)
            yield part._replace(outcome=exp.ranks.gathered(rows, at))


def _shared_out(ranks: Ranks, groups: list[Group], *, stays: bool) -> list[list[int]]:
    """The rank that trains each client of each group: where clients keep state the one that has it, otherwise so that
    all have about as many examples to read."""
    if stays:
        return [ranks.owner(group.ids).tolist() for group in groups]
    costs = []
    for group in groups:
        sizes = group.plan.ranges.sizes[group.ids].tolist()
        costs += [n / e * size + n for n, e, size in zip(group.steps, group.per_epoch, sizes, strict=True)]
    supply = iter(dealt(costs, ranks.size))
    return [list(islice(supply, len(group.ids))) for group in groups]


def _trained_here(
    exp: Experiment, state: RunState, store: ClientStore, group: Group, places: list[int], *, watched: bool
) -> Part:
    """What these clients of a group do."""
    some = group.pick(places)
    longest = max(some.steps)
    mask = some.mask[:, :longest]
    some = some._replace(
        rows=some.rows[:, :longest],
        mask=mask,
        keys=some.keys[:, :longest],
        widths=mask.bool().any(0).sum(-1).tolist(),
    )
    buffers, own = _trained(exp, state, store, some, watched=watched)
    return Part(group, own, some.ids, buffers, own)


def _trained(
    exp: Experiment, state: RunState, store: ClientStore, group: Group, *, watched: bool
) -> tuple[Tensor, Outcome]:
    """The running statistics with which these clients began, and what they did.

    In a loop each is given what it needs by itself. As a row of a matrix it would lie elsewhere in memory with other
    clients beside it, which changes the last bits of some products; so no number depends on who else trains here.
    """
    done, every = [], range(len(group.ids))
    for some in [group] if exp.task.lanes or len(every) == 1 else (group.pick([k]) for k in every):
        given = exp.given(state, store, some.ids)
        done.append((given.buffers, train(exp.algorithm, exp.federation, some, given, watched=watched)))
    return tree.cat(done)


def _travelling_rows(outcome: Outcome, *, models: bool) -> Outcome:
    """What other ranks are given of an outcome: what clients keep stays, but for a mark where it is not finite."""
    return marked(outcome)._replace(begun=(), models=outcome.models if models else ())


def marked(outcome: Outcome) -> Outcome:
    """An outcome with, instead of all that clients keep, a number for each that is as finite as what it keeps."""
    count, device = len(outcome.weights), outcome.weights.device
    fine = tree.finite_rows((outcome.states, outcome.memory), count).to(device)
    return outcome._replace(states=torch.zeros(count, device=device).masked_fill(~fine, math.nan), memory=())


def keep(exp: Experiment, store: ClientStore, part: Part, ids: Tensor) -> None:
    """Let the store keep what those of these clients that trained here keep from round to round."""
    rows = torch.isin(part.ids, ids).nonzero().squeeze(1)
    if len(rows):
        own = part.own
        kept = Kept(own.states, own.buffers if exp.keeps_buffers else (), own.memory)
        kept = kept if len(rows) == len(part.ids) else tree.take(kept, rows.to(exp.device))
        store.scatter(part.ids[rows], kept)


def rate(exp: Experiment, round_: int) -> str:
    """The local learning rate of a round, and what to try where training diverged with it."""
    lr = exp.local.lr_at(round_, exp.rounds)
    return f"the local learning rate was {lr:g} (try local.lr={lr / 10:g}, or local.clip=10)"


def names_of(ids: Any) -> str:
    """The clients by number, the first ten of many."""
    listed = list(ids)
    shown = ", ".join(str(i) for i in listed[:10])
    return f"client {shown}" if len(listed) == 1 else f"clients {shown}" + (" ..." if len(listed) > 10 else "")
