"""The fourth family: an algorithm that solves instead of descending fits the same abstractions."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Carry, Inbox, Nothing, Setup, Work
from fedloom.core.task import Batch
from fedloom.engine import laws


class Solved(NamedTuple):
    w: Tensor  # [P] the ridge solution, laid out as the net's linear layer
    g: Tensor  # [D + 1, D + 1]
    h: Tensor  # [D + 1, C]


class Moments(NamedTuple):
    g: Tensor
    h: Tensor

    @property
    def w(self) -> Tensor:
        return self.h.flatten()


class Ridge(Algorithm[Solved, Nothing, Moments]):
    """Each client sums its second moments in one pass; the server solves for all of them at once."""

    family: ClassVar[Literal["server", "personal", "closed_form", "gossip"]] = "closed_form"

    features: ClassVar[int] = 4
    classes: ClassVar[int] = 3
    ridge: float = 1e-3

    def init(self, w: Tensor) -> Solved:
        d = self.features + 1
        return Solved(w, torch.zeros(d, d, dtype=torch.float64), torch.zeros(d, self.classes, dtype=torch.float64))

    def join(self, down: Solved) -> Nothing:
        return ()

    def start(self, down: Solved, mine: Nothing, work: Work) -> Moments:
        return Moments(torch.zeros_like(down.g), torch.zeros_like(down.h))

    def step(self, at: Carry, batch: Batch, down: Solved, mine: Nothing) -> Carry:
        x = torch.cat([batch.x.flatten(1), torch.ones_like(batch.x.flatten(1)[:, :1])], 1).double()
        x = x * batch.mask[:, None]
        y = torch.nn.functional.one_hot(batch.y, self.classes).double()
        return at._replace(x=Moments(at.x.g + x.T @ x, at.x.h + x.T @ y))

    def finish(self, x: Moments, down: Solved, mine: Nothing, work: Work) -> tuple[Moments, Nothing]:
        return x, ()

    def weight(self, upload: Moments, work: Work) -> Tensor:
        return torch.ones_like(work.examples)

    def update(self, server: Solved, inbox: Inbox[Moments]) -> Solved:
        g, h = inbox.total
        solution = torch.linalg.solve(g + self.ridge * torch.eye(len(g)), h)  # [D + 1, C]
        return Solved(torch.cat([solution[:-1].T.flatten(), solution[-1]]).float(), g, h)


def solved(world, sizes, order=slice(None)) -> Tensor:
    from fedloom.engine.rounds import advance, begin
    from fedloom.engine.store import RamStore

    exp = world(sizes, arrays=_regrouped(sizes), local={"batch": 5})
    exp = dataclasses.replace(exp, algorithm=Ridge().bind(Setup(exp.task, exp.local.make_optimizer())))
    return advance(exp, begin(exp), RamStore(len(sizes)))[0].server.w


def _regrouped(sizes) -> Any:
    """The same 24 rows, shared out in other ways."""
    from support.blobs import blobs

    arrays = blobs((24,))
    client = arrays.client.copy()
    client[:24] = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).numpy()
    return arrays._replace(client=client)


def test_the_solution_does_not_depend_on_the_partition(world) -> None:
    whole = solved(world, (24,))
    for sizes in ((12, 12), (1, 20, 3), (4, 4, 4, 4, 4, 4)):
        torch.testing.assert_close(solved(world, sizes), whole, rtol=1e-5, atol=1e-6)


def test_the_solution_is_central_ridge(world) -> None:
    arrays = _regrouped((24,))
    x = torch.from_numpy(arrays.x[:24]).double()
    x = torch.cat([x, torch.ones(24, 1)], 1)
    y = torch.nn.functional.one_hot(torch.from_numpy(arrays.y[:24]), 3).double()
    w = torch.linalg.solve(x.T @ x + 1e-3 * torch.eye(5), x.T @ y)
    expected = torch.cat([w[:-1].T.flatten(), w[-1]]).float()
    torch.testing.assert_close(solved(world, (5, 19)), expected, rtol=1e-5, atol=1e-6)


class RidgeOnLaws(Ridge):
    """The same, for the five features and the hidden layer of the laws' world: only the form matters there."""

    features: ClassVar[int] = 5

    def update(self, server: Solved, inbox: Inbox[Moments]) -> Solved:
        g, h = inbox.total
        move = torch.linalg.solve(g + self.ridge * torch.eye(len(g)), h).mean()
        return Solved(server.w + move.float(), g, h)


@pytest.mark.slow
def test_laws() -> None:
    broken = {law.__name__: laws.verdict(law, RidgeOnLaws) for law in laws.LAWS}
    assert not any(broken.values()), broken
