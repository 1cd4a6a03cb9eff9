"""The exchange with a server: the sum of all uploads, and which clients are excluded from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithm import Inbox
from fedloom.core import tree
from fedloom.engine.local import Outcome


class Tally(NamedTuple):
    """A server's sums so far."""

    total: Any = None  # float64
    buffers: Any = None
    weight: Any = 0.0  # a tensor, to avoid a device synchronisation
    senders: float = 0.0
    kept: tuple[Any, ...] = ()  # (ids, uploads, weights) of each group, for algorithms that need every upload
    excluded: tuple[int, ...] = ()  # clients whose updates were not finite
    senders_ids: tuple[Tensor, ...] = ()  # the clients of each group, in order of arrival

    def ids(self) -> Tensor:
        """The clients whose uploads were kept, in order of arrival."""
        return torch.cat([ids for ids, _, _ in self.kept])


class Received(NamedTuple):
    """The clients of a group whose every number is finite, and the others."""

    ids: Tensor  # [K]
    outcome: Outcome
    times: Tensor  # [K]
    excluded: tuple[int, ...]
    weights: Tensor  # [K] float64: the weight of each, times how often it was drawn
    sums: Any  # [1, ...] float64: the weighted sums of uploads and statistics
    finite: Any = ()  # [] whether all is finite, if not checked yet


def keep_finite(ids: Tensor, outcome: Outcome, times: Tensor) -> Received:
    """Exclude clients whose upload, state, weight or statistics are not finite.

    The sums are needed anyway, and show most of it: in float64 finite float32 numbers cannot overflow, and
    infinities either stay or cancel to NaN, so sums that are finite have only finite terms. Only what is not
    in the sums is then checked row by row; and everything if a sum is not finite, or a weight of zero
    might have hidden a term.
    """
    weights, sums = _summed(outcome, times)
    elsewhere = outcome._replace(uploads=(), buffers=outcome.buffers[:, :0])
    known = bool((weights != 0).all()) and bool(tree.finite_rows(sums, 1))
    ok = tree.finite_rows(elsewhere if known else outcome, len(ids)).cpu()
    if bool(ok.all()):
        return Received(ids, outcome, times, (), weights, sums)
    keep = ok.nonzero().squeeze(1)
    kept = tree.take(outcome, keep.to(outcome.weights.device))
    return Received(ids[keep], kept, times[keep], tuple(ids[~ok].tolist()), *_summed(kept, times[keep]))


def unchecked(ids: Tensor, outcome: Outcome, times: Tensor) -> Received:
    """All clients of a group, whether or not their numbers are finite: ``finite`` says so later.

    The rest of a round can then be queued on a GPU while it still trains; ``keep_finite`` would wait for it.
    """
    weights, sums = _summed(outcome, times)
    elsewhere = (sums, outcome.states, outcome.weights, outcome.memory)
    # A sum is finite only if all its terms are; a weight of zero might have hidden one.
    numbers = [leaf for leaf in tree.leaves(elsewhere) if leaf.is_floating_point()]
    finite = torch.stack([leaf.sum(dtype=torch.float64).isfinite() for leaf in numbers]).all() & (weights != 0).all()
    return Received(ids, outcome, times, (), weights, sums, finite)


def _summed(outcome: Outcome, times: Tensor) -> tuple[Tensor, Any]:
    weights = outcome.weights.double() * tree.on_device(times, outcome.weights.device)
    return weights, tree.mix(weights[None], (outcome.uploads, outcome.buffers))


def add(tally: Tally, part: Received, *, keep: bool = False) -> Tally:
    """The sums with one more group of clients in them; ``keep`` every upload, for algorithms that need each."""
    if not len(part.ids):
        return tally._replace(excluded=tally.excluded + part.excluded)
    total, buffers = tree.take(part.sums, 0)
    if tally.total is not None:
        total, buffers = tree.tmap(torch.add, tally.total, total), tally.buffers + buffers
    kept = () if not keep else ((part.ids, part.outcome.uploads, part.weights),)
    return Tally(
        total=total,
        buffers=buffers,
        weight=tally.weight + part.weights.sum(),
        senders=tally.senders + float(part.times.sum()),
        kept=tally.kept + kept,
        excluded=tally.excluded + part.excluded,
        senders_ids=(*tally.senders_ids, part.ids),
    )


def inbox(tally: Tally, sizes: Tensor, address: tuple[int, int] = (0, 0)) -> Inbox[Any]:
    """What the server reads at the end of the round; also every upload in client order, if requested.

    ``sizes`` [N] are the numbers of training examples of all clients.
    """
    uploads: Any = ()
    weights: Any = ()
    if tally.kept:
        order = tree.on_device(tally.ids().argsort(), tally.buffers.device)
        uploads = tree.take(tree.cat([u for _, u, _ in tally.kept]), order)
        weights = torch.cat([w for _, _, w in tally.kept])[order]
    device = tally.buffers.device
    numbers = torch.tensor([tally.senders, len(sizes), int(sizes.sum())], dtype=torch.float64)
    senders, population, examples = tree.on_device(numbers, device)
    clients = tree.on_device(torch.cat(tally.senders_ids).sort().values, device)
    return Inbox(tally.total, tally.weight, senders, population, examples, uploads, weights, address, clients)
