"""Gradients that look for flat minima: taken where the loss, or the length of its gradient, is about to rise most.

    SAM   (Foret et al., 2021):  g~ = grad F(y + rho g / ||g||),                      g = grad F(y)
    GAM   (Zhang et al., 2023):  g~ looks along  f = grad ||grad F(y)|| = H g / ||g||,  H the Hessian at y

All gradients of one step see the same batch, with the same augmentation and the same dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedloom.task import Batch, Task

Rule: TypeAlias = Literal["paper", "gam_exact", "gam_fd", "gam_repo"]
Product: TypeAlias = Literal["fd", "central", "exact"]
Slope: TypeAlias = Callable[[Tensor], Tensor]  # the gradient at a point, for one batch

_NOTHING = 1e-12  # a gradient no longer than this has no direction


class Gam(NamedTuple):
    """The settings of a gradient-norm-aware step."""

    rho: float  # how far it looks
    rule: Rule = "paper"
    product: Product = "fd"  # how H g / ||g|| is found
    reach: float = 0.03  # rho': how far a finite difference reaches
    alpha: float = 0.1  # gam_exact, gam_fd: weight of the flatness term
    beta0: float = 0.1  # gam_repo
    beta1: float = 0.1
    gamma: float = 0.05
    tau: float = 1e-6  # a difference of gradients shorter than tau ||g|| is rounding


def toward(v: Tensor, length: float, floor: Tensor | float = _NOTHING) -> Tensor:
    """``v`` made so long, or nothing where it is no longer than ``floor``."""
    norm = torch.linalg.vector_norm(v)
    return torch.where(norm > floor, length * v / norm.clamp(min=_NOTHING), torch.zeros_like(v))


def sam(task: Task, y: Tensor, batch: Batch, rho: float) -> Tensor:
    """The gradient at the point, rho away, where the loss is about the largest."""
    g = task.grad(y, batch)
    return task.grad(y + toward(g, rho), batch) if rho else g


def gam(task: Task, y: Tensor, batch: Batch, how: Gam) -> Tensor:
    """The direction of a gradient-norm-aware step, by the chosen rule."""
    g0 = task.grad(y, batch)
    if not how.rho:
        return g0

    def slope(at: Tensor) -> Tensor:
        return task.grad(at, batch)

    if how.rule == "paper":
        return slope(y + steepest(task, y, batch, g0, how))
    if how.rule == "gam_exact":
        return g0 + how.alpha * _flatness(task, y, batch, g0, how.rho)
    return (_accelerated if how.rule == "gam_repo" else _by_differences)(slope, y, g0, how)


def steepest(task: Task, y: Tensor, batch: Batch, g0: Tensor, how: Gam) -> Tensor:
    """delta = rho f / ||f||: where, rho away, the gradient is about the longest; nothing where f is rounding."""
    if how.product == "exact":
        return toward(task.bend(y, batch, toward(g0, 1.0)), how.rho)
    step = toward(g0, how.reach)
    before = g0 if how.product == "fd" else task.grad(y - step, batch)
    return _along(task.grad(y + step, batch) - before, g0, how)


def _along(difference: Tensor, g0: Tensor, how: Gam) -> Tensor:
    """rho long, along a difference of gradients; nothing where that is rounding, whose direction says nothing."""
    return toward(difference, how.rho, (how.tau * torch.linalg.vector_norm(g0)).clamp(min=_NOTHING))


def _flatness(task: Task, y: Tensor, batch: Batch, g0: Tensor, rho: float) -> Tensor:
    """The gradient of rho ||grad F|| at the point, rho away, where it is about the longest."""
    there = y + toward(task.bend(y, batch, toward(g0, 1.0)), rho)
    return rho * task.bend(there, batch, toward(task.grad(there, batch), 1.0))


def _slopes(slope: Slope, y: Tensor, g0: Tensor, how: Gam) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients rho' along g0; at the point, rho away, where it is about the longest; and rho' along that one
    from there."""
    g1 = slope(y + toward(g0, how.reach))
    there = y + _along(g1 - g0, g0, how)
    g2 = slope(there)
    return g1, g2, slope(there + toward(g2, how.reach))


def _by_differences(slope: Slope, y: Tensor, g0: Tensor, how: Gam) -> Tensor:
    """g0 + (alpha rho / rho') (g3 - g2)."""
    _, g2, g3 = _slopes(slope, y, g0, how)
    return g0 + how.alpha * how.rho / how.reach * (g3 - g2)


def _accelerated(slope: Slope, y: Tensor, g0: Tensor, how: Gam) -> Tensor:
    """What the authors' code does: G - gamma M', with M' the part of M that is perpendicular to G.

    Their text calls beta0 the weight of g0; their code gives g0 the weight 1, and g2 the weight |1 - beta0|.
    """
    g1, g2, g3 = _slopes(slope, y, g0, how)
    G = how.beta1 * g1 + (1 - how.beta1) * g3
    M = g0 + abs(1 - how.beta0) * g2
    across = M - (M @ G) / (G @ G).clamp(min=_NOTHING**2) * G
    return G - how.gamma * across


def cost(how: Gam) -> float:
    """Gradients of one batch that a step takes; a Hessian-vector product counts as two."""
    if not how.rho:
        return 1.0
    if how.rule == "paper":
        return {"fd": 3.0, "central": 4.0, "exact": 4.0}[how.product]
    return 6.0 if how.rule == "gam_exact" else 4.0
