"""D-PSGD: no server; every node averages with its neighbours and descends its own gradient.

Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017, Algorithm 1.

    lian:  x_i <- sum_l W_il x_l - eta g_i(x_i)           the gradient is taken at the point before mixing
    atc:   x_i <- sum_l W_il (x_l - eta g_l(x_l))         adapt, then combine

A node's state is what the neighbours gave it, ``w``, and for ``lian`` its own last move, ``dx``; x = w + dx.
By definition a round is one step (``local.steps = 1``); with more, it is DFedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Model, Work, like


class Mine(NamedTuple):
    dx: Tensor  # [P] the node's own last move, which its neighbours have not heard of


class DPSGD(Algorithm[Model, Mine, Model]):
    family: ClassVar[Literal["server", "personal", "closed_form", "gossip"]] = "gossip"

    order: Literal["lian", "atc"] = Field("lian", description="mix beside the gradient step, or after it")

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return {"local": {"steps": 1}}

    def init(self, w: Tensor) -> Model:
        return Model(w)

    def join(self, down: Model) -> Mine:
        return Mine(torch.zeros_like(down.w))

    def start(self, down: Model, mine: Mine) -> Tensor:
        return down.w + mine.dx

    def finish(self, x: Tensor, down: Model, mine: Mine, work: Work) -> tuple[Model, Mine]:
        before = down.w + mine.dx
        if self.order == "atc":
            return Model(x), mine
        return Model(before), Mine(x - before)

    def update(self, server: Model, inbox: Inbox[Model]) -> Model:
        return Model(like(inbox.mean.w, server.w))

    def serve(self, down: Model, mine: Mine) -> Tensor:
        return down.w + mine.dx
