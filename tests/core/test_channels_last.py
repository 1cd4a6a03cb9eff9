"""Convolutions with channels side by side, and pooling before the ReLU: the same function as the plain net."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedloom.core.channels_last import ChannelsLastConv2d, channels_last
from fedloom.core.task import Batch, Task
from fedloom.models.net import Net


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
    other[1].register_forward_hook(lambda _layer, given, _out: seen.append(given[0].shape))
    other(torch.zeros(1, 3, 11, 9))
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
