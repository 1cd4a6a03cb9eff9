"""The same small step many times in a row: on a GPU it is recorded once, as a CUDA graph, and replayed.

A step of a server on some of its own examples is a hundred kernels that each take less time than Python needs to start
them. What such a step reads and writes is at fixed addresses here: what stays the same for a while, the state that it
moves, and its input. A recording is checked against the step itself, twice, and is not used if they differ.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedloom.core import tree

F = TypeVar("F")
S = TypeVar("S")
X = TypeVar("X")

# Steps that are taken without a recording before the first one is made: libraries choose algorithms in them.
_WARM = 2
# Bytes of a step's memory beyond which it is not recorded: its kernels are large enough to keep a GPU busy.
_LARGE = 1 << 30
# How far a replayed step may be from the step itself: some kernels do not give the same bits twice.
_CLOSE = 1e-3


class Recorder(NamedTuple):
    """Where recordings are kept, as long as there is the ``owner``."""

    owner: Any
    constants: tuple[Tensor, ...] = ()  # tensors that steps read where they are


def repeated(
    step: Callable[[F, S, X], S],
    fixed: F,
    state: S,
    inputs: Iterable[X],
    recorder: Recorder | None = None,
    key: Hashable = None,
) -> Iterator[S]:
    """The state after each step, ``state = step(fixed, state, input)``.

    To be recorded, a step must depend on nothing but its arguments, the recorder's constants, its owner and ``key``,
    and must not ask for the value of a tensor. Without a recorder, and on a CPU, steps are simply taken.
    """
    tape: _Tape | None = None
    records = recorder is not None and can_record((fixed, state)) and tree.nbytes((fixed, state)) <= _LARGE
    for x in inputs:
        if tape is None and recorder is not None and records:
            tape = _tapes(recorder.owner).loaded(key, recorder.constants, fixed, state)
            records = tape is not None
        if tape is None:
            state = step(fixed, state, x)
            yield state
        else:
            tape.advance(step, x)
            yield tree.tmap(torch.clone, tape.state)


def after(
    step: Callable[[F, S, X], S],
    fixed: F,
    state: S,
    inputs: Iterable[X],
    recorder: Recorder | None = None,
    key: Hashable = None,
) -> S:
    """The state after the last step: see ``repeated``."""
    last = state
    for last in repeated(step, fixed, state, inputs, recorder, key):  # noqa: B007  the last one is what is wanted
        pass
    return last


def recording_notes(owner: Any) -> tuple[str, ...]:
    """What became of the steps of this owner."""
    return tuple(_OF[owner].notes) if owner in _OF else ()


def forget_recordings(owner: Any) -> None:
    """Free the memory of all recordings of this owner."""
    if owner in _OF:
        _OF[owner].forget()


def can_record(value: Any) -> bool:
    """Whether all tensors of a tree are on a GPU."""
    return all(leaf.device.type == "cuda" for leaf in tree.leaves(value))


class _Tapes:
    """The recordings of one owner."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._held: dict[Hashable, _Tape] = {}

    def loaded(self, key: Hashable, constants: tuple[Tensor, ...], fixed: Any, state: Any) -> _Tape | None:
        """The recordings of the step ``key`` with these values; None if there is no memory for them.

        Of each step those of one layout are kept.
        """
        form = (_layout(fixed), _layout(state), tuple(each.data_ptr() for each in constants))
        try:
            if key not in self._held or self._held[key].form != form:
                self._held.pop(key, None)
                self._held[key] = _Tape(self.notes, form, constants, fixed, state)
            self._held[key].load(fixed, state)
        except torch.OutOfMemoryError:
            self.forget()
            return None
        return self._held[key]

    def forget(self) -> None:
        self._held.clear()


_OF: weakref.WeakKeyDictionary[Any, _Tapes] = weakref.WeakKeyDictionary()


def _tapes(owner: Any) -> _Tapes:
    return _OF.setdefault(owner, _Tapes())


def _layout(value: Any) -> tuple[Any, ...]:
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree.leaves(value))


class _Recording(NamedTuple):
    """A recorded step for inputs of one layout."""

    held: Any  # the input that it reads
    replay: Callable[[], None]
    load: int  # by which values it was made; 0 once it has been checked with others


class _Tape:
    """The memory of a step at fixed addresses, and its recording for each layout of inputs."""

    def __init__(self, notes: list[str], form: Any, constants: tuple[Tensor, ...], fixed: Any, state: Any) -> None:
        self.form = form
        self.fixed, self.state = tree.tmap(torch.clone, fixed), tree.tmap(torch.clone, state)
        self._notes, self._constants = notes, constants  # held, so that their addresses are not used again
        self._device = tree.leaves(state)[0].device
        self._warm: dict[Any, int] = {}
        self._recorded: dict[Any, _Recording] = {}
        self._loads, self._refused = 0, False
        self._pool: Any = None

    def load(self, fixed: Any, state: Any) -> None:
        self._loads += 1
        _write(self.fixed, fixed)
        _write(self.state, state)

    def advance(self, step: Callable[[Any, Any, Any], Any], x: Any) -> None:
        """One step of the state."""
        kind = _layout(x)
        found = self._recorded.get(kind)
        if found is not None and found.load in (0, self._loads):
            _write(found.held, x)
            found.replay()
            return
        taken = self._warm[kind] = self._warm.get(kind, 0) + 1
        if self._refused or taken <= _WARM or not can_record(x):
            _write(self.state, step(self.fixed, self.state, x))
        else:
            self._take_both(step, x, kind, found)

    def _take_both(self, step: Callable[[Any, Any, Any], Any], x: Any, kind: Any, found: _Recording | None) -> None:
        """Take the step by itself and by its recording, and compare; the recording is made if there is none."""
        began, before = time.perf_counter(), None
        try:
            before = tree.tmap(torch.clone, self.state)
            expected = self._beside(lambda: tree.tmap(torch.clone, step(self.fixed, before, x)))
            made = self._record(step, x) if found is None else found._replace(load=0)
            _write(made.held, x)
            made.replay()
            if not _close(self.state, expected):
                raise RuntimeError("it does not repeat the step")
            self._recorded[kind] = made
            if found is None:
                self._notes.append(f"a step of the server was recorded in {time.perf_counter() - began:.1f} s")
        except RuntimeError as error:  # an operation that cannot be recorded, or no memory for it
            self._refused = True
            self._recorded.clear()
            self._notes.append(f"a step of the server is not recorded: {str(error).strip().splitlines()[0][:200]}")
            if before is not None:
                _write(self.state, before)
            _write(self.state, step(self.fixed, self.state, x))

    def _record(self, step: Callable[[Any, Any, Any], Any], x: Any) -> _Recording:
        held = tree.tmap(torch.clone, x)
        replay = self._captured(lambda: _write(self.state, step(self.fixed, self.state, held)))
        return _Recording(held, replay, self._loads)

    def _beside(self, compute: Callable[[], S]) -> S:
        """What this computes, on the stream that is recorded: some libraries prepare for a stream at its first use."""
        if self._device.type != "cuda":
            return compute()
        stream = _side_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = compute()
        torch.cuda.current_stream().wait_stream(stream)
        return found

    def _captured(self, operations: Callable[[], None]) -> Callable[[], None]:
        """These operations as one call."""
        if self._device.type != "cuda":
            return operations
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        record_graph(graph, operations, self._pool, _side_stream(self._device))
        replay: Callable[[], None] = graph.replay
        return replay


@cache
def _side_stream(device: torch.device) -> Any:
    """The stream of all recordings; libraries keep memory for every stream that they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def record_graph(graph: Any, operations: Callable[[], None], pool: Any, stream: Any = None) -> None:
    """Record operations as a CUDA graph with memory from ``pool``; if that fails, go on as if it had not been tried.

    After a failure torch leaves the thread on the recorded stream, its allocator and its generator in the recording.
    """
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            operations()
    except RuntimeError:
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):  # where torch has ended that itself
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):  # the generator ends with this one
            torch.zeros(1, device="cuda")
        torch.cuda.set_stream(before)
        raise


def _write(to: Any, values: Any) -> None:
    """Copy values into tensors of the same layout. Values may be parts of these tensors, in any order."""
    places = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(to)}
    apart = [v.clone() if v.untyped_storage().data_ptr() in places else v for v in tree.leaves(values)]
    for place, value in zip(tree.leaves(to), apart, strict=True):
        place.copy_(value)


def _close(a: Any, b: Any) -> bool:
    """Whether two states differ by rounding at most."""
    pairs = [(x.double(), y.double()) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)]
    scale = max((float(y.nan_to_num(0, 0, 0).abs().max()) for _, y in pairs if y.numel()), default=0.0)
    return all(torch.allclose(x, y, rtol=_CLOSE, atol=1e-6 * scale, equal_nan=True) for x, y in pairs)
