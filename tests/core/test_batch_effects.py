"""Nets and losses in which the rows of a batch meet: they are found, and clients train one by one."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, cross_entropy

import fedloom
from fedloom.core import usercode
from fedloom.core.batch_effects import loss_mixes_rows, net_mixes_rows
from fedloom.core.errors import ConfigError
from fedloom.core.objective import Objective, criterion_of
from fedloom.core.task import Task

Loss = Callable[[Tensor, Tensor], Tensor]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.between(self.body(x)))
        return logits

    def between(self, x: Tensor) -> Tensor:
        return x.relu()


class Centred(Plain):
    def between(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.training else x


class Normalised(Plain):
    def between(self, x: Tensor) -> Tensor:
        return batch_norm(x, None, None, training=True)


class Counting(Plain):
    """What it computes for a row does not depend on the others, but its statistics do."""

    mean: Tensor

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Hidden(Centred):
    """Its first weights hide that rows meet."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)


class Dropping(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def between(self, x: Tensor) -> Tensor:
        return self.drop(x)  # type: ignore[no-any-return]


MIXING = (Centred, Normalised, Counting, Hidden)


@pytest.mark.parametrize("kind", [Plain, *MIXING])
def test_nets_are_tried(kind: type[Plain]) -> None:
    assert net_mixes_rows(kind().train(), (5,)) is (kind in MIXING)


def test_nets_of_known_layers_are_not_tried() -> None:
    def refused(*_: Any) -> None:
        raise AssertionError

    net = nn.Sequential(nn.Linear(5, 3))
    net.forward = refused  # type: ignore[method-assign]
    assert not net_mixes_rows(net, (5,))  # a net that fails is refused elsewhere
    assert not net_mixes_rows(nn.Sequential(nn.Linear(5, 3)), (5,))


class Words(Centred):
    """Rows meet, and numbers below 0 are no words."""

    def __init__(self) -> None:
        super().__init__()
        self.look_up = nn.Embedding(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.look_up(x.long()).squeeze(-1))


def test_nets_of_words_are_tried() -> None:
    assert net_mixes_rows(Words().train(), (5,))


class Remembering(Plain):
    """What is between its layers depends on what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = 0
        self.register_buffer("count", torch.tensor(0))


class InAnAttribute(Remembering):
    def between(self, x: Tensor) -> Tensor:
        out, self.seen = x + self.seen, x.detach()
        return out


class ForEvaluation(Remembering):
    def between(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = x.mean()
            return x
        return x - self.seen


class InACounter(Remembering):
    count: Tensor

    def between(self, x: Tensor) -> Tensor:
        self.count += self.training
        return x / (1 + self.count)


class OfOldWeights(Remembering):
    def between(self, x: Tensor) -> Tensor:
        if not isinstance(self.seen, Tensor):
            self.seen = self.body.weight.detach().norm()
        return x / self.seen


class InItsWeights(Remembering):
    def between(self, x: Tensor) -> Tensor:
        self.head.weight.data = self.head.weight.data / self.head.weight.data.norm()
        return x


class Unused(Remembering):
    """What it keeps is for the user to look at."""

    count: Tensor

    def between(self, x: Tensor) -> Tensor:
        self.seen = x.detach()
        self.count += 1
        return x


REMEMBERING = (InAnAttribute, ForEvaluation, InACounter, OfOldWeights, InItsWeights)


@pytest.mark.parametrize("kind", [Plain, Dropping, Counting, Unused, *REMEMBERING])
def test_nets_that_remember_are_found(kind: type[Plain]) -> None:
    """Statistics in a buffer of floats are sent."""
    assert Task(kind(), shape=(5,)).remembers is (kind in REMEMBERING)


LAYERS: dict[str, tuple[Callable[[], nn.Module], bool, bool]] = {  # of torch: in training, in evaluation
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), False, False),
    "attention over rows": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), True, True),
    "instance norm": (lambda: nn.InstanceNorm1d(5), False, False),
    "statistics": (lambda: nn.InstanceNorm1d(5, track_running_stats=True), True, False),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), True, False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torch_that_compare_rows_or_keep_statistics_are_tried(name: str) -> None:
    make, training, evaluation = LAYERS[name]
    task = Task(nn.Sequential(make(), nn.Flatten(), nn.Linear(20, 3)), shape=(5, 4))
    assert (task.has_statistics, task.mixes_rows_in_evaluation) == (training, evaluation)


def balanced(outputs: Tensor, y: Tensor) -> Tensor:
    one = (y[:, None] == torch.arange(outputs.shape[1])).to(outputs.dtype)
    return cross_entropy(outputs, y, reduction="none") * (one / one.sum(0).clamp(min=1)).sum(1)


def hard(outputs: Tensor, y: Tensor) -> Tensor:
    loss = cross_entropy(outputs, y, reduction="none")
    return torch.where(loss > loss.mean(), 2 * loss, loss)


def focal(outputs: Tensor, y: Tensor) -> Tensor:
    loss = cross_entropy(outputs, y, reduction="none")
    return (1 - (-loss).exp()) ** 2 * loss


def relative(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.squeeze(-1) - y).square() / y.std()


@pytest.mark.parametrize(("loss", "mixes"), [(balanced, True), (hard, True), (focal, False)])
def test_losses_are_tried(loss: Loss, mixes: bool) -> None:
    assert loss_mixes_rows(loss, 3, regression=False) is mixes


def test_losses_of_numbers_are_tried() -> None:
    assert loss_mixes_rows(relative, 1, regression=True)
    assert not loss_mixes_rows(lambda out, y: (out.squeeze(-1) - y).abs(), 1, regression=True)


def accuracy(**settings: Any) -> tuple[str, float]:
    numbers = np.random.default_rng(0)
    data = (numbers.normal(size=(70, 5)).astype("f"), numbers.integers(0, 3, 70))
    few = {"rounds": 2, "partition": {"clients": 3, "kind": "dirichlet", "alpha": 1}, "local": {"batch": 8}}
    torch.manual_seed(0)
    if "model" in settings:
        settings["model"] = settings["model"]()
    with tempfile.TemporaryDirectory() as folder:
        history = fedloom.run("fedavg", data=data, out=f"{folder}/r", **few, **settings)
        executor = json.loads(Path(f"{folder}/r/environment.json").read_text())["executor"]
    return executor, history.summary["global/test/loss"].last


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Centred, Counting])
def test_clients_with_such_a_net_train_one_by_one(kind: type[Plain]) -> None:
    """Padded batches would be another result, without a word."""
    executor, loss = accuracy(model=kind)
    assert executor == "loop"
    assert accuracy(model=kind, engine={"executor": "loop"}) == ("loop", loss)
    with pytest.raises(ConfigError, match="lanes pads batches, which would enter what is computed from a whole batch"):
        accuracy(model=kind, engine={"executor": "lanes"})
    assert accuracy(model=Plain)[0] == "lanes"


LOSSES = """
from torch.nn.functional import cross_entropy


def plain(outputs, y):
    return 2 * cross_entropy(outputs, y, reduction="none")


def scaled(outputs, y):
    loss = plain(outputs, y)
    return loss * (1 + loss.mean())
"""


UNREPEATABLE = """
import torch
from torch.nn.functional import cross_entropy

calls = []


def noisy(outputs, y):
    return cross_entropy(outputs + torch.randn_like(outputs), y, reduction="none")


def counting(outputs, y):
    calls.append(1)
    return cross_entropy(outputs, y, reduction="none") / len(calls)
"""


@pytest.mark.parametrize("name", ["noisy", "counting"])
def test_a_loss_that_cannot_be_repeated_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("unrepeatable.py").write_text(UNREPEATABLE)
    with pytest.raises(ConfigError, match=f"task.loss: 'unrepeatable.py:{name}' returns another loss for the same"):
        accuracy(task={"loss": f"unrepeatable.py:{name}"})


OF_SHARES = """
from torch.nn.functional import binary_cross_entropy, one_hot


def of_shares(outputs, y):
    return binary_cross_entropy(outputs, one_hot(y, 3).float(), reduction="none").sum(1)
"""


def test_a_loss_may_take_probabilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shares.py").write_text(OF_SHARES)
    task = Objective(loss="shares.py:of_shares")
    usercode.vouch(task.model_dump(), lasting=False)
    found = criterion_of(task, np.arange(3), 3)
    assert found.each(torch.full((1, 3), 0.5), torch.tensor([1])).tolist() == pytest.approx([3 * math.log(2)])


@pytest.mark.slow
def test_clients_with_such_a_loss_train_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(LOSSES)
    assert accuracy(task={"loss": "own.py:scaled"})[0] == "loop"
    assert accuracy(task={"loss": "own.py:plain"})[0] == "lanes"
