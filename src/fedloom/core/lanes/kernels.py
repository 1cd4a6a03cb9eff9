"""Convolutions of many nets at once, as Triton kernels whose grid has an axis of lanes.

A convolution is a matrix product over patches that are never stored (an implicit GEMM). Images are
``[lane, image, row, column, channel]``, weights ``[lane, output, row, column, channel]``: channels are contiguous.
Both the forward pass and the gradient of the inputs are sums over taps, so one kernel computes both. The gradient of
the weights is a sum over pixels; it is split into parts, which are added in a fixed order, so that it is the same
every time.

Where 2x2 windows are pooled after the convolution, only the largest value of each is stored, and its place in the
window: 0 to 3, or 4 if the ReLU after it cuts it off. The gradient of the weights can be computed from these.

In a kernel numbers are tensors, too: Triton would read ``int`` as one of 32 bits, which the size of a lane may exceed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedloom.core.lanes.ops import Geometry, Tile


@triton.jit
def _patches(
    x: tl.tensor, origin: tl.tensor, top: tl.tensor, left: tl.tensor, inside: tl.tensor, at: tl.tensor, end: tl.tensor,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, TW: tl.constexpr, SIGN: tl.constexpr, BORDERS: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """BK numbers of each patch, counted over taps and channels, from number ``at``; zeros from ``end``."""
    k = tl.arange(0, BK)
    if C % BK == 0:  # all of them at one tap
        tap = at // C
        i = tap // TW
        j = tap % TW
        shift = SIGN * (i * W + j) * C
        ok = inside
        if BORDERS:
            iy = top + SIGN * i
            ix = left + SIGN * j
            ok = inside & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
        where = x + (origin + shift)[:, None] + (tl.multiple_of(at % C, BK) + k)[None, :]
        found = tl.load(where, mask=ok[:, None], other=0.0)
    else:  # few channels: of several taps
        deep = at + k
        tap = deep // C
        i = tap // TW
        j = tap % TW
        ok = inside[:, None] & (deep < end)[None, :]
        if BORDERS:
            iy = top[:, None] + (SIGN * i)[None, :]
            ix = left[:, None] + (SIGN * j)[None, :]
            ok = ok & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
        where = x + origin[:, None] + (SIGN * (i * W + j) * C + deep % C)[None, :]
        found = tl.load(where, mask=ok, other=0.0)
    return found


@triton.jit
def _filters(
    w: tl.tensor, n: tl.tensor, real: tl.tensor, at: tl.tensor, end: tl.tensor,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr,
    FIRST_H: tl.constexpr, FIRST_W: tl.constexpr, HOP_H: tl.constexpr, HOP_W: tl.constexpr, BK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The weights of outputs ``n`` for the numbers that ``_patches`` gives: tap (i, j) is FIRST + HOP * (i, j)."""
    k = tl.arange(0, BK)
    deep = at + k
    if C % BK == 0:
        tap = at // C
        place = (FIRST_H + HOP_H * (tap // TW)) * KW + FIRST_W + HOP_W * (tap % TW)
        number = place * C + tl.multiple_of(at % C, BK) + k
        ok = real[:, None]
    else:
        if TH == KH and TW == KW:  # every tap, in the order of the weights
            number = deep
        else:
            tap = deep // C
            number = ((FIRST_H + HOP_H * (tap // TW)) * KW + FIRST_W + HOP_W * (tap % TW)) * C + deep % C
        ok = real[:, None] & (deep < end)[None, :]
    return tl.load(w + (n * (KH * KW * C))[:, None] + number[None, :], mask=ok, other=0.0)


@triton.jit
def _taps(
    x: tl.tensor, w: tl.tensor, y: tl.tensor,  # [L, B, H, W, C], [L, N, KH, KW, C], [L, B, YH, YW, N]
    images: tl.tensor, H: tl.constexpr, W: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr,
    YH: tl.constexpr, YW: tl.constexpr,
    x_lane: tl.tensor, w_lane: tl.tensor, y_lane: tl.tensor,
    C: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr, FIRST_H: tl.constexpr, FIRST_W: tl.constexpr,
    HOP_H: tl.constexpr, HOP_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, SIGN: tl.constexpr, OFF_H: tl.constexpr, OFF_W: tl.constexpr,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, AT_H: tl.constexpr, AT_W: tl.constexpr,
    BORDERS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """y[b, r, c, n] = sum over taps t of x[b, r * STRIDE + SIGN * t + OFF, ...] . w[n, FIRST + HOP * t, ...].

    The taps are TH x TW of the kernel's KH x KW; row r of the product is written to row r * OUT + AT of y. With
    borders, one program has neighbouring rows of all images, and leaves out the taps that are outside of all of them.
    """
    lane = tl.program_id(2).to(tl.int64)
    x += lane * x_lane
    w += lane * w_lane
    y += lane * y_lane
    begin = tl.program_id(0) * BM
    m = begin + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    c = m % RW
    first = 0
    end = TH * TW * C
    if BORDERS:
        r = m // (images * RW)
        image = m // RW % images
        low = (begin // (images * RW)) * STRIDE_H + OFF_H
        high = tl.minimum((begin + BM - 1) // (images * RW), RH - 1) * STRIDE_H + OFF_H
        if SIGN > 0:
            first = tl.maximum(0, -high) * (TW * C)
            end = tl.minimum(TH, H - low) * (TW * C)
        else:
            first = tl.maximum(0, low - H + 1) * (TW * C)
            end = tl.minimum(TH, high + 1) * (TW * C)
    else:
        r = m // RW % RH
        image = m // (RH * RW)
    top = r * STRIDE_H + OFF_H
    left = c * STRIDE_W + OFF_W
    origin = ((image * H + top) * W + left) * C
    inside = m < images * RH * RW
    real = n < N
    acc = tl.zeros((BM, BN), tl.float32)
    for at in range(first, end, BK):
        a = _patches(x, origin, top, left, inside, at, end, H, W, C, TW, SIGN, BORDERS, BK)
        b = _filters(w, n, real, at, end, C, KH, KW, TH, TW, FIRST_H, FIRST_W, HOP_H, HOP_W, BK)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    to = ((image * YH + r * OUT_H + AT_H) * YW + c * OUT_W + AT_W) * N
    tl.store(y + to[:, None] + n[None, :], acc.to(y.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit
def _larger(best: tl.tensor, place: tl.tensor, value: tl.tensor, at: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The larger of two, and its place; the first of equals, and a value that is not a number in any case."""
    take = (value > best) | (value != value)  # noqa: PLR0124
    return tl.where(take, value, best), tl.where(take, at, place)


@triton.jit
def _pooled_taps(
    x: tl.tensor, w: tl.tensor, bias: tl.tensor, y: tl.tensor, index: tl.tensor,  # [L, N], [L, B, PH, PW, N] twice
    rows: tl.tensor, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    x_lane: tl.tensor, w_lane: tl.tensor, bias_lane: tl.tensor, y_lane: tl.tensor,
    C: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BORDERS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """y = max(0, bias + the largest of each 2x2 window of the convolution), and the place of the largest."""
    lane = tl.program_id(2).to(tl.int64)
    x += lane * x_lane
    w += lane * w_lane
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = m < rows
    real = n < N
    top = (m // PW % PH) * (2 * STRIDE_H) - PAD_H
    left = (m % PW) * (2 * STRIDE_W) - PAD_W
    origin = ((m // (PH * PW) * H + top) * W + left) * C
    down = STRIDE_H * W * C
    across: tl.constexpr = STRIDE_W * C
    one = tl.zeros((BM, BN), tl.float32)
    two = tl.zeros((BM, BN), tl.float32)
    three = tl.zeros((BM, BN), tl.float32)
    four = tl.zeros((BM, BN), tl.float32)
    end: tl.constexpr = KH * KW * C
    for at in range(0, end, BK):
        b = tl.trans(_filters(w, n, real, at, end, C, KH, KW, KH, KW, 0, 0, 1, 1, BK))
        a = _patches(x, origin, top, left, inside, at, end, H, W, C, KW, 1, BORDERS, BK)
        one = tl.dot(a, b, one, input_precision=PRECISION)
        a = _patches(x, origin + across, top, left + STRIDE_W, inside, at, end, H, W, C, KW, 1, BORDERS, BK)
        two = tl.dot(a, b, two, input_precision=PRECISION)
        a = _patches(x, origin + down, top + STRIDE_H, left, inside, at, end, H, W, C, KW, 1, BORDERS, BK)
        three = tl.dot(a, b, three, input_precision=PRECISION)
        a = _patches(
            x, origin + down + across, top + STRIDE_H, left + STRIDE_W, inside, at, end, H, W, C, KW, 1, BORDERS, BK
        )
        four = tl.dot(a, b, four, input_precision=PRECISION)
    best, place = _larger(one, tl.zeros((BM, BN), tl.int32), two, 1)
    best, place = _larger(best, place, three, 2)
    best, place = _larger(best, place, four, 3)
    best += tl.load(bias + lane * bias_lane + n, mask=real, other=0.0).to(tl.float32)[None, :]
    place = tl.where(best <= 0, 4, place)
    best = tl.where(best <= 0, 0.0, best)
    to = lane * y_lane + (m * N)[:, None] + n[None, :]
    used = inside[:, None] & real[None, :]
    tl.store(y + to, best.to(y.dtype.element_ty), mask=used)
    tl.store(index + to, place.to(tl.int8), mask=used)


@triton.jit
def _shifts(
    first: tl.tensor, W: tl.constexpr, C: tl.constexpr, KW: tl.constexpr, BN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Row, column and distance in memory of BN numbers of a patch, counted over taps and channels, from ``first``."""
    if C % BN == 0:  # all of them at one tap
        tap = first // C + tl.zeros((BN,), tl.int32)
        i = tap // KW
        j = tap % KW
        shift = ((first // C // KW) * W + first // C % KW) * C + tl.multiple_of(first % C, BN) + tl.arange(0, BN)
    else:
        deep = first + tl.arange(0, BN)
        tap = deep // C
        i = tap // KW
        j = tap % KW
        SIDE: tl.constexpr = C & -C  # this many channels are contiguous
        shift = tl.max_contiguous(tl.multiple_of((i * W + j) * C + deep % C, SIDE), SIDE)
    return i, j, shift


@triton.jit
def _at_taps(
    x: tl.tensor, image: tl.tensor, top: tl.tensor, left: tl.tensor, ok: tl.tensor,
    i: tl.tensor, j: tl.tensor, shift: tl.tensor,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BORDERS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The images at the taps of pixels, which begin at (top, left)."""
    if BORDERS:
        iy = top[:, None] + i[None, :]
        ix = left[:, None] + j[None, :]
        ok = ok & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
    return tl.load(x + (((image * H + top) * W + left) * C)[:, None] + shift[None, :], mask=ok, other=0.0)


@triton.jit
def _pixels(
    x: tl.tensor, g: tl.tensor, index: tl.tensor, out: tl.tensor,  # [L, B, H, W, C], [L, B, RH, RW, N], the places in
    # windows of g if POOLED, [PARTS, L, N, KH * KW * C]
    rows: tl.tensor, H: tl.constexpr, W: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr,
    x_lane: tl.tensor, g_lane: tl.tensor, out_lane: tl.tensor, out_part: tl.tensor,
    C: tl.constexpr, N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    POOLED: tl.constexpr, BORDERS: tl.constexpr, PRECISION: tl.constexpr, STEPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """out[n, tap, c] = sum over pixels of g[pixel, n] * x[pixel at tap, c]; BM of n, BN of (tap, c), BK of pixels.

    If POOLED, g is that of 2x2 windows, and belongs to the pixel of each that has been the largest.
    """
    DEPTH: tl.constexpr = KH * KW * C
    tiles: tl.constexpr = (DEPTH + BN - 1) // BN
    lane = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    x += lane * x_lane
    g += lane * g_lane
    index += lane * g_lane
    n = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    first = (tl.program_id(0) % tiles) * BN
    i, j, shift = _shifts(first, W, C, KW, BN)
    deep = first + tl.arange(0, BN)
    real = n < N
    used = deep < DEPTH
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(STEPS):
        m = (part * STEPS + step) * BK + tl.arange(0, BK)
        inside = m < rows
        image = m // (RH * RW)
        r = m // RW % RH
        c = m % RW
        ok = inside[:, None] & used[None, :]
        # Read the other way round at once: a transposed tile would be copied to shared memory number by number.
        of = n[:, None] + (m * N)[None, :]
        a = tl.load(g + of, mask=real[:, None] & inside[None, :], other=0.0)
        if POOLED:
            place = tl.load(index + of, mask=real[:, None] & inside[None, :], other=4)
            for window in tl.static_range(4):
                top = (2 * r + window // 2) * STRIDE_H - PAD_H
                left = (2 * c + window % 2) * STRIDE_W - PAD_W
                b = _at_taps(x, image, top, left, ok, i, j, shift, H, W, C, BORDERS)
                acc = tl.dot(tl.where(place == window, a, 0.0), b, acc, input_precision=PRECISION)
        else:
            b = _at_taps(x, image, r * STRIDE_H - PAD_H, c * STRIDE_W - PAD_W, ok, i, j, shift, H, W, C, BORDERS)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    to = out + part * out_part + lane * out_lane + (n * DEPTH)[:, None] + deep[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & used[None, :])


def _precision(how: Geometry) -> str:
    return "ieee" if how.exact else "tf32"


def forward(x: Tensor, w: Tensor, how: Geometry, tile: Tile) -> Tensor:
    """The convolution of x [L, B, H, W, C] with w [L, O, KH, KW, C]: [L, B, h, w, O]."""
    lanes, images, height, width, channels = x.shape
    outputs, (high, wide) = w.shape[1], how.out((height, width))
    y = x.new_empty(lanes, images, high, wide, outputs)
    _taps[(triton.cdiv(images * high * wide, tile.rows), triton.cdiv(outputs, tile.columns), lanes)](
        x, w, y, images, height, width, high, wide, high, wide, x.stride(0), w.stride(0), y.stride(0),
        channels, outputs, *how.kernel, *how.kernel, 0, 0, 1, 1, *how.stride, 1, -how.padding[0], -how.padding[1],
        1, 1, 0, 0, how.padding != (0, 0), _precision(how), tile.rows, tile.columns, tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def pooled(x: Tensor, w: Tensor, bias: Tensor, how: Geometry, tile: Tile) -> tuple[Tensor, Tensor]:
    """The convolution, of which the largest in each 2x2 window, the bias and the ReLU; and the place in the window."""
    lanes, images, height, width, channels = x.shape
    outputs, (high, wide) = w.shape[1], how.windows((height, width))
    y = x.new_empty(lanes, images, high, wide, outputs)
    index = torch.empty_like(y, dtype=torch.int8)
    rows = images * high * wide
    _pooled_taps[(triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.columns), lanes)](
        x, w, bias, y, index, rows, height, width, high, wide, x.stride(0), w.stride(0), bias.stride(0), y.stride(0),
        channels, outputs, *how.kernel, *how.stride, *how.padding, how.padding != (0, 0), _precision(how),
        tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y, index


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
            if not high_ * wide_:
                continue
            if not taps[0] * taps[1]:
                x[:, :, py::sh, px::sw] = 0
                continue
            _taps[(triton.cdiv(images * high_ * wide_, tile.rows), triton.cdiv(channels, tile.columns), lanes)](
                g, w, x, images, high, wide, high_, wide_, *sides, g.stride(0), w.stride(0), x.stride(0),
                outputs, channels, kh, kw, *taps, i0, j0, sh, sw, 1, 1, -1, (py + ph - i0) // sh, (px + pw - j0) // sw,
                sh, sw, py, px, True, _precision(how), tile.rows, tile.columns, tile.depth,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
    return x


def weights(x: Tensor, g: Tensor, how: Geometry, tile: Tile) -> Tensor:
    """The gradient of the weights, [L, O, KH, KW, C]."""
    return _weights(x, g, None, how, tile)


def pooled_weights(x: Tensor, g: Tensor, index: Tensor, how: Geometry, tile: Tile) -> Tensor:
    """The same, given the gradient of 2x2 windows and the places in them."""
    return _weights(x, g, index, how, tile)


def _weights(x: Tensor, g: Tensor, index: Tensor | None, how: Geometry, tile: Tile) -> Tensor:
    lanes, images, height, width, channels = x.shape
    _, _, high, wide, outputs = g.shape
    (kh, kw), depth = how.kernel, how.kernel[0] * how.kernel[1] * channels
    out = x.new_empty(tile.parts, lanes, outputs, depth, dtype=torch.float32)
    grid = (triton.cdiv(outputs, tile.rows) * triton.cdiv(depth, tile.columns), tile.parts, lanes)
    rows = images * high * wide
    _pixels[grid](
        x, g, g if index is None else index, out, rows, height, width, high, wide, x.stride(0), g.stride(0),
        out.stride(1), out.stride(0), channels, outputs, kh, kw, *how.stride, *how.padding, index is not None,
        how.padding != (0, 0), _precision(how), triton.cdiv(rows, tile.parts * tile.depth),
        tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    total = out[0].to(x.dtype) if tile.parts == 1 else _sum_of(out, x.dtype)
    return total.view(lanes, outputs, kh, kw, channels)


# -- one number at a time --------------------------------------------------------------------------
_BLOCK = 1024  # numbers of a program
_FEW = 256  # the same where there are few


@triton.jit
def _parts(
    each: tl.tensor, total: tl.tensor, count: tl.tensor, PARTS: tl.constexpr, BLOCK: tl.constexpr
) -> None:  # [PARTS, count], [count]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < count
    value = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(PARTS):
        value += tl.load(each + at, mask=ok, other=0.0)
        each += count
    tl.store(total + at, value.to(total.dtype.element_ty), mask=ok)


def _sum_of(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first axis, added in its order."""
    total = parts.new_empty(parts.shape[1:], dtype=dtype)
    _parts[(triton.cdiv(total.numel(), _FEW),)](parts, total, total.numel(), len(parts), _FEW)
    return total


@triton.jit
def _largest(
    y: tl.tensor, bias: tl.tensor, best: tl.tensor, index: tl.tensor,  # [L, B, H, W, N], [L, N], [L, B, PH, PW, N]
    count: tl.tensor, images: tl.tensor, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    bias_lane: tl.tensor, N: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < count
    n = at % N
    image = at // N // (PH * PW)
    of = y + ((image * H + 2 * (at // N // PW % PH)) * W + 2 * (at // N % PW)) * N + n
    value = tl.load(of, mask=ok, other=0.0).to(tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    value, place = _larger(value, place, tl.load(of + N, mask=ok, other=0.0).to(tl.float32), 1)
    value, place = _larger(value, place, tl.load(of + W * N, mask=ok, other=0.0).to(tl.float32), 2)
    value, place = _larger(value, place, tl.load(of + W * N + N, mask=ok, other=0.0).to(tl.float32), 3)
    value += tl.load(bias + (image // images) * bias_lane + n, mask=ok, other=0.0).to(tl.float32)
    place = tl.where(value <= 0, 4, place)
    value = tl.where(value <= 0, 0.0, value)
    tl.store(best + at, value.to(best.dtype.element_ty), mask=ok)
    tl.store(index + at, place.to(tl.int8), mask=ok)


def window_maxima(y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """max(0, bias + the largest of each window) of y [L, B, h, w, O], and its place."""
    lanes, images, high, wide, outputs = y.shape
    best = y.new_empty(lanes, images, high // 2, wide // 2, outputs)
    index = torch.empty_like(best, dtype=torch.int8)
    _largest[(triton.cdiv(best.numel(), _BLOCK),)](
        y, bias, best, index, best.numel(), images, high, wide, high // 2, wide // 2, bias.stride(0), outputs, _BLOCK
    )
    return best, index


@triton.jit
def _unpooled(
    g: tl.tensor, index: tl.tensor, whole: tl.tensor,  # [L, B, PH, PW, N] twice, [L, B, H, W, N]
    count: tl.tensor, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r = at // N // W % H
    c = at // N % W
    ok = (at < count) & (r < 2 * PH) & (c < 2 * PW)
    of = ((at // N // (H * W) * PH + r // 2) * PW + c // 2) * N + at % N
    place = tl.load(index + of, mask=ok, other=4)
    value = tl.load(g + of, mask=ok, other=0.0)
    tl.store(whole + at, tl.where(place == r % 2 * 2 + c % 2, value, 0.0), mask=at < count)


def spread_windows(g: Tensor, index: Tensor, sides: tuple[int, int]) -> Tensor:
    """The numbers of windows g [L, B, h / 2, w / 2, O] at their places: [L, B, *sides, O]."""
    lanes, images, high, wide, outputs = g.shape
    whole = g.new_empty(lanes, images, *sides, outputs)
    _unpooled[(triton.cdiv(whole.numel(), _BLOCK),)](
        g, index, whole, whole.numel(), *sides, high, wide, outputs, _BLOCK
    )
    return whole
