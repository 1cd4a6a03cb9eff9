"""Differential privacy of what clients send: clipped, noised, and accounted for.

The unit is a client (``clip``): epsilon bounds how much can be learned, from all that the server ever receives, of
whether a client took part with its data or not. Two mechanisms:

    upload   u <- u min(1, S / ||u||), the norm over all tensors together, then u + N(0, s^2)
    distributed   s = z S / sqrt(m) for each of the m clients of a round, so that their sum has z S; the server is
                  taken to see only that sum, and so a random choice of clients helps
    local         s = z S for each client; the server sees every upload, and a choice of clients helps nobody

Clients of a closed form send sums over examples instead, once. There the unit is an example (``feature_clip``):

    x <- x min(1, R / ||x||) before it is summed: one example moves (G, B) by D = sqrt(R^4 + R^2) at most, in which
    S above is replaced by D; and by sqrt(R^4 + R^2 + 1) where counts of classes are sent, too

Clients of LAW-AFL's Algorithm 3 send both in every round (line 9). There the unit is a client again: with ``clip`` and
``feature_clip``, moves are clipped to S, and instead of sums the means over a client's examples are sent, whose norm is
D at most whatever its data is. Each has noise of its own, z S and z D, so that a round is two uses of the mechanism.

Their noise has the address (client): who is to be forgotten sends the same numbers again, and tells nothing new.
Who has no examples does not come: that a client has any at all is not hidden.

Every client counts alike, since a weight would tell how much data it has. Noise may grow with how unequal a
client's labels are, by a factor f_i >= 1 from a noised histogram of them (LAW-AFL, eq. 24, made sound): the
guarantee stays that of f_i = 1, and the histogram is charged once. As printed (``eq24``), sigma = sigma_base sigma_ref
/ (alpha + eps) with the alpha of the experiment, which no client knows and which is the same for all: noise is
z sigma_ref / alpha for everybody, less than z where alpha is large, and epsilon is told for what it comes to.

Noise is drawn from a secret key of the run at an address (round, client, tensor): a resumed run adds the same, and
nobody else can subtract it (see ``fedloom.trust.noise``). Who takes part is drawn from the key, too, where epsilon
counts on that being unknown. What was released is kept in a ledger, which only grows and alone yields epsilon.

Epsilon is computed by Google's dp-accounting, through Renyi divergences, for the sampling that the run uses::

    all      no sampling; neighbours differ by one client that is there or not
    poisson  each client by itself with probability q; likewise
    uniform  so many of all, without replacement; neighbours differ by one client that is exchanged for another, which
             may move the sum by 2 S, so that the accountant is told z / 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.core import tree
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.schema import Spec
from fedloom.maths.private_sums import noised_sums
from fedloom.trust import noise
from fedloom.trust.noise import SIMULATED, Key

Sampling: TypeAlias = Literal["all", "poisson", "uniform"]
_SMOOTH = 1e-8  # what keeps a concentration of zero from dividing


class Privacy(Spec):
    """How what clients send is protected; nothing is, unless ``clip`` or ``feature_clip`` is set."""

    clip: PositiveFloat | None = Field(
        None, description="S: largest norm of an upload, all its tensors together; unset: no privacy of clients"
    )
    feature_clip: PositiveFloat | None = Field(
        None,
        description="R, with closed forms instead of clip, or beside it where models are trained, too: largest norm of "
        "an example's features, that of a bias among them; unset: no privacy of examples",
    )
    cross_scale: PositiveFloat = Field(
        1.0, description="of feature_clip: B is multiplied by it before noise is added, and divided by it afterwards"
    )
    noise: NonNegativeFloat | None = Field(
        None, description="z: deviation of the noise, in units of S, or of what one example can move; 0: only clip"
    )
    noise_from: Literal["secret", "seed"] = Field(
        "secret",
        description="what noise is drawn from: a key that is drawn for the run and kept in its folder; or the seed, so "
        "that the run can be repeated and its noise subtracted, which is a simulation of privacy and gives none",
    )
    epsilon: PositiveFloat | None = Field(None, description="the budget of all rounds, from which z is calibrated")
    delta: float = Field(1e-5, gt=0, lt=1, description="the delta at which epsilon is told")
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
                f"{changed[0]} is set, and nothing is protected; set clip, or, with a closed form, feature_clip"
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
        """z as everybody has it, which is what the accountant is told; 0 if it is still to be calibrated."""
        scale = 1.0 if self.concentration is None else self.reference / (self.concentration + _SMOOTH)
        return scale * (self.noise or 0.0)

    @property
    def asks_for_labels(self) -> bool:
        """Whether clients release a histogram of their labels."""
        return self.on and self.heterogeneity in ("alpha", "entropy")


# -- what cannot be accounted for ------------------------------------------------------------------
def conflicts(how: Privacy, alg: Any, sampling: str, system: Any, rule: str) -> list[Fault]:
    """Settings under which the epsilon that is told would not be true."""
    if not how.on:
        return []
    if alg.sends_moves_and_sums or (how.clip is not None and how.feature_clip is not None):
        return _of_both(how, alg, sampling, system)
    if how.feature_clip is not None:
        return _of_sums(how, alg, sampling, system)
    name, faults = type(alg).__name__, []
    if alg.family in ("gossip", "closed_form") or not alg.communicates:
        what = f"covers clients that send updates to a server, which those of {name} do not"
        hides = type(alg).against_noise is not Algorithm.against_noise
        local = " and privacy.mechanism=local" if alg.hears_each and how.mechanism != "local" else ""
        fix = f"set privacy.feature_clip{local} instead" if hides else "leave the section out"
        return [Fault("privacy.clip", f"{what} (got {how.clip:g})", fix)]
    if alg.hears_each and how.mechanism == "distributed":
        what = f"hides single uploads in their sum, and {name} reads every one of them"
        fix = "set privacy.mechanism=local" if alg.bears_noise else "take an algorithm that only sums uploads"
        faults.append(Fault("privacy.mechanism", f"'distributed' {what}", fix))
    elif alg.hears_each and not alg.bears_noise:
        what = f"{name} is not linear in its uploads, and how it bears their noise is not known"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", "take an algorithm that only sums uploads"))
    if alg.mirrored:
        what = f"changes what clients of {name} send, but not what they keep, so that server and clients would disagree"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", "take an algorithm without such states"))
    if type(alg).upload_bytes is not Algorithm.upload_bytes:
        what = f"the size of what a client of {name} sends depends on its data, which no noise hides"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", "take another algorithm"))
    if alg.weighs_examples and type(alg).weight is not Algorithm.weight:
        what = f"{name} weighs clients by their data, which the weights would tell"
        fix = "set algorithm.weighting=uniform" if hasattr(alg, "weighting") else "let it count clients alike"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", fix))
    if alg.unit_uploads and how.clip != 1:
        what = f"uploads of {name} are no longer than 1, since it clips moves by a rule of its own"
        faults.append(Fault("privacy.clip", f"{what} (got {how.clip:g})", "set privacy.clip=1"))
    if sampling == "proportional":
        what = "'proportional' draws clients by how much data they have, which is not accounted for"
        faults.append(Fault("cohort.sampling", what, "use poisson, uniform or all"))
    if rule != "mean" and how.mechanism == "distributed":
        what = f"'{rule}' needs every upload, and under privacy.mechanism = 'distributed' there is only their sum"
        faults.append(Fault("aggregation.rule", what, "set privacy.mechanism=local, or rule=mean"))
    return faults + _missing_clients(how, alg, system)


def _of_sums(how: Privacy, alg: Any, sampling: str, system: Any) -> list[Fault]:
    """The same, where sums over examples are hidden."""
    faults = list(alg.against_noise(how.mechanism == "local"))
    if faults or how.mechanism == "local":
        return faults + _missing_clients(how, alg, system)
    if alg.hears_each:
        what = f"'distributed' hides single uploads in their sum, and {type(alg).__name__} reads every one of them"
        faults.append(Fault("privacy.mechanism", what, "set privacy.mechanism=local"))
    if sampling != "all":
        what = f"clients that come in other rounds are not in the sum that hides them (got '{sampling}')"
        faults.append(Fault("cohort.sampling", what, "use all, or set privacy.mechanism=local"))
    return faults + _missing_clients(how, alg, system)


def _of_both(how: Privacy, alg: Any, sampling: str, system: Any) -> list[Fault]:
    """The same, where moves of models and means over examples are hidden, both of them."""
    name = type(alg).__name__
    if not alg.sends_moves_and_sums:
        what = f"clip hides clients and feature_clip hides examples, and {name} sends one kind of upload"
        return [Fault("privacy.feature_clip", what, "keep one of them")]
    for key, what in (("clip", "moves of models"), ("feature_clip", "sums over examples")):
        if getattr(how, key) is None:
            said = f"is unset, and clients of {name} send {what}, which it bounds, beside what is hidden"
            return [Fault(f"privacy.{key}", said, f"set privacy.{key}, too")]
    faults = list(alg.against_noise(how.mechanism == "local"))
    if how.mechanism != "local":
        what = f"'distributed' hides single uploads in their sum, and {name} reads every one of them"
        faults.append(Fault("privacy.mechanism", what, "set privacy.mechanism=local"))
    if sampling == "proportional":
        what = "'proportional' draws clients by how much data they have, which is not accounted for"
        faults.append(Fault("cohort.sampling", what, "use poisson, uniform or all"))
    return faults + _missing_clients(how, alg, system)


def _missing_clients(how: Privacy, alg: Any, system: Any) -> list[Fault]:
    late = system.stragglers and (
        system.policy == "drop" or (system.policy == "auto" and not getattr(alg, "partial_work", False))
    )
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


# -- the mechanism ---------------------------------------------------------------------------------
class Sums(NamedTuple):
    """How sums over examples are hidden."""

    sensitivity: float  # D: how far one example can move them
    cross_scale: float
    counts: bool  # whether counts of classes are sent, with noise; else they are not sent


class Ledger(NamedTuple):
    """What has been released so far: it only grows, and is kept with the state of the run."""

    release: Release  # what one use of the mechanism was
    delta: float
    reach: float  # S, or what one example can move: the noise was release.noise times this
    uses: tuple[int, ...]  # [N] on each client, where the mechanism is local; else one number for all of them

    def epsilon(self) -> float:
        """What was spent on whom most was spent on."""
        return epsilon(self.release, max(self.uses), self.delta)


class Guard(NamedTuple):
    """Privacy as it is in one run: every number resolved."""

    key: Key
    clip: float  # S; of sums R
    factors: Tensor  # [N] f_i
    release: Release
    releases: tuple[int, ...]  # [rounds + 1] how often the mechanism is to be used on a client, at most, by each round
    delta: float
    weight: float | None  # what the sum of a round is divided by; None: by how many sent
    sums: Sums | None = None  # where it is sums over examples that are hidden
    features: float | None = None  # R, where means over examples are hidden beside moves

    @property
    def unit(self) -> Literal["client", "example"]:
        """What is hidden."""
        return "client" if self.sums is None or self.features is not None else "example"

    @property
    def reach(self) -> float:
        """How far one unit can move what is released, or its moves: z is in units of this."""
        return self.sums.sensitivity if self.sums is not None and self.features is None else self.clip

    def deviation(self, senders: int) -> float:
        """Of the noise in an upload, among so many in a round."""
        return self.release.noise * self.reach / (1.0 if self.release.local else math.sqrt(senders))

    def told(self, rounds: int) -> str:
        """What is protected how well, in a sentence."""
        where = "each upload" if self.release.local else "their sum"
        what = f"uploads clipped to {self.clip:g} · noise {self.release.noise:.4g} clips in {where}"
        if self.sums is not None and self.features is not None:
            what = f"moves clipped to {self.clip:g}, features to {self.features:g}, so that means over examples are no "
            what += f"longer than {self.sums.sensitivity:.4g} · noise {self.release.noise:.4g} times that in each"
        elif self.sums is not None:
            where = "each client's sums" if self.release.local else "the sums over all clients"
            what = f"features clipped to {self.clip:g} · one example moves sums by {self.reach:.4g} at most · noise "
            what += f"{self.release.noise:.4g} times that in {where}"
        spent = f"{self.epsilon(rounds):.4g}" if self.release.noise else "infinite: there is no noise"
        simulated = f" ({SIMULATED})" if self.key.public else ""
        return (
            f"{what} · after {rounds} rounds epsilon {spent} at delta {self.delta:g}, for each {self.unit}{simulated}"
        )

    @property
    def metric(self) -> str:
        """Under which name epsilon is recorded."""
        return "privacy/epsilon_simulated" if self.key.public else "privacy/epsilon"

    def lottery(self, seed: int) -> int:
        """The seed from which clients are drawn: a secret one where epsilon counts on nobody knowing who was drawn."""
        counts = self.release.sampled and self.release.noise > 0
        return self.key.number("privacy/cohort") if counts and not self.key.public else seed

    def opened(self) -> Ledger:
        """A ledger before the first round."""
        return Ledger(self.release, self.delta, self.reach, (0,) * (len(self.factors) if self.release.local else 1))

    def charged(self, ledger: Ledger, ids: Tensor, uploads: Any = ()) -> Ledger:
        """The ledger after a round in which these clients sent ``uploads``, which the guard has hidden.

        Sums over examples have the same noise whenever they are sent: only the first time counts. Means have noise of
        the round, and count beside moves.
        """
        whom = set(ids.tolist()) if self.release.local else {0}
        parts = 1 if self.features is None else bool(uploads.dw.numel()) + bool(uploads.rows.numel())
        first = self.sums is not None and self.features is None
        uses = ((max(n, 1) if first else n + parts) if k in whom else n for k, n in enumerate(ledger.uses))
        return ledger._replace(uses=tuple(uses))

    def epsilon(self, round_: int) -> float:
        """What is to be spent after so many rounds."""
        return epsilon(self.release, self.releases[min(round_, len(self.releases) - 1)], self.delta)

    def described(self) -> dict[str, Any]:
        """What a run folder says of its privacy; infinity, for which JSON has no word, is None."""
        spent = self.epsilon(len(self.releases) - 1)
        own = {
            **self.release._asdict(),
            "clip": self.clip,
            "noise_factors": [round(f, 6) for f in self.factors.tolist()],
        }
        if self.sums is not None and self.features is not None:
            own |= {"feature_clip": self.features, **self.sums._asdict()}
        elif self.sums is not None:  # where nothing depends on how clients are chosen
            used = {name: getattr(self.release, name) for name in ("noise", "local", "clients")}
            own = {**used, "feature_clip": self.clip, **self.sums._asdict()}
            own["deviation"] = self.deviation(self.release.size)
        return {
            "unit": self.unit,
            "relation": relation(self.release),
            **own,
            "delta": self.delta,
            "releases": self.releases[-1],
            "epsilon": spent if math.isfinite(spent) else None,
            "accountant": "dp-accounting, Renyi",
            "noise_from": "seed" if self.key.public else "secret",
            **({"warning": SIMULATED} if self.key.public else {}),
        }


def protected(guard: Guard, uploads: Any, ids: Tensor, senders: int, round_: int) -> Any:
    """The uploads [K, ...] as these clients send them, among so many of the round."""
    if guard.sums is not None and guard.features is not None:
        return _both(guard, guard.sums, uploads, ids, round_)
    if guard.sums is not None:
        return hidden(guard.sums, guard.deviation(senders), uploads, ids, guard.key)
    std = guard.deviation(senders) * guard.factors[ids]
    return noised(clipped(uploads, guard.clip), std, ids, guard.key, round_)


def _both(guard: Guard, sums: Sums, uploads: Any, ids: Tensor, round_: int) -> Any:
    """Moves and means over examples [K, ...] as these clients send them, and nothing else."""
    beside = [x for name, x in uploads._asdict().items() if name not in ("dw", "rows", "counts")]
    if any(bool(leaf.any()) for leaf in tree.leaves(beside)):
        what = "clients send more than moves and means over their examples, and it is not hidden"
        raise ConfigError([Fault("privacy.clip", f"{what} (got {guard.clip:g})", "leave the section out")])
    dw, rows, counts = uploads.dw, uploads.rows, uploads.counts
    factors = guard.release.noise * guard.factors[ids]
    if dw.numel():
        dw = noised(clipped((dw,), guard.clip), guard.clip * factors, ids, guard.key, round_)[0]
    if rows.numel() and guard.release.noise:
        std, wide = (sums.sensitivity * factors).to(rows)[:, None], rows.shape[-1]
        drawn = [
            noise.normals(guard.key, wide + counts.shape[-1], "privacy/means", round_, client)
            for client in ids.tolist()
        ]
        normals = torch.from_numpy(np.stack(drawn)).to(rows)
        rows = noised_sums(rows, std, normals[:, :wide], counts.shape[-1], sums.cross_scale)
        counts = counts + std * normals[:, wide:]
    return uploads._replace(dw=dw, rows=rows, counts=counts)


def hidden(how: Sums, std: float, uploads: Any, ids: Tensor, key: Key) -> Any:
    """Sums G and B [K, ...] as these clients send them, with the same noise whenever one sends them.

    Who is not asked sends zeros, and no noise; who is to be forgotten sends the negative of all, noise included.
    """
    rows, counts = uploads.rows, uploads.counts
    if not rows.numel():
        return uploads
    turn = counts.sum(-1, keepdim=True).sign()
    shown = counts if how.counts else torch.zeros_like(counts)
    if not std:
        return uploads._replace(counts=shown)
    width = rows.shape[-1] + counts.shape[-1]
    drawn = np.stack([noise.normals(key, width, "privacy/sums", client) for client in ids.tolist()])
    normals = turn * torch.from_numpy(drawn).to(rows)
    rows = noised_sums(rows, std, normals[:, : rows.shape[-1]], counts.shape[-1], how.cross_scale)
    return uploads._replace(rows=rows, counts=shown + std * normals[:, rows.shape[-1] :] * how.counts)


def silence(guard: Guard, upload: Any, round_: int) -> Any:
    """What the server of a round without clients takes for their sum: noise alone, as the accounting has it."""
    nobody = torch.tensor([len(guard.factors)])
    none = tree.tmap(lambda x: torch.zeros_like(x)[None], upload)
    std = torch.tensor([guard.release.noise * guard.clip])
    return tree.tmap(lambda x: x[0].double(), noised(none, std, nobody, guard.key, round_))


def clipped(uploads: Any, clip: float) -> Any:
    """Each upload of [K, ...] shortened to the norm ``clip``, all its tensors together; shorter ones to the bit."""
    squares = [leaf.reshape(len(leaf), -1).double().square().sum(1) for leaf in tree.leaves(uploads)]
    factor = (clip / torch.stack(squares).sum(0).sqrt()).clamp(max=1)
    return tree.tmap(lambda x: x * factor.to(x.dtype).view(-1, *[1] * (x.dim() - 1)), uploads)


def noised(uploads: Any, std: Tensor, ids: Tensor, key: Key, round_: int) -> Any:
    """The uploads [K, ...] with noise of deviation ``std`` [K], drawn at the address of each client and tensor."""
    if not bool(std.any()):
        return uploads

    def add(x: Tensor, tensor: int) -> Tensor:
        shape = tuple(x.shape[1:])
        drawn = [noise.normals(key, math.prod(shape), "privacy", round_, client, tensor) for client in ids.tolist()]
        scale = std.to(x).view(-1, *[1] * (x.dim() - 1))
        return x + scale * torch.from_numpy(np.stack(drawn)).view(len(drawn), *shape).to(x)

    return tree.unflatten(uploads, [add(x, k) for k, x in enumerate(tree.leaves(uploads))])


# -- noise by heterogeneity ------------------------------------------------------------------------
def factors(how: Privacy, counts: NDArray[np.float64], key: Key) -> Tensor:
    """f_i >= 1 of every client from the labels that it has: ``counts`` [N, C].  ``[N]``

    A histogram is released as shares of 1: so the whole client, and not only one of its rows, is hidden by Laplace
    noise of scale 1 / histogram_epsilon.
    """
    clients, classes = counts.shape
    if not how.asks_for_labels or classes < 2:
        return torch.ones(clients)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    drawn = noise.laplace(key, counts.size, "privacy/histogram").reshape(counts.shape)
    even = entropies(shares + drawn / how.histogram_epsilon)
    if how.heterogeneity == "entropy":
        return torch.from_numpy(np.clip(1 + how.slope * (1 - even), 1, how.most)).float()
    alpha = concentrations(even, classes)
    return torch.from_numpy(np.clip(how.reference / (alpha + _SMOOTH), 1, how.most)).float()


def entropies(histograms: NDArray[np.float64]) -> NDArray[np.float64]:
    """The entropy of each histogram [N, C] over ln C: 1 if it is even, 0 if one class has all, or nothing is left."""
    positive = np.maximum(histograms, 0)
    total = positive.sum(1, keepdims=True)
    share = np.divide(positive, total, out=np.zeros_like(positive), where=total > 0)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    found: NDArray[np.float64] = -(share * logs).sum(1) / math.log(histograms.shape[1])
    return found


def concentrations(even: NDArray[np.float64], classes: int) -> NDArray[np.float64]:
    """The alpha of a symmetric Dirichlet distribution whose mean entropy, over ln C, is that of each client [N]."""
    grid = np.geomspace(1e-4, 1e3, 2000)
    found: NDArray[np.float64] = np.interp(even, mean_entropy(grid, classes), grid)
    return found


def mean_entropy(alpha: NDArray[np.float64], classes: int) -> NDArray[np.float64]:
    """E[H] / ln C of shares drawn from Dir(alpha): psi(C alpha + 1) - psi(alpha + 1), which grows with alpha."""
    a = torch.from_numpy(np.asarray(alpha, dtype=np.float64))
    found: NDArray[np.float64] = (torch.digamma(classes * a + 1) - torch.digamma(a + 1)).numpy() / math.log(classes)
    return found


# -- the accountant --------------------------------------------------------------------------------
class Release(NamedTuple):
    """What is released of clients, as the accountant sees it."""

    noise: float  # z
    local: bool
    sampling: Sampling
    clients: int
    size: int  # clients of a round, or their expected number
    histogram_epsilon: float = 0.0  # 0: no histogram was released

    @property
    def sampled(self) -> bool:
        """Whether the choice of clients hides anything."""
        return not self.local and self.sampling != "all" and self.size < self.clients

    @property
    def exchanges(self) -> bool:
        """Whether neighbours exchange a client: the number of clients that are drawn is fixed, so none can be gone."""
        return self.sampled and self.sampling == "uniform"


def relation(release: Release) -> Literal["add_or_remove_one", "replace_one"]:
    """How neighbouring federations differ."""
    return "replace_one" if release.exchanges else "add_or_remove_one"


def epsilon(release: Release, count: int, delta: float) -> float:
    """Epsilon at ``delta`` after ``count`` uses of the mechanism, and the histogram, if there is one."""
    if count and not release.noise:
        return math.inf
    if not count and not release.histogram_epsilon:
        return 0.0
    orders, once, each = _curves(release)
    spent = once + count * each if count else once  # an order may be infinite, and is not to be multiplied by 0
    found: float = _accounting().rdp.compute_epsilon(orders, spent, delta)[0]
    return float(found)


def calibrated(release: Release, count: int, target: float, delta: float) -> float:
    """The least z with which ``count`` uses of the mechanism (and the histogram) cost no more than ``target``."""
    spent = epsilon(release._replace(noise=1.0), 0, delta)
    if spent >= target:
        what = f"the label histograms alone cost {spent:.3g} (got {target:g})"
        raise ConfigError([Fault("privacy.epsilon", what, "lower privacy.histogram_epsilon")])
    low, high = 0.0, 1.0
    while epsilon(release._replace(noise=high), count, delta) > target:
        low, high = high, 2 * high
        if high > 1e6:
            what = f"no noise is enough for {count} rounds (got {target:g})"
            raise ConfigError([Fault("privacy.epsilon", what, "raise it, or take fewer rounds")])
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        enough = epsilon(release._replace(noise=middle), count, delta) <= target
        low, high = (low, middle) if enough else (middle, high)
    return high


@lru_cache(maxsize=256)
def _curves(release: Release) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Renyi divergences at all orders: of the histogram, and of one use of the mechanism, which add up over rounds."""
    dp = _accounting()
    once, each = dp.NoOpDpEvent(), dp.NoOpDpEvent()
    if release.histogram_epsilon:  # two histograms of shares differ by 2 where one client is exchanged for another
        once = dp.LaplaceDpEvent(1 / (release.histogram_epsilon * (2 if release.exchanges else 1)))
    if release.noise:
        each = dp.GaussianDpEvent(release.noise / 2 if release.exchanges else release.noise)
        if release.exchanges:
            each = dp.SampledWithoutReplacementDpEvent(release.clients, release.size, each)
        elif release.sampled:
            each = dp.PoissonSampledDpEvent(release.size / release.clients, each)
    one, other = accountant(release), accountant(release)
    with _quietly():
        one.compose(once)
        other.compose(each)
    return one._orders, one._rdp, other._rdp


def accountant(release: Release) -> Any:
    """A fresh accountant of dp-accounting for neighbours as this release has them."""
    dp = _accounting()
    return dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation[relation(release).upper()])


def _accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        fix = "pip install -e '.[privacy]'"
        raise ConfigError([Fault("privacy", "epsilon needs dp-accounting, which is not installed", fix)]) from error
    return dp_accounting


@contextmanager
def _quietly() -> Iterator[None]:
    """Without a line for each order at which a series does not converge: such orders are only left out."""
    from absl import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(level)
