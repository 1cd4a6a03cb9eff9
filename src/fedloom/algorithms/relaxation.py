"""FedProx + Relaxation: the server takes only part of the step to the clients' average.

Yue and Tan, A Federated Learning Algorithm with a Relaxation Step for Heterogeneous Networks, 2023.

    client k:  as FedProx
    server:    w <- alpha w + (1 - alpha) sum_k a_k w_k  =  w + (1 - alpha) sum_k a_k (w_k - w)

It is under-relaxation, that is FedProx with a server rate of 1 - alpha: it slows the mean, and damps the
variance from drawing a cohort, by 1 - alpha if clients go a small part of the way to their
optimum and by (1 - alpha) / (1 + alpha) if they go all the way. alpha = 0 is FedProx; a negative alpha
extrapolates.

With ``gamma_target`` a client stops after the first epoch at whose end its proximal problem is solved accurately
enough, ||grad F_k(w_k) + mu (w_k - w)|| <= gamma ||grad F_k(w)||; ``local.epochs`` is then the maximum.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator
from torch import Tensor

from fedloom.algorithm import (
    Carry,
    HasPhases,
    Inbox,
    Model,
    Nothing,
    OwnStatistics,
    Phase,
    Surveys,
    Traits,
    Update,
    Work,
)
from fedloom.algorithms.fedprox import FedProx
from fedloom.core.schema import under, when
from fedloom.core.task import Batch


class Relaxation(FedProx, Surveys, HasPhases, OwnStatistics):
    fedavg_when = {"mu": 0.0, "alpha": 0.0}

    mu: NonNegativeFloat = Field(1.0, description="strength of the proximal term")
    alpha: float = Field(0.1, gt=-1, lt=1, description="share of the old model that is kept")
    allow_over_relaxation: Annotated[bool, when(alpha=under(0))] = Field(False, description="permit a negative alpha")
    gamma_target: PositiveFloat | None = Field(
        None, description="train until the local problem is solved this accurately, for local.epochs at most"
    )
    broadcast: Literal["cohort", "all"] = Field(
        "cohort", description="which clients receive the model: affects only the byte count"
    )

    @model_validator(mode="after")
    def _negative_only_if_meant(self) -> Relaxation:
        if self.alpha < 0 and not self.allow_over_relaxation:
            raise ValueError(
                f"alpha = {self.alpha:g} extrapolates; set allow_over_relaxation = true if this is intended"
            )
        return self

    @property
    def traits(self) -> Traits:
        return super().traits._replace(sends_to_all=self.broadcast == "all", relaxation=self.alpha)

    @property
    def surveys(self) -> bool:
        return self.gamma_target is not None

    @property
    def survey_gradients(self) -> float:
        return float(self.surveys)

    def survey(self, batch: Batch, down: Model, mine: Nothing) -> Tensor:
        """grad F_k(w), once it is divided by the number of examples."""
        return self.gradient_sum(batch, down.w, down, mine)

    def gradient_sum(self, batch: Batch, x: Tensor, down: Model, mine: Nothing) -> Tensor:
        """The sum of the gradients of a batch's examples at ``x``."""
        return self.task.grad(x, batch) * batch.mask.sum()

    def phases(self) -> tuple[Phase, ...]:
        if self.gamma_target is None:
            return super().phases()
        return (Phase(self.step, look=self.gradient_sum, look_gradients=1.0, after=self.solved),)

    def solved(self, at: Carry, total: Tensor, down: Model, mine: Nothing, work: Work) -> tuple[Carry, Tensor]:
        """Whether the local problem is solved accurately enough."""
        assert self.gamma_target is not None
        there = total / work.examples + self.mu * (at.x - down.w)
        here = work.survey / work.examples
        return at, torch.linalg.vector_norm(there) <= self.gamma_target * torch.linalg.vector_norm(here)

    def statistics(self, before: Tensor, mean: Tensor, server: Model) -> Tensor:
        return torch.lerp(mean, before, self.alpha)

    def mean(self, inbox: Inbox[Update]) -> Tensor:
        return (1 - self.alpha) * super().mean(inbox)
