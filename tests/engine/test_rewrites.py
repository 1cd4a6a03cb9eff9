"""Rewritten steps: the same numbers by operations that a compiler turns into faster kernels.

To the bit, but for thin products, whose terms are added in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import fedloom.engine.compiling
from fedloom.algorithm import AnyAlgorithm
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedprox import FedProx
from fedloom.algorithms.fedsam import FedSAM
from fedloom.algorithms.moon import Moon
from fedloom.algorithms.scaffold import Scaffold
from fedloom.core import tree
from fedloom.core.optim import Local, optimizers
from fedloom.engine import cuda_graphs, rewrites
from fedloom.engine.compiling import _FUSIBLE, has_cpp_compiler
from fedloom.engine.rewrites import Parts, _runs, in_parts, rewrite
from fedloom.engine.rounds import begin, rounds
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.models.net import Net
from support.worlds import experiment, federation

aten = torch.ops.aten
SIZES = (3, 40, 17, 25)
WIDE = 20_000  # parameters of the largest layer


def world(algorithm: AnyAlgorithm, local: Local, *, compiled: bool) -> Experiment:
    """Clients with a large layer between small ones, in steps that are too large to be compiled as loops."""
    torch.manual_seed(1)
    net = Net(nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, WIDE // 40), nn.Tanh()), WIDE // 40, 3)
    capture = "compiled" if compiled else "graph"
    return experiment(federation(SIZES), net, algorithm, capture=capture, local=local, rounds=2)


def servers(exp: Experiment) -> list[Any]:
    """The server after each round. Steps must have been captured: else plain ones are compared with themselves."""
    found = [done.state.server for done in rounds(exp, begin(exp), RamStore(len(SIZES)))]
    assert not [note for note in cuda_graphs.built(exp.task).notes if "cannot be captured" in note]
    return found


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The steps that were rewritten; they run as they are, instead of being compiled."""
    found: list[fx.GraphModule] = []

    def as_it_is(traced: fx.GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
        found.append(traced)
        return traced

    monkeypatch.setattr("torch._inductor.standalone_compile", as_it_is)
    monkeypatch.setattr(rewrites, "_stored", lambda _graph, node: node)  # how it is stored is for the compiler
    monkeypatch.setattr(cuda_graphs, "_SMALL", 0)
    return found


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave all products to the library, which adds in its own order."""
    monkeypatch.setattr(rewrites, "_THIN", 0)
    monkeypatch.setattr(rewrites, "_FEW", 0)


def counts(step: fx.GraphModule, target: Any) -> int:
    return sum(node.target == target for node in step.graph.nodes)


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("segment", [1, 1 << 20], ids=["segments", "ticks"])
@pytest.mark.parametrize("name", list(optimizers()))
def test_every_optimizer_takes_the_same_steps_by_parts(
    name: str, segment: int, steps: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_SEGMENT", segment)
    local = Local(optimizer=name, batch=4, lr=0.01, weight_decay=0.01)
    found, plain = (servers(world(FedAvg(), local, compiled=compiled)) for compiled in (True, False))
    for a, b in zip(found, plain, strict=True):
        assert torch.equal(a.w, b.w)
    assert steps
    for step in steps:
        writes = aten.index_copy_.default if segment > 1 else aten.copy_.default
        assert not any(
            node.target == aten.cat.default and node.meta.get("val") is not None for node in step.graph.nodes
        ), "the whole gradient is still there"
        assert counts(step, writes) >= 3, "the parameters are not written by parts"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(optimizers()))
def test_gradients_of_large_layers_are_not_stored(name: str, steps: list[fx.GraphModule]) -> None:
    servers(world(FedAvg(), Local(optimizer=name, batch=4, lr=0.01), compiled=True))
    assert steps
    for step in steps:
        products = [node.meta["val"] for node in step.graph.nodes if node.target == aten.bmm.default]
        assert all(each.numel() < WIDE for each in products)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("terms", "stays"), [(1, False), (10, False), (17, True)])
def test_thin_products_are_sums_of_a_few_terms(terms: int, stays: bool, dtype: torch.dtype) -> None:
    def step(w: Tensor, a: Tensor, b: Tensor) -> None:
        w.copy_(w - 0.1 * torch.bmm(a, b).float().view(2, -1))

    a, b = torch.randn(2, 100, terms).to(dtype), torch.randn(2, terms, 200).to(dtype)
    w = torch.randn(2, 20_000)
    traced = make_fx(step)(w.clone(), a, b)
    rewrite(traced.graph)
    traced.recompile()
    assert counts(traced, aten.bmm.default) == stays
    exact = w.double() - 0.1 * torch.bmm(a.double(), b.double()).view(2, -1)
    traced(w, a, b)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # products are bfloat16, too
    assert float((w - exact).norm() / exact.norm()) < tolerance


def test_products_with_few_results_are_computed_by_a_reduction() -> None:
    def step(found: Tensor, a: Tensor, b: Tensor) -> None:
        found.copy_(torch.bmm(a, b).log_softmax(-1))

    for columns, stays in ((10, False), (20, True)):
        a, b = torch.randn(3, 10, 300), torch.randn(3, columns, 300).transpose(1, 2)
        found = torch.empty(3, 10, columns)
        traced = make_fx(step)(found.clone(), a, b)
        rewrite(traced.graph)
        traced.recompile()
        assert counts(traced, aten.bmm.default) == stays
        traced(found, a, b)
        assert torch.allclose(found, torch.bmm(a, b).log_softmax(-1), atol=1e-4)


def test_products_that_a_norm_needs_are_stored() -> None:
    def step(w: Tensor, a: Tensor, b: Tensor) -> None:
        g = torch.bmm(a, b).view(2, -1)
        w.copy_(w - g / g.norm())

    traced = make_fx(step)(torch.randn(2, 20_000), torch.randn(2, 100, 4), torch.randn(2, 4, 200))
    rewrite(traced.graph)
    assert counts(traced, aten.bmm.default) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    "algorithm", [FedProx(mu=0.1), Scaffold(), FedSAM(rho=0.1), Moon()], ids=lambda a: type(a).__name__
)
def test_every_kind_of_step_is_the_same_by_parts(algorithm: AnyAlgorithm, steps: list[fx.GraphModule]) -> None:
    """With clipping and momentum: a norm needs the whole gradient, the rest of the step does not."""
    local = Local(batch=4, lr=0.05, momentum=0.5, clip=0.5)
    found, plain = (servers(world(algorithm, local, compiled=compiled)) for compiled in (True, False))
    for a, b in zip(found, plain, strict=True):
        for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
            assert torch.equal(x, y)
    assert steps


@pytest.mark.slow
@pytest.mark.parametrize(("name", "factors"), [("sgd", 0), ("adam", 2), ("radam", 3), ("asgd", 3), ("adagrad", 1)])
def test_factors_are_computed_once(name: str, factors: int, steps: list[fx.GraphModule]) -> None:
    """Where a number of a lane leaves float64 it is stored, so that no parameter computes it again."""
    servers(world(FedAvg(), Local(optimizer=name, batch=4, lr=0.01), compiled=True))
    assert {counts(step, torch.ops.fedloom.stored_factor.default) for step in steps} == {factors}


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="there is no C++ compiler, which torch.compile needs on a CPU")
def test_the_compiler_takes_rewritten_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_SMALL", 0)
    rewritten = []

    def noted(graph: fx.Graph) -> list[Parts]:
        rewritten.append(graph)
        return rewrite(graph)

    monkeypatch.setattr(fedloom.engine.compiling, "rewrite", noted)
    local = Local(optimizer="adam", batch=4, lr=0.01)
    found, plain = (servers(world(FedAvg(), local, compiled=compiled)) for compiled in (True, False))
    assert len(rewritten) == 1
    for a, b in zip(found, plain, strict=True):
        assert torch.allclose(a.w, b.w, atol=1e-4)


def test_large_layers_are_parts_and_small_ones_are_joined() -> None:
    assert _runs([10, 1, 900, 9, 50, 30]) == [[10, 1], [900], [9, 50, 30]]
    assert _runs([500, 500]) == [[500], [500]]
    assert _runs([1] * 20) == [[1] * 20]


def test_short_vectors_and_other_concatenations_stay_as_they_are() -> None:
    def step(w: Tensor, a: Tensor, b: Tensor) -> None:
        w.copy_(w - 0.1 * torch.cat([a, b], 1))

    for wide, slices in ((100, 0), (WIDE, 4)):
        w, a, b = torch.randn(2, wide), torch.randn(2, wide - 7), torch.randn(2, 7)
        traced = make_fx(step)(w, a, b)
        parts = rewrite(traced.graph)
        traced.recompile()
        assert counts(traced, aten.slice.Tensor) == slices
        expected = w - 0.1 * torch.cat([a, b], 1)
        traced(*in_parts([w, a, b], parts))
        assert torch.equal(w, expected)

    def below(w: Tensor, a: Tensor, b: Tensor) -> None:
        w.copy_(torch.cat([a, b], 0))

    w, a, b = torch.randn(4, WIDE), torch.randn(3, WIDE), torch.randn(1, WIDE)
    traced = make_fx(below)(w, a, b)
    rewrite(traced.graph)
    assert counts(traced, aten.cat.default) == 1
    assert counts(traced, aten.slice.Tensor) == 0


def test_equal_operations_are_computed_once_unless_something_is_written_between_them() -> None:
    def step(x: Tensor, y: Tensor) -> None:
        a = (x.t().contiguous() * 2).sum(1)
        b = (x.t().contiguous() * 2).sum(1)
        before = y + 1
        y.add_(a + b)
        y.copy_(before + (y + 1))

    x, y = torch.randn(3, 5), torch.randn(5)
    traced = make_fx(step)(x, y)
    assert counts(traced, aten.clone.default) == 2
    rewrite(traced.graph)
    traced.recompile()
    assert counts(traced, aten.clone.default) == counts(traced, aten.mul.Tensor) == 1
    found, expected = y.clone(), y.clone()
    traced(x, found)
    step(x, expected)
    assert torch.equal(found, expected)


def test_zeros_of_different_signs_are_different_numbers() -> None:
    def signs(x: Tensor) -> Tensor:
        return torch.copysign(x, 0.0) + 2 * torch.copysign(x, -0.0)

    x = torch.tensor([-0.8, 0.5])
    traced = make_fx(signs)(x)
    rewrite(traced.graph)
    traced.recompile()
    assert traced(x).tolist() == signs(x).tolist()


def test_a_table_is_given_in_the_parts_in_which_it_is_written() -> None:
    """The layers that are read are found in the parts; a table that is also used as a whole is given whole."""

    def step(w: Tensor, a: Tensor, b: Tensor) -> None:
        first, second = w.split_with_sizes([7, WIDE], 1)
        w.copy_(w - 0.1 * torch.cat([a * first, b * second], 1))

    def short(w: Tensor, a: Tensor, b: Tensor) -> None:
        first, second = w.bfloat16().split_with_sizes([7, WIDE], 1)
        w.copy_(w - 0.1 * torch.cat([(a * first).float(), (b * second).float()], 1))

    def whole(w: Tensor, a: Tensor, b: Tensor) -> None:
        w.copy_(w - w.norm() * torch.cat([a, b], 1))

    tables = torch.randn(4, WIDE + 7), torch.randn(4, 7), torch.randn(4, WIDE)
    for function, expected in ((step, [(0, 7), (7, WIDE + 7)]), (short, [(0, 7), (7, WIDE + 7)]), (whole, [])):
        given, same = ([x.clone() for x in tables] for _ in range(2))
        traced = make_fx(function)(*(x.clone() for x in tables))
        parts = rewrite(traced.graph)
        assert parts == [expected, [], []]
        traced.recompile()
        traced(*in_parts(given, parts))
        function(*same)
        assert torch.equal(given[0], same[0])


SMALL_LAYER, LARGE_LAYER = 35, WIDE


def slopes(w: Tensor, x: Tensor) -> Tensor:
    """The gradient of a small net, as the concatenation of those of two layers."""

    def loss(w: Tensor) -> Tensor:
        a, b = w.split([SMALL_LAYER, LARGE_LAYER])
        return ((x @ a.view(5, 7)).tanh().sum() * b).square().mean()

    return grad(loss)(w)


def masked(w: Tensor, x: Tensor) -> Tensor:
    g = slopes(w, x)
    g[:SMALL_LAYER] = 0
    return w - 0.1 * g


def set_one(w: Tensor, x: Tensor) -> Tensor:
    g = slopes(w, x)
    g[0] = 5.0
    return w - 0.1 * g


def doubled_view(w: Tensor, x: Tensor) -> Tensor:
    g = slopes(w, x)
    g.view(-1).mul_(2)
    return w - 0.1 * g


def emptied_part(w: Tensor, x: Tensor) -> Tensor:
    g = slopes(w, x)
    g.split([SMALL_LAYER, LARGE_LAYER])[0].mul_(0)
    return w - 0.1 * g


def clamped(w: Tensor, x: Tensor) -> Tensor:
    return w - 0.1 * slopes(w, x).clamp_(-1e-3, 1e-3)


def masked_factor(w: Tensor, x: Tensor) -> Tensor:
    g = slopes(w, x)
    factor = g + 1
    factor[:SMALL_LAYER] = 7.0
    return w - 0.1 * g * factor


def kept_layer(w: Tensor, x: Tensor) -> Tensor:
    new = w - 0.1 * slopes(w, x)
    new[:SMALL_LAYER] = w[:SMALL_LAYER]
    return new


def before_and_after(w: Tensor, x: Tensor) -> Tensor:
    copied = w.clone()
    before = copied.sum()
    copied[0] = 100.0
    return w - 0.1 * slopes(w, x) + 1e-3 * (copied.sum() - before)


def all_but_the_end(w: Tensor, x: Tensor) -> Tensor:
    return w - 0.1 * slopes(w, x) - 0.01 * w[:-10].norm()


def the_middle(w: Tensor, x: Tensor) -> Tensor:
    return w - 0.1 * slopes(w, x) - 0.01 * w[5:-10].norm()


def every_second(w: Tensor, x: Tensor) -> Tensor:
    return w - 0.1 * slopes(w, x) * (1 + w[::2].norm())


@pytest.mark.parametrize(
    "move",
    [
        masked, set_one, doubled_view, emptied_part, clamped, masked_factor, kept_layer, before_and_after,
        all_but_the_end, the_middle, every_second,
    ],
)  # fmt: skip
def test_steps_that_write_in_place_or_read_some_columns_stay_right(move: Callable[[Tensor, Tensor], Tensor]) -> None:
    """As people write them: the gradient is changed after it was put together."""

    def step(w: Tensor, x: Tensor) -> None:
        w.copy_(vmap(move)(w, x))

    made = torch.Generator().manual_seed(0)
    w, x = torch.randn(3, SMALL_LAYER + LARGE_LAYER, generator=made) * 0.1, torch.randn(3, 4, 5, generator=made)
    traced = make_fx(step, decomposition_table=_FUSIBLE)(w.clone(), x)
    parts = rewrite(traced.graph)
    traced.recompile()
    given = in_parts([w.clone(), x], parts)
    traced(*given)
    step(w, x)
    torch.testing.assert_close(torch.cat(given[:-1], 1), w)
