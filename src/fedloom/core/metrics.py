"""Measurements that merge: the result does not depend on how clients or batches are grouped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom.core import usercode
from fedloom.core.objective import CLASSES, Criterion, row_cross_entropy
from fedloom.core.quality import MEASURED
from fedloom.core.vocabulary import SPREAD, lower_is_better

# What is ranked: every score of every class at once, raw or after a softmax, or each class separately.
Auc: TypeAlias = Literal["micro_logits", "micro_softmax", "macro_present"]

# Scores that are ranked at once: each takes some dozens of bytes meanwhile.
_RANKED = 1 << 20


class Scores(NamedTuple):
    """How a model did on some examples, one by one."""

    correct: Tensor  # [B] 1.0 or 0.0; a row of scores that is not finite counts as wrong; of numbers, the error
    loss: Tensor  # [B]


def score(logits: Tensor, y: Tensor, criterion: Criterion = CLASSES) -> Scores:
    """Accuracy and loss of each example; of a number that is learned, its absolute error in place of accuracy."""
    if criterion.regression:
        error = (logits.squeeze(-1).double() - y.double()).abs() * criterion.unit
        return Scores(error, criterion.each(logits.double(), y.double()))
    right = (logits.argmax(-1) == y) & logits.isfinite().all(-1)
    if criterion.each is row_cross_entropy:
        return Scores(right.double(), nn.functional.cross_entropy(logits.double(), y, reduction="none"))
    return Scores(right.double(), criterion.each(logits.double(), y))


def auc(variant: Auc, logits: Tensor, y: Tensor, *, owner: Tensor, clients: int) -> Tensor:
    """The area under the ROC curve of each client; rows may be in any order.  ``[clients]``

    ``micro``: the chance that the score of a right class is above that of a wrong one, among all of the
    client's rows and classes; ``macro_present``: the mean of the areas of the classes of which the client
    has both rows and other rows. A tie counts half. NaN where there is nothing to compare, or where a
    score of the client is not finite.

    logits ``[B, C]``, y ``[B]``, owner ``[B]`` in 0..clients-1; scores are compared in float32.
    """
    scores = logits.float()
    broken = sum_by(owner, ~scores.isfinite().all(1), clients) > 0
    if variant == "micro_softmax":
        scores = scores.double().softmax(-1).float()  # rounded at the end, equal rows tie whatever their classes' order
    curves = scores.shape[1] if variant == "macro_present" else 1
    of_class = torch.arange(scores.shape[1], device=scores.device) % curves
    areas = _areas(scores, y, owner * curves, of_class, clients * curves).view(clients, curves)
    return areas.nanmean(1).masked_fill(broken, float("nan"))


def _areas(scores: Tensor, y: Tensor, first: Tensor, of_class: Tensor, curves: int) -> Tensor:
    """The area under each of ``curves`` curves; the score of class c in row b belongs to ``first[b] + of_class[c]``.

    By ranks: a positive's is the number of scores below it on its curve, those that equal it by half.
    Halves of whole numbers are summed exactly in float64, hence in any order and from any pieces.
    """
    positive = _keys(scores.gather(1, y[:, None]).squeeze(1), first + of_class[y]).sort().values
    curve = positive >> 32
    starts = torch.arange(curves + 1, device=scores.device) << 32
    positives = sum_by(curve, torch.ones_like(curve), curves)
    ranks, count = torch.zeros_like(positives), torch.zeros_like(positives)
    rows = max(1, _RANKED // max(1, scores.shape[1]))
    for some, of_row in zip(torch.split(scores, rows), torch.split(first, rows), strict=True):
        key = _keys(some, of_row[:, None] + of_class).flatten().sort().values
        start = torch.searchsorted(key, starts)
        twice = torch.searchsorted(key, positive) + torch.searchsorted(key, positive, right=True)
        ranks = ranks + sum_by(curve, twice.double() / 2 - start[curve], curves)
        count = count + start.diff()
    # Among themselves, positives have half of their number squared as the sum of their ranks.
    return (ranks - positives.square() / 2) / (positives * (count - positives))


def _keys(scores: Tensor, curve: Tensor) -> Tensor:
    """Whole numbers in the order of the curves, and within a curve in that of its scores."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 makes -0.0 the zero that it equals
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # of two negative floats, the larger has the smaller bits
    return (curve << 32) + ordered + (1 << 31)


class Spread(NamedTuple):
    """One value per client, summarised."""

    weighted: float  # mean weighted by the clients' examples
    mean: float
    std: float  # population standard deviation
    worst: float  # mean of the worst tenth of the clients (at least one of them)


def spread(values: NDArray[np.float64], weights: NDArray[np.float64], *, low_is_bad: bool) -> Spread:
    """The spread of ``values`` over the clients that have any examples."""
    values, weights = values[weights > 0], weights[weights > 0]
    if not len(values):
        nan = float("nan")
        return Spread(nan, nan, nan, nan)
    tail = max(1, len(values) // 10)
    ordered = np.sort(values) if low_is_bad else np.sort(values)[::-1]
    return Spread(
        float((values * weights).sum() / weights.sum()),
        float(values.mean()),
        float(values.std()),
        float(ordered[:tail].mean()),
    )


class Verdicts(NamedTuple):
    """How some clients' models did, each on its client's own rows."""

    ids: Tensor  # [K]
    rows: Tensor  # [K] how many the client has
    correct: Tensor  # [K] how many of them its model got right
    loss: Tensor  # [K] the sum of their losses
    auc: dict[str, Tensor]  # [K] areas by variant and further measures by name, NaN if undefined
    first: str = "accuracy"  # what ``correct`` sums up: "mae" in regression

    @staticmethod
    def cat(parts: Sequence[Verdicts]) -> Verdicts:
        """The verdicts on all of these clients."""
        some = [part for part in parts if len(part.ids)]
        if not some:
            none = torch.zeros(0, dtype=torch.float64)
            return Verdicts(none.long(), none, none, none, {})
        ids, rows, correct, loss = (torch.cat(column) for column in zip(*(part[:4] for part in some), strict=True))
        areas = {name: torch.cat([part.auc[name] for part in some]) for name in some[0].auc}
        return Verdicts(ids, rows, correct, loss, areas, some[0].first)


def client_metrics(prefix: str, found: Verdicts, *, shared: bool = False) -> dict[str, float]:
    """Accuracy, loss and areas over the clients that have rows, under names that begin with ``prefix``.

    A client whose loss is not finite is excluded from the loss and counted as ``diverged``; only if no
    client's loss is finite, the loss is not either. Not so where all clients have one ``shared`` model:
    it has diverged if it has on any client's rows. A client without an area is excluded from that area, and
    an area that no client has is not reported.
    """
    order = found.ids.cpu().argsort()  # sums of floats depend on their order: keep it fixed
    rows = found.rows.cpu()[order].double().numpy()
    if not (rows > 0).any():
        return {}
    measured = torch.stack([found.correct, found.loss, *found.auc.values()]).double().cpu()[:, order].numpy()
    each, rows = measured[:, rows > 0], rows[rows > 0]
    accuracy, loss = each[0] / rows, each[1] / rows
    counts = np.isfinite(loss) | shared
    named = _named(f"{prefix}/{found.first}", spread(accuracy, rows, low_is_bad=found.first == "accuracy"))
    named |= _named(f"{prefix}/loss", spread(loss, rows * counts, low_is_bad=False))
    for variant, area in zip(found.auc, each[2:], strict=True):
        known = ~np.isnan(area)
        if known.any():
            name = f"{prefix}/{measure_name(variant)}"
            named |= _named(name, spread(area, rows * known, low_is_bad=not lower_is_better(name)))
    return named | ({} if counts.all() else {f"{prefix}/diverged": float((~counts).sum())})


def measure_name(variant: str) -> str:
    """The name of a measure beyond accuracy and loss; variants of AUC have different names, the user's own that of
    their function."""
    if usercode.is_reference(variant):
        return variant.rpartition(":")[2]
    return f"auc_{variant}" if variant in get_args(Auc) else variant


def is_taken(name: str) -> bool:
    """Whether a metric of fedloom has this name, or may have."""
    known = {"accuracy", "loss", "diverged", *MEASURED, *map(measure_name, get_args(Auc))}
    return name in known or name.endswith(tuple(SPREAD))


def _named(name: str, of: Spread) -> dict[str, float]:
    return {name: of.weighted, f"{name}_mean": of.mean, f"{name}_std": of.std, f"{name}_worst10": of.worst}


class Summary(NamedTuple):
    """The summary of one metric over a run; never only its best value."""

    last: float
    best: float
    mean_last_10: float


def summarise(name: str, series: Sequence[float]) -> Summary:
    """The last, best and mean of the last ten values; for a loss or a distance, best is the lowest."""
    best = min if lower_is_better(name) else max
    return Summary(series[-1], best(series), float(np.mean(series[-10:])))


LineT = TypeVar("LineT", bound=Mapping[str, Any])


def once_trained(records: Sequence[LineT]) -> Sequence[LineT]:
    """The evaluations once training has begun; where it has not, all of them."""
    return [line for line in records if line["round"] > 0] or records


def summary_of_records(name: str, records: Sequence[Mapping[str, Any]]) -> Summary | None:
    """The summary of a metric over the evaluations of a run, once training has begun; None: it was not measured."""
    values = [line[name] for line in once_trained(records) if isinstance(line.get(name), int | float)]
    return summarise(name, values) if values else None


def rounds_to_convergence(name: str, points: Sequence[tuple[int, float]]) -> int | None:
    """The round from which a metric has converged, given its (round, value) pairs; None if there are none.

    With A the mean of the last ten values and M the moving mean of ten (of fewer, at first): the first evaluation at
    which M is within 1 % of A, or better, and after which it is never again more than 2 % worse.
    """
    if not points:
        return None
    rounds, values = [r for r, _ in points], np.array([v for _, v in points])
    means = np.array([values[max(0, k - 9) : k + 1].mean() for k in range(len(values))])
    worse = (means - means[-1]) if lower_is_better(name) else (means[-1] - means)
    off = np.flatnonzero(worse > 0.02 * abs(means[-1]))
    later = int(off[-1]) + 1 if len(off) else 0
    return rounds[later + int(np.argmax(worse[later:] <= 0.01 * abs(means[-1])))]


def sum_by(owner: Tensor, values: Tensor, clients: int) -> Tensor:
    """The sum of ``values`` for each owner in 0..clients-1, in float64."""
    out = torch.zeros(clients, dtype=torch.float64, device=values.device)
    return out.index_add_(0, owner, values.double())
