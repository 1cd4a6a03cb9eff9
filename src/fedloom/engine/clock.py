"""Unequal devices: who is late, who is lost, how much of the work gets done, and what time it would take.

Every draw has an address, so that all algorithms of a seed meet the same stragglers at the same moment.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedloom import rng
from fedloom.engine.plan import Amount, Drawn
from fedloom.schema import Spec


class System(Spec):
    """What the devices and their links are like."""

    stragglers: float = Field(0.0, ge=0, le=1, description="share of a round's clients that are late")
    policy: Literal["auto", "drop", "partial"] = Field(
        "auto", description="late clients are left out, or send what they have; auto: as the algorithm's paper does"
    )
    unit: Literal["epoch", "step"] = Field("epoch", description="in what a late client's part of the work is counted")
    dropout: float = Field(0.0, ge=0, lt=1, description="chance that a client of a round never reports")
    speed: PositiveFloat = Field(1000.0, description="examples per second of the middle client")
    speed_spread: NonNegativeFloat = Field(0.0, description="spread of speeds: deviation of their logarithm")
    up: PositiveFloat = Field(10.0, description="megabits per second from a client")
    down: PositiveFloat = Field(50.0, description="megabits per second to a client")
    latency: NonNegativeFloat = Field(0.02, description="seconds of one round trip")


class Present(NamedTuple):
    """Who takes part to the end, and how many steps each takes."""

    drawn: Drawn
    steps: Tensor  # [K] long
    called: int  # clients that were sent the model, with those who were late or lost


def attend(
    system: System, drawn: Drawn, amount: Amount, epochs: int, address: tuple[int, int], *, partial: bool
) -> Present:
    """The clients of a round that report, and their work; ``address`` is the seed and the round."""
    steps, called = amount.steps, len(drawn.ids)
    if system.stragglers:
        count = len(drawn.ids)
        on_time = round(count * (1 - system.stragglers))
        rank = rng.bits(address[0], "on_time", address[1], drawn.ids).argsort().argsort()
        late = rank >= on_time
        accept = partial if system.policy == "auto" else system.policy == "partial"
        if accept:
            steps = torch.where(late, _part(system, drawn.ids, amount, epochs, address), steps)
        else:
            drawn, steps = Drawn(drawn.ids[~late], drawn.times[~late]), steps[~late]
    if system.dropout:
        here = rng.uniform(address[0], "dropout", address[1], drawn.ids) >= system.dropout
        drawn, steps = Drawn(drawn.ids[here], drawn.times[here]), steps[here]
    return Present(drawn, steps, called)


def _part(system: System, ids: Tensor, amount: Amount, epochs: int, address: tuple[int, int]) -> Tensor:
    """A late client's steps: 1 to E - 1 whole epochs, or, where E is 1 or steps are the unit, 1 to all of its steps."""
    chance = rng.uniform(address[0], "late_work", address[1], ids).double()
    if system.unit == "epoch" and epochs > 1:
        return (1 + (chance * (epochs - 1)).long()) * amount.per_epoch
    return 1 + (chance * amount.steps).long().clamp(max=amount.steps - 1)


def speeds(system: System, clients: int, seed: int) -> Tensor:
    """Examples per second of each client.  ``[N]``"""
    scatter = torch.from_numpy(rng.stream(seed, "speeds").standard_normal(clients))
    return system.speed * torch.exp(system.speed_spread * scatter)


def duration(system: System, examples: Tensor, speed: Tensor, up: int, down: int) -> float:
    """Seconds of a round: its slowest client's transfers and training."""
    if not len(examples):
        return 0.0
    transfer = system.latency + 8e-6 * (up / system.up + down / system.down) if up or down else 0.0
    return float((examples.double() / speed).max()) + transfer
