"""Several runs in one process, whose clients train in the same steps.

A GPU needs hardly longer for a step of thirty small nets than for one of ten. Runs that differ only in their seed,
their partition or their learning rate take the same steps, so that the clients of all of them can be in lanes side by
side.

Every run is a thread, but only one of them runs at a time: they take turns, and a turn ends where clients are to train.
When all runs have come to such a place, those that are behind the others continue: the groups with the same step are
joined, trained as one, and divided again. So a run does not know of the others, and what it computes is the same up to
rounding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedloom.algorithm import AnyAlgorithm, Carry, Phase
from fedloom.algorithm.capabilities import phases_of
from fedloom.core import tree
from fedloom.data.federation import Federation
from fedloom.engine import cuda_graphs
from fedloom.engine.plan import Group, joined_groups

T = TypeVar("T")

# How far the steps of two runs may be apart for the same client, relative to what they move: kernels need not give the
# same bits twice, and another net goes somewhere else altogether.
_SAME = 1e-3


class _Asked(NamedTuple):
    """Clients that a run wants to train."""

    alg: AnyAlgorithm
    phase: Phase
    fed: Federation
    group: Group
    at: Carry
    given: Any
    arithmetic: tuple[bool, bool, bool]

    @property
    def progress(self) -> tuple[int, int]:
        """How far the run is: its round, and the phase of that; a survey comes before all phases."""
        names = [phase.name for phase in phases_of(self.alg)]
        return self.group.plan.address.round, names.index(self.phase.name) if self.phase.name in names else -1


_HERE = threading.local()  # of a run: ``turns`` and ``me``


def together(runs: Sequence[Callable[[], T]], stop: threading.Event | None = None) -> list[T]:
    """What these runs return, whose clients train side by side wherever they can.

    ``stop``: ask all of them to stop after their round. If one fails, the others go on; then its error is raised.
    """
    turns, usual = _Turns(len(runs), stop or threading.Event()), _arithmetic()
    found: list[Any] = [None] * len(runs)
    errors: list[BaseException] = []

    def one(me: int) -> None:
        _HERE.turns, _HERE.me = turns, me
        turns.wait(me)
        _set_arithmetic(usual)
        try:
            found[me] = runs[me]()
        except BaseException as error:
            errors.append(error)
        finally:
            turns.leave(me)

    threads = [threading.Thread(target=one, args=(me,), name=f"run {me}") for me in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _set_arithmetic(usual)
    if errors:
        raise errors[0]
    return found


def asked_to_stop() -> threading.Event | None:
    """The event that asks this run to stop, if it is one of several in this process."""
    turns: _Turns | None = getattr(_HERE, "turns", None)
    return None if turns is None else turns.stop


def take_steps(alg: AnyAlgorithm, phase: Phase, fed: Federation, group: Group, at: Carry, given: Any) -> Carry | None:
    """The steps of ``group``, with the clients of other runs beside it if there are any: see ``cuda_graphs``."""
    turns: _Turns | None = getattr(_HERE, "turns", None)
    if turns is None:
        return cuda_graphs.descend(alg, phase, fed, group, at, given)
    return turns.trained(_HERE.me, _Asked(alg, phase, fed, group, at, given, _arithmetic()))


class _Turns:
    """Whose turn it is, and what the others wait for."""

    def __init__(self, runs: int, stop: threading.Event) -> None:
        self.stop = stop
        self._changed = threading.Condition()
        self._whose: int | None = 0
        self._live = set(range(runs))
        self._asked: dict[int, _Asked] = {}
        self._answers: dict[int, Any] = {}
        self._known: dict[tuple[Any, ...], tuple[bool, Any]] = {}

    def wait(self, me: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._whose == me)

    def leave(self, me: int) -> None:
        """This run has ended."""
        self._live.discard(me)
        self._asked.pop(me, None)
        self._pass_on()

    def trained(self, me: int, asked: _Asked) -> Carry | None:
        """The clients of this run after their steps; other runs have their turn first."""
        self._asked[me] = asked
        self._pass_on()
        self.wait(me)
        _set_arithmetic(asked.arithmetic)
        answer = self._answers.pop(me)
        if isinstance(answer, BaseException):
            raise answer
        carry: Carry | None = answer
        return carry

    def _pass_on(self) -> None:
        """Give the turn to a run that does not wait; if all wait, train what those wait for that are behind."""
        if self._live and self._live == self._asked.keys():
            try:
                self._train()
            except BaseException as error:  # of nobody's step: it ends all runs, and none waits forever
                self._answers.update(dict.fromkeys(self._asked, error))
                self._asked.clear()
        with self._changed:
            self._whose = min(self._live - self._asked.keys(), default=None)
            self._changed.notify_all()

    def _train(self) -> None:
        """Train what the runs that are behind the others have asked for, in as few groups as possible.

        The others wait for them. Otherwise two runs, one of which has needed a pass more, would never meet again.
        """
        behind = min(asked.progress for asked in self._asked.values())
        sets: list[list[int]] = []
        for me in sorted(me for me, asked in self._asked.items() if asked.progress == behind):
            fitting = (some for some in sets if self._fit(self._asked[some[0]], self._asked[me]))
            some = next(fitting, None)
            if some is None:
                sets.append([me])
            else:
                some.append(me)
        for some in sets:
            asked = [self._asked.pop(me) for me in some]
            _set_arithmetic(asked[0].arithmetic)
            try:
                with torch.no_grad():
                    answers: Sequence[Any] = _trained(asked)
            except Exception as error:
                answers = [error] * len(some)
            self._answers.update(zip(some, answers, strict=True))

    def _fit(self, a: _Asked, b: _Asked) -> bool:
        """Whether the clients of two runs can take the same steps."""
        if _form(a) != _form(b):
            return False
        key = (id(a.alg), id(b.alg), id(a.fed.x), id(b.fed.x), a.phase.name, _form(a))
        if key not in self._known:
            try:
                same = _same_data(a.fed, b.fed) and _same_step(a, b)
            except Exception:  # whatever is wrong with the step is an error of the run that takes it
                same = False
            self._known[key] = (same, (a.alg, b.alg, a.fed, b.fed))  # held, so that their ids are not reused
        return self._known[key][0]


def _form(asked: _Asked) -> tuple[Any, ...]:
    """What is the same for clients that share a graph."""
    task, group, given = asked.alg.task, asked.group, asked.given
    one = given.down if not given.shared else tree.tmap(lambda x: x[None], given.down)
    layouts = tuple(map(cuda_graphs.layout, (asked.at, one, given.mine, given.buffers)))
    how = (task.precision, task.capture, asked.arithmetic, asked.fed.augment)
    return asked.phase.name, cuda_graphs.batch_of(group), layouts, how


def _same_data(a: Federation, b: Federation) -> bool:
    """Whether a row of one is the same row of the other."""
    pairs = ((a.x, b.x), (a.y, b.y), (a.scale, b.scale), (a.shift, b.shift))
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in pairs)


def _same_step(a: _Asked, b: _Asked) -> bool:
    """Whether the steps of one run take a client of the other where its own would, by trying two of them."""
    frozen = tuple(zip(a.alg.task.fixed, b.alg.task.fixed, strict=True))
    if not all(torch.equal(x, y) for x, y in frozen):
        return False
    first, given, group = slice(0, 1), b.given, b.group
    held = cuda_graphs.LaneRows(*tree.take((b.at, given.mine, given.buffers), first), given.down, group.work.lr[first])
    if not given.shared:
        held = held._replace(down=tree.take(given.down, first))
    rows, mask, keys = (x[first, 0] for x in (group.rows, group.mask, group.keys))
    plan = cuda_graphs.TickPlan(keys, rows, mask, keys, torch.zeros_like(mask[:, 0]))
    with torch.no_grad():
        mine, theirs = (_after_two_steps(each, held, plan) for each in (a, b))
    return all(_close(*each) for each in zip(mine, theirs, tree.leaves(held.carry), strict=True))


def _after_two_steps(asked: _Asked, held: cuda_graphs.LaneRows, plan: cuda_graphs.TickPlan) -> list[Tensor]:
    """What a client carries after two steps of this run: momentum and distances from the start act from the second."""
    step = cuda_graphs.step_of(asked.phase, asked.fed, shared=asked.given.shared)
    examples = asked.fed.examples(plan.rows)
    once = tree.unflatten(held.carry, step(held, plan, examples))
    return step(held._replace(carry=once), plan, examples)


def _close(x: Tensor, y: Tensor, start: Tensor) -> bool:
    """Whether both have gone the same way from ``start``, up to the rounding of where they are."""
    if not x.is_floating_point():
        return torch.equal(x, y)
    rounding = 4 * torch.finfo(x.dtype).eps * y.double().norm()
    return bool((x - y).double().norm() <= _SAME * (y - start).double().norm() + rounding)


def _trained(asked: Sequence[_Asked]) -> list[Carry | None]:
    """The clients of these runs after their steps; none if these cannot be captured."""
    first, counts = asked[0], [len(each.group.ids) for each in asked]
    if len(asked) == 1:
        there = cuda_graphs.descend(*first[:-1])
    else:
        given = first.given._replace(
            down=tree.cat([_for_each(each.given, n) for each, n in zip(asked, counts, strict=True)]),
            mine=tree.cat([each.given.mine for each in asked]),
            buffers=torch.cat([each.given.buffers for each in asked]),
            shared=False,
        )
        group, at = joined_groups([each.group for each in asked]), tree.cat([each.at for each in asked])
        there = cuda_graphs.descend(first.alg, first.phase, first.fed, group, at, given)
    if there is None:
        return [None] * len(asked)
    ends = torch.tensor(counts).cumsum(0).tolist()
    parts = [slice(end - n, end) for end, n in zip(ends, counts, strict=True)]
    # Copied, since the next steps overwrite it, and other runs have theirs before this one reads it.
    return [tree.tmap(torch.clone, tree.take(there, part)) for part in parts]


def _for_each(given: Any, clients: int) -> Any:
    """What each client was sent."""
    return tree.tmap(lambda x: x.expand(clients, *x.shape), given.down) if given.shared else given.down


def _arithmetic() -> tuple[bool, bool, bool]:
    """Settings of torch that ``local.arithmetic`` makes for one run, but which all threads share."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark


def _set_arithmetic(how: tuple[bool, bool, bool]) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = how
