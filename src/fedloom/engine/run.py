"""The run: a pure step from one RunState to the next, and the state from which it starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom import tree
from fedloom.data.federation import Federation
from fedloom.engine.clock import Present, System, attend, duration, speeds
from fedloom.engine.diagnose import Watch, diagnose
from fedloom.engine.evaluate import Evaluate
from fedloom.engine.exchange import Tally, Topology, add, gossip, inbox, sound
from fedloom.engine.local import AnyAlgorithm, Executor, Given, Outcome, mapped, train
from fedloom.engine.plan import Address, Cohort, Drawn, Group, amounts, draw, plans
from fedloom.engine.store import ClientStore
from fedloom.errors import DivergedError
from fedloom.optim import Local
from fedloom.task import Task


class RunState(NamedTuple):
    """All that a run is at the end of a round; client state lives beside it in the store."""

    round: int  # rounds done
    server: Any  # the server's state, or [N, ...] the state of every node
    buffers: Tensor  # [Q] mean running statistics, or [N, Q]
    up: int  # bytes that clients have sent so far
    down: int  # bytes that clients have received so far
    seconds: float = 0.0  # that the rounds would have taken on the devices described


class Kept(NamedTuple):
    """What the store keeps for a client."""

    mine: Any  # the algorithm's
    buffers: Any  # its running statistics, where they stay local


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
    buffers: Literal["average", "local"] = "average"

    @property
    def is_network(self) -> bool:
        return self.algorithm.family == "gossip"

    @property
    def keeps_buffers(self) -> bool:
        """Whether running statistics stay with the clients."""
        return self.buffers == "local" and self.task.buffers0.numel() > 0

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
        kept = store.gather(ids, Kept(fresh, self.task.buffers0 if self.keeps_buffers else ()))
        return Given(down, kept.mine, kept.buffers if self.keeps_buffers else buffers, not self.is_network)

    def present(self, round_: int) -> Present:
        """Who takes part in this round, and how far; in a network without a server, everybody."""
        sizes = self.federation.train.sizes
        if self.is_network:
            everyone = Drawn(torch.arange(len(sizes)), torch.ones(len(sizes)))
            return Present(everyone, amounts(self.local, sizes).steps, len(sizes))
        drawn = draw(self.cohort, sizes, self.seed, round_)
        amount = amounts(self.local, sizes[drawn.ids])
        epochs = self.local.epochs if self.local.steps is None else 1
        partial = self.algorithm.partial_work
        return attend(self.system, drawn, amount, epochs, (self.seed, round_), partial=partial)

    def duration(self, present: Present, up: int, down: int) -> float:
        """Seconds that the round would take on the devices described."""
        ids = present.drawn.ids
        amount = amounts(self.local, self.federation.train.sizes[ids])
        examples = amount.size * present.steps / amount.per_epoch.clamp(min=1)
        return duration(self.system, examples, self.speeds[ids], up, down)

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
    return RunState(0, server, buffers, 0, 0)


def advance(exp: Experiment, state: RunState, store: ClientStore) -> tuple[RunState, tuple[int, ...]]:
    """One round; also the clients that were left out of it because their work was not finite."""
    after, excluded, _ = advance_watched(exp, state, store)
    return after, excluded


def advance_watched(
    exp: Experiment, state: RunState, store: ClientStore
) -> tuple[RunState, tuple[int, ...], dict[str, float]]:
    """One round, and the diagnostics of it, where it is one that will be evaluated."""
    with torch.no_grad():
        if exp.is_network:
            after, excluded = _gossip_round(exp, state, store)
            found: dict[str, float] = {}
        else:
            after, excluded, found = _star_round(exp, state, store)
    if not bool(tree.finite_rows(tree.tmap(lambda x: x[None], (after.server, after.buffers)), 1)[0]):
        raise DivergedError(
            f"round {state.round + 1}: the model is no longer finite; clients of the round: "
            f"{names_of(exp.present(state.round).drawn.ids.tolist())}; {_rate(exp, state.round)}"
        )
    return after, excluded, found


def _star_round(
    exp: Experiment, state: RunState, store: ClientStore
) -> tuple[RunState, tuple[int, ...], dict[str, float]]:
    alg, present = exp.algorithm, exp.present(state.round)
    drawn = present.drawn
    sent = tree.nbytes((alg.send(state.server), exp.travelling(state.buffers))) if alg.communicates else 0
    received = state.down + sent * (exp.federation.clients if alg.sends_to_all else present.called)
    if not len(drawn.ids):  # everybody was late or lost: nothing is learned, and nothing else changes
        return state._replace(round=state.round + 1, down=received), (), {}
    times = dict(zip(drawn.ids.tolist(), drawn.times.tolist(), strict=True))
    tally, upload, watch = Tally(), 0, Watch()
    watched = bool(exp.evaluate.diagnostics) and exp.evaluate.due(state.round + 1, exp.rounds)
    for group in _groups(exp, state.round, present):
        outcome = train(alg, exp.federation, group, exp.given(state, store, group.ids), watched=watched)
        part = sound(group.ids, outcome, torch.tensor([times[i] for i in group.ids.tolist()]))
        _keep(exp, store, part.ids, part.outcome)
        tally = add(tally, part, keep=watched or not alg.linear)
        watch = watch.seen(part) if watched else watch
        upload = tree.nbytes((outcome.uploads, exp.travelling(outcome.buffers))) // len(group.ids)
    if tally.total is None:
        raise DivergedError(
            f"round {state.round + 1}: no client returned finite numbers "
            f"({names_of(sorted(tally.excluded))}); {_rate(exp, state.round)}"
        )
    heard = inbox(tally, exp.federation.train.sizes)
    server = alg.update(state.server, heard)
    found = diagnose(exp, watch.closed(alg.send(state.server).w), state.server, heard, server) if watched else {}
    up = upload if alg.communicates else 0
    after = RunState(
        round=state.round + 1,
        server=server,
        buffers=alg.statistics(state.buffers, (tally.buffers / tally.weight).to(state.buffers.dtype)),
        up=state.up + up * len(drawn.ids),
        down=received,
        seconds=state.seconds + exp.duration(present, up, sent),
    )
    return after, tuple(sorted(tally.excluded)), found


def _gossip_round(exp: Experiment, state: RunState, store: ClientStore) -> tuple[RunState, tuple[int, ...]]:
    alg, n = exp.algorithm, exp.federation.clients
    assert exp.topology is not None
    rows = exp.topology.matrix(n).to(exp.device)
    ids, parts = [], []
    present = exp.present(state.round)
    for group in _groups(exp, state.round, present):
        parts.append(train(alg, exp.federation, group, exp.given(state, store, group.ids)))
        ids.append(group.ids)
    order = torch.cat(ids).argsort()
    outcome: Outcome = tree.take(tree.cat(parts), order.to(exp.device))
    heard, buffers, ok = gossip(rows, outcome, exp.federation.train.sizes)
    well = ok.cpu().nonzero().squeeze(1)
    if not len(well):
        raise DivergedError(
            f"round {state.round + 1}: no node has finite numbers ({names_of(range(n))}); {_rate(exp, state.round)}"
        )
    _keep(exp, store, well, tree.take(outcome, well.to(exp.device)))
    server = tree.where(ok, mapped(alg.update, (0, 0))(state.server, heard), state.server)
    links = int((rows > 0).sum()) - int((rows.diagonal() > 0).sum())
    bytes_ = links * (tree.nbytes((outcome.uploads, exp.travelling(outcome.buffers))) // n)
    after = RunState(
        round=state.round + 1,
        server=server,
        buffers=torch.where(ok[:, None], buffers.to(state.buffers.dtype), state.buffers),
        up=state.up + bytes_,
        down=state.down + bytes_,
        seconds=state.seconds + exp.duration(present, bytes_ // n, bytes_ // n),
    )
    return after, tuple((~ok).cpu().nonzero().squeeze(1).tolist())


def _groups(exp: Experiment, round_: int, present: Present) -> Iterator[Group]:
    lr, address = exp.local.lr_at(round_, exp.rounds), Address(exp.seed, round_)
    ids, steps = present.drawn.ids, present.steps
    return plans(exp.local, exp.federation.train, ids, address, lr=lr, lanes=exp.lanes, steps=steps)


def _keep(exp: Experiment, store: ClientStore, ids: Tensor, outcome: Outcome) -> None:
    if len(ids):
        store.scatter(ids, Kept(outcome.states, outcome.buffers if exp.keeps_buffers else ()))


def _rate(exp: Experiment, round_: int) -> str:
    lr = exp.local.lr_at(round_, exp.rounds)
    return f"the local learning rate was {lr:g} (try local.lr={lr / 10:g}, or local.clip=10)"


def names_of(ids: Any) -> str:
    """The clients by number, the first ten of many."""
    listed = list(ids)
    shown = ", ".join(str(i) for i in listed[:10])
    return f"client {shown}" if len(listed) == 1 else f"clients {shown}" + (" ..." if len(listed) > 10 else "")
