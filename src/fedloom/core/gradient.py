"""Gradients under ``torch.func.vmap``, without importing torch's compiler.

``torch.func.grad_and_value`` asks torch._dynamo whether autograd is being compiled. The first question imports all of
torch._dynamo, which takes longer than a short run. ``value_and_gradient`` takes the same steps without the question;
in compiled code, use torch's own function. The steps are private functions of torch: if a release lacks them,
torch's own function is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedloom.core import tree

try:
    from torch._C._functorch import _unwrap_for_grad, _wrap_for_grad
    from torch._functorch.eager_transforms import _create_differentiable, grad_increment_nesting
except ImportError:  # pragma: no cover
    HAS_STEPS = False
else:
    HAS_STEPS = True

X = TypeVar("X")


def value_and_gradient(f: Callable[[X], Tensor], x: X) -> tuple[Tensor, X]:
    """The value of the scalar function ``f`` at the tree ``x`` and its gradient, as by ``grad_and_value``."""
    if not HAS_STEPS:
        gradient, value = grad_and_value(f)(x)
        return value, gradient
    with grad_increment_nesting() as level, torch.enable_grad():
        point = tree.tmap(lambda leaf: _create_differentiable(_wrap_for_grad(leaf, level), level), x)
        at, leaves = f(point), tree.leaves(point)
        if at.requires_grad:
            found = torch.autograd.grad(at, leaves, create_graph=True, materialize_grads=True)
        else:  # a constant
            found = tuple(torch.zeros_like(leaf) for leaf in leaves)
        slope = [_unwrap_for_grad(each, level) for each in found]
        return _unwrap_for_grad(at, level), tree.unflatten(x, slope)
