"""Ridge regression from sums that clients can add up: the statistics, their wire form, and the solve.

Features X come from a frozen body that all clients share; Y are one-hot labels, or one column of numbers.

    client i:  G_i = X_i' X_i,   B_i = X_i' Y_i                     one pass, no gradient
    server:    W = (sum_i G_i + rho I)^-1 sum_i B_i                 the same for every partition, number and order

Three quantities are easily confused and each has its own name: ``shrink`` (gamma_s) scales weights, ``ridge``
(rho) belongs to the final head, and ``ri_ridge`` (rho_loc) is what a client adds to make its own system solvable.

Everything is computed in float64: a Gram matrix in float32 loses the small eigenvalues that a small ridge needs.
At d = 4,096 features a Gram matrix takes 134 MB (67 MB packed), and no function here needs more than 1 GB for one.
On one core, the sums of 60,000 examples take about a minute and a solve takes 2 s. A solve by eigenvectors, which a
singular system without ridge or a sweep of ridges needs, takes about a minute as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


# -- sums over examples ---------------------------------------------------------------------------
class Statistics(NamedTuple):
    """The sums over a client's examples. Stacked, every field has the clients as its first axis."""

    gram: Tensor  # [..., d, d] G = X'X
    cross: Tensor  # [..., d, C] B = X'Y
    counts: Tensor  # [..., C] examples of each class

    @property
    def examples(self) -> Tensor:
        """n, the number of examples.  ``[...]``"""
        return self.counts.sum(-1)


def statistics(x: Tensor, y: Tensor, classes: int, mask: Tensor | None = None) -> Statistics:
    """The sums of some examples: x ``[..., B, d]``, y ``[..., B]``; rows where ``mask`` is 0 are padding.

    In regression, Y is the one column of targets, and ``counts`` the number of examples.
    """
    if y.is_floating_point():
        targets, ones = y[..., None].double(), torch.ones_like(y[..., None], dtype=torch.float64)
    else:
        targets = ones = (y[..., None] == torch.arange(classes, device=y.device)).double()
    x = x.double()
    if mask is not None:
        padding = (mask == 0)[..., None]
        x, targets, ones = (part.masked_fill(padding, 0.0) for part in (x, targets, ones))
    return Statistics(x.mT @ x, x.mT @ targets, ones.sum(-2))


def no_statistics(features: int, classes: int) -> Statistics:
    """The sums of no examples."""
    shapes = (features, features), (features, classes), (classes,)
    return Statistics(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))


def with_bias(x: Tensor) -> Tensor:
    """The features and a constant 1 as the last of them.  ``[..., d + 1]``"""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


# -- on the wire ----------------------------------------------------------------------------------
def triangle(features: int) -> int:
    """How many numbers a symmetric matrix has."""
    return features * (features + 1) // 2


def pack_symmetric(symmetric: Tensor) -> Tensor:
    """The upper triangle, row by row.  ``[..., d, d] -> [..., d (d + 1) / 2]``"""
    d = symmetric.shape[-1]
    return torch.cat([symmetric[..., i, i:] for i in range(d)], -1)


def unpack_symmetric(packed: Tensor, features: int) -> Tensor:
    """The symmetric matrix with this upper triangle.  ``[..., d (d + 1) / 2] -> [..., d, d]``"""
    upper = torch.ones(features, features, dtype=torch.bool, device=packed.device).triu()
    half = packed.new_zeros(*packed.shape[:-1], features, features).masked_scatter(upper, packed)
    return half + half.triu(1).mT


def to_rows(stats: Statistics) -> Tensor:
    """G and B of a client as one vector, which is what it uploads.  ``[..., d (d + 1) / 2 + d C]``"""
    return torch.cat([pack_symmetric(stats.gram), stats.cross.flatten(-2)], -1)


def from_rows(rows: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """G and B again, from vectors of ``to_rows``."""
    d = features_in_upload(rows.shape[-1], classes)
    gram, cross = rows[..., : triangle(d)], rows[..., triangle(d) :]
    return unpack_symmetric(gram, d), cross.reshape(*rows.shape[:-1], d, classes)


def features_in_upload(length: int, classes: int) -> int:
    """d, from the length d (d + 1) / 2 + d C of an upload."""
    return (math.isqrt((2 * classes + 1) ** 2 + 8 * length) - 2 * classes - 1) // 2


def sent_statistics(rows: Tensor, counts: Tensor) -> Tensor:
    """Which clients sent statistics; the others send zeros.  ``[K]``"""
    return (counts != 0).any(-1) | (rows != 0).any(-1)


def statistics_bytes(features: int, classes: int) -> int:
    """Bytes of one client's G and B in float64, of which G is sent as a triangle."""
    return (triangle(features) + features * classes) * 8


# -- solving --------------------------------------------------------------------------------------
class Factor(NamedTuple):
    """A symmetric matrix, factorised once to be solved many times."""

    basis: Tensor  # [d, d] the lower Cholesky factor, or eigenvectors
    inverse: Tensor | None = None  # [d] one over each eigenvalue, 0 if that was cut off; None: Cholesky
    jitter: float = 0.0  # what had to be added to the diagonal

    def solve(self, rhs: Tensor) -> Tensor:
        """A^-1 rhs, or A^+ rhs if A is singular.  ``[d, C]``"""
        if self.inverse is None:
            return torch.cholesky_solve(rhs, self.basis)
        return self.basis @ (self.inverse[:, None] * (self.basis.mT @ rhs))


def factor(a: Tensor, *, regular: bool = True) -> Factor:
    """Factorise A: Cholesky, with growing jitter while rounding makes it fail, finally eigenvectors.

    Unless A is known to be ``regular``, by a ridge that ``matters``, no jitter is tried: what rounding left in the
    null space would be divided by it. Eigenvectors with a cut-off give the solution of least norm instead.
    """
    if not bool(a.sum().isfinite()):
        raise ValueError("the system is not finite: an upload contains NaN or infinity, or has overflowed")
    a = symmetrised(a)
    eps = torch.finfo(a.dtype).eps
    unit = eps * float(a.diagonal().mean().abs())
    for jitter in (0.0, *(10.0**j * unit for j in range(7))) if regular else (0.0,):
        lower, failed = torch.linalg.cholesky_ex(with_ridge(a, jitter))
        # Rounding may turn a pivot of 0 into a small positive one, and then Cholesky "succeeds".
        pivots = lower.diagonal().square()
        if not bool(failed) and (regular or bool(pivots.min() > rounding(a))):
            return Factor(lower, jitter=jitter)
    values, vectors = torch.linalg.eigh(a)
    return Factor(vectors, inverted(values))


class Factors(NamedTuple):
    """Symmetric matrices that were factorised together."""

    lower: Tensor  # [..., d, d] Cholesky factors
    others: dict[int, Factor]  # those of the stack, counted along all its axes, for which Cholesky alone is not enough

    def solve(self, rhs: Tensor) -> Tensor:
        """A^-1 rhs of each.  ``[..., d, C]``"""
        half = torch.linalg.solve_triangular(self.lower, rhs, upper=False)
        found: Tensor = torch.linalg.solve_triangular(self.lower.mT, half, upper=True)
        if not self.others:
            return found
        flat = rhs.reshape(-1, *rhs.shape[-2:])
        each = enumerate(zip(found.reshape(flat.shape), flat, strict=True))
        return torch.stack([self.others[k].solve(b) if k in self.others else x for k, (x, b) in each]).view(rhs.shape)


def factors(gram: Tensor, ridge: Tensor | float, *, checked: bool = True) -> Factors:
    """Factorise every G + rho I of a stack ``[..., d, d]`` of symmetric G, each as ``factor`` does.

    Cholesky takes all at once, with one check for success; ``factor`` is used only where it failed. If it is not
    ``checked``, which would stop a GPU, factors that need ``factor`` are nan.
    """
    a, regular = with_ridge(gram, ridge), ridge > rounding(gram)
    lower, failed = torch.linalg.cholesky_ex(a)
    pivots = lower.diagonal(dim1=-2, dim2=-1).square()
    sound = (failed == 0) & a.sum((-2, -1)).isfinite() & (regular | (pivots.amin(-1) > rounding(a)))
    if not checked:
        return Factors(torch.where(sound[..., None, None], lower, math.nan), {})
    if bool(sound.all()):
        return Factors(lower, {})
    flat = a.reshape(-1, *a.shape[-2:])
    left = (~sound).flatten().nonzero().flatten().tolist()
    return Factors(lower, {k: factor(flat[k], regular=bool(regular.flatten()[k])) for k in left})


def rounding(a: Tensor) -> Tensor:
    """The rounding error of a zero eigenvalue of A.  ``[...]``"""
    return a.shape[-1] * torch.finfo(a.dtype).eps * a.diagonal(dim1=-2, dim2=-1).amax(-1)


def matters(ridge: Tensor | float, a: Tensor) -> bool:
    """Whether a ridge is larger than the rounding error of a zero eigenvalue of A."""
    return float(ridge) > float(rounding(a))


def inverted(values: Tensor) -> Tensor:
    """One over each eigenvalue, 0 if rounding cannot distinguish it from 0.  ``[d]``"""
    cut = values.abs().max() * len(values) * torch.finfo(values.dtype).eps
    return torch.where(values > cut, 1 / values, 0.0)


def solve(gram: Tensor, cross: Tensor, ridge: Tensor | float = 0.0) -> Tensor:
    """W = (G + rho I)^-1 B; of least norm if rho = 0 and G is singular.  ``[d, C]``"""
    return factor(with_ridge(gram, ridge), regular=matters(ridge, gram)).solve(cross)


def default_ridge(gram: Tensor, relative: float = 1e-3) -> Tensor:
    """A small part of the mean eigenvalue: relative * tr(G) / d.  ``[...]``"""
    return relative * gram.diagonal(dim1=-2, dim2=-1).mean(-1)


def ridge_path(gram: Tensor, cross: Tensor, ridges: Sequence[float]) -> Tensor:
    """W for each ridge, at the cost of one: G = V diag(s) V' gives W = V diag(1 / (s + rho)) V' B.  ``[R, d, C]``"""
    values, vectors = torch.linalg.eigh(symmetrised(gram))
    turned = vectors.mT @ cross
    return torch.stack([vectors @ (inverted(values.clamp(min=0) + rho)[:, None] * turned) for rho in ridges])


def symmetrised(a: Tensor) -> Tensor:
    return (a + a.mT) / 2


def with_ridge(a: Tensor, ridge: Tensor | float) -> Tensor:
    """A + rho I.  ``[..., d, d]``"""
    out = a.clone()
    out.diagonal(dim1=-2, dim2=-1).add_(ridge)
    return out
