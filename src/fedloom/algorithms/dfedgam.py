"""DFedGAM: DFedAvg whose nodes search for flat minima by the norm of the gradient.

Fang, Hu and Huang, A Decentralized Federated Learning Algorithm Based on Gradient Norm Aware Minimization, 2025,
Algorithm 1. Its local step, with its indices repaired (the loop starts from x_i once, not in every step):

    g = grad F_i(y);   f = grad ||g|| = H g / ||g||;   y <- y - eta grad F_i(y + rho f / ||f||)      then as DFedAvg

It takes the gradient of the loss at the point, rho away, where the gradient is about the longest. The term
rho max ||grad F|| of GAM, which the paper builds on, is never part of the objective: ``rule`` has GAM itself as
``gam_exact`` and ``gam_fd``, and its authors' accelerated form as ``gam_repo``. f is found by a finite difference
(one gradient more), a central one (two), or an exact Hessian-vector product (worth two). On nets with ReLU these are
different methods: a difference sees the kinks that a derivative does not. With products shorter than float32 it would
be mostly rounding, so differences use ``engine.precision = "fp32"`` unless you set it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedloom.algorithm import Configures, Model, Nothing, Traits
from fedloom.algorithms.dfedavg import DFedAvg
from fedloom.core.schema import when
from fedloom.core.task import Batch
from fedloom.maths.sharpness import Gam, InnerDecay, Product, RhoSchedule, Rule, cost, gam, scheduled

_BY_DIFFERENCES = when(rule=("gam_fd", "gam_repo")) | when(rule="paper", hvp=("fd", "central"))
_GAM = when(rule=("gam_exact", "gam_fd"))
_REPO = when(rule="gam_repo")


class DFedGAM(DFedAvg, Configures):
    rho: NonNegativeFloat = Field(0.2, description="radius in which a step looks for the longest gradient")
    rho_schedule: RhoSchedule = "const"
    wd_inside: InnerDecay = 0.0
    rule: Rule = Field(
        "paper", description="the step: the paper's, GAM's (exact or by differences), or that of GAM's authors' code"
    )
    hvp: Annotated[Product, when(rule="paper")] = Field(
        "fd", description="how H g is computed: by a difference, a central difference, or exactly"
    )
    rho_fd: Annotated[float, _BY_DIFFERENCES] = Field(0.03, ge=1e-4, le=0.5, description="length of the difference")
    alpha: Annotated[NonNegativeFloat, _GAM] = Field(0.1, description="weight of the flatness term")
    beta0: Annotated[NonNegativeFloat, _REPO] = Field(0.1, description="the weight of the far gradient is |1 - beta0|")
    beta1: Annotated[float, _REPO] = Field(0.1, ge=0, le=1, description="weight of the near perturbed gradient")
    gamma: Annotated[NonNegativeFloat, _REPO] = Field(0.05, description="weight of the perpendicular part")
    tau: Annotated[PositiveFloat, _BY_DIFFERENCES] = Field(
        1e-6, description="a difference of gradients shorter than tau ||g|| counts as rounding"
    )

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        exact = self.rule == "gam_exact" or (self.rule == "paper" and self.hvp == "exact")
        return {} if exact or not self.rho else {"engine": {"precision": "fp32"}}

    @property
    def how(self) -> Gam:
        shape = (self.rho_fd, self.alpha, self.beta0, self.beta1, self.gamma, self.tau, self.wd_inside)
        return Gam(self.rho, self.rule, self.hvp, *shape)

    @property
    def traits(self) -> Traits:
        return super().traits._replace(gradients_per_step=cost(self.how))

    def gradient(self, x: Tensor, batch: Batch, down: Model, mine: Nothing) -> Tensor:
        scale = scheduled(self.rho_schedule, batch.lr, self.setup.first_lr)
        return gam(self.task, x, batch, self.how._replace(scale=scale))
