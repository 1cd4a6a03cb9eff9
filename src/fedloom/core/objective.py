"""What is learned: the section [task], and the loss of each row that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.nn.functional import huber_loss, log_softmax

from fedloom.core import usercode
from fedloom.core.batch_effects import loss_mixes_rows
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.optim import TAKES_STEPS
from fedloom.core.own_function import MayNameFunction
from fedloom.core.schema import when

RowLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (outputs [B, C], y [B]) -> [B]
LOSSES = {"classification": ("cross_entropy",), "regression": ("mse", "huber")}


class Objective(MayNameFunction):
    """What is learned from the data, and which loss is minimised."""

    section: ClassVar[str] = "task"
    naming: ClassVar[str] = "loss"
    positions: ClassVar[int] = 2

    kind: Literal["classification", "regression"] = Field(
        "classification", description="classification: the label is a class; regression: it is a number"
    )
    loss: str = Field(
        "auto",
        description="cross_entropy for classes, mse or huber for numbers, or your own as file.py:function, which is "
        "given outputs [B, C] and y [B] and returns the loss of each row [B]; its further arguments are settings, too; "
        "auto: the first of these",
    )
    delta: Annotated[PositiveFloat, when(loss="huber")] = Field(
        1.0, description="errors above it, in deviations of the target, count linearly"
    )
    class_weights: Annotated[Literal["none", "balanced"], when(TAKES_STEPS, kind="classification")] = Field(
        "none",
        description="balanced: weight each row by the rarity of its class: n / (C n_c)",
    )

    @property
    def is_regression(self) -> bool:
        return self.kind == "regression"


class Criterion(NamedTuple):
    """The loss of rows, and what is needed to read the outputs of a net."""

    each: RowLoss
    weights: Tensor | None = None  # [C] the weight of a row of each class in training
    regression: bool = False
    unit: float = 1.0  # regression: the deviation of the target over the training rows
    mixes_rows: bool = False  # whether the loss of a row depends on the other rows of a batch

    def weighted(self, loss: Tensor, y: Tensor) -> Tensor:
        """The weighted losses of rows in training.  ``[B]``"""
        return loss if self.weights is None else loss * self.weights[y]


def row_cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """The same as nn.functional.cross_entropy, which vmap takes apart into many more small operations.  ``[B]``"""
    return -log_softmax(outputs, -1).gather(-1, y[:, None]).squeeze(-1)


def row_squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """``[B]``"""
    return (outputs.squeeze(-1) - y).square()


CLASSES = Criterion(row_cross_entropy)


def criterion_of(task: Objective, y: NDArray[np.int64], classes: int, unit: float = 1.0) -> Criterion:
    """The loss that the settings ask for; ``y``: the classes of all training rows."""
    weights = None
    if task.class_weights == "balanced" and not task.is_regression:
        counts = np.bincount(y, minlength=classes)
        weights = torch.tensor(len(y) / (max(1, (counts > 0).sum()) * np.maximum(counts, 1)), dtype=torch.float32)
    loss = _row_loss(task, classes)
    own = usercode.is_reference(task.loss)
    mixes = own and loss_mixes_rows(loss, classes, regression=task.is_regression)
    return Criterion(loss, weights, task.is_regression, unit, mixes)


def _row_loss(task: Objective, outputs: int) -> RowLoss:
    name = LOSSES[task.kind][0] if task.loss == "auto" else task.loss
    if name == "cross_entropy":
        return row_cross_entropy
    if name == "mse":
        return row_squared_error
    if name == "huber":
        return lambda out, y: huber_loss(out.squeeze(-1), y, reduction="none", delta=task.delta)
    return _own_loss(task, outputs)


def _own_loss(task: Objective, outputs: int) -> RowLoss:
    """The user's function with its settings, after a check that it returns a loss for each row."""
    own: RowLoss = task.own_function()
    y = torch.zeros(2) if task.is_regression else torch.zeros(2, dtype=torch.int64)
    given = torch.linspace(0.1, 0.9, 2 * outputs).view(2, outputs)  # a loss may take probabilities
    found: Any
    try:
        found, again = (own(given.clone(), y.clone()) for _ in range(2))
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            [Fault("task.loss", f"'{task.loss}' fails on outputs [2, {outputs}] and y [2]: {first}")]
        ) from error
    if not isinstance(found, Tensor):
        got = "nothing" if found is None else f"a {type(found).__module__}.{type(found).__name__}"
        fix = "compute with torch, not NumPy: training needs its gradient"
        what = f"'{task.loss}' should return a tensor with one loss for each row (got {got})"
        raise ConfigError([Fault("task.loss", what, fix if found is not None else "is the return missing?")])
    if tuple(found.shape) != (2,):
        what = f"'{task.loss}' should return one loss for each row (got the shape {list(found.shape)} for 2 rows)"
        raise ConfigError([Fault("task.loss", what, "leave out the mean, as with reduction='none'")])
    if not torch.allclose(found, again, equal_nan=True):
        what = (
            f"'{task.loss}' returns another loss for the same outputs a second time, so that no seed could repeat a run"
        )
        raise ConfigError([Fault("task.loss", what, "it should draw no random numbers, and remember nothing")])
    return own


def loss_faults(task: Objective) -> list[Fault]:
    """What is wrong with the name of the loss."""
    if task.loss in ("auto", *LOSSES[task.kind]) or usercode.is_reference(task.loss):
        return []
    if task.loss.endswith(".py"):
        return [Fault("task.loss", f"'{task.loss}' is a file", f"name a function of it: {task.loss}:NAME")]
    other = next((kind for kind, names in LOSSES.items() if task.loss in names), None)
    fix = f"it is for {other}" if other else f"one of {', '.join(LOSSES[task.kind])}, or file.py:function"
    return [Fault("task.loss", f"there is no loss '{task.loss}' for {task.kind}", fix)]
