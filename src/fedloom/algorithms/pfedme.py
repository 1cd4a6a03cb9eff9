"""pFedMe: the common model minimises the clients' Moreau envelopes, and each client keeps its own minimiser.

T. Dinh, Tran and Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, Algorithm 1.

    F_k(w) = min_theta f_k(theta) + (lam / 2) ||theta - w||^2,      grad F_k(w) = lam (w - theta_k(w))
    client k:  w_k, theta <- w;   for each batch b:
                   theta <- theta - inner_lr (grad f(theta; b) + lam (theta - w_k)),   K = `inner_steps` times
                   w_k   <- w_k - lr lam (w_k - theta)
               upload  w_k - w;   keep theta_k <- theta
    server:    w <- (1 - beta) w + beta mean_k w_k
    served:    theta_k

theta continues from batch to batch, as in the authors' code; the paper does not specify its start.
The local optimizer updates w_k; the inner steps are plain. Clients have equal weights, as in the paper; its code
weights them by their data. PFLlib's beta = 0 never moves w, and it adds a weight decay of 0.001 to the inner steps.
BatchNorm's statistics are those of w_k.
"""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedloom.algorithm import Algorithm, Carry, Model, TrainsParts, Traits, Update, Weighting, Work
from fedloom.core.task import Batch


class Mine(NamedTuple):
    theta: Tensor  # [P]


class Pair(NamedTuple):
    """What a client trains."""

    w: Tensor  # [P] its part of the common model
    theta: Tensor  # [P] its own


class PFedMe(Algorithm[Model, Mine, Update], TrainsParts):
    family = "personal"

    lam: NonNegativeFloat = Field(15.0, description="lambda: strength of the proximal term")
    inner_steps: PositiveInt = Field(5, description="K: steps of a client's own model for each batch")
    inner_lr: PositiveFloat = Field(0.01, description="learning rate of these steps; local.lr is that of w")
    beta: PositiveFloat = Field(1.0, description="step of the server to the clients' mean; above 1 it goes beyond")
    weighting: Weighting = "uniform"

    @property
    def traits(self) -> Traits:
        return super().traits.weighted_by(
            self.weighting,
            served="post_fit",
            distinct=True,
            gradients_per_step=float(self.inner_steps),
            server_lr=self.beta,
            pull=("lam", "inner_lr"),
        )

    def join(self, down: Model) -> Mine:
        return Mine(down.w)

    def start(self, down: Model, mine: Mine, work: Work) -> Pair:
        return Pair(down.w, down.w)

    def step(self, at: Carry, batch: Batch, down: Model, mine: Mine) -> Carry:
        w, theta = at.x
        for _ in range(self.inner_steps):
            theta = theta - self.inner_lr * (self.task.grad(theta, batch) + self.lam * (theta - w))
        w, memory = self.optimizer.update(self.lam * (w - theta), at.memory, w, batch.lr)
        return Carry(Pair(w, theta), memory)

    def finish(self, x: Pair, down: Model, mine: Mine, work: Work) -> tuple[Update, Mine]:
        return Update(x.w - down.w), Mine(x.theta)

    def serve(self, down: Model, mine: Mine) -> Tensor:
        return mine.theta
