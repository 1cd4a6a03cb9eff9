"""Lanes on a GPU: one step of many clients as one CUDA graph, compiled if a run is long enough to pay for it.

A step of a small net is dozens of kernels that each take less time than Python needs to start them. So the step
is captured once for each width, and replayed: its inputs (the rows of the data, the schedule, the learning
rate) are tensors at fixed addresses, and the graph itself counts the ticks.

Clients do not own lanes: a lane serves the clients that ``pack`` assigns to it, one after another. What a client
carries is fetched from a table with one row for each client, and put back after some steps, or after each. So clients
of unequal length fill a few lanes without gaps, and never wait for the longest one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Carry, Phase
from fedloom.core import tree
from fedloom.core.lanes import ops
from fedloom.core.replay import forget_recordings, record_graph, recording_notes
from fedloom.core.task import BATCH_DIMS, Batch, Task
from fedloom.data.augment import augmented
from fedloom.data.federation import Federation
from fedloom.engine.compiling import compiled
from fedloom.engine.plan import Group

# Rows of tables begin at multiples of this many numbers, since matrix products are slower at odd addresses.
_ALIGNED = 32
# The fixed cost of a tick of any width, in examples: a narrow one mostly waits for kernels to start.
_TICK = 128
# Examples of one tick beyond which a GPU is no faster, and only needs more memory.
_EXAMPLES = 1 << 13
# Ticks of one graph, in addition to the graph of a single one: between two graphs a GPU pauses for some microseconds.
# Also of one compiled function on a CPU.
_TOGETHER = 8
# Ticks of the shortest plan; longer ones have a power of two.
_ROOM = 256
# Ticks between two changes of lanes, on average, from which clients stay in their lanes in between.
_SEGMENT = 8
# Numbers that a step processes on a CPU below which more than one thread makes it slower.
_SMALL = 1 << 18


# How long a client stays in a lane: for all of its steps, until any lane changes its client, or for a single tick.
Stay = Literal["all", "segment", "tick"]


class Packed(NamedTuple):
    """The schedule: at tick s, lane l runs step ``when[s, l]`` of ``client[s, l]``; idle lanes point at client K."""

    client: Tensor
    when: Tensor
    changes: tuple[int, ...]  # the ticks before which some lane changes its client; the first is 0

    @property
    def ticks(self) -> int:
        return len(self.client)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Ticks between which every lane keeps its client: the first one, and the one after the last."""
        return list(pairwise((*self.changes, self.ticks)))

    def stay(self, steps: Sequence[int]) -> Stay:
        """How long clients with so many steps stay in their lanes."""
        if len(steps) == self.client.shape[1] and len(set(steps)) == 1:
            return "all"
        return "segment" if self.ticks >= _SEGMENT * len(self.changes) else "tick"


@lru_cache(maxsize=64)  # in most rounds clients are as long as in the last one
def pack(steps: tuple[int, ...], width: int) -> Packed:
    """The steps of clients on ``width`` lanes in as few ticks as possible, those of each client in order.

    McNaughton's wrap-around rule: lane after lane is filled to the end, and a client that does not fit into the rest of
    a lane continues at the start of the next one. No client is ever in two lanes at once, since none is longer
    than there are ticks.
    """
    each = torch.tensor(steps, dtype=torch.int64)
    total, longest = int(each.sum()), max(steps, default=0)
    ticks = max(longest, -(-total // width))
    client = torch.repeat_interleave(torch.arange(len(steps)), each)
    first = each.cumsum(0) - each  # where each client begins, with lanes concatenated
    place = torch.arange(total)
    tick = place % max(ticks, 1)
    # The part of a client on the next lane comes first in time.
    wrapped = ((first + each) - (torch.div(first, max(ticks, 1), rounding_mode="floor") + 1) * ticks).clamp(min=0)
    step = place - first[client]
    ahead = each[client] - wrapped[client]  # steps on the first of its two lanes
    when = torch.where(step < ahead, step + wrapped[client], step - ahead)
    found = torch.full((ticks, width), len(steps))
    then = torch.zeros(ticks, width, dtype=torch.int64)
    lane = torch.div(place, max(ticks, 1), rounding_mode="floor")
    found[tick, lane], then[tick, lane] = client, when
    changed = (found[1:] != found[:-1]).any(1).nonzero().squeeze(1) + 1
    return Packed(found, then, (0, *changed.tolist()))


def width_for(steps: list[int], batch: int, usual: int = 0, *, few: bool = False) -> int:
    """How many lanes serve these clients: as many as there are clients, or a half, a quarter, ... of that.

    Few widths, since each is compiled and captured separately; ``few``: only all and a quarter. More lanes than the
    longest client leaves work for would idle. If another number of clients is ``usual``, theirs is rounded up to a
    quarter of it: cohorts drawn with replacement have a different number of clients in nearly every round.
    """
    quarter = -(-usual // 4)
    clients = len(steps) if len(steps) == usual or not usual else -(-len(steps) // quarter) * quarter
    most = max(1, min(clients, _EXAMPLES // max(batch, 1)))
    halvings = (0, 2) if few else range(most.bit_length())
    widths = [-(-most // (1 << halved)) for halved in halvings]
    total, longest = sum(steps), max(steps, default=0)

    def cost(width: int) -> int:
        return max(longest, -(-total // width)) * (width * batch + _TICK)

    return min(widths, key=cost)


class Built(NamedTuple):
    """The time spent on preparing steps."""

    compiling: float = 0.0  # seconds
    capturing: float = 0.0
    graphs: int = 0
    notes: tuple[str, ...] = ()
    convolutions: Mapping[str, str] = {}  # the choice for each, by its shape: the tile of a kernel, or groups


def built(task: Task) -> Built:
    """What was compiled and captured for this task so far."""
    found = _graphs(task).built
    return found._replace(notes=(*found.notes, *recording_notes(task)), convolutions=ops.chosen_kernels())


def descend(
    alg: Algorithm[Any, Any, Any], phase: Phase, fed: Federation, group: Group, at: Carry, given: Any
) -> Carry | None:
    """The steps of ``group``, with its clients in any order; None if they cannot be captured.

    The result is in memory that the next steps overwrite: ``kept`` copies what is still needed.
    """
    graphs, which = _graphs(alg.task), _which(alg, phase)
    if which in graphs.refused:
        return None
    batch, room = batch_of(group), max(len(group.ids), group.plan.usual)
    few = fed.x.device.type == "cpu" and alg.task.capture == "compiled"  # where compiling takes the longest
    width = min(width_for(group.steps, batch, group.plan.usual, few=few), graphs.widest)
    while True:
        try:
            rows = LaneRows(at, given.mine, given.buffers, given.down, group.work.lr)
            tables = graphs.tables((*which, batch), alg, phase, fed, rows, given.shared, room)
            packed = pack(tuple(group.steps), width)
            replay = tables.replay(width, packed.ticks, packed.stay(group.steps))
            tables.load(rows)
            replay.run(group, packed)
            carry: Carry = tree.take(tables.held.carry, slice(0, len(group.ids)))
            return carry
        except torch.OutOfMemoryError:
            graphs.forget()
            forget_recordings(alg.task)
            if width == 1:
                raise
            width = graphs.widest = width // 2
            graphs.note(f"the GPU's memory is full: {width} lanes from here on")
        except _NotCapturableError as error:
            graphs.refused[which] = alg
            graphs.note(f"the step '{phase.name}' cannot be captured, and runs eagerly ({error})")
            return None


def kept(task: Task, value: Any) -> Any:
    """A tree that outlasts the next steps: tensors in their tables are copied."""
    places = {
        leaf.untyped_storage().data_ptr()
        for tables in _graphs(task).held.values()
        for leaf in tree.leaves(tables.held.carry)
    }
    return tree.tmap(lambda x: x.clone() if x.untyped_storage().data_ptr() in places else x, value)


def _which(alg: Algorithm[Any, Any, Any], phase: Phase) -> tuple[int, str, str]:
    """The key of a step: phases of one algorithm may read the same batches by one name."""
    return id(alg), phase.name, getattr(phase.step, "__qualname__", "")


def batch_of(group: Group) -> int:
    """The width of a batch, the same for all rounds: clients with fewer examples are padded."""
    set_, widest = group.plan.local.batch, group.rows.shape[2]
    return set_ if widest <= set_ else 1 << (widest - 1).bit_length()


def layout(value: Any) -> tuple[Any, ...]:
    """The shapes and types of stacked rows."""
    return tuple((tuple(leaf.shape[1:]), leaf.dtype) for leaf in tree.leaves(value))


class _NotCapturableError(Exception):
    """A step with operations that a CUDA graph cannot contain."""


class _Graphs:
    """The graphs of one task, and the time they took."""

    def __init__(self) -> None:
        self.held: dict[Any, _Tables] = {}
        self.refused: dict[tuple[int, str, str], Any] = {}  # with the algorithm, so that its id is not reused
        self.widest = 1 << 30
        self.built = Built()
        self.pool: Any = None

    def tables(
        self,
        key: Any,
        alg: Algorithm[Any, Any, Any],
        phase: Phase,
        fed: Federation,
        rows: LaneRows,
        shared: bool,
        n: int,
    ) -> _Tables:
        """The graphs of a step of clients with rows like these, with room for ``n`` of them."""
        sent = tree.tmap(lambda x: x[None], rows.down) if shared else rows.down
        key = (*key, shared, layout(rows.carry), layout(sent), layout(rows.mine))
        found = self.held.pop(key, None)
        if found is None or found.clients < n:
            # A table that is too small is doubled, so that it is not reallocated repeatedly.
            room = n if found is None else max(n, 2 * found.clients)
            found = _Tables(self, alg, phase, fed, rows, shared, key[3], room)
        self.held[key] = found
        return found

    def forget(self) -> None:
        self.held.clear()
        self.pool = None
        torch.cuda.empty_cache()

    def note(self, text: str) -> None:
        self.built = self.built._replace(notes=(*self.built.notes, text))

    def spent(self, *, compiling: float = 0.0, capturing: float = 0.0, graphs: int = 0) -> None:
        b = self.built
        self.built = b._replace(
            compiling=b.compiling + compiling, capturing=b.capturing + capturing, graphs=b.graphs + graphs
        )


_OF: weakref.WeakKeyDictionary[Task, _Graphs] = weakref.WeakKeyDictionary()


def _graphs(task: Task) -> _Graphs:
    return _OF.setdefault(task, _Graphs())


class TickPlan(NamedTuple):
    """What the lanes do at each tick, or at one."""

    client: Tensor  # [S, L]
    rows: Tensor  # [S, L, B]
    mask: Tensor  # [S, L, B]
    keys: Tensor  # [S, L]
    progress: Tensor  # [S, L]

    @classmethod
    def of(cls, whole: Tensor, real: Tensor) -> TickPlan:
        """The plan as two tensors, [S, L, B + 2] and [S, L, B + 1]: a tick then fetches two rows, not five."""
        return cls(whole[..., 0], whole[..., 2:], real[..., 1:], whole[..., 1], real[..., 0])


class LaneRows(NamedTuple):
    """Tensors with a row for each client, or for each lane; what was sent to all clients alike has no rows."""

    carry: Any
    mine: Any
    buffers: Tensor
    down: Any
    lr: Tensor


def step_of(phase: Phase, fed: Federation, *, shared: bool) -> Callable[..., list[Tensor]]:
    """A tick as a pure function of the tensors of the clients in the lanes: what they carry after it."""

    def step(held: LaneRows, plan: TickPlan, examples: tuple[Tensor, Tensor]) -> list[Tensor]:
        carry, mine, buffers, down, lr = held
        x = augmented(examples[0], plan.keys, fed.augment)
        batch = Batch(x, examples[1], plan.mask, plan.keys, plan.progress, lr, buffers)
        by_lane = BATCH_DIMS._replace(lr=0)
        in_dims = (0, by_lane, None if shared or not tree.leaves(down) else 0, 0 if tree.leaves(mine) else None)
        return tree.leaves(torch.func.vmap(phase.step, in_dims=in_dims)(carry, batch, down, mine))

    return step


class _Tables:
    """What clients carry, were sent and keep: a row for each at a fixed address, and one for idle lanes."""

    def __init__(
        self,
        graphs: _Graphs,
        alg: Algorithm[Any, Any, Any],
        phase: Phase,
        fed: Federation,
        like: LaneRows,
        shared: bool,
        batch: int,
        clients: int,
    ) -> None:
        self.graphs, self.alg, self.fed, self.batch, self.clients = graphs, alg, fed, batch, clients
        self.device, self.shared = fed.x.device, shared
        self._numbers = sum(prod(leaf.shape[1:]) for leaf in tree.leaves(like.carry))  # that one client carries
        if shared:
            like = like._replace(down=tree.tmap(torch.clone, like.down))
        self.held = self._by_row(lambda x: self._rows_like(x, clients + 1), like)
        self._step = step_of(phase, fed, shared=shared)
        self._replays: dict[tuple[int, Stay], _Replay | _Blocks] = {}
        self._blocks: dict[int, Callable[..., None]] = {}

    def _rows_like(self, x: Tensor, rows: int) -> Tensor:
        """So many rows like those of ``x``; long ones begin at addresses that allow wide loads."""
        wide = prod(x.shape[1:])
        aligned = x.ndim == 2 and wide > _ALIGNED and not self._in_blocks(1)
        apart = -(-wide // _ALIGNED) * _ALIGNED if aligned else wide
        table = x.new_empty(rows, apart)[:, :wide].view(rows, *x.shape[1:])
        return table.copy_(x[:1].expand_as(table))

    def _by_row(self, of: Callable[..., Tensor], held: LaneRows, *rest: LaneRows) -> LaneRows:
        """A function of the tensors that have rows; the others are those of the first argument."""
        if not self.shared:
            return tree.tmap(of, held, *rest)
        return tree.tmap(of, *(each._replace(down=()) for each in (held, *rest)))._replace(down=held.down)

    def load(self, rows: LaneRows) -> None:
        """Copy the initial values of clients into the tables of the graphs."""
        n = len(rows.buffers)
        self._by_row(lambda to, x: to[:n].copy_(x), self.held, rows)
        if self.shared:
            tree.tmap(lambda to, x: to.copy_(x), self.held.down, rows.down)

    def replay(self, lanes: int, ticks: int, stay: Stay) -> _Replay | _Blocks:
        """The runner of the ticks of these lanes, with room for ``ticks``."""
        make: Any = _Blocks if self._in_blocks(lanes) else _Replay
        kind: tuple[int, Stay] = (lanes, "tick" if make is _Blocks else stay)
        found = self._replays.get(kind)
        if found is None or found.ticks < ticks:
            near = found.near if found else self._near(*kind)
            self._replays.pop(kind, None)  # its memory is free before more is taken
            room = max(_ROOM, 1 << (ticks - 1).bit_length())  # few sizes, since each is compiled separately
            self._replays[kind] = make(self, kind, near, room)
        return self._replays[kind]

    def _near(self, lanes: int, stay: Stay) -> LaneRows:
        """What a tick reads and writes: whole tables, their first rows, or rows of the lanes' own."""
        if stay == "tick":
            return self.held
        if stay == "all":
            return self._by_row(lambda x: x[:lanes], self.held)
        return self._by_row(lambda x: self._rows_like(x, lanes), self.held)

    def fetch(self, near: LaneRows, clients: Tensor) -> None:
        """Copy the rows of these clients into those of the lanes."""
        self._by_row(lambda to, x: to.copy_(x[clients]), near, self.held)

    def put_back(self, near: LaneRows, clients: Tensor) -> None:
        """Copy what the clients in the lanes carry into their rows."""
        tree.tmap(lambda to, x: to.index_copy_(0, clients, x), self.held.carry, near.carry)

    def _tick(self, held: LaneRows, plan: TickPlan, examples: tuple[Tensor, Tensor]) -> None:
        """Fetch the tensors of the clients in the lanes, take a step, and put them back."""
        moved = self._step(self._by_row(lambda x: _fetched(x, plan.client), held), plan, examples)
        for table, rows in zip(tree.leaves(held.carry), moved, strict=True):
            table.index_copy_(0, plan.client, rows)

    def step(self, lanes: int, stay: Stay, inputs: tuple[Any, ...]) -> Callable[..., None]:
        """The next tick of these lanes, which writes the new values of their clients; compiled if requested.

        Its arguments are like ``inputs``: what it reads and writes, the whole plan, the number of the tick.
        """

        def plain(near: LaneRows, whole: Tensor, real: Tensor, tick: Tensor) -> None:
            plan = TickPlan.of(*(each.index_select(0, tick).squeeze(0) for each in (whole, real)))
            examples = self.fed.examples(plan.rows)
            if stay == "tick":
                self._tick(near, plan, examples)
            else:
                rows = tree.leaves(near.carry)
                for row, moved in zip(rows, _apart(rows, self._step(near, plan, examples)), strict=True):
                    row.copy_(moved)
            tick += 1

        if self.alg.task.capture != "compiled":
            return plain
        fused = self._compiled(plain, inputs, lanes)
        return plain if fused is None else fused

    def block(self, lanes: int) -> Callable[..., None]:
        """Some ticks of these lanes as one compiled function, with only arithmetic between them.

        It is given the examples instead of their rows, so that it is the same for data of any size.
        """
        if lanes not in self._blocks:
            self._blocks[lanes] = self._block(lanes)
        return self._blocks[lanes]

    def _block(self, lanes: int) -> Callable[..., None]:
        def ticks(held: LaneRows, whole: Tensor, real: Tensor, x: Tensor, y: Tensor) -> None:
            for t in range(_TOGETHER):
                self._tick(held, TickPlan.of(whole[t], real[t]), (x[t], y[t]))

        blank = _blank_plan((_TOGETHER, lanes), self.batch, self.clients, self.device)
        fused = self._compiled(ticks, (self.held, *blank, *self.fed.examples(TickPlan.of(*blank).rows)), lanes)
        assert fused is not None, "a step that a CPU's compiler rejects is not captured"
        return fused

    def _compiled(self, step: Callable[..., None], inputs: tuple[Any, ...], lanes: int) -> Callable[..., None] | None:
        """``step`` compiled for inputs like these; None if a GPU's compiler rejects it."""
        began = time.perf_counter()
        try:
            fused = compiled(step, inputs, small=self._is_small(lanes))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any error of the compiler
            if self.device.type == "cpu":
                raise _NotCapturableError(_brief(error)) from error
            self.graphs.note(f"the compiler rejected this step; it is captured uncompiled ({_brief(error)})")
            return None
        took = time.perf_counter() - began
        self.graphs.spent(compiling=took)
        self.graphs.note(f"a step of {lanes} lanes was compiled in {took:.1f} s")
        return fused

    def _in_blocks(self, lanes: int) -> bool:
        """Whether ticks of these lanes are compiled some at a time: they are as short as a call."""
        return self.alg.task.capture == "compiled" and self._is_small(lanes)

    def _is_small(self, lanes: int) -> bool:
        """Whether a tick of these lanes on a CPU is so short that starting a second thread would cost more."""
        return self.device.type == "cpu" and lanes * self._numbers <= _SMALL

    @contextmanager
    def threads(self, lanes: int) -> Iterator[None]:
        """The number of torch threads with which ticks of these lanes are fastest."""
        before = torch.get_num_threads()
        torch.set_num_threads(1 if self._is_small(lanes) else before)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _apart(rows: list[Tensor], moved: list[Tensor]) -> list[Tensor]:
    """What is written into rows, in this order; copied if it is another row, such as the previous point as memory."""
    places = [row.untyped_storage().data_ptr() for row in rows]
    return [new.clone() if new.untyped_storage().data_ptr() in places[:k] else new for k, new in enumerate(moved)]


def _fetched(table: Tensor, client: Tensor) -> Tensor:
    """Rows of a table, which again begin at aligned addresses."""
    if table.ndim != 2 or table.is_contiguous():
        return table[client]
    whole = table.as_strided((len(table), table.stride(0)), (table.stride(0), 1))
    return whole[client][:, : table.shape[1]]


def _blank_plan(lead: tuple[int, ...], batch: int, idle: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for an empty plan."""
    whole = torch.zeros(*lead, batch + 2, dtype=torch.int64, device=device)
    real = torch.zeros(*lead, batch + 1, device=device)
    TickPlan.of(whole, real).client.fill_(idle)
    return whole, real


class _Schedule:
    """The plan of all ticks, at a fixed address."""

    def __init__(self, tables: _Tables, lanes: int, ticks: int) -> None:
        self._idle = tables.clients
        self.held = _blank_plan((ticks, lanes), tables.batch, self._idle, tables.device)
        self.plan = TickPlan.of(*self.held)

    def load(self, group: Group, packed: Packed, until: int) -> None:
        """Write the steps of a group into the plan; after them all lanes idle ``until`` this tick."""
        n, wide, plan = len(group.ids), group.rows.shape[2], self.plan
        place, when = tree.on_device((packed.client, packed.when), plan.client.device)
        client, real, ticks = place.clamp(max=n - 1), place < n, slice(0, packed.ticks)
        plan.client[ticks] = torch.where(real, place, self._idle)
        plan.rows[ticks, :, :wide] = group.rows[client, when]
        plan.mask[ticks, :, :wide] = group.mask[client, when] * real[..., None]
        plan.mask[ticks, :, wide:] = 0  # which may have been used by wider batches before
        plan.keys[ticks] = group.keys[client, when]
        plan.progress[ticks] = when / group.work.steps[client].clamp(min=1)
        if until > packed.ticks:
            plan.client[packed.ticks : until] = self._idle
            plan.mask[packed.ticks : until] = 0


class _Blocks:
    """Ticks that a CPU runs some at a time, by one call of compiled code each time."""

    def __init__(self, tables: _Tables, kind: tuple[int, Stay], near: LaneRows, ticks: int) -> None:
        self._tables, self.near, self.ticks = tables, near, ticks
        self._schedule, self._step = _Schedule(tables, kind[0], ticks), tables.block(kind[0])

    def run(self, group: Group, packed: Packed) -> None:
        """The steps of a group."""
        tables, rows, (whole, real) = self._tables, self._schedule.plan.rows, self._schedule.held
        until = -(-packed.ticks // _TOGETHER) * _TOGETHER
        self._schedule.load(group, packed, until)
        with tables.threads(whole.shape[1]):
            for t in range(0, until, _TOGETHER):
                some = slice(t, t + _TOGETHER)
                self._step(self.near, whole[some], real[some], *tables.fed.examples(rows[some]))


class _Replay:
    """The tick of these lanes, captured: it reads its work from a plan, at the position of its counter."""

    def __init__(self, tables: _Tables, kind: tuple[int, Stay], near: LaneRows, ticks: int) -> None:
        lanes, self._stay = kind
        self._tables, self.near, self.ticks = tables, near, ticks
        self._schedule = _Schedule(tables, lanes, ticks)
        self._tick = torch.zeros(1, dtype=torch.int64, device=tables.device)
        self._inputs = (near, *self._schedule.held, self._tick)
        self._step = tables.step(lanes, self._stay, self._inputs)
        self._graphs = self._captured(lanes) if tables.device.type == "cuda" else None

    def run(self, group: Group, packed: Packed) -> None:
        """The steps of a group."""
        self._schedule.load(group, packed, packed.ticks)
        self._tick.zero_()
        with self._tables.threads(packed.client.shape[1]):
            if self._stay != "segment":
                self._run(packed.ticks)
                return
            for first, end in packed.segments:
                clients = self._schedule.plan.client[first].contiguous()
                self._tables.fetch(self.near, clients)
                self._run(end - first)
                self._tables.put_back(self.near, clients)

    def _run(self, ticks: int) -> None:
        """The next ticks."""
        if self._graphs is None:
            for _ in range(ticks):
                self._advance()
            return
        one, some = self._graphs
        for graph in [some] * (ticks // _TOGETHER) + [one] * (ticks % _TOGETHER):
            graph.replay()

    def _advance(self) -> None:
        """One tick."""
        self._step(*self._inputs)

    def _advance_by(self, ticks: int) -> None:
        for _ in range(ticks):
            self._advance()

    def _captured(self, lanes: int) -> tuple[Any, Any]:
        """The graphs of one tick and of some."""
        began, graphs = time.perf_counter(), self._tables.graphs
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(beside):
                for _ in range(2):  # libraries choose their algorithms and allocate their memory before the capture
                    self._advance()
            torch.cuda.current_stream().wait_stream(beside)
            torch.cuda.synchronize()
            one, some = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            for graph, ticks in ((one, 1), (some, _TOGETHER)):
                graphs.pool = graphs.pool or torch.cuda.graph_pool_handle()
                record_graph(graph, partial(self._advance_by, ticks), graphs.pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise _NotCapturableError(_brief(error)) from error
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        graphs.spent(capturing=took, graphs=1)
        graphs.note(f"a step of {lanes} lanes was captured in {took:.1f} s")
        return one, some


def _brief(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
