"""AFL's absolute aggregation law: two solved heads are merged into the head of both data sets.

W = K_u W_u + K_v W_v,    W_i = C_i^-1 B_i,  C_i = G_i + rho_loc I;   then the rho_loc are removed exactly
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.maths.ridge import Statistics, factor, matters, solve, with_ridge


class Solution(NamedTuple):
    """A solution that can be merged with others: W = C^-1 B, where C = G + ridge I.

    C records how much of its diagonal is intermediary ridge, so that what is removed at the end belongs to the
    parts that were merged, not to those that were expected.
    """

    head: Tensor  # [d, C]
    gram: Tensor  # [d, d] C
    ridge: float  # rho_loc of a client; their sum after merging


def own_solution(stats: Statistics, ri_ridge: float) -> Solution:
    """A client's own solution, solvable by its intermediary ridge; C_k = X_k'X_k + rho_loc I.

    LAW-AFL, Algorithm 3 line 8 prints C_k = X_k'Y_k + gamma I, which is not square.
    """
    c = with_ridge(stats.gram, ri_ridge)
    return Solution(solve(stats.gram, stats.cross, ri_ridge), c, ri_ridge)


def scaled(one: Solution, weight: float) -> Solution:
    """A part that is counted ``weight`` times."""
    return Solution(one.head, weight * one.gram, weight * one.ridge)


def coefficients(c_u: Tensor, c_v: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices of W = K_u W_u + K_v W_v in AFL's product form, with R = C^-1 and S = C_u + C_v:

    K_u = I - R_u C_v + R_u C_v S^-1 C_v,    K_v = I - R_v C_u + R_v C_u S^-1 C_u
    """
    s_inverse: Tensor = torch.linalg.inv(c_u + c_v)

    def one(own: Tensor, other: Tensor) -> Tensor:
        r_other: Tensor = torch.linalg.inv(own) @ other
        return with_ridge(r_other @ s_inverse @ other - r_other, 1.0)

    return one(c_u, c_v), one(c_v, c_u)


def merged_by(k: tuple[Tensor, Tensor], u: Solution, v: Solution) -> Solution:
    """The two heads, each times its coefficient."""
    return Solution(k[0] @ u.head + k[1] @ v.head, u.gram + v.gram, u.ridge + v.ridge)


def merge_product(u: Solution, v: Solution) -> Solution:
    """Both parts' solution by the product form, as AFL publishes it: three inverses, up to seven digits less exact."""
    return merged_by(coefficients(u.gram, v.gram), u, v)


def merge(u: Solution, v: Solution) -> Solution:
    """Both parts' solution: W = (C_u + C_v)^-1 (C_u W_u + C_v W_v).

    The product form is the same: C_v = S - C_u turns K_u into S^-1 C_u and K_v into S^-1 C_v.
    """
    c = u.gram + v.gram
    head = factor(c, regular=matters(u.ridge + v.ridge, c)).solve(u.gram @ u.head + v.gram @ v.head)
    return Solution(head, c, u.ridge + v.ridge)


def remove_ridge(merged: Solution, target: float = 0.0) -> Tensor:
    """The head with ridge ``target`` instead of the sum of intermediary ones, exactly.  ``[d, C]``

    W_rho = W^r + kappa (C^r - kappa I)^-1 W^r, where kappa = sum of rho_loc - rho. AFL's code multiplies rho_loc
    by the number of clients that were configured, which is wrong as soon as one of them is missing.
    """
    kappa = merged.ridge - target
    left = factor(with_ridge(merged.gram, -kappa), regular=matters(target, merged.gram))
    return merged.head + kappa * left.solve(merged.head)
