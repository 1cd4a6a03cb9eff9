"""D-PSGD: no server; every node averages with its neighbours and descends its own gradient.

Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017, Algorithm 1.

    lian:            x_i <- sum_l W_il x_l - eta g_i(x_i)     the gradient is taken at the point before mixing
    atc:             x_i <- sum_l W_il (x_l - eta g_l(x_l))   adapt, then combine
    mix_then_train:  u_i = sum_l W_il x_l;  x_i <- u_i - eta g_i(u_i)     combine, then adapt, as other code has it

The last two take the same steps, half a round apart: one shows its models after mixing, the other before. All nodes
start alike, so that mix_then_train need not mix before its first step.
A node's state is what the neighbours gave it, ``w``, and its ``own``: for ``lian`` its last move, x = w + own; for
``mix_then_train`` its model, x = own.
By definition a round is one step, ``local = step``; published code often trains for a whole epoch, which makes it
DFedAvg: ``local = epoch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Model, Work, like


class Mine(NamedTuple):
    own: Tensor  # [P] what the neighbours have not heard of


class DPSGD(Algorithm[Model, Mine, Model]):
    family: ClassVar[Literal["server", "personal", "closed_form", "gossip"]] = "gossip"
    columnwise: ClassVar[bool] = True

    order: Literal["lian", "atc", "mix_then_train"] = Field(
        "lian", description="mix beside the gradient step, after it, or before it"
    )
    local: Literal["step", "epoch"] = Field("step", description="what a round is, where the section local does not say")

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return {"local": {"steps": 1} if self.local == "step" else {"epochs": 1}}

    def init(self, w: Tensor) -> Model:
        return Model(w)

    def join(self, down: Model) -> Mine:
        return Mine(down.w if self.order == "mix_then_train" else torch.zeros_like(down.w))

    def start(self, down: Model, mine: Mine) -> Tensor:
        return down.w + mine.own if self.order == "lian" else down.w

    def finish(self, x: Tensor, down: Model, mine: Mine, work: Work) -> tuple[Model, Mine]:
        if self.order == "lian":
            before = down.w + mine.own
            return Model(before), Mine(x - before)
        return Model(x), Mine(x) if self.order == "mix_then_train" else mine

    def update(self, server: Model, inbox: Inbox[Model]) -> Model:
        return Model(like(inbox.mean.w, server.w))

    def serve(self, down: Model, mine: Mine) -> Tensor:
        if self.order == "mix_then_train":
            return mine.own
        return down.w + mine.own if self.order == "lian" else down.w
