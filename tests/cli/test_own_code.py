"""Errors in the user's own code on the command line: the user's own lines, the message once, and no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.terminal import Quick

CODE = """
import torch
from torch import nn
from torch.nn.functional import one_hot
from torch.utils.checkpoint import checkpoint

from fedloom import FedAvg


class Boom(FedAvg):
    def update(self, server, inbox):
        return 1 / self.zero()

    def zero(self):
        return 0 / 0


class Typo(FedAvg):
    def gradeint(self, x, batch, down, mine):
        return x


class Backward(FedAvg):
    def gradient(self, x, batch, down, mine):
        x = x.detach().requires_grad_()
        return x


class Counts(FedAvg):
    def loss(self, x, batch, down, mine):
        return self.task.loss(x, batch) * one_hot(batch.y, 10).float().mean()


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, classes)


class Spectral(Net):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        nn.utils.parametrizations.spectral_norm(self.first)

    def forward(self, x):
        return self.last(self.first(x.flatten(1)))


class Recomputed(Net):
    def forward(self, x):
        return self.last(checkpoint(lambda z: self.first(z).relu(), x.flatten(1), use_reentrant=False))


def brier(outputs, y):
    return (outputs.softmax(1) - one_hot(y, outputs.shape[1])).square().sum(1)
"""


@pytest.fixture(scope="module")
def quick() -> Iterator[Quick]:
    server = Quick()
    yield server
    server.close()


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path


def failed(quick: Quick, desk: Path, *words: str) -> str:
    """The error of a run, which is a message, and not a traceback."""
    done = quick("run", *words, "rounds=1", "partition.clients=3", cwd=desk)
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    return done.err[done.err.index("error: ") :]


def test_the_users_own_lines_are_shown_and_nothing_else(quick: Quick, desk: Path) -> None:
    said = failed(quick, desk, "algorithm=own.py:Boom")
    assert said.splitlines() == [
        "error: ZeroDivisionError: division by zero",
        f"  {desk}/own.py, line 12, in update: return 1 / self.zero()",
        f"  {desk}/own.py, line 15, in zero: return 0 / 0",
        "(FEDLOOM_TRACEBACK=1 prints the whole traceback)",
    ]


def test_the_whole_traceback_is_there_for_the_asking(quick: Quick, desk: Path) -> None:
    done = quick("run", "algorithm=own.py:Boom", "rounds=1", cwd=desk, env={"FEDLOOM_TRACEBACK": "1"})
    assert done.code == 2
    assert done.err.count("Traceback") == 1
    assert "engine/star.py" in done.err


def test_clients_train_one_by_one_where_a_net_or_a_loss_cannot_be_mapped(quick: Quick, desk: Path) -> None:
    words = ("rounds=1", "partition.clients=3")
    done = quick("run", "model=own.py:Recomputed", *words, cwd=desk)
    assert done.code == 0
    assert "note: clients train one by one: side by side the net fails: CheckpointError: " in done.out
    assert "clients one by one (the net does not work side by side)" in done.out
    done = quick("run", "task.loss=own.py:brier", *words, cwd=desk)
    assert "clients one by one (the loss does not work side by side)" in done.out
    assert quick("run", "model=own.py:Spectral", *words, cwd=desk).code == 0  # its statistics change with every batch


def test_a_net_that_cannot_be_mapped_is_refused_where_lanes_are_asked_for(quick: Quick, desk: Path) -> None:
    said = failed(quick, desk, "model=own.py:Recomputed", "engine.executor=lanes")
    assert "engine.executor: side by side the net fails: CheckpointError: " in said
    assert "(use loop)" in said


def test_one_hot_in_a_method(quick: Quick, desk: Path) -> None:
    assert "(y[:, None] == torch.arange(C)).float()" in failed(quick, desk, "algorithm=own.py:Counts")


def test_a_gradient_by_autograd(quick: Quick, desk: Path) -> None:
    assert "return self.task.differentiate(" in failed(quick, desk, "algorithm=own.py:Backward")


def test_check_refuses_a_misspelt_function_too(quick: Quick, desk: Path) -> None:
    done = quick("check", "own.py:Typo", cwd=desk)
    assert done.code == 2
    assert "in Typo.gradeint: nothing calls 'gradeint' (did you mean 'gradient'?" in done.err
