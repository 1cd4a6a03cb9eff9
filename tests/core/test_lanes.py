"""Convolutions of many nets: the same function as one net at a time, with derivatives of every kind."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedloom.core.channels_last import channels_last
from fedloom.core.lanes import conv, ops
from fedloom.core.lanes.conv import LaneConv2d, convolve_pooled, in_lanes
from fedloom.core.lanes.ops import Geometry
from fedloom.engine.compiling import compiled, has_cpp_compiler

LANES, IMAGES = 3, 4
# One channel, a side of 5, one image, strides, wide borders, sides that differ, more channels than a tile has columns.
ODD = {
    "one channel, side 5": (2, 2, 1, 3, (5, 5), 5, 1, 0),
    "borders, uneven sides": (2, 1, 3, 8, (9, 7), 3, 1, 1),
    "stride 2": (3, 2, 16, 8, (8, 8), 3, 2, 1),
    "padding 2": (2, 1, 32, 20, (7, 7), 3, 1, 2),
    "1x1, stride 2": (2, 2, 16, 16, (8, 8), 1, 2, 0),
    "five channels, even kernel": (1, 2, 5, 70, (6, 6), 2, 2, 0),
    "stride beyond taps": (2, 1, 16, 4, (6, 6), 5, 3, 2),
    "more channels than a tile": (1, 1, 40, 136, (4, 3), 3, 1, 1),
    "picture": (1, 2, 3, 64, (12, 12), 5, 1, 0),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.Tanh(), nn.Conv2d(8, 6, 2, padding="valid"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 4, 3, padding="same", bias=False), nn.Flatten(), nn.Linear(4, 5),
    ).double()  # fmt: skip


def converted() -> nn.Sequential:
    other = net()
    in_lanes(other)
    return other


def weights(like: nn.Module) -> dict[str, Tensor]:
    return {n: torch.randn(LANES, *p.shape, dtype=torch.float64) * 0.5 for n, p in like.named_parameters()}


def images() -> Tensor:
    return torch.randn(LANES, IMAGES, 3, 8, 8, dtype=torch.float64)


class Pooled(nn.Module):
    """A convolution, the maximum of 2x2 windows and a ReLU as one function, which only a GPU is given."""

    def __init__(self, plain: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        (kh, kw), (sh, sw), (ph, pw) = plain.kernel_size, plain.stride, cast(tuple[int, int], plain.padding)
        self.how = Geometry((kh, kw), (sh, sw), (ph, pw), True)

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return convolve_pooled(x, self.weight, self.bias, self.how)


def pooling() -> nn.Sequential:
    """Twice; the second image has odd sides."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 2, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(5, 5)).double()


def fused_pooling() -> nn.Sequential:
    net = pooling()
    for at in (0, 3):
        net[at] = Pooled(cast(nn.Conv2d, net[at]))
        net[at + 1] = net[at + 2] = nn.Identity()
    return net


def loss(net: nn.Module) -> Callable[..., Tensor]:
    def at(w: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(net, w, (x,))
        return out.square().mean()

    return at


def directional(net: nn.Module) -> Callable[..., Any]:
    """Forward over reverse: the Hessian times a vector."""
    return lambda w, x: jvp(lambda v: grad(loss(net))(v, x), (w,), ({n: t.sin() for n, t in w.items()},))[1]


def twice(net: nn.Module) -> Callable[..., Any]:
    """Reverse over reverse."""
    return lambda w, x: grad(lambda v: sum(t.sin().sum() for t in grad(loss(net))(v, x).values()))(w)


def of_inputs(net: nn.Module) -> Callable[..., Any]:
    return lambda w, x: grad(lambda at: loss(net)(w, at))(x)


def of_each_example(net: nn.Module) -> Callable[..., Any]:
    return lambda w, x: vmap(lambda one: grad(loss(net))(w, one[None]))(x)


def lanes_of_lanes(net: nn.Module) -> Callable[..., Any]:
    scales = torch.tensor([1.0, 2.0], dtype=torch.float64)
    return lambda w, x: vmap(lambda s: grad(loss(net))({n: s * t for n, t in w.items()}, x))(scales)


@pytest.mark.parametrize("shared", ["nothing", "weights", "weights, as on a GPU", "images"])
@pytest.mark.parametrize(
    "of",
    [loss, lambda net: grad(loss(net)), directional, twice, of_inputs, of_each_example, lanes_of_lanes],
    ids=[
        "loss",
        "gradient",
        "forward over reverse",
        "reverse over reverse",
        "inputs",
        "each example",
        "lanes of lanes",
    ],
)
@pytest.mark.parametrize(("plain", "ours"), [(net, converted), (pooling, fused_pooling)], ids=["plain", "pooled"])
def test_lanes_do_what_each_net_does_alone(
    of: Callable[[nn.Module], Callable[..., Any]],
    shared: str,
    plain: Callable[[], nn.Module],
    ours: Callable[[], nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lanes with the same weights are more images of one net, for which a GPU has the kernels of lanes, too."""
    if "GPU" in shared:
        monkeypatch.setattr(conv, "_is_on_gpu", lambda _: True)
    w, x = weights(plain()), images()
    if "weights" in shared:
        w = {n: t[0] for n, t in w.items()}
    if shared == "images":
        x = x[0]
    dims = (None if "weights" in shared else 0, None if shared == "images" else 0)
    expected, found = (vmap(of(a()), in_dims=dims)(w, x) for a in (plain, ours))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_more_numbers_than_kernels_can_count_are_not_given_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "_is_on_gpu", lambda _: True)
    how, w = Geometry((3, 3), (1, 1), (1, 1), True), torch.empty(64, 3, 3, 3, device="meta")
    for count, fits in ((1 << 14, True), (1 << 15, False)):  # of images, whose outputs are 64 x 32 x 32
        assert conv._has_kernels(how, torch.empty(count, 3, 32, 32, device="meta"), w) == fits


def test_outside_vmap_it_is_an_ordinary_convolution() -> None:
    w, x = {n: t[0].requires_grad_() for n, t in weights(net()).items()}, images()[0]
    expected, found = (torch.autograd.grad(loss(a)(w, x), list(w.values())) for a in (net(), converted()))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_a_compiler_sees_the_operators_and_no_gradient_of_data() -> None:
    w, x = weights(net()), images()
    traced = make_fx(vmap(grad(loss(converted()))))(w, x)
    names = [str(node.target) for node in traced.graph.nodes if "fedloom" in str(node.target)]
    assert sorted(names) == sorted(
        ["fedloom.lane_conv.default"] * 3 + ["fedloom.lane_conv_inputs.default"] * 2
        + ["fedloom.lane_conv_weights.default"] * 3
    )  # fmt: skip
    for op, given in (
        (ops.lane_conv, (torch.randn(2, 3, 8, 8, 4), torch.randn(2, 5, 3, 3, 4))),
        (ops.lane_conv_inputs, (torch.randn(2, 3, 6, 6, 5), torch.randn(2, 4, 3, 3, 5))),
        (ops.lane_conv_weights, (torch.randn(2, 3, 8, 8, 4), torch.randn(2, 3, 6, 6, 5))),
    ):
        more = ([8, 8],) if op is ops.lane_conv_inputs else ()
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(op, (*given, [3, 3], [1, 1], [0, 0], True, *more), test_utils=checks)


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="there is no C++ compiler, which torch.compile needs on a CPU")
def test_compiled_lanes_take_the_gradients_of_plain_convolutions() -> None:
    """Compiled by torch's compiler in the way of a run; it must keep the operators as they are, with their layouts."""
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 6, 2), nn.Flatten(), nn.Linear(54, 5))
    ours = copy.deepcopy(theirs.double())
    in_lanes(ours)
    names, x = [n for n, _ in theirs.named_parameters()], images()
    w = tuple(torch.randn(LANES, *p.shape, dtype=torch.float64) * 0.5 for p in theirs.parameters())
    found = tuple(map(torch.zeros_like, w))

    def gradients(net: nn.Module, w: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        return tuple(vmap(grad(loss(net)))(dict(zip(names, w, strict=True)), x).values())

    def step(w: tuple[Tensor, ...], x: Tensor, found: tuple[Tensor, ...]) -> None:
        for to, g in zip(found, gradients(ours, w, x), strict=True):
            to.copy_(g)

    fused = compiled(step, (w, x, found), small=False)
    for at in (x, x.sin()):  # the images that it was compiled for, and others
        fused(w, at, found)
        torch.testing.assert_close(found, gradients(theirs, w, at), rtol=1e-10, atol=1e-12)


def test_only_what_the_kernels_compute_is_converted() -> None:
    layers = nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 4, 2, padding="same"),
        nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, padding_mode="reflect", padding=1),
    )  # fmt: skip
    in_lanes(layers)
    assert [type(layer) is LaneConv2d for layer in layers] == [True, True, False, False, False, False]


def test_pooling_first_is_the_same_function() -> None:
    """Also where all pixels of a window are negative, and where the pooling is not one that can be taken first."""
    torch.manual_seed(1)
    for pool in (nn.MaxPool2d(2), nn.MaxPool2d(3, 2), nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, ceil_mode=True)):
        plain = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), pool).double()
        ours = copy.deepcopy(plain)
        in_lanes(ours)
        assert isinstance(ours[0], LaneConv2d)
        assert (conv._pooling(list(ours)[1:]) is not None) == (pool.padding == 0 and not pool.ceil_mode)
        w = {n: torch.randn(LANES, *p.shape, dtype=torch.float64) for n, p in plain.named_parameters()}
        x = torch.randn(LANES, IMAGES, 2, 9, 9, dtype=torch.float64)
        expected, found = (vmap(grad(loss(a)))(w, x) for a in (plain, ours))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class InParts(nn.Module):
    """A net that calls a part of its layers, and each of them by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[:2](x).mean((2, 3))
        seen = []
        for layer in self.layers:
            x = layer(x)
            seen.append(x.mean((2, 3)))
        return torch.cat([first, *seen], 1)


@pytest.mark.parametrize("convert", [in_lanes, channels_last])
def test_layers_that_a_net_calls_by_themselves_stay_what_they_are(convert: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(1)
    plain = InParts().double()
    ours = copy.deepcopy(plain)
    convert(ours)
    x = torch.randn(IMAGES, 2, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(ours(x), plain(x))
    assert [type(layer) for layer in plain.layers][1:] == [type(layer) for layer in ours.layers][1:]


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the choice of kernels asks a GPU for; its file is here."""
    monkeypatch.setattr(ops, "find_spec", lambda _: True)
    monkeypatch.setattr(ops, "_store", lambda: tmp_path / "cache" / "choices.json")
    monkeypatch.setattr(ops, "_CHOSEN", {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return tmp_path / "cache" / "choices.json"


def test_a_choice_is_measured_once_and_remembered_by_later_runs(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, how = torch.randn(2, 3, 8, 8, 4), torch.randn(2, 5, 3, 3, 4), Geometry((3, 3), (1, 1), (0, 0), True)
    measured: list[str] = []

    def measure(what: str, *_: Any) -> str:
        measured.append(what)
        return "grouped"

    monkeypatch.setattr(ops, "_measured", measure)
    for content in (None, None, "{ damaged"):  # the same run, a later one, one whose file is damaged
        for _ in range(2):
            torch.testing.assert_close(ops._fastest("forward", (x, w), how, 5, ())(x, w), ops.grouped(x, w, how))
        assert ops.chosen_kernels() == {"forward fp32 2x3x8x8x4 2x5x3x3x4 stride 1x1 padding 0x0": "grouped"}
        assert json.loads(gpu.read_text()) == ops.chosen_kernels()
        ops._CHOSEN.clear()
        if content is not None:
            gpu.write_text(content)
    assert measured == ["forward"]
    ops._fastest("forward", (x, w), how, 5, ())
    assert measured == ["forward"] * 2
    assert json.loads(gpu.read_text()) == ops.chosen_kernels()


def test_other_shapes_strides_and_precisions_are_choices_of_their_own() -> None:
    x, w, plain = torch.randn(2, 3, 8, 8, 4), torch.randn(2, 5, 3, 3, 4), Geometry((3, 3), (1, 1), (0, 0), True)
    others = [plain._replace(exact=False), plain._replace(stride=(2, 2)), plain._replace(padding=(1, 1))]
    keys = [ops._key("forward", (x, w), how) for how in (plain, *others)]
    keys += [ops._key("forward", (x[:, :2], w), plain), ops._key("forward", (x.bfloat16(), w.bfloat16()), plain)]
    assert len(set(keys)) == len(keys)


@pytest.mark.usefixtures("gpu")
def test_a_kernel_that_fails_or_computes_something_else_is_not_chosen() -> None:
    def fails(*_: Tensor) -> Tensor:
        raise RuntimeError("out of resource: shared memory")

    a, b = torch.randn(4, 4), torch.randn(4, 4)
    runs: dict[str, ops.Run] = {"right": torch.mul, "rounded": lambda a, b: 1.001 * a * b, "wrong": torch.add}
    runs |= {"fails": fails, "not a number": lambda a, b: a * b * torch.nan}
    assert list(ops._right(runs, a * b, (a, b))) == ["right", "rounded"]


def test_without_triton_nothing_is_measured_or_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "find_spec", lambda _: None)
    monkeypatch.setattr(ops, "_store", lambda: pytest.fail("its file is named after Triton's version"))
    x, w, how = torch.randn(2, 3, 8, 8, 4), torch.randn(2, 5, 3, 3, 4), Geometry((3, 3), (1, 1), (0, 0), True)
    assert ops._tiles("forward", (x, w), how, 5) == []
    ops._remember("key", "grouped")
    assert ops._remembered() == {}
    with ops._alone():
        pass


def cases(device: str, dtype: torch.dtype, exact: bool) -> list[tuple[str, float]]:
    """The error of every kernel with every tile that would be tried, for each odd shape, against float64."""
    found = []
    for name, (lanes, batch, channels, outputs, sides, side, stride, padding) in ODD.items():
        how = Geometry((side, side), (stride, stride), (padding, padding), exact)
        shapes = {
            "x": (lanes, batch, *sides, channels),
            "w": (lanes, outputs, side, side, channels),
            "bias": (lanes, outputs),
            "g": (lanes, batch, *how.out(sides), outputs),
            "gp": (lanes, batch, *how.windows(sides), outputs),
        }
        at = {name: torch.randn(shape, dtype=torch.float64).to(dtype).double() for name, shape in shapes.items()}
        at["turned"] = at["w"].permute(0, 4, 2, 3, 1).contiguous()
        at |= {name: _apart_from_each_other(at[name]) for name in ("w", "bias")}  # as lanes of a vector of parameters
        at["index"] = torch.randint(0, 5, shapes["gp"], dtype=torch.int8)
        tried: dict[str, tuple[str, ...]] = {"forward": ("x", "w"), "inputs": ("g", "turned"), "weights": ("x", "g")}
        if min(how.windows(sides)):
            tried |= {"pooled": ("x", "w", "bias"), "pooled_weights": ("x", "gp", "index")}
        for what, names in tried.items():
            given = tuple(at[n] for n in names)
            here = tuple(_moved(t, device, dtype) for t in given)
            columns = channels if what == "inputs" else outputs
            right = ops._by_name(what, ops._GROUPED, how, sides)(*given)
            tiles = ops._tiles(what, here, how, columns)
            for tile in tiles[:2] if device == "cuda" else tiles[:1]:  # the choice checks every tile that it tries
                out = ops._by_name(what, ops._name(tile), how, sides)(*here)
                found.append((f"{name}, {what}, {tuple(tile)}", _error(out, right)))
                if what in ops._WITHOUT_WINDOWS:
                    found.append((f"{name}, {what}, apart", _error(_apart(what, here, how, tile), right)))
    return found


def _moved(x: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """On a device and in a precision, with the same distance between lanes."""
    moved = x.to(device, dtype if x.is_floating_point() else None)
    return moved if x.is_contiguous() else _apart_from_each_other(moved)


def _apart_from_each_other(lanes: Tensor) -> Tensor:
    """The same numbers, with others between two lanes."""
    size = lanes[0].numel()
    return lanes.new_ones(len(lanes), size + 3)[:, :size].copy_(lanes.flatten(1)).view(lanes.shape)


def _apart(what: str, given: tuple[Tensor, ...], how: Geometry, tile: ops.Tile) -> Any:
    """The way with a kernel for the windows alone, with this tile for the other one."""
    x, other, _ = given
    whole = other if what == "pooled" else ops._like_whole(x, other, how)
    own = ops._WITHOUT_WINDOWS[what]
    ops._CHOSEN[ops._key(own, (x, whole), how)] = ops._name(tile)
    return ops._by_name(what, ops._APART, how, ())(*given)


def _error(out: Any, right: Any) -> float:
    """Relative; places in windows may differ where two values are the same up to rounding."""
    if isinstance(out, tuple):
        differ = float((out[1].cpu() != right[1]).double().mean())
        return max(_error(out[0], right[0]), 0.0 if differ < 0.05 else differ)
    return float((out.double().cpu() - right).norm() / right.norm())


def interpret() -> float:
    """The largest error of the kernels as Triton interprets them; its bounds of loops are arrays of one number."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    return max(error for _, error in cases("cpu", torch.float32, True))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton, the kernels' compiler, is not installed")
def test_kernels_against_float64_as_triton_interprets_them() -> None:
    """On a CPU: the arithmetic of addresses and borders is the same as on a GPU."""
    code = "import test_lanes; print(test_lanes.interpret())"
    env = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert out.returncode == 0, out.stderr
    assert float(out.stdout) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here, or CUDA_VISIBLE_DEVICES=0 is not set")
@pytest.mark.parametrize(
    ("dtype", "exact", "most"), [("float32", True, 1e-6), ("float32", False, 2e-3), ("bfloat16", False, 1e-2)]
)
def test_kernels_against_float64_on_a_gpu(dtype: str, exact: bool, most: float) -> None:
    wrong = [case for case in cases("cuda", getattr(torch, dtype), exact) if not case[1] < most]
    assert not wrong
