"""A run as values: the experiment, which never changes, and the state, which each round replaces."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithm import AnyAlgorithm, Work
from fedloom.algorithm.capabilities import has_survey, memory_of, phases_of, survey_gradients, survey_of, trains_in
from fedloom.core import tree
from fedloom.core.optim import Local
from fedloom.core.task import Task
from fedloom.data.federation import Federation
from fedloom.engine.clock import Load, Present, System, Timetable, attend, speeds, timetable
from fedloom.engine.fleet import Fleet
from fedloom.engine.local import Executor, Given, mapped, plain_batch
from fedloom.engine.plan import Cohort, Drawn, Group, amounts, draw_cohort
from fedloom.engine.ranks import ALONE, Ranks
from fedloom.engine.settings import Evaluate
from fedloom.engine.store import ClientStore
from fedloom.engine.topology.network import Moment, Topology
from fedloom.trust.corruption import Corruption
from fedloom.trust.ledger import Ledger
from fedloom.trust.mechanism import Guard
from fedloom.trust.robust import Aggregation


class RunState(NamedTuple):
    """A run at the end of a round; clients' states are in the store."""

    round: int  # rounds done
    server: Any  # the server's state, or [N, ...] the state of every node
    buffers: Tensor  # [Q] mean running statistics, or [N, Q]
    up: int  # bytes that clients, or nodes, have sent so far
    down: int  # bytes that the server has sent so far; 0 in a network, whose messages are all in ``up``
    seconds: float = 0.0  # time of the rounds on the described devices
    gradients: float = 0.0  # evaluated so far, each on one batch of one client
    nodes: Any = ()  # what the engine keeps for the nodes of a network: Nodes
    ledger: Ledger | None = None  # what a private run has released so far
    under_way: Any = ()  # clients at work and their models, of an asynchronous server: UnderWay

    @property
    def busiest(self) -> int:
        """Bytes that have passed the busiest endpoint so far: a node of a network, or the server."""
        return int(self.nodes.traffic.max()) if self.nodes else self.up + self.down


class Nodes(NamedTuple):
    """What the engine keeps for each node of a network, in addition to the algorithm's state."""

    traffic: Tensor  # [N] bytes that it has sent and received so far
    away: Tensor  # [N] for how many rounds it has been offline
    mass: Tensor  # [N] float64, of push-sum; 1 without it
    past: Any = ()  # messages that nodes may reuse if one is lost: Past


class Past(NamedTuple):
    """What nodes have sent before, and which neighbours received it."""

    last: Tensor  # [N, N] the last round in which the first received from the second; -1: never
    sent: Any  # uploads and running statistics [N, ...] of the last round, of the one before, and so on


class Kept(NamedTuple):
    """What the store keeps for a client."""

    mine: Any  # the algorithm's
    buffers: Any  # its running statistics, if they stay local
    memory: Any  # its optimizer state, if that is kept from round to round


class PlannedRound(NamedTuple):
    """The plan of a round, made beforehand."""

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
    guard: Guard | None = None  # the privacy of uploads, if they are private
    buffers: Literal["average", "local"] = "average"
    starts: Tensor | None = None  # [N, P] the initial models of nodes, if they differ
    ranks: Ranks = ALONE  # which of how many processes this is; no result depends on it
    fleet: Fleet | None = None  # the clients, if they train elsewhere
    at_client: bool = False  # whether this is a client of a deployment, which knows only what the server sent
    # Rounds that were planned while a GPU was busy. The only mutable part; no result depends on it.
    planned: dict[int, PlannedRound] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def is_network(self) -> bool:
        return self.algorithm.family == "gossip"

    @property
    def is_asynchronous(self) -> bool:
        """Whether the server applies each upload when it arrives."""
        return not self.algorithm.traits.synchronous

    @property
    def captures(self) -> bool:
        """Whether steps are compiled, or captured on a GPU and replayed."""
        return self.task.capture != "eager"

    @property
    def usual_group(self) -> int:
        """The usual number of clients of a group; it varies with replacement, Poisson sampling and dropouts."""
        everybody = self.is_network or self.cohort.sampling == "all"
        size = self.federation.clients if everybody else self.cohort.size or 10
        return min(size, self.federation.clients, self.lanes)

    @property
    def measures(self) -> tuple[str, ...]:
        """What is measured in addition to accuracy (or error) and loss: variants of AUC, and others by name."""
        always = ("rmse", "r2") if self.task.criterion.regression else ()
        return (*self.evaluate.auc, *dict.fromkeys((*always, *self.evaluate.metrics)))

    @property
    def keeps_buffers(self) -> bool:
        """Whether running statistics stay with the clients."""
        return self.buffers == "local" and self.task.buffers0.numel() > 0

    @property
    def keeps_memory(self) -> bool:
        """Whether clients keep their optimizer state from round to round."""
        return self.local.state == "persist"

    def keeps_state(self, state: RunState) -> bool:
        """Whether clients keep anything at all from round to round."""
        down = self.sent(tree.take(state.server, 0) if self.is_network else state.server)
        return self.keeps_buffers or self.keeps_memory or bool(tree.leaves(self.algorithm.join(down)))

    def sent(self, server: Any) -> Any:
        """The part of the server's state that clients are sent."""
        return server if self.at_client else self.algorithm.send(server)

    def travelling(self, buffers: Tensor) -> Any:
        """The running statistics that are sent: none if they stay with the clients."""
        return () if self.keeps_buffers else buffers

    def given(self, state: RunState, store: ClientStore, ids: Tensor) -> Given:
        """What these clients have before they train in the next round."""
        if self.is_network:
            at = ids.to(self.device)
            nodes = tree.take(state.server, at)
            down, buffers = mapped(self.algorithm.send, (0,))(nodes), state.buffers[at]
        else:
            down, buffers = self.sent(state.server), state.buffers.expand(len(ids), -1)
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
        mine, memory = self.algorithm.join(down), ()
        if self.keeps_memory:
            first = self.algorithm.start(down, mine, self.example_work(down, mine, self.task.buffers0))
            memory = memory_of(self.algorithm, first)
        return Kept(mine, self.task.buffers0 if self.keeps_buffers else (), memory)

    def example_work(self, down: Any, mine: Any, buffers: Tensor) -> Work:
        """The work of client 0 with one example and one step, to find the structure of uploads and states."""
        one = torch.ones((), device=self.device)
        survey: Any = ()
        if has_survey(self.algorithm):
            batch = plain_batch(self.federation, self.federation.train.rows[:1], one[None], buffers)
            survey = survey_of(self.algorithm, batch, down, mine)
        return Work(one, one, one, one, survey, torch.zeros((), dtype=torch.int64, device=self.device), one)

    def present(self, round_: int) -> Present:
        """The clients of this round and their steps; in a network, every node that can train."""
        if round_ in self.planned:
            return self.planned[round_].present
        sizes = self.federation.train.sizes
        if self.is_network:
            ids = torch.arange(len(sizes))
            if self.topology is not None:
                ids = ids[torch.from_numpy(~self.topology.resting(len(sizes), Moment(self.seed, round_)))]
            return Present(Drawn(ids, torch.ones(len(ids))), amounts(self.local, sizes[ids]).steps, len(ids))
        chance = self.seed if self.guard is None else self.guard.lottery(self.seed)
        drawn = draw_cohort(self.cohort, sizes, chance, round_)
        amount = amounts(self.local, sizes[drawn.ids])
        epochs = self.local.epochs if self.local.steps is None else 1
        partial = self.algorithm.traits.partial_work
        return attend(self.system, drawn, amount, epochs, (self.seed, round_), partial=partial)

    def timetable(self, round_: int, present: Present, up: int, down: int) -> Timetable:
        """The timetable of this round on the described devices."""
        ids = present.drawn.ids
        amount = amounts(self.local, self.federation.train.sizes[ids])
        epoch = amount.size.double()
        phases = phases_of(self.algorithm)
        beside = [p for p in phases if not p.waiting and not p.is_main and not p.rare]
        trains = trains_in(self.algorithm, round_)
        passes = sum(p.cost * (p.epochs or 0) for p in beside) + trains * survey_gradients(self.algorithm)
        steps = sum(p.cost * (p.steps or 0) for p in beside)
        each = self.algorithm.traits.gradients_per_step
        cost = next((each + p.look_gradients for p in phases if p.is_main and trains), 0.0)
        main = cost * epoch * present.steps / amount.per_epoch.clamp(min=1)
        load = Load(main, cost * epoch, passes * epoch + steps * amount.width)
        return timetable(self.system, ids, load, self.speeds[ids], up, down, (self.seed, round_))

    @cached_property
    def speeds(self) -> Tensor:
        """Examples per second of every client.  ``[N]``"""
        return speeds(self.system, self.federation.clients, self.seed)


class ClientWork(NamedTuple):
    """What one client did in a round."""

    client: int
    steps: int
    extra: int  # epochs while it waited
    late: bool  # its upload missed the deadline, and was not used


class Round(NamedTuple):
    """A finished round."""

    state: RunState  # after it
    excluded: tuple[int, ...]  # clients that were left out because their numbers were not finite
    found: dict[str, float]  # what was measured, in rounds that are evaluated
    work: tuple[ClientWork, ...]  # of every client that took part
