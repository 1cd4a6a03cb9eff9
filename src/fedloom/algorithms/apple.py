"""APPLE: each client's model is a mixture of all clients' core models, with learned coefficients.

Luo and Wu, Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning, IJCAI 2022, Algorithm 1.

    client i:  w_i = sum_j p_ij c_j  of all clients' cores c_j;   at first p_i = p0,  p0_j = n_j / n,  and c_i = w0
               g = grad f_i(w_i);  at once, with the other cores as they were received,
               c_i <- c_i - lr p_ii g   and   p_ij <- p_ij - p_lr ( <g, c_j> + lambda(r) mu (p_ij - p0_j) )
               upload  c_i;  keep  p_i
    lambda(r) = (1 + cos(pi r / L)) / 2 in round r < L = pull_rounds, and 0 from then on
    server:    replaces the core of each client that it receives;  the other cores stay
    served:    w_i with the current cores

A round costs a client N models down and one up. With ``downloads = M`` it receives only the M cores with the largest
|p_ij|; for the others it uses what it received last, at first w0. It always has its own. The local optimizer updates
the core; p takes plain steps.
PFLlib multiplies lr by N, takes means for inner products, has p_lr = 0 and uploads the mixture as core.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from fedloom.algorithm import Algorithm, Carry, Costs, Inbox, TrainsParts, Traits, Work
from fedloom.core import tree
from fedloom.core.task import Batch


class Server(NamedTuple):
    cores: Tensor  # [N, P]
    p0: Tensor  # [N] each client's share of the data

    @property
    def w(self) -> Tensor:
        """The mixture of a client that knows only the sizes of the others.  ``[P]``"""
        return self.p0 @ self.cores


class Mine(NamedTuple):
    p: Tensor  # [N] the coefficient of each core
    me: Tensor  # [N] 1 at its own index; all 0 until it has taken part once
    cores: Any = ()  # [N, P] as last received; only if downloads are limited


class Core(NamedTuple):
    core: Tensor  # [P]
    client: Tensor  # [] the client's number


class Mixture(NamedTuple):
    """What is trained, and what a step must know."""

    w: Tensor  # [P] the mixture
    core: Tensor  # [P] the client's own
    p: Tensor  # [N]
    me: Tensor  # [N]
    pull: Tensor  # [] lambda(r) mu


class Apple(Algorithm[Server, Mine, Core], TrainsParts, Costs):
    family = "personal"

    p_lr: NonNegativeFloat = Field(0.001, description="learning rate of the relationships p")
    mu: NonNegativeFloat = Field(0.1, description="strength of the regulariser of p towards the shares of the data")
    pull_rounds: PositiveInt = Field(
        10, description="L: rounds over which the regulariser fades; for example a fifth of all"
    )
    p_init: Literal["size", "own"] = Field(
        "size", description="initial p: the shares of the data, or 1 for the client's own core"
    )
    downloads: PositiveInt | None = Field(None, description="M: most cores that a client receives a round; unset: all")

    @property
    def traits(self) -> Traits:
        return super().traits._replace(each_upload=True, has_global_model=False, distinct=True, size_varies=True)

    def init(self, w: Tensor) -> Server:
        sizes = self.setup.sizes.to(w)
        return Server(w.repeat(len(sizes), 1), sizes / sizes.sum())

    def sent_bytes(self, down: Server) -> int:
        return tree.nbytes(down.cores[: self.downloads])  # the shares of the data are sent once, at the start

    @property
    def lane_size(self) -> int:
        return 0 if self.downloads is None else len(self.setup.sizes) * self.task.size

    def upload_bytes(self, uploads: Core) -> int:
        return tree.nbytes(uploads.core)  # the server knows the sender

    def join(self, down: Server) -> Mine:
        nobody = torch.zeros_like(down.p0)
        first = self.first(down, nobody)
        return Mine(first, nobody, () if self.downloads is None else self.task.w0.repeat(len(down.p0), 1))

    def held(self, down: Server, mine: Mine) -> Tensor:
        """The cores that a client mixes: received in this round, or kept from earlier rounds.  ``[N, P]``"""
        if self.downloads is None:
            return down.cores
        wanted = torch.where(mine.me > 0, -1.0, mine.p.abs())
        top = wanted.argsort(descending=True, stable=True)[: self.downloads]
        received = torch.zeros_like(wanted).scatter(0, top, 1.0) + mine.me
        return torch.where(received[:, None] > 0, down.cores, mine.cores)

    def start(self, down: Server, mine: Mine, work: Work) -> Mixture:
        me = (torch.arange(len(down.p0), device=down.p0.device) == work.client).to(down.p0)
        p = torch.where(mine.me.any(), mine.p, self.first(down, me))
        pull = (self.mu * scheduled(work.round, self.pull_rounds)).to(p)
        cores = self.held(down, mine)
        # The core of a client that has not trained yet is still the initial model.
        core = torch.where(mine.me.any(), me @ cores, self.task.w0)
        return Mixture(p @ cores, core, p, me, pull)

    def step(self, at: Carry, batch: Batch, down: Server, mine: Mine) -> Carry:
        _, core, p, me, pull = at.x
        g, cores = self.task.grad(at.x.w, batch), self.held(down, mine)
        slope = (1 - me) * (cores @ g) + me * (core @ g)
        own, memory = self.optimizer.update((p @ me) * g, at.memory, core, batch.lr)
        p = p - self.p_lr * (slope + pull * (p - down.p0))
        return Carry(Mixture(mixed(p, me, own, cores), own, p, me, pull), memory)

    def memory(self, x: Mixture) -> Any:
        return self.optimizer.init(x.core)

    def finish(self, x: Mixture, down: Server, mine: Mine, work: Work) -> tuple[Core, Mine]:
        kept = () if self.downloads is None else self.held(down, mine)
        return Core(x.core, work.client), Mine(x.p, x.me, kept)

    def update(self, server: Server, inbox: Inbox[Core]) -> Server:
        received = inbox.uploads
        return Server(server.cores.index_copy(0, received.client, received.core), server.p0)

    def serve(self, down: Server, mine: Mine) -> Tensor:
        if self.p_init == "own":  # a client that has not trained yet uses only its own core, whatever its number
            return torch.where(mine.me.any(), mine.p @ self.held(down, mine), self.task.w0)
        return mine.p @ self.held(down, mine)

    def first(self, down: Server, me: Tensor) -> Tensor:
        """The relationships of a client that takes part for the first time.  ``[N]``"""
        return down.p0 if self.p_init == "size" else me


def mixed(p: Tensor, me: Tensor, core: Tensor, cores: Tensor) -> Tensor:
    """sum_j p_j w_j, where the client's own core is ``core`` not the received one.  ``[P]``"""
    return (p * (1 - me)) @ cores + (p @ me) * core


def scheduled(r: Tensor, L: int) -> Tensor:
    """lambda(r): the share of the regulariser that is left in round ``r``.  ``[]``"""
    return torch.where(r < L, (1 + torch.cos(math.pi * r / L)) / 2, 0.0)
