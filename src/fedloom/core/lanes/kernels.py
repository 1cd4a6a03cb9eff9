"""Convolutions of many nets at once, as Triton kernels whose grid has an axis of lanes.

A convolution is a matrix product over patches that are never stored (an implicit GEMM). Images are
``[lane, image, row, column, channel]``, weights ``[lane, output, row, column, channel]``: channels are contiguous.
Both the forward pass and the gradient of the inputs are sums over taps, so one kernel computes both. The gradient of
the weights is a sum over pixels; it is split into parts, which are added in a fixed order, so that it is the same
every time.

In a kernel numbers are tensors, too: Triton would read ``int`` as one of 32 bits, which the size of a lane may exceed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.core.lanes.ops import Geometry, Tile


@triton.jit
def _taps(
    x: tl.tensor, w: tl.tensor, y: tl.tensor,  # [L, B, H, W, C], [L, N, KH, KW, C], [L, B, YH, YW, N]
    rows: tl.tensor, H: tl.tensor, W: tl.tensor, RH: tl.tensor, RW: tl.tensor, YH: tl.tensor, YW: tl.tensor,
    x_lane: tl.tensor, w_lane: tl.tensor, y_lane: tl.tensor,
    C: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr, FIRST_H: tl.constexpr, FIRST_W: tl.constexpr,
    HOP_H: tl.constexpr, HOP_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, SIGN: tl.constexpr, OFF_H: tl.constexpr, OFF_W: tl.constexpr,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, AT_H: tl.constexpr, AT_W: tl.constexpr,
    BORDERS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """y[b, r, c, n] = sum over taps t of x[b, r * STRIDE + SIGN * t + OFF, ...] . w[n, FIRST + HOP * t, ...].

    The taps are TH x TW of the kernel's KH x KW; row r of the product is written to row r * OUT + AT of y.
    """
    # long: one GPU kernel, whose two loops share every index that is computed before them
    lane = tl.program_id(2).to(tl.int64)
    x += lane * x_lane
    w += lane * w_lane
    y += lane * y_lane
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    image = m // (RH * RW)
    place = m % (RH * RW)
    r = place // RW
    c = place % RW
    top = r * STRIDE_H + OFF_H
    left = c * STRIDE_W + OFF_W
    origin = ((image * H + top) * W + left) * C
    inside = m < rows
    real = n < N
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    DEPTH: tl.constexpr = TH * TW * C
    if C % BK == 0:  # a step of the sum stays within one tap
        for at in range(0, DEPTH, BK):
            tap = at // C
            channel = tl.multiple_of(at % C, BK) + k
            i = tap // TW
            j = tap % TW
            ok = inside
            if BORDERS:
                iy = top + SIGN * i
                ix = left + SIGN * j
                ok = inside & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
            a = tl.load(x + (origin + SIGN * (i * W + j) * C)[:, None] + channel[None, :], mask=ok[:, None], other=0.0)
            weight = ((FIRST_H + HOP_H * i) * KW + FIRST_W + HOP_W * j) * C + channel
            b = tl.load(w + (n * (KH * KW * C))[:, None] + weight[None, :], mask=real[:, None], other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    else:  # few channels: a step of the sum goes over several taps
        for at in range(0, DEPTH, BK):
            deep = at + k
            tap = deep // C
            channel = deep % C
            i = tap // TW
            j = tap % TW
            ok = inside[:, None] & (deep < DEPTH)[None, :]
            if BORDERS:
                iy = top[:, None] + (SIGN * i)[None, :]
                ix = left[:, None] + (SIGN * j)[None, :]
                ok = ok & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
            a = tl.load(x + origin[:, None] + (SIGN * (i * W + j) * C + channel)[None, :], mask=ok, other=0.0)
            if TH == KH and TW == KW:  # every tap, in the order of the weights
                weight = deep
            else:
                weight = ((FIRST_H + HOP_H * i) * KW + FIRST_W + HOP_W * j) * C + channel
            b = tl.load(
                w + (n * (KH * KW * C))[:, None] + weight[None, :],
                mask=real[:, None] & (deep < DEPTH)[None, :], other=0.0,
            )  # fmt: skip
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    to = ((image * YH + r * OUT_H + AT_H) * YW + c * OUT_W + AT_W) * N
    tl.store(y + to[:, None] + n[None, :], acc.to(y.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit
def _pixels(
    x: tl.tensor, g: tl.tensor, out: tl.tensor,  # [L, B, H, W, C], [L, B, RH, RW, N], [PARTS, L, N, KH * KW * C]
    rows: tl.tensor, H: tl.tensor, W: tl.tensor, RH: tl.tensor, RW: tl.tensor,
    x_lane: tl.tensor, g_lane: tl.tensor, out_lane: tl.tensor, out_part: tl.tensor,
    C: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BORDERS: tl.constexpr, PRECISION: tl.constexpr, STEPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """out[n, tap, c] = sum over pixels of g[pixel, n] * x[pixel at tap, c]; BM of n, BN of (tap, c), BK of pixels."""
    DEPTH: tl.constexpr = KH * KW * C
    tiles: tl.constexpr = (DEPTH + BN - 1) // BN
    lane = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    x += lane * x_lane
    g += lane * g_lane
    n = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    first = (tl.program_id(0) % tiles) * BN
    deep = first + tl.arange(0, BN)
    if C % BN == 0:  # all of them at one tap
        tap = first // C + tl.zeros((BN,), tl.int32)
        i = tap // KW
        j = tap % KW
        shift = ((first // C // KW) * W + first // C % KW) * C + tl.multiple_of(first % C, BN) + tl.arange(0, BN)
    else:
        tap = deep // C
        i = tap // KW
        j = tap % KW
        SIDE: tl.constexpr = C & -C  # this many channels are contiguous
        shift = tl.max_contiguous(tl.multiple_of((i * W + j) * C + deep % C, SIDE), SIDE)
    real = n < N
    used = deep < DEPTH
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(STEPS):
        m = (part * STEPS + step) * BK + tl.arange(0, BK)
        inside = m < rows
        image = m // (RH * RW)
        place = m % (RH * RW)
        top = (place // RW) * STRIDE_H - PAD_H
        left = (place % RW) * STRIDE_W - PAD_W
        ok = inside[:, None] & used[None, :]
        if BORDERS:
            iy = top[:, None] + i[None, :]
            ix = left[:, None] + j[None, :]
            ok = ok & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
        b = tl.load(x + (((image * H + top) * W + left) * C)[:, None] + shift[None, :], mask=ok, other=0.0)
        a = tl.load(g + (m * N)[:, None] + n[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
    to = out + part * out_part + lane * out_lane + (n * DEPTH)[:, None] + deep[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & used[None, :])


def _precision(how: Geometry) -> str:
    return "ieee" if how.exact else "tf32"


def forward(x: Tensor, w: Tensor, how: Geometry, tile: Tile) -> Tensor:
    """The convolution of x [L, B, H, W, C] with w [L, O, KH, KW, C]: [L, B, h, w, O]."""
    lanes, images, height, width, channels = x.shape
    outputs, (high, wide) = w.shape[1], how.out((height, width))
    y = x.new_empty(lanes, images, high, wide, outputs)
    rows = images * high * wide
    _taps[(triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.columns), lanes)](
        x, w, y, rows, height, width, high, wide, high, wide, x[0].numel(), w[0].numel(), y[0].numel(),
        channels, outputs, *how.kernel, *how.kernel, 0, 0, 1, 1, *how.stride, 1, -how.padding[0], -how.padding[1],
        1, 1, 0, 0, how.padding != (0, 0), _precision(how), tile.rows, tile.columns, tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def inputs(g: Tensor, w: Tensor, how: Geometry, sides: tuple[int, int], tile: Tile) -> Tensor:
    """The gradient of the inputs [L, B, *sides, C], given that of the outputs g [L, B, h, w, O].

    The weights are [L, C, KH, KW, O]: the axis of the sum is contiguous. With a stride, each
    residue of the row and column is a separate convolution, with the taps that reach it.
    """
    lanes, images, high, wide, outputs = g.shape
    channels, (kh, kw), (sh, sw), (ph, pw) = w.shape[1], how.kernel, how.stride, how.padding
    x = g.new_empty(lanes, images, *sides, channels)
    for py in range(sh):
        for px in range(sw):
            i0, j0 = (py + ph) % sh, (px + pw) % sw
            taps = (max(0, -(-(kh - i0) // sh)), max(0, -(-(kw - j0) // sw)))
            high_, wide_ = -(-(sides[0] - py) // sh), -(-(sides[1] - px) // sw)
            rows = images * high_ * wide_
            if not rows:
                continue
            if not taps[0] * taps[1]:
                x[:, :, py::sh, px::sw] = 0
                continue
            _taps[(triton.cdiv(rows, tile.rows), triton.cdiv(channels, tile.columns), lanes)](
                g, w, x, rows, high, wide, high_, wide_, *sides, g[0].numel(), w[0].numel(), x[0].numel(),
                outputs, channels, kh, kw, *taps, i0, j0, sh, sw, 1, 1, -1, (py + ph - i0) // sh, (px + pw - j0) // sw,
                sh, sw, py, px, True, _precision(how), tile.rows, tile.columns, tile.depth,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
    return x


def weights(x: Tensor, g: Tensor, how: Geometry, tile: Tile) -> Tensor:
    """The gradient of the weights, [L, O, KH, KW, C]."""
    lanes, images, height, width, channels = x.shape
    _, _, high, wide, outputs = g.shape
    (kh, kw), depth = how.kernel, how.kernel[0] * how.kernel[1] * channels
    out = x.new_empty(tile.parts, lanes, outputs, depth, dtype=torch.float32)
    grid = (triton.cdiv(outputs, tile.rows) * triton.cdiv(depth, tile.columns), tile.parts, lanes)
    rows = images * high * wide
    _pixels[grid](
        x, g, out, rows, height, width, high, wide, x[0].numel(), g[0].numel(), out[0, 0].numel(),
        out[0].numel(), channels, outputs, kh, kw, *how.stride, *how.padding, how.padding != (0, 0), _precision(how),
        triton.cdiv(rows, tile.parts * tile.depth), tile.rows, tile.columns, tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    total = out[0] if tile.parts == 1 else out.sum(0)
    return total.to(x.dtype).view(lanes, outputs, kh, kw, channels)
