"""Rounds that are started on a GPU before the previous one has been checked for non-finite values.

A speculative round is an ordinary one whose clients are not screened and whose writes to the store are deferred. When
its numbers arrive, it is accepted, or, if something was not finite, it is discarded and repeated with screening.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.engine.exchange import unchecked
from fedloom.engine.lateness import client_work
from fedloom.engine.star import Finished, star_round
from fedloom.engine.state import Experiment, Round, RunState
from fedloom.engine.store import ClientStore


def may_speculate(exp: Experiment) -> bool:
    """Whether rounds of this experiment can be finished before the finiteness check."""
    unusual = exp.guard is not None or bool(exp.bad) or exp.system.deadline is not None
    together = exp.local.batch > 0  # otherwise clients of unequal width train in separate groups
    star = not (exp.is_network or exp.is_asynchronous) and exp.fleet is None
    return star and exp.captures and exp.ranks.size == 1 and together and not unusual


def speculates_in(exp: Experiment, round_: int) -> bool:
    """Whether this round is speculative: it is one group, and nothing is measured during it."""
    measured = exp.evaluate.due(round_ + 1, exp.rounds) and (exp.evaluate.diagnostics or exp.evaluate.participants)
    return may_speculate(exp) and not measured and 0 < len(exp.present(round_).drawn.ids) <= exp.lanes


class Deferred:
    """A store that reads at once and writes on request."""

    def __init__(self, store: ClientStore) -> None:
        self._store = store
        self._writes: list[tuple[Tensor, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def scatter(self, ids: Tensor, kept: Any) -> None:
        self._writes.append((ids, kept))

    def write(self) -> None:
        for ids, kept in self._writes:
            self._store.scatter(ids, kept)


class Pending(NamedTuple):
    """A round that a GPU may still be computing."""

    finished: Finished
    writes: Deferred
    numbers: Tensor  # [2 + K] on the CPU, once ``ready``: whether all is finite, the gradients, and each one's steps
    ready: Any  # an event

    @property
    def state(self) -> RunState:
        """The state after the round; speculative until it is checked."""
        return self.finished.state

    def checked(self, state: RunState) -> Round | None:
        """Wait for the numbers; the round after ``state``, or None if not all is finite."""
        if self.ready is not None:
            self.ready.synchronize()
        finite, gradients, *steps = self.numbers.tolist()
        if not finite:
            return None
        self.writes.write()
        (group,) = self.finished.work
        work = client_work(group.ids, [int(n) for n in steps], self.finished.lateness)
        after = self.finished.state._replace(gradients=state.gradients + gradients)
        return Round(after, self.finished.excluded, self.finished.found, tuple(work))


def speculative_round(exp: Experiment, state: RunState, store: ClientStore) -> Pending:
    """Queue a round on the GPU, and the copy of the numbers that decide whether it is accepted.

    The copy is queued now, so that the numbers arrive as soon as they are known, before later work of the GPU.
    """
    writes = Deferred(store)
    done = star_round(exp, state, writes, screen=unchecked)
    (group,) = done.work
    after = (done.state.server, done.state.buffers)
    sums = [leaf.sum(dtype=torch.float64) for leaf in tree.leaves(after) if leaf.is_floating_point()]
    finite = torch.stack(sums).isfinite().all() & done.finite
    found = torch.cat([torch.stack([finite.double(), group.gradients]), group.steps.double()])
    if found.device.type != "cuda":
        return Pending(done, writes, found, None)
    numbers = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    numbers.copy_(found, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return Pending(done, writes, numbers, ready)
