"""Rounds whose numbers are no longer finite: when a run has to end, and what it then says."""

from __future__ import annotations

from typing import Any

from fedloom.core.errors import DivergedError
from fedloom.engine.state import Experiment


def refuse_divergence(exp: Experiment, round_: int, excluded: tuple[int, ...], *, nobody: bool) -> None:
    """End a run where leaving out the clients whose numbers are not finite leaves nobody, or would reveal them."""
    if nobody:
        raise DivergedError(
            f"round {round_ + 1}: no client returned finite numbers ({names_of(excluded)}); {rate(exp, round_)}"
        )
    if excluded and exp.guard is not None and exp.guard.release.noise:
        raise DivergedError(
            f"round {round_ + 1}: the work of {names_of(excluded)} is not finite; leaving it out would reveal that, "
            f"and epsilon would no longer hold; {rate(exp, round_)}"
        )


def rate(exp: Experiment, round_: int) -> str:
    """The local learning rate of a round, and what to try where training diverged with it."""
    lr = exp.local.lr_at(round_, exp.rounds)
    return f"the local learning rate was {lr:g} (try local.lr={lr / 10:g}, or local.clip=10)"


def names_of(ids: Any) -> str:
    """The clients by number, the first ten of many."""
    listed = list(ids)
    shown = ", ".join(str(i) for i in listed[:10])
    return f"client {shown}" if len(listed) == 1 else f"clients {shown}" + (" ..." if len(listed) > 10 else "")
