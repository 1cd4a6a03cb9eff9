"""FedMGDA+: weights under which the average is a common descent direction of the clients' unit updates.

Hu et al., Federated Learning Meets Multi-objective Optimization, IEEE TNSE 2022, Algorithm 1.

    client i:  as FedAvg;  u_i = w - w_i,   uh_i = u_i / ||u_i||
    server:    lambda* = argmin 1/2 ||sum_i lambda_i uh_i||^2
                         over  sum_i lambda_i = 1,  |lambda_i - n_i / sum n| <= epsilon,  0 <= lambda_i <= 1
               w <- w - eta decay^t sum_i lambda*_i uh_i

epsilon = 0 is normalised averaging, epsilon = 1 is MGDA. A client with a zero update is left out: the
least norm would give it all the weight. If nobody moved, nor does the server. The quadratic program is
solved in ``maths.common_direction``; no operation here waits for a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Nothing, Traits, Update, like
from fedloom.maths.common_direction import Limits, least_norm_weights


class Server(NamedTuple):
    w: Tensor  # [P]
    t: Tensor  # [] rounds in which any client moved


class FedMGDA(Algorithm[Server, Nothing, Update]):
    eta: PositiveFloat = Field(1.0, description="the server's step along the common direction")
    decay: float = Field(1.0, gt=0, le=1, description="factor of eta per round")
    epsilon: float = Field(0.1, ge=0, le=1, description="how far a weight may be from the client's share of the data")
    norm_eps: NonNegativeFloat = Field(1e-8, description="added to a norm before dividing by it")
    tolerance: PositiveFloat = Field(1e-8, description="largest gap at which the weights count as optimal")
    max_iter: PositiveInt = Field(5000, description="most iterations of the solver")

    @property
    def traits(self) -> Traits:
        return super().traits._replace(each_upload=True)

    def init(self, w: Tensor) -> Server:
        return Server(w, torch.zeros((), dtype=torch.float64, device=w.device))

    def send(self, server: Server) -> Server:
        return Server(server.w, server.t.new_empty(0))

    def update(self, server: Server, inbox: Inbox[Update]) -> Server:
        moves = inbox.uploads.dw
        norms = torch.linalg.vector_norm(moves, dim=1, dtype=torch.float64)
        unit = moves.double() / torch.where(norms > 0, norms + self.norm_eps, 1)[:, None]
        limits = Limits(self.epsilon, self.tolerance, self.max_iter)
        d = least_norm_weights(products(unit), inbox.weights, norms, limits) @ unit
        eta = self.eta * self.decay**server.t
        return Server(server.w + like(eta * d, server.w), server.t + (norms > 0).any())


def products(rows: Tensor) -> Tensor:
    """The Gram matrix of the rows.  ``[K, K]``

    Long rows are split: a GPU computes one product of a few long rows on a single multiprocessor.
    """
    parts = 256 if rows.shape[1] >= 1 << 16 else 1
    each = rows.shape[1] // parts
    whole, rest = rows[:, : parts * each].view(-1, parts, each).transpose(0, 1), rows[:, parts * each :]
    return (whole @ whole.mT).sum(0) + rest @ rest.T
