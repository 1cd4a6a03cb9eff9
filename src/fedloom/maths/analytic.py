"""Analytic federated learning: a linear head in closed form, from sums that clients can add up.

AFL here is *analytic* FL (He et al., CVPR 2025), not agnostic FL. Features X come from a body that all share
and nobody trains; Y are one-hot labels.

    client i:  G_i = X_i' X_i,   B_i = X_i' Y_i                     one pass, no gradient
    server:    W = (sum_i G_i + rho I)^-1 sum_i B_i                 the same for every partition, number and order
    weighted:  W = (sum_i mu_i G_i / n_i + rho I)^-1 sum_i mu_i B_i / n_i,    mu_i = shrink * lambda_i

Three things are easily taken for one another, and have a name each: ``shrink`` (gamma_s) scales weights, ``ridge``
(rho) is that of the final head, and ``ri_ridge`` (rho_loc) is what a client adds to make its own system solvable.

Everything is computed in float64: a Gram matrix in float32 loses the small eigenvalues that a small ridge needs.
At d = 4,096 features a Gram matrix takes 134 MB (67 MB packed), and no function here more than 1 GB for one of them.
On one core, the sums of 60,000 examples take about a minute, and a solve 2 s; one by eigenvectors, which a singular
system without ridge or a sweep of ridges needs, takes about a minute, too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fedloom.core import rng, tree


# -- sums over examples ----------------------------------------------------------------------------
class Statistics(NamedTuple):
    """What the examples of a client sum to. Stacked, every field has the clients as its first axis."""

    gram: Tensor  # [..., d, d] G = X'X
    cross: Tensor  # [..., d, C] B = X'Y
    counts: Tensor  # [..., C] examples of each class

    @property
    def examples(self) -> Tensor:
        """n, the number of examples.  ``[...]``"""
        return self.counts.sum(-1)


def statistics(x: Tensor, y: Tensor, classes: int, mask: Tensor | None = None) -> Statistics:
    """The sums of some examples: x ``[..., B, d]``, y ``[..., B]``; rows where ``mask`` is 0 are padding."""
    labels = torch.arange(classes, device=y.device)
    onehot = (y[..., None] == labels).double()
    x = x.double()
    if mask is not None:
        padding = (mask == 0)[..., None]
        x, onehot = x.masked_fill(padding, 0.0), onehot.masked_fill(padding, 0.0)
    return Statistics(x.mT @ x, x.mT @ onehot, onehot.sum(-2))


def no_statistics(features: int, classes: int) -> Statistics:
    """The sums of no examples."""
    shapes = (features, features), (features, classes), (classes,)
    return Statistics(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))


def add(a: Statistics, b: Statistics) -> Statistics:
    """The sums of both: how a client joins, however late."""
    return tree.tmap(torch.add, a, b)


def subtract(a: Statistics, b: Statistics) -> Statistics:
    """The sums of ``a`` without ``b``: how a client is unlearned, as if it had never joined."""
    return tree.tmap(torch.sub, a, b)


def total(stacked: Statistics) -> Statistics:
    """The sums over all stacked clients."""
    return tree.tmap(lambda x: x.sum(0), stacked)


def normalised(stats: Statistics) -> Statistics:
    """Sums divided by the number of examples: G / n, B / n and the share of each class; zeros where there are none."""
    n = stats.examples.clamp(min=1)
    return Statistics(stats.gram / n[..., None, None], stats.cross / n[..., None, None], stats.counts / n[..., None])


def with_bias(x: Tensor) -> Tensor:
    """The features and a constant 1 as the last of them.  ``[..., d + 1]``"""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


# -- on the wire -----------------------------------------------------------------------------------
def triangle(features: int) -> int:
    """How many numbers a symmetric matrix has."""
    return features * (features + 1) // 2


def pack(symmetric: Tensor) -> Tensor:
    """The upper triangle, row by row.  ``[..., d, d] -> [..., d (d + 1) / 2]``"""
    d = symmetric.shape[-1]
    return torch.cat([symmetric[..., i, i:] for i in range(d)], -1)


def unpack(packed: Tensor, features: int) -> Tensor:
    """The symmetric matrix with this upper triangle.  ``[..., d (d + 1) / 2] -> [..., d, d]``"""
    upper = torch.ones(features, features, dtype=torch.bool, device=packed.device).triu()
    half = packed.new_zeros(*packed.shape[:-1], features, features).masked_scatter(upper, packed)
    return half + half.triu(1).mT


def to_rows(stats: Statistics) -> Tensor:
    """G and B of a client as one vector, which is what it uploads.  ``[..., d (d + 1) / 2 + d C]``"""
    return torch.cat([pack(stats.gram), stats.cross.flatten(-2)], -1)


def from_rows(rows: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """G and B again, from vectors of ``to_rows``."""
    d = features_of(rows.shape[-1], classes)
    gram, cross = rows[..., : triangle(d)], rows[..., triangle(d) :]
    return unpack(gram, d), cross.reshape(*rows.shape[:-1], d, classes)


def features_of(length: int, classes: int) -> int:
    """d, from the length d (d + 1) / 2 + d C of an upload."""
    return (math.isqrt((2 * classes + 1) ** 2 + 8 * length) - 2 * classes - 1) // 2


def upload_bytes(features: int, classes: int, *, packed: bool = True, itemsize: int = 8) -> int:
    """Bytes of one client's G and B, of which G is sent as a triangle or, not packed, as a square."""
    return ((triangle(features) if packed else features**2) + features * classes) * itemsize


# -- solving ---------------------------------------------------------------------------------------
class Factor(NamedTuple):
    """A symmetric matrix, taken apart once to be solved with many times."""

    basis: Tensor  # [d, d] the lower Cholesky factor, or eigenvectors
    inverse: Tensor | None = None  # [d] one over each eigenvalue, 0 where that was cut off; None: Cholesky
    jitter: float = 0.0  # what had to be added to the diagonal

    def solve(self, rhs: Tensor) -> Tensor:
        """A^-1 rhs, or A^+ rhs where A is singular.  ``[d, C]``"""
        if self.inverse is None:
            return torch.cholesky_solve(rhs, self.basis)
        return self.basis @ (self.inverse[:, None] * (self.basis.mT @ rhs))


def factor(a: Tensor, *, regular: bool = True) -> Factor:
    """Take A apart: Cholesky, with more and more jitter while rounding makes it fail, at last eigenvectors.

    Unless A is known to be ``regular``, by a ridge that ``matters``, no jitter is tried: what rounding left in the
    null space would be divided by it. Eigenvectors with a cut-off give the solution of least norm instead.
    """
    if not bool(a.sum().isfinite()):
        raise ValueError("the system is not finite: an upload holds NaN or infinity, or has overflowed")
    a = symmetrised(a)
    eps = torch.finfo(a.dtype).eps
    unit = eps * float(a.diagonal().mean().abs())
    for jitter in (0.0, *(10.0**j * unit for j in range(7))) if regular else (0.0,):
        lower, failed = torch.linalg.cholesky_ex(with_ridge(a, jitter))
        # Rounding may turn a pivot of 0 into a small positive one, and then Cholesky "succeeds".
        pivots = lower.diagonal().square()
        if not bool(failed) and (regular or bool(pivots.min() > len(a) * eps * a.diagonal().max())):
            return Factor(lower, jitter=jitter)
    values, vectors = torch.linalg.eigh(a)
    return Factor(vectors, inverted(values))


def matters(ridge: Tensor | float, a: Tensor) -> bool:
    """Whether a ridge is more than what rounding makes of an eigenvalue 0 of A."""
    return float(ridge) > len(a) * torch.finfo(a.dtype).eps * float(a.diagonal().max())


def inverted(values: Tensor) -> Tensor:
    """One over each eigenvalue, 0 where it is too small to be told from 0.  ``[d]``"""
    cut = values.abs().max() * len(values) * torch.finfo(values.dtype).eps
    return torch.where(values > cut, 1 / values, 0.0)


def solve(gram: Tensor, cross: Tensor, ridge: Tensor | float = 0.0) -> Tensor:
    """W = (G + rho I)^-1 B; of least norm where rho = 0 and G is singular.  ``[d, C]``"""
    return factor(with_ridge(gram, ridge), regular=matters(ridge, gram)).solve(cross)


def heads(stacked: Statistics, ridge: Tensor | float) -> Tensor:
    """The head that each client would have by itself.  ``[K, d, C]``"""
    return torch.stack([solve(g, b, ridge) for g, b in zip(stacked.gram, stacked.cross, strict=True)])


def default_ridge(gram: Tensor, relative: float = 1e-3) -> Tensor:
    """A small part of the mean eigenvalue: relative * tr(G) / d.  ``[...]``"""
    return relative * gram.diagonal(dim1=-2, dim2=-1).mean(-1)


def ridge_path(gram: Tensor, cross: Tensor, ridges: Sequence[float]) -> Tensor:
    """W for each ridge, at the price of one: G = V diag(s) V' gives W = V diag(1 / (s + rho)) V' B.  ``[R, d, C]``"""
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


# -- the absolute aggregation law ------------------------------------------------------------------
class Part(NamedTuple):
    """A solution that can be merged with others: W = C^-1 B, where C = G + ridge I.

    C knows how much of its diagonal is intermediary ridge, so that what is removed in the end belongs to the
    parts that were merged, and not to those that were expected.
    """

    head: Tensor  # [d, C]
    gram: Tensor  # [d, d] C
    ridge: float  # rho_loc of a client; their sum after merging


def part(stats: Statistics, ri_ridge: float) -> Part:
    """A client's own solution, solvable by its intermediary ridge; C_k = X_k'X_k + rho_loc I.

    LAW-AFL, Algorithm 3 line 8 prints C_k = X_k'Y_k + gamma I, which is not square.
    """
    c = with_ridge(stats.gram, ri_ridge)
    return Part(solve(stats.gram, stats.cross, ri_ridge), c, ri_ridge)


def weighed(one: Part, weight: float) -> Part:
    """A part that counts ``weight`` times."""
    return Part(one.head, weight * one.gram, weight * one.ridge)


ProductForm: TypeAlias = Literal["published", "eq29", "eq32", "eq35"]


def coefficients(c_u: Tensor, c_v: Tensor, form: ProductForm = "published") -> tuple[Tensor, Tensor]:
    """The matrices of W = K_u W_u + K_v W_v in AFL's product form, with R = C^-1 and S = C_u + C_v:

        K_u = I - R_u C_v + R_u C_v S^-1 C_v,    K_v = I - R_v C_u + R_v C_u S^-1 C_u

    or in one of the three forms that LAW-AFL prints, all of them wrong: see ``algorithms.analytic``.
    """
    s_inverse: Tensor = torch.linalg.inv(c_u + c_v)

    def one(own: Tensor, other: Tensor) -> Tensor:
        r_other: Tensor = torch.linalg.inv(own) @ other
        last = r_other @ s_inverse
        if form == "eq35":
            return with_ridge(-last, 1.0)
        last = last @ other
        return with_ridge({"published": last - r_other, "eq29": -last, "eq32": -last - r_other}[form], 1.0)

    return one(c_u, c_v), one(c_v, c_u)


def merge_product(u: Part, v: Part, form: ProductForm = "published") -> Part:
    """Both parts' solution by the product form, as published: three inverses, and up to seven digits less exact."""
    k_u, k_v = coefficients(u.gram, v.gram, form)
    return Part(k_u @ u.head + k_v @ v.head, u.gram + v.gram, u.ridge + v.ridge)


def merge(u: Part, v: Part) -> Part:
    """Both parts' solution: W = (C_u + C_v)^-1 (C_u W_u + C_v W_v).

    The product form is the same: C_v = S - C_u turns K_u into S^-1 C_u and K_v into S^-1 C_v.
    """
    c = u.gram + v.gram
    head = factor(c, regular=matters(u.ridge + v.ridge, c)).solve(u.gram @ u.head + v.gram @ v.head)
    return Part(head, c, u.ridge + v.ridge)


def remove_ridge(merged: Part, target: float = 0.0) -> Tensor:
    """The head with ridge ``target`` instead of the sum of intermediary ones, exactly.  ``[d, C]``

    W_rho = W^r + kappa (C^r - kappa I)^-1 W^r, where kappa = sum of rho_loc - rho. AFL's code multiplies rho_loc
    by the number of clients that were configured, which is wrong as soon as one of them is missing.
    """
    kappa = merged.ridge - target
    left = factor(with_ridge(merged.gram, -kappa), regular=matters(target, merged.gram))
    return merged.head + kappa * left.solve(merged.head)


# -- the weighted closed form and its gradient -----------------------------------------------------
class Solved(NamedTuple):
    """A weighted head, and what it was solved with."""

    head: Tensor  # [d, C] W = A^-1 sum_i mu_i B_i / n_i
    system: Factor  # of A = sum_i mu_i G_i / n_i + rho I


def weighted_head(rows: Tensor, mu: Tensor, ridge: Tensor | float, classes: int) -> Solved:
    """The head of clients that count mu ``[K]``, from normalised statistics as ``to_rows`` lays them out.

    With mu_i = n_i / N this is AFL with ridge N rho. It depends on shrink and ridge only by their quotient.
    LAW-AFL, Algorithm 3 line 17 prints W C^-1, which does not fit; it is C^-1 W.
    """
    gram, cross = from_rows(tree.mix(mu[None], rows)[0], classes)
    system = factor(with_ridge(gram, ridge), regular=matters(ridge, gram))
    return Solved(system.solve(cross), system)


class Adjoint(NamedTuple):
    """How a loss of the head changes with what the head was solved from."""

    mu: Tensor  # [K] delta_i = <Lambda, B_i / n_i> - <Lambda W', G_i / n_i>
    ridge: Tensor  # [] -<Lambda, W>


def adjoint(rows: Tensor, solved: Solved, slope: Tensor) -> Adjoint:
    """The gradient through the solve, from ``slope`` = dL/dW ``[d, C]``: Lambda = A^-1 dL/dW, one more solve."""
    adj = solved.system.solve(slope)
    outer = adj @ solved.head.mT
    # An entry off the diagonal is stored once and stands for two.
    dual = outer + outer.mT
    dual.diagonal().copy_(outer.diagonal())
    return Adjoint(inner(rows, torch.cat([-pack(dual), adj.flatten()])), -(adj * solved.head).sum())


_BLOCK = 1 << 20  # numbers that are turned into float64 at once


def inner(rows: Tensor, direction: Tensor) -> Tensor:
    """<row, direction> for every row, in float64.  ``[K, P], [P] -> [K]``"""
    out = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    wide = max(1, _BLOCK // max(1, len(rows)))
    for some, along in zip(torch.split(rows, wide, 1), torch.split(direction, wide), strict=True):
        out += some.double() @ along.double()
    return out


class ProxyLoss(NamedTuple):
    """The loss of a head on the server's proxy examples, and its slopes."""

    value: Tensor  # []
    head: Tensor  # [d, C] dL/dW
    log_temperature: Tensor  # [] dL/dc


Proxy: TypeAlias = tuple[Tensor, Tensor]  # features [n, d] in float64, and labels [n]


def cross_entropy(head: Tensor, log_temperature: Tensor, proxy: Proxy) -> ProxyLoss:
    """CE of softmax(s X W), s = e^c: dL/dW = X' s (P - Y) / n, dL/dc = s <(P - Y) / n, X W>.

    Ridge outputs lie about in [0, 1]; without s the loss would ask for less ridge only to have larger logits.
    """
    x, y = proxy
    s = log_temperature.exp()
    scores = x @ head
    logp = log_softmax(s * scores, -1)
    right = y[:, None]
    residual = (logp.exp().scatter_add(1, right, -torch.ones_like(logp[:, :1]))) / len(y)
    return ProxyLoss(-logp.gather(1, right).mean(), s * (x.mT @ residual), s * (residual * scores).sum())


def squared_error(head: Tensor, log_temperature: Tensor, proxy: Proxy) -> ProxyLoss:
    """||X W - Y||^2 / n, which knows no temperature."""
    x, y = proxy
    scores = x @ head
    residual = scores.scatter_add(1, y[:, None], -torch.ones_like(scores[:, :1]))
    slope = 2 * (x.mT @ residual) / len(y)
    return ProxyLoss(residual.square().sum() / len(y), slope, torch.zeros_like(log_temperature))


LOSSES: dict[str, Callable[[Tensor, Tensor, Proxy], ProxyLoss]] = {"ce": cross_entropy, "mse": squared_error}


def off_mean(lam: Tensor, slope: Tensor) -> Tensor:
    """d_i - sum_j lambda_j d_j: exactly 0 where all are equal, as the first is taken off before the mean.  ``[K]``"""
    slope = slope - slope[0]
    return slope - lam @ slope


def simplex_gradient(lam: Tensor, slope: Tensor) -> Tensor:
    """The slope along the logits of lambda = softmax(a), from that along lambda.  ``[K]``"""
    return lam * off_mean(lam, slope)


class WeightedGradient(NamedTuple):
    """A proxy loss of the weighted head and all its slopes, where mu = e^b softmax(a)."""

    loss: Tensor  # []
    a: Tensor  # [K] shrink lambda_j (delta_j - sum_i lambda_i delta_i)
    b: Tensor  # [] shrink sum_i lambda_i delta_i, which is also rho <Lambda, W>
    c: Tensor  # [] along the logarithm of the temperature
    ridge: Tensor  # []
    mu: Tensor  # [K] delta


def weighted_gradient(
    rows: Tensor,
    lam: Tensor,
    shrink: Tensor,
    ridge: float,
    log_temperature: Tensor,
    proxy: Proxy,
    classes: int,
    loss: Literal["ce", "mse"] = "ce",
) -> WeightedGradient:
    """The loss of the weighted head on the proxy examples, and its gradient through the solve."""
    solved = weighted_head(rows, shrink * lam, ridge, classes)
    at = LOSSES[loss](solved.head, log_temperature, proxy)
    delta, along_ridge = adjoint(rows, solved, at.head)
    along_a, along_b = simplex_gradient(lam, shrink * delta), shrink * (lam @ delta)
    return WeightedGradient(at.value, along_a, along_b, at.log_temperature, along_ridge, delta)


def sketched(rows: Tensor, projection: Tensor, classes: int) -> Tensor:
    """The statistics of projected features, P'GP and P'B, on which weights are learned at less cost.  ``[K, ...]``"""
    each = (from_rows(row.double(), classes) for row in rows)  # one by one: unpacked they take twice the memory
    return torch.stack(
        [torch.cat([pack(projection.mT @ g @ projection), (projection.mT @ b).flatten()]) for g, b in each]
    )


# -- what the server believes ----------------------------------------------------------------------
def faults(
    stats: Statistics,
    *,
    examples: float | None = None,
    norm: float | None = None,
    bias: int | None = None,
    nonnegative: bool = False,
    noise: float = 0.0,
    tolerance: float = 1e-8,
) -> list[str]:
    """Why one client's statistics cannot be sums over honest examples; empty where they can.

    ``examples``: how many the client claims; ``norm``: R, to which features are clipped; ``bias``: which feature is
    constant 1; ``nonnegative``: features are, as after a ReLU; ``noise``: the deviation of the noise that was added
    for privacy, by which every bound is widened. Flipped labels pass: they are honest sums of wrong examples.
    """
    gram, cross, counts = stats
    if not all(bool(x.isfinite().all()) for x in stats):
        return ["not all numbers are finite"]
    d, n, trace = len(gram), float(counts.sum()), float(gram.trace())
    slack = 6 * noise * math.sqrt(d + len(counts))
    near = slack + tolerance * max(trace, 1.0)
    found = []
    if float((gram - gram.mT).abs().max()) > tolerance * max(1.0, float(gram.abs().max())):
        found.append("G is not symmetric")
    if bool((counts < -slack).any()):
        found.append("a class has a negative count")
    if examples is not None and abs(n - examples) > slack + tolerance * max(1.0, examples):
        found.append(f"the classes have {n:g} examples together, {examples:g} were claimed")
    if norm is not None and trace > n * norm**2 + near * (d if noise else 1):
        found.append(f"tr(G) = {trace:g} is above n R^2 = {n * norm**2:g}")
    if norm is not None and bool((cross.norm(dim=0) > counts * norm + near).any()):
        found.append("a column of B is longer than count times R")
    if not semidefinite(joint(stats), near):
        found.append("[[G, B], [B', diag(counts)]] is not positive semidefinite")
    if bias is not None and float((gram[:, bias] - cross.sum(1)).abs().max()) > near:
        found.append("the bias column of G is not the sum of the columns of B")
    if bias is not None and abs(float(gram[bias, bias]) - n) > near:
        found.append(f"the bias entry of G is {float(gram[bias, bias]):g}, not n = {n:g}")
    if nonnegative and bool((cross < -near).any()):
        found.append("B has negative entries, features have none")
    return found


def joint(stats: Statistics) -> Tensor:
    """The Gram matrix of features and one-hot labels side by side.  ``[d + C, d + C]``"""
    top = torch.cat([stats.gram, stats.cross], 1)
    return torch.cat([top, torch.cat([stats.cross.mT, stats.counts.diag()], 1)])


def semidefinite(a: Tensor, tolerance: float) -> bool:
    """Whether no eigenvalue is below -tolerance; one Cholesky instead of all eigenvalues."""
    return not bool(torch.linalg.cholesky_ex(with_ridge(symmetrised(a), tolerance)).info)


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """64 bits that tell one body from another, running statistics included."""
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(f"{x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "big", signed=True)


class Registry(NamedTuple):
    """The statistics of each client that has sent them, all taken on one body."""

    body: Tensor  # [] its fingerprint
    known: Tensor  # [N] who has sent
    rows: Tensor  # [N, d (d + 1) / 2 + d C] normalised
    counts: Tensor  # [N, C]


def no_registry(clients: int, features: int, classes: int, body: int, dtype: torch.dtype = torch.float64) -> Registry:
    """A registry in which nobody is; in float32 it takes half the memory."""
    width = triangle(features) + features * classes
    return Registry(
        torch.tensor(body),
        torch.zeros(clients, dtype=torch.bool),
        torch.zeros(clients, width, dtype=dtype),
        torch.zeros(clients, classes, dtype=torch.float64),
    )


def enrolled(registry: Registry, ids: Tensor, stats: Statistics, body: int) -> Registry:
    """The registry with these clients ``[K]`` in it; one that is there already stays as it is.

    LAW-AFL, Algorithm 3 line 15 adds every upload to what was there, so that a client that is drawn again counts
    twice, and features of different bodies are mixed.
    """
    if body != int(registry.body):
        raise ValueError(f"statistics of body {body:x} cannot join those of body {int(registry.body):x}")
    first = torch.tensor([int(i) not in ids[:k].tolist() for k, i in enumerate(ids)], dtype=torch.bool)
    new = first & ~registry.known[ids]
    rows, counts, known = registry.rows.clone(), registry.counts.clone(), registry.known.clone()
    rows[ids[new]] = to_rows(normalised(tree.take(stats, new))).to(rows.dtype)
    counts[ids[new]] = stats.counts[new].double()
    known[ids[new]] = True
    return Registry(registry.body, known, rows, counts)


# -- how good a client's data is -------------------------------------------------------------------
def entropy(counts: Tensor) -> Tensor:
    """H(p) of the classes in nats, 0 where there is no example.  ``[..., C] -> [...]``"""
    p = counts / counts.sum(-1, keepdim=True).clamp(min=1e-300)
    return -torch.xlogy(p, p).sum(-1)


def evenness(counts: Tensor) -> Tensor:
    """H(p) / ln C: 0 for a client of one class, 1 for one that has all of them alike.  ``[...]``"""
    return entropy(counts) / math.log(max(counts.shape[-1], 2))


def data_quality(counts: Tensor, *, evenness_power: float = 1.0, size_power: float = 1.0) -> Tensor:
    """q_i = (H(p_i) / ln C)^k1 (n_i / (n_i + median n))^k2, at least 0.001; LAW-AFL leaves q_i undefined.  ``[K]``"""
    n = counts.sum(-1)
    q = evenness(counts) ** evenness_power * (n / (n + n.median()).clamp(min=1e-300)) ** size_power
    return q.clamp(min=1e-3)


def quality_weights(
    quality: Tensor, accuracy: Tensor, loss: Tensor, sizes: Tensor | None = None, smooth: float = 1e-8
) -> Tensor:
    """lambda_i ~ n_i q_i a_i / (1 + l_i), which sums to 1; by size alone where all would be 0.  ``[K]``

    LAW-AFL eq. 16: lambda'_i = q_i a_i / (sum_j q_j a_j + eps), and eq. 17: lambda_i ~ lambda'_i N / (1 + l_i), in
    which N cancels. Without ``sizes`` it is these alone. A client of which a number is NaN is left out.
    """
    known = ~(quality.isnan() | accuracy.isnan() | loss.isnan())
    q, a = quality.nan_to_num().clamp(0, 1), accuracy.nan_to_num().clamp(0, 1)
    merit = known * q * a
    raw = merit / (merit.sum() + smooth) / (1 + loss.nan_to_num(posinf=20.0).clamp(0, 20))
    share = torch.ones_like(raw) if sizes is None else sizes.double()
    for weights in (raw * share, known * share, share):
        if bool(weights.sum() > 0):
            return weights / weights.sum()
    return torch.full_like(share, 1 / len(share))


class Judged(NamedTuple):
    """How clients' models do on the proxy examples, as the server sees it."""

    accuracy: Tensor  # [K]
    loss: Tensor  # [K]


def judged(logits: Tensor, y: Tensor, counts: Tensor | None = None) -> Judged:
    """The server's own a_i and l_i, from logits ``[K, n, C]``, so that no client can forge them.

    With ``counts``, a client is judged only on the classes it claims to hold: an honest client of two classes would
    else be right on a fifth of ten. NaN where it holds none of the proxy's classes.
    """
    logp = log_softmax(logits.double(), -1)
    right = (logits.argmax(-1) == y).double()
    missed = -logp.gather(-1, y.expand(len(logp), -1)[..., None]).squeeze(-1)
    seen = torch.ones_like(right) if counts is None else (counts > 0)[:, y].double()
    rows = seen.sum(1)
    return Judged((seen * right).sum(1) / rows, (seen * missed).sum(1) / rows)


def trained_groups(counts: Tensor, groups: int) -> Tensor:
    """L_i, how many groups of layers a client trains, from the head on: 1 + round((L_max - 1) H(p_i) / ln C).

    A client of one class trains the head alone. LAW-AFL refers to its eq. 18 for L_i, which does not hold it.
    """
    return (1 + ((groups - 1) * evenness(counts.double()) + 0.5).floor()).clamp(1, groups)


# -- features --------------------------------------------------------------------------------------
class RandomFeatures(NamedTuple):
    """The weights of fixed random features max(0, x W + b)."""

    weight: Tensor  # [D, d]
    bias: Tensor  # [d]


def random_features(
    inputs: int, features: int, seed: int, *, weight_std: float | None = None, bias_std: float = 0.3
) -> RandomFeatures:
    """W ~ N(0, weight_std^2) and b ~ N(0, 0.09), the same for the same seed; more features begin with the fewer.

    Unset, weight_std is 2.8 / sqrt(D), so that x W keeps its scale whatever the number D of inputs: 0.1 for the
    784 pixels of MNIST. It is meant for inputs in [0, 1]; for standardised ones, which are longer, take less.
    """
    std = 2.8 / math.sqrt(inputs) if weight_std is None else weight_std
    draws = torch.from_numpy(rng.stream(seed, "random_features").standard_normal((features, inputs + 1)))
    return RandomFeatures(std * draws[:, :-1].T, bias_std * draws[:, -1])


def relu_features(x: Tensor, maps: RandomFeatures) -> Tensor:
    """max(0, x W + b), in the precision of ``x``.  ``[B, ...] -> [B, d]``"""
    return torch.addmm(maps.bias.to(x), x.flatten(1), maps.weight.to(x)).relu()


def projection(features: int, dimensions: int, seed: int) -> Tensor:
    """A random map to fewer features that keeps lengths on average, the same for all who know the seed.  ``[d, k]``"""
    draws = rng.stream(seed, "projection").standard_normal((features, dimensions))
    return torch.from_numpy(draws) / math.sqrt(dimensions)


# -- privacy ---------------------------------------------------------------------------------------
def clipped_rows(x: Tensor, norm: float) -> Tensor:
    """Rows no longer than ``norm``: features of examples, or uploads of clients; what fits stays to the bit."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(length > norm, x * (norm / length), x)


Neighbours: TypeAlias = Literal["add_remove", "replace_one"]


def sensitivity(
    norm: float,
    *,
    relation: Neighbours = "add_remove",
    nonnegative: bool = False,
    cross_scale: float = 1.0,
    counts: bool = False,
) -> float:
    """How far one example can move (G, cross_scale B), if features are no longer than R = ``norm``.

    One example adds x x' and x y', of norms R^2 and R: sqrt(R^4 + R^2), and 1 under the root if ``counts`` of classes
    are released, too. To replace x by z of cosine c moves them by sqrt(2 R^4 (1 - c^2) + 2 R^2 (1 - c)), which is
    largest at c = -1 / (2 R^2), or at 0 if features are not negative; if the class changes, by that of c = 0 and the
    two counts.
    """
    square, linear, counted = norm**4, (cross_scale * norm) ** 2, float(counts)
    if relation == "add_remove":
        return math.sqrt(square + linear + counted)
    c = 0.0 if nonnegative or not square else max(-1.0, -linear / (2 * square))
    same_class = 2 * square * (1 - c**2) + 2 * linear * (1 - c)
    return math.sqrt(max(same_class, 2 * (square + linear + counted)))


def noised(rows: Tensor, std: Tensor | float, normals: Tensor, classes: int, cross_scale: float = 1.0) -> Tensor:
    """G + E and B + F, all as ``to_rows`` lays them out: E is symmetric, and F has the deviation std / cross_scale."""
    d = features_of(rows.shape[-1], classes)
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
