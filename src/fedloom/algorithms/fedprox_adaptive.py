"""FedProx with a proximal weight that follows the loss: tighter when it rises, looser while it falls.

The heuristic of Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, section 5.3.

    client k:  as FedProx, with the mu that it was sent; uploads also F_k(w), its mean loss before training
    server:    f = sum_k (n_k / n) F_k(w)
               f rose:                      mu <- mu + amount
               f fell `patience` times:     mu <- mu - amount        mu stays in [0, 1]
               w as FedAvg

The first round only records the loss that the second is compared with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fedloom.algorithm import Algorithm, Diagnoses, Inbox, Nothing, Surveys, Traits, Work, like
from fedloom.core.task import Batch


class Server(NamedTuple):
    w: Tensor  # [P]
    mu: Tensor  # []
    loss: Tensor  # [] f of the previous round
    falls: Tensor  # [] consecutive rounds in which f fell; -1 before the first f


class Moved(NamedTuple):
    dw: Tensor  # [P]
    loss: Tensor  # [] F_k(w)


class FedProxAdaptive(Algorithm[Server, Nothing, Moved], Surveys, Diagnoses):
    mu: float = Field(0.0, ge=0, le=1, description="initial mu: 0 if clients are homogeneous, 1 if they are not")
    amount: float = Field(0.1, gt=0, le=1, description="by how much mu changes")
    patience: PositiveInt = Field(5, description="consecutive falls before mu is lowered")

    @property
    def traits(self) -> Traits:
        return super().traits._replace(partial_work=True)

    def init(self, w: Tensor) -> Server:
        scalar = torch.zeros((), device=w.device)
        return Server(w, scalar + self.mu, scalar, scalar - 1)

    def send(self, server: Server) -> Server:
        return Server(server.w, server.mu, server.w[:0], server.w[:0])

    def survey(self, batch: Batch, down: Server, mine: Nothing) -> Tensor:
        return self.task.loss(down.w, batch) * batch.mask.sum()

    def gradient(self, x: Tensor, batch: Batch, down: Server, mine: Nothing) -> Tensor:
        return self.task.grad(x, batch) + down.mu * (x - down.w)

    def finish(self, x: Tensor, down: Server, mine: Nothing, work: Work) -> tuple[Moved, Nothing]:
        return Moved(x - down.w, work.survey / work.examples), ()

    def update(self, server: Server, inbox: Inbox[Moved]) -> Server:
        dw, loss = inbox.mean
        loss = like(loss, server.loss)
        first, rose = server.falls < 0, loss > server.loss
        falls = torch.where(first | rose, 0.0, server.falls + 1)
        patient = falls < self.patience
        change = torch.where(first, 0.0, torch.where(rose, self.amount, torch.where(patient, 0.0, -self.amount)))
        mu = (server.mu + change).clamp(0, 1)
        return Server(server.w + like(dw, server.w), mu, loss, torch.where(patient, falls, 0.0))

    def diagnostics(self, before: Server, inbox: Inbox[Moved], after: Server) -> dict[str, Tensor]:
        return {"fedprox/mu": after.mu}
