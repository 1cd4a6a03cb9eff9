"""Differential privacy of what clients send: its settings.

The unit is a client (``clip``): epsilon bounds how much can be learned, from everything the server ever receives, about
whether a client took part with its data. There are two mechanisms (``fedloom.trust.mechanism``):

    upload   u <- u min(1, S / ||u||), the norm over all tensors together, then u + N(0, s^2)
    distributed   s = z S / sqrt(m) for each of the m clients of a round, so that their sum has z S; the server is
                  assumed to see only that sum, and so a random choice of clients helps
    local         s = z S for each client; the server sees every upload, and a random choice of clients does not help

Clients of a closed form send sums over examples instead, once. There the unit is an example (``feature_clip``):

    x <- x min(1, R / ||x||) before it is summed: one example changes (G, B) by D = sqrt(R^4 + R^2) at most, which
    replaces S above; D = sqrt(R^4 + R^2 + 1) if counts of classes are sent as well

Clients of LAW-AFL's Algorithm 3 send both in every round (line 9). There the unit is a client again: with ``clip`` and
``feature_clip``, updates are clipped to S, and clients send means over their examples instead of sums, whose norm is at
most D for any data. Each has its own noise, z S and z D, so that a round is two uses of the mechanism.

Clients without examples do not take part: that a client has any examples at all is not hidden. All clients have the
same weight, since a weight would reveal how much data a client has.

Noise may grow with how unequal a client's labels are (``fedloom.trust.heterogeneity``), by a factor f_i >= 1 from a
noised histogram of them (LAW-AFL, eq. 24, corrected): the guarantee stays that of f_i = 1, and the histogram is charged
once. As printed (``eq24``), sigma = sigma_base sigma_ref / (alpha + eps) with the alpha of the experiment, which no
client knows and which is the same for all: noise is z sigma_ref / alpha for every client, less than z if alpha is
large, and the reported epsilon is that of this noise.

The choice of clients is drawn from the run's secret key if epsilon relies on its being unknown. What was released
is recorded in a ledger (``fedloom.trust.ledger``), which only grows; epsilon follows from it alone
(``fedloom.trust.accountant``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from fedloom.core.schema import GIVEN, Spec, when

SMOOTH = 1e-8  # avoids a division by a concentration of 0


_ON = when(clip=GIVEN) | when(feature_clip=GIVEN)


class Privacy(Spec):
    """How uploads are protected; they are not, unless ``clip`` or ``feature_clip`` is set."""

    clip: PositiveFloat | None = Field(
        None, description="S: largest norm of an upload, all its tensors together; unset: no privacy of clients"
    )
    feature_clip: PositiveFloat | None = Field(
        None,
        description="R, with closed forms instead of clip, or with clip if models are trained as well: largest norm "
        "of an example's features, including a bias; unset: no privacy of examples",
    )
    cross_scale: Annotated[PositiveFloat, when(feature_clip=GIVEN)] = Field(
        1.0, description="of feature_clip: B is multiplied by it before noise is added, and divided by it afterwards"
    )
    noise: NonNegativeFloat | None = Field(
        None, description="z: deviation of the noise, in units of S, or of the sensitivity to one example; 0: only clip"
    )
    noise_from: Annotated[Literal["secret", "seed"], _ON] = Field(
        "secret",
        description="source of the noise: a random key of the run, kept in its folder; or the seed, so that the run "
        "can be repeated and its noise subtracted, which simulates privacy and gives none",
    )
    epsilon: PositiveFloat | None = Field(None, description="the budget of all rounds, from which z is calibrated")
    delta: Annotated[float, _ON] = Field(1e-5, gt=0, lt=1, description="the delta for which epsilon is reported")
    mechanism: Annotated[Literal["distributed", "local"], _ON] = Field(
        "distributed", description="the sum of a round has deviation z S and only it is seen; or every upload has it"
    )
    heterogeneity: Annotated[Literal["none", "alpha", "entropy", "eq24"], _ON] = Field(
        "none",
        description="more noise for clients with unequal labels, by how concentrated these are; eq24: as printed, the "
        "same for all",
    )
    concentration: PositiveFloat | None = Field(
        None, description="of eq24: the alpha of the Dirichlet distribution, which the experimenter knows"
    )
    reference: Annotated[PositiveFloat, when(heterogeneity=("alpha", "eq24"))] = Field(
        0.1, description="of alpha: the concentration at and above which noise is plain; of eq24: sigma_ref"
    )
    slope: Annotated[NonNegativeFloat, when(heterogeneity="entropy")] = Field(
        1.0, description="of entropy: the factor is 1 + slope (1 - H / ln C)"
    )
    most: Annotated[float, when(heterogeneity=("alpha", "entropy"))] = Field(
        4.0, ge=1, description="largest factor by which a client's noise grows"
    )
    histogram_epsilon: Annotated[PositiveFloat, when(heterogeneity=("alpha", "entropy"))] = Field(
        0.1, description="what the noised histogram of a client's labels costs, once"
    )

    @model_validator(mode="after")
    def _complete(self) -> Privacy:
        if self.noise is not None and self.epsilon is not None:
            raise ValueError("noise and epsilon both set the amount of noise; keep one of them")
        given = self.noise is not None or self.epsilon is not None
        if given and not self.on:
            what = "set clip, the largest norm of an upload, or, with a closed form, feature_clip"
            raise ValueError(f"noise hides only what is bounded; {what}")
        if self.on and not given:
            raise ValueError("clip alone gives no privacy; set noise, or epsilon from which it is calibrated")
        if self.clip is None and self.asks_for_labels:
            raise ValueError(
                "heterogeneity is for clip: its histograms protect clients, but feature_clip protects examples"
            )
        if (self.heterogeneity == "eq24") != (self.concentration is not None):
            raise ValueError("heterogeneity = 'eq24' and concentration, its alpha, belong together; set both")
        if self.heterogeneity == "eq24" and self.epsilon is not None:
            raise ValueError("'eq24' scales the noise that is set, and epsilon would calibrate it away; set noise")
        return self

    @property
    def on(self) -> bool:
        return self.clip is not None or self.feature_clip is not None

    @property
    def multiplier(self) -> float:
        """z of every client, as the accountant gets it; 0 if it is still to be calibrated."""
        scale = 1.0 if self.concentration is None else self.reference / (self.concentration + SMOOTH)
        return scale * (self.noise or 0.0)

    @property
    def asks_for_labels(self) -> bool:
        """Whether clients release a histogram of their labels."""
        return self.on and self.heterogeneity in ("alpha", "entropy")
