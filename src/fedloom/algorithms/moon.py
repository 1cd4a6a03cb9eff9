"""MOON: a contrastive term pulls a client's representation towards the global one and away from its own last one.

Li et al., Model-Contrastive Federated Learning, CVPR 2021, Algorithm 1.

    z = body(v; x),  z_glob = body(w; x),  z_prev = body(v_prev; x)
    l_con = -log( e^{cos(z, z_glob) / T} / (e^{cos(z, z_glob) / T} + e^{cos(z, z_prev) / T}) )
          = softplus( (cos(z, z_prev) - cos(z, z_glob)) / T )
    client k:  v <- SGD on cross-entropy + mu l_con, from w;   v_prev <- v
    server:    as FedAvg

In a client's first round there is no v_prev and the round is FedAvg: ``first = "skip"`` leaves the term
out, ``first = "global"`` uses w for v_prev, which makes it a constant. The net's ``body`` is the
encoder, as in FLGo; the paper adds a projection head: ``model.projection = 256``.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Self

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedloom.algorithm import Algorithm, Model, Setup, Traits, Update, Weighting, Work
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.schema import over, when
from fedloom.core.task import Batch


class Mine(NamedTuple):
    w: Tensor  # [P] the client's model at the end of its last round
    seen: Tensor  # [] 1 if there is one


class Moon(Algorithm[Model, Mine, Update]):
    fedavg_when = {"mu": 0.0}

    mu: NonNegativeFloat = Field(0.1, description="weight of the contrastive term")
    temperature: Annotated[PositiveFloat, when(mu=over(0))] = Field(
        0.5, description="T: the smaller, the sharper the contrast"
    )
    first: Annotated[Literal["skip", "global"], when(mu=over(0))] = Field(
        "skip", description="what replaces v_prev in a client's first round"
    )
    server_lr: PositiveFloat = Field(1.0, description="the server's learning rate for the mean update")
    weighting: Weighting = "samples"

    @property
    def traits(self) -> Traits:
        return super().traits.weighted_by(self.weighting, distinct=True, server_lr=self.server_lr)

    def bind(self, setup: Setup) -> Self:
        task = setup.task
        if self.mu and task.fixed and not any(name.startswith("body.") for name in task.names):
            what = "MOON compares the body's features before and after training, which are the same if it is frozen"
            raise ConfigError([Fault("model.freeze", what, "set algorithm.mu=0, or freeze less than the body")])
        return super().bind(setup)

    def join(self, down: Model) -> Mine:
        return Mine(torch.zeros_like(down.w), torch.zeros(()).to(down.w))

    def loss(self, x: Tensor, batch: Batch, down: Model, mine: Mine) -> Tensor:
        if not self.mu:
            return self.task.loss(x, batch)
        loss, z = self.task.loss_and_encoding(x, batch)
        return loss + self.mu * self.contrast(z, batch, down, mine)

    def contrast(self, z: Tensor, batch: Batch, down: Model, mine: Mine) -> Tensor:
        """l_con, averaged over the batch."""
        before = torch.where(mine.seen > 0, mine.w, down.w)
        z_glob, z_prev = (self.task.encode(w, batch, frozen=True) for w in (down.w, before))
        apart = cosine_similarity(z, z_prev, dim=1, eps=1e-8) - cosine_similarity(z, z_glob, dim=1, eps=1e-8)
        each = softplus(apart / self.temperature) * batch.mask
        l_con = each.sum() / batch.mask.sum().clamp(min=1)
        return l_con * mine.seen if self.first == "skip" else l_con

    def finish(self, x: Tensor, down: Model, mine: Mine, work: Work) -> tuple[Update, Mine]:
        return Update(x - down.w), Mine(x, torch.ones_like(mine.seen))
