"""Whether clients can train side by side with a net or a loss of the user's own: found by trying, before the run.

PyTorch cannot compute everything for many nets at once, and what it then computes need not be the same. So two clients,
each with its own weights and a batch of its own size, are computed in both ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core import rng, tree
from fedloom.core.own_line import said
from fedloom.core.task import BATCH_DIMS, Batch, Task
from fedloom.engine.local import arithmetic, mapped

_CLIENTS, _ROWS = 2, 3
_ROUNDING = 0.01  # relative: short products, and sums in another order, differ by less


class Found(NamedTuple):
    """What is computed for a client."""

    outputs: Tensor  # [B, C] in evaluation mode
    gradient: Tensor  # [P]


def why_apart(task: Task, device: torch.device) -> str:
    """What goes wrong with this net and this loss if clients train side by side, in words; empty if nothing does.

    What fails one by one, too, is refused elsewhere.
    """
    if task.shape is None:
        return ""
    alone, beside = (task.to(device, lanes=lanes) for lanes in (False, True))
    for x in _inputs(task.shape):
        w, batch = tree.tmap(lambda part: part.to(device), _clients(task, x))
        try:
            with arithmetic(alone):
                expected = [_found(alone, *_client(w, batch, k)) for k in range(_CLIENTS)]
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever the user's code does: words, for example, are no negative numbers
            continue
        try:
            with arithmetic(beside):
                found = mapped(lambda w, batch: _found(beside, w, batch), (0, BATCH_DIMS))(w, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"fails: {said(error)}"
        wrong = [_difference(task, tree.take(found, k), expected[k]) for k in range(_CLIENTS)]
        return next(filter(None, wrong), "")
    return ""


def _inputs(shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Numbers around 0, and for nets that read numbers of words or rows 0 and 1.  ``[K, B, ...]``"""
    x = rng.uniform(0, "inputs", torch.arange(_CLIENTS * _ROWS * prod(shape))).view(_CLIENTS, _ROWS, *shape)
    yield 4 * x - 2
    yield x.round()


def _clients(task: Task, x: Tensor) -> tuple[Tensor, Batch]:
    """The weights [K, P] and batches of some clients; each has one row less than the one before."""
    places = torch.arange(_CLIENTS * task.size).view(_CLIENTS, task.size)
    w = task.w0 + 0.2 * (rng.uniform(0, "weights", places).to(task.w0) - 0.5)
    y = torch.arange(_CLIENTS * _ROWS).view(_CLIENTS, _ROWS) % 2
    mask = (torch.arange(_ROWS) < _ROWS - torch.arange(_CLIENTS)[:, None]).float()
    none, keys, buffers = torch.zeros(_CLIENTS), torch.arange(_CLIENTS), task.buffers0.expand(_CLIENTS, -1)
    return w, Batch(x, y.float() if task.criterion.regression else y, mask, keys, none, none[0], buffers)


def _client(w: Tensor, batch: Batch, k: int) -> tuple[Tensor, Batch]:
    """One of the clients, without padding."""
    own = tree.tmap(lambda part: part[k] if part.ndim else part, batch)
    rows = int(own.mask.sum())
    return w[k], own._replace(x=own.x[:rows], y=own.y[:rows], mask=own.mask[:rows])


def _found(task: Task, w: Tensor, batch: Batch) -> Found:
    with torch.no_grad():
        return Found(task.apply(w, batch.x, batch.buffers), task.grad(w, batch))


def _difference(task: Task, found: Found, expected: Found) -> str:
    """What was found side by side and is not what was expected, in words; empty if it is the same."""
    if not _agree(found.outputs[: len(expected.outputs)], expected.outputs):
        return "computes other outputs"
    sizes = [prod(shape) for shape in task.layout.values()]
    parts = (torch.split(gradient, sizes) for gradient in (found.gradient, expected.gradient))
    least = 1e-4 * float(expected.gradient.norm())
    wrong = [name for name, a, b in zip(task.layout, *parts, strict=True) if not _agree(a, b, least)]
    return f"computes another gradient of '{wrong[0]}'" if wrong else ""


def _agree(a: Tensor, b: Tensor, least: float = 0.0) -> bool:
    """Whether two results are the same up to rounding; ``least``: what is too small to count."""
    if not bool(b.isfinite().all()):
        return bool(torch.equal(a.isfinite(), b.isfinite()))
    return bool((a - b).norm() <= _ROUNDING * b.norm() + least)
