"""FedProx: a proximal term keeps each client close to the model it was sent, and partial work is accepted.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, eq. 2 and Algorithm 2.

    client k:  w_k <- argmin_v F_k(v) + (mu / 2) ||v - w||^2, by SGD:  v <- v - eta [g_k(v) + mu (v - w)]
    server:    as FedAvg

The paper's text draws clients by size and averages them equally; its code draws them uniformly and weights
them by size, and so does ``preset = "code"``. FLGo follows the text: ``preset = "paper"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedloom.algorithm import Configures, Model, Nothing, Traits
from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.task import Batch


class FedProx(FedAvg, Configures):
    fedavg_when = {"mu": 0.0}
    presets = {"preset": {"paper": {"weighting": "uniform"}}}

    mu: NonNegativeFloat = Field(0.1, description="strength of the proximal term")
    preset: Literal["code", "paper"] = Field("code", description="how clients are drawn and weighted: see above")

    @property
    def traits(self) -> Traits:
        return super().traits._replace(partial_work=True, proximal=self.mu, pull=("mu",))

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return {"cohort": {"sampling": "proportional"}} if self.preset == "paper" else {}

    def gradient(self, x: Tensor, batch: Batch, down: Model, mine: Nothing) -> Tensor:
        return self.task.grad(x, batch) + self.mu * (x - down.w)
