"""SAM and GAM against quadratics, where everything is known, and against a dense Hessian."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian, vmap

from fedloom.core.task import Batch, Task
from fedloom.maths.sharpness import Gam, Landscape, Surface, cost, flatness, gam, sam, steepest, toward

RULES = ("paper", "gam_exact", "gam_fd", "gam_repo")
PRODUCTS = ("fd", "central", "exact")


def vec(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Bowl(NamedTuple):
    """The loss 1/2 (w - b)' A (w - b)."""

    A: Tensor  # [P, P]
    b: Tensor  # [P]

    @property
    def batch(self) -> Batch:
        zero = torch.zeros((), dtype=torch.float64)
        return Batch(self.A, self.b, torch.ones(1).double(), zero.long(), zero, zero, torch.zeros(0))

    def gradient(self, w: Tensor) -> Tensor:
        return self.A @ (w - self.b)


class Quadratic:
    """The task of such a loss; a batch is the loss itself, A as inputs and b as labels."""

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        return batch.x @ (w - batch.y)

    def hvp(self, w: Tensor, batch: Batch, v: Tensor) -> Tensor:
        return batch.x @ v


BOWLS = Quadratic()


def delta(bowl: Bowl, y: Tensor, how: Gam) -> Tensor:
    return steepest(Surface(BOWLS, bowl.batch), y, bowl.gradient(y), how)


def saddle(seed: int, size: int = 4) -> Bowl:
    """Curvatures of both signs."""
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(size, size, generator=g).double()
    return Bowl(A + A.T, torch.randn(size, generator=g).double())


def smooth(*, seed: int = 0, lanes: bool = False, p: float = 0.0) -> tuple[Task, Tensor, Batch]:
    """A tanh net in float64, a point and a batch."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(p), nn.Linear(6, 3)).double()
    task, g = Task(net, lanes=lanes), torch.Generator().manual_seed(seed)
    zero = torch.zeros((), dtype=torch.float64)
    y = torch.arange(12) % 3
    x = torch.randn(12, 3, generator=g).double()
    batch = Batch(x, y, torch.ones(12).double(), torch.tensor(9), zero, zero + 0.1, torch.zeros(0).double())
    return task, task.w0 + 0.1 * torch.randn(task.size, generator=g).double(), batch


def unit(v: Tensor) -> Tensor:
    return v / v.norm()


# -- SAM -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rho", [0.05, 0.5, 2.0])
def test_a17_sam_on_a_quadratic(rho) -> None:
    for seed in range(5):
        bowl, y = saddle(seed), vec(1, -1, 0.5, 2)
        g = bowl.gradient(y)
        torch.testing.assert_close(sam(BOWLS, y, bowl.batch, rho), g + rho * bowl.A @ unit(g), rtol=1e-12, atol=1e-12)


def test_sam_at_a_point_without_a_gradient_stays_there() -> None:
    bowl = saddle(0)
    for rule in RULES:
        assert torch.equal(sam(BOWLS, bowl.b, bowl.batch, 1.0), 0 * bowl.b)
        assert torch.equal(gam(BOWLS, bowl.b, bowl.batch, Gam(1.0, rule)), 0 * bowl.b)


def test_toward_is_so_long_or_nothing() -> None:
    assert toward(vec(3, 4), 10.0).tolist() == [6, 8]
    assert toward(vec(0, 0), 10.0).tolist() == [0, 0]
    assert toward(vec(3e-13, 4e-13), 10.0).tolist() == [0, 0]
    assert toward(vec(3, 4), 10.0, vec(6)[0]).tolist() == [0, 0]


# -- the paper's rule ----------------------------------------------------------------------------------
@pytest.mark.parametrize("reach", [1e-3, 0.03, 0.5])
@pytest.mark.parametrize("product", ["fd", "central"])
def test_g1_on_a_quadratic_differences_are_exact(product, reach) -> None:
    for seed in range(5):
        bowl, y = saddle(seed), vec(1, -1, 0.5, 2)
        exact = delta(bowl, y, Gam(0.2, product="exact"))
        torch.testing.assert_close(delta(bowl, y, Gam(0.2, product=product, reach=reach)), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("product", PRODUCTS)
def test_g2_the_step_on_a_quadratic(product) -> None:
    """g + rho H^2 g / ||H g||, whatever the signs of the curvatures."""
    for seed in range(5):
        bowl, y = saddle(seed), vec(1, -1, 0.5, 2)
        g = bowl.gradient(y)
        expected = g + 0.3 * bowl.A @ unit(bowl.A @ g)
        found = gam(BOWLS, y, bowl.batch, Gam(0.3, product=product))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("product", PRODUCTS)
def test_g3_delta_is_rho_long_or_nothing(product) -> None:
    task, w, batch = smooth()
    for rho in (0.05, 0.2, 2.0):
        d = steepest(Surface(task, batch), w, task.grad(w, batch), Gam(rho, product=product))
        assert float(d.norm()) == pytest.approx(rho, abs=1e-6)
    bowl = saddle(0)
    assert not delta(bowl, bowl.b, Gam(0.2, product=product)).any()


@pytest.mark.parametrize("product", PRODUCTS)
def test_g4_equal_curvatures_make_it_sam_and_negative_ones_its_opposite(product) -> None:
    for c in (0.5, -0.5):
        bowl, y = Bowl(c * torch.eye(3).double(), vec(0.3, -1, 2)), vec(1, 1, 1)
        g = bowl.gradient(y)
        torch.testing.assert_close(delta(bowl, y, Gam(0.2, product=product)), math.copysign(0.2, c) * unit(g))
        if c > 0:
            torch.testing.assert_close(
                gam(BOWLS, y, bowl.batch, Gam(0.2, product=product)), sam(BOWLS, y, bowl.batch, 0.2)
            )


def test_it_is_not_sam_where_curvatures_differ() -> None:
    """d||g|| / dg would be g / ||g||, which is SAM; the gradient along the parameters has the Hessian in it."""
    bowl, y = Bowl(torch.diag(vec(10, 1)), vec(0, 0)), vec(0.1, 1)
    g, d = bowl.gradient(y), delta(bowl, y, Gam(1.0))
    torch.testing.assert_close(d, unit(vec(10, 1)), rtol=1e-8, atol=1e-8)
    assert abs(float(unit(g) @ d)) < 0.8


@pytest.mark.parametrize("product", PRODUCTS)
def test_g5_the_gradient_is_longer_there(product) -> None:
    for seed in range(10):
        bowl, y = saddle(seed), vec(1, -1, 0.5, 2)
        there = y + delta(bowl, y, Gam(0.3, product=product))
        assert bowl.gradient(there).norm() >= bowl.gradient(y).norm()
    for seed in range(5):
        task, w, batch = smooth(seed=seed)
        g = task.grad(w, batch)
        there = w + steepest(Surface(task, batch), w, g, Gam(0.01, product=product, reach=1e-3))
        assert task.grad(there, batch).norm() > g.norm()


class Tilted(Quadratic):
    """A linear loss: its gradient is the same everywhere, in float32 up to rounding."""

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        return batch.y * (1 + 1e-8 * torch.sin(1e6 * w.sum()))

    def hvp(self, w: Tensor, batch: Batch, v: Tensor) -> Tensor:
        return torch.zeros_like(v)


@pytest.mark.parametrize("rule", ["paper", "gam_exact", "gam_fd"])
def test_g6_on_a_slope_it_is_plain_descent(rule) -> None:
    plane = Bowl(torch.zeros(2, 2).double(), vec(3, -1))
    for product in PRODUCTS:
        found = gam(Tilted(), vec(1, 2), plane.batch, Gam(0.2, rule, product))
        torch.testing.assert_close(found, vec(3, -1), rtol=1e-6, atol=1e-6)
        d = steepest(Surface(Tilted(), plane.batch), vec(1, 2), vec(3, -1), Gam(0.2, product=product))
        assert not d.any()  # a difference that is rounding has no direction


def test_against_a_dense_hessian() -> None:
    task, w, batch = smooth()
    H, g = hessian(lambda v: task.loss(v, batch))(w), task.grad(w, batch)
    f = H @ unit(g)
    exact = steepest(Surface(task, batch), w, g, Gam(0.2, product="exact"))
    torch.testing.assert_close(exact, 0.2 * unit(f), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(task.hvp(w, batch, unit(g)), f, rtol=1e-9, atol=1e-10)
    found = gam(task, w, batch, Gam(0.2, product="exact"))
    torch.testing.assert_close(found, task.grad(w + 0.2 * unit(f), batch), rtol=1e-9, atol=1e-10)
    for product in ("fd", "central"):
        near = steepest(Surface(task, batch), w, g, Gam(0.2, product=product))
        assert float(unit(near) @ unit(f)) > 0.9995


def test_g7_forward_differences_err_by_the_first_power_and_central_ones_by_the_second() -> None:
    task, w, batch = smooth()
    g = task.grad(w, batch)
    f = task.hvp(w, batch, unit(g))
    reaches = (1e-3, 3e-3, 1e-2, 3e-2)
    for product, power in (("fd", 1), ("central", 2)):
        errors = []
        for reach in reaches:
            step = toward(g, reach)
            before = g if product == "fd" else task.grad(w - step, batch)
            span = reach if product == "fd" else 2 * reach
            errors.append(float(((task.grad(w + step, batch) - before) / span - f).norm()))
            ours = steepest(Surface(task, batch), w, g, Gam(0.2, product=product, reach=reach))
            torch.testing.assert_close(ours, 0.2 * unit(task.grad(w + step, batch) - before))
        logs = [(math.log(e), math.log(r)) for e, r in zip(errors, reaches, strict=True)]
        slopes = [(f - e) / (s - r) for (e, r), (f, s) in pairwise(logs)]
        assert slopes == pytest.approx([power] * 3, abs=0.15)


class Counting(Task):
    """Counts gradients and Hessian-vector products, and keeps the batches that they saw."""

    grads = hvps = 0
    seen: tuple[Batch, ...] = ()

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        self.grads, self.seen = self.grads + 1, (*self.seen, batch)
        return super().grad(w, batch)

    def hvp(self, w: Tensor, batch: Batch, v: Tensor) -> Tensor:
        self.hvps, self.seen = self.hvps + 1, (*self.seen, batch)
        return super().hvp(w, batch, v)


def counted() -> tuple[Counting, Tensor, Batch]:
    task, w, batch = smooth()
    return Counting(task.module(w, task.buffers0)), w, batch


COSTS = [
    (Gam(0.0), 1, 0),
    (Gam(0.2), 3, 0),
    (Gam(0.2, product="central"), 4, 0),
    (Gam(0.2, product="exact"), 2, 1),
    (Gam(0.2, "gam_exact"), 2, 2),
    (Gam(0.2, "gam_fd"), 4, 0),
    (Gam(0.2, "gam_repo"), 4, 0),
]


@pytest.mark.parametrize(("how", "grads", "hvps"), COSTS)
def test_g8_what_a_step_costs(how, grads, hvps) -> None:
    task, w, batch = counted()
    gam(task, w, batch, how)
    assert (task.grads, task.hvps) == (grads, hvps)
    assert cost(how) == grads + 2 * hvps


def test_g8b_what_a_sam_step_costs() -> None:
    for rho, grads in ((0.0, 1), (0.1, 2)):
        task, w, batch = counted()
        sam(task, w, batch, rho)
        assert (task.grads, task.hvps) == (grads, 0)


@pytest.mark.parametrize(("how", "grads", "hvps"), COSTS)
def test_g15_every_evaluation_of_a_step_sees_the_same_batch(how, grads, hvps) -> None:
    task, w, batch = counted()
    gam(task, w, batch, how)
    assert len(task.seen) == grads + hvps
    assert all(seen is batch for seen in task.seen)


def test_g15b_dropout_is_the_same_in_all_of_them() -> None:
    """With other masks the second gradient would be another function's, even next to the first point."""
    task, w, batch = smooth(p=0.5)
    g = task.grad(w, batch)
    assert not torch.allclose(task.grad(w, batch._replace(key=torch.tensor(10))), g, rtol=1e-3)
    torch.testing.assert_close(sam(task, w, batch, 1e-9), g, rtol=1e-6, atol=1e-8)
    H = hessian(lambda v: task.loss(v, batch))(w)
    exact = steepest(Surface(task, batch), w, g, Gam(0.2, product="exact"))
    torch.testing.assert_close(exact, 0.2 * unit(H @ g), rtol=1e-8, atol=1e-9)
    near = steepest(Surface(task, batch), w, g, Gam(0.2, reach=1e-4))
    torch.testing.assert_close(near, exact, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_g9_without_a_radius_it_is_the_gradient_bit_for_bit(rule) -> None:
    task, w, batch = smooth()
    g = task.grad(w, batch)
    assert torch.equal(gam(task, w, batch, Gam(0.0, rule)), g)
    assert torch.equal(sam(task, w, batch, 0.0), g)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("curvature", "bottom"), [(2, 0), (2, 3), (-2, 0), (-2, 3)])
def test_g10_in_one_dimension_only_signs_are_left(product, curvature, bottom) -> None:
    line, y = Bowl(torch.eye(1).double() * curvature, vec(bottom)), vec(1)
    first = line.gradient(y).item()
    d = delta(line, y, Gam(0.25, product=product)).item()
    assert d == pytest.approx(math.copysign(0.25, first * curvature))
    moved = sam(BOWLS, y, line.batch, 0.25).item() - first
    assert moved == pytest.approx(curvature * math.copysign(0.25, first))


# -- GAM itself ------------------------------------------------------------------------------------------
def test_g11_the_authors_step_by_its_definition() -> None:
    task, w, batch = smooth()
    how = Gam(0.2, "gam_repo", reach=0.05, beta0=0.3, beta1=0.4, gamma=0.6)
    g0 = task.grad(w, batch)
    g1 = task.grad(w + 0.05 * unit(g0), batch)
    there = w + 0.2 * unit(g1 - g0)
    g2 = task.grad(there, batch)
    g3 = task.grad(there + 0.05 * unit(g2), batch)
    G, M = 0.4 * g1 + 0.6 * g3, g0 + 0.7 * g2
    across = M - (M @ G) / (G @ G) * G
    found = gam(task, w, batch, how)
    torch.testing.assert_close(found, G - 0.6 * across)
    assert abs(float(across @ G)) < 1e-12
    assert float(found.square().sum()) == pytest.approx(float(G.square().sum() + 0.36 * across.square().sum()))


@pytest.mark.parametrize("rule", ["gam_exact", "gam_fd"])
def test_g12_without_a_weight_it_is_plain_descent(rule) -> None:
    task, w, batch = smooth()
    assert torch.equal(gam(task, w, batch, Gam(0.2, rule, alpha=0.0)), task.grad(w, batch))


def test_gam_adds_the_slope_of_the_gradients_length_at_the_worst_point() -> None:
    task, w, batch = smooth()
    H, g = hessian(lambda v: task.loss(v, batch)), task.grad(w, batch)
    there = w + 0.2 * unit(H(w) @ g)
    expected = g + 0.7 * 0.2 * H(there) @ unit(task.grad(there, batch))
    exact = gam(task, w, batch, Gam(0.2, "gam_exact", alpha=0.7))
    torch.testing.assert_close(exact, expected, rtol=1e-9, atol=1e-10)
    near = gam(task, w, batch, Gam(0.2, "gam_fd", alpha=0.7, reach=1e-4))
    torch.testing.assert_close(near, exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("product", PRODUCTS)
def test_decay_inside_is_a_bowl_that_is_steeper_by_it(rule, product) -> None:
    """lambda / 2 ||w||^2 as a part of the loss: the same as of a quadratic with A + lambda I and its own bottom."""
    bowl, y, decay = saddle(3), vec(1, -2, 0.5, 3), 0.3
    A = bowl.A + decay * torch.eye(4).double()
    other = Bowl(A, torch.linalg.solve(A, bowl.A @ bowl.b))
    how = Gam(0.2, rule, product)
    inside = gam(BOWLS, y, bowl.batch, how._replace(decay=decay))
    torch.testing.assert_close(inside, gam(BOWLS, y, other.batch, how))
    inside = sam(BOWLS, y, bowl.batch, 0.2, decay=decay)
    torch.testing.assert_close(inside, sam(BOWLS, y, other.batch, 0.2))


@pytest.mark.parametrize("rule", RULES)
def test_a_scale_is_a_radius_so_much_as_long(rule) -> None:
    bowl, y = saddle(3), vec(1, -2, 0.5, 3)
    half = gam(BOWLS, y, bowl.batch, Gam(0.4, rule, scale=torch.tensor(0.5).double()))
    torch.testing.assert_close(half, gam(BOWLS, y, bowl.batch, Gam(0.2, rule)))
    half = sam(BOWLS, y, bowl.batch, 0.4, scale=torch.tensor(0.5).double())
    torch.testing.assert_close(half, sam(BOWLS, y, bowl.batch, 0.2))


@pytest.mark.parametrize("how", [Gam(0.2, rule, product) for rule in RULES for product in PRODUCTS])
def test_g13_side_by_side_is_one_by_one(how) -> None:
    """Every node has norms of its own."""
    task, w, batch = smooth(lanes=True)
    points = torch.stack([w, 3 * w, 0.1 * w])
    together = vmap(lambda v: gam(task, v, batch, how))(points)
    alone = torch.stack([gam(smooth()[0], v, batch, how) for v in points])
    torch.testing.assert_close(together, alone, rtol=1e-8, atol=1e-9)
    together = vmap(lambda v: sam(task, v, batch, 0.2))(points)
    torch.testing.assert_close(together, torch.stack([sam(smooth()[0], v, batch, 0.2) for v in points]))


@pytest.mark.slow
def test_g14_the_loss_rises_by_no_more_than_rho_times_the_longest_gradient() -> None:
    """Along a line through a net: max F(y + d) - F(y) <= rho max |F'(y + d)|, by the mean value theorem."""
    task, w, batch = smooth()
    way = unit(torch.randn(task.size, generator=torch.Generator().manual_seed(1)).double())
    for rho in (0.05, 0.5, 2.0):
        at = torch.linspace(-rho, rho, 401).double()
        losses = torch.stack([task.loss(w + t * way, batch) for t in at])
        slopes = torch.stack([task.grad(w + t * way, batch) @ way for t in at])
        assert losses.max() - task.loss(w, batch) <= rho * slopes.abs().max() + 1e-12


# -- how flat a minimum is -------------------------------------------------------------------------
def quadratic(H: torch.Tensor, b: torch.Tensor) -> Landscape:
    """F = 1/2 y'Hy + b'y."""
    return Landscape(lambda y: (0.5 * y @ H @ y + b @ y, H @ y + b), lambda _, v: H @ v)


def test_at_the_minimum_of_a_quadratic_flatness_is_its_largest_curvature() -> None:
    """Without a gradient to follow: R0 = rho^2 lambda / 2 and R1 = rho^2 lambda."""
    H = torch.diag(torch.tensor([4.0, 1.0, 0.5])).double()
    found = flatness(quadratic(H, torch.zeros(3).double()), torch.zeros(3).double(), 0.3)
    assert found.r0 == pytest.approx(0.5 * 0.3**2 * 4, rel=1e-6)
    assert found.r1 == pytest.approx(0.3**2 * 4, rel=1e-6)


@pytest.mark.parametrize("rho", [0.05, 0.5, 2.0])
def test_flatness_is_the_largest_value_in_the_ball(rho: float) -> None:
    """Against all points of a fine grid, in two dimensions; R0 is never above R1."""
    H, b = torch.tensor([[3.0, 0.4], [0.4, 0.7]]).double(), torch.tensor([0.3, -1.0]).double()
    y = torch.tensor([0.2, 0.5]).double()
    angle = torch.linspace(0, 2 * math.pi, 4001).double()
    ball = torch.cat([s * rho * torch.stack([angle.cos(), angle.sin()], 1) for s in (0.25, 0.5, 0.75, 1.0)]) + y
    rise = (0.5 * ((ball @ H) * ball).sum(1) + ball @ b).max() - (0.5 * y @ H @ y + b @ y)
    found = flatness(quadratic(H, b), y, rho)
    assert found.r0 == pytest.approx(float(rise), rel=1e-4)
    assert found.r1 == pytest.approx(rho * float((ball @ H + b).norm(dim=1).max()), rel=1e-4)
    assert 0 < found.r0 <= found.r1


def test_a_wave_is_steep_although_it_does_not_rise() -> None:
    """What R0 does not see and R1 does: F = sin(20 y) / 20 in one dimension, by a dense scan."""
    wave = Landscape(lambda y: ((20 * y).sin().sum() / 20, (20 * y).cos()), lambda y, v: -20 * (20 * y).sin() * v)
    found = flatness(wave, torch.tensor([0.1]).double(), 0.05)
    scan = torch.linspace(0.05, 0.15, 100_001).double()
    assert found.r0 <= float((20 * scan).sin().max() - math.sin(2.0)) / 20 + 1e-12
    assert found.r1 <= 0.05 * float((20 * scan).cos().abs().max()) + 1e-12
    assert found.r1 > 3 * found.r0
