"""Rounds that are started on a GPU before the previous one has been checked for non-finite values.

A speculative round is an ordinary one whose clients are not screened and whose writes to the store wait. Once its
numbers are there, it counts as it is, or, if something was not finite, it is thrown away and done again, screened.
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
    together = exp.local.batch > 0  # else clients of unequal width train in groups of their own
    star = not (exp.is_network or exp.is_asynchronous) and exp.fleet is None
    return star and exp.captures and exp.ranks.size == 1 and together and not unusual


def speculates_in(exp: Experiment, round_: int) -> bool:
    """Whether this round is done so: it is one group, and nothing of it is measured on the way."""
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
    """A round that a GPU may still be doing."""

    finished: Finished
    writes: Deferred
    numbers: Tensor  # [2 + K] on the CPU, once ``ready``: whether all is finite, the gradients, and each one's steps
    ready: Any  # an event

    @property
    def state(self) -> RunState:
        """After the round; only a claim until it is checked."""
        return self.finished.state

    def checked(self, state: RunState) -> Round | None:
        """Wait for the numbers; the round after ``state``, or None where not all is finite."""
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
    """Give a round to the GPU, and ask for the numbers that decide whether it counts.

    They are asked for now, so that they come as soon as they are known, and not after what the GPU is given next.
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
