"""Per-FedAvg: the common model is trained to be good after one adaptation step at each client.

Fallah, Mokhtari and Ozdaglar, Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach, NeurIPS 2020, Algorithm 1.

    client k:  x <- w;   for each batch, divided into b1, b2 (and b3):
                   x' = x - alpha grad f(x; b1),   g = grad f(x'; b2)
                   first_order:    x <- x - lr g
                   hessian_free:   x <- x - lr (g - alpha h),
                                   h = [grad f(x + delta g; b3) - grad f(x - delta g; b3)] / (2 delta)
               upload  x - w
    server:    w <- mean of the clients' x
    served:    w - alpha grad f_k(w; b), b one batch of the client's training data

The parts of a batch are its examples 0, 2, 4, ... and 1, 3, 5, ..., or every third; where it has fewer examples than
parts, each part is all of it. The paper's beta is ``local.lr``; PFLlib takes the same rate for alpha, too, and
reads batches of twice the size. Clients have equal weights, as in the paper. g - alpha h points uphill if alpha times
the curvature is above 1: hessian_free needs a smaller alpha than first_order.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedloom.algorithm import Adapts, Carry, Model, Nothing, Phase, Traits
from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.rng import fold
from fedloom.core.schema import over, when
from fedloom.core.task import Batch


class PerFedAvg(FedAvg, Adapts):
    fedavg_when = None

    alpha: NonNegativeFloat = Field(0.05, description="learning rate of the adaptation step")
    variant: Annotated[Literal["first_order", "hessian_free"], when(alpha=over(0))] = Field(
        "first_order", description="ignore second derivatives, or approximate them by a difference of gradients"
    )
    delta: Annotated[PositiveFloat, when(variant="hessian_free", alpha=over(0))] = Field(
        1e-3, description="length of that difference, in gradients"
    )
    weighting: Literal["samples", "uniform", "samples_com", "samples_scaled"] = Field(
        "uniform",
        description="weight clients by their number of examples, or equally; com: missing clients count as not moved",
    )

    @property
    def traits(self) -> Traits:
        """Two gradients on halves of a batch, or four on thirds."""
        cost = 1.0 if self.variant == "first_order" else 4 / 3
        return super().traits._replace(served="post_fit", gradients_per_step=cost)

    def adaptation(self) -> tuple[Phase, ...]:
        return (Phase(self.adapt, name="adapt", steps=1),)

    def adapt(self, at: Carry, batch: Batch, down: Model, mine: Nothing) -> Carry:
        """The adaptation step of a client."""
        return at._replace(x=self.adapted(at.x, batch))

    def adapted(self, x: Tensor, batch: Batch) -> Tensor:
        """x'"""
        return x - self.alpha * self.task.grad(x, batch)

    def gradient(self, x: Tensor, batch: Batch, down: Model, mine: Nothing) -> Tensor:
        if self.variant == "first_order":
            b1, b2 = (part(batch, j, 2) for j in range(2))
            return self.task.grad(self.adapted(x, b1), b2)
        b1, b2, b3 = (part(batch, j, 3) for j in range(3))
        g = self.task.grad(self.adapted(x, b1), b2)
        h = (self.task.grad(x + self.delta * g, b3) - self.task.grad(x - self.delta * g, b3)) / (2 * self.delta)
        return g - self.alpha * h


def part(batch: Batch, j: int, parts: int) -> Batch:
    """Every ``parts``-th example from the ``j``-th on; all of them if there are too few for every part.

    How many examples are real is known only as the value of a tensor, so the part is wide enough for both cases.
    """
    width = len(batch.mask)
    if width < parts:
        return batch
    slots = torch.arange(max(len(range(j, width, parts)), parts - 1), device=batch.mask.device)
    at = torch.where(batch.mask.sum() < parts, slots, j + parts * slots)
    real, at = at < width, at.clamp(max=width - 1)
    return batch._replace(x=batch.x[at], y=batch.y[at], mask=batch.mask[at] * real, key=fold(batch.key, j))
