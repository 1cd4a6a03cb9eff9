"""Nets and losses of the user's own that PyTorch does not compute for many clients at once: found before the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.checkpoint import checkpoint

import fedloom
from fedloom.core.errors import ConfigError
from fedloom.core.objective import CLASSES
from fedloom.core.task import Task
from fedloom.engine.lane_trial import why_apart

CPU = torch.device("cpu")


class Plain(nn.Module):
    """Two layers, with something between them."""

    def __init__(self, between: Callable[..., Tensor] = lambda _, h: h.relu()) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(6, 5), nn.Linear(5, 3), between

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.between(self, self.first(x)))
        return logits


class Square(torch.autograd.Function):
    """As functions were written before torch 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * g


class Mean(torch.autograd.Function):
    """A function whose own rule for many clients gives each their mean; for one it does nothing."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return x.mean(in_dims[0], keepdim=True).expand_as(x), in_dims[0]


class MeanGradient(Mean):
    """The same of gradients only."""

    generate_vmap_rule = True
    vmap = torch.autograd.Function.vmap

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return Mean.apply(g)


def recomputed(net: Plain, h: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda h: (h @ net.first.weight[:, :5]).relu(), h, use_reentrant=False)
    return out


def squashed(net: Plain, h: Tensor) -> Tensor:
    return h / float(net.first.weight.detach().norm())


APART: dict[str, tuple[Callable[..., Tensor], str]] = {
    "checkpoint": (recomputed, "fails: CheckpointError"),
    "function": (lambda _, h: Square.apply(h), "fails: RuntimeError: In order to use an autograd.Function"),
    "number": (squashed, "fails: RuntimeError: vmap: It looks like you're calling .item()"),
    "branch": (lambda net, h: h if net.first.weight.sum() > 0 else -h, "fails: RuntimeError: vmap"),
    "outputs": (lambda _, h: Mean.apply(h), "computes other outputs"),
    "gradient": (lambda _, h: MeanGradient.apply(h), "computes another gradient of 'first.weight'"),
}


@pytest.mark.parametrize("name", APART)
def test_nets_that_do_not_work_side_by_side_are_found(name: str) -> None:
    between, why = APART[name]
    assert why_apart(Task(Plain(between), shape=(6,)), CPU).startswith(why)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.last = kind(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.layer(x.view(len(x), 3, 2))[0][:, -1])
        return logits


class Words(nn.Module):
    """It has two words: no others may be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.look_up, self.drop, self.last = nn.Embedding(2, 4), nn.Dropout(0.5), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.drop(self.look_up(x.long())).flatten(1))
        return logits


@pytest.mark.parametrize(
    "net", [Plain(), Words(), Recurrent(nn.LSTM), Recurrent(nn.GRU)], ids=lambda net: type(net).__name__
)
def test_other_nets_are_left_in_lanes(net: nn.Module) -> None:
    assert why_apart(Task(net, shape=(6,)), CPU) == ""


def brier(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.softmax(1) - one_hot(y, 3)).square().sum(1)


def doubled(outputs: Tensor, y: Tensor) -> Tensor:
    return 2 * cross_entropy(outputs, y, reduction="none")


def test_losses_are_tried_too() -> None:
    task = Task(Plain(), shape=(6,))
    assert why_apart(task.learning(CLASSES._replace(each=brier)), CPU).startswith("fails: RuntimeError: vmap")
    assert why_apart(task.learning(CLASSES._replace(each=doubled)), CPU) == ""


def test_a_net_that_mixes_its_inputs_with_padding_is_found() -> None:
    """The second batch of the trial is shorter than the first, and so it is padded."""
    assert why_apart(Task(Plain(lambda _, h: h + h.flip(0)), shape=(6,)), CPU) == "computes other outputs"


def run(out: Path, method: str, net: nn.Module, **engine: str) -> tuple[str, float]:
    """The executor of a run, and its last loss on the clients' own rows."""
    numbers = np.random.default_rng(0)
    data = (numbers.normal(size=(60, 6)).astype("f"), numbers.integers(0, 3, 60))
    few: dict[str, Any] = {"rounds": 1, "partition": {"clients": 3, "holdout": 0.2}, "local": {"batch": 8}}
    history = fedloom.run(method, data=data, model=net, out=out, engine=engine, **few)
    executor = json.loads((out / "environment.json").read_text())["executor"]
    return executor, next(x.last for name, x in history.summary.items() if name.endswith("fit/test/loss"))


def test_a_net_that_compares_rows_in_evaluation_is_reported(tmp_path: Path) -> None:
    net = nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.TransformerEncoderLayer(6, 2, 8, 0.0), nn.Flatten(), nn.Linear(6, 3)
    )
    with pytest.warns(
        UserWarning, match="in evaluation, too, .* depends on the other rows: does a layer lack batch_first"
    ):
        assert run(tmp_path / "r", "fedavg", net)[0] == "loop"


def test_clients_train_one_by_one_by_themselves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Plain(squashed)
    done = run(tmp_path / "auto", "fedavg", net)
    assert done == run(tmp_path / "loop", "fedavg", net, executor="loop")
    assert done[0] == "loop"
    with pytest.raises(ConfigError, match=r"engine.executor: side by side the net fails: .*squashed.*\(use loop\)"):
        run(tmp_path / "lanes", "fedavg", net, executor="lanes")


def test_recurrent_nets_of_clients_are_evaluated_side_by_side(tmp_path: Path) -> None:
    """Without a gradient, torch computes them in another way, which it cannot map over clients."""
    torch.manual_seed(0)
    net = Recurrent(nn.LSTM)
    lanes = run(tmp_path / "lanes", "ditto", net, executor="lanes")
    loop = run(tmp_path / "loop", "ditto", net, executor="loop")
    assert (lanes[0], loop[0]) == ("lanes", "loop")
    assert lanes[1] == pytest.approx(loop[1], rel=1e-5)
