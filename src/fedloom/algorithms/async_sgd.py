"""Asynchronous SGD: the server takes the move of each client when it arrives, the less the older its start.

Zhang et al., Staleness-aware Async-SGD for Distributed Deep Learning, IJCAI 2016; with ``sends = "model"`` FedAsync
(Xie, Koyejo and Gupta, Asynchronous Federated Optimization, 2019).

    client k:  x_k <- SGD(w'; D_k) from the model w' that it was sent;            d_k = x_k - w'
    server:    when it arrives, after tau other steps:   w <- w + eta p_k s(tau) d_k
               sends = "model":                          w <- w + eta p_k s(tau) (x_k - w)
               then k, or another client that is free, is sent the new w
    s(tau):    inverse     1 / max(tau, 1)               Zhang et al.
               polynomial  (1 + tau)^-a                  Xie et al.
               constant    1                             plain asynchronous SGD

Of clients that arrive at the same moment the mean is taken. So where all take equally long, they arrive together, tau
is 0, and a round is one of FedAvg. Where they do not, each moves the model by itself, and faster clients do so more
often; with M clients at work tau is about M - 1, so that by ``inverse`` M moves amount to about one mean of them. p_k
is 1, or n_k N / sum n with ``weighting = "samples"``, under which eta p_k may be more than a step can bear. FedAsync's
alpha is eta: 0.6, with a = 0.5.

How long a client takes is what ``system`` says of its device, its link and its data. Nobody is late, so deadlines and
stragglers have no meaning here. A round is M arrivals. Recorded beside the metrics are ``staleness/mean`` and
``staleness/max`` of a round's tau. In lanes only those train side by side that arrive together.
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
    sends: Literal["move", "model"] = Field("move", description="what a client sends: how far it went, or where it is")
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
        """s(tau), how much a move counts whose start is tau steps old.  ``[]``"""
        if self.discount == "constant":
            return torch.ones_like(tau)
        return 1 / tau.clamp(min=1) if self.discount == "inverse" else (1 + tau) ** -self.exponent

    def update(self, server: Model, inbox: Inbox[Sent]) -> Model:
        counts = inbox.senders * inbox.examples / inbox.population if self.traits.weighs_examples else inbox.senders
        move = inbox.total.v / counts
        if self.sends == "model":
            move = move - inbox.weight / counts * server.w
        return Model(server.w + like(self.server_lr * move, server.w))
