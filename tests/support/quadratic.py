"""Quadratic clients, whose optima are known in closed form, and rounds of an algorithm on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithm import Carry, Inbox, Setup, Work
from fedloom.algorithm.capabilities import survey_of
from fedloom.core import tree
from fedloom.core.optim import sgd
from fedloom.core.task import Batch
from fedloom.engine.rounds import advance, begin
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore


class Bowl(NamedTuple):
    """A client whose loss is 1/2 (w - b)' A (w - b)."""

    A: Tensor  # [P, P]
    b: Tensor  # [P]
    n: float = 1.0  # examples

    @property
    def batch(self) -> Batch:
        zero = torch.zeros((), dtype=torch.float64)
        return Batch(self.A, self.b, torch.ones(1).double(), zero.long(), zero, zero, torch.zeros(0))

    def loss(self, w: Tensor) -> Tensor:
        return 0.5 * (w - self.b) @ self.A @ (w - self.b)

    def gradient(self, w: Tensor) -> Tensor:
        return self.A @ (w - self.b)

    def prox(self, w: Tensor, mu: float) -> Tensor:
        """argmin_v loss(v) + mu/2 ||v - w||^2"""
        return torch.linalg.solve(self.A + mu * torch.eye(len(w)).double(), self.A @ self.b + mu * w)


class Quadratic:
    """The task of such clients; a batch is the client itself, A as inputs and b as labels."""

    def loss(self, w: Tensor, batch: Batch) -> Tensor:
        return Bowl(batch.x, batch.y).loss(w)

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        return Bowl(batch.x, batch.y).gradient(w)

    def differentiate(self, f: Callable[[Any], Tensor], x: Any) -> Any:
        """The gradient: by plain autograd, which begins far sooner, unless it is itself differentiated."""
        if any(leaf.requires_grad for leaf in tree.leaves(x)):
            return torch.func.grad(f)(x)
        at = tree.tmap(lambda leaf: leaf.detach().requires_grad_(), x)
        return tree.unflatten(at, torch.autograd.grad(f(at), tree.leaves(at), materialize_grads=True))


def vec(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def bowls(count: int, size: int = 3, seed: int = 0) -> list[Bowl]:
    """Clients that disagree about where the bottom is and how steep the sides are (curvatures within 0.3 and 3)."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        Q = torch.linalg.qr(torch.randn(size, size, generator=g).double())[0]
        scale = 0.3 + 2.7 * torch.rand(size, generator=g).double()
        found.append(Bowl(Q @ torch.diag(scale) @ Q.T, 2 * torch.randn(size, generator=g).double()))
    return found


def optimum(clients: Sequence[Bowl]) -> Tensor:
    """Where the sum of the losses is least."""
    return torch.linalg.solve(sum(c.A for c in clients), sum(c.A @ c.b for c in clients))


def work(*, steps: float = 1, examples: float = 1, lr: float = 0.1, survey: Any = ()) -> Work:
    return Work(vec(steps)[0], vec(examples)[0], vec(lr)[0], vec(0)[0], survey)


def visit(alg: Any, client: Bowl, down: Any, mine: Any, steps: int, lr: float) -> tuple[Any, Any, Tensor]:
    """What a client uploads, keeps and counts after ``steps`` full-batch steps."""
    batch = client.batch._replace(lr=vec(lr)[0])
    survey = tree.tmap(lambda s: s * client.n, survey_of(alg, batch, down, mine))
    done = work(steps=steps, examples=client.n, lr=lr, survey=survey)
    x = alg.start(down, mine, done)
    at = Carry(x, alg.optimizer.init(x))
    for _ in range(steps):
        at = alg.step(at, batch, down, mine)
    upload, kept = alg.finish(at.x, down, mine, done)
    return upload, kept, alg.weight(upload, done)


def hear(uploads: Any, weights: Tensor, population: int = 0, examples: float = 1.0) -> Inbox[Any]:
    """What a server is given of these stacked uploads, each drawn once."""
    total = tree.tmap(lambda u: torch.tensordot(weights, u.double(), dims=1), uploads)
    counts = (vec(x)[0] for x in (len(weights), population or len(weights), examples))
    return Inbox(total, weights.sum(), *counts, uploads, weights)


class Played(NamedTuple):
    server: Any
    kept: dict[int, Any]
    path: list[Tensor]  # the server's model before the first round and after each


def play(
    alg: Any,
    clients: Sequence[Bowl],
    rounds: int,
    *,
    steps: int | Sequence[int] = 1,
    lr: float = 0.1,
    w: Tensor | None = None,
    cohort: Callable[[int], Sequence[int]] | None = None,
) -> Played:
    """Rounds of the algorithm on quadratic clients in float64."""
    alg = alg.bind(Setup(Quadratic(), sgd()))
    steps = [steps] * len(clients) if isinstance(steps, int) else steps
    server = alg.init(torch.zeros_like(clients[0].b) if w is None else w)
    kept: dict[int, Any] = {}
    path = [server.w]
    for t in range(rounds):
        who = range(len(clients)) if cohort is None else cohort(t)
        down = alg.send(server)
        found = [visit(alg, clients[k], down, kept.get(k, alg.join(down)), steps[k], lr) for k in who]
        kept |= dict(zip(who, [state for _, state, _ in found], strict=True))
        uploads, weights = tree.stack([(upload, weight) for upload, _, weight in found])
        server = alg.update(server, hear(uploads, weights, len(clients), sum(c.n for c in clients)))
        path.append(server.w)
    return Played(server, kept, path)


def after(exp: Experiment, rounds: int = 1) -> Any:
    """The server's state after some rounds."""
    state, store = begin(exp), RamStore(exp.federation.clients)
    for _ in range(rounds):
        state, _ = advance(exp, state, store)
    return state.server


RAGGED = {"batch": 3, "lr": 0.2, "epochs": 2}  # of 4, 12 and 7 examples: 4, 8 and 6 steps
