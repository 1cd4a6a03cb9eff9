"""Local training: one client's functions, run for one client after another or for many side by side.

``loop`` and ``lanes`` compute the same thing. ``loop`` trains one client at a time with plain autograd
and channels-last images; ``lanes`` maps the client over the rows of stacked parameters with vmap, and
narrows as clients finish, so that a short client costs nothing once it is done.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from fedloom import tree
from fedloom.algorithm import Algorithm, Carry
from fedloom.data.augment import augmented
from fedloom.data.federation import Federation
from fedloom.engine.plan import Group, once
from fedloom.errors import ConfigError, Fault
from fedloom.task import Batch, Task

Executor: TypeAlias = Literal["loop", "lanes"]
AnyAlgorithm: TypeAlias = Algorithm[Any, Any, Any]

# Parameters that may be stacked side by side: a gradient step holds about six such matrices.
_STACK = {"cpu": 1 << 26, "cuda": 1 << 29}
# Input values that may be gathered for the steps of one stretch.
_GATHERED = 1 << 22
# Examples in one step of a survey.
_SURVEYED = 256
# How vmap maps a batch: all of it by lane, but for the learning rate.
_BATCH: Any = Batch(0, 0, 0, 0, 0, None, 0)  # type: ignore[arg-type]


class Given(NamedTuple):
    """What the clients of a group are given before they train."""

    down: Any  # what the server sent: one value, or [K, ...] where every node has its own
    mine: Any  # [K, ...] what each client kept
    buffers: Tensor  # [K, Q] the running statistics each starts with
    shared: bool = True  # whether ``down`` is one value

    @property
    def down_dim(self) -> int | None:
        return None if self.shared else 0

    def rows(self, which: slice | int | Tensor) -> Given:
        """What these clients of the group were given."""
        down = self.down if self.shared else tree.take(self.down, which)
        return Given(down, tree.take(self.mine, which), self.buffers[which], self.shared)


class Outcome(NamedTuple):
    """What a group of clients did."""

    uploads: Any  # [K, ...]
    states: Any  # [K, ...]
    weights: Tensor  # [K]
    buffers: Tensor  # [K, Q]
    models: Any = ()  # [K, P] where local training ended, if somebody wants to look


def choose(task: Task, device: torch.device, cohort: int) -> tuple[Executor, str]:
    """The executor for this net, device and cohort by a fixed rule, and the reason in words."""
    if task.has_statistics:
        return "loop", "the net has BatchNorm"
    if cohort < 2:
        return "loop", "one client at a time"
    if device.type != "cpu":
        return "lanes", f"{device.type} trains many clients at once"
    if task.has_convolutions:
        return "loop", "convolutions on a CPU"
    return "lanes", "a net without convolutions"


def lane_limit(task: Task, device: torch.device) -> int:
    """How many clients may train side by side; fixed by the net's size, never by what memory is free."""
    return max(1, min(4096, _STACK.get(device.type, 1 << 29) // max(task.size, 1)))


def train(alg: AnyAlgorithm, fed: Federation, group: Group, given: Given, *, watched: bool = False) -> Outcome:
    """One round of every client of ``group``; ``watched``: also where each one's model ended."""
    group = group.to(fed.x.device)
    if alg.surveys:
        group = group._replace(work=group.work._replace(survey=_surveys(alg, fed, group, given)))
    if not alg.task.lanes:
        return tree.stack([_train_one(alg, fed, group, k, given, watched) for k in range(len(group.ids))])

    def finish(at: Any, down: Any, mine: Any, work: Any) -> tuple[Any, Any, Tensor]:
        upload, state = alg.finish(at, down, mine, work)
        return upload, state, alg.weight(upload, work)

    # The work is mapped even where it is not used: vmap needs one mapped argument, and stateless
    # clients of one server have no other.
    begin = mapped(lambda down, mine, _: alg.start(down, mine), (given.down_dim, 0, 0))
    x, buffers = _descend_lanes(alg, fed, group, begin(given.down, given.mine, group.work), given)
    uploads, states, weights = mapped(finish, (0, given.down_dim, 0, 0))(x, given.down, given.mine, group.work)
    models = mapped(lambda at, _: alg.model(at), (0, 0))(x, group.work) if watched else ()
    return Outcome(uploads, states, weights, buffers, models)


def tune(alg: AnyAlgorithm, fed: Federation, group: Group, x: Tensor, given: Given) -> tuple[Tensor, Tensor]:
    """The stacked models ``x`` [K, P] after training on the clients' data, and their statistics."""
    group = group.to(fed.x.device)
    if alg.task.lanes:
        return _descend_lanes(alg, fed, group, x, given)
    return tree.stack([_descend_one(alg, fed, group, k, x[k], given.rows(k)) for k in range(len(group.ids))])


def full_gradients(task: Task, fed: Federation, ids: Tensor, w: Tensor) -> Tensor:
    """Each client's gradient over all of its training data, at its own point ``w`` [K, P].  ``[K, P]``"""
    rows, mask = (x.to(fed.x.device) for x in once(fed.train, ids, _SURVEYED))
    buffers = task.buffers0.expand(len(ids), -1)
    total = torch.zeros_like(w)
    for t in range(rows.shape[1]):
        batch = _plain_batch(fed, rows[:, t], mask[:, t], buffers)
        if task.lanes:
            total = total + mapped(lambda v, b: task.grad(v, b) * b.mask.sum(), (0, _BATCH))(w, batch)
            continue
        for k in range(len(ids)):
            real = int(mask[k, t].sum())
            if real:
                one = _plain_batch(fed, rows[k, t, :real], mask[k, t, :real], buffers[k])
                total[k] += task.grad(w[k], one) * real
    return total / fed.train.sizes[ids].to(w.device)[:, None]


def _surveys(alg: AnyAlgorithm, fed: Federation, group: Group, given: Given) -> Any:
    """What each client's look at all of its data found.  ``[K, ...]``"""
    rows, mask = (x.to(fed.x.device) for x in once(fed.train, group.ids, _SURVEYED))
    if not alg.task.lanes:
        return tree.stack([_survey_one(alg, fed, rows[k], mask[k], given.rows(k)) for k in range(len(group.ids))])
    look = mapped(alg.survey, (_BATCH, given.down_dim, 0))
    sizes = fed.train.sizes[group.ids]
    total: Any = None
    for t in range(rows.shape[1]):
        at = (sizes > t * _SURVEYED).nonzero().squeeze(1).to(rows.device)  # clients that have rows left
        some = given.rows(at)
        found = look(_plain_batch(fed, rows[at, t], mask[at, t], some.buffers), some.down, some.mine)
        total = found if total is None else tree.tmap(lambda a, b, to=at: a.index_add(0, to, b), total, found)
    return total


def _survey_one(alg: AnyAlgorithm, fed: Federation, rows: Tensor, mask: Tensor, given: Given) -> Any:
    total: Any = None
    for chosen, real in zip(rows, mask, strict=True):
        count = int(real.sum())
        if count:
            batch = _plain_batch(fed, chosen[:count], real[:count], given.buffers)
            found = alg.survey(batch, given.down, given.mine)
            total = found if total is None else tree.tmap(torch.add, total, found)
    return total


def _plain_batch(fed: Federation, rows: Tensor, mask: Tensor, buffers: Tensor) -> Batch:
    """Examples as they are, without augmentation and with nothing random about them."""
    x, y = fed.examples(rows)
    lead = rows.shape[:-1]
    zero = torch.zeros(lead, device=x.device)
    return Batch(x, y, mask, zero.long(), zero, torch.zeros((), device=x.device), buffers)


def _descend_lanes(alg: AnyAlgorithm, fed: Federation, group: Group, x: Any, given: Given) -> tuple[Any, Tensor]:
    def steps(at: Carry, batches: Batch, down: Any, mine: Any) -> Carry:
        each = zip(batches.x, batches.y, batches.mask, batches.key, batches.progress, strict=True)
        for examples, labels, mask, key, progress in each:
            batch = Batch(examples, labels, mask, key, progress, batches.lr, batches.buffers)
            at = alg.step(at, batch, down, mine)
        return at

    at = mapped(lambda v, _: Carry(v, alg.optimizer.init(v)), (0, 0))(x, group.work)
    run = mapped(steps, (0, _BATCH, given.down_dim, 0))
    done, now = [], given
    for stretch in stretches(group, fed.x[0].numel()):
        if stretch.lanes < len(now.buffers):
            done.append(tree.take(at.x, slice(stretch.lanes, None)))
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
    return tree.cat([at.x, *reversed(done)]), given.buffers


class Stretch(NamedTuple):
    """Steps in which the same lanes are at work on batches of one width."""

    first: int
    last: int
    lanes: int
    width: int


def stretches(group: Group, features: int) -> list[Stretch]:
    """The steps of a group, cut wherever a client finishes, the batches narrow or their inputs grow too many.

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


def _train_one(alg: AnyAlgorithm, fed: Federation, group: Group, k: int, given: Given, watched: bool) -> Outcome:
    one, work = given.rows(k), tree.take(group.work, k)
    x, buffers = _descend_one(alg, fed, group, k, alg.start(one.down, one.mine), one)
    upload, state = alg.finish(x, one.down, one.mine, work)
    return Outcome(upload, state, alg.weight(upload, work), buffers, alg.model(x) if watched else ())


def _descend_one(alg: AnyAlgorithm, fed: Federation, group: Group, k: int, x: Any, given: Given) -> tuple[Any, Tensor]:
    at, buffers = Carry(x, alg.optimizer.init(x)), given.buffers
    counts = group.mask[k].sum(-1).long().tolist()
    keeps_statistics = alg.task.has_statistics
    for t in range(group.steps[k]):
        examples, labels = fed.examples(group.rows[k, t, : counts[t]])
        examples = augmented(examples, group.keys[k, t], fed.augment)
        if examples.dim() == 4:
            examples = examples.contiguous(memory_format=torch.channels_last)
        batch = Batch(
            x=examples,
            y=labels,
            mask=torch.ones_like(labels, dtype=torch.float32),
            key=group.keys[k, t],
            progress=t / group.work.steps[k],
            lr=group.work.lr[k],
            buffers=buffers,
        )
        if keeps_statistics:
            try:
                buffers = alg.task.statistics(alg.model(at.x), batch)
            except ValueError as error:  # torch's word for a batch with nothing to take a variance of
                what = f"client {int(group.ids[k])} has a batch of {counts[t]}, which BatchNorm cannot normalise"
                fix = "try local.drop_last=true, another local.batch or partition.min_size, or a net without BatchNorm"
                raise ConfigError([Fault("model", what, fix)]) from error
        at = alg.step(at, batch, given.down, given.mine)
    return at.x, buffers


def mapped(f: Callable[..., Any], dims: tuple[Any, ...]) -> Callable[..., Any]:
    """vmap that takes arguments without leaves, such as the state of a stateless client, as they are."""

    def call(*args: Any) -> Any:
        in_dims = tuple(d if tree.leaves(a) else None for d, a in zip(dims, args, strict=True))
        return vmap(f, in_dims=in_dims)(*args)

    return call


@cache
def reuse_memory() -> None:
    """Let the allocator keep large blocks instead of handing each back to the system.

    A local step allocates matrices of many megabytes; fetching them anew costs page faults that were
    measured to make lanes on a CPU two to eight times slower. Only glibc needs to be told.
    """
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
