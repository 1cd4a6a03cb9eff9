"""Convolutions with channels side by side, and pooling before the ReLU: the same function as the plain net."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom
from fedloom.core.channels_last import ChannelsLastConv2d, channels_last
from fedloom.core.lanes.conv import in_lanes
from fedloom.core.task import Batch, Task
from fedloom.models.net import Net

CPU = torch.device("cpu")


def pictures(channels: int, *, padded: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    pool = nn.MaxPool2d(3, 2, padding=1) if padded else nn.MaxPool2d(2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3), nn.ReLU(), pool, nn.Conv2d(6, 8, 2, padding=1, bias=False), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(4),
    )  # fmt: skip


def converted(net: nn.Module) -> nn.Module:
    other = copy.deepcopy(net)
    channels_last(other)
    return other


def gradients(net: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(net(x).square().sum(), tuple(net.parameters()))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_outputs_and_gradients_are_those_of_the_plain_net(channels: int, padded: bool) -> None:
    net = pictures(channels, padded=padded).double()
    x = torch.randn(5, channels, 11, 9, dtype=torch.float64)
    expected = net(x)
    other = converted(net)
    torch.testing.assert_close(other(x), expected)
    torch.testing.assert_close(gradients(other, x), gradients(net, x))


def test_a_window_of_equal_pixels_passes_its_gradient_once() -> None:
    """A black corner of an image: all pixels of a window are the bias of the convolution, above or below 0."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    with torch.no_grad():
        net[0].bias.copy_(torch.tensor([0.5, -0.5]))  # type: ignore[union-attr,operator]
    x = torch.zeros(2, 1, 6, 6, requires_grad=True)
    other = converted(net)
    for each in (net, other):
        bias = torch.autograd.grad(each(x).sum(), each[0].bias)[0]  # type: ignore[index]
        assert bias.tolist() == [2 * 4, 0.0]


def test_what_is_converted() -> None:
    net = pictures(3)
    net(torch.zeros(1, 3, 11, 9))
    other = converted(net)
    assert isinstance(other, nn.Sequential)
    kinds = [type(layer) for layer in other][:3]
    assert kinds == [ChannelsLastConv2d, nn.ReLU, nn.MaxPool2d]
    seen: list[torch.Size] = []
    handle = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda layer, given: seen.append(given[0].shape) if layer is other[1] else None
    )
    other(torch.zeros(1, 3, 11, 9))
    handle.remove()
    assert seen == [(1, 6, 4, 3)]  # after the pooling
    assert other.state_dict().keys() == net.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), net.state_dict().values(), strict=True))
    out = other[0](torch.zeros(2, 3, 11, 9))
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert other[0](torch.zeros(3, 11, 9)).shape == (6, 9, 7)  # an image without a batch

    class Own(nn.Conv2d):
        """A subclass may compute something else."""

    assert type(converted(nn.Sequential(Own(1, 1, 1)))[0]) is Own  # type: ignore[index]


def test_it_also_works_under_vmap_where_the_order_cannot_be_chosen() -> None:
    net = pictures(3).double()
    x = torch.randn(4, 2, 3, 11, 9, dtype=torch.float64)
    expected = torch.stack([net(each) for each in x])
    torch.testing.assert_close(torch.func.vmap(converted(net))(x), expected)


def test_users_get_the_plain_net_and_second_derivatives_are_right() -> None:
    net = pictures(3).double()
    x = torch.randn(2, 3, 11, 9, dtype=torch.float64)
    net(x)
    plain = Task(Net(net[:-1], net[-1].in_features, 4).double())  # type: ignore[index,arg-type,union-attr]
    task = plain.to(torch.device("cpu"), lanes=False)
    given = (plain.w0, plain.buffers0)
    assert {type(layer) for layer in task.module(*given).modules()} & {ChannelsLastConv2d} == set()
    one = torch.ones((), dtype=torch.float64)
    batch = Batch(x, torch.tensor([1, 3]), torch.ones(2).double(), one.long(), one, one, plain.buffers0)
    torch.testing.assert_close(task.hvp(plain.w0, batch, plain.w0), plain.hvp(plain.w0, batch, plain.w0))
    assert task.work_above(0) == plain.work_above(0) == 1.0
    assert task.work_above(plain.size // 2) == plain.work_above(plain.size // 2)


@pytest.mark.parametrize("convert", [channels_last, in_lanes])
def test_a_hook_sees_what_it_would_see_in_the_plain_net(convert: Callable[[nn.Module], None]) -> None:
    """So does one that changes what a layer gets, or gives."""
    net = pictures(3).double()
    x = torch.randn(2, 3, 11, 9, dtype=torch.float64)
    net(x)
    expected = torch.nn.Sequential(net[0], nn.ReLU())(x)
    other = copy.deepcopy(net)
    convert(other)
    assert isinstance(other, nn.Sequential)
    seen: list[Tensor] = []
    other[1].register_forward_hook(lambda _layer, _given, out: seen.append(out))
    torch.testing.assert_close(other(x), net(x))
    torch.testing.assert_close(seen, [expected])


# -- nets with code of the user's own ----------------------------------------------------------------
class Viewing(nn.Module):
    """The end of a net's body as most people write it: it fails if pixels lie in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.head = nn.Linear(6 * 4 * 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.conv(x).relu(), 2)
        x = x.view_as(x)
        logits: Tensor = self.head(x.view(x.size(0), -1))
        return logits


class Striding(Viewing):
    """It reads the memory itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.conv(x).relu(), 2)
        logits: Tensor = self.head(x.as_strided((len(x), 72), (72, 1)))
        return logits


def inputs(task: Task) -> Batch:
    one = torch.ones(())
    x = torch.randn(3, 2, 10, 8, generator=torch.Generator().manual_seed(0))
    return Batch(x, torch.tensor([1, 3, 0]), torch.ones(3), one.long(), one, one, task.buffers0)


class ZeroGate(Viewing):
    """It writes through a view; at its first weights nobody sees that."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.max_pool2d(self.conv(x), 2)
        rest = h.clone()
        rest.view(len(rest), -1).sub_(h.mean())
        logits: Tensor = self.head((h + self.gate * rest).flatten(1))
        return logits


class OnlyInTraining(Viewing):
    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.max_pool2d(self.conv(x), 2)
        if self.training:
            h = h * 1.0
            h.view(-1)[::3] = 0
        logits: Tensor = self.head(h.flatten(1))
        return logits


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return (g.view(len(g), -1) * 2).view(g.shape)


class OwnGradient(Viewing):
    """A gradient of its own views what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(nn.functional.max_pool2d(Twice.apply(self.conv(x)), 2).flatten(1))  # type: ignore[no-untyped-call]
        return logits


def of_layers(change: Callable[[nn.Sequential], object] = lambda _net: None, *, inplace: bool = False) -> nn.Module:
    layers = nn.Conv2d(2, 6, 3), nn.ReLU(inplace), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6 * 4 * 3, 4)
    net = nn.Sequential(*layers)
    change(net)
    return net


def doubled(net: nn.Sequential) -> None:
    net[0].register_forward_hook(lambda _layer, _given, out: (out.view(len(out), -1) * 2).view(out.shape))


def patched(net: nn.Sequential) -> None:
    net[1].forward = lambda x: -x  # type: ignore[method-assign]


def added(net: nn.Sequential) -> None:
    """What a hook has kept is overwritten by the layer that follows, in the net as it is written."""
    kept: list[Tensor] = []
    net[0].register_forward_hook(lambda _layer, _given, out: kept.append(out))
    net[3].register_forward_pre_hook(lambda _layer, given: given[0] + kept.pop().mean())


NETS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "views": (Viewing, True),
    "strides": (Striding, False),
    "writes where its weights begin at zero": (ZeroGate, False),
    "writes in training": (OnlyInTraining, False),
    "has a gradient of its own": (OwnGradient, False),
    "has a hook that views": (lambda: of_layers(doubled), True),
    "has a layer that was patched": (lambda: of_layers(patched), True),
    "has a hook on what is overwritten": (lambda: of_layers(added, inplace=True), True),
}


@pytest.mark.parametrize(("make", "converted"), NETS.values(), ids=NETS)
def test_a_net_that_reads_images_in_its_own_way_computes_the_same(
    make: Callable[[], nn.Module], converted: bool
) -> None:
    torch.manual_seed(0)
    plain = Task(make(), shape=(2, 10, 8))
    batch = inputs(plain)
    w = plain.w0 + 0.1 * torch.randn(plain.size)
    expected, seen = plain.grad(w, batch), plain.apply(w, batch.x, batch.buffers)
    task = plain.to(CPU, lanes=False)
    assert task.channels_last is converted
    torch.testing.assert_close(task.grad(w, batch), expected)
    torch.testing.assert_close(task.apply(w, batch.x, batch.buffers), seen)
    assert task.work_above(0) == 1.0
    lanes = plain.to(CPU, lanes=True)
    torch.testing.assert_close(lanes.apply(w, batch.x.contiguous(), batch.buffers), seen)


def test_the_work_of_such_a_net_is_counted() -> None:
    task = Task(Viewing(), shape=(2, 10, 8)).to(CPU, lanes=False)
    assert task.work_above(6 * 18 + 6) == pytest.approx(72 * 4 / (72 * 4 + 8 * 6 * 6 * 18))


def test_a_relu_in_place_is_not_moved_where_others_have_its_input() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.after = nn.Conv2d(2, 6, 3), nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2))

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x)
            return self.after(h).flatten(1).sum(1) + h.flatten(1).mean(1)  # type: ignore[no-any-return]

    net = Aside()
    x = torch.randn(3, 2, 10, 8)
    torch.testing.assert_close(converted(net)(x), net(x))


def test_images_without_a_batch_are_convolved_in_lanes() -> None:
    class OneByOne(Viewing):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.stack([self.conv(image) for image in x])
            logits: Tensor = self.head(nn.functional.max_pool2d(h, 2).flatten(1))
            return logits

    plain = Task(OneByOne(), shape=(2, 10, 8))
    task, batch = plain.to(CPU, lanes=True, capture="graph"), inputs(plain)
    found = torch.func.vmap(lambda w: task.grad(w, batch))(torch.stack([plain.w0, 2 * plain.w0]))
    torch.testing.assert_close(found[1], plain.grad(2 * plain.w0, batch))


def test_such_a_net_would_fail_without_help() -> None:
    net = Viewing()
    channels_last(net)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        net(torch.randn(3, 2, 10, 8))


def test_lanes_of_such_a_net_compute_the_same() -> None:
    """In lanes whose steps are recorded, as they are on a GPU."""
    torch.manual_seed(0)
    plain = Task(Viewing(), shape=(2, 10, 8))
    task = plain.to(CPU, lanes=True, capture="graph")
    rows = torch.stack([plain.w0, 2 * plain.w0])
    batch = inputs(plain)
    found = torch.func.vmap(lambda w: task.grad(w, batch))(rows)
    torch.testing.assert_close(found, torch.stack([plain.grad(w, batch) for w in rows]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Viewing, Striding])
def test_whole_runs_of_such_nets_are_the_same_in_both_executors(kind: type[nn.Module]) -> None:
    numbers = np.random.default_rng(0)
    data = (numbers.normal(size=(80, 2, 10, 8)).astype("f"), numbers.integers(0, 4, 80))
    losses = []
    for executor in ("loop", "lanes"):
        torch.manual_seed(0)
        engine = {"executor": executor}
        history = fedloom.run("fedavg", data=data, model=kind(), rounds=2, partition={"clients": 4}, engine=engine)
        losses.append(history.summary["global/test/loss"].last)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
