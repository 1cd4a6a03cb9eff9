"""Steps turned into machine code by torch's compiler.

A step is traced to plain operations first, so that the compiler sees no Python, and any algorithm that runs in lanes
can be compiled.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedloom.core import tree
from fedloom.engine.rewrites import Parts, in_parts, rewrite

# Multiplications of a matrix product up to which the compiler inlines it as loops instead of calling a library, whose
# call takes longer than the product.
_SMALL_PRODUCT = 1 << 14
# Sums of many terms are not stored half-way: those of thin products have two reads for each.
_UNBROKEN = {"realize_acc_reads_threshold": 64, "realize_opcount_threshold": 128}


def has_cpp_compiler() -> bool:
    """Whether there is a C++ compiler, which torch.compile needs on a CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name)


def compiled(step: Callable[..., None], inputs: tuple[Any, ...], *, small: bool) -> Callable[..., None]:
    """``step``, a function of trees of tensors that writes into some of them, for trees like ``inputs``.

    ``small``: on a CPU, if the work is so short that starting a second thread would cost more, and so would calling
    matrix libraries.
    """

    def flat(*tensors: Tensor) -> None:
        step(*tree.unflatten(inputs, tensors))

    from torch._inductor import standalone_compile  # which takes longer to import than a short run

    leaves: list[Any] = tree.leaves(inputs)
    parts: list[Parts] = [[] for _ in leaves]
    how: Any = {"config_patches": {"cpp.threads": 1} if small else _UNBROKEN}
    with warnings.catch_warnings():  # the compiler's advice on other settings
        warnings.simplefilter("ignore")
        with _libraries_are_hashed():
            traced = make_fx(flat, decomposition_table=_AS_LOOPS if small else _FUSIBLE)(*leaves)
        if not small:
            parts = rewrite(traced.graph)
            traced.recompile()
        # Not torch.compile: it would trace what is traced already, and check before each call whether inputs changed.
        split: list[Any] = list(in_parts(leaves, parts))
        fused: Any = standalone_compile(traced, split, dynamic_shapes="from_example_inputs", options=how)
        fused(*split)
    return lambda *given: fused(*in_parts(tree.leaves(given), parts))


@contextmanager
def _libraries_are_hashed() -> Iterator[None]:
    """Read what the compiler's cache asks for meanwhile: the hashes of torch's files and of Triton's, 400 MB.

    The compiler computes them in any case, but after the step was traced. The names are torch's own: if a release lacks
    them, it does that as before.
    """
    from torch._inductor import codecache

    def read() -> None:
        with suppress(Exception):  # the compiler will meet it, too
            codecache.torch_key()
            codecache.CacheBase.get_system()

    thread = Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _product(a: Tensor, b: Tensor) -> Any:
    """``a @ b`` as a sum, if it is small.  ``[..., m, n]``"""
    if a.shape[-2] * a.shape[-1] * b.shape[-1] > _SMALL_PRODUCT:
        return NotImplemented
    return (a.unsqueeze(-2) * b.transpose(-1, -2).unsqueeze(-3)).sum(-1)


def _scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """``x.scatter_add(dim, index, source)`` if one number is added to each row, as in the gradient of a loss."""
    at = dim % x.ndim
    if index.shape != source.shape or index.shape != (*x.shape[:at], 1, *x.shape[at + 1 :]):
        return NotImplemented
    place = torch.arange(x.shape[at], device=x.device).view([-1 if k == at else 1 for k in range(x.ndim)])
    return x + torch.where(place == index, source, 0)


def _group_norm(
    x: Tensor, weight: Any, bias: Any, images: int, channels: int, pixels: int, groups: int, eps: float
) -> Any:
    """``native_group_norm`` without weights, whose sums over pixels are those of channels, which lie side by side.

    They are of distances from the first pixel, so that large means do not hide small differences. Digits are lost where
    that pixel alone is far from all others: an error of 6e-5 at a thousand deviations, in an image of 32 x 32.
    """
    if weight is not None or bias is not None or x.dtype == torch.float64:
        return NotImplemented
    whole, each = x.float(), channels // groups
    flat = whole.reshape(images, channels, pixels)
    first = flat[:, :, :1]
    apart = flat - first
    off = apart.sum(-1) / pixels  # the mean of a channel, from its first pixel
    within = (apart * apart).sum(-1) - pixels * off * off
    means = (off + first.squeeze(-1)).view(images, groups, each)
    mean = means.mean(-1)
    between = pixels * (means - mean[..., None]).square().sum(-1)
    variance = (within.view(images, groups, each).sum(-1) + between).clamp(min=0) / (pixels * each)
    scale = (variance + eps).rsqrt()
    shape = (images, channels, *[1] * (x.ndim - 2))
    shift, factor = (y.repeat_interleave(each, 1).view(shape) for y in (mean, scale))
    return tuple(y.to(x.dtype) for y in ((whole - shift) * factor, mean, scale))


# Operations as others that the compiler fuses with what is before and after them, and on a CPU also small products.
_FUSIBLE: Any = {
    torch.ops.aten.scatter_add.default: _scatter_add,
    torch.ops.aten.native_group_norm.default: _group_norm,
}
_AS_LOOPS: Any = {torch.ops.aten.mm.default: _product, torch.ops.aten.bmm.default: _product, **_FUSIBLE}
