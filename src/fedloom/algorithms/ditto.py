"""Ditto: in addition to the common model, every client trains a personal one that is kept close to it.

Li, Hu, Beirami and Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, Algorithm 1.

    client k:  w_k <- SGD(w; D_k)                                       upload  w_k - w
               v_k <- v_k - lr (grad F_k(v_k) + mu (v_k - w)),          `personal_epochs` passes over D_k;  keep v_k
    server:    as FedAvg, and so is the common model, bit for bit
    served:    v_k, which starts as the first model that the client receives

Both models are trained on the same batches, each with its own optimizer. So mu = 0, PFLlib's default, is
local training only; the larger mu, the closer v_k stays to w. BatchNorm's statistics are those of w_k.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedloom.algorithm import Algorithm, Carry, HasPhases, Model, Phase, TrainsParts, Traits, Update, Weighting, Work
from fedloom.core.task import Batch


class Mine(NamedTuple):
    v: Tensor  # [P]


class Both(NamedTuple):
    """The two models that a client trains, or the optimizer state of each."""

    w: Any
    v: Any


class Ditto(Algorithm[Model, Mine, Update], HasPhases, TrainsParts):
    family = "personal"
    fedavg_when = {}

    mu: NonNegativeFloat = Field(
        0.1, description="strength of the proximal term that keeps a client's own model close to the common one"
    )
    personal_epochs: PositiveInt = Field(1, description="passes over the data in which a client trains its own model")
    server_lr: PositiveFloat = Field(1.0, description="the server's learning rate for the mean update")
    weighting: Weighting = "samples"

    @property
    def traits(self) -> Traits:
        return super().traits.weighted_by(
            self.weighting,
            served="post_fit",
            distinct=True,
            server_lr=self.server_lr,
            pull=("mu",),
        )

    def memory(self, x: Any) -> Any:
        """The two models have separate optimizer states."""
        return Both(self.optimizer.init(x.w), self.optimizer.init(x.v))

    def join(self, down: Model) -> Mine:
        return Mine(down.w)

    def start(self, down: Model, mine: Mine, work: Work) -> Both:
        return Both(down.w, mine.v)

    def phases(self) -> tuple[Phase, ...]:
        # Under the same name, the second phase reads the batches of the first.
        return Phase(self.step), Phase(self.personal_step, epochs=self.personal_epochs, keeps_statistics=False)

    def step(self, at: Carry, batch: Batch, down: Model, mine: Mine) -> Carry:
        g = self.task.grad(at.x.w, batch)
        w, memory = self.optimizer.update(g, at.memory.w, at.x.w, batch.lr)
        return Carry(at.x._replace(w=w), at.memory._replace(w=memory))

    def personal_step(self, at: Carry, batch: Batch, down: Model, mine: Mine) -> Carry:
        """One step of the client's own model."""
        g = self.task.grad(at.x.v, batch)
        g = g + self.mu * (at.x.v - down.w) if self.mu else g
        v, memory = self.optimizer.update(g, at.memory.v, at.x.v, batch.lr)
        return Carry(at.x._replace(v=v), at.memory._replace(v=memory))

    def finish(self, x: Both, down: Model, mine: Mine, work: Work) -> tuple[Update, Mine]:
        return Update(x.w - down.w), Mine(x.v)

    def serve(self, down: Model, mine: Mine) -> Tensor:
        return mine.v
