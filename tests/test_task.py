"""A task is its module: the same function, the same gradient, the same statistics, as functions of one vector."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedloom.errors import ConfigError
from fedloom.models.cnn import FedAvgCNN
from fedloom.models.linear import MLP, Logistic
from fedloom.models.resnet import ResNet20
from fedloom.task import Batch, KeyedDropout, PatchConv2d, Task, _with_patches

SHAPE = (3, 8, 8)


def batch(
    n: int = 6, *, shape: tuple[int, ...] = SHAPE, key: int = 5, buffers: Tensor | None = None, seed: int = 0
) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(
        x=torch.randn(n, *shape, generator=rng),
        y=torch.randint(0, 4, (n,), generator=rng),
        mask=torch.ones(n),
        key=torch.tensor(key),
        progress=torch.tensor(0.0),
        lr=torch.tensor(0.1),
        buffers=buffers if buffers is not None else torch.zeros(0),
    )


class Normed(nn.Module):
    """A user's own module, with BatchNorm of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 8)
        self.again = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        out: Tensor = self.out(torch.relu(self.again(self.fc(h))))
        return out


def dropping(p: float = 0.5) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Dropout(p), nn.ReLU(), nn.Dropout(p), nn.Linear(16, 4))


NETS: dict[str, Callable[[], nn.Module]] = {
    "logistic": lambda: Logistic().build(SHAPE, 4),
    "mlp": lambda: MLP(widths=(16, 8)).build(SHAPE, 4),
    "conv": lambda: FedAvgCNN(padding="same").build(SHAPE, 4),
    "resnet20": lambda: ResNet20().build(SHAPE, 4),
    "batchnorm": Normed,
}


@pytest.fixture(params=NETS)
def net(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(3)
    return NETS[request.param]()


def test_the_flat_vector_holds_every_parameter(net: nn.Module) -> None:
    task = Task(net)
    assert task.size == sum(p.numel() for p in net.parameters())
    assert torch.equal(task.w0, torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    moved = task.w0 + torch.randn_like(task.w0)
    held = task.tensors(moved, task.buffers0)
    assert torch.equal(torch.cat([held[name].reshape(-1) for name in task.names]), moved)


def test_apply_is_the_module_in_evaluation_mode(net: nn.Module) -> None:
    task, b = Task(net), batch()
    w = task.w0 + 0.01 * torch.randn_like(task.w0)
    want = task.module(w, task.buffers0).eval()(b.x)
    assert torch.allclose(task.apply(w, b.x, task.buffers0), want, atol=1e-6)
    net.load_state_dict(task.tensors(w, task.buffers0))
    assert torch.allclose(net.eval()(b.x), want, atol=1e-6)


@pytest.mark.parametrize("lanes", [False, True], ids=["loop", "lanes"])
def test_the_gradient_is_autograds(net: nn.Module, lanes: bool) -> None:
    if lanes and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules()):
        pytest.skip("BatchNorm is refused by lanes")
    task = Task(net, lanes=lanes)
    b = batch(buffers=task.buffers0)
    net.train()
    loss = nn.functional.cross_entropy(net(b.x), b.y)
    loss.backward()
    want = torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])
    assert torch.allclose(task.loss(task.w0, b), loss, atol=1e-6)
    assert torch.allclose(task.grad(task.w0, b), want, atol=1e-5)


def test_loop_and_lanes_are_one_function() -> None:
    torch.manual_seed(0)
    for make in (NETS["logistic"], NETS["mlp"], NETS["conv"], dropping):
        net = make()
        loop, lanes = Task(net), Task(net, lanes=True)
        batches = [batch(key=k, seed=k) for k in range(3)]
        w = loop.w0 + 0.1 * torch.randn(3, loop.size)
        alone = torch.stack([loop.grad(w[k], b) for k, b in enumerate(batches)])
        stacked = Batch(*(torch.stack(column) for column in zip(*batches, strict=True)))
        together = vmap(lanes.grad)(w, stacked)
        assert torch.allclose(alone, together, atol=1e-5)


@pytest.mark.parametrize("lanes", [False, True], ids=["loop", "lanes"])
def test_padding_changes_neither_loss_nor_gradient(lanes: bool) -> None:
    for net in (NETS["mlp"](), NETS["conv"](), dropping()):
        task = Task(net, lanes=lanes)
        short = batch(4)
        junk = 1e3 * torch.randn(3, *SHAPE)
        padded = short._replace(
            x=torch.cat([short.x, junk]),
            y=torch.cat([short.y, torch.zeros(3, dtype=torch.long)]),
            mask=torch.cat([short.mask, torch.zeros(3)]),
        )
        assert torch.allclose(task.loss(task.w0, short), task.loss(task.w0, padded), atol=1e-6)
        assert torch.allclose(task.grad(task.w0, short), task.grad(task.w0, padded), atol=1e-6)


def test_a_batch_of_nothing_but_padding_moves_nothing() -> None:
    task = Task(NETS["mlp"]())
    b = batch()
    empty = b._replace(mask=torch.zeros(6))
    assert float(task.loss(task.w0, empty)) == 0.0
    assert not task.grad(task.w0, empty).any()


# -- dropout ---------------------------------------------------------------------------------------
def masks(p: float, key: int | Tensor, n: int = 1000) -> Tensor:
    drop = KeyedDropout(p, 0)
    return functional_call(drop, {"key": torch.as_tensor(key)}, (torch.ones(8, n),))


def test_dropout_is_a_function_of_its_key() -> None:
    assert torch.equal(masks(0.3, 1), masks(0.3, 1))
    assert not torch.equal(masks(0.3, 1), masks(0.3, 2))
    rows = masks(0.3, 1)
    assert not torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share_at_the_right_scale(p: float) -> None:
    kept = masks(p, 7, 20_000)
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
    assert float((kept > 0).double().mean()) == pytest.approx(1 - p, abs=0.005)
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.05)


def test_dropout_masks_are_the_same_in_a_lane_as_alone() -> None:
    drop, keys = KeyedDropout(0.4, 3), torch.tensor([5, 6, 7])
    x = torch.randn(3, 4, 10)
    lanes = vmap(lambda key, v: functional_call(drop, {"key": key}, (v,)))(keys, x)
    for k in range(3):
        assert torch.equal(lanes[k], functional_call(drop, {"key": keys[k]}, (x[k],)))


def test_two_dropouts_of_one_net_draw_different_masks() -> None:
    task = Task(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    b = batch()._replace(x=torch.ones(1, 4000))
    out, _ = task._forward(task.w0, b)
    assert float((out > 0).double().mean()) == pytest.approx(0.25, abs=0.03)


def test_a_dropout_used_at_two_places_is_replaced_at_both() -> None:
    """Else the second would draw from torch's hidden generator, and no resume could repeat it."""
    drop = nn.Dropout(0.5)
    task = Task(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), drop, nn.Linear(8, 8), drop, nn.Linear(8, 4)))
    b = batch()
    torch.manual_seed(0)
    first = task.grad(task.w0, b)
    torch.manual_seed(1)
    assert torch.equal(first, task.grad(task.w0, b))


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.Dropout1d(0.2), nn.RReLU(), nn.BatchNorm2d(4, momentum=None)],
    ids=str,
)
def test_layers_with_hidden_randomness_or_counters_are_refused(layer: nn.Module) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Flatten(), nn.Linear(144, 4))
    with pytest.raises(ConfigError, match=type(layer).__name__):
        Task(net)


def test_dropout_is_off_in_evaluation_and_on_in_training() -> None:
    task = Task(dropping())
    b = batch()
    assert torch.equal(task.apply(task.w0, b.x, b.buffers), task.apply(task.w0, b.x, b.buffers))
    losses = {float(task.loss(task.w0, b._replace(key=torch.tensor(k)))) for k in range(5)}
    assert len(losses) == 5


# -- running statistics ----------------------------------------------------------------------------
def test_statistics_are_those_of_the_plain_module() -> None:
    torch.manual_seed(1)
    net = Normed()
    task = Task(net)
    assert task.has_statistics
    buffers, plain = task.buffers0, copy.deepcopy(net).train()
    for k in range(5):
        b = batch(buffers=buffers, seed=k)
        buffers = task.statistics(task.w0, b)
        plain(b.x)
    want = [x.reshape(-1) for _, x in plain.named_buffers() if x.is_floating_point()]
    assert torch.allclose(buffers, torch.cat(want), atol=1e-6)
    b = batch(seed=9)
    assert torch.allclose(task.apply(task.w0, b.x, buffers), plain.eval()(b.x), atol=1e-5)


def test_no_call_changes_the_task() -> None:
    task = Task(Normed())
    b = batch(buffers=task.buffers0)
    before = copy.deepcopy(dict(task._train.state_dict()))
    held = task.buffers0.clone(), task.w0.clone(), b.buffers.clone()
    task.loss(task.w0, b)
    task.grad(task.w0, b)
    task.statistics(task.w0, b)
    task.apply(task.w0, b.x, task.buffers0)
    assert all(torch.equal(a, c) for a, c in zip(held, (task.buffers0, task.w0, b.buffers), strict=True))
    after = task._train.state_dict()
    assert [n for n, x in before.items() if not torch.equal(x, after[n])] == []


def test_group_norm_has_no_statistics() -> None:
    task = Task(ResNet20().build(SHAPE, 4))
    assert not task.has_statistics
    assert task.has_convolutions
    assert task.buffers0.numel() == 0


# -- names and masks -------------------------------------------------------------------------------
def test_masks_choose_parameter_groups() -> None:
    task = Task(NETS["mlp"]())
    head, body = task.mask("head."), task.mask("body.")
    assert torch.equal(head + body, torch.ones(task.size))
    assert int(head.sum()) == 8 * 4 + 4
    assert torch.equal(task.mask("head.", "body."), torch.ones(task.size))
    assert not task.mask("nothing").any()
    only_head = task.tensors(head, task.buffers0)
    assert all(bool((x == float(name.startswith("head."))).all()) for name, x in only_head.items())


def test_frozen_parameters_are_not_trained() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 4))
    for p in net[1].parameters():
        p.requires_grad_(False)
    task = Task(net)
    assert task.size == 8 * 4 + 4
    b = batch()
    assert torch.allclose(task.apply(task.w0, b.x, b.buffers), net.eval()(b.x), atol=1e-6)


@pytest.mark.parametrize("make", [Normed, dropping, NETS["conv"]])
def test_a_users_module_is_loaded_back_from_tensors(make: Callable[[], nn.Module]) -> None:
    task = Task(make())
    w, buffers = torch.randn(task.size), task.buffers0 + torch.rand_like(task.buffers0)
    fresh = make()
    fresh.load_state_dict(task.tensors(w, buffers))
    b = batch()
    assert torch.allclose(fresh.eval()(b.x), task.apply(w, b.x, buffers), atol=1e-5)


def test_the_callers_module_is_left_alone() -> None:
    net = dropping().eval()
    before: dict[str, Any] = {n: x.clone() for n, x in net.state_dict().items()}
    task = Task(net)
    task.grad(task.w0, batch())
    assert not net.training
    assert any(isinstance(m, nn.Dropout) for m in net.modules())
    assert all(torch.equal(x, before[n]) for n, x in net.state_dict().items())


def test_a_net_that_is_one_dropout_still_works() -> None:
    task = Task(nn.Dropout(0.5))
    assert isinstance(task._train, KeyedDropout)


# -- precision -------------------------------------------------------------------------------------
@pytest.mark.parametrize("lanes", [False, True], ids=["loop", "lanes"])
@pytest.mark.parametrize("name", ["logistic", "mlp", "conv"])
def test_sixteen_bits_are_in_the_net_and_nowhere_else(name: str, lanes: bool) -> None:
    """The gradient is float32, near the exact one, and not it; the model that is judged is computed exactly."""
    exact = Task(NETS[name]())
    short = exact.to(torch.device("cpu"), lanes=lanes, precision="bf16")
    b = batch()
    want, found = exact.grad(exact.w0, b), short.grad(short.w0, b)
    assert found.dtype == short.loss(short.w0, b).dtype == torch.float32
    assert not torch.equal(want, found)
    assert float((want - found).norm() / want.norm()) < 0.1
    assert torch.equal(exact.apply(exact.w0, b.x, b.buffers), short.apply(short.w0, b.x, b.buffers))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 32, 5),
        nn.Conv2d(1, 40, 3, padding=1, bias=False),
        nn.Conv2d(4, 32, (3, 2), stride=(2, 1), padding=(1, 0)),
        nn.Conv2d(3, 33, 4, padding="same"),
    ],
)
def test_a_convolution_as_a_product_of_patches_is_the_same_function(layer: nn.Conv2d) -> None:
    x = torch.randn(3, 5, layer.in_channels, 9, 8)  # three clients
    w = {n: torch.randn(3, *p.shape) for n, p in layer.named_parameters()}
    patched = copy.deepcopy(layer)
    _with_patches(patched)
    assert type(patched) is PatchConv2d

    def loss(net: nn.Module, w: dict[str, Tensor], x: Tensor) -> Tensor:
        out = functional_call(net, w, (x,))
        assert isinstance(out, Tensor)
        return out.sin().sum()

    plain, ours = (vmap(grad_and_value(partial(loss, net)))(w, x) for net in (layer, patched))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-3)


def test_convolutions_become_products_only_where_these_are_faster() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 64, 5), nn.Conv2d(64, 64, 5), nn.Conv2d(3, 6, 5), nn.Conv2d(4, 32, 3, groups=2),
        nn.Conv2d(3, 32, 3, dilation=2), nn.Conv2d(3, 32, 3, padding_mode="reflect"),
    )  # fmt: skip
    _with_patches(net)
    assert [type(m) is PatchConv2d for m in net] == [True] + [False] * 5


def test_tf32_is_exact_where_there_is_none() -> None:
    exact = Task(NETS["conv"]())
    short = exact.to(torch.device("cpu"), lanes=False, precision="tf32")
    assert torch.equal(exact.grad(exact.w0, batch()), short.grad(short.w0, batch()))
