"""Local optimisers as two pure functions over trees; one function of settings makes each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from fedloom import tree
from fedloom.schema import Spec


class Optimizer(NamedTuple):
    """``init`` gives the memory of a fresh start; ``update`` takes one step."""

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any, Tensor], tuple[Any, Any]]  # (gradient, memory, x, lr) -> (x, memory)


def sgd(*, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0, clip: float = 0.0) -> Optimizer:
    """Stochastic gradient descent, step for step that of ``torch.optim.SGD`` after ``clip_grad_norm_``."""

    def init(x: Any) -> Any:
        return tree.tmap(torch.zeros_like, x) if momentum else ()

    def update(g: Any, memory: Any, x: Any, lr: Tensor) -> tuple[Any, Any]:
        if clip:
            g = clipped(g, clip)
        if weight_decay:
            g = tree.tmap(lambda d, p: d + weight_decay * p, g, x)
        if momentum:
            memory = tree.tmap(lambda v, d: momentum * v + d, memory, g)
            g = tree.tmap(lambda d, v: d + momentum * v, g, memory) if nesterov else memory
        return tree.tmap(lambda p, d: torch.addcmul(p, d, lr, value=-1.0), x, g), memory

    return Optimizer(init, update)


def clipped(g: Any, limit: float) -> Any:
    """``g`` scaled down so that its norm, over all leaves together, is at most ``limit``."""
    norm = torch.stack([leaf.square().sum() for leaf in tree.leaves(g)]).sum().sqrt()
    scale = limit / norm.clamp(min=limit)
    return tree.tmap(lambda d: d * scale, g)


class Local(Spec):
    """How a client trains in one round."""

    optimizer: Literal["sgd"] = Field("sgd", description="the local optimiser")
    lr: PositiveFloat = Field(0.1, description="learning rate of the first round")
    momentum: float = Field(0.0, ge=0, lt=1, description="share of the last step's direction that is kept")
    nesterov: bool = Field(False, description="look ahead along the momentum")
    weight_decay: NonNegativeFloat = Field(0.0, description="pull towards zero, added to the gradient")
    clip: NonNegativeFloat = Field(0.0, description="largest norm of a gradient; 0 leaves gradients as they are")
    epochs: PositiveInt = Field(1, description="passes over the client's data; not used when steps is given")
    steps: PositiveInt | None = Field(None, description="exact number of local steps, instead of epochs")
    batch: int = Field(10, ge=0, description="examples in a step; 0 takes all of the client's data")
    drop_last: bool = Field(
        False, description="leave out a last batch that is not full, unless it is the client's only one"
    )
    wrap_last: bool = Field(
        False, description="instead of a last batch that is not full, begin a new pass over the data, as FLGo does"
    )
    schedule: Literal["constant", "exponential", "step", "cosine"] = Field(
        "constant", description="of the learning rate over rounds"
    )
    decay: float = Field(0.99, gt=0, le=1, description="factor per round (exponential) or per step_every rounds (step)")
    step_every: PositiveInt = Field(100, description="rounds between decays of the step schedule")

    @model_validator(mode="after")
    def _settings_agree(self) -> Local:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum > 0")
        if self.drop_last and self.wrap_last:
            raise ValueError("drop_last and wrap_last are both set; keep one of them")
        return self

    def optimiser(self) -> Optimizer:
        return sgd(momentum=self.momentum, nesterov=self.nesterov, weight_decay=self.weight_decay, clip=self.clip)

    def lr_at(self, round_: int, rounds: int) -> float:
        """The learning rate of round ``round_`` (counted from 0) of ``rounds``."""
        if self.schedule == "exponential":
            return self.lr * self.decay**round_
        if self.schedule == "step":
            return self.lr * self.decay ** (round_ // self.step_every)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * round_ / rounds))
        return self.lr
