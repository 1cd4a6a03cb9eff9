"""The quality of a client's data: its classes, its size, and the score of its model on the server's proxy examples."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

_SMOOTH = 1e-8  # eps of LAW-AFL eq. 16


def entropy(counts: Tensor) -> Tensor:
    """H(p) of the classes in nats, 0 without examples.  ``[..., C] -> [...]``"""
    p = counts / counts.sum(-1, keepdim=True).clamp(min=1e-300)
    return -torch.xlogy(p, p).sum(-1)


def evenness(counts: Tensor) -> Tensor:
    """H(p) / ln C: 0 for a client of one class, 1 for one that has equally many of all.  ``[...]``"""
    return entropy(counts) / math.log(max(counts.shape[-1], 2))


def data_quality(counts: Tensor) -> Tensor:
    """q_i = H(p_i) / ln C * n_i / (n_i + median n), at least 0.001; LAW-AFL leaves q_i undefined.  ``[K]``"""
    n = counts.sum(-1)
    return (evenness(counts) * (n / (n + n.median()).clamp(min=1e-300))).clamp(min=1e-3)


def quality_weights(quality: Tensor, accuracy: Tensor, loss: Tensor, sizes: Tensor | None = None) -> Tensor:
    """lambda_i ~ n_i q_i a_i / (1 + l_i), which sums to 1; only by size if all would be 0.  ``[K]``

    LAW-AFL eq. 16: lambda'_i = q_i a_i / (sum_j q_j a_j + eps), and eq. 17: lambda_i ~ lambda'_i N / (1 + l_i), in
    which N cancels. Without ``sizes`` it is only these. A client with a NaN is left out.
    """
    known = ~(quality.isnan() | accuracy.isnan() | loss.isnan())
    q, a = quality.nan_to_num().clamp(0, 1), accuracy.nan_to_num().clamp(0, 1)
    merit = known * q * a
    raw = merit / (merit.sum() + _SMOOTH) / (1 + loss.nan_to_num(posinf=20.0).clamp(0, 20))
    share = torch.ones_like(raw) if sizes is None else sizes.double()
    for weights in (raw * share, known * share, share):
        if bool(weights.sum() > 0):
            return weights / weights.sum()
    return torch.full_like(share, 1 / len(share))


class ProxyScores(NamedTuple):
    """The scores of clients' models on the proxy examples, as measured by the server."""

    accuracy: Tensor  # [K]
    loss: Tensor  # [K]


def proxy_scores(logits: Tensor, y: Tensor, counts: Tensor | None = None) -> ProxyScores:
    """The server's own a_i and l_i, from logits ``[K, n, C]``, so that no client can forge them.

    With ``counts``, a client is scored only on the classes it claims to have: an honest client of two classes would
    otherwise be right on a fifth of ten. NaN if it has none of the proxy's classes.
    """
    logp = log_softmax(logits.double(), -1)
    right = (logits.argmax(-1) == y).double()
    missed = -logp.gather(-1, y.expand(len(logp), -1)[..., None]).squeeze(-1)
    seen = torch.ones_like(right) if counts is None else (counts > 0)[:, y].double()
    rows = seen.sum(1)
    return ProxyScores((seen * right).sum(1) / rows, (seen * missed).sum(1) / rows)


def trained_groups(counts: Tensor, groups: int) -> Tensor:
    """L_i, how many groups of layers a client trains, from the head on: 1 + round((L_max - 1) H(p_i) / ln C).

    A client of one class trains only the head. LAW-AFL refers to its eq. 18 for L_i, which does not contain it.
    """
    return (1 + ((groups - 1) * evenness(counts.double()) + 0.5).floor()).clamp(1, groups)
