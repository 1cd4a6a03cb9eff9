"""FedKD: a private mentor and a shared mentee distil each other; the mentee is sent by few singular values.

Wu et al., Communication-efficient federated learning via knowledge distillation, Nature Communications 2022.

    client i:  on each batch, with logits z, hidden states h, cross-entropies C of mentor (t) and mentee (s):
               c = 1 / (C_t + C_s),   L_h = MSE(h_t, W_h h_s)
               L_t = C_t + c KL(softmax z_s || softmax z_t) + c L_h        moves the mentor  v_i,  at lr
               L_s = C_s + c KL(softmax z_t || softmax z_s) + c L_h        moves the mentee  w,    at mentee_lr
               W_h follows c L_h, at lr;   upload  svd_T(w_i - w);   keep  v_i and W_h
    server:    w <- w + svd_T( mean (w_i - w) ), with equal weights; the same factors go to every client
    svd_T(M):  the least rank of at least 1 whose squared singular values sum up to the share
               T = T_start + (T_end - T_start) t / R  of all of them, in round t;  R = energy_rounds
    served:    the mentor v_i

Each loss updates only its own model, and c is a constant weight: differentiated, it would reward wrong answers. The
released code and PFLlib differentiate the sum of both losses, c included, by everything, and have rank 0
where no shorter sum reaches T; PFLlib truncates the mentee itself instead of its update. Kernels of convolutions are
matrices with a row for each output. Vectors are sent in full, and so are matrices whose factors would be larger. The
first model is sent in full, and later every client is sent every update, even if it does not train. Both models
are the same net with the same start, W_h starts as the identity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import log_softmax

from fedloom.algorithm import Algorithm, Carry, Costs, ForeseesUploads, Inbox, Traits, Work, like
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.task import Batch


class Server(NamedTuple):
    w: Tensor  # [P] the mentee
    t: Tensor  # [] rounds so far
    numbers: Tensor  # [] number of factors of the last update


class Mine(NamedTuple):
    w: Tensor  # [P] the mentor
    W_h: Tensor  # [F, F]


class Pair(NamedTuple):
    """What is trained."""

    w: Tensor  # [P] the mentor
    W_h: Tensor  # [F, F]
    mentee: Tensor  # [P]


class Factored(NamedTuple):
    dw: Tensor  # [P] the update that the factors multiply to
    numbers: Tensor  # [] their number


class FedKD(Algorithm[Server, Mine, Factored], Costs, ForeseesUploads):
    family = "personal"

    mentee_lr: PositiveFloat = Field(0.005, description="learning rate of the mentee, the same in all rounds")
    energy_start: float = Field(0.95, gt=0, le=1, description="T_start: share of the squared singular values kept")
    energy_end: float = Field(0.98, gt=0, le=1, description="T_end: the same at the end")
    energy_rounds: PositiveInt = Field(50, description="R: rounds until T_end is reached; for example those of the run")

    @property
    def traits(self) -> Traits:
        return super().traits._replace(
            classes_only="lets mentor and mentee agree on probabilities of classes",
            served="post_fit",
            distinct=True,
            weighs_examples=False,
            gradients_per_step=2.0,  # of the mentor and of the mentee
            sends_to_all=True,
            size_varies=True,
        )

    def init(self, w: Tensor) -> Server:
        return Server(w, torch.zeros((), device=w.device), torch.tensor(w.numel(), device=w.device))

    def sent_bytes(self, down: Server) -> int:
        return int(down.numbers) * down.w.element_size()

    def upload_bytes(self, uploads: Factored) -> int:
        return int(uploads.numbers.sum()) * uploads.dw.element_size()

    def foresee_uploads(self, server: Server, ids: Tensor) -> tuple[int, Server]:
        """An upper bound: matrices are sent in full if their factors would be longer."""
        return len(ids) * server.w.numel() * server.w.element_size(), server

    def join(self, down: Server) -> Mine:
        return Mine(self.task.w0, torch.eye(self.features()).to(down.w))

    def start(self, down: Server, mine: Mine, work: Work) -> Pair:
        return Pair(mine.w, mine.W_h, down.w)

    def loss(self, x: Pair, batch: Batch, down: Server, mine: Mine) -> Tensor:
        """L_t + L_s with L_h counted once: its gradient by each of the three is that of the loss it minimises."""
        y_t, y_s = (log_softmax(self.task.logits(w, batch), -1) for w in (x.w, x.mentee))
        h_t, h_s = (self.task.encode(w, batch) for w in (x.w, x.mentee))
        wrong = mean(missed(y_t, batch.y) + missed(y_s, batch.y), batch.mask)
        apart = divergence(y_s.detach(), y_t) + divergence(y_t.detach(), y_s) + (h_t - h_s @ x.W_h.T).square().mean(-1)
        # Avoid a division by zero if both models are certain and right.
        return wrong + mean(apart, batch.mask) / wrong.detach().clamp(min=1e-8)

    def step(self, at: Carry, batch: Batch, down: Server, mine: Mine) -> Carry:
        g = self.gradient(at.x, batch, down, mine)
        x, memory = self.optimizer.update(g, at.memory, at.x, batch.lr)
        slow, _ = self.optimizer.update(g, at.memory, at.x, torch.full_like(batch.lr, self.mentee_lr))
        return Carry(x._replace(mentee=slow.mentee), memory)

    def finish(self, x: Pair, down: Server, mine: Mine, work: Work) -> tuple[Factored, Mine]:
        return factored(x.mentee - down.w, self.shapes(), self.energy(down.t)), Mine(x.w, x.W_h)

    def update(self, server: Server, inbox: Inbox[Factored]) -> Server:
        sent = factored(like(inbox.mean.dw, server.w), self.shapes(), self.energy(server.t))
        return Server(server.w + sent.dw, server.t + 1, sent.numbers)

    def serve(self, down: Server, mine: Mine) -> Tensor:
        return mine.w

    def energy(self, t: Tensor) -> Tensor:
        """T, the share of the squared singular values that is kept in round ``t``.  ``[]``"""
        done = (t.double() / self.energy_rounds).clamp(max=1)
        return self.energy_start + (self.energy_end - self.energy_start) * done

    def shapes(self) -> list[torch.Size]:
        """The shapes of the net's parameters, in order."""
        return list(map(torch.Size, self.task.layout.values()))

    def features(self) -> int:
        """F, how many hidden states the head reads."""
        head = dict(zip(self.task.names, self.shapes(), strict=True)).get("head.weight")
        if head is None:
            what = "the net has no linear layer called 'head', which reads the hidden states"
            raise ConfigError([Fault("model.kind", what, "name it so")])
        return head[1]


def mean(each: Tensor, mask: Tensor) -> Tensor:
    """The mean over the real examples.  ``[]``"""
    return (each * mask).sum() / mask.sum().clamp(min=1)


def missed(p: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of each example, from the logarithms of its probabilities.  ``[B]``"""
    return -p.gather(-1, y[:, None]).squeeze(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of distributions that are given by their logarithms.  ``[B]``"""
    return (p.exp() * (p - q)).sum(-1)


def factored(dw: Tensor, shapes: Sequence[torch.Size], energy: Tensor) -> Factored:
    """The update with every matrix truncated to the rank at which it keeps ``energy``."""
    parts = zip(torch.split(dw, [math.prod(shape) for shape in shapes]), shapes, strict=True)
    kept = [truncated(part.view(shape[0], -1), energy) if len(shape) > 1 else whole(part) for part, shape in parts]
    return Factored(
        torch.cat([layer.dw.flatten() for layer in kept]), torch.stack([layer.numbers for layer in kept]).sum()
    )


def whole(part: Tensor) -> Factored:
    return Factored(part, torch.tensor(part.numel(), device=part.device))


def truncated(M: Tensor, energy: Tensor) -> Factored:
    """``M`` as the product of its truncated singular value decomposition, unless that is no shorter than ``M``."""
    finite = M.isfinite().all()  # a decomposition of other values raises; the engine will exclude the client
    U, s, Vh = torch.linalg.svd(torch.where(finite, M, 0.0), full_matrices=False)
    r = rank(s, energy)
    first = torch.arange(len(s), device=s.device) < r
    cost = r * (M.shape[0] + M.shape[1] + 1)
    shorter = finite & (cost < M.numel())
    return Factored(
        torch.where(shorter, (U * torch.where(first, s, 0.0)) @ Vh, M), torch.where(shorter, cost, M.numel())
    )


def rank(s: Tensor, energy: Tensor) -> Tensor:
    """The least number of singular values ``s``, at least one, whose squares sum up to ``energy`` of all.  ``[]``

    In float64: in float32 relevant values would vanish next to the first.
    """
    sums = s.double().square().cumsum(0)
    return ((sums < energy * sums[-1]).sum() + 1).clamp(max=len(s))
