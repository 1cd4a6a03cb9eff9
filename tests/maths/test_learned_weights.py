"""Learned weights of models: FedLAW's lean gradient and its learner.

F and L with a number are the oracles that the method is held to.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core import tree
from fedloom.core.optim import sgd
from fedloom.maths import learned_weights
from fedloom.maths.as_printed import printed_shrink
from fedloom.maths.learned_weights import (
    OF_MODELS,
    SERVER_ADAM,
    Bounds,
    Free,
    Stack,
    Weighing,
    WeightSettings,
    aggregated,
    aggregated_by_depth,
    bounded,
    grid_shrink,
    initial,
    lean_gradient,
    learn_weights,
    of_kind,
    pulled_back,
    ratio_shrink,
    squares_of,
    step_rate,
    swa_rate,
    weighing,
)
from fedloom.maths.weighted_ridge import simplex_gradient
from support.ridge import (
    digits,
    examples,
    heads,
    of_clients,
    vec,
)

KINDS = ["exp", "quad", "exp_cap", "fixed"]
SIZES = vec(10, 30, 5, 55)


def stacked(models: torch.Tensor) -> Stack:
    """Models ``[m, P]``, relative to the first of them."""
    return Stack(models[0], models - models[0])


def bowl(optimum):
    """f(w) = 1/2 |w - optimum|^2 with its gradient."""
    return lambda w: (0.5 * (w - optimum).square().sum(), w - optimum)


@cache
def models(m=4, P=9, seed=0, dtype=torch.float64):
    return torch.randn(m, P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@cache
def net_loss():
    """A small net's cross-entropy as a function of its 9 parameters, in any precision."""
    x, y = examples(n=40, d=2, classes=3)

    def loss(w):
        return torch.nn.functional.cross_entropy(torch.tanh(x.to(w) @ w[:6].view(2, 3)) + w[6:], y)

    return loss


def grad_of(loss):
    def grad(w):
        w = w.detach().requires_grad_()
        value = loss(w)
        return value.detach(), torch.autograd.grad(value, w)[0]

    return grad


def learned(stack, start, epochs, *rest, **named):
    """Weights learned along gradients that are themselves the batches."""
    return learn_weights(stack, start, lambda w, grad: grad(w), epochs, *rest, **named)


def full_batch(grad, epochs):
    return [[grad]] * epochs


# -- parametrisations ------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_it_starts_where_it_is_set_to(kind) -> None:
    lam = SIZES / SIZES.sum()
    how = weighing(kind, initial(kind, lam, 0.9))
    torch.testing.assert_close(how.lam, lam)
    assert float(how.shrink) == pytest.approx(0.9)
    torch.testing.assert_close(how.mu, 0.9 * lam)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(KINDS), st.lists(st.floats(-50, 50), max_size=5), st.floats(-3, 3))
def test_f6_weights_lie_on_the_simplex(kind, a, b) -> None:
    a = [1.0, *a]
    how = weighing(kind, bounded(kind, Free(vec(*a), torch.tensor(b, dtype=torch.float64))))
    assert float(how.lam.sum()) == pytest.approx(1, abs=1e-12)
    assert bool((how.lam > 0).all())
    assert float(how.shrink) > 0
    if kind == "exp_cap":
        assert float(how.shrink) <= 1


def test_bounds() -> None:
    free = Free(vec(-50, 0, 50), torch.tensor(3.0, dtype=torch.float64))
    assert bounded("exp", free).a.tolist() == [-20, 0, 20]
    assert float(bounded("exp", free).b) == pytest.approx(math.log(1.5))
    assert float(bounded("exp_cap", free).b) == 0.0
    assert float(bounded("quad", free).b) == pytest.approx(math.sqrt(1.5))
    assert float(bounded("fixed", free).b) == 3.0
    inside = Free(vec(0.1, 0.3), torch.tensor(0.2, dtype=torch.float64))
    assert torch.equal(bounded("exp", inside).a, inside.a)  # to the bit
    narrow = Bounds(0.9, 1.1)
    assert float(bounded("exp", free, narrow).b) == pytest.approx(math.log(1.1))
    assert float(bounded("exp_cap", Free(free.a, -free.b), narrow).b) == pytest.approx(math.log(0.9))


def test_a_bound_says_that_it_decides() -> None:
    shrinks = {0.4: 1, 0.5: 1, 0.51: 0, 1.0: 0, 1.49: 0, 1.5: 1}
    found = {shrink: float(OF_MODELS.reached(torch.tensor(shrink, dtype=torch.float64))) for shrink in shrinks}
    assert found == shrinks
    assert of_kind("exp_cap", OF_MODELS) == Bounds(0.5, 1.0)


# -- the lean gradient -----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["exp", "quad", "exp_cap"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_f3_gradients_are_those_of_autograd(kind, dtype, rtol, masked) -> None:
    w, loss = models(dtype=dtype), net_loss()
    shrinks = torch.arange(9) < 6 if masked else None
    free = Free(vec(0.3, -0.2, 0.9, 0.4), torch.tensor(-0.1 if kind != "quad" else 0.9, dtype=torch.float64))

    def graph(a, b):  # through all models, as FedLAW's code does it
        how = weighing(kind, Free(a, b))
        mean = how.lam.to(dtype) @ w
        scale = how.shrink if shrinks is None else torch.where(shrinks, how.shrink, 1.0)
        return loss(mean * scale.to(dtype))

    expected = torch.autograd.functional.jacobian(graph, tuple(free))
    how = weighing(kind, free)
    lean = lean_gradient(stacked(w), how, grad_of(loss), shrinks)
    found = pulled_back(kind, free, how.lam, lean.lam, lean.log_shrink)
    assert float(lean.loss) == pytest.approx(float(graph(*free)), rel=10 * rtol)
    torch.testing.assert_close(found.a, expected[0], rtol=rtol, atol=rtol * 0.1)
    torch.testing.assert_close(found.b, expected[1], rtol=rtol, atol=rtol * 0.1)


def test_gradients_by_differences_and_by_the_formula() -> None:
    w, loss = models(), net_loss()
    free = Free(vec(0.3, -0.2, 0.9, 0.4), torch.tensor(-0.1, dtype=torch.float64))
    how = weighing("exp", free)
    lean = lean_gradient(stacked(w), how, grad_of(loss))
    found = pulled_back("exp", free, how.lam, lean.lam, lean.log_shrink)
    mean = how.lam @ w
    g = grad_of(loss)(how.shrink * mean)[1]
    torch.testing.assert_close(found.a, how.shrink * how.lam * (w @ g - mean @ g), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.b, how.shrink * (mean @ g), rtol=1e-9, atol=1e-12)
    h = 1e-6
    for i in range(4):
        step = torch.zeros(4, dtype=torch.float64)
        step[i] = h
        up, down = (loss(free.b.exp() * (free.a + s).softmax(0) @ w) for s in (step, -step))
        assert float(found.a[i]) == pytest.approx(float((up - down) / (2 * h)), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", ["exp", "quad"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_f2_equal_clients_keep_their_weights(kind, dtype) -> None:
    w = models(dtype=dtype)[:1].expand(4, -1).contiguous()
    lean = lean_gradient(stacked(w), Weighing(SIZES / 100, vec(1)[0]), grad_of(net_loss()))
    assert not simplex_gradient(SIZES / 100, lean.lam).any()
    found = learned(stacked(w), SIZES, full_batch(grad_of(net_loss()), 20), WeightSettings(kind))
    assert torch.equal(found.how.lam, SIZES / SIZES.sum())
    assert float(found.how.shrink) != 1.0
    # and so it is where the server's model is not that of the first client
    seen_from_zero = Stack(0 * w[0], w)
    found = learned(seen_from_zero, SIZES, full_batch(grad_of(net_loss()), 20), WeightSettings(kind))
    torch.testing.assert_close(found.how.lam, SIZES / 100, rtol=1e-6, atol=1e-7)


# -- the learner -----------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_f1_without_epochs_it_is_fedavg_to_the_bit(kind) -> None:
    stack = stacked(models(dtype=torch.float32))
    found = learned(stack, SIZES, [], WeightSettings(kind))
    assert torch.equal(found.how.lam, SIZES / SIZES.sum())
    assert float(found.how.shrink) == 1.0
    fedavg = stack.base + tree.mix((SIZES / SIZES.sum())[None], stack.moves)[0].float()
    assert torch.equal(aggregated(stack, found.how), fedavg)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.permutations(range(4)), st.sampled_from(KINDS))
def test_f4_permuting_clients_permutes_weights(order, kind) -> None:
    w, epochs = models(), full_batch(grad_of(net_loss()), 10)
    one = learned(stacked(w), SIZES, epochs, WeightSettings(kind, lr=0.05)).how
    other = learned(stacked(w[list(order)]), SIZES[list(order)], epochs, WeightSettings(kind, lr=0.05)).how
    torch.testing.assert_close(other.lam, one.lam[list(order)], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(other.shrink, one.shrink, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exp", "quad"])
def test_f5_the_client_that_is_right_takes_it_all(kind) -> None:
    w = models(P=30)
    chosen = WeightSettings(kind, lr=0.5 if kind == "exp" else 0.05, step_every=200)
    found = learned(stacked(w), torch.ones(4), full_batch(bowl(w[0]), 1000), chosen)
    assert float(found.how.lam[0]) > 0.99
    assert float(found.how.shrink) == pytest.approx(1, abs=1e-2)
    assert float(found.losses[-1]) < 1e-3 * float(found.losses[0])


def test_f7_a_capped_shrink_does_not_grow() -> None:
    w = models(P=30)
    wants_more = full_batch(bowl(1.4 * w.mean(0)), 50)
    free, capped = (
        learned(stacked(w), torch.ones(4), wants_more, WeightSettings(k, lr=0.02)) for k in ("exp", "exp_cap")
    )
    assert float(free.how.shrink) > 1.05
    assert float(capped.how.shrink) == 1.0
    wants_less = full_batch(bowl(0.8 * w.mean(0)), 50)
    assert float(learned(stacked(w), torch.ones(4), wants_less, WeightSettings("exp_cap", lr=0.02)).how.shrink) < 0.95


def test_f8_a_client_split_in_two_counts_the_same() -> None:
    w = models()
    split, halves = torch.cat([w, w[3:]]), torch.cat([SIZES[:3], SIZES[3:] / 2, SIZES[3:] / 2])
    one, other = (learned(stacked(v), s, []).how for v, s in ((w, SIZES), (split, halves)))
    torch.testing.assert_close(aggregated(stacked(split), other), aggregated(stacked(w), one))


@pytest.mark.parametrize("stage", ["joint", "two_stage"])
@pytest.mark.parametrize("kind", KINDS)
def test_f9_learning_does_not_raise_the_loss_it_descends(stage, kind) -> None:
    w, loss = models(), net_loss()
    stack = stacked(w)
    for optimizer in (SERVER_ADAM, sgd(momentum=0.9)):
        chosen = WeightSettings(kind, stage, lr=0.005, optimizer=optimizer)
        found = learned(stack, SIZES, full_batch(grad_of(loss), 24), chosen)
        begin = aggregated(stack, Weighing(SIZES / 100, vec(1)[0]))
        assert float(loss(aggregated(stack, found.how))) < float(loss(begin))


@pytest.mark.slow
def test_steps_are_those_of_torch() -> None:
    """Twenty-five epochs of two batches by torch's own Adam and StepLR, with a graph through all models."""
    w, loss = models(), net_loss()
    grads = [grad_of(loss), bowl(w[2])]
    losses = [loss, lambda v: 0.5 * (v - w[2]).square().sum()]
    found = learned(stacked(w), SIZES, [grads] * 25, WeightSettings(lr=0.02, bounds=Bounds(1e-3, 1e3)))
    a, b = (SIZES / 100).log().requires_grad_(), torch.zeros((), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([a, b], lr=0.02, betas=(0.5, 0.999))
    schedule = torch.optim.lr_scheduler.StepLR(adam, 20, 0.5)
    for _ in range(25):
        for f in losses:
            adam.zero_grad()
            f(b.exp() * a.softmax(0) @ w).backward()
            adam.step()
        schedule.step()
    torch.testing.assert_close(found.how.lam, a.softmax(0).detach(), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(found.how.shrink, b.exp().detach(), rtol=1e-7, atol=1e-10)
    assert found.losses.shape == (50,)


def test_the_two_stages_are_those_of_fedlaw() -> None:
    w, loss = models(), net_loss()
    found = learned(stacked(w), SIZES, full_batch(grad_of(loss), 40), WeightSettings(stage="two_stage"))
    a = (SIZES / 100).log().requires_grad_()
    adam = torch.optim.Adam([a], lr=0.01, betas=(0.5, 0.999))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=100)
    swa = torch.optim.swa_utils.SWALR(adam, swa_lr=0.05)
    kept = []
    for epoch in range(20):
        assert adam.param_groups[0]["lr"] == pytest.approx(swa_rate(0.01, epoch))
        adam.zero_grad()
        loss(a.softmax(0) @ w).backward()
        adam.step()
        if epoch > 5:
            kept.append(a.detach().clone())
            swa.step()
        else:
            cosine.step()
    lam = torch.stack(kept).mean(0).softmax(0)
    torch.testing.assert_close(found.how.lam, lam, rtol=1e-7, atol=1e-10)
    b = torch.zeros((), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([b], lr=0.01, betas=(0.5, 0.999))
    for _ in range(20):
        adam.zero_grad()
        loss(b.exp() * lam @ w).backward()
        adam.step()
    torch.testing.assert_close(found.how.shrink, b.exp().detach(), rtol=1e-7, atol=1e-10)


def test_few_epochs_in_two_stages_still_learn() -> None:
    found = learned(stacked(models()), SIZES, full_batch(grad_of(net_loss()), 4), WeightSettings(stage="two_stage"))
    assert not torch.equal(found.how.lam, SIZES / 100)


def test_the_rate_is_halved_every_twenty_epochs() -> None:
    assert [step_rate(WeightSettings(lr=1.0), e) for e in (0, 19, 20, 39, 40)] == [1, 1, 0.5, 0.5, 0.25]


def test_adam_moves_a_logit_by_about_its_rate() -> None:
    """Why forty steps at 0.01 cannot silence a client: no weight changes by more than e^0.8 against another."""
    w = models(P=30)
    found = learned(stacked(w), torch.ones(4), [[bowl(w[0])] * 2] * 20)
    assert float((found.how.lam.max() / found.how.lam.min()).log()) < 0.85


@pytest.mark.parametrize("learns", [True, False])
def test_a_fixed_shrink_stays(learns) -> None:
    chosen = WeightSettings("fixed", shrink=0.95, learns_weights=learns)
    found = learned(stacked(models()), SIZES, full_batch(grad_of(net_loss()), 5), chosen).how
    assert float(found.shrink) == 0.95
    assert torch.equal(found.lam, SIZES / 100) is not learns


def test_a_single_client_learns_its_shrink_alone() -> None:
    w = models()[:1]
    found = learned(stacked(w), torch.ones(1), full_batch(bowl(0.7 * w[0]), 60), WeightSettings(lr=0.02)).how
    assert found.lam.tolist() == [1.0]
    assert float(found.shrink) == pytest.approx(0.7, abs=0.02)


def test_who_has_nothing_or_sends_nonsense_is_left_out() -> None:
    w = models().clone()
    stack = Stack(w[0], torch.cat([w - w[0], models(seed=5)[:2]]))
    stack.moves[1, 3] = math.nan
    sizes = vec(10, 30, 5, 55, 0, 15)
    for epochs in (0, 5):
        found = learned(stack, sizes, full_batch(grad_of(net_loss()), epochs)).how
        assert found.lam[[1, 4]].tolist() == [0, 0]
        assert float(found.lam.sum()) == pytest.approx(1, abs=1e-12)
        assert bool(aggregated(stack, found).isfinite().all())
    keep = [0, 2, 3, 5]
    alone = learned(Stack(w[0], stack.moves[keep]), sizes[keep], full_batch(grad_of(net_loss()), 5)).how
    torch.testing.assert_close(found.lam[keep], alone.lam)
    nobody = learned(stack, 0 * sizes, full_batch(grad_of(net_loss()), 5)).how
    assert not nobody.lam.any()
    assert torch.equal(aggregated(Stack(w[0], w - w[0]), Weighing(nobody.lam[:4], nobody.shrink)), w[0])


@pytest.mark.parametrize("stage", ["joint", "two_stage"])
@pytest.mark.parametrize("kind", ["exp", "fixed"])
def test_a_loss_that_is_not_finite_takes_everything_back(kind, stage) -> None:
    w = models()
    turns = iter(range(100))

    def breaks(v):
        loss, g = bowl(w[2])(v)
        return (loss * math.nan, g) if next(turns) == 3 else (loss, g)

    found = learned(stacked(w), SIZES, full_batch(breaks, 20), WeightSettings(kind, stage, shrink=0.9))
    assert found.reverted
    assert torch.equal(found.how.lam, SIZES / 100)
    assert float(found.how.shrink) == 0.9
    infinite = learned(stacked(w), SIZES, full_batch(lambda v: (v.sum(), v * math.inf), 1))
    assert infinite.reverted


def test_updates_too_large_to_be_kept_in_float64_give_the_same_weights(monkeypatch) -> None:
    w, epochs = models(dtype=torch.float32), full_batch(grad_of(net_loss()), 20)
    kept = learned(stacked(w), SIZES, epochs)
    monkeypatch.setattr(learned_weights, "_WIDE", 0)
    torch.testing.assert_close(learned(stacked(w), SIZES, epochs), kept, rtol=1e-12, atol=0)


def test_l13_what_nobody_trains_is_never_shrunk() -> None:
    w = models(dtype=torch.float32)
    frozen = torch.arange(9) >= 6
    base = w[0]
    for _ in range(10):
        moves = (models(seed=8, dtype=torch.float32)) * ~frozen
        epochs = full_batch(grad_of(net_loss()), 3)
        found = learned(Stack(base, moves), SIZES, epochs, WeightSettings(shrink=0.9), shrinks=~frozen)
        after = aggregated(Stack(base, moves), found.how, ~frozen)
        assert torch.equal(after[frozen], w[0][frozen])
        assert float(found.how.shrink) != 1.0
        base = after
    assert float(aggregated(Stack(base, 0 * moves), Weighing(SIZES / 100, vec(0.5)[0])).norm()) < base.norm()


# -- shrinking by other rules ----------------------------------------------------------------------
def test_a_shrink_by_trying() -> None:
    w = models(P=30)
    stack, lam = stacked(w), torch.full((4,), 0.25, dtype=torch.float64)
    found = grid_shrink(stack, lam, lambda v: bowl(0.949 * w.mean(0))(v)[0])
    assert float(found.shrink) == 0.95
    assert float(grid_shrink(stack, lam, lambda v: torch.zeros(())).shrink) == 1.0  # of equals, no shrink


def test_the_bounded_rule_of_shrinking() -> None:
    w = vec(3, 4)
    alike = torch.ones(3, 2, dtype=torch.float64)
    assert float(ratio_shrink(w, alike)) == pytest.approx(1)  # nobody disagrees
    assert float(ratio_shrink(w, 0 * alike)) == 1  # nobody moves: eq. 5 would explode
    moves = torch.tensor([[2.0, 0], [0, 2]], dtype=torch.float64)
    # mean (1, 1), disagreement 4 / 8
    assert float(ratio_shrink(w, moves)) == pytest.approx(5 / (5 + 0.5 * math.sqrt(2)))
    assert float(ratio_shrink(w, 1e9 * moves)) == 0.5
    assert float(ratio_shrink(7 * w, 7 * moves)) == pytest.approx(float(ratio_shrink(w, moves)))


def test_the_printed_shrink_by_hand() -> None:
    """LAW-AFL eq. 5: eta / (E |g|^2 + eps), which nothing bounds."""
    moves = torch.tensor([[3.0, 4], [0, 0]], dtype=torch.float64)
    squares = squares_of(moves)
    assert float(printed_shrink(squares)) == pytest.approx(1 / 12.5)
    assert float(printed_shrink(squares, eta=2.0)) == pytest.approx(2 / 12.5)
    assert float(printed_shrink(squares_of(1e-3 * moves))) == pytest.approx(1 / (12.5e-6 + 1e-8))
    assert float(printed_shrink(0 * squares)) == pytest.approx(1e8)


def test_groups_are_averaged_over_those_who_train_them() -> None:
    stack = Stack(vec(1, 1, 1, 1), torch.tensor([[1.0, 1, 1, 1], [3, 3, 3, 3]], dtype=torch.float64))
    how = Weighing(vec(0.25, 0.75), vec(1)[0])
    group, depth = torch.tensor([3, 2, 1, 1]), torch.tensor([2, 1])
    assert aggregated_by_depth(stack, how, depth, group).tolist() == [1, 2, 3.5, 3.5]
    shrunk = aggregated_by_depth(stack, how._replace(shrink=vec(0.5)[0]), depth, group)
    assert shrunk.tolist() == [1, 1, 1.75, 1.75]  # what nobody trained is not shrunk either
    everything = torch.full((2,), 3)
    torch.testing.assert_close(aggregated_by_depth(stack, how, everything, group), aggregated(stack, how))


def test_fedlaw_suppresses_bad_models_only_with_enough_steps() -> None:
    """Softmax regression on digits: half of the clients have shifted labels; FedLAW's own budget barely moves."""
    x, y, _, _ = digits(64)
    owner = torch.arange(len(y)) % 10
    bad = torch.arange(10) % 2 == 1
    shifted = torch.where(bad[owner], (y + 1) % 10, y)
    w = heads(of_clients(x, shifted, owner, 10), 1.0).flatten(1) * 10

    def loss(v):
        return torch.nn.functional.cross_entropy(x[:200] @ v.view(64, 10), y[:200])

    sizes = torch.ones(10, dtype=torch.float64)
    grads = full_batch(grad_of(loss), 100)
    little = learned(stacked(w), sizes, grads[:20], WeightSettings(lr=0.01)).how.lam[bad].sum()
    much = learned(stacked(w), sizes, grads, WeightSettings(lr=0.1, step_every=100)).how.lam[bad].sum()
    assert float(little) > 0.35
    assert float(much) < 0.1
