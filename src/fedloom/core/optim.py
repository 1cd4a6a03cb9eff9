"""Local optimizers as two pure functions over trees; one function of settings makes each.

Every public function of this module that returns an ``Optimizer`` is one that ``local.optimizer`` may
name, and its keyword arguments are its settings. A user's own is named ``file.py:function``.
Where torch has an optimizer of the same name, this is the same one, step for step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import torch
from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails
from torch import Tensor

from fedloom.core import tree, usercode
from fedloom.core.errors import ConfigError, Fault, nearest
from fedloom.core.schema import Spec, When, disagreement, other_than, over, reported_again, when, worded


class Optimizer(NamedTuple):
    """``init`` returns the initial state; ``update`` takes one step.

    Many clients are stepped side by side: the state is a tree of tensors, in which counters have no
    dimension, and control flow must not depend on the value of a tensor.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any, Tensor], tuple[Any, Any]]  # (gradient, state, x, lr) -> (x, state)


def sgd(*, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0, clip: float = 0.0) -> Optimizer:
    """Stochastic gradient descent: x <- x - lr v, where v <- momentum v + g."""

    def init(x: Any) -> Any:
        return tree.tmap(torch.zeros_like, x) if momentum else ()

    def update(g: Any, memory: Any, x: Any, lr: Tensor) -> tuple[Any, Any]:
        g = prepared(g, x, weight_decay, clip)
        if momentum:
            memory = tree.tmap(lambda v, d: momentum * v + d, memory, g)
            g = tree.tmap(lambda d, v: d + momentum * v, g, memory) if nesterov else memory
        return moved(x, g, lr), memory

    return Optimizer(init, update)


class Average(NamedTuple):
    """The state of averaged SGD."""

    step: Tensor  # [] steps so far
    ax: Any  # the mean of the points since step t0; before, the point itself


def asgd(
    *, lambd: float = 1e-4, power: float = 0.75, t0: float = 1e6, weight_decay: float = 0.0, clip: float = 0.0
) -> Optimizer:
    """Averaged SGD: x <- (1 - lambd eta) x - eta g, where eta = lr / (1 + lambd lr t)^power; it keeps the mean of x.

    eta uses the learning rate of this step; torch uses that of the previous step.
    """

    def init(x: Any) -> Average:
        return Average(no_steps(x), tree.tmap(torch.zeros_like, x))

    def update(g: Any, memory: Average, x: Any, lr: Tensor) -> tuple[Any, Average]:
        g = prepared(g, x, weight_decay, clip)
        t = memory.step
        eta = lr / (1 + lambd * lr * t) ** power
        x = moved(tree.tmap(lambda p: p * (1 - lambd * eta).to(p.dtype), x), g, eta)
        mu = 1 / (t - t0).clamp(min=1)  # 1 before t0, where lerp gives the point to the bit
        ax = tree.tmap(lambda a, p: a.lerp(p, mu.to(p.dtype)), memory.ax, x)
        return x, Average(t + 1, ax)

    return Optimizer(init, update)


class Moments(NamedTuple):
    """The state of Adam and its variants."""

    step: Tensor  # [] steps so far
    m: Any  # running mean of the gradients
    v: Any  # and of their squares


def adam(
    *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0, clip: float = 0.0
) -> Optimizer:
    """Adam: x <- x - lr m' / (sqrt(v') + eps), where m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t)."""

    def update(g: Any, memory: Moments, x: Any, lr: Tensor) -> tuple[Any, Moments]:
        t, m, v = memory = _moments(prepared(g, x, weight_decay, clip), memory, beta1, beta2)
        root = (1 - beta2**t).sqrt()
        d = tree.tmap(lambda m, v: m / (v.sqrt() / root.to(v.dtype) + eps), m, v)
        return moved(x, d, lr / (1 - beta1**t)), memory

    return Optimizer(_no_moments, update)


def radam(
    *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0, clip: float = 0.0
) -> Optimizer:
    """Rectified Adam: x <- x - lr m' r / (sqrt(v') + eps) with r up to 1; while rho <= 5, x <- x - lr m'."""
    rho_inf = 2 / (1 - beta2) - 1

    def update(g: Any, memory: Moments, x: Any, lr: Tensor) -> tuple[Any, Moments]:
        t, m, v = memory = _moments(prepared(g, x, weight_decay, clip), memory, beta1, beta2)
        rho = rho_inf - 2 * t * beta2**t / (1 - beta2**t)
        # If rho <= 5, this root may not be real, and is not used.
        r = ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)).sqrt()
        scale = r * (1 - beta2**t).sqrt()
        d = tree.tmap(lambda m, v: m * torch.where(rho > 5, scale.to(v.dtype) / (v.sqrt() + eps), 1.0), m, v)
        return moved(x, d, lr / (1 - beta1**t)), memory

    return Optimizer(_no_moments, update)


class Squares(NamedTuple):
    """The state of RMSprop."""

    v: Any  # running mean of the squared gradients
    velocity: Any  # () without momentum


def rmsprop(
    *, rho: float = 0.99, eps: float = 1e-8, momentum: float = 0.0, weight_decay: float = 0.0, clip: float = 0.0
) -> Optimizer:
    """RMSprop: x <- x - lr u, where u <- momentum u + g / (sqrt(v) + eps) and v <- rho v + (1 - rho) g^2."""

    def init(x: Any) -> Squares:
        return Squares(tree.tmap(torch.zeros_like, x), tree.tmap(torch.zeros_like, x) if momentum else ())

    def update(g: Any, memory: Squares, x: Any, lr: Tensor) -> tuple[Any, Squares]:
        g = prepared(g, x, weight_decay, clip)
        v = tree.tmap(lambda v, d: v.lerp(d.square(), 1 - rho), memory.v, g)
        u = tree.tmap(lambda d, v: d / (v.sqrt() + eps), g, v)
        if momentum:
            u = tree.tmap(lambda old, d: momentum * old + d, memory.velocity, u)
        return moved(x, u, lr), Squares(v, u if momentum else ())

    return Optimizer(init, update)


class AdagradMemory(NamedTuple):
    """The state of AdaGrad."""

    step: Tensor  # [] steps so far
    sum: Any  # of the squared gradients


def adagrad(
    *,
    lr_decay: float = 0.0,
    initial_sum: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    clip: float = 0.0,
) -> Optimizer:
    """AdaGrad: x <- x - lr / (1 + lr_decay t) g / (sqrt(s) + eps), where s <- s + g^2."""

    def init(x: Any) -> AdagradMemory:
        return AdagradMemory(no_steps(x), tree.tmap(lambda p: torch.full_like(p, initial_sum), x))

    def update(g: Any, memory: AdagradMemory, x: Any, lr: Tensor) -> tuple[Any, AdagradMemory]:
        g = prepared(g, x, weight_decay, clip)
        s = tree.tmap(lambda s, d: torch.addcmul(s, d, d), memory.sum, g)
        d = tree.tmap(lambda d, s: d / (s.sqrt() + eps), g, s)
        return moved(x, d, lr / (1 + lr_decay * memory.step)), AdagradMemory(memory.step + 1, s)

    return Optimizer(init, update)


class Deltas(NamedTuple):
    """The state of AdaDelta."""

    v: Any  # running mean of the squared gradients
    u: Any  # and of the squared steps


def adadelta(*, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0, clip: float = 0.0) -> Optimizer:
    """AdaDelta: x <- x - lr d, where d = sqrt(u + eps) / sqrt(v + eps) g; v and u are means of g^2 and d^2."""

    def init(x: Any) -> Deltas:
        return Deltas(tree.tmap(torch.zeros_like, x), tree.tmap(torch.zeros_like, x))

    def update(g: Any, memory: Deltas, x: Any, lr: Tensor) -> tuple[Any, Deltas]:
        g = prepared(g, x, weight_decay, clip)
        v = tree.tmap(lambda v, d: v.lerp(d.square(), 1 - rho), memory.v, g)
        d = tree.tmap(lambda u, v, d: (u + eps).sqrt() / (v + eps).sqrt() * d, memory.u, v, g)
        u = tree.tmap(lambda u, d: u.lerp(d.square(), 1 - rho), memory.u, d)
        return moved(x, d, lr), Deltas(v, u)

    return Optimizer(init, update)


# -- common parts ----------------------------------------------------------------------------------
def prepared(g: Any, x: Any, weight_decay: float, clip: float) -> Any:
    """The gradient, first clipped, then with weight decay."""
    if clip:
        g = clipped(g, clip)
    if weight_decay:
        g = tree.tmap(lambda d, p: d + weight_decay * p, g, x)
    return g


def clipped(g: Any, limit: float) -> Any:
    """``g`` scaled down so that its norm, over all leaves together, is at most ``limit``."""
    norm = torch.stack([leaf.square().sum() for leaf in tree.leaves(g)]).sum().sqrt()
    scale = limit / norm.clamp(min=limit)
    return tree.tmap(lambda d: d * scale, g)


def moved(x: Any, direction: Any, rate: Tensor) -> Any:
    """``x - rate * direction``, in the precision of ``x``."""
    return tree.tmap(lambda p, d: torch.addcmul(p, d, rate.to(p.dtype), value=-1.0), x, direction)


def no_steps(x: Any) -> Tensor:
    """A counter at zero, on the device of ``x``.  ``[]``

    In float64, as are the values computed from it: 1 - 0.999^t and RAdam's rho are small differences.
    """
    return tree.leaves(x)[0].new_zeros((), dtype=torch.float64)


def _no_moments(x: Any) -> Moments:
    return Moments(no_steps(x), tree.tmap(torch.zeros_like, x), tree.tmap(torch.zeros_like, x))


def _moments(g: Any, old: Moments, beta1: float, beta2: float) -> Moments:
    m = tree.tmap(lambda m, d: m.lerp(d, 1 - beta1), old.m, g)
    v = tree.tmap(lambda v, d: v.lerp(d.square(), 1 - beta2), old.v, g)
    return Moments(old.step + 1, m, v)


# -- finding them by name --------------------------------------------------------------------------
Maker = Callable[..., Optimizer]


@cache
def optimizers() -> Mapping[str, Maker]:
    """Every optimizer of fedloom by name: the public functions of this module that return one."""
    here = [f for f in globals().values() if inspect.isfunction(f) and f.__module__ == __name__]
    return {f.__name__: f for f in here if f.__name__[0] != "_" and get_type_hints(f).get("return") is Optimizer}


def find_optimizer(name: str, at: str) -> Maker:
    """The function of settings that makes the optimizer of this name, fedloom's or the user's own."""
    if usercode.is_reference(name):
        own: Maker = usercode.load_code(name, at)
        if not usercode.is_written(own, name):
            what = f"'{name}' is not a function that returns a fedloom.core.optim.Optimizer"
            raise ConfigError([Fault(at, what, "a function that a .py file defines is needed, as file.py:function")])
        return own
    known = optimizers()
    if name not in known:
        raise ConfigError([Fault(at, f"there is no optimizer '{name}'", nearest(name, known))])
    return known[name]


@cache
def takes(make: Maker) -> tuple[str, ...]:
    """The names of an optimizer's settings."""
    return tuple(inspect.signature(make).parameters)


def _defaults(setting: str) -> str:
    """The default of a setting for each optimizer that has it, such as ``adam 0.9, radam 0.9``."""
    each = {name: inspect.signature(make).parameters for name, make in optimizers().items()}
    return ", ".join(f"{name} {has[setting].default:g}" for name, has in each.items() if setting in has)


class Takes(NamedTuple):
    """Whether the chosen optimizer has this setting; an unknown optimizer is reported elsewhere."""

    setting: str

    def holds(self, value: Any) -> bool:
        try:
            return not isinstance(value, str) or self.setting in takes(find_optimizer(value, "local.optimizer"))
        except ConfigError:
            return True

    def words(self, name: str) -> str:
        *others, last = [owner for owner, make in optimizers().items() if self.setting in takes(make)]
        return f"{name} is {', '.join(others)} or {last}" if others else f"{name} is {last}"


# Clients of a closed form may only send sums over their data.
TAKES_STEPS = {"algorithm.takes_steps": worded(True, "clients take local steps", "those of this algorithm take none")}


def of_optimizer(setting: str, **tests: Any) -> When:
    """The setting has an effect if clients take steps and the chosen optimizer has it."""
    return when(TAKES_STEPS, optimizer=Takes(setting), **tests)


class Local(Spec):
    """How a client trains in one round."""

    model_config = ConfigDict(extra="allow")  # for the settings of a user's own optimizer; others are refused below

    optimizer: Annotated[str, when(TAKES_STEPS)] = Field(
        "sgd", description=f"the local optimizer: {', '.join(optimizers())}, or your own, as file.py:function"
    )
    lr: Annotated[PositiveFloat, when(TAKES_STEPS)] = Field(0.1, description="learning rate of the first round")
    momentum: Annotated[float, of_optimizer("momentum")] = Field(
        0.0, ge=0, lt=1, description="momentum coefficient (sgd, rmsprop)"
    )
    nesterov: Annotated[bool, of_optimizer("nesterov", momentum=over(0))] = Field(
        False, description="look ahead along the momentum (sgd)"
    )
    weight_decay: Annotated[NonNegativeFloat, of_optimizer("weight_decay")] = Field(
        0.0, description="weight decay, added to the gradient"
    )
    clip: Annotated[NonNegativeFloat, of_optimizer("clip")] = Field(
        0.0, description="largest norm of a gradient; 0: no clipping"
    )
    beta1: Annotated[float | None, of_optimizer("beta1")] = Field(
        None, ge=0, lt=1, description=f"decay of the first moment; unset: {_defaults('beta1')}"
    )
    beta2: Annotated[float | None, of_optimizer("beta2")] = Field(
        None, ge=0, lt=1, description=f"decay of the second moment; unset: {_defaults('beta2')}"
    )
    rho: Annotated[float | None, of_optimizer("rho")] = Field(
        None, ge=0, lt=1, description=f"decay of the mean squared gradient; unset: {_defaults('rho')}"
    )
    eps: Annotated[PositiveFloat | None, of_optimizer("eps")] = Field(
        None, description=f"added to the denominator of a step, so that it is never 0; unset: {_defaults('eps')}"
    )
    lambd: Annotated[NonNegativeFloat | None, of_optimizer("lambd")] = Field(
        None, description=f"weight decay and decay of the rate in ASGD; unset: {_defaults('lambd')}"
    )
    power: Annotated[NonNegativeFloat | None, of_optimizer("power")] = Field(
        None, description=f"power of ASGD's rate, torch's alpha; unset: {_defaults('power')}"
    )
    t0: Annotated[NonNegativeFloat | None, of_optimizer("t0")] = Field(
        None, description=f"steps after which ASGD begins to average; unset: {_defaults('t0')}"
    )
    lr_decay: Annotated[NonNegativeFloat | None, of_optimizer("lr_decay")] = Field(
        None, description=f"after t steps the rate is lr / (1 + lr_decay t); unset: {_defaults('lr_decay')}"
    )
    initial_sum: Annotated[NonNegativeFloat | None, of_optimizer("initial_sum")] = Field(
        None, description=f"initial value of the sum of squared gradients; unset: {_defaults('initial_sum')}"
    )
    state: Annotated[
        Literal["reset", "persist"],
        when(TAKES_STEPS, optimizer=other_than("sgd")) | when(TAKES_STEPS, momentum=over(0)),
    ] = Field("reset", description="the optimizer's state: reset in each round, or kept by each client between rounds")
    epochs: Annotated[PositiveInt, when(TAKES_STEPS, steps=None)] = Field(
        1, description="passes over the client's data"
    )
    steps: Annotated[PositiveInt | None, when(TAKES_STEPS)] = Field(
        None, description="exact number of local steps, instead of epochs"
    )
    batch: Annotated[int, when(TAKES_STEPS)] = Field(
        10, ge=0, description="examples in a step; 0: all of the client's data"
    )
    drop_last: Annotated[bool, when(TAKES_STEPS, batch=over(0))] = Field(
        False, description="drop a last batch that is not full, unless it is the client's only one"
    )
    wrap_last: Annotated[bool, when(TAKES_STEPS, batch=over(0))] = Field(
        False, description="fill an incomplete last batch by beginning a new pass over the data, as FLGo does"
    )
    schedule: Annotated[Literal["constant", "exponential", "step", "cosine"], when(TAKES_STEPS)] = Field(
        "constant", description="schedule of the learning rate over rounds"
    )
    decay: Annotated[float, when(TAKES_STEPS, schedule=("exponential", "step"))] = Field(
        0.99, gt=0, le=1, description="factor per round (exponential) or per step_every rounds (step)"
    )
    step_every: Annotated[PositiveInt, when(TAKES_STEPS, schedule="step")] = Field(
        100, description="rounds between decays"
    )

    @model_validator(mode="wrap")
    @classmethod
    def _settings_agree(cls, given: Any, make: ModelWrapValidatorHandler[Local]) -> Local:
        """Check the settings together even if one of them is invalid, so that no fault hides another."""
        wrong = list(_disagreements(given)) if isinstance(given, Mapping) else []
        try:
            local = make(given)
            wrong += [] if wrong else _misfits(local)
        except ValidationError as error:
            wrong = [reported_again(fault) for fault in error.errors()] + wrong
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return local

    def make_optimizer(self) -> Optimizer:
        make, given = find_optimizer(self.optimizer, "local.optimizer"), dict(self)
        return make(**{key: given[key] for key in takes(make) if given.get(key) is not None})

    def lr_at(self, round_: int, rounds: int) -> float:
        """The learning rate of round ``round_`` (counted from 0) of ``rounds``."""
        if self.schedule == "exponential":
            return self.lr * self.decay**round_
        if self.schedule == "step":
            return self.lr * self.decay ** (round_ // self.step_every)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * round_ / rounds))
        return self.lr


def _disagreements(given: Mapping[str, Any]) -> Iterator[InitErrorDetails]:
    """What is wrong between the settings of the local section, as they were written."""
    name = given.get("optimizer", Local.model_fields["optimizer"].default)
    has = None  # the settings of the optimizer; None: unknown
    try:
        has = takes(find_optimizer(name, "local.optimizer")) if isinstance(name, str) else None
    except ConfigError as error:
        for fault in error.faults:
            yield disagreement(f"{fault.what} ({fault.fix})" if fault.fix else fault.what, name, "optimizer")
    for key, value in given.items():
        may_be_its_own = ":" in str(name) if has is None else key in has
        if key not in Local.model_fields and not may_be_its_own:
            yield InitErrorDetails(type="extra_forbidden", loc=(key,), input=value)
    if given.get("drop_last") is True and given.get("wrap_last") is True:
        yield disagreement("drop_last and wrap_last are both set; keep one of them", True)


def _misfits(local: Local) -> list[InitErrorDetails]:
    """Why a user's own function cannot make an optimizer of these settings."""
    try:
        made: Any = local.make_optimizer()
    except Exception as error:
        return [disagreement(f"it failed: {type(error).__name__}: {error}", local.optimizer, "optimizer")]
    what = f"it returned a {type(made).__name__}, not a fedloom.core.optim.Optimizer"
    return [] if isinstance(made, Optimizer) else [disagreement(what, local.optimizer, "optimizer")]
