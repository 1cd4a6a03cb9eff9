"""The base of methods whose server adds the clients' mean move to its model, as FedAvg does."""

from __future__ import annotations

from typing import Any, Generic, cast

from torch import Tensor

from fedloom.algorithm.contract import Algorithm
from fedloom.algorithm.values import C, Inbox, Model, S, Update, Work, like


class Averaging(Algorithm[S, C, Update], Generic[S, C]):
    """Clients upload how far they moved, and the server takes ``server_lr`` of the mean move.

    A method with a state of its own overrides ``init``; one whose clients keep something, ``join`` and ``finish``.
    """

    def init(self, w: Tensor) -> S:
        return cast(S, Model(w))

    def finish(self, x: Any, down: S, mine: C, work: Work) -> tuple[Update, C]:
        return Update(x - down.w), mine

    def update(self, server: S, inbox: Inbox[Update]) -> S:
        moved: S = cast(Any, server)._replace(w=server.w + like(self.traits.server_lr * self.mean(inbox), server.w))
        return moved

    def mean(self, inbox: Inbox[Update]) -> Tensor:
        """The clients' mean move, in float64.  ``[P]``"""
        return inbox.mean.dw
