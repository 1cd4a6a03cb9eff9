"""Which clients miss the deadline and how long the others wait, known before training."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.algorithm.capabilities import idle_epochs, phases_of
from fedloom.engine.clock import Present
from fedloom.engine.state import ClientWork, Experiment, RunState
from fedloom.engine.uploads import upload_size


class Lateness(NamedTuple):
    """The effect of the described devices on a round."""

    late: Tensor  # the clients that miss the deadline
    extra: dict[int, int] | None = None  # epochs that each client has time for while it waits

    def on_time(self, ids: Tensor) -> Tensor:
        """The clients among these that meet the deadline."""
        return ids[~torch.isin(ids, self.late)]


def foresee_lateness(exp: Experiment, state: RunState, present: Present, down: int) -> Lateness:
    """Which clients will be late, and how long the others wait; free if no method or deadline needs it."""
    ids, alg = present.drawn.ids, exp.algorithm
    if exp.system.deadline is None and not any(phase.waiting for phase in phases_of(alg)):
        return Lateness(ids[:0])
    table = exp.timetable(state.round, present, upload_size(exp, state) if alg.traits.communicates else 0, down)
    extra = idle_epochs(alg, ids, table.wait, table.epoch, (exp.seed, state.round))
    late = ids[~table.on_time]
    return Lateness(late, None if extra is None else dict(zip(ids.tolist(), extra.tolist(), strict=True)))


def client_work(ids: Tensor, steps: list[int], lateness: Lateness | None) -> list[ClientWork]:
    """What each of these clients did in a round of ``steps`` [K]; ``lateness``: None if no client waits."""
    late = set() if lateness is None else set(lateness.late.tolist())
    extra = {} if lateness is None else lateness.extra or {}
    return [ClientWork(i, n, extra.get(i, 0), i in late) for i, n in zip(ids.tolist(), steps, strict=True)]
