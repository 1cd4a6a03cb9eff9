"""Rounds whose numbers are no longer finite: when a run has to end, and its message."""

from __future__ import annotations

from typing import Any

from fedloom.core.errors import DivergedError
from fedloom.engine.state import Experiment


def refuse_divergence(exp: Experiment, round_: int, excluded: tuple[int, ...], *, nobody: bool) -> None:
    """End a run if excluding the clients with non-finite numbers leaves no client, or would reveal them."""
    if nobody:
        raise DivergedError(
            f"round {round_ + 1}: no client returned finite numbers ({names_of(excluded)}); {rate(exp, round_)}"
        )
    if excluded and exp.guard is not None and exp.guard.release.noise:
        raise DivergedError(
            f"round {round_ + 1}: the updates of {names_of(excluded)} are not finite; leaving them out reveals it, "
            f"and epsilon would no longer hold; {rate(exp, round_)}"
        )


def rate(exp: Experiment, round_: int) -> str:
    """The local learning rate of a round, and what to try if training diverged with it."""
    lr = exp.local.lr_at(round_, exp.rounds)
    return f"the local learning rate was {lr:g} (try local.lr={lr / 10:g}, or local.clip=10)"


def names_of(ids: Any) -> str:
    """The clients by number, the first ten of many."""
    listed = list(ids)
    shown = ", ".join(str(i) for i in listed[:10])
    return f"client {shown}" if len(listed) == 1 else f"clients {shown}" + (" ..." if len(listed) > 10 else "")
