"""FedAvg with fine-tuning: each client adapts a throw-away copy of the global model before it is judged.

The baseline that personalised methods must beat: training is FedAvg, and only the personal evaluation
differs. Wang et al., Federated Evaluation of On-device Personalization, 2019.

    server, clients:  as FedAvg
    evaluation k:     v <- w;  v <- SGD(v; D_k) for `epochs` epochs;  test v on k's own held-out data;  forget v
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from fedloom.algorithm import Phase
from fedloom.algorithms.fedavg import FedAvg


class FedAvgFT(FedAvg):
    served: ClassVar[Literal["pre_fit", "post_fit"]] = "post_fit"

    epochs: PositiveInt = Field(1, description="epochs of fine-tuning before a personal evaluation")

    def fitting(self) -> tuple[Phase, ...]:
        return (Phase(self.step, name="tune", epochs=self.epochs),)
