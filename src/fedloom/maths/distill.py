"""Distillation: a student learns the predictions of teachers on examples, without their labels.

    target p(x) of the teachers;      w <- w - lr grad KL(p || softmax f(x; w)), batch by batch

The student is in evaluation mode, like its teachers: with the same parameters it makes the same predictions, and there
is nothing to learn. The teachers' predictions are computed once, in float64: in float32 probabilities do not sum to
one, and the divergence from themselves is not zero. The order of the batches is random, from an address.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import repeat
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fedloom.core import rng
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.optim import Optimizer, adam, sgd
from fedloom.core.replay import repeated
from fedloom.core.task import Task

_CHUNK = 512  # examples of one forward pass
_ALIKE = 1e-12  # a divergence no larger than this is rounding, which Adam would turn into full steps


@cache
def student_optimizer(rule: Literal["sgd", "adam"], momentum: float, weight_decay: float) -> Optimizer:
    """The optimizer with these settings: always the same object, by which a recorded step is found again."""
    return sgd(momentum=momentum, weight_decay=weight_decay) if rule == "sgd" else adam(weight_decay=weight_decay)


class Lessons(NamedTuple):
    """How a student learns."""

    optimizer: Optimizer
    lr: float
    epochs: int
    batch: int
    temperature: float = 1.0  # of the student; that of the target is in the target
    schedule: Literal["constant", "cosine"] = "constant"

    def steps(self, rows: int) -> int:
        """Steps of an epoch on this many rows."""
        return -(-rows // self.batch)


def logits(task: Task, w: Tensor, x: Tensor) -> Tensor:
    """The predictions of one model.  ``[n, classes]``"""
    return torch.cat([task.apply(w, some, task.buffers0) for some in torch.split(x, _CHUNK)])


def averaged(logits_: Iterable[Tensor], voices: Iterable[float] = repeat(1.0)) -> Tensor:
    """The mean prediction of several models, one after another so that only one is in memory, in float64."""
    total, weight = torch.zeros(()), 0.0
    for each, voice in zip(logits_, voices, strict=False):  # equal weights are an endless iterator
        total, weight = total.to(each.device) + voice * each.double(), weight + voice
    return total / weight


def divergence(said: Tensor, target: Tensor) -> Tensor:
    """KL(p || q), averaged over the rows, of log-probabilities ``target`` and ``said``.  ``[]``"""
    return (target.exp() * (target - said)).sum(-1).mean()


def kl_to_target(task: Task, w: Tensor, x: Tensor, target: Tensor, temperature: float = 1.0) -> float:
    """How far a student is from its target, in float64."""
    return float(divergence(log_softmax(logits(task, w, x).double() / temperature, -1), target))


def distilled(
    task: Task, w: Tensor, x: Tensor, target: Tensor, how: Lessons, address: tuple[int, int]
) -> Iterator[Tensor]:
    """The student after each step."""

    def step(fixed: tuple[Tensor, Tensor], at: tuple[Tensor, Any], here: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        (x, target), (w, memory), (rows, lr) = fixed, at, here
        return how.optimizer.update(_slope(task, w, x[rows], target[rows], how.temperature), memory, w, lr)

    orders = (_order(len(x), address, epoch).to(x.device) for epoch in range(how.epochs))
    batches = (rows for order in orders for rows in torch.split(order, how.batch))
    rates, start = torch.tensor(_rates(how, len(x)), device=w.device), (w, how.optimizer.init(w))
    inputs = zip(batches, rates, strict=True)
    key = "distill", how.optimizer, how.temperature
    for student, _ in repeated(step, (x, target), start, inputs, task.recorder(), key):
        yield student


def _rates(how: Lessons, rows: int) -> list[float]:
    """The learning rate of each step."""
    total = how.epochs * how.steps(rows)
    if how.schedule == "constant":
        return [how.lr] * total
    return [how.lr * (1 + math.cos(math.pi * done / total)) / 2 for done in range(total)]


def _slope(task: Task, w: Tensor, x: Tensor, target: Tensor, temperature: float) -> Tensor:
    def loss(at: Tensor) -> Tensor:
        return divergence(log_softmax(task.apply(at, x, task.buffers0) / temperature, -1), target.to(at.dtype))

    return task.differentiate(loss, w)


def _order(rows: int, address: tuple[int, int], epoch: int) -> Tensor:
    return torch.from_numpy(rng.stream(address[0], "distill", address[1], epoch).permutation(rows))


# -- which student is kept -------------------------------------------------------------------------
def best_student(
    task: Task,
    w: Tensor,
    x: Tensor,
    target: Tensor,
    how: Lessons,
    address: tuple[int, int],
    *,
    held_out: float = 0.1,
    patience: int | None = None,
) -> Tensor:
    """The student after the epoch, or before the first, at which it is closest to the teachers on a held-out share
    of the examples; the last one, if none are held out.

    ``patience``: it stops after this many epochs without a gain.
    """
    if kl_to_target(task, w, x, target, how.temperature) <= _ALIKE:
        return w
    order = torch.from_numpy(rng.stream(address[0], "distill_held_out").permutation(len(x))).to(x.device)
    aside, rows = order[: int(held_out * len(x))], order[int(held_out * len(x)) :]
    if not len(aside):
        return last_student(task, w, x, target, how, address)
    found, least, waited = w, kl_to_target(task, w, x[aside], target[aside], how.temperature), 0
    for step, student in enumerate(distilled(task, w, x[rows], target[rows], how, address), 1):
        if step % how.steps(len(rows)):
            continue
        now = kl_to_target(task, student, x[aside], target[aside], how.temperature)
        found, least, waited = (student, now, 0) if now < least else (found, least, waited + 1)
        if waited == patience:
            break
    return found


def swa(
    task: Task, w: Tensor, x: Tensor, target: Tensor, how: Lessons, address: tuple[int, int], *, start: int, every: int
) -> Tensor:
    """The mean of the student after step ``start``, after each ``every`` steps from there, and after the last.

    If there are no more than ``start`` steps, it starts after half of them.
    """
    total = how.epochs * how.steps(len(x))
    start = start if start < total else total // 2
    sum_, count = torch.zeros_like(w, dtype=torch.float64), 0
    for step, student in enumerate(distilled(task, w, x, target, how, address), 1):
        if step == total or (step >= start and (step - start) % every == 0):
            sum_, count = sum_ + student.double(), count + 1
    return (sum_ / count).to(w.dtype) if count else w


def last_student(task: Task, w: Tensor, x: Tensor, target: Tensor, how: Lessons, address: tuple[int, int]) -> Tensor:
    """The student after the last step."""
    for student in distilled(task, w, x, target, how, address):
        w = student
    return w


def refuse_statistics(task: Task) -> None:
    """Refuse BatchNorm: a server that runs its clients' models would need their running statistics."""
    if task.has_running_statistics:
        what = "the server runs each client's model, but does not know its running statistics"
        raise ConfigError([Fault("model", what, 'use a net without BatchNorm, such as one with norm = "group"')])
