"""DP-FedAvg with adaptive clipping: updates are clipped to norm S, and S tracks a quantile of their norms.

McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018; Andrew et al., Differentially
Private Learning with Adaptive Clipping, NeurIPS 2021, Algorithm 1.

    client k:  d_k <- w_k - w;   b_k = 1/2 if ||d_k|| <= S, else -1/2
               upload  u_k = sqrt(1 - r^2) d_k min(1, S / ||d_k||) / S  and  v_k = 2 r b_k,   no longer than 1 together
    server:    w <- w + S / sqrt(1 - r^2) mean of u_k;   b <- 1/2 + mean of v_k / (2 r), the share that was not clipped
               S <- S exp(-rate (b - quantile))

All clients have equal weights. It is not private without noise: with ``privacy.clip=1``, which clips nothing, and
``privacy.noise`` z the sums of u_k and v_k have deviation z, and the accountant counts both as one release. The mean
update then has the deviation z S / (m sqrt(1 - r^2)), the number of clients that were not clipped z / (2 r): in the
paper's notation z_Delta = z / sqrt(1 - r^2) and sigma_b = z / (2 r), so that z^-2 = z_Delta^-2 + (2 sigma_b)^-2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fedloom.algorithm import Algorithm, Diagnoses, Inbox, Nothing, Traits, Work, like


class Server(NamedTuple):
    w: Tensor  # [P]
    clip: Tensor  # [] S


class Sent(NamedTuple):
    dw: Tensor  # [P] u_k
    within: Tensor  # [] v_k


class DpFedAvg(Algorithm[Server, Nothing, Sent], Diagnoses):
    clip: PositiveFloat = Field(0.1, description="S before the first round")
    quantile: float = Field(0.5, gt=0, lt=1, description="target share of clients that are not clipped")
    rate: float = Field(0.2, ge=0, description="largest change of ln S in a round; 0: S is constant")
    indicator: float = Field(
        0.1, gt=0, lt=1, description="r: part of an upload's norm that encodes whether it was clipped"
    )

    @property
    def traits(self) -> Traits:
        return super().traits._replace(weighs_examples=False, unit_uploads=True)

    @property
    def move(self) -> float:
        """The part of an upload's norm that is left for the update."""
        return math.sqrt(1 - self.indicator**2)

    def init(self, w: Tensor) -> Server:
        return Server(w, w.new_tensor(self.clip))

    def finish(self, x: Tensor, down: Server, mine: Nothing, work: Work) -> tuple[Sent, Nothing]:
        d = x - down.w
        length = torch.linalg.vector_norm(d)
        within = torch.where(length <= down.clip, self.indicator, -self.indicator)
        return Sent(self.move * d / torch.maximum(length, down.clip), within.to(d)), ()

    def update(self, server: Server, inbox: Inbox[Sent]) -> Server:
        moved = server.clip * inbox.mean.dw / self.move
        clip = server.clip * torch.exp(-self.rate * (self.unclipped(inbox) - self.quantile))
        return Server(server.w + like(moved, server.w), like(clip, server.clip))

    def unclipped(self, inbox: Inbox[Sent]) -> Tensor:
        """b, the share of clients that were not clipped; noise may push it out of [0, 1].  ``[]``"""
        return 0.5 + inbox.mean.within / (2 * self.indicator)

    def diagnostics(self, before: Server, inbox: Inbox[Sent], after: Server) -> dict[str, Tensor]:
        return {"clip/norm": before.clip, "clip/unclipped": self.unclipped(inbox)}
