"""Robust aggregation: rules that replace the mean of uploads if some clients may be malicious.

    median        of every coordinate                                    Yin et al., ICML 2018
    trimmed_mean  of every coordinate, without the f largest and the f smallest values       likewise
    krum          the one upload that is nearest to its n - f - 2 nearest others             Blanchard et al., NIPS 2017
    multi_krum    the mean of the ``chosen`` nearest                                         likewise
    file.py:rule  the user's own, a function of uploads [K, P] and weights [K]

fedloom's rules weight all uploads equally: the size of a client's data is only its own claim. If all are honest and
nothing is trimmed, such a rule is the plain mean of the uploads.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field, PositiveInt, field_validator
from torch import Tensor

from fedloom.algorithm import Inbox
from fedloom.core import tree
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.own_function import MayNameFunction, called, named_or_own
from fedloom.core.schema import when

# Numbers that are sorted at once.
_SORTED = 1 << 24


_RULES = ("mean", "median", "trimmed_mean", "krum", "multi_krum")


class Aggregation(MayNameFunction):
    """How uploads are aggregated."""

    section: ClassVar[str] = "aggregation"
    naming: ClassVar[str] = "rule"
    positions: ClassVar[int] = 2

    rule: str = Field(
        "mean",
        description="the algorithm's own weighted mean, or one that withstands bad clients: median, trimmed_mean, "
        "krum, multi_krum, or your own, as file.py:function: see docs/trust.md",
    )
    bad: Annotated[float, when(rule=("trimmed_mean", "krum", "multi_krum"))] = Field(
        0.25, ge=0, lt=0.5, description="share of a round's clients that may be bad: f, rounded down, in the rules"
    )
    chosen: Annotated[PositiveInt | None, when(rule="multi_krum")] = Field(
        None, description="uploads that multi_krum averages; unset: all but f"
    )

    @field_validator("rule")
    @classmethod
    def _is_a_rule(cls, name: str) -> str:
        return named_or_own(name, _RULES, "rule")

    def distrusted(self, senders: int) -> int:
        """f, for this many uploads."""
        return math.floor(self.bad * senders + 1e-9)


def rule_conflicts(how: Aggregation, alg: Any, sampling: str) -> list[Fault]:
    """What a rule cannot be combined with."""
    if how.rule == "mean":
        return []
    name, faults = type(alg).__name__, []
    what = ""
    if alg.family == "gossip":
        what = f"is a server's rule, but {name} has no server"
    elif alg.family == "closed_form":
        what = f"would change the statistics of {name}, which are exact only as a sum"
    elif not alg.traits.communicates:
        what = f"needs uploads, but {name} has none"
    elif alg.traits.each_upload:
        what = f"replaces a sum of uploads, but {name} reads every one of them"
    elif alg.traits.mirrored:
        what = f"discards what clients of {name} have done and still keep, so that server and clients would disagree"
    if what:
        faults.append(Fault("aggregation.rule", f"'{how.rule}' {what}", "set aggregation.rule=mean"))
    if sampling == "proportional":
        what = f"'proportional' may draw a client twice, which '{how.rule}' would treat as two agreeing clients"
        faults.append(Fault("cohort.sampling", what, "use uniform, poisson or all"))
    return faults


def rule_refusals(how: Aggregation, senders: int) -> list[Fault]:
    """What a rule cannot do with this many clients in a round."""
    f, faults = how.distrusted(senders), []
    if how.rule in ("krum", "multi_krum") and senders - f - 2 < 1:
        what = f"'{how.rule}' needs n - f - 2 > 0 neighbours, but a round has n = {senders} clients, of which f = {f}"
        faults.append(Fault("aggregation.rule", what, "lower aggregation.bad, or raise cohort.size"))
    is_mean = how.rule == "trimmed_mean" or (how.rule == "multi_krum" and how.chosen is None)
    if is_mean and how.bad and not f:
        what = f"{how.bad:g} of the {senders} clients of a round is none: '{how.rule}' would be the plain mean"
        faults.append(Fault("aggregation.bad", what, "raise it, or cohort.size; or set aggregation.rule=median"))
    if how.rule == "multi_krum" and how.chosen is not None and how.chosen > senders:
        faults.append(
            Fault("aggregation.chosen", f"{how.chosen} of {senders} clients of a round", f"at most {senders}")
        )
    return faults


class Robust(NamedTuple):
    """The result of a rule."""

    mean: Any  # float64
    counted: Tensor | None  # [K] 1 for uploads that were used, else 0; None if that differs by coordinate


def robust(how: Aggregation, uploads: Any, weights: Tensor | None = None) -> Robust:
    """The robust mean of the uploads [K, ...]; only the user's own rule is given their weights [K]."""
    senders = len(tree.leaves(uploads)[0])
    f = how.distrusted(senders)
    if how.rule == "mean":
        return Robust(_mean_of(uploads, torch.arange(senders)), torch.ones(senders))
    if how.is_own:
        return Robust(_by_own_rule(how, uploads, torch.ones(senders) if weights is None else weights), None)
    if how.rule in ("median", "trimmed_mean"):
        cut = (senders - 1) // 2 if how.rule == "median" else min(f, (senders - 1) // 2)
        return Robust(tree.tmap(lambda x: trimmed(x, cut), uploads), None)
    count = 1 if how.rule == "krum" else min(how.chosen or senders - f, senders)
    taken = krum_scores(uploads, f).argsort(stable=True)[:count].sort().values
    counted = torch.zeros(senders, dtype=torch.float64, device=taken.device).index_fill(0, taken, 1.0)
    return Robust(_mean_of(uploads, taken), counted)


def _by_own_rule(how: Aggregation, uploads: Any, weights: Tensor) -> Any:
    """What the user's function makes of the uploads, all parts of an upload in one row; float64."""
    leaves = tree.leaves(uploads)
    rows = torch.cat([leaf.reshape(len(leaf), -1).double() for leaf in leaves], 1)
    row = called(how.own_function(), how.rule, "aggregation.rule", rows, weights.to(rows))
    if not isinstance(row, Tensor) or row.shape != rows.shape[1:]:
        got = f"a tensor of shape {list(row.shape)}" if isinstance(row, Tensor) else f"a {type(row).__name__}"
        what = f"'{how.rule}' should make one row of {rows.shape[1]} numbers of {len(rows)} uploads (got {got})"
        raise ConfigError([Fault("aggregation.rule", what)])
    parts = torch.split(row.double(), [leaf[0].numel() for leaf in leaves])
    return tree.unflatten(uploads, [part.view(leaf.shape[1:]) for part, leaf in zip(parts, leaves, strict=True)])


def trimmed(x: Tensor, cut: int) -> Tensor:
    """The mean over the first axis of every coordinate, without its ``cut`` largest and smallest values; float64."""
    flat = x.reshape(len(x), -1)
    wide = max(1, _SORTED // len(x))
    parts = [part.sort(dim=0).values[cut : len(x) - cut].double().mean(0) for part in torch.split(flat, wide, 1)]
    return torch.cat(parts).view(x.shape[1:])


def krum_scores(uploads: Any, f: int) -> Tensor:
    """For each upload the sum of the squared distances to its n - f - 2 nearest others (at least one).  ``[K]``

    All parts of an upload count together.
    """
    leaves = tree.leaves(uploads)
    n = len(leaves[0])
    apart = torch.zeros(n, n, dtype=torch.float64, device=leaves[0].device)
    for leaf in leaves:
        flat = leaf.reshape(n, -1).double()
        # Distances of points that are far from zero would lose their digits. One huge upload moves the mean, but not
        # the median: beside it all others would be equally near, and the first of them would be taken.
        flat = flat - flat.median(0).values
        square = flat.square().sum(1)
        apart += square[:, None] + square[None] - 2 * flat @ flat.T
    apart = apart.clamp(min=0).fill_diagonal_(float("inf")).sort(dim=1).values
    near = max(1, n - f - 2)
    return apart[:, : min(near, n - 1)].sum(1)


def replaced(how: Aggregation, inbox: Inbox[Any]) -> Inbox[Any]:
    """The same inbox with a total from which every algorithm reads the robust mean as its weighted mean."""
    found = robust(how, inbox.uploads, inbox.weights)
    total = tree.tmap(lambda x: x * inbox.weight, found.mean)
    weights = () if found.counted is None else found.counted.to(inbox.weight)
    return inbox._replace(total=total, weights=weights)


def _mean_of(uploads: Any, taken: Tensor) -> Any:
    share = torch.full((1, len(taken)), 1.0 / len(taken), dtype=torch.float64)
    device = tree.leaves(uploads)[0].device
    return tree.take(tree.mix(share.to(device), tree.take(uploads, taken.to(device))), 0)
