"""Bad clients: which they are, and how they corrupt their data or their uploads.

The set depends only on the seed, and a larger share contains a smaller one. Data is corrupted once, when the
federation is built, and only in training rows: evaluation rows of a bad client stay clean. Uploads
are corrupted after ``finish``, by the names of their parts::

    dw              the model update                            model_sign_flip  model_gauss  model_scale
    rows            sums G and B from which a head is solved      stat_negate_B  stat_scale
    accuracy, loss  what a client reports of its own data          quality_forge, or ``forge`` with any other kind
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator
from torch import Tensor

from fedloom.core import rng, tree
from fedloom.core.errors import ConfigError, Fault, outside
from fedloom.core.schema import GIVEN, Spec, When, other_than, over, when
from fedloom.maths.ridge import features_in_upload

CorruptionKind: TypeAlias = Literal[
    "label_flip_cyclic",
    "label_flip_pair",
    "label_random",
    "feature_noise",
    "blank",
    "model_sign_flip",
    "model_gauss",
    "model_scale",
    "stat_negate_B",
    "stat_scale",
    "quality_forge",
]
# The parts of an upload that a kind changes; kinds that are not here change data.
_TOUCHES: dict[str, tuple[str, ...]] = {
    "model_sign_flip": ("dw",),
    "model_gauss": ("dw",),
    "model_scale": ("dw",),
    "stat_negate_B": ("rows",),
    "stat_scale": ("rows",),
    "quality_forge": ("accuracy", "loss"),
}
_BEST = {"accuracy": 1.0, "loss": 0.0}  # what a forged report says


def _bad(**tests: Any) -> When:
    """If there are bad clients and these tests hold."""
    return when(share=over(0), **tests) | when(clients=GIVEN, **tests)


class Corruption(Spec):
    """Which clients are bad, and what they do."""

    share: float = Field(0.0, ge=0, le=1, description="share of all clients that are bad, the same ones in all rounds")
    clients: tuple[NonNegativeInt, ...] = Field((), description="numbers of the bad clients, instead of a share")
    kind: Annotated[CorruptionKind, _bad()] = Field(
        "label_flip_cyclic",
        description="what they do: to their training labels (cyclic: y + 1; pair: 0 and 1 change places, 2 and 3, "
        "...; random), to their inputs, or to what they send",
    )
    kappa: Annotated[PositiveFloat, _bad(kind="model_sign_flip")] = Field(
        1.0, description="of model_sign_flip: how far it goes the other way"
    )
    scale: Annotated[PositiveFloat, _bad(kind=("model_scale", "stat_scale"))] = Field(
        100.0, description="of model_scale and stat_scale: the factor"
    )
    feature_std: Annotated[PositiveFloat, _bad(kind="feature_noise")] = Field(
        1.0, description="of feature_noise: deviation, in normalised inputs"
    )
    model_std: Annotated[PositiveFloat, _bad(kind="model_gauss")] = Field(
        0.1, description="of model_gauss: deviation of the update that is sent"
    )
    forge: Annotated[bool, _bad(kind=other_than("quality_forge"))] = Field(
        False, description="bad clients also report perfect quality, if an algorithm requests it"
    )

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Corruption:
        if self.share and self.clients:
            raise ValueError("share and clients both choose the bad clients; keep one of them")
        return self

    @property
    def any(self) -> bool:
        """Whether there are bad clients."""
        return bool(self.share or self.clients)

    @property
    def spoils(self) -> Literal["x", "y", ""]:
        """The part of their training data that bad clients change: inputs, labels or nothing."""
        if self.kind in ("feature_noise", "blank"):
            return "x"
        return "y" if self.kind.startswith("label") else ""

    @property
    def changes(self) -> tuple[str, ...]:
        """The parts of an upload that bad clients change."""
        forged = _TOUCHES["quality_forge"] if self.forge else ()
        return tuple(dict.fromkeys((*_TOUCHES.get(self.kind, ()), *forged)))

    def bad(self, clients: int, seed: int) -> tuple[int, ...]:
        """The bad ones among this many clients, in order."""
        if faults := outside("corruption.clients", "client", self.clients, clients):
            raise ConfigError(faults)
        if self.clients:
            return tuple(sorted(set(self.clients)))
        order = rng.stream(seed, "corruption").permutation(clients)
        return tuple(sorted(order[: int(self.share * clients + 0.5)].tolist()))


def corruption_conflicts(how: Corruption, alg: Any) -> list[Fault]:
    """Kinds of corruption that are impossible under this algorithm, for any uploads."""
    if not (how.any and how.changes) or (alg.family != "gossip" and alg.traits.communicates):
        return []
    key, value = ("kind", f"'{how.kind}'") if how.kind in _TOUCHES else ("forge", "true")
    what = f"changes what is sent to a server, but {type(alg).__name__} has none (got {value})"
    return [Fault(f"corruption.{key}", what, "choose a kind that corrupts data")]


def ineffective(how: Corruption, alg: Any) -> list[str]:
    """Warnings about corruption that has no effect."""
    why = alg.traits.ignores_reports
    if not how.any or not why or not set(_BEST) & set(how.changes):
        return []
    return [f"corruption: forged reports have no effect, since {why}"]


class ClientRows(NamedTuple):
    """The training examples of one client."""

    x: Tensor  # [n, ...] as loaded, before normalisation
    y: Tensor  # [n]


def corrupted(how: Corruption, rows: ClientRows, scale: Tensor, classes: int, seed: int, client: int) -> ClientRows:
    """The corrupted training rows of a bad client; ``scale`` is the factor of normalisation."""
    x, y = rows
    if how.kind == "label_flip_cyclic":
        y = (y + 1) % classes
    elif how.kind == "label_flip_pair":
        y = torch.where((y ^ 1) < classes, y ^ 1, y)  # the last of an odd number of classes has no partner
    elif how.kind == "label_random":
        y = torch.from_numpy(rng.stream(seed, "corruption/labels", client).integers(0, classes, len(y))).to(y)
    elif how.kind == "feature_noise":
        x = x.float() + how.feature_std * _normal(x, seed, "corruption/features", client) / scale
    elif how.kind == "blank":
        x = torch.zeros_like(x)
    return ClientRows(x, y)


def corruption_refusals(how: Corruption, upload: Any) -> list[Fault]:
    """Kinds of corruption that are impossible for uploads like this one."""
    # A model that is never trained is never sent: poisoning it would make the method look robust.
    parts = [name for name in getattr(upload, "_fields", ()) if name != "dw" or tree.nbytes(upload.dw)]
    missing = [name for name in how.changes if name not in parts]
    if not missing:
        return []
    key, value = ("kind", f"'{how.kind}'") if how.kind in _TOUCHES else ("forge", "true")
    what = (
        f"changes the part '{missing[0]}' of an upload, but this algorithm with its settings sends {parts or 'nothing'}"
    )
    return [Fault(f"corruption.{key}", f"{what} (got {value})", "choose a kind that corrupts data, or leave it out")]


def poisoned(how: Corruption, uploads: Any, ids: Tensor, bad: Tensor, address: tuple[int, int]) -> Any:
    """The uploads [K, ...] of these clients, those of ``bad`` clients [K] changed; ``address``: seed and round."""
    if not how.changes or not bool(bad.any()):
        return uploads
    change = {part: _changed(how, part, uploads, ids, address) for part in how.changes}
    where = bad.to(tree.leaves(uploads)[0].device)
    return uploads._replace(**{part: tree.where(where, new, getattr(uploads, part)) for part, new in change.items()})


def _changed(how: Corruption, part: str, uploads: Any, ids: Tensor, address: tuple[int, int]) -> Tensor:
    """A part [K, ...] as a bad client would send it."""
    x: Tensor = getattr(uploads, part)
    if part in _BEST:
        return torch.full_like(x, _BEST[part])
    if how.kind == "model_gauss":
        each = [_normal(x[0], address[0], "corruption/model", address[1], client) for client in ids.tolist()]
        return how.model_std * torch.stack(each).to(x)
    if how.kind == "stat_negate_B" and x.shape[1]:
        classes = uploads.counts.shape[-1]
        cross = features_in_upload(x.shape[1], classes) * classes  # B comes last
        return torch.cat([x[:, :-cross], -x[:, -cross:]], 1)
    return (-how.kappa if how.kind == "model_sign_flip" else how.scale) * x


def _normal(like: Tensor, seed: int, name: str, *path: int) -> Tensor:
    drawn = rng.stream(seed, name, *path).standard_normal(tuple(like.shape), dtype=np.float32)
    return torch.from_numpy(drawn).to(like.device)


class Mass(NamedTuple):
    """The weight of bad clients in a round."""

    mean: float  # the mean weight of a bad client of the round; the weights of all sum to 1
    total: float
    ratio: float  # of the mean weight to that of a client under equal weights


def mass(weights: Tensor, bad: Tensor) -> Mass | None:
    """From the weights [K] of a round's clients, some of them ``bad`` [K]; None if none is, or all weights are 0."""
    total = float(weights.sum())
    count = int(bad.sum())
    if not count or total <= 0:
        return None
    theirs = float(weights.double()[bad].sum()) / total
    return Mass(theirs / count, theirs, theirs / count * len(weights))
