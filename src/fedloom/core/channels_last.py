"""Convolutions of one net at a time: with the channels of a pixel side by side, and the maximum before the ReLU.

Both compute the same function. A max-pooling compares pixels of one channel; with channels side by side it compares
those of many at once. A ReLU after the pooling, instead of before it, has fewer pixels left: it keeps the order of
numbers, so that the largest is the same, and so are the places where no gradient passes.

A user's own code may depend on how pixels lie in memory. ``x.view(len(x), -1)`` would fail, so it is a ``reshape``
(``ViewsReshape``). A net that does not compute the same in this order stays as it is (``computes_the_same``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class ChannelsLastConv2d(nn.Conv2d):
    """A convolution that lays out its images channels last; its parameters stay as they are."""

    only_calls_layers = True

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = super()._conv_forward(_laid_out(input), weight, bias)
        return _laid_out(out)  # for an image with one channel, both ways are the same, and torch prefers the other


def channels_last(net: nn.Module) -> None:
    """Let the plain convolutions of a net work channels last; parameters and names do not change."""
    for layer in net.modules():
        if type(layer) is nn.Conv2d:
            layer.__class__ = ChannelsLastConv2d
    for parent in net.modules():
        if type(parent) is nn.Sequential:
            parent.__class__ = PoolFirst


class PoolFirst(nn.Sequential):
    """Layers one after another, but each max-pooling before the ReLU in front of it.

    The layers stay where they are: a net may also call some of them, or a part of them, by itself.
    """

    only_calls_layers = True

    def forward(self, input: Tensor) -> Tensor:
        layers = list(self)
        for k, (relu, pool) in enumerate(pairwise(layers)):
            if type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and not are_changed(relu, pool):
                plain = not pool.return_indices and pool.dilation in (1, (1, 1))
                if plain and (not relu.inplace or _is_fresh(layers[:k])):
                    layers[k : k + 2] = pool, relu
        for layer in layers:
            input = layer(input)
        return input


def _is_fresh(before: Sequence[nn.Module]) -> bool:
    """Whether nothing but the next layer has what these layers give, so that nobody sees it being overwritten."""
    return bool(before) and isinstance(before[-1], nn.Conv2d | nn.GroupNorm) and not are_changed(before[-1])


def are_changed(*layers: nn.Module) -> bool:
    """Whether a hook sees what goes into these layers and comes out of them, or one has a ``forward`` of its own."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any("forward" in vars(layer) or any(getattr(layer, kind) for kind in kinds) for layer in layers)


# -- code of the user's own --------------------------------------------------------------------------
def has_own_code(net: nn.Module) -> bool:
    """Whether anything in the net is neither torch's nor fedloom's: a layer, a hook, the ``forward`` of one layer."""
    ours = ("torch.nn.", "fedloom.")
    return any(not type(layer).__module__.startswith(ours) or are_changed(layer) for layer in net.modules())


class ViewsReshape(TorchFunctionMode):
    """``view`` with a shape is ``reshape``: the same numbers, copied where their order in memory makes it necessary."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.view and not kwargs and not isinstance(args[1], torch.dtype):
            func = Tensor.reshape
        elif func is Tensor.view_as:
            func = Tensor.reshape_as
        return func(*args, **(kwargs or {}))


def computes_the_same(net: nn.Module, shape: tuple[int, ...] | None) -> bool:
    """Whether outputs and gradients of a net are the same with channels last, as far as a few inputs can tell.

    Layers of torch and of fedloom alone always give the same.
    """
    if not has_own_code(net):
        return True
    if shape is None:
        return False
    try:
        return all(_agree(net, shape, training) for training in (False, True))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever the user's code does: a net that fails in both orders is refused elsewhere
        return False


def _agree(net: nn.Module, shape: tuple[int, ...], training: bool) -> bool:
    numbers = torch.Generator().manual_seed(0)
    plain = perturbed(net, numbers).train(training)
    other = copy.deepcopy(plain)
    channels_last(other)
    device = next((p.device for p in plain.parameters()), torch.device("cpu"))
    x = torch.randn(3, *shape, generator=numbers).to(device)
    expected = _outputs_and_gradients(plain, x.clone(), nullcontext())
    found = _outputs_and_gradients(other, _laid_out(x), ViewsReshape())
    each = zip(found, expected, strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()), equal_nan=True) for a, b in each)


def perturbed(net: nn.Module, numbers: torch.Generator) -> nn.Module:
    """A copy at other weights: a part whose weights begin at zero would hide what comes before it."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=numbers).to(p))
    return other


def _outputs_and_gradients(net: nn.Module, x: Tensor, reading: AbstractContextManager[Any]) -> list[Tensor]:
    """Of the parameters that are trained; the backward pass runs as it does in training, outside of ``reading``."""
    with torch.enable_grad():
        with reading:
            out = net(x)
        along = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        trained = [p for p in net.parameters() if p.requires_grad]
        found = torch.autograd.grad((out * along).sum(), trained, allow_unused=True, materialize_grads=True)
    return [out.detach(), *found]


def _laid_out(images: Tensor) -> Tensor:
    if images.ndim != 4:
        return images
    try:
        return images.contiguous(memory_format=torch.channels_last)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # vmap knows no memory formats; then the order is as it is
        return images
