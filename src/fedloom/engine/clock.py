"""Unequal devices: which clients are late or lost, how much work they do, and how long it would take.

Every draw has an address, so that all algorithms of a seed have the same stragglers at the same moment. Times
are in float64, and those of a round are counted from the moment at which the server begins to send the model.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from fedloom.core import rng
from fedloom.core.errors import ConfigError, Fault, outside
from fedloom.core.optim import TAKES_STEPS
from fedloom.core.schema import GIVEN, Spec, over, when, worded
from fedloom.engine.plan import Amount, Drawn

_SLACK = 1e-9  # tolerance of rounding, for deadlines and for epochs that just fit


_SENDS = when({"algorithm.communicates": worded(True, "the algorithm sends something", "this one sends nothing")})
_WAITS = when({"algorithm.reads_waiting_time": worded(
    True, "the algorithm trains as long as clients wait", "this one does not depend on how long they wait"
)})  # fmt: skip
_IN_EPOCHS = {"local.steps": None, "local.epochs": over(1)}
_USED_IN_PART = {"algorithm.partial_work": worded(
    True, "the algorithm uses what stragglers have", "this one leaves stragglers out"
)}  # fmt: skip


class System(Spec):
    """The devices and their links."""

    stragglers: float = Field(0.0, ge=0, le=1, description="share of a round's clients that are stragglers")
    policy: Annotated[Literal["auto", "drop", "partial"], when(TAKES_STEPS, stragglers=over(0))] = Field(
        "auto", description="stragglers are left out, or send what they have; auto: as the algorithm's paper does"
    )
    unit: Annotated[
        Literal["epoch", "step"],
        when(_IN_EPOCHS, stragglers=over(0), policy="partial")
        | when(_IN_EPOCHS | _USED_IN_PART, stragglers=over(0), policy="auto"),
    ] = Field("epoch", description="the unit in which a straggler's partial work is drawn")
    dropout: float = Field(0.0, ge=0, lt=1, description="probability that a client of a round never reports")
    speed: Annotated[PositiveFloat, when(TAKES_STEPS, speeds=((),))] = Field(
        1000.0, description="examples per second of the median client"
    )
    speed_spread: Annotated[NonNegativeFloat, when(TAKES_STEPS, speeds=((),))] = Field(
        0.0, description="spread of speeds: deviation of their logarithm"
    )
    up: Annotated[PositiveFloat, _SENDS] = Field(10.0, description="megabits per second from a client")
    down: Annotated[PositiveFloat, _SENDS] = Field(50.0, description="megabits per second to a client")
    latency: Annotated[NonNegativeFloat, _SENDS] = Field(0.02, description="seconds of one round trip")
    speeds: Annotated[tuple[PositiveFloat, ...], when(TAKES_STEPS)] = Field(
        (), description="examples per second of every client, instead of speed and speed_spread; empty: not given"
    )
    slow: Annotated[tuple[NonNegativeInt, ...], when(TAKES_STEPS)] = Field(
        (), description="numbers of the clients that are slow"
    )
    slow_factor: Annotated[float, when(TAKES_STEPS, slow=GIVEN)] = Field(
        1.5, ge=1, description="slow clients take this many times as long per example"
    )
    jitter: Annotated[float, when(TAKES_STEPS)] = Field(
        0.0, ge=0, lt=1, description="largest relative change of a client's compute time from round to round"
    )
    link_spread: Annotated[NonNegativeFloat, _SENDS] = Field(
        0.0, description="spread of up and down: deviation of their logarithm"
    )
    aggregation: NonNegativeFloat = Field(0.0, description="seconds that the server takes to compute the next model")
    deadline: PositiveFloat | None = Field(
        None, description="seconds of a round after which late clients are left out; unset: the server waits for all"
    )
    overlap_upload: Annotated[bool, _WAITS] = Field(
        True, description="a client that trains while waiting also trains during its upload"
    )


class Present(NamedTuple):
    """The clients that report, and the steps of each."""

    drawn: Drawn
    steps: Tensor  # [K] long
    called: int  # clients that were sent the model, late and lost ones included


def attend(
    system: System, drawn: Drawn, amount: Amount, epochs: int, address: tuple[int, int], *, partial: bool
) -> Present:
    """The clients of a round that report, and their work; ``address`` is the seed and the round."""
    steps, called = amount.steps, len(drawn.ids)
    if system.stragglers:
        rank = rng.bits(address[0], "on_time", address[1], drawn.ids).argsort().argsort()
        slow = rank >= _on_time(system, called)
        if accepts(system, partial=partial):
            steps = torch.where(slow, _part(system, drawn.ids, amount, epochs, address), steps)
        else:
            drawn, steps = Drawn(drawn.ids[~slow], drawn.times[~slow]), steps[~slow]
    if system.dropout:
        here = rng.uniform(address[0], "dropout", address[1], drawn.ids) >= system.dropout
        drawn, steps = Drawn(drawn.ids[here], drawn.times[here]), steps[here]
    return Present(drawn, steps, called)


def never_trains(system: System, most: int | None, *, partial: bool) -> bool:
    """Whether every client of every round, at ``most`` this many, is a straggler and left out."""
    nobody = system.stragglers == 1 or (most is not None and _on_time(system, most) == 0)
    return nobody and not accepts(system, partial=partial)


def _on_time(system: System, called: int) -> int:
    return round(called * (1 - system.stragglers))


def accepts(system: System, *, partial: bool) -> bool:
    """Whether a straggler's partial work is used."""
    return partial if system.policy == "auto" else system.policy == "partial"


def _part(system: System, ids: Tensor, amount: Amount, epochs: int, address: tuple[int, int]) -> Tensor:
    """A straggler's steps: 1 to E - 1 whole epochs, or, if E is 1 or steps are the unit, 1 to all of its steps."""
    chance = rng.uniform(address[0], "late_work", address[1], ids).double()
    if system.unit == "epoch" and epochs > 1:
        return (1 + (chance * (epochs - 1)).long()) * amount.per_epoch
    return 1 + (chance * amount.steps).long().clamp(max=amount.steps - 1)


def check_clients(system: System, clients: int) -> None:
    """Refuse settings for clients that do not exist."""
    faults = []
    if system.speeds and len(system.speeds) != clients:
        what = f"has {len(system.speeds)} numbers, but there are {clients} clients"
        fix = f"give {clients} numbers, or use speed and speed_spread"
        faults.append(Fault("system.speeds", what, fix))
    faults += outside("system.slow", "client", system.slow, clients)
    if faults:
        raise ConfigError(faults)


def speeds(system: System, clients: int, seed: int) -> Tensor:
    """Examples per second of each client, the slow ones slowed.  ``[N]``"""
    if system.speeds:
        plain = torch.tensor(system.speeds, dtype=torch.float64)
    else:
        scatter = torch.from_numpy(rng.stream(seed, "speeds").standard_normal(clients))
        plain = system.speed * torch.exp(system.speed_spread * scatter)
    return torch.where(_among(torch.arange(clients), system.slow), plain / system.slow_factor, plain)


class Links(NamedTuple):
    """What connects clients with the server, in megabits per second."""

    up: Tensor  # [K]
    down: Tensor  # [K]


def links(system: System, ids: Tensor, seed: int) -> Links:
    """The links of these clients, the same in every round; the two directions are drawn separately."""

    def spread(name: str) -> Tensor:
        if not system.link_spread:  # in which case a sixth of a round's planning would be spent on factors of one
            return torch.ones(len(ids), dtype=torch.float64)
        chance = rng.uniform(seed, name, ids).double() + 2.0**-25  # the middle of its cell, so that it is never 0
        return torch.exp(system.link_spread * torch.special.ndtri(chance))

    return Links(system.up * spread("link/up"), system.down * spread("link/down"))


class Load(NamedTuple):
    """The work of each client in a round, counted in examples trained."""

    examples: Tensor  # [K] in all scheduled epochs
    epoch: Tensor  # [K] in one pass over the data
    prelude: Tensor  # [K] before training: other work, in the time of this many gradients


class Timetable(NamedTuple):
    """When what happens in a round, in seconds since the server began to send the model."""

    start: Tensor  # [K] a client has finished its scheduled epochs, and starts to wait
    ready: float  # the server has all uploads that it will use
    next_: float  # the server begins to send the next model: the length of the round
    # [K] how long a client can continue to train until the next model arrives; 0 if it is not done by then
    wait: Tensor
    epoch: Tensor  # [K] seconds of one pass over the data in this round
    on_time: Tensor  # [K] bool: the upload arrived before the deadline
    arrival: Tensor  # [K] the server has the client's upload


def timetable(
    system: System, ids: Tensor, load: Load, speed: Tensor, up: int, down: int, address: tuple[int, int]
) -> Timetable:
    """The timetable of a round in which each client receives ``down`` bytes and sends ``up``.

    ``speed`` [K] is in examples per second; ``address`` is the seed and the round. What clients do while
    they wait changes nothing here, since the server never waits for it.
    """
    pace = speed.double()  # examples per second in this round
    if system.jitter:
        sway = 2 * rng.uniform(address[0], "jitter", address[1], ids).double() - 1
        pace = pace / (1 + system.jitter * sway)
    link = links(system, ids, address[0])
    latency = system.latency if up or down else 0.0  # a client that exchanges nothing does not wait for the network
    # A plain number divided by a tensor would be multiplied by the inverse, which rounds twice.
    sent, received = torch.full_like(pace, up) / link.up, torch.full_like(pace, down) / link.down
    receive, send = latency / 2 + 8e-6 * received, latency / 2 + 8e-6 * sent
    compute = (load.examples.double() + load.prelude.double()) / pace
    start = receive + compute
    # Both directions as one sum, not start + send, so that recorded seconds do not change in the last bit.
    arrival = compute + (latency + 8e-6 * (sent + received))
    limit = float("inf") if system.deadline is None else system.deadline
    on_time = arrival <= limit + _SLACK
    ready = min(float(arrival.max()), limit) if len(ids) else 0.0
    next_ = ready + system.aggregation if bool(on_time.any()) else ready
    wait = next_ + receive - start - (0.0 if system.overlap_upload else send)
    return Timetable(start, ready, next_, wait.clamp(min=0), load.epoch.double() / pace, on_time, arrival)


def _among(ids: Tensor, chosen: tuple[int, ...]) -> Tensor:
    """Which of ``ids`` are chosen.  ``[K]`` bool"""
    return torch.isin(ids, torch.tensor(chosen, dtype=torch.int64))
