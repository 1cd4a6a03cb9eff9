"""FedDyn: each client's loss is bent so that what is best for a client becomes what is best for all.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1.

    client k:  w_k <- argmin_v L_k(v) - <g_k, v> + (alpha / 2) ||v - w||^2, by SGD;    g_k <- g_k - alpha (w_k - w)
    server:    h <- h - (alpha / N) sum_S (w_k - w);    w <- (1 / |S|) sum_S w_k - h / alpha

g_k is the client's gradient at its last model, so that h, which is the mean of all g_k, is the common one. The norm is
squared, as in the paper; some code leaves the square out, which is another method. h divides by all N clients, who
took part or not. What is sent, w, runs ahead of the clients; what is judged is their plain mean, unless ``shown`` says
otherwise.

``alpha_by = "samples"`` is the authors' code: alpha_k = alpha (mean size) / n_k, so that clients with more data are
held less. w is the same function of the moves, in which alpha cancels; what it converges to is then best for all
examples, and not for all clients alike.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fedloom.algorithm import Algorithm, Carry, Inbox, Nothing, Phase, Update, Work, like
from fedloom.core.task import Batch


class Server(NamedTuple):
    w: Tensor  # [P] what is sent
    h: Tensor  # [P]
    mean: Tensor  # [P] the plain mean of the clients' last models


class Mine(NamedTuple):
    g: Tensor  # [P]


class Moving(NamedTuple):
    """What is trained where clients have an alpha of their own."""

    w: Tensor  # [P]
    alpha: Tensor  # []


class FedDyn(Algorithm[Server, Mine, Update]):
    distinct: ClassVar[bool] = True
    mirrored: ClassVar[bool] = True  # h is the mean of all g_k

    alpha: PositiveFloat = Field(0.01, description="strength of the regulariser; too small is unstable")
    alpha_by: Literal["one", "samples"] = Field("one", description="the same for all clients, or by their data")
    shown: Literal["mean", "sent"] = Field("mean", description="the model that is judged: the clients' mean, or w")

    @property
    def weighs_examples(self) -> bool:
        return False

    def doubts(self, lr: float, rounds: int) -> list[str]:
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

    def phases(self) -> tuple[Phase, ...]:
        if self.alpha_by == "one":
            return (Phase(self.step),)
        # One batch that changes nothing, after which a client learns how much data it has.
        sized = Phase(lambda at, *_: at, name="size", steps=1, cost=0.0, after=self.sized, keeps_statistics=False)
        return (sized, Phase(self.step))

    def start(self, down: Server, mine: Mine) -> Tensor | Moving:
        return down.w if self.alpha_by == "one" else Moving(down.w, torch.full_like(down.w[0], self.alpha))

    def memory(self, x: Tensor | Moving) -> Any:
        return self.optimizer.init(self.model(x))

    def sized(self, at: Carry, seen: Nothing, down: Server, mine: Mine, work: Work) -> tuple[Carry, Tensor]:
        """alpha_k = alpha / (n_k K / N) for the steps that follow."""
        alpha = self.alpha * self.sizes.double().mean() / work.examples
        return at._replace(x=Moving(at.x.w, like(alpha, at.x.w))), torch.ones_like(alpha, dtype=torch.bool)

    def gradient(self, x: Tensor, batch: Batch, down: Server, mine: Mine) -> Tensor:
        return self.bent(x, self.alpha, batch, down, mine)

    def bent(self, w: Tensor, alpha: Tensor | float, batch: Batch, down: Server, mine: Mine) -> Tensor:
        """The gradient of a client's bent loss."""
        return self.task.grad(w, batch) - mine.g + alpha * (w - down.w)

    def step(self, at: Carry, batch: Batch, down: Server, mine: Mine) -> Carry:
        if isinstance(at.x, Tensor):
            return super().step(at, batch, down, mine)
        w, alpha = at.x
        w, memory = self.optimizer.update(self.bent(w, alpha, batch, down, mine), at.memory, w, batch.lr)
        return Carry(Moving(w, alpha), memory)

    def finish(self, x: Tensor | Moving, down: Server, mine: Mine, work: Work) -> tuple[Update, Mine]:
        alpha = self.alpha if isinstance(x, Tensor) else x.alpha
        dw = self.model(x) - down.w
        return Update(dw), Mine(mine.g - alpha * dw)

    def weight(self, upload: Update, work: Work) -> Tensor:
        return torch.ones_like(work.examples)

    def update(self, server: Server, inbox: Inbox[Update]) -> Server:
        h = server.h - like(self.alpha * inbox.total.dw / inbox.population, server.h)
        mean = server.w + like(inbox.mean.dw, server.w)
        return Server(mean - h / self.alpha, h, mean)
