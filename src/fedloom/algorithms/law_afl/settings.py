"""The settings of LAW-AFL, and when each has an effect."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from fedloom.core.schema import GIVEN, Spec, other_than, over, under, when
from fedloom.maths.learned_heads import HeadSettings
from fedloom.maths.learned_weights import OF_HEADS, OF_MODELS, Bounds, ShrinkRule, WeightSettings, check_bounds, of_kind

_GRID = (0.0, 0.1, 1.0, math.inf)  # strengths of the prior that cross-validation chooses from

_TRAINS = when(schedule=other_than("frozen"))
_LEARNS = when(schedule=other_than("frozen"), server_epochs=over(0))
_SHRINKS = when(schedule=other_than("frozen"), shrink_rule=other_than("grid", "ratio"))
_GAMMA_TOO = when(schedule=other_than("frozen"), server_epochs=over(0), shrink_rule="law", param=other_than("fixed"))
_GROWS = when(schedule=other_than("frozen"), server_epochs=over(0), shrink_rule="law", param=("exp", "quad")) | when(
    schedule=other_than("frozen"), server_epochs=over(0), shrink_rule="law", param="exp_cap", shrink=under(1)
)
_BOUNDED = _GAMMA_TOO | when(schedule=other_than("frozen"), shrink_rule="ratio")
_WEIGHED = when(share_lambda=False)  # statistics have separate weights
_STEPS = when(share_lambda=False, head_steps=over(0))
_FREE = when(share_lambda=False, head_steps=over(0), prior=other_than("fixed"))
_BY_QUALITY = when(share_lambda=False, quality=("server", "report"))


class LawAFLSettings(Spec):
    """What an experiment can set; the paper's equations as printed are values of these: see the package."""

    schedule: Literal["frozen", "warmup_then_analytic", "per_round"] = Field("frozen", description="see above")
    warmup: Annotated[PositiveInt, when(schedule="warmup_then_analytic")] = Field(
        50, description="rounds of FedLAW before the body is frozen"
    )
    fresh: Annotated[bool, when(schedule="per_round")] = Field(
        False, description="per_round: take statistics of the new body, in rounds between"
    )
    ridge: Literal["grid"] | NonNegativeFloat = Field(
        1e-3, description="rho in units of the mean eigenvalue of G / n; grid: the best of seven on the proxy set"
    )
    sketch: Annotated[PositiveInt | None, _WEIGHED] = Field(
        None, description="features to which statistics are projected while weights are learned; unset: all of them"
    )
    bias: bool = Field(False, description="give the head a bias, as a constant feature")
    prior: Annotated[Literal["cv", "fixed"] | NonNegativeFloat, _WEIGHED] = Field(
        "cv", description="strength beta of the KL prior: a number, by cross-validation, or fixed, that is infinite"
    )
    head_lr: Annotated[PositiveFloat, _STEPS] = Field(0.05, description="learning rate of the weights of statistics")
    head_steps: Annotated[NonNegativeInt, _WEIGHED] = Field(100, description="steps of that; in each fold, at most 60")
    head_loss: Literal["ce", "mse"] = Field("ce", description="what is learned on the proxy set; mse is worse")
    spread: Annotated[NonNegativeFloat, _FREE] = Field(
        0.0, description="weight of sum lambda^2, against concentrating noise for privacy"
    )
    noise_ridge: Annotated[NonNegativeFloat, when({"privacy.feature_clip": GIVEN}, schedule="frozen")] = Field(
        0.5, description="with privacy: k, the least ridge in units of sigma sqrt(d)"
    )
    temperature: PositiveFloat = Field(10.0, description="s at the start: outputs of ridge regression are in [0, 1]")
    quality: Annotated[Literal["size", "server", "report"], _WEIGHED] = Field(
        "size", description="how lambda0 is computed: see above"
    )
    size_factor: Annotated[bool, _BY_QUALITY] = Field(
        True, description="quality times the number of examples; false: eq. 17 as printed"
    )
    verify: bool = Field(True, description="exclude statistics that cannot be sums over examples")
    persist: Annotated[bool, _STEPS] = Field(
        True, description="start from the weight learned for a client earlier, instead of lambda0"
    )
    gate: bool = Field(True, description="keep the previous head, or blend with it, if that is better on the proxy set")
    depth: Annotated[Literal["all", "entropy"], _TRAINS] = Field(
        "all", description="how much of the net a client trains: see above"
    )
    share_lambda: Annotated[bool, when(schedule="per_round")] = Field(
        False, description="per_round: statistics have the weights of models, and nothing else is learned"
    )
    precision: Annotated[Literal["float64", "float32"], when(schedule=other_than("per_round"))] = Field(
        "float64", description="precision of the kept statistics"
    )
    server_epochs: Annotated[NonNegativeInt, _TRAINS] = Field(
        20, description="of FedLAW: passes over the proxy set in a round"
    )
    server_lr: Annotated[PositiveFloat, _LEARNS] = Field(
        0.01, description="of FedLAW: learning rate of the weights of models"
    )
    proxy_batch: Annotated[PositiveInt, _LEARNS] = Field(128, description="of FedLAW: examples in a step of the server")
    param: Annotated[Literal["exp", "quad", "exp_cap", "fixed"], _TRAINS] = Field(
        "exp_cap", description="of FedLAW: what is learned; exp_cap: gamma is at most 1, as the paper says"
    )
    shrink: Annotated[PositiveFloat, _SHRINKS] = Field(
        1.0, description="of FedLAW: gamma at the start of a round; param = fixed keeps it"
    )
    shrink_rule: Annotated[ShrinkRule, _TRAINS] = Field("law", description="of FedLAW: how gamma is set, see fedlaw")
    shrink_min: Annotated[PositiveFloat, _BOUNDED] = Field(OF_MODELS.low, description="of FedLAW: lower bound of gamma")
    shrink_max: Annotated[PositiveFloat, _GROWS] = Field(OF_MODELS.high, description="of FedLAW: upper bound of gamma")
    head_shrink_min: Annotated[PositiveFloat, _STEPS] = Field(OF_HEADS.low, description="the least gamma of statistics")
    head_shrink_max: Annotated[PositiveFloat, _STEPS] = Field(
        OF_HEADS.high, description="the largest gamma of statistics"
    )

    @model_validator(mode="after")
    def _fits_the_schedule(self) -> Self:
        if self.shrink_rule != "law" and self.param == "fixed":
            raise ValueError("shrink_rule and param = 'fixed' both set gamma; keep one of them")
        if self.fresh and self.share_lambda:
            raise ValueError("fresh statistics come from other clients than the models that share_lambda weighs")
        if self.trains and self.shrink_rule == "law" and self.param != "fixed":
            check_bounds(self.shrink, of_kind(self.param, self.model_settings.bounds))
        check_bounds(1.0, self.head_settings.bounds, "head_")
        return self

    @property
    def trains(self) -> bool:
        """Whether the body is ever trained."""
        return self.schedule != "frozen"

    @property
    def model_settings(self) -> WeightSettings:
        """How FedLAW's server learns."""
        bounds = Bounds(self.shrink_min, self.shrink_max)
        return WeightSettings(kind=self.param, lr=self.server_lr, shrink=self.shrink, bounds=bounds)

    @property
    def head_settings(self) -> HeadSettings:
        """How the weights of statistics are learned."""
        one = math.inf if self.prior == "fixed" else self.prior
        return HeadSettings(
            lr=self.head_lr,
            steps=self.head_steps,
            cv_steps=min(60, self.head_steps),
            grid=_GRID if isinstance(one, str) else (one,),
            temperature=self.temperature,
            loss=self.head_loss,
            bounds=Bounds(self.head_shrink_min, self.head_shrink_max),
            spread=self.spread,
        )
