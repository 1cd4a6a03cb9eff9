"""FedSAM: FedAvg whose clients take sharpness-aware steps.

Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022.

    client k:  y <- w;  in each step  g = grad F_k(y),  y <- y - eta grad F_k(y + rho g / ||g||)
    server:    as FedAvg

With ``beta`` below 1 it is MoFedSAM: the local direction is beta g~ + (1 - beta) D, where D is minus the clients' mean
update of the last round, divided by their steps times their learning rate, and is sent with the model. If clients take
different numbers of steps, the mean update is divided by the mean of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedloom.algorithm import Inbox, Model, Nothing, Traits, Update, Work, like
from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.task import Batch
from fedloom.maths.sharpness import InnerDecay, RhoSchedule, sam, scheduled


class Moving(NamedTuple):
    """MoFedSAM's state, in place of FedAvg's ``Model``."""

    w: Tensor  # [P]
    D: Tensor  # [P] the clients' mean update of the last round, as a gradient


class Walked(NamedTuple):
    """What a client of MoFedSAM sends."""

    dw: Tensor  # [P]
    span: Tensor  # [] steps times learning rate


class FedSAM(FedAvg):
    fedavg_when = {"rho": 0.0}

    rho: NonNegativeFloat = Field(0.1, description="radius in which a step looks for the worst loss")
    rho_schedule: RhoSchedule = "const"
    wd_inside: InnerDecay = 0.0
    beta: float = Field(1.0, gt=0, le=1, description="weight of the client's own direction; below 1: MoFedSAM")

    @property
    def traits(self) -> Traits:
        return super().traits._replace(gradients_per_step=2.0 if self.rho else 1.0)

    def init(self, w: Tensor) -> Any:
        return Model(w) if self.beta == 1 else Moving(w, torch.zeros_like(w))

    def gradient(self, x: Tensor, batch: Batch, down: Any, mine: Nothing) -> Tensor:
        scale = scheduled(self.rho_schedule, batch.lr, self.setup.first_lr)
        g = sam(self.task, x, batch, self.rho, decay=self.wd_inside, scale=scale)
        return g if self.beta == 1 else self.beta * g + (1 - self.beta) * down.D

    def finish(self, x: Tensor, down: Any, mine: Nothing, work: Work) -> tuple[Any, Nothing]:
        dw = x - down.w
        return Update(dw) if self.beta == 1 else Walked(dw, work.steps * work.lr), ()

    def update(self, server: Any, inbox: Inbox[Any]) -> Any:
        after = super().update(server, inbox)
        if self.beta == 1:
            return after
        return Moving(after.w, like(-inbox.mean.dw / inbox.mean.span, server.w))
