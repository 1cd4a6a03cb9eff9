"""Ridge regression on the server's own examples: a control, not a method.

The gain of LAW-AFL from labelled examples at the server means little unless its head, to which clients contribute, is
better than one that is learned from these examples alone.

    server:    W = (X'X + rho I)^-1 X'Y,  X: features of the proxy examples by the frozen body, once
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedloom.algorithm import (
    Algorithm,
    Configures,
    Contributes,
    HasPhases,
    Inbox,
    Model,
    Nothing,
    OwnStatistics,
    Phase,
    Setup,
    Update,
    UsesProxy,
    Work,
)
from fedloom.maths.linear_head import check_head, with_head
from fedloom.maths.proxy_set import proxy_features
from fedloom.maths.ridge import default_ridge, solve, statistics


class ProxyRidge(Algorithm[Model, Nothing, Update], HasPhases, UsesProxy, OwnStatistics, Contributes, Configures):
    family = "closed_form"

    ridge: NonNegativeFloat = Field(1e-3, description="rho in units of the mean eigenvalue of X'X")
    bias: bool = Field(False, description="give the head a bias, as a constant feature")

    def bind(self, setup: Setup) -> Self:
        check_head(setup.task, self.bias)
        return super().bind(setup)

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return {"cohort": {"sampling": "all"}}

    def phases(self) -> tuple[Phase, ...]:
        return ()

    def finish(self, x: Tensor, down: Model, mine: Nothing, work: Work) -> tuple[Update, Nothing]:
        return Update(x[:0]), ()

    def update(self, server: Model, inbox: Inbox[Update]) -> Model:
        x, y = proxy_features(self.task, self.task.w0, self.proxy, self.bias)
        sums = statistics(x, y, self.task.linear_head.out_features)
        head = solve(sums.gram, sums.cross, default_ridge(sums.gram, self.ridge))
        return Model(with_head(self.task, server.w, head))

    def statistics(self, before: Tensor, mean: Tensor, server: Model) -> Tensor:
        return before

    def contributions(self, before: Model, inbox: Inbox[Update], after: Model) -> Tensor | None:
        return None  # no client does
