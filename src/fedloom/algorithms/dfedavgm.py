"""DFedAvgM: DFedAvg with heavy-ball momentum inside a round, and with quantised messages.

Sun, Li and Wang, Decentralized Federated Averaging, TPAMI 2022, Algorithms 1 and 2.

    node i:  y_{k+1} = y_k - eta g_i(y_k) + theta (y_k - y_{k-1}),   y_{-1} = y_0 = x_i;     z_i = y_K

which is SGD with momentum theta, ``local.momentum``, restarted in every round; momentum is never sent. Then

    none:          x_i <- sum_l W_il z_l
    direct:        x_i <- W_ii z_i + sum_{l != i} W_il Q(z_l)
    compensated:   x_i <- z_i + sum_l W_il (Q(z_l) - Q(z_i))
    choco:         v_l <- v_l + Q(z_l - v_l);   x_i <- z_i + gamma sum_l W_il (v_l - v_i)
    diff_literal:  x_i <- x_i + sum_l W_il Q(z_l - x_l)

``direct`` uses a node's own z_i unquantised. ``compensated`` also keeps what its neighbours lose of z_i, and so
preserves the mean. The errors of both do not vanish, and the graph may change. In ``choco`` (Koloskova et al.,
Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication, ICML 2019) every node keeps
copies v_l of what its neighbours have sent so far, so that differences shrink, and errors with them: it needs a static
graph and links that do not fail, since a node that misses one difference has a wrong copy from then on. All have one
gossip step in a round: what a node received is no longer quantised, and could not be forwarded for the same bytes.
``diff_literal`` is the recursion as usually printed. It never mixes models: even without quantisation it diverges if W
has a negative eigenvalue, and otherwise converges to each node's own optimum.

Q has ``bits`` bits for a number and one step s = max |v| / (2^(bits - 1) - 1) for each tensor: floor(v / s) s, or, at
random, one s more, so that its mean is v. What is left of z after mixing is a node's ``own``, x = gamma w + share own,
where share is W_ii for ``direct``, and otherwise 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithm import Algorithm, Configures, Costs, GossipFacts, Inbox, Model, Work, like
from fedloom.core import rng, tree
from fedloom.core.schema import other_than, when

_QUANTISED = when(scheme=other_than("none"))
_ROUNDED = when(scheme=other_than("none"), bits=other_than(32))


class Node(NamedTuple):
    w: Tensor  # [P] what it received
    share: Any = ()  # [] W_ii, how much of the mean was its own, in ``direct``


class Mine(NamedTuple):
    own: Tensor  # [P] the part of its model that a node does not send; [0] if there is none
    v: Tensor  # [P] what its neighbours have received from it so far; [0] if they keep no copies


class DFedAvgM(Algorithm[Node, Mine, Model], Configures, GossipFacts, Costs):
    family = "gossip"

    scheme: Literal["none", "direct", "compensated", "choco", "diff_literal"] = Field(
        "none", description="what is sent: models, quantised models, or quantised differences of one of two kinds"
    )
    bits: Annotated[int, _QUANTISED] = Field(
        8, ge=2, le=32, description="bits of a quantised number: 2 to 16, or 32 (not quantised)"
    )
    rounding: Annotated[Literal["stochastic", "floor"], _ROUNDED] = Field("stochastic", description="of quantisation")
    gamma: Annotated[float, when(scheme="choco")] = Field(
        1.0, gt=0, le=1, description="step size of the consensus step; 0.5 to 0.8 for 4 bits and less"
    )

    @model_validator(mode="after")
    def _settings_agree(self) -> DFedAvgM:
        if 16 < self.bits < 32:
            raise ValueError(f"bits is 2 to 16, or 32 (got {self.bits})")
        return self

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return {"local": {"momentum": 0.9}}

    @property
    def columnwise(self) -> bool:
        return True

    @property
    def sends_once(self) -> bool:
        return self.scheme != "none"

    @property
    def remembers_neighbours(self) -> bool:
        return self.scheme == "choco"

    def init(self, w: Tensor) -> Node:
        return Node(w, torch.ones_like(w[0])) if self.scheme == "direct" else Node(w)

    def join(self, down: Node) -> Mine:
        w0 = self.task.w0  # which all nodes know
        own = (1 - self.gamma) * down.w if self._keeps else w0[:0]
        return Mine(own, w0 if self.scheme == "choco" else w0[:0])

    def start(self, down: Node, mine: Mine, work: Work) -> Tensor:
        return self.serve(down, mine)

    def serve(self, down: Node, mine: Mine) -> Tensor:
        """x_i"""
        if self.scheme == "direct":
            own: Tensor = down.share * mine.own
            return down.w + own
        return self.gamma * down.w + mine.own if self._keeps else down.w

    def finish(self, x: Tensor, down: Node, mine: Mine, work: Work) -> tuple[Model, Mine]:
        if self.scheme == "none":
            return Model(x), mine
        if self.scheme == "diff_literal":
            return Model(self.quantised(x - down.w, work)), mine
        if self.scheme in ("direct", "compensated"):
            q = self.quantised(x, work)
            return Model(q), Mine(x - q, mine.v)
        v = mine.v + self.quantised(x - mine.v, work)
        return Model(v), Mine(x - self.gamma * v, v)

    def update(self, server: Node, inbox: Inbox[Model]) -> Node:
        received = like(inbox.mean.w, server.w)
        if self.scheme == "direct":
            return Node(received, like(inbox.own / inbox.weight, server.w))
        return Node(server.w + received if self.scheme == "diff_literal" else received)

    def upload_bytes(self, uploads: Model) -> int:
        """choco sends Q(z - v), from which the receivers update v; a quantised tensor is sent with its step."""
        if self.scheme == "none" or self.bits == 32:
            return tree.nbytes(uploads)
        count, size = uploads.w.shape
        return count * (-(-self.bits * size // 8) + 4 * len(self.task.names))

    @property
    def _keeps(self) -> bool:
        return self.scheme in ("direct", "compensated", "choco")

    def quantised(self, v: Tensor, work: Work) -> Tensor:
        """Q(v), tensor by tensor; random numbers are addressed by seed, node, round and index."""
        if self.bits == 32:
            return v
        chance = torch.ones_like(v)  # never below the remainder
        if self.rounding == "stochastic":
            place = torch.arange(len(v), device=v.device)
            chance = rng.uniform(self.setup.seed, "quantise", work.round.to(torch.int64), work.client, place).to(
                v.dtype
            )
        sizes = [math.prod(shape) for shape in self.task.layout.values()]
        parts = zip(torch.split(v, sizes), torch.split(chance, sizes), strict=True)
        return torch.cat([quantised(part, self.bits, by) for part, by in parts])


def quantised(v: Tensor, bits: int, chance: Tensor) -> Tensor:
    """The multiple of s = max |v| / (2^(bits - 1) - 1) below each number, or, if ``chance`` in [0, 1) is less than
    the remainder divided by s, the one above."""
    top = 2 ** (bits - 1) - 1
    s = v.abs().amax() / top
    levels = v / torch.where(s > 0, s, torch.ones_like(s))
    low = levels.floor()
    level = (low + (chance < levels - low)).clamp(-top - 1, top)
    found: Tensor = level * s
    return found
