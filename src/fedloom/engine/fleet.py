"""Clients that train elsewhere: what a server sends them in a round, and what it receives.

In a simulation the server's process trains the clients itself. In a deployment each client is a separate process on
its own machine; the server reaches them through a ``Fleet``. The client's side is in ``fedloom.engine.client``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fedloom.core.metrics import Verdicts
from fedloom.engine.local import Outcome


class Order(NamedTuple):
    """What the clients of a round are sent."""

    round: int  # counted from 0
    down: Any  # what the algorithm sends
    buffers: Tensor  # [Q] running statistics
    senders: int = 0  # clients of the round
    extra: Mapping[int, int] | None = None  # epochs that each client trains while it waits


class Inquiry(NamedTuple):
    """What clients are sent for an evaluation: each makes its own model from ``down``, unless all share ``model``."""

    round: int  # rounds done
    down: Any
    buffers: Tensor  # [Q]
    model: Any = ()  # [P]


class Fleet(Protocol):
    """The clients of a deployment, by number; ``exp`` is the server's Experiment."""

    def train(self, exp: Any, order: Order, ids: list[int]) -> dict[int, Outcome]:
        """The uploads of clients that responded in time, each as [1, ...]; an error if they are too few."""

    def evaluate(self, exp: Any, inquiry: Inquiry, ids: list[int]) -> Verdicts:
        """The scores of the models of those that responded, each on the client's own held-out rows."""
