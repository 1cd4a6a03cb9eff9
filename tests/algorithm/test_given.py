"""What the functions of a method are given: the planned run, the round, and addresses to draw at."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fedloom
from fedloom import FedAvg, Model
from fedloom.algorithm import Algorithm, GossipFacts, Inbox, Update, Work
from fedloom.core import rng
from fedloom.core.task import Batch
from fedloom.engine.messages import Message, inbox_of

FEW: dict[str, Any] = {"partition": {"clients": 5}, "model": "logistic", "rounds": 3}


class Node(NamedTuple):
    w: Tensor
    seen: Tensor  # [1] the sum of the rounds so far


class Counts(Algorithm[Node, tuple[()], Model], GossipFacts):
    family = "gossip"
    whole: bool = True

    @property
    def columnwise(self) -> bool:
        return self.whole

    def init(self, w: Tensor) -> Node:
        return Node(w, torch.zeros_like(w))

    def finish(self, x: Tensor, down: Node, mine: tuple[()], work: Work) -> tuple[Model, tuple[()]]:
        return Model(down.w + down.seen), mine

    def update(self, server: Node, inbox: Inbox[Model]) -> Node:
        return Node(server.w, server.seen + (10 + inbox.round).to(server.w.dtype) + 0 * inbox.mean.w.to(server.w.dtype))

    def serve(self, down: Node, mine: tuple[()]) -> Tensor:
        return down.seen

    def global_model(self, server: Node) -> Tensor:
        return server.seen


@pytest.mark.parametrize("columnwise", [True, False])
def test_a_node_reads_the_round(columnwise: bool) -> None:
    history = fedloom.run(Counts(whole=columnwise), **FEW, topology="ring")
    assert {float(x) for p in history.model.parameters() for x in p.detach().flatten()} == {30.0 + 0 + 1 + 2}


def test_a_node_that_is_driven_by_messages_reads_the_same_round() -> None:
    own = Message(7, 0, 2, Model(torch.ones(3)), torch.zeros(0))
    found, _ = inbox_of(2, {2: 1.0}, {2: own}, nodes=5, examples=9)
    assert float(found.round) == 7


class Planned(FedAvg):
    def update(self, server: Model, inbox: Inbox[Update]) -> Model:
        assert inbox.mean.dw.shape == server.w.shape
        return Model(torch.full_like(server.w, float(self.setup.rounds * self.setup.local.epochs)))


def test_a_method_knows_the_planned_rounds_and_how_clients_train() -> None:
    history = fedloom.run(Planned(), **FEW, local={"epochs": 2})
    assert {float(x) for p in history.model.parameters() for x in p.detach().flatten()} == {6.0}


class Draws(FedAvg):
    """Draws in a step and in finish, as docs/write-a-method.md says."""

    def gradient(self, x: Tensor, batch: Batch, down: Model, mine: Any) -> Tensor:
        return rng.unit(rng.fold(batch.key, torch.arange(len(x)))) + 0 * x

    def finish(self, x: Tensor, down: Model, mine: Any, work: Work) -> tuple[Update, Any]:
        own = rng.uniform(self.setup.seed, "my name", work.round, work.client, torch.arange(len(x)))
        return Update(x - down.w + own), mine

    def update(self, server: Model, inbox: Inbox[Update]) -> Model:
        chance = rng.stream(inbox.address[0], "my name", inbox.address[1])
        return super().update(Model(server.w * chance.random()), inbox)


def test_what_is_drawn_is_the_same_one_by_one_and_side_by_side() -> None:
    one, many = (fedloom.run(Draws(), **FEW, engine={"executor": e}) for e in ("loop", "lanes"))
    mine, theirs = (torch.cat([p.detach().flatten() for p in h.model.parameters()]) for h in (one, many))
    assert torch.allclose(mine, theirs, atol=1e-5)
    assert len(mine.unique()) > 100
