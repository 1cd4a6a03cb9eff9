"""The mechanism: uploads are clipped and noise is added, with every number of the settings resolved.

Noise is drawn from a secret key of the run at an address (round, client, tensor): a resumed run adds the same noise,
and no one else can subtract it (see ``fedloom.trust.noise``). Noise in sums over examples has the address (client): a
client that is to be forgotten sends the same numbers again, which reveals nothing new.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.core.errors import ConfigError, Fault
from fedloom.maths.private_sums import noised_sums
from fedloom.trust import noise
from fedloom.trust.accountant import Release, epsilon, relation
from fedloom.trust.ledger import Ledger
from fedloom.trust.noise import SIMULATED, Key


class HiddenSums(NamedTuple):
    """The mechanism for sums over examples."""

    sensitivity: float  # D: their sensitivity to one example
    cross_scale: float
    counts: bool  # whether counts of classes are sent, with noise; else they are not sent


class Guard(NamedTuple):
    """Privacy of one run: every number resolved."""

    key: Key
    clip: float  # S; of sums R
    factors: Tensor  # [N] f_i
    release: Release
    releases: tuple[int, ...]  # [rounds + 1] the largest number of uses of the mechanism on one client by each round
    delta: float
    weight: float | None  # by which the sum of a round is divided; None: the number of senders
    sums: HiddenSums | None = None  # if sums over examples are protected
    features: float | None = None  # R, if means over examples are protected in addition to updates
    spent: float = 0.0  # the largest epsilon that the run has recorded, if it may have gone back since

    @property
    def unit(self) -> Literal["client", "example"]:
        """The unit that is protected."""
        return "client" if self.sums is None or self.features is not None else "example"

    @property
    def reach(self) -> float:
        """The sensitivity of what is released to one unit: z is in units of this."""
        return self.sums.sensitivity if self.sums is not None and self.features is None else self.clip

    def deviation(self, senders: int) -> float:
        """The deviation of the noise in an upload, if ``senders`` clients send one in the round."""
        return self.release.noise * self.reach / (1.0 if self.release.local else math.sqrt(senders))

    def summary(self, rounds: int) -> str:
        """What is protected and how well, in one sentence."""
        where = "each upload" if self.release.local else "their sum"
        what = f"uploads clipped to {self.clip:g} · noise {self.release.noise:.4g} clips in {where}"
        if self.sums is not None and self.features is not None:
            what = (
                f"updates clipped to {self.clip:g}, features to {self.features:g}, so that means over examples are no "
            )
            what += f"longer than {self.sums.sensitivity:.4g} · noise {self.release.noise:.4g} times that in each"
        elif self.sums is not None:
            where = "each client's sums" if self.release.local else "the sums over all clients"
            what = f"features clipped to {self.clip:g} · one example changes sums by {self.reach:.4g} at most · noise "
            what += f"{self.release.noise:.4g} times that in {where}"
        spent = f"{max(self.epsilon(rounds), self.spent):.4g}" if self.release.noise else "infinite: there is no noise"
        simulated = f" ({SIMULATED})" if self.key.public else ""
        return (
            f"{what} · after {rounds} rounds epsilon {spent} at delta {self.delta:g}, for each {self.unit}{simulated}"
        )

    @property
    def metric(self) -> str:
        """The name under which epsilon is recorded."""
        return "privacy/epsilon_simulated" if self.key.public else "privacy/epsilon"

    def lottery(self, seed: int) -> int:
        """The seed from which clients are drawn: a secret one if epsilon relies on the choice being unknown."""
        counts = self.release.sampled and self.release.noise > 0
        return self.key.number("privacy/cohort") if counts and not self.key.public else seed

    def opened(self) -> Ledger:
        """A ledger before the first round."""
        return Ledger(self.release, self.delta, self.reach, (0,) * (len(self.factors) if self.release.local else 1))

    def charged(self, ledger: Ledger, ids: Tensor, uploads: Any = ()) -> Ledger:
        """The ledger after a round in which these clients sent the protected ``uploads``.

        Sums over examples have the same noise whenever they are sent: only the first time is charged. Means have
        noise of the round, and are charged in addition to updates.
        """
        charged = set(ids.tolist()) if self.release.local else {0}
        parts = 1 if self.features is None else bool(uploads.dw.numel()) + bool(uploads.rows.numel())
        first = self.sums is not None and self.features is None
        uses = ((max(n, 1) if first else n + parts) if k in charged else n for k, n in enumerate(ledger.uses))
        return ledger._replace(uses=tuple(uses))

    def epsilon(self, round_: int) -> float:
        """The epsilon that is planned for the end of this round."""
        return epsilon(self.release, self.releases[min(round_, len(self.releases) - 1)], self.delta)

    def described(self) -> dict[str, Any]:
        """What a run folder records of its privacy; infinity, which JSON cannot express, is None."""
        spent = max(self.epsilon(len(self.releases) - 1), self.spent)
        own = {
            **self.release._asdict(),
            "clip": self.clip,
            "noise_factors": [round(f, 6) for f in self.factors.tolist()],
        }
        if self.sums is not None and self.features is not None:
            own |= {"feature_clip": self.features, **self.sums._asdict()}
        elif self.sums is not None:  # the choice of clients does not matter
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
    """The uploads [K, ...] as these clients send them, if ``senders`` clients send one in the round."""
    if guard.key.by_content:
        guard = guard._replace(key=noise.for_content(guard.key, _content(uploads, guard.deviation(senders), round_)))
    if guard.sums is not None and guard.features is not None:
        return _moves_and_means(guard, guard.sums, uploads, ids, round_)
    if guard.sums is not None:
        return noised_statistics(guard.sums, guard.deviation(senders), uploads, ids, guard.key)
    std = guard.deviation(senders) * guard.factors[ids]
    return noised_uploads(clipped_uploads(uploads, guard.clip), std, ids, guard.key, round_)


def _content(uploads: Any, std: float, round_: int) -> bytes:
    """What identifies uploads that are about to be noised, and how they are."""
    digest = hashlib.sha256(repr((round_, std)).encode())
    for name, leaf in tree.named_leaves(uploads):
        digest.update(repr((name, tuple(leaf.shape), leaf.dtype)).encode())
        digest.update(leaf.cpu().contiguous().numpy().tobytes())
    return digest.digest()


def _moves_and_means(guard: Guard, sums: HiddenSums, uploads: Any, ids: Tensor, round_: int) -> Any:
    """Updates and means over examples [K, ...] as these clients send them; anything else is refused."""
    beside = [x for name, x in uploads._asdict().items() if name not in ("dw", "rows", "counts")]
    if any(bool(leaf.any()) for leaf in tree.leaves(beside)):
        what = "clients send more than updates and means over their examples, which is not protected"
        raise ConfigError([Fault("privacy.clip", f"{what} (got {guard.clip:g})", "leave the section out")])
    dw, rows, counts = uploads.dw, uploads.rows, uploads.counts
    factors = guard.release.noise * guard.factors[ids]
    if dw.numel():
        dw = noised_uploads(clipped_uploads((dw,), guard.clip), guard.clip * factors, ids, guard.key, round_)[0]
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


def noised_statistics(how: HiddenSums, std: float, uploads: Any, ids: Tensor, key: Key) -> Any:
    """The sums G and B [K, ...] as these clients send them, with the same noise whenever one sends them.

    Clients that send no sums send zeros without noise; a client to be forgotten sends the negative, noise included.
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


def empty_round_noise(guard: Guard, upload: Any, round_: int) -> Any:
    """The sum that the server uses in a round without clients: only noise, as the accountant assumes."""
    nobody = torch.tensor([len(guard.factors)])
    none = tree.tmap(lambda x: torch.zeros_like(x)[None], upload)
    std = torch.tensor([guard.release.noise * guard.clip])
    return tree.tmap(lambda x: x[0].double(), noised_uploads(none, std, nobody, guard.key, round_))


def clipped_uploads(uploads: Any, clip: float) -> Any:
    """Each upload of [K, ...] clipped to the norm ``clip``, over all its tensors; shorter ones stay bit for bit."""
    squares = [leaf.reshape(len(leaf), -1).double().square().sum(1) for leaf in tree.leaves(uploads)]
    factor = (clip / torch.stack(squares).sum(0).sqrt()).clamp(max=1)
    return tree.tmap(lambda x: x * factor.to(x.dtype).view(-1, *[1] * (x.dim() - 1)), uploads)


def noised_uploads(uploads: Any, std: Tensor, ids: Tensor, key: Key, round_: int) -> Any:
    """The uploads [K, ...] with noise of deviation ``std`` [K], drawn at the address of each client and tensor."""
    if not bool(std.any()):
        return uploads

    def add(x: Tensor, tensor: int) -> Tensor:
        shape = tuple(x.shape[1:])
        drawn = [noise.normals(key, math.prod(shape), "privacy", round_, client, tensor) for client in ids.tolist()]
        scale = std.to(x).view(-1, *[1] * (x.dim() - 1))
        return x + scale * torch.from_numpy(np.stack(drawn)).view(len(drawn), *shape).to(x)

    return tree.unflatten(uploads, [add(x, k) for k, x in enumerate(tree.leaves(uploads))])
