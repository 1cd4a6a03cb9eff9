"""DFedAvg: no server; every node trains for a while, then averages with its neighbours.

Sun, Li and Wang, Decentralized Federated Averaging, TPAMI 2022.

    node i:  y <- x_i;  y <- SGD(y; D_i)          x_i <- sum_l W_il y_l

All nodes train in every round. A node without data only averages.
"""

from __future__ import annotations

from torch import Tensor

from fedloom.algorithm import Algorithm, GossipFacts, Inbox, Model, Nothing, Work, like


class DFedAvg(Algorithm[Model, Nothing, Model], GossipFacts):
    family = "gossip"

    @property
    def columnwise(self) -> bool:
        return True

    def init(self, w: Tensor) -> Model:
        return Model(w)

    def finish(self, x: Tensor, down: Model, mine: Nothing, work: Work) -> tuple[Model, Nothing]:
        return Model(x), ()

    def update(self, server: Model, inbox: Inbox[Model]) -> Model:
        return Model(like(inbox.mean.w, server.w))
