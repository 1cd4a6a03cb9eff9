"""Several aggregation centres: each aggregates the uploads it receives, and their models are fused into one."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.core import tree


class CentreModels(NamedTuple):
    """The state of several centres."""

    w: Tensor  # [P] the fusion of the centres' models
    each: Tensor  # [centres, P]


class Centres(NamedTuple):
    """Which clients upload to which centres, and how the centres' models are fused."""

    centres: int
    copies: int  # the number of centres that a client uploads to
    mix: Literal["uniform", "samples"] | tuple[float, ...]  # b_c
    lost: tuple[int, ...]  # centres that never respond

    def start(self, w: Tensor) -> CentreModels:
        """All centres with the same model."""
        return CentreModels(w, w.expand(self.centres, -1).contiguous())

    def aggregated(self, models: CentreModels, moves: Tensor, clients: Tensor, weights: Tensor) -> CentreModels:
        """w_c = w + weighted mean of the updates [K, P] that centre c received, then w = sum_c b_c w_c.

        A centre without uploads keeps its model. If no responding centre has any weight, clients keep theirs.
        """
        rows = weights * self.receives(clients)  # [centres, K]
        received = rows.sum(1, keepdim=True)
        moved = models.w + tree.mix(rows / received.clamp(min=1e-300), moves)
        each = torch.where(received > 0, moved.to(models.w.dtype), models.each)
        b = self.shares(received[:, 0])
        w = tree.mix(b[None], each)[0].to(models.w.dtype)
        return CentreModels(torch.where(b.sum() > 0, w, models.w), each)

    def receives(self, clients: Tensor) -> Tensor:
        """1 if a centre receives a client's upload: client k sends to k mod centres and the next.  ``[centres, K]``"""
        place = (torch.arange(self.centres, device=clients.device)[:, None] - clients[None]) % self.centres
        return (place < self.copies).double()

    def shares(self, received: Tensor) -> Tensor:
        """b_c, spread over the centres that respond; ``received`` is the total weight of each centre's uploads.

        All are 0 if no responding centre has received anything.
        """
        if isinstance(self.mix, tuple):
            b = torch.tensor(self.mix, dtype=torch.float64, device=received.device)
        else:
            b = received.double() if self.mix == "samples" else torch.ones_like(received, dtype=torch.float64)
        answers = torch.ones_like(b)
        answers[list(self.lost)] = 0.0
        return b * answers / (b * answers).sum().clamp(min=1e-300)
