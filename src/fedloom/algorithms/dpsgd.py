"""D-PSGD: no server; every node averages with its neighbours and descends its own gradient.

Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017, Algorithm 1.

    lian:            x_i <- sum_l W_il x_l - eta g_i(x_i)     the gradient is taken at the point before mixing
    atc:             x_i <- sum_l W_il (x_l - eta g_l(x_l))   adapt, then combine
    mix_then_train:  u_i = sum_l W_il x_l;  x_i <- u_i - eta g_i(u_i)     combine, then adapt, as in other code

The last two take the same steps, half a round apart: one shows its models after mixing, the other before. All nodes
start from the same model, so mix_then_train need not mix before its first step; if they do not (``topology.start``), it
takes that step at each node's own start.
A node's state is its mixed model ``w``, the ``mass`` received with it (1, except for push-sum), and its ``own``:
for ``lian`` its last update, x = w + own / mass, since push-sum divides updates by the mass, too; for
``mix_then_train`` its model, x = own.
By definition a round is one step, ``local = step``. Published code often trains for a whole epoch and mixes before it:
``local = epoch`` with ``order = mix_then_train``. Like ``atc`` with ``local = epoch`` these are DFedAvg's steps, shown
half a round apart. With ``lian``, where mixing and training happen in parallel, it is another method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithm import Algorithm, Configures, GossipFacts, Inbox, Model, Work, like


class Node(NamedTuple):
    w: Tensor  # [P] the mixed model
    mass: Tensor  # [] the mass received with it


class Mine(NamedTuple):
    own: Tensor  # [P] what the neighbours have not received


class DPSGD(Algorithm[Node, Mine, Model], Configures, GossipFacts):
    family = "gossip"

    order: Literal["lian", "atc", "mix_then_train"] = Field(
        "lian", description="mix in parallel with the gradient step, after it, or before it"
    )
    local: Literal["step", "epoch"] = Field(
        "step", description="the length of a round, unless the section local sets it"
    )

    @property
    def columnwise(self) -> bool:
        return True

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return {"local": {"steps": 1} if self.local == "step" else {"epochs": 1}}

    def init(self, w: Tensor) -> Node:
        return Node(w, torch.ones_like(w[0]))

    def join(self, down: Node) -> Mine:
        return Mine(down.w if self.order == "mix_then_train" else torch.zeros_like(down.w))

    def start(self, down: Node, mine: Mine, work: Work) -> Tensor:
        return self.point(down, mine)

    def point(self, down: Node, mine: Mine) -> Tensor:
        """x_i"""
        return down.w + mine.own / down.mass if self.order == "lian" else down.w

    def finish(self, x: Tensor, down: Node, mine: Mine, work: Work) -> tuple[Model, Mine]:
        if self.order == "lian":  # send the mixed model and the update since, as push-sum requires
            return Model(down.w + mine.own), Mine(x - self.point(down, mine))
        if self.order == "mix_then_train":
            return Model(x), Mine(x + (1 / down.mass - 1) * (x - down.w))
        return Model(x), mine

    def update(self, server: Node, inbox: Inbox[Model]) -> Node:
        return Node(like(inbox.mean.w, server.w), like(inbox.weight, server.mass))

    def serve(self, down: Node, mine: Mine) -> Tensor:
        return mine.own if self.order == "mix_then_train" else self.point(down, mine)
