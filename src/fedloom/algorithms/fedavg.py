"""FedAvg: clients train the server's model, and the server averages what they return.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

    client k:  w_k <- SGD(w; D_k)                          upload  w_k - w
    server:    w <- w + server_lr * sum_k (n_k / n) (w_k - w)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Model, Nothing, Update, Work, like


class FedAvg(Algorithm[Model, Nothing, Update]):
    fedavg_when: ClassVar[Mapping[str, Any] | None] = {}

    server_lr: PositiveFloat = Field(1.0, description="how much of the mean update the server takes")
    weighting: Literal["samples", "uniform"] = Field("samples", description="count clients by their data, or alike")

    def init(self, w: Tensor) -> Model:
        return Model(w)

    def join(self, down: Model) -> Nothing:
        return ()

    def finish(self, x: Tensor, down: Model, mine: Nothing, work: Work) -> tuple[Update, Nothing]:
        return Update(x - down.w), ()

    def weight(self, upload: Update, work: Work) -> Tensor:
        return work.examples if self.weighting == "samples" else torch.ones_like(work.examples)

    def update(self, server: Model, inbox: Inbox[Update]) -> Model:
        return Model(server.w + like(self.server_lr * inbox.mean.dw, server.w))
