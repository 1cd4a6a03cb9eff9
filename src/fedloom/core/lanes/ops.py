"""The convolution of many nets and its two gradients, as operators that work with ``vmap``, compilers and CUDA graphs.

Images are ``[lane, image, row, column, channel]``, weights ``[lane, output, row, column, channel]``, contiguous within
each lane. On a CPU, and wherever it is faster, an operator is PyTorch's grouped convolution; on a GPU with Triton,
fedloom has its own kernels. Which of them is used, and with which tiles, is measured once for each shape and precision,
and kept next to the compiler's cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad
from torch.nn.grad import conv2d_input, conv2d_weight

from fedloom.core import disk
from fedloom.core.errors import CheckpointError

Pair = tuple[int, int]
Ints = Sequence[int]
Run = Callable[..., Any]


class Geometry(NamedTuple):
    """The sides of a convolution; ``exact``: products of float32 are not shortened to TF32."""

    kernel: Pair
    stride: Pair
    padding: Pair
    exact: bool

    def out(self, sides: Ints) -> Pair:
        """The sides of the output."""
        each = zip(sides, self.kernel, self.stride, self.padding, strict=True)
        high, wide = ((side + 2 * p - k) // s + 1 for side, k, s, p in each)
        return high, wide

    def windows(self, sides: Ints) -> Pair:
        """How many 2x2 windows the output has, down and across."""
        high, wide = self.out(sides)
        return high // 2, wide // 2


class Tile(NamedTuple):
    """The tiling of a kernel."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    parts: int = 1  # of the sum over pixels, for the gradient of weights


def dense_lanes(x: Tensor) -> Tensor:
    """The same numbers, contiguous within each lane; lanes of parameters are apart by all parameters of a net."""
    return x if x[0].is_contiguous() else x.contiguous()


def _geometry(kernel: Ints, stride: Ints, padding: Ints, exact: bool) -> Geometry:
    return Geometry((kernel[0], kernel[1]), (stride[0], stride[1]), (padding[0], padding[1]), exact)


# -- the operators --------------------------------------------------------------------------------
@torch.library.custom_op("fedloom::lane_conv", mutates_args=())
def lane_conv(x: Tensor, w: Tensor, kernel: Ints, stride: Ints, padding: Ints, exact: bool) -> Tensor:
    """x [L, B, H, W, C] convolved with w [L, O, KH, KW, C]: [L, B, h, w, O]."""
    how = _geometry(kernel, stride, padding, exact)
    if x.device.type != "cuda":
        return grouped(x, w, how)
    y: Tensor = _fastest("forward", (x, w), how, w.shape[1], ())(x, w)
    return y


@torch.library.custom_op("fedloom::lane_conv_pooled", mutates_args=())
def lane_conv_pooled(
    x: Tensor, w: Tensor, bias: Tensor, kernel: Ints, stride: Ints, padding: Ints, exact: bool
) -> tuple[Tensor, Tensor]:
    """max(0, bias [L, O] + the largest of each 2x2 window of the convolution); and which of the window that is.

    Places in a window are 0 to 3; 4 means that the largest is cut off, so that no gradient passes.
    """
    how = _geometry(kernel, stride, padding, exact)
    if x.device.type != "cuda":
        return grouped_pooled(x, w, bias, how)
    y, index = _fastest("pooled", (x, w, bias), how, w.shape[1], ())(x, w, bias)
    return y, index


@torch.library.custom_op("fedloom::lane_conv_inputs", mutates_args=())
def lane_conv_inputs(
    g: Tensor, w: Tensor, kernel: Ints, stride: Ints, padding: Ints, exact: bool, sides: Ints
) -> Tensor:
    """The gradient of the inputs [L, B, *sides, C], given that of the outputs g [L, B, h, w, O].

    The weights are [L, C, KH, KW, O] here: the axis of the sum is contiguous.
    """
    how = _geometry(kernel, stride, padding, exact)
    if g.device.type != "cuda":
        return grouped_inputs(g, w, how, sides)
    dx: Tensor = _fastest("inputs", (g, w), how, w.shape[1], (sides[0], sides[1]))(g, w)
    return dx


@torch.library.custom_op("fedloom::lane_conv_weights", mutates_args=())
def lane_conv_weights(x: Tensor, g: Tensor, kernel: Ints, stride: Ints, padding: Ints, exact: bool) -> Tensor:
    """The gradient of the weights [L, O, KH, KW, C], given that of the outputs g [L, B, h, w, O]."""
    how = _geometry(kernel, stride, padding, exact)
    if x.device.type != "cuda":
        return grouped_weights(x, g, how)
    dw: Tensor = _fastest("weights", (x, g), how, g.shape[4], ())(x, g)
    return dw


@torch.library.custom_op("fedloom::lane_conv_pooled_weights", mutates_args=())
def lane_conv_pooled_weights(
    x: Tensor, g: Tensor, index: Tensor, kernel: Ints, stride: Ints, padding: Ints, exact: bool
) -> Tensor:
    """The gradient of the weights, given that of 2x2 windows g [L, B, h / 2, w / 2, O] and the places in them."""
    how = _geometry(kernel, stride, padding, exact)
    if x.device.type != "cuda":
        return grouped_pooled_weights(x, g, index, how)
    dw: Tensor = _fastest("pooled_weights", (x, g, index), how, g.shape[4], ())(x, g, index)
    return dw


@lane_conv.register_fake
def _(x: Tensor, w: Tensor, kernel: Ints, stride: Ints, padding: Ints, exact: bool) -> Tensor:
    sides = _geometry(kernel, stride, padding, exact).out(x.shape[2:4])
    return x.new_empty(*x.shape[:2], *sides, w.shape[1])


@lane_conv_pooled.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor, *how: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001  as the operator
    sides = _geometry(*how).windows(x.shape[2:4])
    y = x.new_empty(*x.shape[:2], *sides, w.shape[1])
    return y, torch.empty_like(y, dtype=torch.int8)


@lane_conv_inputs.register_fake
def _(g: Tensor, w: Tensor, *how: Any) -> Tensor:
    *_, sides = how
    return g.new_empty(*g.shape[:2], *sides, w.shape[1])


@lane_conv_weights.register_fake
def _(x: Tensor, g: Tensor, kernel: Ints, *_: Any) -> Tensor:
    return x.new_empty(len(x), g.shape[4], *kernel, x.shape[4])


@lane_conv_pooled_weights.register_fake
def _(x: Tensor, g: Tensor, index: Tensor, kernel: Ints, *_: Any) -> Tensor:  # noqa: ARG001  as the operator
    return x.new_empty(len(x), g.shape[4], *kernel, x.shape[4])


def _lanes_of_lanes(op: Any) -> Callable[..., tuple[Any, Any]]:
    """Nested lanes become one axis of lanes."""

    def rule(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
        tensors = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(given, in_dims, strict=True)
            if isinstance(x, Tensor)
        ]
        out = op(*(x.flatten(0, 1).contiguous() for x in tensors), *given[len(tensors) :])
        apart = [
            each.view(*tensors[0].shape[:2], *each.shape[1:]) for each in ([out] if isinstance(out, Tensor) else out)
        ]
        return (apart[0], 0) if isinstance(out, Tensor) else (tuple(apart), (0,) * len(apart))

    return rule


for _op in (lane_conv, lane_conv_pooled, lane_conv_inputs, lane_conv_weights, lane_conv_pooled_weights):
    _op.register_vmap(_lanes_of_lanes(_op))


# -- by PyTorch's own, with a group for each lane -------------------------------------------------
def grouped(x: Tensor, w: Tensor, how: Geometry) -> Tensor:
    out = conv2d(_beside(x), _stacked(w), None, how.stride, how.padding, 1, len(x))
    return _apart(out, len(x))


def grouped_inputs(g: Tensor, w: Tensor, how: Geometry, sides: Ints) -> Tensor:
    lanes, images, channels = len(g), g.shape[1], w.shape[1]
    shape, turned = (images, lanes * channels, *sides), w.permute(0, 4, 2, 3, 1)
    out: Tensor = conv2d_input(shape, _stacked(turned), _beside(g), how.stride, how.padding, 1, lanes)  # type: ignore[no-untyped-call]
    return _apart(out, lanes)


def grouped_weights(x: Tensor, g: Tensor, how: Geometry) -> Tensor:
    lanes, channels, outputs = len(x), x.shape[4], g.shape[4]
    shape = (lanes * outputs, channels, *how.kernel)
    out: Tensor = conv2d_weight(_beside(x), shape, _beside(g), how.stride, how.padding, 1, lanes)  # type: ignore[no-untyped-call]
    return out.reshape(lanes, outputs, channels, *how.kernel).movedim(2, -1).contiguous()


def grouped_pooled(x: Tensor, w: Tensor, bias: Tensor, how: Geometry) -> tuple[Tensor, Tensor]:
    y, index = largest(grouped(x, w, how).movedim(-1, 2), bias[:, None])
    return y.movedim(2, -1).contiguous(), index.movedim(2, -1).contiguous()


def grouped_pooled_weights(x: Tensor, g: Tensor, index: Tensor, how: Geometry) -> Tensor:
    whole = unpooled(g.movedim(-1, 2), index.movedim(-1, 2), how.out(x.shape[2:4]))
    return grouped_weights(x, whole.movedim(2, -1), how)


# -- 2x2 windows of images [..., C, h, w] ----------------------------------------------------------
def largest(y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """max(0, bias [..., C] + the largest of each window), and its place; 4 if it is cut off."""
    best, *others = windows(y).unbind(-1)
    index = torch.zeros_like(best, dtype=torch.int8)
    for place, value in enumerate(others, 1):
        take = (value > best) | value.isnan()  # the first of equals
        best, index = torch.where(take, value, best), index.masked_fill(take, place)
    best = best + bias[..., None, None]
    return best.relu(), index.masked_fill(best <= 0, 4)


def windows(y: Tensor) -> Tensor:
    """The four numbers of each window: [..., h / 2, w / 2, 4]; an odd row or column at the end is in none."""
    high, wide = y.shape[-2] // 2, y.shape[-1] // 2
    each = y[..., : 2 * high, : 2 * wide].reshape(*y.shape[:-2], high, 2, wide, 2)
    return each.transpose(-3, -2).flatten(-2)


def picked(y: Tensor, index: Tensor) -> Tensor:
    """The number at its place in each window; 0 where it is cut off."""
    return torch.where(_is_at(index), windows(y), 0).sum(-1)


def unpooled(g: Tensor, index: Tensor, sides: Ints) -> Tensor:
    """The numbers of windows at their places, and 0 elsewhere: [..., *sides]."""
    *lead, high, wide = g.shape
    each = torch.where(_is_at(index), g[..., None], 0).view(*lead, high, wide, 2, 2)
    whole = each.transpose(-3, -2).reshape(*lead, 2 * high, 2 * wide)
    return pad(whole, (0, sides[1] - 2 * wide, 0, sides[0] - 2 * high))


def _is_at(index: Tensor) -> Tensor:
    return index[..., None] == torch.arange(4, dtype=index.dtype, device=index.device)


def _beside(x: Tensor) -> Tensor:
    """[B, L * C, H, W]: the lanes of an image as more of its channels."""
    return _laid(x.permute(1, 0, 4, 2, 3).flatten(1, 2))


def _stacked(w: Tensor) -> Tensor:
    return _laid(w.movedim(-1, 2).flatten(0, 1))


def _laid(x: Tensor) -> Tensor:
    """The same numbers, channels first: where a side is 1, strides alone would not say so."""
    return x.contiguous().view(-1).view(x.shape)


def _apart(x: Tensor, lanes: int) -> Tensor:
    return x.reshape(len(x), lanes, -1, *x.shape[2:]).permute(1, 0, 3, 4, 2).contiguous()


# -- which is the fastest -------------------------------------------------------------------------
_GROUPED = "grouped"
_APART = "apart"
_WITHOUT_WINDOWS = {"pooled": "forward", "pooled_weights": "weights"}
_TAPS = {  # by how many columns there are: tiles that were the fastest for some shape on an H200
    32: ((128, 32, 16, 4, 4), (128, 32, 32, 4, 4), (64, 32, 32, 4, 4), (64, 32, 64, 4, 3), (256, 32, 32, 4, 3)),
    64: ((128, 64, 16, 4, 4), (128, 64, 32, 4, 3), (64, 64, 32, 4, 4), (128, 64, 64, 4, 3), (256, 64, 32, 8, 3)),
    128: ((128, 128, 32, 8, 3), (128, 128, 64, 8, 3), (64, 128, 32, 4, 3), (128, 64, 32, 4, 3)),
}
_POOLED = {  # four sums for each place of a tile
    32: ((64, 32, 32, 4, 3), (64, 32, 16, 4, 3), (32, 32, 32, 4, 3)),
    64: ((64, 64, 32, 4, 3), (32, 64, 32, 4, 3), (64, 64, 16, 4, 3)),
    128: ((32, 64, 32, 4, 3), (64, 64, 32, 8, 3), (64, 64, 16, 4, 3)),
}
_PIXELS = {  # in 32 bits, where Hopper's matrix units would want operands the other way round, and in 16
    False: ((64, 64, 16, 2, 4), (64, 64, 32, 2, 3), (32, 128, 32, 4, 3), (32, 32, 32, 2, 4), (64, 32, 32, 2, 4),
            (64, 128, 16, 2, 3)),
    True: ((64, 64, 64, 4, 3), (64, 128, 32, 4, 3), (128, 128, 64, 8, 3), (32, 32, 64, 4, 4), (64, 16, 64, 4, 3),
           (32, 128, 32, 4, 3)),
}  # fmt: skip
_WINDOWS = ((32, 32, 16, 2, 4), (32, 32, 32, 2, 4))  # of pixels, four at once
_PROGRAMS = (264, 1056)  # twice and eight times the multiprocessors of an H200: how many programs a sum is split into


def _fastest(what: str, given: tuple[Tensor, ...], how: Geometry, columns: int, sides: tuple[int, ...]) -> Run:
    """The function that computes ``what`` fastest, measured on tensors like these unless it is known already."""
    key = _key(what, given, how)
    if key in _CHOSEN:
        return _by_name(what, _CHOSEN[key], how, sides)
    if what in _WITHOUT_WINDOWS:  # one of the ways to compute it is by this one
        x, other, _ = given
        whole = other if what == "pooled" else _like_whole(x, other, how)
        _fastest(_WITHOUT_WINDOWS[what], (x, whole), how, columns, sides)
    known = _remembered().get(key)
    if known is None:
        with _alone():  # measurements of another run at the same time would distort the timing
            known = _remembered().get(key)
            if known is None:
                known = _measured(what, given, how, columns, sides)
                _remember(key, known)
    _CHOSEN[key] = known
    return _by_name(what, known, how, sides)


def _measured(what: str, given: tuple[Tensor, ...], how: Geometry, columns: int, sides: tuple[int, ...]) -> str:
    """The name of the fastest, on random numbers: a step that is only prepared has gradients of zero."""
    given = tuple(map(_random, given))
    plain = _by_name(what, _GROUPED, how, sides)
    names = [_name(tile) for tile in _tiles(what, given, how, columns)]
    if names and what in _WITHOUT_WINDOWS:
        names.append(_APART)
    right = _right({name: _by_name(what, name, how, sides) for name in names}, plain(*given), given)
    taken = {name: _seconds(run, given) for name, run in ({_GROUPED: plain} | right).items()}
    return min(taken, key=lambda name: taken[name])


_CHOSEN: dict[str, str] = {}


def chosen_kernels() -> dict[str, str]:
    """The choice for each convolution so far, by its shape."""
    return dict(_CHOSEN)


def _key(what: str, given: tuple[Tensor, ...], how: Geometry) -> str:
    kind = "bf16" if given[0].dtype == torch.bfloat16 else "fp32" if how.exact else "tf32"
    shapes = " ".join("x".join(map(str, t.shape)) for t in given[:2])
    return f"{what} {kind} {shapes} stride {how.stride[0]}x{how.stride[1]} padding {how.padding[0]}x{how.padding[1]}"


def _tiles(what: str, given: tuple[Tensor, ...], how: Geometry, columns: int) -> list[Tile]:
    """The tiles worth trying; none without Triton."""
    if find_spec("triton") is None:
        return []
    a, b = given[:2]
    depth = how.kernel[0] * how.kernel[1] * a.shape[4]
    if what in ("forward", "inputs", "pooled"):
        wide = 32 if columns <= 32 else 64 if columns <= 64 else 128
        tiles = (_POOLED if what == "pooled" else _TAPS)[wide]
        return [Tile(*t) for t in tiles if (t[2] == 16) == (a.shape[4] % 32 != 0) or a.shape[4] < 16]
    tiles = _WINDOWS if what == "pooled_weights" else _PIXELS[a.dtype == torch.bfloat16]
    fits = [t for t in tiles if t[0] <= max(32, columns) and t[1] <= max(32, 2 * depth)]
    return [Tile(*t, parts) for t in fits for parts in sorted({_parts(t, a, b, depth, n) for n in _PROGRAMS})]


def _parts(tile: tuple[int, ...], x: Tensor, g: Tensor, depth: int, programs: int) -> int:
    """Into how many parts the sum over pixels is split to keep ``programs`` busy."""
    rows, columns, at_once = tile[:3]
    whole = -(-g.shape[4] // rows) * -(-depth // columns) * len(x)
    pixels = g.shape[1] * g.shape[2] * g.shape[3]
    return max(1, min(-(-programs // whole), pixels // (4 * at_once), 32))


def _name(tile: Tile) -> str:
    return "x".join(map(str, tile))


def _by_name(what: str, name: str, how: Geometry, sides: tuple[int, ...]) -> Run:
    if name == _GROUPED:
        more = (sides,) if what == "inputs" else ()
        return lambda *given: _GROUPED_WAYS[what](*given, how, *more)
    from fedloom.core.lanes import kernels

    if name == _APART:
        return partial(_apart_from_windows, what, how=how)
    tile = Tile(*map(int, name.split("x")))
    if what == "inputs":
        return lambda g, w: kernels.inputs(g, w, how, (sides[0], sides[1]), tile)
    own: dict[str, Run] = {
        "forward": kernels.forward, "pooled": kernels.pooled, "weights": kernels.weights,
        "pooled_weights": kernels.pooled_weights,
    }  # fmt: skip
    return lambda *given: own[what](*given, how, tile)


_GROUPED_WAYS: dict[str, Run] = {
    "forward": grouped,
    "pooled": grouped_pooled,
    "inputs": grouped_inputs,
    "weights": grouped_weights,
    "pooled_weights": grouped_pooled_weights,
}


def _apart_from_windows(what: str, *given: Tensor, how: Geometry) -> Any:
    """The convolution or its gradient by one kernel, and the windows by another."""
    from fedloom.core.lanes import kernels

    if what == "pooled":
        x, w, bias = given
        return kernels.window_maxima(_chosen("forward", (x, w), how)(x, w), bias)
    x, g, index = given
    whole = kernels.spread_windows(g, index, how.out(x.shape[2:4]))
    return _chosen("weights", (x, whole), how)(x, whole)


def _chosen(what: str, given: tuple[Tensor, ...], how: Geometry) -> Run:
    """What was chosen before."""
    key = _key(what, given, how)
    return _by_name(what, _CHOSEN[key], how, ())


def _random(like: Tensor) -> Tensor:
    if like.is_floating_point():
        return torch.randn_like(like)
    return torch.randint_like(like, 5)  # places in windows


def _like_whole(x: Tensor, g: Tensor, how: Geometry) -> Tensor:
    """Room for the gradient of the outputs, of which g is that of 2x2 windows."""
    return g.new_empty(*g.shape[:2], *how.out(x.shape[2:4]), g.shape[4])


_WRONG = 0.02  # relative error beyond which a kernel computes something else: TF32 has 1e-3, bfloat16 1e-2


def _right(own: dict[str, Run], expected: Any, given: tuple[Tensor, ...]) -> dict[str, Run]:
    """Those that can be compiled for this GPU and compute what is expected, compiled side by side."""

    def tried(run: Run) -> Any:
        try:
            return run(*given)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a tile that needs more shared memory or registers than this GPU has
            return None

    def agrees(got: Any) -> bool:
        """Of two results, the second has places in windows: where it is wrong, the first is."""
        a, b = (x if isinstance(x, Tensor) else x[0] for x in (got, expected))
        return bool((a - b).float().norm() <= _WRONG * b.float().norm())

    torch.cuda.synchronize()  # each thread has its own stream
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(own, pool.map(tried, own.values()), strict=True))
    torch.cuda.synchronize()
    return {name: own[name] for name, got in found.items() if got is not None and agrees(got)}


_REPEATS = 5


def _seconds(run: Run, given: tuple[Tensor, ...]) -> float:
    """How long it takes on the GPU: as a CUDA graph, since Python takes longer to start a small kernel than it runs."""
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        run(*given)
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_REPEATS):
            run(*given)
        graph.capture_end()
        taken = []
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(float(begin.elapsed_time(end)) / (1e3 * _REPEATS))
    return min(taken)


@cache
def _store() -> Path:
    """Where choices are kept: one file for each GPU, compiler and version of PyTorch."""
    import triton
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    gpu = torch.cuda.get_device_name().replace(" ", "-")
    return Path(cache_dir()) / f"fedloom-lane-conv-{gpu}-triton{triton.__version__}-torch{torch.__version__}.json"


def _remembered() -> dict[str, str]:
    """The choices of all runs on this GPU so far."""
    if find_spec("triton") is None:
        return {}
    with suppress(OSError, ValueError):
        found = json.loads(_store().read_text())
        return {str(k): str(v) for k, v in found.items()}
    return {}


def _remember(key: str, name: str) -> None:
    """Store a choice for later runs; without a writable folder it is measured again."""
    if find_spec("triton") is None:
        return
    with suppress(OSError):
        _store().parent.mkdir(parents=True, exist_ok=True)
        part = _store().with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(_remembered() | {key: name}, indent=1, sort_keys=True))
        part.replace(_store())


@contextmanager
def _alone() -> Iterator[None]:
    """One run at a time measures on this GPU; without a writable folder each does for itself."""
    if find_spec("triton") is None:
        yield
        return
    file = None
    with suppress(OSError, CheckpointError):
        _store().parent.mkdir(parents=True, exist_ok=True)
        file = disk.lock(_store().with_suffix(".lock"), wait=True)
    try:
        yield
    finally:
        if file is not None:
            os.close(file)
