"""Asynchronous SGD: the server applies each client's update when it arrives, weighted down by its staleness.

Zhang et al., Staleness-aware Async-SGD for Distributed Deep Learning, IJCAI 2016; with ``sends = "model"`` FedAsync
(Xie, Koyejo and Gupta, Asynchronous Federated Optimization, 2019).

    client k:  x_k <- SGD(w'; D_k) from the model w' that it was sent;            d_k = x_k - w'
    server:    when it arrives, after tau other steps:   w <- w + eta p_k s(tau) d_k
               sends = "model":                          w <- w + eta p_k s(tau) (x_k - w)
               then k, or another idle client, is sent the new w
    s(tau):    inverse     1 / max(tau, 1)               Zhang et al.
               polynomial  (1 + tau)^-a                  Xie et al.
               constant    1                             plain asynchronous SGD

Updates that arrive at the same moment are averaged. So if all clients take equally long, they arrive together, tau
is 0, and a round is one of FedAvg. Otherwise each moves the model separately, and faster clients do so more
often; with M clients training, tau is about M - 1, so that with ``inverse`` M updates amount to about one mean of them.
p_k is 1, or n_k N / sum n with ``weighting = "samples"``, where eta p_k may become too large for stability. FedAsync's
alpha is eta: 0.6, with a = 0.5.

How long a client takes follows from ``system``: its device, its link and its data. No client is late, so deadlines and
stragglers have no meaning here. A round is M arrivals. ``staleness/mean`` and ``staleness/max`` of a round's tau are
also recorded. In lanes, only clients that arrive together train side by side.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Model, Nothing, Traits, Weighting, Work, like
from fedloom.core.schema import when


class Sent(NamedTuple):
    v: Tensor  # [P] d_k, or x_k


class AsyncSGD(Algorithm[Model, Nothing, Sent]):
    server_lr: PositiveFloat = Field(1.0, description="eta")
    sends: Literal["move", "model"] = Field("move", description="what a client sends: its update, or its model")
    discount: Literal["inverse", "polynomial", "constant"] = Field("inverse", description="s: see above")
    exponent: Annotated[PositiveFloat, when(discount="polynomial")] = Field(0.5, description="a")
    weighting: Weighting = "uniform"

    @property
    def traits(self) -> Traits:
        return super().traits.weighted_by(self.weighting, synchronous=False)

    def init(self, w: Tensor) -> Model:
        return Model(w)

    def finish(self, x: Tensor, down: Model, mine: Nothing, work: Work) -> tuple[Sent, Nothing]:
        return Sent(x if self.sends == "model" else x - down.w), ()

    def weight(self, upload: Sent, work: Work) -> Tensor:
        return super().weight(upload, work) * self.freshness(work.staleness)

    def freshness(self, tau: Tensor) -> Tensor:
        """s(tau), the weight of an update whose start is tau steps old.  ``[]``"""
        if self.discount == "constant":
            return torch.ones_like(tau)
        return 1 / tau.clamp(min=1) if self.discount == "inverse" else (1 + tau) ** -self.exponent

    def update(self, server: Model, inbox: Inbox[Sent]) -> Model:
        counts = inbox.senders * inbox.examples / inbox.population if self.traits.weighs_examples else inbox.senders
        move = inbox.total.v / counts
        if self.sends == "model":
            move = move - inbox.weight / counts * server.w
        return Model(server.w + like(self.server_lr * move, server.w))
