"""Every algorithm on disk, the package's and the example in the documentation, against every law."""

from __future__ import annotations

import pytest

from fedloom import laws
from fedloom.algorithm import Algorithm, Inbox, Model
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.scaffold import Scaffold
from fedloom.config import algorithms

KINDS = algorithms(own=False)


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_law(kind: str, law) -> None:
    assert laws.verdict(law, KINDS[kind]) == ""


class Writes(FedAvg):
    """Breaks the law of arguments: writes into the model it was sent."""

    def gradient(self, x, batch, down, mine):
        g = super().gradient(x, batch, down, mine)
        down.w.mul_(0.5)
        return g


class Remembers(FedAvg):
    """Breaks the law of resumption: keeps state outside the state."""

    def update(self, server: Model, inbox: Inbox) -> Model:
        seen = _memory.setdefault("rounds", 0)
        _memory["rounds"] = seen + 1
        return Model(super().update(server, inbox).w * (1 + 0.01 * seen))


class Grows(FedAvg):
    """Breaks the law of form: the server's state changes its type."""

    def update(self, server: Model, inbox: Inbox) -> Model:
        return Model(super().update(server, inbox).w.double())


class Sleeps(FedAvg):
    """Breaks the law that training changes something."""

    def update(self, server: Model, inbox: Inbox) -> Model:
        return server


class Biased(FedAvg):
    """Breaks the law of neutrality: claims to be FedAvg and is not."""

    def update(self, server: Model, inbox: Inbox) -> Model:
        return Model(super().update(server, inbox).w * 0.999)


class Branches(FedAvg):
    """Breaks the law of lanes: branches on the value of a tensor."""

    def gradient(self, x, batch, down, mine):
        g = super().gradient(x, batch, down, mine)
        return g if float(batch.progress) < 0.5 else 0 * g


class Undeclared(Scaffold):
    """Breaks the law of mirrors: its server keeps the mean of its clients' variates, and it does not say so."""

    mirrored = False


class Thaws(FedAvg):
    """Breaks the law of frozen parts: its server writes into them."""

    def update(self, server: Model, inbox: Inbox) -> Model:
        for x in self.task.fixed:
            x.mul_(0.9)
        return super().update(server, inbox)


_memory: dict[str, int] = {}


@pytest.mark.parametrize(
    ("cls", "law"),
    [
        (Writes, laws.arguments_are_unchanged),
        (Remembers, laws.ram_is_disk),
        (Grows, laws.state_keeps_its_shape),
        (Sleeps, laws.training_changes_something),
        (Biased, laws.neutral_is_fedavg),
        (Branches, laws.batched_is_alone),
        (Undeclared, laws.mirrors_are_declared),
        (Thaws, laws.frozen_parts_stay),
    ],
)
def test_a_law_can_be_broken(cls: type[Algorithm], law) -> None:
    assert laws.verdict(law, cls) != ""
