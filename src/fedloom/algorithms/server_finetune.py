"""FedAvg whose server also trains on its own labelled examples: a control, not a method.

FedLAW and LAW-AFL use labelled examples at the server. Their gain over FedAvg means little unless it is more
than that of simply training on these examples.

    client k:  w_k <- SGD(w; D_k)                       upload  w_k - w
    server:    w <- sum_k (n_k / sum n) w_k;   then  w <- w - lr grad CE(w; batch)  for batches of the proxy set
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Model, Nothing, Update, UsesProxy
from fedloom.core.optim import Optimizer, adam, sgd
from fedloom.core.replay import after
from fedloom.core.schema import over, when
from fedloom.maths.proxy_set import ProxyBatch, ProxyGradient, proxy_epochs

_OPTIMIZERS: dict[str, Optimizer] = {"sgd": sgd(momentum=0.9), "adam": adam()}


class ServerFinetune(Algorithm[Model, Nothing, Update], UsesProxy):
    fedavg_when = {"server_epochs": 0}

    server_epochs: NonNegativeInt = Field(20, description="passes over the proxy set in each round; 0 is FedAvg")
    server_lr: Annotated[PositiveFloat, when(server_epochs=over(0))] = Field(
        0.01, description="learning rate at the server"
    )
    server_optimizer: Annotated[Literal["sgd", "adam"], when(server_epochs=over(0))] = Field(
        "sgd", description="SGD with momentum 0.9, or Adam"
    )
    proxy_batch: Annotated[PositiveInt, when(server_epochs=over(0))] = Field(
        128, description="examples in a step of the server"
    )

    def update(self, server: Model, inbox: Inbox[Update]) -> Model:
        w = super().update(server, inbox).w
        optimizer, gradient = _OPTIMIZERS[self.server_optimizer], ProxyGradient(self.task, self.proxy)

        def step(lr: Tensor, at: tuple[Tensor, Any], batch: ProxyBatch) -> tuple[Tensor, Any]:
            x, memory = at
            return optimizer.update(gradient(x, batch)[1], memory, x, lr)

        epochs = proxy_epochs(self.task, self.proxy, self.server_epochs, self.proxy_batch, inbox.address)
        batches, start = (batch for epoch in epochs for batch in epoch), (w, optimizer.init(w))
        lr = w.new_tensor(self.server_lr)
        return Model(after(step, lr, start, batches, gradient.recorder, self.server_optimizer)[0])
