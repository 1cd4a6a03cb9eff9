"""FedAvg: clients train the server's model, and the server averages what they return.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

    client k:  w_k <- SGD(w; D_k)                          upload  w_k - w
    server:    w <- w + server_lr * sum_k a_k (w_k - w),   where over the cohort S, of K clients out of N,
               samples: a_k = n_k / sum_S n       uniform: a_k = 1 / K
               samples_com: a_k = n_k / n         samples_scaled: a_k = (N / K) n_k / n      (n: of all clients)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat
from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Model, Nothing, Traits, Update, like


class FedAvg(Algorithm[Model, Nothing, Update]):
    fedavg_when: ClassVar[Mapping[str, Any] | None] = {}

    server_lr: PositiveFloat = Field(1.0, description="the server's learning rate for the mean update")
    weighting: Literal["samples", "uniform", "samples_com", "samples_scaled"] = Field(
        "samples",
        description="weight clients by their number of examples, or equally; com: missing clients count as not moved",
    )

    @property
    def traits(self) -> Traits:
        return super().traits.weighted_by(self.weighting, server_lr=self.server_lr)

    def update(self, server: Model, inbox: Inbox[Update]) -> Model:
        return server._replace(w=server.w + like(self.server_lr * self.mean(inbox), server.w))

    def mean(self, inbox: Inbox[Update]) -> Tensor:
        """The clients' mean update under the chosen weighting."""
        if self.weighting == "samples_com":
            return inbox.total.dw / inbox.examples
        if self.weighting == "samples_scaled":
            return inbox.total.dw / inbox.examples * (inbox.population / inbox.senders)
        return inbox.mean.dw
