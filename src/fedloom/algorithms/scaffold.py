"""SCAFFOLD: control variates correct each client's drift.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, Algorithm 1.

    client i:  y <- w;  y <- y - eta (g_i(y) - c_i + c), K times
               option I:   c_i+ = grad f_i(w) on all its data       option II:  c_i+ = c_i - c + (w - y) / (K eta)
               upload  y - w  and  c_i+ - c_i;   c_i <- c_i+
    server:    w <- w + server_lr * mean (y - w);   c <- c + (1 / N) sum (c_i+ - c_i)

(w - y) / (K eta) is the mean gradient only for plain SGD: momentum, weight decay and clipping are refused.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Surveys, Traits, Weighting, Work, like
from fedloom.core.task import Batch


class Server(NamedTuple):
    w: Tensor  # [P]
    c: Tensor  # [P]


class Mine(NamedTuple):
    c: Tensor  # [P]


class Moved(NamedTuple):
    dw: Tensor  # [P]
    dc: Tensor  # [P] divided by the weight of the update, so that the server's sum counts every client once


class Scaffold(Algorithm[Server, Mine, Moved], Surveys):
    option: Literal["II", "I"] = Field("II", description="how a client renews its control variate")
    server_lr: PositiveFloat = Field(1.0, description="the server's learning rate for the mean update")
    weighting: Weighting = "uniform"

    @property
    def traits(self) -> Traits:
        return super().traits.weighted_by(
            self.weighting,
            plain_sgd=True,
            distinct=True,
            mirrored=True,  # c is the mean of all c_i
            server_lr=self.server_lr,
        )

    @property
    def surveys(self) -> bool:
        return self.option == "I"

    @property
    def survey_gradients(self) -> float:
        return float(self.surveys)

    def init(self, w: Tensor) -> Server:
        return Server(w, torch.zeros_like(w))

    def join(self, down: Server) -> Mine:
        return Mine(torch.zeros_like(down.w))

    def survey(self, batch: Batch, down: Server, mine: Mine) -> Tensor:
        return self.task.grad(down.w, batch) * batch.mask.sum()

    def gradient(self, x: Tensor, batch: Batch, down: Server, mine: Mine) -> Tensor:
        return self.task.grad(x, batch) - mine.c + down.c

    def finish(self, x: Tensor, down: Server, mine: Mine, work: Work) -> tuple[Moved, Mine]:
        if self.option == "I":
            renewed = work.survey / work.examples
        else:
            renewed = mine.c - down.c + (down.w - x) / (work.steps.clamp(min=1) * work.lr)
        c = torch.where(work.steps > 0, renewed, mine.c)
        sent = Moved(x - down.w, c - mine.c)
        return sent._replace(dc=sent.dc / self.weight(sent, work)), Mine(c)

    def update(self, server: Server, inbox: Inbox[Moved]) -> Server:
        w = server.w + like(self.server_lr * inbox.mean.dw, server.w)
        return Server(w, server.c + like(inbox.total.dc / inbox.population, server.c))
