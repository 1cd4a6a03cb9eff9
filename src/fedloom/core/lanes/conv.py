"""Convolutions of many nets side by side.

``vmap`` turns the convolutions of lanes, each with its own weights, into one grouped convolution, and cuDNN computes
the groups one after another. ``LaneConv2d`` is an ``nn.Conv2d`` that uses fedloom's kernels instead, on a GPU with
Triton and where they are faster. Outside ``vmap`` it is an ordinary convolution.

The convolution y = x * w, the gradient of its inputs and the gradient of its weights are bilinear, and the derivatives
of each are again among the three. So derivatives of any order, in either direction, need only these three functions. On
a GPU a convolution that is followed by a ReLU and by the maximum of 2x2 windows is one function with them; its
derivatives are the three functions at the largest pixels of windows.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, max_pool2d
from torch.nn.grad import conv2d_input, conv2d_weight

from fedloom.core.channels_last import are_changed
from fedloom.core.lanes.ops import (
    Geometry,
    Pair,
    dense_lanes,
    lane_conv,
    lane_conv_inputs,
    lane_conv_pooled,
    lane_conv_pooled_weights,
    lane_conv_weights,
    largest,
    picked,
    unpooled,
)


class LaneConv2d(nn.Conv2d):
    """A convolution whose lanes, under ``vmap``, share one kernel."""

    only_calls_layers = True
    sides: Pair  # of the padding

    def forward(self, input: Tensor, pool: nn.MaxPool2d | None = None) -> Tensor:
        """The convolution, or all of it with a ReLU and a pooling."""
        return super().forward(input) if pool is None else self._pooled(input, pool)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if input.ndim == 3:  # an image without a batch
            return conv2d(input, weight, bias, self.stride, self.padding)
        out = convolve(input, weight, self._how)
        return out if bias is None else out + bias[:, None, None]

    def _pooled(self, input: Tensor, pool: nn.MaxPool2d) -> Tensor:
        """The convolution, a ReLU and a pooling, in another order: the maximum is taken first, so that the bias and the
        ReLU, which keep the order of numbers, have fewer pixels left.
        """
        weight, bias, how = self.weight, self.bias, self._how
        pairs = [(each, each) if isinstance(each, int) else each for each in (pool.kernel_size, pool.stride)]
        if _is_on_gpu(input) and pairs == [(2, 2), (2, 2)] and min(how.windows(_sides(input))) > 0:
            return convolve_pooled(input, weight, weight.new_zeros(len(weight)) if bias is None else bias, how)
        out = max_pool2d(convolve(input, weight, how), pool.kernel_size, pool.stride)
        return (out if bias is None else out + bias[:, None, None]).relu()

    @property
    def _how(self) -> Geometry:
        (kh, kw), (sh, sw) = self.kernel_size, self.stride
        return Geometry((kh, kw), (sh, sw), self.sides, not torch.backends.cudnn.allow_tf32)


class LaneSequential(nn.Sequential):
    """Layers one after another; a convolution, a ReLU and a max-pooling in a row are one step.

    The layers stay where they are: a net may also call some of them, or a part of them, by itself.
    """

    only_calls_layers = True

    def forward(self, input: Tensor) -> Tensor:
        layers = list(self)
        while layers:
            conv, *after = layers[:3]
            pool = _pooling(after)
            if isinstance(conv, LaneConv2d) and pool is not None and not are_changed(conv, *after):
                input, layers = conv(input, pool), layers[3:]
            else:
                input, layers = conv(input), layers[1:]
        return input


def in_lanes(net: nn.Module) -> None:
    """Let the plain convolutions of a net share kernels over lanes; parameters and names do not change."""
    for layer in net.modules():
        if type(layer) is nn.Conv2d and layer.groups == 1 and layer.dilation == (1, 1):
            left, right, top, bottom = layer._reversed_padding_repeated_twice
            if layer.padding_mode == "zeros" and left == right and top == bottom:
                layer.__class__ = LaneConv2d
                layer.__dict__["sides"] = (top, left)
        elif type(layer) is nn.Sequential:
            layer.__class__ = LaneSequential


def _pooling(layers: list[nn.Module]) -> nn.MaxPool2d | None:
    """The pooling, if these are a ReLU and a max-pooling of whole windows."""
    if len(layers) < 2 or type(layers[0]) is not nn.ReLU or type(layers[1]) is not nn.MaxPool2d:
        return None
    pool = layers[1]
    within = pool.padding in (0, (0, 0)) and pool.dilation in (1, (1, 1)) and not pool.ceil_mode
    return pool if within and not pool.return_indices else None


# -- the three functions --------------------------------------------------------------------------
def convolve(x: Tensor, w: Tensor, how: Geometry) -> Tensor:
    """y = x * w for x [B, C, H, W] and w [O, C, KH, KW]."""
    return _applied(_Convolve, x, w, how)


def input_gradient(g: Tensor, w: Tensor, how: Geometry, sides: Pair) -> Tensor:
    """The gradient of x [B, C, *sides], given that of y [B, O, h, w]."""
    return _applied(_InputGradient, g, w, how, sides)


def weight_gradient(x: Tensor, g: Tensor, how: Geometry) -> Tensor:
    """The gradient of w [O, C, KH, KW], given that of y [B, O, h, w]."""
    return _applied(_WeightGradient, x, g, how)


def convolve_pooled(x: Tensor, w: Tensor, bias: Tensor, how: Geometry) -> Tensor:
    """max(0, bias + the largest of each 2x2 window of x * w)."""
    y, _ = _ConvolvePooled.apply(x, w, bias, how)  # type: ignore[no-untyped-call]
    pooled: Tensor = y
    return pooled


def pooled_weight_gradient(x: Tensor, g: Tensor, index: Tensor, how: Geometry) -> Tensor:
    """The gradient of w, given that of windows [B, O, h / 2, w / 2] and the places of their largest pixels."""
    return _applied(_PooledWeightGradient, x, g, index, how)


def _applied(function: type[_Bilinear], *given: Any) -> Tensor:
    out: Tensor = function.apply(*given)  # type: ignore[no-untyped-call]
    return out


class _Bilinear(torch.autograd.Function):
    """Two tensors in, one out, which is linear in each; further arguments are not differentiated, tensors first."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004  autograd's signature
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.rest = inputs[len(tensors) :]

    @classmethod
    def tangent(cls, ctx: Any, da: Tensor | None, db: Tensor | None) -> Tensor:
        """The derivative along (da, db), by the product rule."""
        a, b, *more = ctx.saved_tensors
        moved = [] if da is None else [_applied(cls, da, b, *more, *ctx.rest)]
        moved += [] if db is None else [_applied(cls, a, db, *more, *ctx.rest)]
        return moved[0] if len(moved) == 1 else moved[0] + moved[1]


class _Convolve(_Bilinear):
    @staticmethod
    def forward(x: Tensor, w: Tensor, how: Geometry) -> Tensor:
        return conv2d(x, w, None, how.stride, how.padding)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        (x, w), (how,) = ctx.saved_tensors, ctx.rest
        dx = input_gradient(g, w, how, _sides(x)) if ctx.needs_input_grad[0] else None
        dw = weight_gradient(x, g, how) if ctx.needs_input_grad[1] else None
        return dx, dw, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dw: Tensor | None, *_: None) -> Tensor:
        return _Convolve.tangent(ctx, dx, dw)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, how: Geometry) -> tuple[Tensor, int]:
        if in_dims[1] is None:  # all lanes have the same weights: they are more images of one net
            x = x.movedim(in_dims[0], 0)
            images = x.flatten(0, 1)
            y = one_net(lane_conv, images, w, how=how)[0] if _has_kernels(how, images, w) else convolve(images, w, how)
            return y.unflatten(0, x.shape[:2]), 0  # type: ignore[no-untyped-call]
        x, w = _lanes(info, in_dims, x, w)
        return _first(lane_conv(_last(x), _last(w), *how)), 0


class _InputGradient(_Bilinear):
    @staticmethod
    def forward(g: Tensor, w: Tensor, how: Geometry, sides: Pair) -> Tensor:
        dx: Tensor = conv2d_input((len(g), w.shape[1], *sides), w, g, how.stride, how.padding)  # type: ignore[no-untyped-call]
        return dx

    @staticmethod
    def backward(ctx: Any, ddx: Tensor) -> tuple[Any, ...]:
        (g, w), (how, _) = ctx.saved_tensors, ctx.rest
        dg = convolve(ddx, w, how) if ctx.needs_input_grad[0] else None
        dw = weight_gradient(ddx, g, how) if ctx.needs_input_grad[1] else None
        return dg, dw, None, None

    @staticmethod
    def jvp(ctx: Any, dg: Tensor | None, dw: Tensor | None, *_: None) -> Tensor:
        return _InputGradient.tangent(ctx, dg, dw)

    @staticmethod
    def vmap(info: Any, in_dims: Any, g: Tensor, w: Tensor, how: Geometry, sides: Pair) -> tuple[Tensor, int]:
        if in_dims[1] is None:
            g = g.movedim(in_dims[0], 0)
            dx = input_gradient(g.flatten(0, 1), w, how, sides)
            return dx.unflatten(0, g.shape[:2]), 0  # type: ignore[no-untyped-call]
        g, w = _lanes(info, in_dims, g, w)
        return _first(lane_conv_inputs(_last(g), dense_lanes(w.permute(0, 2, 3, 4, 1)), *how, sides)), 0


class _WeightGradient(_Bilinear):
    @staticmethod
    def forward(x: Tensor, g: Tensor, how: Geometry) -> Tensor:
        dw: Tensor = conv2d_weight(x, (g.shape[1], x.shape[1], *how.kernel), g, how.stride, how.padding)  # type: ignore[no-untyped-call]
        return dw

    @staticmethod
    def backward(ctx: Any, ddw: Tensor) -> tuple[Any, ...]:
        (x, g), (how,) = ctx.saved_tensors, ctx.rest
        dx = input_gradient(g, ddw, how, _sides(x)) if ctx.needs_input_grad[0] else None
        dg = convolve(x, ddw, how) if ctx.needs_input_grad[1] else None
        return dx, dg, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dg: Tensor | None, *_: None) -> Tensor:
        return _WeightGradient.tangent(ctx, dx, dg)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, g: Tensor, how: Geometry) -> tuple[Tensor, int]:
        x, g = _lanes(info, in_dims, x, g)
        return _first(lane_conv_weights(_last(x), _last(g), *how)), 0


class _PooledWeightGradient(_Bilinear):
    @staticmethod
    def forward(x: Tensor, g: Tensor, index: Tensor, how: Geometry) -> Tensor:
        return _WeightGradient.forward(x, unpooled(g, index, how.out(_sides(x))), how)

    @staticmethod
    def backward(ctx: Any, ddw: Tensor) -> tuple[Any, ...]:
        (x, g, index), (how,) = ctx.saved_tensors, ctx.rest
        whole = unpooled(g, index, how.out(_sides(x)))
        dx = input_gradient(whole, ddw, how, _sides(x)) if ctx.needs_input_grad[0] else None
        dg = picked(convolve(x, ddw, how), index) if ctx.needs_input_grad[1] else None
        return dx, dg, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dg: Tensor | None, *_: None) -> Tensor:
        return _PooledWeightGradient.tangent(ctx, dx, dg)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, g: Tensor, index: Tensor, how: Geometry) -> tuple[Tensor, int]:
        x, g, index = _lanes(info, in_dims, x, g, index)
        return _first(lane_conv_pooled_weights(_last(x), _last(g), _last(index), *how)), 0


class _ConvolvePooled(torch.autograd.Function):
    """The convolution, the largest of each 2x2 window, the bias and the ReLU; and the places in windows."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor, how: Geometry) -> tuple[Tensor, Tensor]:
        return largest(conv2d(x, w, None, how.stride, how.padding), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, _, how = inputs
        _, index = output
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(x, w, index)
        ctx.save_for_forward(x, w, index)
        ctx.how = how

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: None) -> tuple[Any, ...]:
        (x, w, index), how = ctx.saved_tensors, ctx.how
        needs_x, needs_w, needs_bias, _ = ctx.needs_input_grad
        dbias = torch.where(index < 4, g, 0).sum((0, 2, 3)) if needs_bias else None
        if not needs_x:  # the first layer
            return None, pooled_weight_gradient(x, g, index, how) if needs_w else None, dbias, None
        whole = unpooled(g, index, how.out(_sides(x)))
        dw = weight_gradient(x, whole, how) if needs_w else None
        return input_gradient(whole, w, how, _sides(x)), dw, dbias, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dw: Tensor | None, dbias: Tensor | None, _: None) -> tuple[Tensor, None]:
        (x, w, index), how = ctx.saved_tensors, ctx.how
        moved = [] if dx is None else [picked(convolve(dx, w, how), index)]
        moved += [] if dw is None else [picked(convolve(x, dw, how), index)]
        moved += [] if dbias is None else [torch.where(index < 4, dbias[:, None, None], 0)]
        return sum(moved[1:], moved[0]), None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, w: Tensor, bias: Tensor, how: Geometry
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        if in_dims[1] is None and in_dims[2] is None:
            x = x.movedim(in_dims[0], 0)
            images = x.flatten(0, 1)
            both: tuple[Any, ...]
            if _has_kernels(how, images, w, bias):
                both = one_net(lane_conv_pooled, images, w, bias, how=how)
            else:
                both = _ConvolvePooled.apply(images, w, bias, how)  # type: ignore[no-untyped-call]
            y, index = (each.unflatten(0, x.shape[:2]) for each in both)
            return (y, index), (0, 0)
        x, w, bias = _lanes(info, in_dims, x, w, bias)
        y, index = lane_conv_pooled(_last(x), _last(w), dense_lanes(bias), *how)
        return (_first(y), _first(index)), (0, 0)


def one_net(op: Any, images: Tensor, w: Tensor, *bias: Tensor, how: Geometry) -> tuple[Tensor, ...]:
    """What this operator on lanes gives for the images of a single net."""
    found = op(_last(images[None]), _last(w[None]), *(each[None] for each in bias), *how)
    return tuple(_first(each)[0] for each in ([found] if isinstance(found, Tensor) else found))


def _has_kernels(how: Geometry, images: Tensor, w: Tensor, *bias: Tensor) -> bool:
    """Whether to use the operators on lanes for a single net: on a GPU, and unless they are to be differentiated.

    Kernels count the numbers of a lane in 32 bits.
    """
    outputs = len(images) * len(w) * prod(how.out(_sides(images)))
    few = max(images.numel(), outputs) < 1 << 31
    return few and _is_on_gpu(images) and not any(each.requires_grad for each in (images, w, *bias))


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _sides(x: Tensor) -> Pair:
    return x.shape[-2], x.shape[-1]


def _lanes(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors with the lanes as first axis; what lanes share is repeated."""
    each = zip(tensors, in_dims, strict=False)
    return tuple(t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0) for t, d in each)


def _last(x: Tensor) -> Tensor:
    """Channels last: [L, n, H, W, C] for [L, n, C, H, W], contiguous within each lane."""
    return dense_lanes(x.movedim(2, -1))


def _first(x: Tensor) -> Tensor:
    return x.movedim(-1, 2)
