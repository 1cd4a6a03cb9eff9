"""DFedSAM: DFedAvg whose nodes take sharpness-aware steps.

Shi et al., Improving the Model Consistency of Decentralized Federated Learning, ICML 2023.

    node i:  in each step  g = grad F_i(y),  y <- y - eta grad F_i(y + rho g / ||g||)       then as DFedAvg

With ``topology.gossip_steps`` above 1 the nodes average several times in a round: DFedSAM-MGS.
"""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedloom.algorithm import Model, Nothing, Traits
from fedloom.algorithms.dfedavg import DFedAvg
from fedloom.core.task import Batch
from fedloom.maths.sharpness import InnerDecay, RhoSchedule, sam, scheduled


class DFedSAM(DFedAvg):
    rho: NonNegativeFloat = Field(0.1, description="radius in which a step looks for the worst loss")
    rho_schedule: RhoSchedule = "const"
    wd_inside: InnerDecay = 0.0

    @property
    def traits(self) -> Traits:
        return super().traits._replace(gradients_per_step=2.0 if self.rho else 1.0)

    def gradient(self, x: Tensor, batch: Batch, down: Model, mine: Nothing) -> Tensor:
        scale = scheduled(self.rho_schedule, batch.lr, self.setup.first_lr)
        return sam(self.task, x, batch, self.rho, decay=self.wd_inside, scale=scale)
