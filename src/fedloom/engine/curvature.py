"""The curvature of the loss: the top of its Hessian, along the model or along clients' weights, and bounds on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import grad, jvp

from fedloom.core.task import Batch, Task
from fedloom.data.federation import Federation
from fedloom.engine.state import Experiment
from fedloom.maths.learned_weights import Weighing

_ROWS = 2048  # in one Hessian-vector product
_LANCZOS = 60  # steps at most
_TOLERANCE = 1e-4  # of the top eigenvalue, relative
# Bounds from a run's inputs, cached while the run exists: they are the same in every round.
_BOUNDS: WeakKeyDictionary[Task, tuple[Federation, float | None]] = WeakKeyDictionary()


class Moves(NamedTuple):
    """The update of each client of a round."""

    ids: Tensor  # [K]
    dw: Tensor  # [K, P] w_k - w
    weights: Tensor  # [K]

    @staticmethod
    def of(groups: Sequence[tuple[Tensor, Tensor, Tensor]], w: Tensor) -> Moves:
        """The updates from the model ``w`` that all were sent, from (ids, models, weights) of each group."""
        ids, models, weights = (torch.cat(column) for column in zip(*groups, strict=True))
        return Moves(ids, models - w, weights)


class Top(NamedTuple):
    """The largest eigenvalue of a symmetric matrix, as far as it is known."""

    value: float
    error: float  # its distance to an eigenvalue is at most this, relative to the largest in absolute value
    iterations: int


def top_eigenvalue(product: Callable[[Tensor], Tensor], start: Tensor) -> Top:
    """The algebraically largest eigenvalue, by Lanczos with full re-orthogonalisation, from ``start`` [P].

    Ends when the residual of the Ritz pair, which bounds the distance to an eigenvalue, is small enough, when the
    space that the start spans is exhausted, or after this many steps.
    """
    basis = (start / torch.linalg.vector_norm(start))[None]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        after = product(basis[-1])
        diagonal.append(float(after.double() @ basis[-1].double()))
        for _ in range(2):  # once would leave a part due to rounding
            after = after - basis.T @ (basis @ after)
        length = float(torch.linalg.vector_norm(after.double()))
        if not math.isfinite(diagonal[-1] + length):  # the loss has overflowed, and has no curvature
            return Top(math.nan, math.nan, len(diagonal))
        off = torch.tensor(beside, dtype=torch.float64)
        small = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(small)
        scale = max(float(values.abs().max()), 1e-30)
        error = length * abs(float(vectors[-1, -1])) / scale
        done = error <= _TOLERANCE or length <= 1e-6 * scale
        if done or len(diagonal) == min(_LANCZOS, start.numel()):
            return Top(float(values[-1]), error, len(diagonal))
        beside.append(length)
        basis = torch.cat([basis, (after / length)[None]])


def hessian(exp: Experiment, w: Tensor, buffers: Tensor) -> dict[str, float]:
    """The largest eigenvalue of the Hessian at ``w`` of the loss on the server's own rows, else on all training rows.

    In evaluation mode: BatchNorm uses the statistics that it is given.
    """
    chunks = list(_held_chunks(exp, buffers) or training_chunks(exp, buffers))
    found = top_eigenvalue(lambda v: hessian_product(exp.task, chunks, w, v), _start(w))
    return {
        "hessian/top": found.value,
        "hessian/error": found.error,
        "hessian/iterations": float(found.iterations),
        "hessian/rows": float(sum(len(batch.y) for batch, _ in chunks)),
    }


def hessian_weights(exp: Experiment, moves: Moves, w: Tensor, how: Weighing, buffers: Tensor) -> dict[str, float]:
    """The largest eigenvalue of the Hessian of the same loss along the weights of clients with a positive weight.

    These are a and b of gamma sum_i lambda_i w_i, lambda = softmax(a), gamma = e^b, at their values in the round;
    LAW-AFL eq. 37 takes the Hessian of theta, which in its section 3.1.1 are these weights.
    """
    counts = how.lam > 0
    dw, chunks = moves.dw[counts], list(_held_chunks(exp, buffers) or training_chunks(exp, buffers))
    point = torch.cat([how.lam[counts].log(), how.shrink.log()[None]]).to(w)

    def loss(free: Tensor, batch: Batch) -> Tensor:
        mixed = free[-1].exp() * (w + free[:-1].softmax(0) @ dw)
        return exp.task.loss(mixed, batch, training=False)

    dense = torch.zeros(len(point), len(point), dtype=torch.float64, device=w.device)
    for batch, share in chunks:
        slope = grad(partial(loss, batch=batch))
        columns = [jvp(slope, (point,), (along,))[1] for along in torch.eye(len(point)).to(w)]
        dense += share * torch.stack(columns).double()
    finite = bool(dense.isfinite().all())
    top = float(torch.linalg.eigvalsh((dense + dense.T) / 2)[-1]) if finite else math.nan
    return {"hessian/weights_top": top}


def smoothness(exp: Experiment) -> float | None:
    """A bound L on the curvature of every client's loss at any w, if the net is a softmax regression; else None.

    The Hessian of client k is the mean over its rows of (diag p - p p^T) x (x~ x~^T), a Kronecker product.
    No eigenvalue of the first factor is above 1/2, hence L_k <= lambda_max(X~^T X~ / n_k) / 2, and none is
    below 0. X~ are the inputs, with a 1 for the bias. Two classes that are equally likely for every row
    reach the bound.
    """
    known = _BOUNDS.get(exp.task)
    if known is None or known[0] is not exp.federation:
        known = _BOUNDS[exp.task] = exp.federation, _smoothness(exp)
    return known[1]


def _smoothness(exp: Experiment) -> float | None:
    fed, net = exp.federation, exp.task.module(exp.task.w0, exp.task.buffers0).train()
    layers = [m for m in net.modules() if next(m.parameters(recurse=False), None) is not None]
    if len(layers) != 1 or type(layers[0]) is not nn.Linear:
        return None
    layer, top = layers[0], 0.0
    for rows in torch.tensor_split(fed.train.rows, fed.train.start[1:-1]):
        if len(rows):
            x, _ = fed.examples(rows.to(exp.device))
            if not _is_all(net, layer, x):
                return None
            ones = torch.ones(len(x), int(layer.bias is not None), device=x.device)
            top = max(top, _top_square(torch.cat([x.flatten(1), ones], 1).double()))
    return top / 2


def _is_all(net: nn.Module, layer: nn.Linear, x: Tensor) -> bool:
    """Whether the net only passes ``x``, flattened, to ``layer``, whose output is the net's."""
    seen: list[tuple[Tensor, Tensor]] = []
    with layer.register_forward_hook(lambda _, given, out: seen.append((given[0], out))):
        logits = net(x)
    return len(seen) == 1 and torch.equal(seen[0][0], x.flatten(1)) and seen[0][1] is logits


def _top_square(x: Tensor) -> float:
    """The largest eigenvalue of ``x^T x / n`` for ``x`` [n, d], from the smaller of the two products."""
    small = x @ x.T if len(x) <= x.shape[1] else x.T @ x
    return float(torch.linalg.eigvalsh(small)[-1]) / len(x)


def curvature(exp: Experiment, w: Tensor) -> tuple[float, float]:
    """Estimates of the largest eigenvalue of the training loss's Hessian at ``w``, and of minus the smallest.

    In training mode, as in the theorems. Both are at least 0.
    """
    chunks, start = list(training_chunks(exp, exp.task.buffers0)), _start(w)

    def product(v: Tensor) -> Tensor:
        return hessian_product(exp.task, chunks, w, v, training=True)

    top, low = top_eigenvalue(product, start), top_eigenvalue(lambda v: -product(v), start)
    return max(top.value, 0.0), max(low.value, 0.0)  # in this order what is not a number stays so


def hessian_product(
    task: Task, chunks: Iterable[tuple[Batch, float]], w: Tensor, v: Tensor, *, training: bool = False
) -> Tensor:
    """The Hessian at ``w`` of the mean loss over chunks of rows, each with its share of them, times ``v``.  ``[P]``"""
    total = torch.zeros_like(w)
    for batch, share in chunks:
        total = total + share * task.hvp(w, batch, v, training=training)
    return total


def _start(w: Tensor) -> Tensor:
    """A fixed random direction."""
    return torch.randn(w.shape, generator=torch.Generator().manual_seed(0)).to(w)


def training_chunks(exp: Experiment, buffers: Tensor) -> Iterator[tuple[Batch, float]]:
    """All training rows in pieces, each with its share of them."""
    rows = exp.federation.train.rows.to(exp.device)
    for part in torch.split(rows, _ROWS):
        yield _batch(*exp.federation.examples(part), buffers), len(part) / len(rows)


def _held_chunks(exp: Experiment, buffers: Tensor) -> list[tuple[Batch, float]]:
    """The same for the server's own rows, if it has any."""
    held = exp.algorithm.setup.proxy
    if held is None:
        return []
    pieces = zip(torch.split(held.x, _ROWS), torch.split(held.y, _ROWS), strict=True)
    return [(_batch(x, y, buffers), len(y) / len(held.y)) for x, y in pieces]


def _batch(x: Tensor, y: Tensor, buffers: Tensor) -> Batch:
    zero = torch.zeros((), device=x.device)
    return Batch(x, y, torch.ones(len(y), device=x.device), zero.long(), zero, zero, buffers)
