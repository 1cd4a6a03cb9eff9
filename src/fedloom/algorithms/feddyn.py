"""FedDyn: a dynamic regulariser aligns the optimum of each client's loss with the global one.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1.

    client k:  w_k <- argmin_v L_k(v) - <g_k, v> + (alpha / 2) ||v - w||^2, by SGD;    g_k <- g_k - alpha (w_k - w)
    server:    h <- h - (alpha / N) sum_S (w_k - w);    w <- (1 / |S|) sum_S w_k - h / alpha

g_k is the client's gradient at its last model, so that h, the mean of all g_k, is the common one. The norm is
squared, as in the paper; some code leaves the square out, which is another method. h divides by all N clients,
whether they took part or not. The model w that is sent is ahead of the clients; their plain mean is evaluated, unless
``shown`` is set.

``alpha_by = "samples"`` is the authors' code: alpha_k = alpha (mean size) / n_k, so that clients with more data are
regularised less. w is the same function of the updates, in which alpha cancels; its limit is then optimal over all
examples, not over equally weighted clients.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fedloom.algorithm import Algorithm, Carry, Inbox, TrainsParts, Traits, Update, Work, like
from fedloom.core.task import Batch


class Server(NamedTuple):
    w: Tensor  # [P] the model that is sent
    h: Tensor  # [P]
    mean: Tensor  # [P] the plain mean of the clients' last models


class Mine(NamedTuple):
    g: Tensor  # [P]


class Moving(NamedTuple):
    """What is trained if each client has its own alpha."""

    w: Tensor  # [P]
    alpha: Tensor  # []


class FedDyn(Algorithm[Server, Mine, Update], TrainsParts):
    alpha: PositiveFloat = Field(0.01, description="strength of the regulariser; too small is unstable")
    alpha_by: Literal["one", "samples"] = Field("one", description="the same for all clients, or by their data")
    shown: Literal["mean", "sent"] = Field("mean", description="the model that is evaluated: the clients' mean, or w")

    @property
    def traits(self) -> Traits:
        # h is the mean of all g_k
        return super().traits._replace(weighs_examples=False, distinct=True, mirrored=True, pull=("alpha",))

    def init(self, w: Tensor) -> Server:
        return Server(w, torch.zeros_like(w), w)

    def send(self, server: Server) -> Server:
        return Server(server.w, server.h[:0], server.mean[:0])

    def global_model(self, server: Server) -> Tensor:
        return server.mean if self.shown == "mean" else server.w

    def join(self, down: Server) -> Mine:
        return Mine(torch.zeros_like(down.w))

    def start(self, down: Server, mine: Mine, work: Work) -> Tensor | Moving:
        if self.alpha_by == "one":
            return down.w
        alpha = self.alpha * self.setup.sizes.double().mean() / work.examples  # alpha_k
        return Moving(down.w, like(alpha, down.w))

    def gradient(self, x: Tensor, batch: Batch, down: Server, mine: Mine) -> Tensor:
        return self.bent(x, self.alpha, batch, down, mine)

    def bent(self, w: Tensor, alpha: Tensor | float, batch: Batch, down: Server, mine: Mine) -> Tensor:
        """The gradient of a client's regularised loss."""
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

    def update(self, server: Server, inbox: Inbox[Update]) -> Server:
        h = server.h - like(self.alpha * inbox.total.dw / inbox.population, server.h)
        mean = server.w + like(inbox.mean.dw, server.w)
        return Server(mean - h / self.alpha, h, mean)
