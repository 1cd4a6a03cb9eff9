"""Sums over examples under differential privacy: clipping, sensitivity, noise, and a head that tolerates the noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedloom.maths.ridge import features_in_upload, solve, symmetrised, triangle


def clipped_rows(x: Tensor, norm: float) -> Tensor:
    """Rows clipped to ``norm``: features of examples, or uploads of clients; shorter rows stay bit for bit."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(length > norm, x * (norm / length), x)


def clipped_features(x: Tensor, norm: float | None) -> Tensor:
    """Features to be summed: in float64, and clipped to ``norm`` if sums are private.  ``[B, d]``"""
    return x if norm is None else clipped_rows(x.double(), norm)


def sensitivity(norm: float, *, cross_scale: float = 1.0, counts: bool = False) -> float:
    """The sensitivity of (G, cross_scale B) to one example more or less, if features are no longer than R = ``norm``.

    It adds x x' and x y', of norms R^2 and R: sqrt(R^4 + R^2), and 1 under the root if ``counts`` of classes are
    released, too.
    """
    return math.sqrt(norm**4 + (cross_scale * norm) ** 2 + float(counts))


def noised_sums(rows: Tensor, std: Tensor | float, normals: Tensor, classes: int, cross_scale: float = 1.0) -> Tensor:
    """G + E and B + F, packed by ``to_rows``: E is symmetric, and F has the deviation std / cross_scale."""
    d = features_in_upload(rows.shape[-1], classes)
    scale = rows.new_ones(rows.shape[-1])
    scale[triangle(d) :] = 1 / cross_scale
    return rows + std * normals * scale


def psd(gram: Tensor) -> Tensor:
    """The nearest positive semidefinite matrix: negative eigenvalues become 0.  ``[d, d]``"""
    values, vectors = torch.linalg.eigh(symmetrised(gram))
    return symmetrised((vectors * values.clamp(min=0)) @ vectors.mT)


def noise_ridge(std: float, features: int, k: float = 0.5) -> float:
    """rho = k sigma sqrt(d), k in [0.5, 1]: the noise E has a spectral norm of about 2 sigma sqrt(d)."""
    return k * std * math.sqrt(features)


def mixed_noise(std: float, mu: Tensor) -> float:
    """The deviation of the noise in sum_i mu_i (upload i), each of which has ``std``."""
    return std * float(mu.square().sum().sqrt())


def private_head(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """The head from noised sums, which may be indefinite: eigenvalues are clipped at 0 before the ridge is added."""
    return solve(psd(gram), cross, ridge)
