"""The weights of a common direction as one Triton kernel, so that the CPU need not wait for the GPU.

One program does what ``common_direction.least_norm`` does, with the same steps and the same certificate. Instead of
sorting, which a GPU does slowly, it compares all pairs. All numbers are float64 and stay in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.maths.common_direction import Limits, side_of


def least_norm_queued(P: Tensor, counts: Tensor, norms: Tensor, limits: Limits) -> Tensor:
    """``least_norm_weights``, queued on a GPU."""
    moved = norms > 0
    share = torch.where(moved, counts.double(), 0)
    share = share / torch.where(moved.any(), share.sum(), 1)
    low, high = (share - limits.epsilon).clamp(min=0), (share + limits.epsilon).clamp(max=1)
    enough = torch.full_like(norms[:1], limits.tolerance)  # a plain number would be float32
    side, out = side_of(len(P)), torch.empty_like(share)
    given = (P.contiguous(), norms, share, low, high, enough, out, len(P), limits.max_iter)
    _solve[(1,)](*given, side, num_warps=side // 8)
    return out


@triton.jit(do_not_specialize=["K", "max_iter"])
def _solve(
    P: tl.tensor, norms: tl.tensor, share: tl.tensor, low: tl.tensor, high: tl.tensor, tolerance: tl.tensor,
    out: tl.tensor, K: tl.tensor, max_iter: tl.tensor, SIDE: tl.constexpr,
) -> None:  # fmt: skip
    """``common_direction.least_norm`` for P [K, K] and the others [K]; SIDE: a power of two, at least K."""
    k = tl.arange(0, SIDE)
    present = tl.load(norms + k, mask=k < K, other=0.0) > 0
    both = present[:, None] & present[None, :]
    matrix = tl.load(P + k[:, None] * K + k[None, :], mask=both, other=0.0)
    floor = tl.load(low + k, mask=present, other=0.0)
    roof = tl.load(high + k, mask=present, other=0.0)
    x = tl.load(share + k, mask=present, other=0.0)
    enough = tl.load(tolerance)
    step = 1 / tl.maximum(_curvature(matrix, present, both), 1e-300)
    y = x
    t = tl.full((), 1.0, tl.float64)
    turn = 0
    left = _gap(matrix, x, floor, roof, k)
    while (turn < max_iter) & (left > enough):
        until = tl.minimum(turn + 10, max_iter)
        while turn < until:
            after = _project(y - step * tl.sum(matrix * y[None, :], 1), floor, roof, present)
            t_after = (1 + tl.sqrt(1 + 4 * t * t)) / 2
            y = after + (t - 1) / t_after * (after - x)
            x = after
            t = t_after
            turn += 1
        left = _gap(matrix, x, floor, roof, k)
    tl.store(out + k, x, mask=k < K)


@triton.jit
def _curvature(matrix: tl.tensor, present: tl.tensor, both: tl.tensor) -> tl.tensor:
    """The largest eigenvalue of the centred matrix, from its power 2^48: others are too small to matter by then."""
    count = tl.maximum(tl.sum(present.to(tl.float64)), 1)
    mean = tl.sum(matrix, 1) / count
    centred = tl.where(both, matrix - mean[:, None] - mean[None, :] + tl.sum(mean) / count, 0)
    power = centred
    for _ in range(48):
        size = tl.sum(tl.sum(power * power, 1))
        power /= tl.maximum(tl.sqrt(size), 1e-300)
        power = tl.dot(power, power, out_dtype=tl.float64)
    square = tl.sum(tl.sum(power * power, 1))
    along = tl.sum(tl.sum(power * tl.dot(power, centred, out_dtype=tl.float64), 1))
    return along / tl.maximum(square, 1e-300)


@triton.jit
def _gap(matrix: tl.tensor, x: tl.tensor, low: tl.tensor, high: tl.tensor, k: tl.tensor) -> tl.tensor:
    """``common_direction.gap``."""
    slope = tl.sum(matrix * x[None, :], 1)
    room = high - low
    cheaper = (slope[None, :] < slope[:, None]) | ((slope[None, :] == slope[:, None]) & (k[None, :] < k[:, None]))
    left = tl.maximum(1 - tl.sum(low) - tl.sum(tl.where(cheaper, room[None, :], 0), 1), 0)
    return tl.sum(x * slope) - tl.sum(low * slope) - tl.sum(tl.minimum(room, left) * slope)


@triton.jit
def _project(v: tl.tensor, low: tl.tensor, high: tl.tensor, present: tl.tensor) -> tl.tensor:
    """``common_direction.project``: the last edge at which the sum is above one, and the first at which it is not."""
    lower = v - low
    upper = v - high
    lower_sum = _total(v, lower, low, high)
    upper_sum = _total(v, upper, low, high)
    over = present & (lower_sum > 1)
    under = present & (lower_sum <= 1)
    over_too = present & (upper_sum > 1)
    under_too = present & (upper_sum <= 1)
    far: tl.constexpr = float("inf")
    left = tl.max(tl.maximum(tl.where(over, lower, -far), tl.where(over_too, upper, -far)))
    right = tl.min(tl.minimum(tl.where(under, lower, far), tl.where(under_too, upper, far)))
    above = tl.min(tl.minimum(tl.where(over, lower_sum, far), tl.where(over_too, upper_sum, far)))
    below = tl.max(tl.maximum(tl.where(under, lower_sum, -far), tl.where(under_too, upper_sum, -far)))
    part = tl.minimum(tl.maximum((above - 1) / tl.maximum(above - below, 1e-300), 0), 1)
    s = left + (right - left) * part
    s = tl.where(left == -far, right, tl.where(right == far, left, s))
    return tl.minimum(tl.maximum(v - s, low), high)


@triton.jit
def _total(v: tl.tensor, shift: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The sum of clip(v - s) for each shift s."""
    return tl.sum(tl.minimum(tl.maximum(v[None, :] - shift[:, None], low[None, :]), high[None, :]), 1)
