"""How good predictions are, beyond accuracy: for classes of unequal size, for probabilities, and for numbers."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core import usercode
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.own_function import called, find_function

# By the name under which ``evaluate.metrics`` asks for it, and under which it is recorded.
ClassMeasure: TypeAlias = Literal["balanced_accuracy", "f1_macro", "auc", "brier", "ece"]
NumberMeasure: TypeAlias = Literal["mae", "rmse", "r2"]
MEASURED: tuple[str, ...] = (*get_args(ClassMeasure), *get_args(NumberMeasure))
_BINS = 15  # of the expected calibration error, as in Guo et al. (2017)


def confusion(y: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """How many rows of each true class (row) were predicted as each class (column).  ``[C, C]``"""
    return torch.bincount(y * classes + predicted, minlength=classes * classes).view(classes, classes)


def balanced_accuracy(table: Tensor) -> float:
    """The mean recall of the classes that occur."""
    there = table.sum(1) > 0
    recall = table.diagonal()[there].double() / table.sum(1)[there].double()
    return float(recall.mean())


def f1_macro(table: Tensor) -> float:
    """The mean over classes, of those that occur or were predicted, of the F1 score."""
    hits, rows, columns = table.diagonal().double(), table.sum(1).double(), table.sum(0).double()
    there = (rows + columns) > 0
    return float((2 * hits[there] / (rows + columns)[there]).mean())


def brier(probabilities: Tensor, y: Tensor) -> float:
    """The mean squared distance of the probabilities from the truth, summed over classes (Brier, 1950)."""
    truth = torch.nn.functional.one_hot(y, probabilities.shape[1]).double()
    return float((probabilities.double() - truth).square().sum(1).mean())


def ece(probabilities: Tensor, y: Tensor) -> float:
    """The expected calibration error: how far the probability of the predicted class is from how often it is right."""
    sure, predicted = probabilities.double().max(1)
    bins = (sure * _BINS).ceil().long().clamp(1, _BINS) - 1
    right = (predicted == y).double()
    count = torch.bincount(bins, minlength=_BINS).double()
    gap = torch.bincount(bins, sure - right, minlength=_BINS).abs()
    return float((gap / count.sum()).sum())


def auc_by_class(probabilities: Tensor, y: Tensor) -> float:
    """The area under the ROC curve; for several classes the mean of one against the rest; NaN if undefined."""
    scores, truth = probabilities.double().cpu().numpy(), y.cpu().numpy()
    classes = [1] if scores.shape[1] == 2 else range(scores.shape[1])
    areas = [_area(scores[:, c], truth == c) for c in classes]
    known = [area for area in areas if not np.isnan(area)]
    return float(np.mean(known)) if known else float("nan")


def _area(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> float:
    from scipy.stats import rankdata

    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return float("nan")
    ranks = rankdata(scores)[positive].sum()
    return float((ranks - count * (count + 1) / 2) / (count * others))


def class_measures(logits: Tensor, y: Tensor) -> dict[str, float]:
    """Every measure of classification, from the outputs of a net and the true classes."""
    probabilities = logits.double().softmax(1)
    table = confusion(y, probabilities.argmax(1), logits.shape[1])
    return {
        "balanced_accuracy": balanced_accuracy(table),
        "f1_macro": f1_macro(table),
        "auc": auc_by_class(probabilities, y),
        "brier": brier(probabilities, y),
        "ece": ece(probabilities, y),
    }


def number_measures(predicted: Tensor, y: Tensor) -> dict[str, float]:
    """Every measure of regression: mean absolute error, root of the mean squared error, share of variance explained."""
    gap, truth = (predicted.double() - y.double()), y.double()
    spread = (truth - truth.mean()).square().sum()
    left = gap.square().sum()
    r2 = float(1 - left / spread) if float(spread) > 0 else float("nan")
    return {"mae": float(gap.abs().mean()), "rmse": float(gap.square().mean().sqrt()), "r2": r2}


def measured(name: str, outputs: Tensor, y: Tensor, unit: float = 1.0) -> float:
    """One measure by its name; NaN where it is not defined. ``unit``: of the regression target."""
    if usercode.is_reference(name):
        return _own_measure(name, outputs, y)
    if name in get_args(NumberMeasure):
        found = number_measures(outputs.squeeze(-1), y)[name]
        return found if name == "r2" else unit * found
    probabilities = outputs.double().softmax(1)
    if name == "auc":
        return auc_by_class(probabilities, y)
    if name in ("brier", "ece"):
        return brier(probabilities, y) if name == "brier" else ece(probabilities, y)
    table = confusion(y, probabilities.argmax(1), outputs.shape[1])
    return balanced_accuracy(table) if name == "balanced_accuracy" else f1_macro(table)


def _own_measure(name: str, outputs: Tensor, y: Tensor) -> float:
    """What the user's function computes from the outputs for some rows, all at once, and their labels."""
    found = called(find_function(name, "evaluate.metrics"), name, "evaluate.metrics", outputs, y)
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        what = f"'{name}' should return one number for {len(y)} rows (got {got})"
        raise ConfigError([Fault("evaluate.metrics", what, "such as the mean of the rows' numbers")]) from error


def measured_by_owner(
    name: str, outputs: Tensor, y: Tensor, *, owner: Tensor, clients: int, unit: float = 1.0
) -> Tensor:
    """A measure of each client; rows may be in any order; NaN if undefined.  ``[clients]``"""
    out = torch.full((clients,), float("nan"), dtype=torch.float64, device=outputs.device)
    order = owner.argsort(stable=True)
    sizes = torch.bincount(owner, minlength=clients).tolist()
    for client, rows in enumerate(torch.split(order, sizes)):
        if len(rows) and bool(outputs[rows].isfinite().all()):
            out[client] = measured(name, outputs[rows], y[rows], unit)
    return out
