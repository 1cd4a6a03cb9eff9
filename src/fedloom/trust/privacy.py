"""Differential privacy of what clients send: its settings.

The unit is a client (``clip``): epsilon bounds how much can be learned, from everything the server ever receives, about
whether a client took part with its data. There are two mechanisms (``fedloom.trust.mechanism``):

    upload   u <- u min(1, S / ||u||), the norm over all tensors together, then u + N(0, s^2)
    distributed   s = z S / sqrt(m) for each of the m clients of a round, so that their sum has z S; the server is
                  assumed to see only that sum, and so a random choice of clients helps
    local         s = z S for each client; the server sees every upload, and a random choice of clients does not help

Clients of a closed form send sums over examples instead, once. There the unit is an example (``feature_clip``):

    x <- x min(1, R / ||x||) before it is summed: one example moves (G, B) by D = sqrt(R^4 + R^2) at most, which
    replaces S above; D = sqrt(R^4 + R^2 + 1) where counts of classes are sent as well

Clients of LAW-AFL's Algorithm 3 send both in every round (line 9). There the unit is a client again: with ``clip`` and
``feature_clip``, moves are clipped to S, and clients send means over their examples instead of sums, whose norm is at
most D whatever the data. Each has its own noise, z S and z D, so that a round is two uses of the mechanism.

Clients without examples do not take part: that a client has any examples at all is not hidden. All clients have the
same weight, since a weight would reveal how much data a client has.

Noise may grow with how unequal a client's labels are (``fedloom.trust.heterogeneity``), by a factor f_i >= 1 from a
noised histogram of them (LAW-AFL, eq. 24, corrected): the guarantee stays that of f_i = 1, and the histogram is charged
once. As printed (``eq24``), sigma = sigma_base sigma_ref / (alpha + eps) with the alpha of the experiment, which no
client knows and which is the same for all: noise is z sigma_ref / alpha for every client, less than z where alpha is
large, and the reported epsilon is that of this noise.

The choice of clients is drawn from the run's secret key where epsilon relies on its being unknown. What was released
is kept in a ledger (``fedloom.trust.ledger``), which only grows; epsilon follows from it alone
(``fedloom.trust.accountant``).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from fedloom.algorithm.capabilities import private_sums
from fedloom.core import tree
from fedloom.core.errors import Fault
from fedloom.core.schema import Spec

SMOOTH = 1e-8  # so that a concentration of 0 does not divide


class Privacy(Spec):
    """How uploads are protected; they are not, unless ``clip`` or ``feature_clip`` is set."""

    clip: PositiveFloat | None = Field(
        None, description="S: largest norm of an upload, all its tensors together; unset: no privacy of clients"
    )
    feature_clip: PositiveFloat | None = Field(
        None,
        description="R, with closed forms instead of clip, or with clip where models are trained as well: largest norm "
        "of an example's features, including a bias; unset: no privacy of examples",
    )
    cross_scale: PositiveFloat = Field(
        1.0, description="of feature_clip: B is multiplied by it before noise is added, and divided by it afterwards"
    )
    noise: NonNegativeFloat | None = Field(
        None, description="z: deviation of the noise, in units of S, or of what one example can move; 0: only clip"
    )
    noise_from: Literal["secret", "seed"] = Field(
        "secret",
        description="source of the noise: a random key of the run, kept in its folder; or the seed, so that the run "
        "can be repeated and its noise subtracted, which simulates privacy and gives none",
    )
    epsilon: PositiveFloat | None = Field(None, description="the budget of all rounds, from which z is calibrated")
    delta: float = Field(1e-5, gt=0, lt=1, description="the delta for which epsilon is reported")
    mechanism: Literal["distributed", "local"] = Field(
        "distributed", description="the sum of a round has deviation z S and only it is seen; or every upload has it"
    )
    heterogeneity: Literal["none", "alpha", "entropy", "eq24"] = Field(
        "none",
        description="more noise for clients with unequal labels, by how concentrated these are; eq24: as printed, the "
        "same for all",
    )
    concentration: PositiveFloat | None = Field(
        None, description="of eq24: the alpha of the Dirichlet distribution, which the experimenter knows"
    )
    reference: PositiveFloat = Field(
        0.1, description="of alpha: the concentration at and above which noise is plain; of eq24: sigma_ref"
    )
    slope: NonNegativeFloat = Field(1.0, description="of entropy: the factor is 1 + slope (1 - H / ln C)")
    most: float = Field(4.0, ge=1, description="largest factor by which a client's noise grows")
    histogram_epsilon: PositiveFloat = Field(
        0.1, description="what the noised histogram of a client's labels costs, once"
    )

    @model_validator(mode="after")
    def _complete(self) -> Privacy:
        if self.noise is not None and self.epsilon is not None:
            raise ValueError("noise and epsilon both say how much noise there is; keep one of them")
        given = self.noise is not None or self.epsilon is not None
        changed = [k for k, field in type(self).model_fields.items() if getattr(self, k) != field.default]
        if changed and not given and not self.on:
            raise ValueError(
                f"{changed[0]} is set, but nothing is protected; set clip, or, with a closed form, feature_clip"
            )
        if given and not self.on:
            what = "set clip, the largest norm of an upload, or, with a closed form, feature_clip"
            raise ValueError(f"noise hides only what is bounded; {what}")
        if self.on and not given:
            raise ValueError("clip alone is no privacy; set noise, or epsilon from which it is calibrated")
        if self.clip is None and self.asks_for_labels:
            raise ValueError("heterogeneity is for clip: its histograms hide clients, and feature_clip hides examples")
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


# -- what cannot be accounted for ------------------------------------------------------------------
def conflicts(how: Privacy, alg: Any, sampling: str, system: Any, rule: str) -> list[Fault]:
    """Settings under which the reported epsilon would not be true."""
    if not how.on:
        return []
    sums = private_sums(alg)
    both = sums is not None and sums.sends_moves_and_sums
    if both or (how.clip is not None and how.feature_clip is not None):
        return _of_both(how, alg, sampling, system)
    if how.feature_clip is not None:
        return _of_sums(how, alg, sampling, system)
    name, faults = type(alg).__name__, []
    if alg.family in ("gossip", "closed_form") or not alg.traits.communicates:
        what = f"covers clients that send updates to a server, which those of {name} do not"
        local = " and privacy.mechanism=local" if alg.traits.each_upload and how.mechanism != "local" else ""
        fix = f"set privacy.feature_clip{local} instead" if sums is not None else "leave the section out"
        return [Fault("privacy.clip", f"{what} (got {how.clip:g})", fix)]
    if alg.traits.each_upload and how.mechanism == "distributed":
        what = f"hides single uploads in their sum, and {name} reads every one of them"
        fix = (
            "set privacy.mechanism=local" if alg.traits.tolerates_noise else "take an algorithm that only sums uploads"
        )
        faults.append(Fault("privacy.mechanism", f"'distributed' {what}", fix))
    elif alg.traits.each_upload and not alg.traits.tolerates_noise:
        what = f"{name} is not linear in its uploads, and how it bears their noise is not known"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", "take an algorithm that only sums uploads"))
    if alg.traits.mirrored:
        what = f"changes what clients of {name} send, but not what they keep, so that server and clients would disagree"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", "take an algorithm without such states"))
    if alg.traits.size_varies:
        what = f"the size of what a client of {name} sends depends on its data, which no noise hides"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", "take another algorithm"))
    if alg.traits.weighs_examples and not alg.traits.equal_if_private:
        what = f"{name} weighs clients by their data, which the weights would tell"
        fix = "set algorithm.weighting=uniform" if hasattr(alg, "weighting") else "let it count clients alike"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", fix))
    if alg.traits.unit_uploads and how.clip != 1:
        what = f"uploads of {name} are no longer than 1, since it clips moves by a rule of its own"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", "set privacy.clip=1"))
    if sampling == "proportional":
        what = "'proportional' draws clients by how much data they have, which is not accounted for"
        faults.append(Fault("cohort.sampling", what, "use poisson, uniform or all"))
    if rule != "mean" and how.mechanism == "distributed":
        what = f"'{rule}' needs every upload, and under privacy.mechanism = 'distributed' there is only their sum"
        faults.append(Fault("aggregation.rule", what, "set privacy.mechanism=local, or rule=mean"))
    return faults + _missing_clients(how, alg, system)


def _against_noise(how: Privacy, alg: Any) -> list[Fault]:
    """Settings of the algorithm under which noise in sums over examples does not hide these."""
    sums = private_sums(alg)
    if sums is not None:
        return sums.against_noise(how.mechanism == "local")
    what = f"hides examples in sums over them, which clients of {type(alg).__name__} do not send"
    fix = "leave the section out" if alg.family == "closed_form" else "set privacy.clip instead"
    return [Fault("privacy.feature_clip", what, fix)]


def _of_sums(how: Privacy, alg: Any, sampling: str, system: Any) -> list[Fault]:
    """The same, where sums over examples are hidden."""
    faults = _against_noise(how, alg)
    if faults or how.mechanism == "local":
        return faults + _missing_clients(how, alg, system)
    if alg.traits.each_upload:
        what = f"'distributed' hides single uploads in their sum, and {type(alg).__name__} reads every one of them"
        faults.append(Fault("privacy.mechanism", what, "set privacy.mechanism=local"))
    if sampling != "all":
        what = f"clients that come in other rounds are not in the sum that hides them (got '{sampling}')"
        faults.append(Fault("cohort.sampling", what, "use all, or set privacy.mechanism=local"))
    return faults + _missing_clients(how, alg, system)


def _of_both(how: Privacy, alg: Any, sampling: str, system: Any) -> list[Fault]:
    """The same, where moves of models and means over examples are hidden, both of them."""
    name = type(alg).__name__
    sums = private_sums(alg)
    if sums is None or not sums.sends_moves_and_sums:
        what = f"clip hides clients and feature_clip hides examples, and {name} sends one kind of upload"
        return [Fault("privacy.feature_clip", what, "keep one of them")]
    for key, what in (("clip", "moves of models"), ("feature_clip", "sums over examples")):
        if getattr(how, key) is None:
            said = f"is unset, and clients of {name} send {what}, which it bounds, beside what is hidden"
            return [Fault(f"privacy.{key}", said, f"set privacy.{key}, too")]
    faults = sums.against_noise(how.mechanism == "local")
    if how.mechanism != "local":
        what = f"'distributed' hides single uploads in their sum, and {name} reads every one of them"
        faults.append(Fault("privacy.mechanism", what, "set privacy.mechanism=local"))
    if sampling == "proportional":
        what = "'proportional' draws clients by how much data they have, which is not accounted for"
        faults.append(Fault("cohort.sampling", what, "use poisson, uniform or all"))
    return faults + _missing_clients(how, alg, system)


def _missing_clients(how: Privacy, alg: Any, system: Any) -> list[Fault]:
    late = system.stragglers and (system.policy == "drop" or (system.policy == "auto" and not alg.traits.partial_work))
    given = {"dropout": system.dropout, "stragglers": system.stragglers if late else 0}
    missing = {k: v for k, v in given.items() if v} if how.mechanism == "distributed" else {}
    what = "who is missing takes its share of the noise along"
    faults = [
        Fault(f"system.{k}", f"{what} (got {v:g})", "leave it out, or set privacy.mechanism=local")
        for k, v in missing.items()
    ]
    if system.deadline is not None:
        why = f"who is late depends on how much data it has (got {system.deadline:g})"
        faults.append(Fault("system.deadline", why, "leave it out"))
    return faults


def refused(how: Privacy, upload: Any, travelling: int, clients: int, examples: int) -> list[Fault]:
    """What only the net and the data tell: uploads like this one, and so many running statistics that travel."""
    if not how.on:
        return []
    if how.clip is None:  # what else an algorithm sends, it has been asked about
        what = f"{how.delta:g} is too large for {examples} examples: publishing one of them whole would be allowed"
        too_large = Fault("privacy.delta", what, f"below {1 / max(examples, 1):.2g}")
        return [too_large] if how.delta * examples >= 1 else []
    faults = []
    if any(not leaf.is_floating_point() for leaf in tree.leaves(upload)):
        what = "an upload of this algorithm holds whole numbers, which noise cannot hide"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", "take another algorithm"))
    if travelling:
        what = f"{travelling} running statistics of BatchNorm are sent beside the clipped upload"
        faults.append(Fault("model", what, 'set model.buffers="local", or take a net without BatchNorm'))
    if how.delta > clients**-1.1:
        what = f"{how.delta:g} is too large for {clients} clients: publishing one of them whole would be allowed"
        faults.append(Fault("privacy.delta", what, f"at most {clients**-1.1:.2g}"))
    return faults
