"""What LAW-AFL's server keeps, and what its clients compute and send."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.maths.learned_weights import Weighing, remembered
from fedloom.maths.registry import Registry

NO_LOSS = torch.finfo(torch.float64).max  # the loss of a head before one has been solved for


class ClientWeights(NamedTuple):
    """What was learned about clients."""

    lam: Tensor  # [N] the weight of each client; 0 for clients without one
    offsets: Tensor  # [N] ln(lambda_i / lambda0_i) when it was last learned; 0 for a client never seen
    shrink: Tensor  # [] gamma


class LawAFLServer(NamedTuple):
    w: Tensor  # [P]
    t: Tensor  # [] rounds so far, including those without uploads
    registry: Registry  # the statistics of each client; empty in ``per_round``
    claims: Tensor  # [N, 2] accuracy and loss, as clients report them
    models: ClientWeights  # by FedLAW
    statistics: ClientWeights
    kappa: Tensor  # [] share of the last round's solved head in the model's head
    temperature: Tensor  # [] s
    freedom: Tensor  # [] 1 / (1 + beta): 0 if weights had to stay at lambda0
    loss: Tensor  # [] cross-entropy of the head in two folds of the proxy set


class LawAFLUpload(NamedTuple):
    dw: Tensor  # [P], or [0] in a round without training
    # [d (d + 1) / 2 + d C] packed G and B; zeros from a client that sent them before; [0] if not requested
    rows: Tensor
    counts: Tensor  # [C] examples of each class
    # [1] of the model that was sent, on the client's own examples, as it reports; [0] if not requested
    accuracy: Tensor
    loss: Tensor  # [1]
    depth: Tensor  # [1] L_i; [0] in a round without training, or if all clients train the whole net
    slope: Tensor  # [1] |grad F_i(w)|^2; [0] unless eq. 5 needs it


class PartlyTrained(NamedTuple):
    """What is trained if clients train to different depths."""

    w: Tensor  # [P]
    depth: Tensor  # [] L_i


class ClientSums(NamedTuple):
    """A client's sums over its examples."""

    counts: Tensor  # [C] of each class; [0] if they are not needed
    statistics: Any = ()  # G and B: Statistics
    right: Any = ()  # [1] examples that the model gets right
    losses: Any = ()  # [1] the sum of its losses
    slope: Any = ()  # [P] the sum of its gradients


def claims_of(uploads: LawAFLUpload) -> Tensor:
    """Accuracy and loss, as clients report them.  ``[K, 2]``"""
    return torch.cat([uploads.accuracy, uploads.loss], 1)


def example_counts(counts: Tensor) -> Tensor:
    """How many examples clients have, at least one whatever noise adds.  ``[K]``"""
    return counts.sum(1).clamp(min=1)


def with_learned(weights: ClientWeights, ids: Tensor, how: Weighing, lam0: Tensor) -> ClientWeights:
    """What is known about clients after the weights of these ``[K]`` were learned, starting from ``lam0``."""
    offsets = remembered(weights.offsets, ids, how, torch.where(how.lam > 0, lam0, 0.0))
    return ClientWeights(torch.zeros_like(weights.lam).index_copy(0, ids, how.lam), offsets, how.shrink)
