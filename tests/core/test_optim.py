"""The local optimizers against torch.optim, the settings that they have, and the schedules of the learning rate."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.func import vmap

from fedloom.core import tree, usercode
from fedloom.core.errors import ConfigError
from fedloom.core.optim import Local, Optimizer, clipped, find_optimizer, moved, no_steps, optimizers, takes
from fedloom.runs.settings import as_table, parse

LIBRARY: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "asgd": torch.optim.ASGD,
    "adam": torch.optim.Adam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
}
# What torch calls otherwise.
WORDS = {"power": "alpha", "initial_sum": "initial_accumulator_value", "rmsprop.rho": "alpha"}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in LIBRARY),
    *((name, {"weight_decay": 0.05}) for name in LIBRARY),
    *((name, {"clip": 0.5}) for name in LIBRARY),
    *((name, {"clip": 0.5, "weight_decay": 0.05}) for name in LIBRARY),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05, "clip": 0.5}),
    ("asgd", {"lambd": 0.1, "power": 0.5, "t0": 7.0}),
    ("adam", {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}),
    ("adam", {"beta1": 0.0, "beta2": 0.0}),
    ("radam", {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}),
    ("radam", {"beta2": 0.6}),  # rho never exceeds 5
    ("rmsprop", {"rho": 0.8, "eps": 1e-3}),
    ("rmsprop", {"momentum": 0.7, "weight_decay": 0.05}),
    ("adagrad", {"lr_decay": 0.1, "initial_sum": 0.5, "eps": 1e-3}),
    ("adadelta", {"rho": 0.6, "eps": 1e-2}),
]


def sign(*, scale: float = 1.0) -> Optimizer:
    """A user's own optimizer: x <- x - lr scale sign(mean of the gradients)."""

    def update(g: Any, memory: Any, x: Any, lr: Tensor) -> tuple[Any, Any]:
        step, total = memory[0] + 1, tree.tmap(torch.add, memory[1], g)
        return moved(x, tree.tmap(torch.sign, total), scale * lr), (step, total)

    return Optimizer(lambda x: (no_steps(x), tree.tmap(torch.zeros_like, x)), update)


EVERY = [*optimizers(), f"{__file__}:sign"]  # whatever there is, and one of somebody's own
usercode.vouch(EVERY)
every = pytest.mark.parametrize("name", EVERY, ids=lambda name: name.rpartition(":")[2])
cases = pytest.mark.parametrize(
    ("name", "settings"), CASES, ids=lambda v: v if isinstance(v, str) else "+".join(v) or "plain"
)
precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def rich(name: str) -> Optimizer:
    """The optimizer with all that can be switched on."""
    on = {"momentum": 0.9, "weight_decay": 0.1, "clip": 0.7, "t0": 2.0}
    return Local(
        optimizer=name, **{k: v for k, v in on.items() if k in takes(find_optimizer(name, ""))}
    ).make_optimizer()


class Bowl(NamedTuple):
    """Bent and ill-conditioned, seen through noise, so that every term of an optimizer matters."""

    scale: Tensor  # [K, P]
    best: Tensor  # [K, P]
    noise: Tensor  # [steps, K, P]
    start: Tensor  # [K, P]

    def slope(self, x: Tensor, step: int, row: Any = slice(None)) -> Tensor:
        return self.scale[row] * (x - self.best[row]) + 0.3 * x.cos() + self.noise[step, row]


def bowl(dtype: torch.dtype, rows: int = 1, steps: int = 50, size: int = 9) -> Bowl:
    draw = torch.Generator().manual_seed(0)
    normal = [torch.randn(*shape, generator=draw).to(dtype) for shape in [(rows, size)] * 2 + [(steps, rows, size)]]
    return Bowl(torch.linspace(0.2, 3.0, size).to(dtype).expand(rows, -1), normal[0], 0.2 * normal[2], normal[1])


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """torch.optim.ASGD keeps its rates in the default precision, whatever that of the parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def rate(name: str, step: int) -> float:
    """ASGD of torch goes by the learning rate of the step before; the others are given another in each step."""
    return 0.05 if name == "asgd" else 0.05 * 0.98**step


def library(name: str, settings: dict[str, Any], x: Tensor, lr: float) -> torch.optim.Optimizer:
    """The optimizer of torch under the same settings."""
    rest = {k: v for k, v in settings.items() if k not in ("clip", "beta1", "beta2")}
    words = {WORDS.get(f"{name}.{k}", WORDS.get(k, k)): v for k, v in rest.items()}
    if name in ("adam", "radam"):
        words["betas"] = (settings.get("beta1", 0.9), settings.get("beta2", 0.999))
    made: torch.optim.Optimizer = LIBRARY[name]([x], lr=lr, **words)
    return made


def library_path(name: str, settings: dict[str, Any], at: Bowl, row: int, steps: int) -> list[Tensor]:
    """Where torch's optimizer goes; halfway, the point is replaced and its memory is not, as between two rounds."""
    path, x = [], at.start[row].clone().requires_grad_()
    theirs = library(name, settings, x, rate(name, 0))
    for step in range(steps):
        for group in theirs.param_groups:
            group["lr"] = rate(name, step)
        if step == 25:
            x.data.copy_(at.start[row])
        x.grad = at.slope(x.detach(), step, row)
        if "clip" in settings:
            torch.nn.utils.clip_grad_norm_([x], settings["clip"])
        theirs.step()
        path.append(x.detach().clone())
    return path


def close(settings: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """torch adds 1e-6 to the norm by which it clips."""
    return {"rtol": 0, "atol": 1e-5 if "clip" in settings else 2e-6 if dtype == torch.float32 else 1e-12}


def mapped(update: Callable[..., Any], memory: Any, lr: int | None = None) -> Callable[..., Any]:
    """The step of many, side by side."""
    return vmap(update, in_dims=(0, 0 if tree.leaves(memory) else None, 0, lr))


# -- the same as torch's ---------------------------------------------------------------------------
@precisions
@cases
def test_it_is_torchs_over_fifty_steps(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    with precision(dtype):
        at, optimizer = bowl(dtype), Local(optimizer=name, **settings).make_optimizer()
        x, memory = at.start[0], optimizer.init(at.start[0])
        for step, theirs in enumerate(library_path(name, settings, at, 0, 50)):
            x = at.start[0] if step == 25 else x
            lr = torch.tensor(rate(name, step), dtype=dtype)
            x, memory = optimizer.update(at.slope(x, step, 0), memory, x, lr)
            torch.testing.assert_close(x, theirs, **close(settings, dtype))


@precisions
@cases
def test_clients_side_by_side_each_take_their_own_number_of_steps(
    name: str, settings: dict[str, Any], dtype: torch.dtype, recwarn: pytest.WarningsRecorder
) -> None:
    counts = torch.tensor([50, 31, 7, 1])
    with precision(dtype):
        at, optimizer = bowl(dtype, rows=4), Local(optimizer=name, **settings).make_optimizer()
        x, memory = at.start, vmap(optimizer.init)(at.start) if tree.leaves(optimizer.init(at.start)) else ()
        for step in range(50):
            if step == 25:
                x = torch.where((counts > 25)[:, None], at.start, x)
            lr = torch.tensor(rate(name, step), dtype=dtype)
            after = mapped(optimizer.update, memory)(at.slope(x, step), memory, x, lr)
            x, memory = tree.where(counts > step, after, (x, memory))
        for row, count in enumerate(counts.tolist()):
            theirs = library_path(name, settings, at, row, count)[-1]
            torch.testing.assert_close(x[row], theirs, **close(settings, dtype))
    if hasattr(memory, "step"):
        assert memory.step.tolist() == counts.tolist()
    assert not [w for w in recwarn if "batching rule" in str(w.message)]  # vmap would take row after row


@pytest.mark.parametrize("name", LIBRARY)
def test_defaults_are_torchs(name: str) -> None:
    theirs = {k: p.default for k, p in inspect.signature(LIBRARY[name]).parameters.items()}
    if "betas" in theirs:
        theirs["beta1"], theirs["beta2"] = theirs["betas"]
    for key, parameter in inspect.signature(optimizers()[name]).parameters.items():
        if key != "clip":
            assert parameter.default == theirs[WORDS.get(f"{name}.{key}", WORDS.get(key, key))], key


# -- what is known of each -------------------------------------------------------------------------
def walk(name: str, steps: int, lr: float, g: Tensor, **settings: Any) -> list[Tensor]:
    """How far each step goes along one and the same gradient, from 0."""
    optimizer = Local(optimizer=name, **settings).make_optimizer()
    points, memory = [torch.zeros_like(g)], optimizer.init(g)
    for _ in range(steps):
        x, memory = optimizer.update(g, memory, points[-1], torch.tensor(lr))
        points.append(x)
    return [(b - a).abs() for a, b in pairwise(points)]


@pytest.mark.parametrize("lr", [0.1, 0.005])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgd", lambda g: g),
        ("asgd", lambda g: g),
        ("adam", torch.ones_like),
        ("radam", lambda g: g),
        ("rmsprop", lambda g: torch.full_like(g, 10.0)),
        ("adagrad", torch.ones_like),
        ("adadelta", lambda g: torch.full_like(g, math.sqrt(1e-6 / 0.1))),
    ],
)
def test_the_first_step_has_its_known_length(name: str, expected: Callable[[Tensor], Tensor], lr: float) -> None:
    g = torch.tensor([-7.0, 0.5, 2.0, -0.3])
    torch.testing.assert_close(walk(name, 1, lr, g)[0], lr * expected(g.abs()), rtol=0.01, atol=0)


def test_radam_takes_five_plain_steps_before_it_rectifies() -> None:
    g = torch.tensor([-7.0, 0.5, 2.0])
    lengths = walk("radam", 8, 0.1, g)
    for plain in lengths[:5]:
        torch.testing.assert_close(plain, 0.1 * g.abs(), rtol=1e-5, atol=0)
    torch.testing.assert_close(lengths[5], torch.full((3,), 0.1 * 0.026), rtol=0.02, atol=0)
    assert all((b > a).all() for a, b in pairwise(lengths[5:]))


def test_adagrad_adds_up_squares_and_slows_down() -> None:
    at, optimizer = bowl(torch.float32), Local(optimizer="adagrad").make_optimizer()
    x, memory = at.start[0], optimizer.init(at.start[0])
    for step in range(50):
        before = memory
        x, memory = optimizer.update(at.slope(x, step, 0), memory, x, torch.tensor(0.1))
        assert (memory.sum >= before.sum).all()
        assert float(memory.step) == step + 1
    for k, length in enumerate(walk("adagrad", 9, 0.1, torch.tensor([3.0, -0.2])), start=1):
        torch.testing.assert_close(length, torch.full((2,), 0.1 / math.sqrt(k)), rtol=1e-4, atol=0)


def test_asgd_without_lambd_is_sgd_and_its_mean_is_the_point_until_t0() -> None:
    at = bowl(torch.float32)
    averaged, plain = Local(optimizer="asgd", lambd=0.0).make_optimizer(), Local().make_optimizer()
    x = y = at.start[0]
    memory, lr = averaged.init(x), torch.tensor(0.1)
    for step in range(50):
        x, memory = averaged.update(at.slope(x, step, 0), memory, x, lr)
        y, _ = plain.update(at.slope(y, step, 0), (), y, lr)
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
        assert torch.equal(memory.ax, x)


def test_asgd_averages_from_t0_on_as_torchs() -> None:
    with precision(torch.float64):
        at, settings = bowl(torch.float64), {"t0": 5.0, "lambd": 0.01}
        optimizer = Local(optimizer="asgd", **settings).make_optimizer()
        x, memory = at.start[0], optimizer.init(at.start[0])
        theirs, points = at.start[0].clone().requires_grad_(), []
        oracle = library("asgd", settings, theirs, 0.05)
        for step in range(50):
            theirs.grad = at.slope(theirs.detach(), step, 0)
            oracle.step()
            x, memory = optimizer.update(at.slope(x, step, 0), memory, x, torch.tensor(0.05))
            points.append(x)
            torch.testing.assert_close(memory.ax, oracle.state[theirs]["ax"], rtol=0, atol=1e-12)
            mean = torch.stack(points[6:]).mean(0) if step >= 6 else x  # torch's first point of the mean is step t0 + 2
            torch.testing.assert_close(memory.ax, mean, rtol=0, atol=1e-12)


def test_without_momentum_there_is_no_velocity() -> None:
    x = torch.ones(3)
    assert Local().make_optimizer().init(x) == ()
    assert Local(optimizer="rmsprop").make_optimizer().init(x).velocity == ()


def test_clipping_leaves_short_gradients_and_shortens_long_ones() -> None:
    short, long = torch.full((4,), 0.1), torch.full((4,), 10.0)
    assert torch.equal(clipped(short, 1.0), short)
    assert float(clipped(long, 1.0).norm()) == pytest.approx(1.0)
    assert torch.equal(clipped(torch.zeros(3), 1.0), torch.zeros(3))
    pair = clipped((torch.full((2,), 3.0), torch.full((2,), 4.0)), 1.0)
    assert float(torch.cat(pair).norm()) == pytest.approx(1.0)


# -- true of every one, a user's own too -----------------------------------------------------------
class Two(NamedTuple):
    a: Tensor
    b: Tensor


def form(value: Any) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(leaf.shape), leaf.dtype) for name, leaf in tree.named_leaves(value)]


@pytest.mark.slow
@precisions
@every
def test_memory_and_point_keep_their_form(name: str, dtype: torch.dtype) -> None:
    optimizer = rich(name)
    x = Two(torch.randn(3, dtype=dtype), torch.randn(2, 2, dtype=dtype))
    memory = optimizer.init(x)
    after, kept = optimizer.update(Two(*x), memory, x, torch.tensor(0.1))  # the rate is float32 whatever x is
    assert (type(after), form(after)) == (Two, form(x))
    assert (type(kept), form(kept)) == (type(memory), form(memory))
    assert all(leaf.dim() == 0 or leaf.dtype == dtype for leaf in tree.leaves(memory))


@every
def test_a_tree_is_stepped_as_the_vector_of_its_leaves(name: str) -> None:
    optimizer, at = rich(name), bowl(torch.float32, size=7)
    whole = at.start[0]
    parts = Two(whole[:3], whole[3:])
    memory, memories = optimizer.init(whole), optimizer.init(parts)
    for step in range(10):
        g, lr = at.slope(whole, step, 0), torch.tensor(0.1)
        whole, memory = optimizer.update(g, memory, whole, lr)
        parts, memories = optimizer.update(Two(g[:3], g[3:]), memories, parts, lr)
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6)


@every
def test_update_writes_into_none_of_its_arguments(name: str) -> None:
    optimizer, x = rich(name), torch.randn(5)
    arguments = torch.randn(5), tree.tmap(lambda leaf: leaf + 3, optimizer.init(x)), x, torch.tensor(0.1)
    before = tree.tmap(torch.clone, arguments)
    optimizer.update(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves(arguments), strict=True))


@every
def test_rows_side_by_side_are_rows_alone_each_at_its_own_rate(name: str) -> None:
    optimizer, at = rich(name), bowl(torch.float32, rows=4)
    rates, x, memory = torch.tensor([0.1, 0.01, 0.2, 0.05]), at.start, vmap(optimizer.init)(at.start)
    alone = [(x[k], optimizer.init(x[k])) for k in range(4)]
    for step in range(8):
        x, memory = mapped(optimizer.update, memory, 0)(at.slope(x, step), memory, x, rates)
        alone = [optimizer.update(at.slope(p, step, k), m, p, rates[k]) for k, (p, m) in enumerate(alone)]
    for ours, theirs in zip(tree.leaves((x, memory)), tree.leaves(tree.stack(alone)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@every
def test_no_gradient_is_no_trouble(name: str) -> None:
    optimizer, x = Local(optimizer=name).make_optimizer(), torch.ones(3)
    memory = optimizer.init(x)
    for _ in range(8):
        x, memory = optimizer.update(torch.zeros(3), memory, x, torch.tensor(0.1))
    assert all(leaf.isfinite().all() for leaf in tree.leaves((x, memory)))
    torch.testing.assert_close(x, torch.ones(3), rtol=0, atol=1e-3)


# -- the settings ----------------------------------------------------------------------------------
def test_every_optimizer_is_found_by_its_name() -> None:
    assert list(optimizers()) == list(LIBRARY)
    assert all(make.__doc__ for make in optimizers().values())


@pytest.mark.parametrize(("name", "settings"), CASES[-10:], ids=str)
def test_what_is_written_down_is_read_again(name: str, settings: dict[str, Any]) -> None:
    config = parse({"local": {"optimizer": name, "state": "persist", **settings}})
    assert settings.items() <= as_table(config)["local"].items()
    assert parse(as_table(config)).local == config.local


OWN = """
from fedloom.core.optim import Optimizer, moved

number = 3

def lion(*, gamma=0.5, clip=0.0):
    return Optimizer(lambda x: (), lambda g, memory, x, lr: (moved(x, g.sign(), gamma * lr), memory))

def needy(*, gamma):
    return lion(gamma=gamma)

def pair():
    return None, None
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with a user's own optimizers in it, who means them to run."""
    (tmp_path / "own_optimizers.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    names = ("lion", "lino", "number", "pair", "needy")
    usercode.vouch([*(f"own_optimizers.py:{name}" for name in names), "none.py:f", "own_optimizers:lion"])


@pytest.mark.usefixtures("desk")
def test_a_users_own_has_settings_of_its_own() -> None:
    config = parse({"local": {"optimizer": "own_optimizers.py:lion", "gamma": 0.25}})
    assert parse(as_table(config)).local == config.local
    x, _ = config.local.make_optimizer().update(torch.tensor([3.0, -2.0]), (), torch.zeros(2), torch.tensor(0.1))
    torch.testing.assert_close(x, torch.tensor([-0.025, 0.025]))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": "adm"}, r"local\.optimizer: there is no optimizer 'adm' \(did you mean 'adam'\?\)"),
    ({"optimizer": "zzz"}, r"local\.optimizer: .*known: adadelta, adagrad, adam, asgd, radam, rmsprop, sgd"),
    ({"optimizer": 3}, r"local\.optimizer: .*string"),
    ({"beta1": 0.5}, r"local\.beta1: .*only if optimizer is adam or radam, but optimizer is sgd \(got 0\.5\)"),
    ({"optimizer": "adam", "momentum": 0.9}, r"local\.momentum: .*only if optimizer is sgd or rmsprop"),
    (
        {"optimizer": "rmsprop", "nesterov": True},
        r"local\.nesterov: .*only if optimizer is sgd and momentum is above 0",
    ),
    ({"optimizer": "sgd", "eps": 1e-3}, r"local\.eps: .*optimizer is adam, radam, rmsprop, adagrad or adadelta, but"),
    ({"optimizer": "adam", "rho": 0.9}, r"local\.rho: .*only if optimizer is rmsprop or adadelta"),
    ({"optimizer": "adam", "lambd": 0.1}, r"local\.lambd: .*only if optimizer is asgd"),
    ({"optimizer": "adam", "beta1": 1.0}, r"local\.beta1: .*less than 1"),
    ({"optimizer": "adam", "beta2": -0.1}, r"local\.beta2: .*greater than or equal to 0"),
    ({"optimizer": "adam", "eps": 0.0}, r"local\.eps: .*greater than 0"),
    ({"optimizer": "rmsprop", "rho": 1.0}, r"local\.rho: .*less than 1"),
    ({"optimizer": "asgd", "lambd": -1.0}, r"local\.lambd: .*greater than or equal to 0"),
    ({"optimizer": "asgd", "power": -1.0}, r"local\.power: .*greater than or equal to 0"),
    ({"optimizer": "asgd", "t0": "soon"}, r"local\.t0: .*number"),
    ({"optimizer": "adagrad", "lr_decay": -1.0}, r"local\.lr_decay: .*greater than or equal to 0"),
    ({"optimizer": "adagrad", "initial_sum": -1.0}, r"local\.initial_sum: .*greater than or equal to 0"),
    ({"state": "keep"}, r"local\.state: .*'reset' or 'persist'"),
    ({"optimizer": "adam", "betas": [0.9, 0.99]}, r"local\.betas: unknown key .*did you mean 'beta"),
    ({"nesterov": True}, r"local\.nesterov: .*only if momentum is above 0, but momentum is 0 "),
    ({"drop_last": True, "wrap_last": True}, r"local: drop_last and wrap_last are both set"),
    ({"optimizer": "none.py:f", "gamma": 1.0}, r"local\.optimizer: no such file: none\.py"),
    ({"optimizer": "own_optimizers.py:lino"}, r"local\.optimizer: .*has no 'lino' \(did you mean 'lion'\?\)"),
    ({"optimizer": "own_optimizers:lion"}, r"local\.optimizer: .*a function that a \.py file defines is needed"),
    ({"optimizer": "own_optimizers.py:number"}, r"local\.optimizer: .*is not a function that returns"),
    (
        {"optimizer": "own_optimizers.py:pair"},
        r"local\.optimizer: it returned a tuple, not a fedloom.*Optimizer",
    ),
    ({"optimizer": "own_optimizers.py:needy"}, r"local\.optimizer: it failed: TypeError: .*'gamma'"),
    ({"optimizer": "own_optimizers.py:lion", "gama": 1.0}, r"local\.gama: unknown key"),
    (
        {"optimizer": "own_optimizers.py:lion", "weight_decay": 1.0},
        r"local\.weight_decay: .*but optimizer is own_optimizers\.py:lion",
    ),
]


@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize(("local", "message"), BAD, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_a_bad_setting_is_one_clear_fault(local: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse({"local": local})
    assert len(refused.value.faults) == 1
    assert re.search(message, str(refused.value))


def test_one_fault_of_the_section_does_not_hide_another() -> None:
    local = {"optimizer": "adm", "lr": -1.0, "lrr": 0.1, "nesterov": True, "steps": 3, "epochs": 2}
    with pytest.raises(ConfigError) as refused:
        parse({"local": local})
    places = [fault.where for fault in refused.value.faults]
    assert sorted(places) == ["local.epochs", "local.lr", "local.lrr", "local.nesterov", "local.optimizer"]


@pytest.mark.parametrize("name", [n for n in EVERY if n != "sgd"], ids=lambda name: name.rpartition(":")[2])
def test_an_algorithm_of_plain_sgd_refuses_every_other(name: str) -> None:
    with pytest.raises(ConfigError, match=r"local\.optimizer: Scaffold is defined for plain SGD steps .*leave.* sgd"):
        parse({"algorithm": "scaffold", "local": {"optimizer": name}})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1] * 5),
        ({"schedule": "exponential", "decay": 0.5}, [0.1, 0.05, 0.025, 0.0125, 0.00625]),
        ({"schedule": "step", "decay": 0.1, "step_every": 2}, [0.1, 0.1, 0.01, 0.01, 0.001]),
        ({"schedule": "cosine"}, [0.05 * (1 + math.cos(math.pi * r / 5)) for r in range(5)]),
    ],
)
def test_schedules(settings: dict[str, Any], expected: list[float]) -> None:
    local = Local(lr=0.1, **settings)
    assert [local.lr_at(r, 5) for r in range(5)] == pytest.approx(expected)
    assert all(local.lr_at(r, 5) > 0 for r in range(5))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0},
        {"lr": -1},
        {"momentum": 1},
        {"batch": -1},
        {"epochs": 0},
        {"steps": 0},
        {"clip": -1},
        {"decay": 0},
        {"schedule": "linear"},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"learning_rate": 0.1},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Local(**wrong)
