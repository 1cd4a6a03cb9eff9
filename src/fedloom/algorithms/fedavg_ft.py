"""FedAvg with fine-tuning: each client adapts a throw-away copy of the global model before it is evaluated.

The baseline that personalised methods must beat: training is FedAvg, and only the personal evaluation
differs. Wang et al., Federated Evaluation of On-device Personalization, 2019.

    server, clients:  as FedAvg
    evaluation k:     v <- w;  v <- SGD(v; D_k) for `epochs` epochs;  test v on k's own held-out data;  forget v
"""

from __future__ import annotations

from pydantic import Field, PositiveInt

from fedloom.algorithm import Adapts, Phase, Traits
from fedloom.algorithms.fedavg import FedAvg


class FedAvgFT(FedAvg, Adapts):
    epochs: PositiveInt = Field(1, description="epochs of fine-tuning before a personal evaluation")

    @property
    def traits(self) -> Traits:
        return super().traits._replace(served="post_fit")

    def adaptation(self) -> tuple[Phase, ...]:
        return (Phase(self.step, name="tune", epochs=self.epochs),)
