"""The plan of a round: which clients take part, and which examples each of them reads at each step.

A plan is a pure function of (seed, round, clients): it never depends on the executor, on the order of
clients or on how many train side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, field_validator
from torch import Tensor
from torch.nn.functional import pad

from fedloom.algorithm import Phase, Work
from fedloom.core import rng, tree
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.hidden_random import from_a_seed, seed_of
from fedloom.core.optim import Local
from fedloom.core.own_function import MayNameFunction, arguments_among, called, named_or_own
from fedloom.core.schema import other_than, when
from fedloom.data.federation import Ranges

_LAST = torch.iinfo(torch.int64).max


_SAMPLINGS = ("uniform", "proportional", "poisson", "all")


class Cohort(MayNameFunction):
    """The clients of a round."""

    section: ClassVar[str] = "cohort"
    naming: ClassVar[str] = "sampling"
    offered: ClassVar[tuple[str, ...]] = ("round", "rng", "clients", "size", "sizes")

    size: Annotated[PositiveInt | None, when(sampling=other_than("all"))] = Field(
        None, description="clients of a round; unset: 10, or all if there are fewer"
    )
    sampling: str = Field(
        "uniform",
        description="uniform: without replacement; proportional: by data, with replacement; poisson: each client "
        "independently, size is the mean; all: every client; or your own, as file.py:function",
    )

    @field_validator("sampling")
    @classmethod
    def _is_a_sampling(cls, name: str) -> str:
        return named_or_own(name, _SAMPLINGS, "sampling")


class Address(NamedTuple):
    """The address of a plan's randomness."""

    seed: int
    round: int
    name: str = "batches"


class Drawn(NamedTuple):
    """The clients of a round, each once, in order, and how often each was drawn."""

    ids: Tensor  # [K] long
    times: Tensor  # [K] float


class Plan(NamedTuple):
    """What the batches of clients depend on, in addition to the clients."""

    local: Local
    ranges: Ranges
    address: Address
    lr: float
    usual: int = 0  # clients of most groups; 0: unknown


class Group(NamedTuple):
    """Clients that train side by side, the longest first.

    ``rows`` are padded to the widest batch and the longest client; padding has mask 0, and the
    executors never compute steps that are padding for every client.
    """

    ids: Tensor  # [K] long
    rows: Tensor  # [K, T, B] long
    mask: Tensor  # [K, T, B] float
    keys: Tensor  # [K, T] long: the randomness of each step
    steps: list[int]  # [K] descending
    widths: list[int]  # [T] the widest real batch of each step
    per_epoch: list[int]  # [K] steps of one pass
    work: Work  # of [K]
    plan: Plan

    def to(self, device: torch.device) -> Group:
        """The same group on the device where it is trained."""
        rows, mask, keys, work = tree.on_device((self.rows, self.mask, self.keys, self.work), device)
        return self._replace(rows=rows, mask=mask, keys=keys, work=work)

    def pick(self, lanes: list[int], pass_: int | None = None) -> Group:
        """These clients of the group, in this order; ``pass_``: only their steps of that pass."""
        at = torch.tensor(lanes, device=self.rows.device)
        work = tree.take(self.work, at)
        steps, per_epoch = [self.steps[k] for k in lanes], [self.per_epoch[k] for k in lanes]
        rows, mask, keys, widths = self.rows[at], self.mask[at], self.keys[at], self.widths
        if pass_ is not None:
            left = [max(0, min(n - pass_ * e, e)) for n, e in zip(steps, per_epoch, strict=True)]
            first = torch.tensor([pass_ * e for e in per_epoch], device=at.device)[:, None]
            t = (first + torch.arange(max(left), device=at.device)).clamp(max=rows.shape[1] - 1)
            k = torch.arange(len(lanes), device=at.device)[:, None]
            rows, mask, keys, steps = rows[k, t], mask[k, t], keys[k, t], left
            widths = [
                max(self.widths[pass_ * e + i] for e, n in zip(per_epoch, left, strict=True) if i < n)
                for i in range(max(left))
            ]
            work = work._replace(steps=torch.tensor(left, dtype=torch.float32, device=at.device))
        return Group(self.ids[lanes], rows, mask, keys, steps, widths, per_epoch, work, self.plan)


def draw_cohort(cohort: Cohort, sizes: Tensor, seed: int, round_: int) -> Drawn:
    """The cohort of a round; a client without training data is never drawn."""
    able = np.flatnonzero(sizes.numpy() > 0)
    size = cohort.size if cohort.size is not None else min(10, len(able))
    chance = rng.stream(seed, "cohort", round_)
    if cohort.is_own:
        ids = _own_choice(cohort, sizes.numpy(), size, round_, chance)
        times = np.ones(len(ids))
    elif cohort.sampling == "all":
        ids, times = able, np.ones(len(able))
    elif cohort.sampling == "uniform":
        ids = able[np.sort(chance.choice(len(able), min(size, len(able)), replace=False))]
        times = np.ones(len(ids))
    elif cohort.sampling == "poisson":
        ids = able[chance.random(len(able)) < size / len(able)]
        times = np.ones(len(ids))
    else:
        upto = np.cumsum(sizes.numpy()[able])
        picks = np.searchsorted(upto, chance.random(size) * upto[-1], side="right")
        ids, counts = np.unique(able[picks], return_counts=True)
        times = counts.astype(np.float64)
    return Drawn(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(times.astype(np.float32)))


def _own_choice(
    cohort: Cohort, sizes: NDArray[np.int64], size: int, round_: int, chance: np.random.Generator
) -> NDArray[np.int64]:
    """The clients that the user's function draws, in order."""
    offered = {"round": round_, "rng": chance, "clients": len(sizes), "size": size, "sizes": sizes.copy()}
    function, at = cohort.own_function(), "cohort.sampling"
    with from_a_seed(seed_of(chance)):
        ids = np.asarray(called(function, cohort.sampling, at, **arguments_among(function, offered)))
    ids = ids.astype(np.int64) if ids.shape == (0,) else ids
    what = ""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        what = f"should return the numbers of clients (got {ids.dtype} of shape {ids.shape})"
    elif len(ids) and (ids.min() < 0 or ids.max() >= len(sizes)):
        what = f"should return clients in 0..{len(sizes) - 1} (got {ids.min()} to {ids.max()})"
    elif len(np.unique(ids)) < len(ids):
        what = f"should return each client once (got {sorted(ids.tolist())})"
    elif not (sizes[ids] > 0).all():
        what = f"returns client {ids[sizes[ids] == 0][0]}, which has no training data (see sizes)"
    if what:
        raise ConfigError([Fault(at, f"'{cohort.sampling}' {what}, in round {round_ + 1}")])
    return np.sort(ids).astype(np.int64)


class Amount(NamedTuple):
    """How much each client does."""

    size: Tensor  # [K] examples
    width: Tensor  # [K] examples in a full batch
    per_epoch: Tensor  # [K] steps of one pass over the data
    steps: Tensor  # [K] steps of the whole round


def amounts(local: Local, sizes: Tensor, epochs: int | None = None) -> Amount:
    """Steps and batch widths of clients with ``sizes`` examples; ``epochs`` overrides ``local``."""
    width = sizes if local.batch == 0 else sizes.clamp(max=local.batch)
    whole = torch.div(sizes, width.clamp(min=1), rounding_mode="floor")
    every = -torch.div(-sizes, width.clamp(min=1), rounding_mode="floor")
    per_epoch = whole if local.drop_last or local.wrap_last else every  # after this many steps, a new pass begins
    if epochs is None and local.steps is not None:
        return Amount(sizes, width, per_epoch, torch.full_like(sizes, local.steps))
    steps = (whole if local.drop_last else every) * (epochs or local.epochs)
    return Amount(sizes, width, per_epoch, steps)


def groups(ids: Tensor, amount: Amount, lanes: int, *, mixed: bool = False) -> list[Tensor]:
    """The positions in ``ids`` that train side by side: at most ``lanes``, similar in width and length.

    Clients whose batches are less than half as wide are in other groups, so that padding never costs more
    than the work itself, unless ``mixed``.
    """
    scale = torch.ceil(torch.log2(amount.width.double().clamp(min=1))).long()
    scale = torch.zeros_like(scale) if mixed else scale
    order = np.lexsort((ids.numpy(), -amount.size.numpy(), -amount.steps.numpy(), -scale.numpy()))
    found: list[Tensor] = []
    at = 0
    while at < len(order):
        same = scale.numpy()[order[at : at + lanes]] == scale.numpy()[order[at]]
        end = at + (int(np.argmin(same)) if not same.all() else len(same))
        found.append(torch.from_numpy(order[at:end].copy()))
        at = end
    return found


def plans(
    local: Local,
    ranges: Ranges,
    ids: Tensor,
    address: Address,
    *,
    lr: float,
    lanes: int,
    epochs: int | None = None,
    steps: Tensor | None = None,
    mixed: bool = False,
    usual: int = 0,
) -> Iterator[Group]:
    """The groups of a round, one at a time, so that a large cohort's indices never exist all at once.

    ``epochs`` and ``steps`` [K] override ``local``. ``usual``: the number of clients of most groups of the run.
    ``mixed``: clients with less than a batch need no separate group. They take one step per pass, which on a GPU costs
    less than another group.
    """
    amount = amounts(local, ranges.sizes[ids], epochs)
    amount = amount if steps is None else amount._replace(steps=steps)
    for part in groups(ids, amount, lanes, mixed=mixed and local.batch > 0):
        chosen = Amount(*(column[part] for column in amount))
        yield _group(Plan(local, ranges, address, lr, usual), ids[part], chosen)


def again(group: Group, phase: Phase, epochs: int | None = None) -> Group:
    """Other batches for the same clients, in the same order: those of another phase of their round."""
    plan = group.plan._replace(address=group.plan.address._replace(name=phase.name))
    amount = extent(plan.local, plan.ranges.sizes[group.ids], phase, epochs)
    return _group(plan, group.ids, amount, block=phase.sampling == "block")


def extent(local: Local, sizes: Tensor, phase: Phase, epochs: int | None = None) -> Amount:
    """The work of clients with ``sizes`` examples in a phase other than the main one; ``epochs`` overrides its own."""
    part = (sizes.double() * phase.share).long().clamp(min=max(1, local.batch)).minimum(sizes)
    # Batches that are read repeatedly include the last example.
    whole = {"drop_last": False, "wrap_last": False} if phase.repeat else {}
    amount = amounts(local.model_copy(update=whole), part, epochs or phase.epochs or 1)
    return amount if phase.steps is None else amount._replace(steps=torch.full_like(sizes, phase.steps))


def joined_groups(groups: Sequence[Group]) -> Group:
    """The clients of several groups, in this order, as one whose steps can be captured."""
    longest, widest = (max(group.rows.shape[d] for group in groups) for d in (1, 2))

    def padded(x: Tensor) -> Tensor:
        more = (0, widest - x.shape[2]) if x.ndim == 3 else ()
        return pad(x, (*more, 0, longest - x.shape[1]))

    first, widths = groups[0], [group.widths + [0] * (longest - len(group.widths)) for group in groups]
    return Group(
        ids=torch.cat([group.ids for group in groups]),
        rows=torch.cat([padded(group.rows) for group in groups]),
        mask=torch.cat([padded(group.mask) for group in groups]),
        keys=torch.cat([padded(group.keys) for group in groups]),
        steps=[n for group in groups for n in group.steps],
        widths=[max(each) for each in zip(*widths, strict=True)],
        per_epoch=[n for group in groups for n in group.per_epoch],
        work=first.work._replace(
            steps=torch.cat([group.work.steps for group in groups]), lr=torch.cat([group.work.lr for group in groups])
        ),
        plan=first.plan._replace(usual=sum(group.plan.usual for group in groups)),
    )


def once(ranges: Ranges, ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """All rows of each client in order, in batches of ``width``, and which are real.  ``[K, T, B]`` both"""
    sizes = ranges.sizes[ids]
    steps = max(1, -(-int(sizes.max()) // width))
    place = torch.arange(steps * width).view(1, steps, width)
    real = place < sizes[:, None, None]
    rows = ranges.rows[(ranges.start[ids][:, None, None] + place).where(real, 0)]
    return rows, real.to(torch.float32)


def looked_through(group: Group, width: int) -> Group:
    """These clients, each of which reads all of its rows once, in order, in batches of ``width``."""
    rows, mask = once(group.plan.ranges, group.ids, width)
    steps = (-torch.div(-group.plan.ranges.sizes[group.ids], width, rounding_mode="floor")).clamp(min=1)
    return group._replace(
        rows=rows,
        mask=mask,
        keys=torch.zeros(rows.shape[:2], dtype=torch.int64),
        steps=steps.tolist(),
        widths=mask.bool().any(0).sum(-1).tolist(),
        per_epoch=steps.tolist(),
    )


def _group(plan: Plan, ids: Tensor, amount: Amount, *, block: bool = False) -> Group:
    ranges, address = plan.ranges, plan.address
    longest, widest = int(amount.steps.max()), int(amount.width.max())
    epochs = int((-torch.div(-amount.steps, amount.per_epoch.clamp(min=1), rounding_mode="floor")).max())
    order = (_blocks if block else _shuffles)(ids, ranges.sizes[ids], amount.size, epochs, address)  # [K, E, n]
    t = torch.arange(longest)[None, :, None]
    b = torch.arange(widest)[None, None, :]
    per_epoch, width = amount.per_epoch[:, None, None].clamp(min=1), amount.width[:, None, None]
    epoch, place = torch.div(t, per_epoch, rounding_mode="floor"), (t % per_epoch) * width + b
    real = (t < amount.steps[:, None, None]) & (b < width) & (place < amount.size[:, None, None])
    k = torch.arange(len(ids))[:, None, None]
    pick = order[k, epoch.clamp(max=epochs - 1), place.clamp(max=order.shape[2] - 1)]
    rows = ranges.rows[(ranges.start[ids][:, None, None] + pick).where(real, 0)]
    work = Work(
        steps=amount.steps.to(torch.float32),
        examples=ranges.sizes[ids].to(torch.float32),
        lr=torch.full((len(ids),), plan.lr, dtype=torch.float32),
        round=torch.full((len(ids),), float(address.round), dtype=torch.float32),
        client=ids,
    )
    return Group(
        ids=ids,
        rows=rows,
        mask=real.to(torch.float32),
        keys=rng.bits(address.seed, f"{address.name}/keys", address.round, ids[:, None], torch.arange(longest)),
        steps=amount.steps.tolist(),
        widths=real.any(0).sum(-1).tolist(),
        per_epoch=amount.per_epoch.clamp(min=1).tolist(),
        work=work,
        plan=plan,
    )


def _blocks(ids: Tensor, sizes: Tensor, wanted: Tensor, epochs: int, at: Address) -> Tensor:
    """For each client ``wanted`` of its examples in stored order, from a random one on; the same in every epoch."""
    offset = (rng.uniform(at.seed, f"{at.name}/offset", at.round, ids).double() * (sizes - wanted + 1)).long()
    return (offset[:, None] + torch.arange(int(wanted.max())))[:, None, :].expand(-1, epochs, -1)


def _shuffles(ids: Tensor, sizes: Tensor, wanted: Tensor, epochs: int, at: Address) -> Tensor:
    """For each client and epoch its examples in a random order, padding last.  ``[K, E, n]``"""
    place = torch.arange(int(sizes.max()))
    word = rng.bits(at.seed, at.name, at.round, ids[:, None, None], torch.arange(epochs)[:, None], place)
    word = (word >> 1).masked_fill(place >= sizes[:, None, None], _LAST)  # >> 1: every draw sorts before padding
    return word.argsort(dim=-1, stable=True)[..., : int(wanted.max())]
