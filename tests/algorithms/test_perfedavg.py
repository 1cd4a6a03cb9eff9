"""Per-FedAvg against the gradient of the loss after a step, and against FedAvg, which it is where the step is 0."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp

import fedloom
from fedloom.algorithm import Carry, Model, Setup
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.perfedavg import PerFedAvg, part
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.core.task import Batch, Task
from fedloom.engine import laws
from fedloom.engine.evaluate import evaluate
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.models.net import Net
from fedloom.runs.settings import parse
from support import shared_laws
from support.personal import full_gradient, run, served
from support.quadratic import RAGGED, after, vec

MLP = {"kind": "mlp", "widths": [5]}


def batch_of(x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Batch:
    zero = torch.zeros((), dtype=x.dtype)
    y = torch.zeros(len(x), dtype=torch.long) if y is None else y
    mask = torch.ones(len(x), dtype=x.dtype) if mask is None else mask
    return Batch(x, y, mask, zero.long(), zero, zero + 0.25, torch.zeros(0, dtype=x.dtype))


class Line:
    """A task with one parameter: the mean of 1/2 (w - x)^2 over the examples x."""

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        return w - (batch.mask * batch.x).sum() / batch.mask.sum()


class OnEverySecond(FedAvg):
    """FedAvg that leaves out the examples 0, 2, 4, ... of each batch, unless it has no other."""

    def gradient(self, x, batch, down, mine):
        odd = torch.arange(len(batch.mask)) % 2 * batch.mask
        kept = torch.where(batch.mask.sum() < 2, batch.mask, odd)
        return self.task.grad(x, batch._replace(mask=kept))


def neural(**settings) -> PerFedAvg:
    """The algorithm on a small net, in float64."""
    torch.manual_seed(0)
    net = Net(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), 6, 3).double()
    return PerFedAvg(**settings).bind(Setup(Task(net), sgd()))


def examples(count: int, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return batch_of(torch.randn(count, 4, generator=g).double(), torch.randint(3, (count,), generator=g))


def test_hand_worked_numbers() -> None:
    # examples 2, 4, 6, 8 at x = 0 with alpha 1/2 and lr 1/4
    # first order:   b1 = 2, 6: x' = 0 - 1/2 (0 - 4) = 2;    b2 = 4, 8: g = 2 - 6 = -4;     x = 0 + 1/4 * 4 = 1
    # Hessian-free:  b1 = 2, 8: x' = 5/2;   b2 = 4: g = -3/2;   the curvature is 1, so h = g;   x = 1/4 (3/2 - 3/4)
    batch, down = batch_of(vec(2, 4, 6, 8)), Model(vec(0))

    def stepped(**settings):
        alg = PerFedAvg(alpha=0.5, **settings).bind(Setup(Line(), sgd()))
        return alg.step(Carry(vec(0), ()), batch, down, ()).x.item()

    assert stepped() == 1
    assert stepped(variant="hessian_free") == pytest.approx(0.1875, rel=1e-12)
    # before it predicts, a client takes one step of alpha on a whole batch: 0 - 1/2 (0 - 5)
    alg = PerFedAvg(alpha=0.5).bind(Setup(Line(), sgd(momentum=0.9, weight_decay=0.5)))
    assert alg.adapt(Carry(vec(0), ()), batch, down, ()).x.item() == 2.5


@pytest.mark.parametrize(
    ("real", "parts", "expected"),
    [
        (7, 2, [[0, 2, 4, 6], [1, 3, 5]]),
        (2, 2, [[0], [1]]),
        (1, 2, [[0], [0]]),
        (7, 3, [[0, 3, 6], [1, 4], [2, 5]]),
        (5, 3, [[0, 3], [1, 4], [2]]),
        (3, 3, [[0], [1], [2]]),
        (2, 3, [[0, 1], [0, 1], [0, 1]]),
        (1, 3, [[0], [0], [0]]),
    ],
)
@pytest.mark.parametrize("padding", [0, 1, 4, 7])
def test_parts_of_a_batch(real, parts, expected, padding) -> None:
    width = real + padding
    batch = batch_of(torch.arange(width), torch.arange(width), (torch.arange(width) < real).float())
    for j in range(parts):
        found = part(batch, j, parts)
        assert found.x[found.mask > 0].tolist() == found.y[found.mask > 0].tolist() == expected[j]
        assert set(found.mask.tolist()) <= {0.0, 1.0}
    if not padding:  # nor does a part hold anything else, which BatchNorm would see
        assert all(len(part(batch, j, 2).x) == len(range(j, width, 2)) for j in range(2) if real > 1)


def test_parts_of_many_clients_at_once() -> None:
    """One client of a stack has too few examples, and the others do not notice."""
    mask = (torch.arange(6) < torch.tensor([[6], [1], [3], [2]])).float()
    x = torch.arange(24).view(4, 6)
    one = batch_of(x[0])
    for parts in (2, 3):
        for j in range(parts):
            found = torch.func.vmap(lambda x, m, j=j, parts=parts: part(one._replace(x=x, mask=m), j, parts)[:3:2])(
                x, mask
            )
            for k in range(4):
                alone = part(one._replace(x=x[k], mask=mask[k]), j, parts)
                assert torch.equal(found[0][k], alone.x)
                assert torch.equal(found[1][k], alone.mask)


def test_parts_draw_apart() -> None:
    batch = batch_of(vec(1, 2, 3, 4))
    assert part(batch, 0, 2).key != part(batch, 1, 2).key


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["lanes", "loop"])
def test_alpha_0_is_fedavg_on_the_second_part(world, executor) -> None:
    table = {"model": MLP, "local": RAGGED, "engine": {"executor": executor}}
    ours = world((4, 12, 7, 1), algorithm={"kind": "perfedavg", "alpha": 0.0, "weighting": "samples"}, **table)
    theirs = world((4, 12, 7, 1), algorithm=OnEverySecond(), **table)
    torch.testing.assert_close(after(ours, 3).w, after(theirs, 3).w, rtol=1e-5, atol=1e-6)


def test_where_alpha_is_0_nothing_is_fitted(world) -> None:
    exp = world(algorithm={"kind": "perfedavg", "alpha": 0.0}, model=MLP, local=RAGGED)
    state, w = run(exp, 2)
    assert torch.equal(w, state.server.w.expand_as(w))


def test_first_order_is_the_gradient_at_the_adapted_point() -> None:
    alg, batch = neural(alpha=0.3), examples(9)
    x = alg.task.w0
    b1, b2 = batch_of(batch.x[::2], batch.y[::2]), batch_of(batch.x[1::2], batch.y[1::2])
    expected = alg.task.grad(x - 0.3 * alg.task.grad(x, b1), b2)
    torch.testing.assert_close(alg.gradient(x, batch, Model(x), ()), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.05, 0.5])
def test_hessian_free_is_first_order_minus_alpha_times_the_hessian_along_it(alpha) -> None:
    alg, batch = neural(alpha=alpha, variant="hessian_free"), examples(10)
    x = alg.task.w0
    b1, b2, b3 = (batch_of(batch.x[j::3], batch.y[j::3]) for j in range(3))
    g = alg.task.grad(x - alpha * alg.task.grad(x, b1), b2)
    _, curved = jvp(grad(lambda v: alg.task.loss(v, b3)), (x,), (g,))
    expected = g - alpha * curved
    torch.testing.assert_close(alg.gradient(x, batch, Model(x), ()), expected, rtol=1e-5, atol=1e-7)


def test_on_one_example_hessian_free_is_the_gradient_of_the_loss_after_a_step() -> None:
    """Then b1, b2 and b3 are the same, and nothing is left of the difference between the paper's three batches."""
    alg, batch = neural(alpha=0.4, variant="hessian_free"), examples(1)
    loss = lambda v: alg.task.loss(v, batch)  # noqa: E731
    x = alg.task.w0
    expected = grad(lambda v: loss(v - 0.4 * grad(loss)(v)))(x)
    torch.testing.assert_close(alg.gradient(x, batch, Model(x), ()), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["first_order", "hessian_free"])
def test_executors_agree_on_batches_with_too_few_examples(world, variant) -> None:
    """Of 13, 12, 7, 4 and 1 examples in batches of 6, some last batches have fewer than there are parts."""
    models = [
        after(
            world(
                (13, 12, 7, 4, 1),
                algorithm={"kind": "perfedavg", "variant": variant},
                model=MLP,
                local={"batch": 6, "lr": 0.1, "epochs": 2},
                engine={"executor": executor},
            ),
            3,
        ).w
        for executor in ("lanes", "loop")
    ]
    torch.testing.assert_close(*models, rtol=1e-4, atol=1e-5)


def test_what_is_served_is_one_step_from_the_common_model(world) -> None:
    """Momentum, decay and the local rate belong to training, not to this step."""
    local = {"batch": 0, "lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}
    exp = world(algorithm={"kind": "perfedavg", "alpha": 0.3}, model=MLP, local=local)
    state, store = begin(exp), RamStore(3)
    state, _ = advance(exp, state, store)
    for client, w in enumerate(served(exp, state, store)):
        expected = state.server.w - 0.3 * full_gradient(exp, client, state.server.w)
        torch.testing.assert_close(w, expected, rtol=1e-5, atol=1e-6)


def test_the_step_is_taken_on_one_batch_of_training_data(world) -> None:
    exp = world((9, 12), algorithm={"kind": "perfedavg", "alpha": 0.3}, model=MLP, local={"batch": 4, "lr": 0.1})
    state, store = begin(exp), RamStore(2)
    found = served(exp, state, store)[0]
    x, y = exp.federation.examples(exp.federation.train.rows[:9])
    tried = []
    for rows in torch.combinations(torch.arange(9), 4):
        g = exp.task.grad(exp.task.w0, batch_of(x[rows], y[rows]))
        tried.append(float((exp.task.w0 - 0.3 * g - found).abs().max()))
    assert min(tried) < 1e-6
    assert (exp.task.w0 - 0.3 * full_gradient(exp, 0, exp.task.w0) - found).abs().max() > 1e-3  # not all of it


@pytest.mark.slow
def test_fitting_leaves_the_run_alone_and_a_late_joiner_is_served_like_anybody(world) -> None:
    table = {"model": MLP, "local": RAGGED, "cohort": {"size": 1}, "partition": {"kind": "natural", "holdout": 0.3}}
    exp = world(algorithm="perfedavg", **table)
    judged, plain = begin(exp), begin(exp)
    store, other = RamStore(3), RamStore(3)
    for _ in range(3):
        assert evaluate(exp, judged, store) == evaluate(exp, judged, store)
        judged, plain = advance(exp, judged, store)[0], advance(exp, plain, other)[0]
    assert torch.equal(judged.server.w, plain.server.w)
    assert (served(exp, judged, store) != judged.server.w).any(1).all()


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["lanes", "loop"])
@pytest.mark.parametrize("variant", ["first_order", "hessian_free"])
def test_a_client_with_one_example_stays_finite(world, executor, variant) -> None:
    exp = world(
        (1, 12, 7),
        algorithm={"kind": "perfedavg", "variant": variant},
        model=MLP,
        local=RAGGED,
        engine={"executor": executor},
    )
    state, w = run(exp, 4)
    assert w.isfinite().all()
    assert state.up == state.down == 4 * 3 * 4 * exp.task.size


class HessianFree(PerFedAvg):
    variant: Literal["first_order", "hessian_free"] = "hessian_free"


@pytest.mark.slow
@pytest.mark.usefixtures("shared_laws")
@shared_laws.EVERY
def test_the_second_variant_obeys_the_laws(law) -> None:
    assert laws.verdict(law, HessianFree) == ""


@pytest.mark.parametrize(("key", "value"), [("alpha", -0.1), ("delta", 0.0), ("variant", "exact")])
def test_settings_out_of_range_are_refused(key, value) -> None:
    with pytest.raises(ConfigError, match=key):
        parse({"algorithm": {"kind": "perfedavg", key: value}})


@pytest.mark.slow
def test_it_learns_digits_of_which_each_client_has_four() -> None:
    table = {
        "rounds": 4,
        "seed": 1,
        "partition": {"kind": "pathological", "clients": 10, "per_client": 4, "holdout": 0.25},
        "evaluate": {"every": 4},
    }
    theirs = fedloom.run("fedavg", **table).summary
    for variant in ("first_order", "hessian_free"):
        ours = fedloom.run({"kind": "perfedavg", "variant": variant}, **table).summary
        assert ours["personal/post_fit/test/accuracy"].last > theirs["personal/pre_fit/test/accuracy"].last, variant
        assert ours["personal/post_fit/test/accuracy"].last > 0.9, variant
