"""FedDyn: each client's loss is bent so that what is best for a client becomes what is best for all.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1.

    client k:  w_k <- argmin_v L_k(v) - <g_k, v> + (alpha / 2) ||v - w||^2, by SGD;    g_k <- g_k - alpha (w_k - w)
    server:    h <- h - (alpha / N) sum_S (w_k - w);    w <- (1 / |S|) sum_S w_k - h / alpha

g_k is the client's gradient at its last model, so that h, which is the mean of all g_k, is the common one. The norm is
squared, as in the paper; some code leaves the square out, which is another method. h divides by all N clients, who
took part or not. What is sent, w, runs ahead of the clients; what is judged is their plain mean, unless ``shown`` says
otherwise.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Update, Work, like
from fedloom.task import Batch


class Server(NamedTuple):
    w: Tensor  # [P] what is sent
    h: Tensor  # [P]
    mean: Tensor  # [P] the plain mean of the clients' last models


class Mine(NamedTuple):
    g: Tensor  # [P]


class FedDyn(Algorithm[Server, Mine, Update]):
    distinct: ClassVar[bool] = True

    alpha: PositiveFloat = Field(0.01, description="strength of the regulariser; too small is unstable")
    shown: Literal["mean", "sent"] = Field("mean", description="the model that is judged: the clients' mean, or w")

    @property
    def weighs_examples(self) -> bool:
        return False

    def doubts(self, lr: float) -> list[str]:
        size = lr * self.alpha
        growing = f"local.lr x algorithm.alpha is {size:g}: from 2 on, the proximal steps grow instead of shrink"
        return [growing] if size >= 2 else []

    def init(self, w: Tensor) -> Server:
        return Server(w, torch.zeros_like(w), w)

    def send(self, server: Server) -> Server:
        return Server(server.w, server.h[:0], server.mean[:0])

    def judged(self, server: Server) -> Tensor:
        return server.mean if self.shown == "mean" else server.w

    def join(self, down: Server) -> Mine:
        return Mine(torch.zeros_like(down.w))

    def gradient(self, x: Tensor, batch: Batch, down: Server, mine: Mine) -> Tensor:
        return self.task.grad(x, batch) - mine.g + self.alpha * (x - down.w)

    def finish(self, x: Tensor, down: Server, mine: Mine, work: Work) -> tuple[Update, Mine]:
        dw = x - down.w
        return Update(dw), Mine(mine.g - self.alpha * dw)

    def weight(self, upload: Update, work: Work) -> Tensor:
        return torch.ones_like(work.examples)

    def update(self, server: Server, inbox: Inbox[Update]) -> Server:
        h = server.h - like(self.alpha * inbox.total.dw / inbox.population, server.h)
        mean = server.w + like(inbox.mean.dw, server.w)
        return Server(mean - h / self.alpha, h, mean)
