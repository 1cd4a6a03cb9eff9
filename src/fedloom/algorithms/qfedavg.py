"""q-FedAvg: clients with a larger loss have more weight, so that accuracy is distributed more evenly.

Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020, Algorithm 2:
minimises sum_k p_k F_k^{q+1} / (q + 1), where p_k is the chance with which a client is drawn. That is n_k / n, as in
the paper, with ``cohort.sampling = "proportional"``; drawn uniformly, all clients have the same p_k.

    client k:  F_k = mean loss of w on all its data;  u_k = w - SGD(w; D_k);  L = 1 / eta
               upload  F_k^q u_k  and  h_k = q F_k^{q-1} L ||u_k||^2 + F_k^q
    server:    w <- w - sum_k F_k^q u_k / sum_k h_k

(The paper's Delta_k and h_k are L times these; L cancels, and without it q = 0 is FedAvg bit for bit.)
"""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Model, Nothing, Surveys, Traits, Work, like
from fedloom.core.task import Batch


class Fair(NamedTuple):
    dw: Tensor  # [P] F^q (w_k - w)
    h: Tensor  # []


class QFedAvg(Algorithm[Model, Nothing, Fair], Surveys):
    fedavg_when = {"q": 0.0}
    fedavg_as = {"weighting": "uniform"}

    q: NonNegativeFloat = Field(1.0, description="strength of fairness; 0 is FedAvg with equal weights")
    loss_floor: PositiveFloat = Field(1e-8, description="added to a loss, whose negative powers must stay finite")

    @property
    def traits(self) -> Traits:
        return super().traits._replace(weighs_examples=False)

    def init(self, w: Tensor) -> Model:
        return Model(w)

    def survey(self, batch: Batch, down: Model, mine: Nothing) -> Tensor:
        return self.task.loss(down.w, batch) * batch.mask.sum()

    def finish(self, x: Tensor, down: Model, mine: Nothing, work: Work) -> tuple[Fair, Nothing]:
        F = work.survey / work.examples + self.loss_floor
        dw = x - down.w
        h = self.q * F ** (self.q - 1) / work.lr * dw.square().sum() + F**self.q
        return Fair(F**self.q * dw, h), ()

    def update(self, server: Model, inbox: Inbox[Fair]) -> Model:
        return Model(server.w + like(inbox.total.dw / inbox.total.h, server.w))
