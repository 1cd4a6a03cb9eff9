"""Nets have the sizes their papers state, split into body and head, and train side by side under vmap."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedloom.core.errors import ConfigError
from fedloom.core.schema import kinds, read
from fedloom.models.cnn import CNN64, FedAvgCNN, LawCNN
from fedloom.models.densenet import DenseNet121
from fedloom.models.lenet import LawLeNet, LeNet5
from fedloom.models.linear import MLP, Logistic
from fedloom.models.net import NetSpec, NormedSpec, parameters
from fedloom.models.random_features import RandomFeatureNet
from fedloom.models.resnet import ResNet18, ResNet20, ResNet50

DIGITS, MNIST, CIFAR, FLAT = (1, 8, 8), (1, 28, 28), (3, 32, 32), (60,)

COUNTS: list[tuple[NetSpec, tuple[int, ...], int, int]] = [  # (model, shape, features, parameters for 10 classes)
    (Logistic(), FLAT, 60, 610),
    (Logistic(), DIGITS, 64, 650),
    (Logistic(), MNIST, 784, 7_850),
    (MLP(), DIGITS, 64, 4_810),
    (MLP(widths=(512, 256)), MNIST, 256, 535_818),
    (MLP(widths=(512, 256)), CIFAR, 256, 1_707_274),
    (MLP(widths=()), MNIST, 784, 7_850),
    (RandomFeatureNet(width=2048), MNIST, 2048, 20_490),
    (FedAvgCNN(), MNIST, 512, 582_026),
    (FedAvgCNN(), CIFAR, 512, 878_538),
    (FedAvgCNN(padding="same"), MNIST, 512, 1_663_370),
    (CNN64(), CIFAR, 192, 797_962),
    (LawCNN(), MNIST, 1024, 3_274_634),
    (LawCNN(), CIFAR, 1024, 4_259_274),
    (LawCNN(padding="valid"), MNIST, 1024, 1_111_946),
    (LawCNN(padding="valid"), CIFAR, 1024, 1_703_370),
    (LeNet5(), MNIST, 84, 61_706),
    (LeNet5(), CIFAR, 84, 62_006),
    (LawLeNet(), MNIST, 1568, 28_938),
    (ResNet20(), CIFAR, 64, 272_474),
    (ResNet20(norm="batch"), CIFAR, 64, 272_474),
    (ResNet20(width=64), CIFAR, 256, 4_327_754),
    (ResNet18(), CIFAR, 512, 11_173_962),
    (ResNet18(stem="imagenet"), CIFAR, 512, 11_176_512 + 5_130),
    (ResNet50(), CIFAR, 2048, 23_520_842),
    (ResNet50(stem="imagenet"), CIFAR, 2048, 23_508_032 + 20_490),
    (ResNet50(stem="imagenet", norm="batch"), CIFAR, 2048, 23_508_032 + 20_490),
    (DenseNet121(), CIFAR, 1024, 6_956_426),
    (DenseNet121(stem="imagenet"), CIFAR, 1024, 6_953_856 + 10_250),
    (DenseNet121(stem="imagenet", norm="batch"), CIFAR, 1024, 6_953_856 + 10_250),
]

SMALL: list[tuple[NetSpec, tuple[int, ...]]] = [  # each small net, at a size that keeps the tests quick
    (Logistic(), FLAT),
    (MLP(widths=(16, 8)), DIGITS),
    (FedAvgCNN(), (3, 16, 16)),
    (FedAvgCNN(padding="same"), DIGITS),
    (CNN64(), (3, 16, 16)),
    (LawCNN(), DIGITS),
    (LeNet5(), MNIST),
    (LawLeNet(), DIGITS),
    (ResNet20(), DIGITS),
    (ResNet20(norm="none"), DIGITS),
]


def named(value: Any) -> str:
    if isinstance(value, NetSpec):
        fields = ",".join(f"{k}={v}" for k, v in value.model_dump(exclude_defaults=True).items())
        return f"{value.kind}({fields})"
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def loss(net: nn.Module, state: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    logits: Tensor = functional_call(net, state, (x,))
    return nn.functional.cross_entropy(logits, y)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "shape", "features", "count"), COUNTS, ids=named)
def test_parameter_count_is_the_published_one(
    model: NetSpec, shape: tuple[int, ...], features: int, count: int
) -> None:
    with torch.device("meta"):
        ten, hundred = model.build(shape, 10), model.build(shape, 100)
    assert parameters(ten) == count
    assert parameters(hundred) == count + 90 * (features + 1)


def test_parameter_counts_of_the_fedalr_net() -> None:
    with torch.device("meta"):
        assert parameters(CNN64().build(CIFAR, 10)) == 797_962
        assert parameters(CNN64().build(CIFAR, 100)) == 815_332


def test_frozen_parameters_are_not_counted() -> None:
    net = Logistic().build(FLAT, 10)
    net.requires_grad_(False)
    assert parameters(net) == 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", [FLAT, DIGITS, MNIST, CIFAR], ids=named)
@pytest.mark.parametrize("kind", sorted(kinds(NetSpec, "fedloom.models")))
def test_every_kind_gives_logits_or_one_clear_fault(kind: str, shape: tuple[int, ...]) -> None:
    model = kinds(NetSpec, "fedloom.models")[kind]()
    flat_refused = len(shape) == 1 and kind not in ("logistic", "mlp", "random_features")
    small_refused = shape == DIGITS and kind in ("cnn64", "cnn_fedavg", "lenet5")
    if flat_refused or small_refused:
        with pytest.raises(ConfigError) as caught:
            model.build(shape, 10)
        (fault,) = caught.value.faults
        assert fault.where == "model.kind"
        assert fault.what.startswith(f"{kind} needs images")
        assert "x".join(map(str, shape)) in fault.what
        assert "logistic" in fault.fix
        return
    with torch.device("meta"):  # shapes are checked in full without the arithmetic
        net = model.build(shape, 10)
        assert net(torch.empty(2, *shape)).shape == (2, 10)


def test_fault_names_numbers_and_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"cnn64 needs images of at least 16x16 \(got 1x8x8\) \(logistic, mlp and"):
        CNN64().build(DIGITS, 10)
    with pytest.raises(ConfigError, match=r'resnet20 work there; so does padding = "same"'):
        FedAvgCNN().build(DIGITS, 10)
    with pytest.raises(ConfigError, match=r"resnet20 needs images of at least 3x3 .* \(logistic and mlp work there\)"):
        ResNet20().build((1, 2, 9), 10)
    with pytest.raises(ConfigError, match=r"got shape 28x28\)"):
        CNN64().build((28, 28), 10)


LEAST: list[tuple[NetSpec, int]] = [
    (FedAvgCNN(), 16),
    (FedAvgCNN(padding="same"), 4),
    (CNN64(), 16),
    (LawCNN(), 4),
    (LeNet5(), 12),
    (LawLeNet(), 4),
    (ResNet20(), 3),
    (ResNet18(), 5),
    (ResNet50(stem="imagenet"), 17),
    (DenseNet121(), 8),
    (DenseNet121(stem="imagenet"), 29),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "least"), LEAST, ids=named)
def test_least_image_size_is_exact(model: NetSpec, least: int) -> None:
    with torch.device("meta"):
        assert model.build((1, least, least + 3), 10)(torch.empty(2, 1, least, least + 3)).shape == (2, 10)
        with pytest.raises(ConfigError, match=f"at least {least}x{least}"):
            model.build((1, least + 3, least - 1), 10)


@pytest.mark.parametrize(("model", "shape"), SMALL, ids=named)
def test_body_and_head(model: NetSpec, shape: tuple[int, ...]) -> None:
    net = model.build(shape, 10)
    assert [name for name, _ in net.named_children()] == ["body", "head"]
    names = [name for name, _ in net.named_parameters()]
    assert names[-2:] == ["head.weight", "head.bias"]
    assert all(name.startswith("body.") for name in names[:-2])
    assert isinstance(net.head, nn.Linear)
    assert isinstance(net.body, nn.Module)
    x = torch.randn(3, *shape)
    assert torch.equal(net(x), net.head(net.body(x)))
    assert net.body(x).shape == (3, net.head.in_features)
    assert not any(getattr(module, "inplace", False) for module in net.modules())


@pytest.mark.parametrize(("model", "shape"), SMALL, ids=named)
def test_the_seed_decides_the_net(model: NetSpec, shape: tuple[int, ...]) -> None:
    states = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        states.append(model.build(shape, 10).state_dict())
    one, same, other = states
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


@pytest.mark.parametrize(("model", "shape"), SMALL, ids=named)
def test_lanes_under_vmap_equal_one_by_one(model: NetSpec, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    nets = [model.build(shape, 10) for _ in range(2)]
    for parameter in (p for net in nets for p in net.parameters()):
        parameter.data.add_(0.03 * torch.randn_like(parameter))  # so that no path starts, and hides, at zero
    x, y = torch.randn(2, 4, *shape), torch.randint(10, (2, 4))
    stacked, buffers = stack_module_state(nets)
    assert not buffers
    lanes = vmap(grad(lambda state, a, b: loss(nets[0], state, a, b)))(stacked, x, y)
    for lane, net in enumerate(nets):
        loss(net, dict(net.named_parameters()), x[lane], y[lane]).backward()  # type: ignore[no-untyped-call]
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(lanes[name][lane], parameter.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", [ResNet18(), ResNet50(), DenseNet121()], ids=named)
def test_big_nets_run(model: NetSpec) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        logits = model.build(DIGITS, 10)(torch.randn(2, *DIGITS))
    assert logits.shape == (2, 10)
    assert torch.isfinite(logits).all()
    assert not torch.allclose(logits[0], logits[1])  # at 1x1 pixel a group of one channel would erase the input


@given(channels=st.integers(1, 96), groups=st.integers(1, 40))
def test_groups_are_equal_and_never_of_one_channel(channels: int, groups: int) -> None:
    layer = ResNet20(groups=groups).normal(channels)
    assert isinstance(layer, nn.GroupNorm)
    assert channels % layer.num_groups == 0
    assert layer.num_groups <= groups
    assert layer.num_groups == 1 or channels // layer.num_groups >= 2


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(side=st.tuples(st.integers(16, 40), st.integers(16, 40)), channels=st.integers(1, 4))
def test_small_nets_take_any_image_that_is_large_enough(side: tuple[int, int], channels: int) -> None:
    shape = (channels, *side)
    for model in (FedAvgCNN(), FedAvgCNN(padding="same"), CNN64(), LeNet5(), LawLeNet(), ResNet20()):
        with torch.device("meta"):
            assert model.build(shape, 7)(torch.empty(2, *shape)).shape == (2, 7)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [ResNet20, ResNet18, ResNet50, DenseNet121])
def test_normalisation_is_a_choice(cls: type[NormedSpec]) -> None:
    with torch.device("meta"):
        group, batch, none = (cls(norm=norm).build(CIFAR, 10) for norm in ("group", "batch", "none"))
    assert parameters(group) == parameters(batch)
    assert not list(group.buffers())
    assert list(batch.buffers())
    assert not list(none.buffers())
    assert not any(isinstance(module, nn.GroupNorm | nn.BatchNorm2d) for module in none.modules())
    assert all(module.bias is not None for module in none.modules() if isinstance(module, nn.Conv2d))
    assert all(module.bias is None for module in group.modules() if isinstance(module, nn.Conv2d))


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
def test_features_start_at_a_moderate_scale(norm: Literal["group", "batch", "none"]) -> None:
    torch.manual_seed(0)
    for model in (ResNet20(norm=norm), ResNet18(norm=norm)):
        net = model.build(DIGITS, 10)
        assert isinstance(net.body, nn.Module)
        assert 0.1 < net.body(torch.randn(4, *DIGITS)).pow(2).mean().sqrt() < 10


def test_every_kind_is_found() -> None:
    assert set(kinds(NetSpec, "fedloom.models")) == {
        *("logistic", "mlp", "cnn_fedavg", "cnn64", "cnn_law", "lenet5", "lenet_law"),
        *("resnet20", "resnet18", "resnet50", "densenet121", "random_features"),
    }


def test_settings_are_read_strictly() -> None:
    model, faults = read(MLP, {"widths": [512, 256]}, "model")
    assert faults == []
    assert model == MLP(widths=(512, 256))
    _, faults = read(MLP, {"widths": [0]}, "model")
    assert faults[0].where == "model.widths.0"
    _, faults = read(ResNet20, {"nrom": "batch", "buffers": "mine"}, "model")
    assert [fault.where for fault in faults] == ["model.buffers", "model.nrom"]


def test_projection_head_lies_between_body_and_head() -> None:
    from fedloom.models.linear import MLP

    plain, projected = MLP(widths=(20,)).net((5,), 3), MLP(widths=(20,), projection=7).net((5,), 3)
    extra = (20 * 20 + 20) + (20 * 7 + 7) + (7 * 3 + 3) - (20 * 3 + 3)
    assert parameters(projected) == parameters(plain) + extra
    assert projected.body(torch.zeros(2, 5)).shape == (2, 7)
    assert projected(torch.zeros(2, 5)).shape == (2, 3)


# -- random features -------------------------------------------------------------------------------
def test_random_features_are_those_of_their_seed_and_nobody_trains_them() -> None:
    model = RandomFeatureNet(width=40, seed=3)
    net, again, wider = model.net(DIGITS, 10), model.net(DIGITS, 10), RandomFeatureNet(width=50, seed=3).net(DIGITS, 10)
    assert [n for n, p in net.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]
    assert not list(net.buffers())
    assert torch.equal(net.body.weight, again.body.weight)
    assert torch.equal(net.body.weight, wider.body.weight[:, :40])
    assert not torch.equal(net.body.weight, RandomFeatureNet(width=40, seed=4).net(DIGITS, 10).body.weight)
    x = torch.randn(200, *DIGITS)
    made = x.flatten(1) @ net.body.weight
    assert 0.9 < made.std() < 1.1
    torch.testing.assert_close(net.body(x), (made + net.body.bias).relu())


def test_random_features_do_not_depend_on_the_batch() -> None:
    body = RandomFeatureNet(width=300).net(MNIST, 10).body
    x = torch.randn(97, *MNIST)
    whole = body(x)
    assert all(torch.equal(torch.cat([body(part) for part in torch.split(x, n)]), whole) for n in (1, 10, 64))


# -- starting from a file --------------------------------------------------------------------------
def test_a_net_starts_from_a_file(tmp_path: Path) -> None:
    first, path = MLP(widths=(6,)).net(FLAT, 4), tmp_path / "w.safetensors"
    save_file(first.state_dict(), path)
    same = MLP(widths=(6,), weights=str(path)).net(FLAT, 4)
    assert all(torch.equal(x, same.state_dict()[n]) for n, x in first.state_dict().items())
    save_file({n: x for n, x in first.state_dict().items() if n.startswith("body.")}, path)
    other = MLP(widths=(6,), weights=str(path)).net(FLAT, 9)  # a head for other classes is drawn
    assert torch.equal(other.state_dict()["body.fc1.0.weight"], first.state_dict()["body.fc1.0.weight"])


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(MLP(widths=(6,)).net(FLAT, 4).state_dict(), path)
    with pytest.raises(ConfigError, match=r"'body.fc1.0.weight' is 6x.* in .*w.safetensors, 7x"):
        MLP(widths=(7,), weights=str(path)).net(FLAT, 4)
    with pytest.raises(ConfigError, match=r"lacks 'body.fc2.0.weight' and 1 more of the net"):
        MLP(widths=(6, 6), weights=str(path)).net(FLAT, 4)
    with pytest.raises(ConfigError, match=r"has 'body.fc1.0.weight', which the net does not have"):
        Logistic(weights=str(path)).net(FLAT, 4)
    numbers = Logistic().net(FLAT, 4).state_dict()
    for change, said in (
        (lambda x: x * float("nan"), "numbers that are not finite"),
        (lambda x: x.cfloat(), "complex64"),
    ):
        save_file({n: change(x) for n, x in numbers.items()}, path)
        with pytest.raises(ConfigError, match=rf"'head.weight' .*{said}"):
            Logistic(weights=str(path)).net(FLAT, 4)
    path.write_text("no tensors")
    with pytest.raises(ConfigError, match=r"model.weights: .*: not readable as safetensors"):
        Logistic(weights=str(path)).net(FLAT, 4)
    with pytest.raises(ConfigError, match="not readable"):
        Logistic(weights=str(tmp_path / "none.safetensors")).net(FLAT, 4)
