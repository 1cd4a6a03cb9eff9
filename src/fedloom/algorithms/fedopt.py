"""FedOpt: the server treats the mean update as a gradient and gives it to its own optimizer.

Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2; momentum as in FedAvgM
(Hsu et al., Measuring the Effects of Non-Identical Data Distribution, 2019).

    d = sum_k (n_k / n) (w_k - w)
    sgd:       w <- w + lr d
    momentum:  m <- beta1 m + d;                     w <- w + lr m
    others:    m <- beta1 m + (1 - beta1) d;         w <- w + lr m / (sqrt(v) + tau),  v_0 = tau^2, and
      adagrad: v <- v + d^2
      adam:    v <- beta2 v + (1 - beta2) d^2
      yogi:    v <- v - (1 - beta2) d^2 sign(v - d^2)

As in the paper's experiments, adagrad is without momentum (beta1 = 0) unless it is set.
Unlike the local optimizers, which follow torch, the paper's rules start v at tau^2, without bias correction.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Nothing, Update, like
from fedloom.core.schema import other_than, when


class Server(NamedTuple):
    w: Tensor  # [P]
    m: Tensor  # [P]
    v: Tensor  # [P]


class FedOpt(Algorithm[Server, Nothing, Update]):
    fedavg_when = {"rule": "sgd"}

    rule: Literal["sgd", "momentum", "adagrad", "adam", "yogi"] = Field("adam", description="the server's optimizer")
    lr: PositiveFloat | None = Field(None, description="the server's step; unset: 1 for sgd and momentum, else 0.03")
    beta1: Annotated[float | None, when(rule=other_than("sgd"))] = Field(
        None, ge=0, lt=1, description="decay of the first moment; unset: 0 for adagrad, else 0.9"
    )
    beta2: Annotated[float, when(rule=("adam", "yogi"))] = Field(
        0.99, ge=0, lt=1, description="decay of the second moment"
    )
    tau: Annotated[PositiveFloat, when(rule=("adagrad", "adam", "yogi"))] = Field(
        1e-3, le=1e18, description="tau, the degree of adaptivity; larger adapts less"
    )

    def init(self, w: Tensor) -> Server:
        return Server(w, torch.zeros_like(w), torch.full_like(w, self.tau**2))

    def send(self, server: Server) -> Server:
        return Server(server.w, server.m[:0], server.v[:0])

    def update(self, server: Server, inbox: Inbox[Update]) -> Server:
        d = like(inbox.mean.dw, server.w)
        lr = self.lr if self.lr is not None else 1.0 if self.rule in ("sgd", "momentum") else 0.03
        if self.rule == "sgd":
            return server._replace(w=server.w + lr * d)
        beta1 = self.beta1 if self.beta1 is not None else 0.0 if self.rule == "adagrad" else 0.9
        if self.rule == "momentum":
            m = beta1 * server.m + d
            return server._replace(w=server.w + lr * m, m=m)
        m = beta1 * server.m + (1 - beta1) * d
        v = self._second_moment(server.v, d.square())
        return Server(server.w + lr * m / (v.sqrt() + self.tau), m, v)

    def _second_moment(self, v: Tensor, d2: Tensor) -> Tensor:
        if self.rule == "adagrad":
            return v + d2
        if self.rule == "adam":
            return self.beta2 * v + (1 - self.beta2) * d2
        return v - (1 - self.beta2) * d2 * torch.sign(v - d2)
