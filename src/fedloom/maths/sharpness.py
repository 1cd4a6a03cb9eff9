"""Gradients for flat minima: taken where the loss, or the norm of its gradient, rises most nearby.

    SAM   (Foret et al., 2021):  g~ = grad F(y + rho g / ||g||),                      g = grad F(y)
    GAM   (Zhang et al., 2023):  g~ looks along  f = grad ||grad F(y)|| = H g / ||g||,  H the Hessian at y

All gradients of one step see the same batch, with the same augmentation and the same dropout. The optimizer's weight
decay is not in F: it is applied to the final gradient. ``decay`` adds it to F, and so to every gradient.

The flatness of a minimum is measured by the same quantities (DFedGAM, eq. 4 and Lemma 3.1), over all ||d|| <= rho:

    R0 = max F(y + d) - F(y)              R1 = rho max ||grad F(y + d)||              R0 <= R1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, TypeAlias

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedloom.core import rng
from fedloom.core.task import Batch, Task

Rule: TypeAlias = Literal["paper", "gam_exact", "gam_fd", "gam_repo"]
Product: TypeAlias = Literal["fd", "central", "exact"]
RhoSchedule: TypeAlias = Annotated[
    Literal["const", "prop_lr"],
    Field(description="over rounds: rho is constant, or decays with the learning rate"),
]
InnerDecay: TypeAlias = Annotated[
    NonNegativeFloat,
    Field(description="weight decay as a part of the loss, in every gradient; local.weight_decay acts after them"),
]

_NOTHING = 1e-12  # a gradient no longer than this has no direction
_CLIMBS = 10  # steps of the search for a largest value


def scheduled(schedule: RhoSchedule, lr: Tensor, first_lr: float) -> Tensor | float:
    """What rho is multiplied by at this learning rate."""
    return lr / first_lr if schedule == "prop_lr" else 1.0


class Gam(NamedTuple):
    """The settings of a gradient-norm-aware step."""

    rho: float  # radius of the search; 0: none
    rule: Rule = "paper"
    product: Product = "fd"  # how H g / ||g|| is computed
    reach: float = 0.03  # rho': length of a finite difference
    alpha: float = 0.1  # gam_exact, gam_fd: weight of the flatness term
    beta0: float = 0.1  # gam_repo
    beta1: float = 0.1
    gamma: float = 0.05
    tau: float = 1e-6  # a difference of gradients shorter than tau ||g|| is rounding
    decay: float = 0.0  # weight decay as a part of F
    scale: Tensor | float = 1.0  # of rho, in this step


class Surface(NamedTuple):
    """F for one batch: the loss and, if it is a part of it, weight decay."""

    task: Task
    batch: Batch
    decay: float = 0.0

    def gradient(self, at: Tensor) -> Tensor:
        """grad F(at)."""
        g = self.task.grad(at, self.batch)
        return g + self.decay * at if self.decay else g

    def hvp(self, at: Tensor, v: Tensor) -> Tensor:
        """H v, with the Hessian of F at this point."""
        product = self.task.hvp(at, self.batch, v)
        return product + self.decay * v if self.decay else product


def toward(v: Tensor, length: Tensor | float, floor: Tensor | float = _NOTHING) -> Tensor:
    """``v`` scaled to this length, or zero if it is no longer than ``floor``."""
    norm = torch.linalg.vector_norm(v)
    return torch.where(norm > floor, length * v / norm.clamp(min=_NOTHING), torch.zeros_like(v))


def sam(task: Task, y: Tensor, batch: Batch, rho: float, *, decay: float = 0.0, scale: Tensor | float = 1.0) -> Tensor:
    """The gradient at the point, rho (times ``scale``) away, where F is about the largest."""
    surface = Surface(task, batch, decay)
    g = surface.gradient(y)
    return surface.gradient(y + toward(g, rho * scale)) if rho else g


def gam(task: Task, y: Tensor, batch: Batch, how: Gam) -> Tensor:
    """The direction of a gradient-norm-aware step, by the chosen rule."""
    surface = Surface(task, batch, how.decay)
    g0 = surface.gradient(y)
    if not how.rho:
        return g0
    if how.rule == "paper":
        return surface.gradient(y + steepest(surface, y, g0, how))
    if how.rule == "gam_exact":
        return g0 + how.alpha * _flatness(surface, y, g0, how.rho * how.scale)
    return (_accelerated if how.rule == "gam_repo" else _by_differences)(surface, y, g0, how)


def steepest(surface: Surface, y: Tensor, g0: Tensor, how: Gam) -> Tensor:
    """delta = rho f / ||f||: where, rho away, the gradient is about the longest; zero if f is rounding."""
    if how.product == "exact":
        return toward(surface.hvp(y, toward(g0, 1.0)), how.rho * how.scale)
    step = toward(g0, how.reach)
    before = g0 if how.product == "fd" else surface.gradient(y - step)
    return _along(surface.gradient(y + step) - before, g0, how)


def _along(difference: Tensor, g0: Tensor, how: Gam) -> Tensor:
    """A vector of length rho along a difference of gradients; zero if that is only rounding."""
    return toward(difference, how.rho * how.scale, (how.tau * torch.linalg.vector_norm(g0)).clamp(min=_NOTHING))


def _flatness(surface: Surface, y: Tensor, g0: Tensor, rho: Tensor | float) -> Tensor:
    """The gradient of rho ||grad F|| at the point, rho away, where it is about the longest."""
    there = y + toward(surface.hvp(y, toward(g0, 1.0)), rho)
    return rho * surface.hvp(there, toward(surface.gradient(there), 1.0))


def _gradients(surface: Surface, y: Tensor, g0: Tensor, how: Gam) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients at rho' along g0; at the point, rho away, where it is about the longest; and from there at rho'
    along that gradient."""
    g1 = surface.gradient(y + toward(g0, how.reach))
    there = y + _along(g1 - g0, g0, how)
    g2 = surface.gradient(there)
    return g1, g2, surface.gradient(there + toward(g2, how.reach))


def _by_differences(surface: Surface, y: Tensor, g0: Tensor, how: Gam) -> Tensor:
    """g0 + (alpha rho / rho') (g3 - g2)."""
    _, g2, g3 = _gradients(surface, y, g0, how)
    return g0 + how.alpha * how.rho * how.scale / how.reach * (g3 - g2)


def _accelerated(surface: Surface, y: Tensor, g0: Tensor, how: Gam) -> Tensor:
    """What the authors' code does: G - gamma M', with M' the part of M that is perpendicular to G.

    Their text calls beta0 the weight of g0; their code gives g0 the weight 1, and g2 the weight |1 - beta0|.
    """
    g1, g2, g3 = _gradients(surface, y, g0, how)
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


# -- the flatness of a minimum ---------------------------------------------------------------------
class Flatness(NamedTuple):
    """The largest values that were found; the true ones are no smaller."""

    r0: float
    r1: float


class Landscape(NamedTuple):
    """A function whose flatness is measured."""

    value_and_gradient: Callable[[Tensor], tuple[Tensor, Tensor]]
    hvp: Callable[[Tensor, Tensor], Tensor]  # (at, v) -> H v


def flatness(f: Landscape, y: Tensor, rho: float) -> Flatness:
    """R0 and R1 at ``y``, by climbing on the sphere: d <- rho s / ||s||, s the gradient at y + d of what is maximised.

    From d = 0 the first step is SAM's for R0, and DFedGAM's for R1. A minimum, where there is no gradient, needs a
    second start: a random direction, always the same. If the function is convex, no step decreases it; on a quadratic
    it is the power method.
    """
    value, _ = f.value_and_gradient(y)
    chance = rng.uniform(0, "flatness", torch.arange(len(y), device=y.device)).to(y) - 0.5
    starts = (torch.zeros_like(y), toward(chance, rho))
    seen: list[tuple[float, float]] = []

    def look(d: Tensor) -> Tensor:
        there, g = f.value_and_gradient(y + d)
        seen.append((float(there - value), float(torch.linalg.vector_norm(g))))
        return g

    def climb(d: Tensor, upward: Callable[[Tensor], Tensor]) -> None:
        for _ in range(_CLIMBS):
            d = toward(upward(d), rho)
        look(d)

    for start in starts:
        climb(start, look)
        climb(start, lambda d: f.hvp(y + d, toward(look(d), 1.0)))
    rises, lengths = zip(*seen, strict=True)
    return Flatness(max(rises), rho * max(lengths))
