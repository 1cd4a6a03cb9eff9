"""A task is its module: the same function, the same gradient, the same statistics, as functions of one vector."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedloom.core.errors import ConfigError
from fedloom.core.task import Batch, KeyedDropout, Task
from fedloom.models.cnn import FedAvgCNN
from fedloom.models.linear import MLP, Logistic
from fedloom.models.resnet import ResNet20

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


class Tied(nn.Module):
    """Two layers that share their weights, which have two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


def test_weights_with_two_names_are_one_parameter() -> None:
    net, b = Tied(), batch(shape=(5,))
    task = Task(net)
    assert task.size == sum(p.numel() for p in net.parameters())
    w = 1.5 * task.w0
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
    assert torch.allclose(task.apply(w, b.x, b.buffers), net(b.x))
    net.zero_grad()
    nn.functional.cross_entropy(net(b.x), b.y).backward()
    want = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    assert torch.allclose(task.grad(w, b), want, atol=1e-6)


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


def computed_once() -> nn.Module:
    net = nn.Linear(4, 3)
    net.twice = 2 * net.weight  # type: ignore[assignment]
    return net


def with_sparse_buffer() -> nn.Module:
    net = nn.Linear(4, 3)
    net.register_buffer("links", torch.eye(4).to_sparse())
    return net


def half_double() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3).double())


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (computed_once, "the net cannot be copied: RuntimeError: .*compute in forward what depends on parameters"),
        (with_sparse_buffer, "'links' of the net is sparse .keep its indices and values"),
        (half_double, "neither all float32 nor all float64: '0.bias' is float32, '1.bias' is float64 .call net.float"),
        (lambda: nn.Linear(4, 3, dtype=torch.bfloat16), "for 16 bits there is engine.precision=bf16"),
        (lambda: nn.Linear(4, 3, dtype=torch.complex64), "a complex one can be torch.view_as_complex"),
        (lambda: nn.Embedding(4, 3, max_norm=1), "Embedding at '' has max_norm, and so writes into its weights"),
    ],
    ids=["computed", "sparse", "mixed", "short", "complex", "max_norm"],
)
def test_nets_that_are_no_vector_of_floats_are_refused(make: Callable[[], nn.Module], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("(", r"\(")):
        Task(make())


def test_statistics_of_several_types_keep_them() -> None:
    """In one vector, all of them would be float64, and BatchNorm refuses that."""
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    net.register_buffer("weights", torch.ones(3, dtype=torch.float64))
    task = Task(net, shape=(4,))
    inputs = torch.randn(5, 4)
    assert task.apply(task.w0, inputs, task.buffers0).dtype == torch.float32
    assert task.tensors(task.w0, task.buffers0)["weights"].dtype == torch.float64


def test_tf32_is_exact_where_there_is_none() -> None:
    task, cpu = Task(NETS["conv"]()), torch.device("cpu")
    exact, short = task.to(cpu, lanes=False), task.to(cpu, lanes=False, precision="tf32")
    assert torch.equal(exact.grad(exact.w0, batch()), short.grad(short.w0, batch()))
