"""Learned aggregation weights of models: the weight of each client, and the shrinkage of the result.

FedLAW (Li et al., Revisiting Weighted Aggregation in Federated Learning with Neural Networks, ICML 2023):

    w = gamma sum_i lambda_i w_i,    lambda = softmax(a), gamma = e^b

a and b minimise the loss on the server's proxy examples. That needs no graph through all clients: one backward pass of
the aggregate gives g, and two products with the stacked clients do the rest. Everything is a function of its arguments:
the batches are passed in, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.core.optim import Optimizer, adam
from fedloom.core.replay import Recorder, repeated
from fedloom.maths.as_printed import printed_shrink
from fedloom.maths.proxy_set import Gradient
from fedloom.maths.weighted_ridge import inner, off_mean, simplex_gradient

SERVER_ADAM = adam(beta1=0.5, beta2=0.999)  # as in FedLAW's code


class Weighing(NamedTuple):
    """The weights of clients: mu_i = shrink * lam_i."""

    lam: Tensor  # [m] at least 0, sums to 1
    shrink: Tensor  # [] gamma_s

    @property
    def mu(self) -> Tensor:
        return self.shrink * self.lam


# -- parametrisations ------------------------------------------------------------------------------
WeightForm: TypeAlias = Literal["exp", "quad", "exp_cap", "fixed"]


class Free(NamedTuple):
    """What is learned: logits a and b = ln gamma; under ``quad`` roots u of lambda and v of gamma."""

    a: Tensor  # [m]
    b: Tensor  # []


def initial(kind: WeightForm, lam: Tensor, shrink: float = 1.0) -> Free:
    """The parameters of these weights, all of which are positive."""
    b = lam.new_tensor(math.sqrt(shrink) if kind == "quad" else math.log(shrink))
    return Free(lam.sqrt() if kind == "quad" else lam.log(), b)


def weighing(kind: WeightForm, free: Free) -> Weighing:
    """exp: lambda = softmax(a), gamma = e^b; exp_cap: gamma = e^min(b, 0); quad: lambda = u^2 / sum u^2, gamma = v^2.

    LAW-AFL, Algorithm 3 line 13 descends lambda itself, which leaves the simplex; and its gamma, which should
    be in (0, 1], is unbounded unless it is capped.
    """
    if kind == "quad":
        squares = free.a.square()
        return Weighing(squares / squares.sum(), free.b.square())
    return Weighing(free.a.softmax(0), (free.b.clamp(max=0) if kind == "exp_cap" else free.b).exp())


def pulled_back(kind: WeightForm, free: Free, lam: Tensor, along_lam: Tensor, along_log_shrink: Tensor) -> Free:
    """The gradient with respect to the parameters, from those of lambda and ln gamma."""
    if kind == "quad":
        return Free(2 * free.a / free.a.square().sum() * off_mean(lam, along_lam), 2 * along_log_shrink / free.b)
    return Free(simplex_gradient(lam, along_lam), along_log_shrink)


class Bounds(NamedTuple):
    """The bounds of gamma while it is learned."""

    low: float
    high: float

    def reached(self, shrink: Tensor) -> Tensor:
        """1 if gamma is at one of its bounds, else 0.  ``[]``"""
        on = (shrink <= self.low * (1 + 1e-6)) | (shrink >= self.high * (1 - 1e-6))
        return on.to(shrink.dtype)


def of_kind(kind: WeightForm, bounds: Bounds) -> Bounds:
    """These bounds; under exp_cap gamma does not exceed 1 either."""
    return bounds._replace(high=min(bounds.high, 1.0)) if kind == "exp_cap" else bounds


def check_bounds(shrink: float, bounds: Bounds, prefix: str = "") -> None:
    """Refuse an initial gamma outside of its bounds."""
    if not bounds.low <= shrink <= bounds.high:
        ends = f"{prefix}shrink_min = {bounds.low:g} and {prefix}shrink_max = {bounds.high:g}"
        raise ValueError(f"gamma begins at {shrink:g}, which is not between {ends}")


OF_MODELS = Bounds(0.5, 1.5)  # FedLAW's gamma multiplies the model in every round
OF_HEADS = Bounds(0.05, 20.0)  # in a closed form gamma only divides the ridge

_REACH = 20.0  # of logits from their mean


def bounded(kind: WeightForm, free: Free, bounds: Bounds = OF_MODELS) -> Free:
    """Parameters with gamma within its bounds and logits within a reach of their mean.

    Roots have bounds of the same effect: no weight is below e^-40 of another, and none is ever 0.
    """
    low, high = of_kind(kind, bounds)
    if kind == "quad":
        u = free.a.abs()
        u = u.clamp(min=math.exp(-_REACH) * u.max()).copysign(free.a)
        return Free(u, free.b.clamp(math.sqrt(low), math.sqrt(high)))
    centre = free.a.mean(-1, keepdim=True)
    b = free.b if kind == "fixed" else free.b.clamp(math.log(low), math.log(high))
    return Free(free.a.clamp(centre - _REACH, centre + _REACH), b)


# -- FedLAW: weights of models ---------------------------------------------------------------------
class Stack(NamedTuple):
    """Models w_i = base + moves_i: the server's model and the clients' updates."""

    base: Tensor  # [P]
    moves: Tensor  # [m, P]


def aggregated(stack: Stack, how: Weighing, shrinks: Tensor | None = None) -> Tensor:
    """w = gamma (base + sum_i lambda_i moves_i), where gamma is 1 outside of ``shrinks``.  ``[P]``

    LAW-AFL, Algorithm 1 line 9 multiplies by gamma twice, Algorithm 3 line 14 not at all.
    ``shrinks`` ``[P]`` must be false for layers that no client trains: 0.95 in each of 120 rounds leaves 0.2 % of them.
    """
    counted = how.lam != 0  # an update without weight need not be finite
    if not bool(counted.all()):
        stack, how = Stack(stack.base, stack.moves[counted]), how._replace(lam=how.lam[counted])
    return _aggregated(stack, how, shrinks)


def _aggregated(stack: Stack, how: Weighing, shrinks: Tensor | None) -> Tensor:
    """``aggregated`` of finite updates, whatever their weight."""
    mean = stack.base + tree.mix(how.lam[None], stack.moves)[0].to(stack.base.dtype)
    return mean * _scale(how.shrink, shrinks, mean)


def _scale(shrink: Tensor, shrinks: Tensor | None, like: Tensor) -> Tensor:
    """gamma for each parameter, as one number if it is the same for all."""
    shrink = shrink.to(like)
    return shrink if shrinks is None else torch.where(shrinks, shrink, torch.ones_like(shrink))


class Lean(NamedTuple):
    """The proxy loss of the aggregate, and its slopes."""

    loss: Tensor  # []
    lam: Tensor  # [m] gamma <g, w_i>, up to a constant that is the same for all i
    log_shrink: Tensor  # [] gamma <g, w>


def lean_gradient(
    stack: Stack, how: Weighing, grad: Callable[[Tensor], tuple[Tensor, Tensor]], shrinks: Tensor | None = None
) -> Lean:
    """One backward pass of the aggregated model and two products with the stacked updates.

    dL/da_i = gamma lambda_i (<g, w_i> - <g, sum_j lambda_j w_j>) and dL/db = gamma <g, sum_j lambda_j w_j>.
    """
    w = _aggregated(stack, how, shrinks)
    loss, g = grad(w)
    shrinking = g if shrinks is None else g * shrinks
    return Lean(
        loss.double(), inner(stack.moves, g * _scale(how.shrink, shrinks, g)), inner(shrinking[None], w).squeeze(0)
    )


class WeightSettings(NamedTuple):
    """How FedLAW's server learns; the number of epochs is that of the batches it is given."""

    kind: WeightForm = "exp"
    stage: Literal["joint", "two_stage"] = "joint"
    lr: float = 0.01  # Adam changes a logit by about this much in a step: 40 steps change a weight by e^0.4 at most
    optimizer: Optimizer = SERVER_ADAM
    step_every: int = 20  # epochs between decays of lr
    decay: float = 0.5
    shrink: float = 1.0  # gamma at the start, which ``fixed`` keeps
    learns_weights: bool = True  # False: weights stay by size, and only gamma is learned
    bounds: Bounds = OF_MODELS


AS_FEDLAW = WeightSettings()


class LearnedWeights(NamedTuple):
    """What the server has learned in a round."""

    how: Weighing
    losses: Tensor  # [steps] each at the weights before its step
    reverted: bool  # a loss was not finite, so the weights are the initial ones


def learn_weights(
    stack: Stack,
    start: Tensor,
    gradient: Gradient,
    epochs: Sequence[Sequence[Any]],
    settings: WeightSettings = AS_FEDLAW,
    shrinks: Tensor | None = None,
    recorder: Recorder | None = None,
) -> LearnedWeights:
    """Learn lambda and gamma, each epoch along the gradient on each of its batches.

    ``start`` ``[m]`` are the initial weights of clients, in FedAvg their sizes; they need not sum to 1. LAW-AFL,
    Algorithm 3 line 12 divides sizes by that of the proxy set, so that they sum to far more. A client without weight
    or with a number that is not finite is left out. If nothing is learned, lambda is ``start`` over its sum, bit for
    bit. If no client is left, all of lambda is 0 and the aggregate is the base.
    """
    usable = tree.finite_rows(stack.moves, len(start)) & (start > 0)
    lam0 = torch.where(usable, start.double(), 0.0)
    lam0 = lam0 / lam0.sum().clamp(min=1e-300)
    begin = Weighing(lam0, lam0.new_tensor(settings.shrink))
    if not bool(usable.any()):
        return LearnedWeights(begin, lam0.new_zeros(0), False)
    some = _in_float64(stack if bool(usable.all()) else Stack(stack.base, stack.moves[usable]))
    first = initial(settings.kind, lam0[usable], settings.shrink)
    descent = _Descent(some, shrinks, gradient, settings, recorder)
    last, losses = _LEARNERS[settings.stage](descent, first, epochs)
    if not all(bool(x.isfinite().all()) for x in (losses, *last)):
        return LearnedWeights(begin, losses, True)
    found = weighing(settings.kind, last)
    lam = lam0 if torch.equal(last.a, first.a) else lam0.masked_scatter(usable, found.lam)
    return LearnedWeights(Weighing(lam, begin.shrink if torch.equal(last.b, first.b) else found.shrink), losses, False)


_WIDE = 1 << 26  # numbers in updates that are kept in float64 as well: 0.5 GB


def _in_float64(stack: Stack) -> Stack:
    """The same stack, converted once instead of twice in every step, unless that takes too much memory."""
    return stack if stack.moves.numel() > _WIDE else stack._replace(moves=stack.moves.double())


class _Way(NamedTuple):
    points: list[Free]  # the start, and the end of each epoch
    losses: Tensor  # [steps]


class _Point(NamedTuple):
    free: Free
    memory: Any  # of the optimizer
    loss: Tensor  # [] at the weights before the step


class _Descent(NamedTuple):
    """The proxy loss of what is aggregated from a stack, as a function of the parameters of its weights."""

    stack: Stack
    shrinks: Tensor | None
    gradient: Gradient
    settings: WeightSettings
    recorder: Recorder | None

    def way(
        self, free: Free, epochs: Sequence[tuple[Sequence[Any], float]], *, of_a: bool = True, of_b: bool = True
    ) -> _Way:
        """Minimise over one or both parameters, with the learning rate of each epoch.

        It goes on after a loss that is not finite, since to ask would stop a GPU in every step: the caller looks at
        all of them.
        """
        settings, gradient, ends = self.settings, self.gradient, [*accumulate((len(b) for b, _ in epochs), initial=0)]
        moves_a, moves_b = of_a and settings.learns_weights, of_b and settings.kind != "fixed"

        def step(fixed: tuple[Stack, Any], at: _Point, x: tuple[Any, Tensor]) -> _Point:
            (stack, shrinks), (batch, lr) = fixed, x
            how = weighing(settings.kind, at.free)
            lean = lean_gradient(stack, how, lambda w: gradient(w, batch), shrinks if len(shrinks) else None)
            along = pulled_back(settings.kind, at.free, how.lam, lean.lam, lean.log_shrink)
            still = tree.tmap(torch.zeros_like, along)
            along = Free(along.a if moves_a else still.a, along.b if moves_b else still.b)
            moved, memory = settings.optimizer.update(along, at.memory, at.free, lr)
            return _Point(bounded(settings.kind, moved, settings.bounds), memory, lean.loss)

        first = _Point(free, settings.optimizer.init(free), torch.zeros_like(free.b))
        rates = free.b.new_tensor([rate for _, rate in epochs])
        inputs = ((batch, lr) for (batches, _), lr in zip(epochs, rates, strict=True) for batch in batches)
        fixed = self.stack, () if self.shrinks is None else self.shrinks
        points = [first, *repeated(step, fixed, first, inputs, self.recorder, ("weights", settings, moves_a, moves_b))]
        losses = [point.loss[None] for point in points[1:]]
        return _Way([points[end].free for end in ends], torch.cat([free.a.new_zeros(0), *losses]))


def _jointly(descent: _Descent, free: Free, epochs: Sequence[Sequence[Any]]) -> tuple[Free, Tensor]:
    """lambda and gamma at once, the rate decayed every ``step_every`` epochs."""
    way = descent.way(free, [(batches, step_rate(descent.settings, e)) for e, batches in enumerate(epochs)])
    return way.points[-1], way.losses


def _in_two_stages(descent: _Descent, free: Free, epochs: Sequence[Sequence[Any]]) -> tuple[Free, Tensor]:
    """First lambda, as the mean of the points after epoch 5 (SWA), then gamma; half of the epochs each.

    FedLAW's code returns the starting point if there are no more than six epochs; here it is the last one.
    """
    settings, half = descent.settings, len(epochs) // 2
    one = descent.way(free, [(epochs[e], swa_rate(settings.lr, e)) for e in range(half)], of_b=False)
    averaged = one.points[SWA_START + 2 :] or one.points[-1:]
    free = free._replace(a=torch.stack([point.a for point in averaged]).mean(0))
    two = descent.way(free, [(epochs[half + e], step_rate(settings, e)) for e in range(half)], of_a=False)
    return two.points[-1], torch.cat([one.losses, two.losses])


_LEARNERS = {"joint": _jointly, "two_stage": _in_two_stages}


def step_rate(settings: WeightSettings, epoch: int) -> float:
    """lr * decay^(epoch // step_every), as torch's StepLR."""
    return settings.lr * settings.decay ** (epoch // settings.step_every)


SWA_START = 5  # iterates are averaged after the epochs above this one, counted from 0


def swa_rate(lr: float, epoch: int, swa_lr: float = 0.05, anneal: int = 10, period: int = 100) -> float:
    """A cosine of period 100 until averaging starts, then one towards swa_lr within 10 epochs, as torch's SWALR."""
    start = SWA_START + 1
    before = lr * (1 + math.cos(math.pi * min(epoch, start) / period)) / 2
    done = (1 - math.cos(math.pi * min(1.0, max(0, epoch - start) / anneal))) / 2
    return before * (1 - done) + swa_lr * done


_TRIED = (1.00, 0.99, 0.97, 0.95, 0.93, 0.90)  # of ties the first wins


def grid_shrink(
    stack: Stack,
    lam: Tensor,
    loss: Callable[[Tensor], Tensor],
    shrinks: Tensor | None = None,
) -> Weighing:
    """gamma by grid search: the one of least proxy loss, the largest of ties."""
    tried = [Weighing(lam, lam.new_tensor(shrink)) for shrink in _TRIED]
    losses = torch.stack([loss(aggregated(stack, how, shrinks)).double() for how in tried])
    return tried[int(losses.argmin())]


def ratio_shrink(mean: Tensor, moves: Tensor, low: float = 0.5) -> Tensor:
    """gamma = |w| / (|w| + |g| v) in [low, 1], with g the mean update and v how much updates disagree.  ``[]``

    v = sum_i |g_i - g|^2 / sum_i |g_i|^2. It replaces LAW-AFL eq. 5: see ``as_printed``.
    """
    m = len(moves)
    length = tree.mix(torch.full((1, m), 1 / m, device=moves.device), moves)[0].norm()
    squares = squares_of(moves).sum()
    v = (1 - m * length.square() / squares.clamp(min=1e-300)).clamp(0, 1)
    size = mean.double().norm()
    down = length * v
    return torch.where(down > 0, size / (size + down).clamp(min=1e-300), torch.ones_like(down)).clamp(low, 1.0)


def squares_of(moves: Tensor) -> Tensor:
    """The squared norm of each update.  ``[m]``"""
    return torch.stack([one.double().square().sum() for one in moves])


ShrinkRule: TypeAlias = Literal["law", "grid", "ratio", "eq5", "eq5_moves"]


def settings_for(rule: ShrinkRule, settings: WeightSettings) -> WeightSettings:
    """How weights are learned if gamma comes from a rule: with gamma = 1, unless it is learned with them."""
    return settings if rule == "law" else settings._replace(kind="fixed", shrink=1.0)


def with_shrink(
    rule: ShrinkRule,
    how: Weighing,
    stack: Stack,
    loss: Callable[[Tensor], Tensor],
    settings: WeightSettings,
    slopes: Tensor | None = None,
    shrinks: Tensor | None = None,
) -> Weighing:
    """Learned weights with gamma by a rule: as learned, tried on a grid, by disagreement, or by eq. 5.

    Eq. 5 takes ``slopes`` ``[m]``, the squared norms of the clients' gradients at the base, or those of their updates.
    """
    if rule == "grid":
        return grid_shrink(stack, how.lam, loss, shrinks=shrinks)
    if rule == "ratio":
        return how._replace(shrink=ratio_shrink(aggregated(stack, how), stack.moves, low=settings.bounds.low))
    if rule == "law":
        return how
    squares = slopes if rule == "eq5" else squares_of(stack.moves)
    assert squares is not None, "eq. 5 needs the clients' gradients"
    return how._replace(shrink=printed_shrink(squares, settings.shrink))


def aggregated_by_depth(stack: Stack, how: Weighing, depth: Tensor, group: Tensor) -> Tensor:
    """The aggregate of clients that train the groups 1 .. depth_i ``[m]`` of layers only; 1 is the head.  ``[P]``

    w_g = gamma (base_g + sum_i lambda_i moves_ig / sum_i lambda_i), over the clients with depth_i >= g; a group that
    no client trains is unchanged, bit for bit. ``group`` ``[P]`` is the group of each parameter.
    """
    out = stack.base.clone()
    for g in range(1, int(group.max()) + 1):
        lam = how.lam * (depth >= g)
        here = group == g
        if bool(lam.sum() > 0):
            part = Stack(stack.base[here], stack.moves[:, here])
            out[here] = aggregated(part, Weighing(lam / lam.sum(), how.shrink))
    return out


def remembered(offsets: Tensor, ids: Tensor, how: Weighing, lam0: Tensor) -> Tensor:
    """ln(lambda_i / lambda0_i) of every client ``[N]`` after these have been learned; 0 for one never seen.

    In this form, a client that joins later starts from its lambda0, and the others from what was learned for them.
    """
    out = offsets.clone()
    counts = lam0 > 0
    out[ids[counts]] = how.lam[counts].log() - lam0[counts].log()
    return out


def squared_gradient(total: Tensor, examples: Tensor) -> Tensor:
    """|grad F_i|^2 of a client, from the sum over its examples of their gradients.  ``[1]``"""
    return (total / examples).square().sum()[None]


def shrink_diagnostics(name: str, shrink: Tensor, rule: ShrinkRule, settings: WeightSettings) -> dict[str, Tensor]:
    """gamma, and whether it is at a bound, if it has any."""
    found = {f"{name}/shrink": shrink}
    if rule != "law" or settings.kind == "fixed":
        return found
    return found | {f"{name}/shrink_bounded": of_kind(settings.kind, settings.bounds).reached(shrink)}
