"""Local training: one client's functions, run for one client after another or for many side by side.

``loop`` and ``lanes`` compute the same thing. ``loop`` trains one client at a time with plain autograd
and channels-last images; ``lanes`` maps the client over the rows of stacked parameters with vmap, and
narrows as clients finish, so that a short client costs nothing once it is done.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import compress
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from fedloom.algorithm import AnyAlgorithm, Carry, Phase, Work
from fedloom.algorithm.capabilities import (
    adaptation_of,
    has_survey,
    memory_of,
    model_of,
    phases_of,
    survey_gradients,
    survey_of,
    trains_in,
)
from fedloom.core import tree
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.task import BATCH_DIMS, Batch, Capture, Task
from fedloom.data.augment import augmented
from fedloom.data.federation import Federation
from fedloom.engine import cuda_graphs, together
from fedloom.engine.compiling import has_cpp_compiler
from fedloom.engine.plan import Group, again, looked_through, once

Executor: TypeAlias = Literal["loop", "lanes"]
Step: TypeAlias = Callable[[Carry, Batch, Any, Any], Carry]
Look: TypeAlias = Callable[[Batch, Any, Any, Any], Any]

# Parameters that may be stacked side by side: a gradient step allocates about six such matrices.
_STACK = {"cpu": 1 << 26, "cuda": 1 << 29}
# Input values that may be gathered for the steps of one stretch.
_GATHERED = 1 << 22
# Examples in one step of a survey.
_SURVEYED = 256
# Ticks of a run from which it pays to capture a step (a second or two), to compile it (ten to twenty), and to
# load what an earlier run has compiled (a quarter of that).
_CAPTURE, _COMPILE, _LOAD = 100, 8_000, 2_000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt


class Given(NamedTuple):
    """What the clients of a group are given before they train."""

    down: Any  # what the server sent: one value, or [K, ...] if every node has its own
    mine: Any  # [K, ...] what each client kept
    buffers: Tensor  # [K, Q] the running statistics each starts with
    shared: bool = True  # whether ``down`` is one value
    memory: Any = None  # [K, ...] the optimizer state, if it is kept from round to round

    @property
    def down_dim(self) -> int | None:
        return None if self.shared else 0

    def rows(self, which: slice | int | Tensor) -> Given:
        """What these clients of the group were given, without their optimizer states."""
        down = self.down if self.shared else tree.take(self.down, which)
        return Given(down, tree.take(self.mine, which), self.buffers[which], self.shared)


class Outcome(NamedTuple):
    """What a group of clients did."""

    uploads: Any  # [K, ...]
    states: Any  # [K, ...]
    weights: Tensor  # [K]
    buffers: Tensor  # [K, Q]
    steps: Any = ()  # [K] steps of local training that were taken
    memory: Any = ()  # [K, ...] the optimizer state, if it is kept
    begun: Any = ()  # [K, P] the models before training, if requested
    models: Any = ()  # [K, P] the models after it, likewise
    gradients: Any = ()  # [K] that were evaluated, each on one batch


def choose(task: Task, device: torch.device, cohort: int) -> tuple[Executor, str]:
    """The executor for this net, device and cohort by a fixed rule, and the reason in words."""
    if task.has_statistics:
        return "loop", "the net has BatchNorm" if task.has_batch_norm else "rows of a batch meet in the net"
    if task.criterion.mixes_rows:
        return "loop", "rows of a batch meet in the loss"
    if cohort < 2:
        return "loop", "one client at a time"
    if device.type != "cpu":
        return "lanes", f"{device.type} trains many clients at once"
    if task.has_convolutions or task.has_lstm:  # an LSTM has an operation of its own for one net, and none for many
        return "loop", f"{'convolutions' if task.has_convolutions else 'an LSTM'} on a CPU"
    return "lanes", "a net without convolutions"


def lane_limit(task: Task, device: torch.device, beside: int = 0) -> int:
    """How many clients may train side by side; fixed by the net's size, never by the free memory.

    ``beside``: the numbers that a client keeps in addition to models, such as the moments of its features. Frozen
    parameters count, too: they exist once, but every client's batch passes through them.
    """
    return max(1, min(4096, _STACK.get(device.type, 1 << 29) // max(task.passed, beside, 1)))


def capture_for(
    wanted: Literal["auto", "on", "off"], device: torch.device, lanes: bool, ticks: float, alike: int = 1
) -> Capture:
    """How steps in lanes are prepared, by a fixed rule, for a run of ``ticks`` consecutive steps.

    ``alike``: the runs of a comparison that use the same code, this one included. The first compiles it, the others
    load it from the compiler's cache, and all together must gain what that takes.

    On a CPU they are compiled only on request: a run that is extended must end like one that was long from the start.
    """
    if not lanes or wanted == "off":
        return "eager"
    if wanted == "on":
        return "compiled" if device.type == "cuda" or has_cpp_compiler() else "eager"
    if device.type != "cuda":
        return "eager"
    pays = alike * ticks >= _COMPILE + (alike - 1) * _LOAD
    return "compiled" if pays else "graph" if ticks >= _CAPTURE else "eager"


@contextmanager
def arithmetic(task: Task) -> Iterator[None]:
    """Within this block, float32 products are as short as the task's precision allows.

    Only local training is computed in this way; sums of uploads never are. If steps are captured, cuDNN also benchmarks
    its convolutions: for many nets at once, the fastest is twice as fast as its default choice.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = task.precision != "fp32"
    cudnn.benchmark = task.capture != "eager"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


def train(alg: AnyAlgorithm, fed: Federation, group: Group, given: Given, *, watched: bool = False) -> Outcome:
    """One round of every client of ``group``; ``watched``: also each one's model before and after training."""
    with arithmetic(alg.task):
        return _train(alg, fed, group, given, watched=watched)


def _train(alg: AnyAlgorithm, fed: Federation, group: Group, given: Given, *, watched: bool) -> Outcome:
    group, over = group.to(fed.x.device), _over(alg.task)
    group = _surveyed(alg, fed, group, given)

    def finish(at: Any, down: Any, mine: Any, work: Work) -> tuple[Any, Any, Tensor]:
        upload, state = alg.finish(at, down, mine, work)
        return upload, state, alg.weight(upload, work)

    def models(at: Carry) -> Any:
        return over(lambda x, _: model_of(alg, x), (0, 0))(at.x, group.work) if watched else ()

    now, begun, prelude = _begin(alg, group, given), None, {phase.name for phase in adaptation_of(alg)}
    if survey_gradients(alg) and trains_in(alg, group.plan.address.round):
        now = now._replace(gradients=_passed(now.gradients, survey_gradients(alg), group.per_epoch))
    phases = phases_of(alg)
    if not phases:  # no client trains, so there are no steps of training
        now = now._replace(group=group._replace(work=group.work._replace(steps=torch.zeros_like(group.work.steps))))
    for phase in phases:
        if begun is None and phase.name not in prelude:
            begun = models(now.at)
        last = given.memory is None and phase is phases[-1]
        now = _run(alg, phase, fed, now, given, forget=last)
    begun = models(now.at) if begun is None else begun
    group = now.group
    upload, state, weight = over(finish, (0, given.down_dim, 0, 0))(now.at.x, given.down, given.mine, group.work)
    memory = () if given.memory is None else now.at.memory
    ended = models(now.at)
    outcome = Outcome(upload, state, weight, now.buffers, group.work.steps, memory, begun, ended, now.gradients)
    return outcome if alg.task.capture == "eager" else cuda_graphs.kept(alg.task, outcome)


def fit(alg: AnyAlgorithm, fed: Federation, group: Group, given: Given) -> tuple[Tensor, Tensor]:
    """The models [K, P] with which these clients predict after they have adapted what they were sent, and the
    statistics of these models."""
    group = _surveyed(alg, fed, group.to(fed.x.device), given)
    now = _begin(alg, group, given)
    with arithmetic(alg.task):
        for phase in adaptation_of(alg):
            now = _run(alg, phase, fed, now, given)
    models = _over(alg.task)(lambda x, _: model_of(alg, x), (0, 0))(now.at.x, group.work)
    return cuda_graphs.kept(alg.task, models) if alg.task.capture != "eager" else models, now.buffers


def _surveyed(alg: AnyAlgorithm, fed: Federation, group: Group, given: Given) -> Group:
    """The group with its clients' surveys of all of their data, if the method needs them."""
    if not has_survey(alg):
        return group
    # Closed forms pass over their data once in a run, so capturing does not pay.
    captured = alg.task.capture != "eager" and alg.family != "closed_form"
    found = _captured_survey(alg, fed, group, given) if captured else None
    if found is None:
        found = _looks(alg.task, lambda b, _, down, mine: survey_of(alg, b, down, mine), fed, group.ids, (), given)
    return group._replace(work=group.work._replace(survey=found))


def _captured_survey(alg: AnyAlgorithm, fed: Federation, group: Group, given: Given) -> Any:
    """The sums of surveys as steps that add up, so that they are captured like any steps; None: they cannot."""

    def add(at: Carry, batch: Batch, down: Any, mine: Any) -> Carry:
        return Carry(tree.tmap(torch.add, at.x, survey_of(alg, batch, down, mine)), ())

    fed = fed._replace(augment="none")
    looks = looked_through(group, _SURVEYED).to(fed.x.device)
    one = plain_batch(fed, looks.rows[0, 0, :1], looks.mask[0, 0, :1], given.buffers[0])
    down = given.down if given.shared else tree.take(given.down, 0)
    form = survey_of(alg, one, down, tree.take(given.mine, 0))
    none = tree.tmap(lambda x: x.new_zeros(len(group.ids), *x.shape), form)
    sums = together.take_steps(alg, Phase(add, name="survey"), fed, looks, Carry(none, ()), given)
    return None if sums is None else sums.x


class Now(NamedTuple):
    """The state of the clients of a group within their round."""

    group: Group
    at: Carry  # [K, ...]
    buffers: Tensor  # [K, Q]
    gradients: Tensor  # [K] float64, evaluated so far

    def spent(self, alg: AnyAlgorithm, phase: Phase, steps: list[int]) -> Tensor:
        """The gradients evaluated so far [K], with these steps [K] of a phase."""
        return _passed(self.gradients, alg.traits.gradients_per_step if phase.is_main else float(phase.cost > 0), steps)


def _passed(gradients: Tensor, each: float, batches: list[int]) -> Tensor:
    """The gradients [K] with these batches [K] at ``each`` gradients a batch."""
    return gradients + each * tree.on_device(torch.tensor(batches, dtype=torch.float64), gradients.device)


def _begin(alg: AnyAlgorithm, group: Group, given: Given) -> Now:
    over = _over(alg.task)
    x = over(alg.start, (given.down_dim, 0, 0))(given.down, given.mine, group.work)
    none = torch.zeros(len(group.ids), dtype=torch.float64, device=given.buffers.device)
    if given.memory is not None:
        return Now(group, Carry(x, given.memory), given.buffers, none)
    memory = over(lambda v, _: memory_of(alg, v), (0, 0))(x, group.work)
    return Now(group, Carry(x, memory), given.buffers, none)


def _run(alg: AnyAlgorithm, phase: Phase, fed: Federation, now: Now, given: Given, *, forget: bool = False) -> Now:
    """One phase of every client; ``forget``: the optimizer state is not needed afterwards."""
    over, group, at, buffers = _over(alg.task), now.group, now.at, now.buffers
    between = (0, given.down_dim, 0)
    if phase.enter is not None:
        at = over(phase.enter, between)(at, given.down, given.mine)
    if phase.passes is None and phase.after is None and not phase.repeat:
        plan = group if phase.is_main else again(group, phase).to(fed.x.device)
        at, moved = _descend(alg, phase, fed, plan, at, given._replace(buffers=buffers), forget=forget)
        buffers = moved if phase.keeps_statistics else buffers
        spent = now.spent(alg, phase, plan.steps)
    else:
        group, at, buffers, spent = _pass_by_pass(alg, phase, fed, now._replace(at=at), given)
    if phase.leave is not None:
        at = over(phase.leave, between)(at, given.down, given.mine)
    return Now(group, at, buffers, spent)


def _pass_by_pass(alg: AnyAlgorithm, phase: Phase, fed: Federation, now: Now, given: Given) -> Now:
    """A phase that each client ends separately. Clients that have stopped leave the batch."""
    group, at, buffers, _ = now
    wanted = [phase.epochs or 1] * len(group.ids)
    if phase.passes is not None:
        wanted = _over(alg.task)(phase.passes, (0, 0))(given.mine, group.work).long().tolist()
    if not max(wanted) and not phase.is_main:
        return now
    plan = group
    if not phase.is_main:
        plan = again(group, phase, 1 if phase.repeat else max(wanted)).to(fed.x.device)
    limits = _most_passes(phase, plan, wanted)
    taken, looked, done = [0] * len(limits), [0] * len(limits), 0
    alive = [k for k, limit in enumerate(limits) if limit]
    while alive:
        part = plan.pick(alive, 0 if phase.repeat else done)
        rows = torch.tensor(alive, device=buffers.device)
        some = given._replace(buffers=buffers).rows(rows)
        here, moved = _descend(alg, phase, fed, part, tree.take(at, rows), some)
        here, stop = _after_pass(alg, phase, fed, part._replace(work=tree.take(group.work, rows)), here, some)
        for k, steps in zip(alive, part.steps, strict=True):
            taken[k] += steps
            looked[k] += 0 if phase.after is None else plan.per_epoch[k]
        at = tree.tmap(lambda whole, new, to=rows: whole.index_copy(0, to, new), at, here)
        buffers = buffers.index_copy(0, rows, moved) if phase.keeps_statistics else buffers
        done += 1
        alive = [k for k, enough in zip(alive, stop, strict=True) if done < limits[k] and not enough]
    if phase.is_main:
        actual = torch.tensor(taken, dtype=torch.float32, device=group.work.steps.device)
        group = group._replace(work=group.work._replace(steps=actual))
    return Now(group, at, buffers, _passed(now.spent(alg, phase, taken), phase.look_gradients, looked))


def _after_pass(
    alg: AnyAlgorithm, phase: Phase, fed: Federation, group: Group, at: Carry, given: Given
) -> tuple[Carry, list[bool]]:
    """The state of these clients after a pass over their data, and which of them stop."""
    if phase.after is None:
        return at, [False] * len(group.ids)
    seen = () if phase.look is None else _looks(alg.task, phase.look, fed, group.ids, at.x, given)
    dims = (0, 0, given.down_dim, 0, 0)
    at, enough = _over(alg.task)(phase.after, dims)(at, seen, given.down, given.mine, group.work)
    return at, enough.tolist()


def _most_passes(phase: Phase, plan: Group, wanted: list[int]) -> list[int]:
    """The largest number of passes of each client: no more than ``local``, or the phase, has batches for.  ``[K]``"""
    if not phase.is_main and phase.steps is None:
        return wanted
    whole = [-(-steps // each) for steps, each in zip(plan.steps, plan.per_epoch, strict=True)]
    return whole if phase.passes is None else [min(pair) for pair in zip(wanted, whole, strict=True)]


def _descend(
    alg: AnyAlgorithm, phase: Phase, fed: Federation, group: Group, at: Carry, given: Given, *, forget: bool = False
) -> tuple[Carry, Tensor]:
    """The steps of ``group``, with its clients in any order; ``forget`` the optimizer state after the last."""
    if not alg.task.lanes:
        each = [_descend_one(alg, phase, fed, group, k, tree.take(at, k), given.rows(k)) for k in range(len(group.ids))]
        carries, buffers = _stacked(each)
        return carries, buffers
    if alg.task.capture != "eager":
        there = together.take_steps(alg, phase, fed, group, at, given)
        if there is not None:
            return there, given.buffers
    order = sorted(range(len(group.ids)), key=lambda k: -group.steps[k])
    if order == list(range(len(order))):
        return _descend_lanes(phase.step, fed, group, at, given, forget=forget), given.buffers
    rows = torch.tensor(order, device=given.buffers.device)
    there = _descend_lanes(phase.step, fed, group.pick(order), tree.take(at, rows), given.rows(rows), forget=forget)
    return tree.take(there, rows.argsort()), given.buffers


def full_gradients(task: Task, fed: Federation, ids: Tensor, w: Tensor) -> Tensor:
    """Each client's gradient over all of its training data, at its own point ``w`` [K, P].  ``[K, P]``"""
    given = Given((), (), task.buffers0.expand(len(ids), -1))
    total: Tensor = _looks(task, lambda batch, v, *_: task.grad(v, batch) * batch.mask.sum(), fed, ids, w, given)
    return total / fed.train.sizes[ids].to(w.device)[:, None]


def _looks(task: Task, look: Look, fed: Federation, ids: Tensor, x: Any, given: Given) -> Any:
    """The sum of ``look(batch, x, down, mine)`` over all of each client's examples.  ``[K, ...]``"""
    rows, mask = (x.to(fed.x.device) for x in once(fed.train, ids, _SURVEYED))
    if not task.lanes:
        every = range(len(ids))
        return _stacked([_look_one(look, fed, rows[k], mask[k], tree.take(x, k), given.rows(k)) for k in every])
    seen = mapped(look, (BATCH_DIMS, 0, given.down_dim, 0))
    sizes = fed.train.sizes[ids]
    total: Any = None
    for t in range(rows.shape[1]):
        at = (sizes > t * _SURVEYED).nonzero().squeeze(1).to(rows.device)  # clients that have rows left
        some = given.rows(at)
        found = seen(plain_batch(fed, rows[at, t], mask[at, t], some.buffers), tree.take(x, at), some.down, some.mine)
        if total is None:
            total = tree.tmap(torch.clone, found)
        elif len(at) == len(ids):  # in place: a sum may take nearly all memory
            tree.tmap(Tensor.add_, total, found)
        else:
            tree.tmap(lambda a, b, to=at: a.index_add_(0, to, b), total, found)
    return total


def _look_one(look: Look, fed: Federation, rows: Tensor, mask: Tensor, x: Any, given: Given) -> Any:
    total: Any = None
    for chosen, real in zip(rows, mask, strict=True):
        count = int(real.sum())
        if count:
            batch = plain_batch(fed, chosen[:count], real[:count], given.buffers)
            found = look(batch, x, given.down, given.mine)
            total = tree.tmap(torch.clone, found) if total is None else tree.tmap(Tensor.add_, total, found)
    return total


def plain_batch(fed: Federation, rows: Tensor, mask: Tensor, buffers: Tensor) -> Batch:
    """Examples without augmentation or other randomness."""
    x, y = fed.examples(rows)
    lead = rows.shape[:-1]
    zero = torch.zeros(lead, device=x.device)
    return Batch(x, y, mask, zero.long(), zero, torch.zeros((), device=x.device), buffers)


def _descend_lanes(step: Step, fed: Federation, group: Group, at: Carry, given: Given, *, forget: bool) -> Carry:
    def steps(at: Carry, batches: Batch, down: Any, mine: Any) -> Carry:
        each = zip(batches.x, batches.y, batches.mask, batches.key, batches.progress, strict=True)
        for examples, labels, mask, key, progress in each:
            batch = Batch(examples, labels, mask, key, progress, batches.lr, batches.buffers)
            at = step(at, batch, down, mine)
        return at

    def kept(at: Carry) -> Carry:
        return at._replace(memory=()) if forget else at

    run = mapped(steps, (0, BATCH_DIMS, given.down_dim, 0))
    done, now = [], given
    for stretch in stretches(group, fed.x[0].numel()):
        if stretch.lanes < len(now.buffers):
            done.append(kept(tree.take(at, slice(stretch.lanes, None))))
            at, now = tree.take(at, slice(0, stretch.lanes)), now.rows(slice(0, stretch.lanes))
        where = (slice(0, stretch.lanes), slice(stretch.first, stretch.last))
        examples, labels = fed.examples(group.rows[*where, : stretch.width])
        keys = group.keys[where]
        batches = Batch(
            x=augmented(examples, keys, fed.augment),
            y=labels,
            mask=group.mask[*where, : stretch.width],
            key=keys,
            progress=torch.arange(stretch.first, stretch.last, device=keys.device)
            / group.work.steps[: stretch.lanes, None],
            lr=group.work.lr[0],
            buffers=now.buffers,
        )
        at = run(at, batches, now.down, now.mine)
    whole: Carry = tree.cat([kept(at), *reversed(done)])
    return whole


class Stretch(NamedTuple):
    """Consecutive steps in which the same lanes train on batches of one width."""

    first: int
    last: int
    lanes: int
    width: int


def stretches(group: Group, features: int) -> list[Stretch]:
    """The steps of a group, cut wherever a client finishes, the batches narrow or there are too many inputs.

    One call of vmap for a stretch instead of one for a step: for small nets, its cost is most of a step.
    """
    found: list[Stretch] = []
    for t, width in enumerate(group.widths):
        lanes = sum(1 for steps in group.steps if steps > t)
        last = found[-1] if found else None
        fits = last is not None and (t + 1 - last.first) * lanes * width * features <= _GATHERED
        if last is not None and (last.lanes, last.width) == (lanes, width) and fits:
            found[-1] = last._replace(last=t + 1)
        else:
            found.append(Stretch(t, t + 1, lanes, width))
    return found


def _descend_one(
    alg: AnyAlgorithm, phase: Phase, fed: Federation, group: Group, k: int, at: Carry, given: Given
) -> tuple[Carry, Tensor]:
    buffers = given.buffers
    counts = group.mask[k].sum(-1).long().tolist()
    task, has_statistics = alg.task, alg.task.has_statistics
    for t in range(group.steps[k]):
        examples, labels = fed.examples(group.rows[k, t, : counts[t]])
        examples = augmented(examples, group.keys[k, t], fed.augment)
        batch = Batch(
            x=examples,
            y=labels,
            mask=torch.ones_like(labels, dtype=torch.float32),
            key=group.keys[k, t],
            progress=t / group.work.steps[k],
            lr=group.work.lr[k],
            buffers=buffers,
        )
        if not has_statistics:
            at = phase.step(at, batch, given.down, given.mine)
            continue
        try:
            if phase.keeps_statistics:
                buffers = task.statistics(model_of(alg, at.x), batch)
            at = phase.step(at, batch, given.down, given.mine)
        except ValueError as error:  # torch's message for a batch without a variance
            if not task.has_batch_norm:
                raise
            what = f"client {int(group.ids[k])} has a batch of {counts[t]}, which BatchNorm cannot normalise"
            fix = "try local.drop_last=true, another local.batch or partition.min_size, or a net without BatchNorm"
            raise ConfigError([Fault("model", what, fix)]) from error
    return at, buffers


def mapped(f: Callable[..., Any], dims: tuple[Any, ...]) -> Callable[..., Any]:
    """vmap over the arguments whose dimension is 0. Its leaves are flat, which torch traverses faster than trees."""

    def call(*args: Any) -> Any:
        leaves = tree.leaves(args)
        lanes = [by_lane for dim, arg in zip(dims, args, strict=True) for by_lane in _by_lane(dim, arg)]
        made: list[Any] = []

        def flat(*rows: Tensor) -> tuple[Tensor, ...]:
            supply = iter(rows)
            given = [next(supply) if by_lane else leaf for leaf, by_lane in zip(leaves, lanes, strict=True)]
            made.append(f(*tree.unflatten(args, given)))
            return tuple(tree.leaves(made[0]))

        found = vmap(flat)(*compress(leaves, lanes))
        return tree.unflatten(made[0], found)

    return call


def _by_lane(dim: Any, arg: Any) -> list[bool]:
    """Whether each leaf of an argument has a row for each lane."""
    if isinstance(dim, tuple):
        return [each for part, kid in zip(dim, arg, strict=True) for each in _by_lane(part, kid)]
    return [dim == 0] * len(tree.leaves(arg))


def _looped(f: Callable[..., Any], dims: tuple[Any, ...]) -> Callable[..., Any]:
    """What ``mapped`` computes, one row after another."""

    def call(*args: Any) -> Any:
        rows = [d == 0 and bool(tree.leaves(a)) for d, a in zip(dims, args, strict=True)]
        count = next(len(tree.leaves(a)[0]) for a, by_row in zip(args, rows, strict=True) if by_row)
        return _stacked(
            [f(*(tree.take(a, k) if by_row else a for a, by_row in zip(args, rows, strict=True))) for k in range(count)]
        )

    return call


def _over(task: Task) -> Callable[..., Callable[..., Any]]:
    """Map a function of one client over many, for this executor."""
    return mapped if task.lanes else _looped


def _stacked(trees: list[Any]) -> Any:
    """``tree.stack``, without a copy for a single client."""
    return tree.tmap(lambda x: x[None], trees[0]) if len(trees) == 1 else tree.stack(trees)


@cache
def reuse_memory() -> None:
    """Let the allocator keep large blocks instead of returning each to the system.

    A local step allocates matrices of many megabytes; requesting them again costs page faults, which
    made lanes on a CPU two to eight times slower in measurements. Only glibc needs the setting.
    """
    if _has_glibc():
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def release_memory() -> None:
    """Return memory that ``reuse_memory`` keeps and that is not in use, before a wait that is longer than a step."""
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def release_at_once() -> None:
    """Return large blocks as soon as they are free, from now on: for a process that does not train."""
    reuse_memory()  # so that a later call has no effect
    if _has_glibc():
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 32 << 20)


@cache
def _has_glibc() -> bool:
    return platform.system() == "Linux" and platform.libc_ver()[0] == "glibc"
