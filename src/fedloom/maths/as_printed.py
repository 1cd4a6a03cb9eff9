"""Equations of LAW-AFL exactly as its paper prints them. They are wrong, and are included to be measured.

If an equation can be repaired, the repair is the default elsewhere: ``merging.coefficients`` for eq. 29, 32 and 35,
``learned_weights.ratio_shrink`` for eq. 5, ``data_quality.quality_weights`` for eq. 16 and 17, which are printed
without ``sizes``, and ``trust.heterogeneity`` for eq. 24. ``algorithms.law_afl`` lists all of them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fedloom.maths.merging import Solution, merged_by
from fedloom.maths.ridge import with_ridge

PrintedForm: TypeAlias = Literal["eq29", "eq32", "eq35"]


def printed_coefficients(c_u: Tensor, c_v: Tensor, form: PrintedForm) -> tuple[Tensor, Tensor]:
    """K_u and K_v of W = K_u W_u + K_v W_v; none of the three gives W: see ``algorithms.analytic``."""
    s_inverse: Tensor = torch.linalg.inv(c_u + c_v)

    def one(own: Tensor, other: Tensor) -> Tensor:
        r_other: Tensor = torch.linalg.inv(own) @ other
        last = r_other @ s_inverse
        if form == "eq35":
            return with_ridge(-last, 1.0)
        last = last @ other
        return with_ridge(-last if form == "eq29" else -last - r_other, 1.0)

    return one(c_u, c_v), one(c_v, c_u)


def merge_as_printed(u: Solution, v: Solution, form: PrintedForm) -> Solution:
    """Both parts' solution by a printed form."""
    return merged_by(printed_coefficients(u.gram, v.gram, form), u, v)


def printed_shrink(squares: Tensor, eta: float = 1.0) -> Tensor:
    """gamma = eta / (E |g_i|^2 + eps), eq. 5, from the squares |g_i|^2 ``[m]``.  ``[]``

    It has the unit of 1 / |g|^2, and grows without bound as training converges, although gamma should be in (0, 1].
    """
    return eta / (squares.double().mean() + 1e-8)
