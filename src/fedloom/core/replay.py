"""The same small step many times in a row: on a GPU it is recorded once, as a CUDA graph, and replayed.

A step of a server on some of its own examples is a hundred kernels that each take less time than Python needs to start
them. What such a step reads and writes is at fixed addresses here: what stays the same for a while, the state that it
moves, and its input. A recording is checked once against the step itself, and is not used if they differ.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedloom.core import tree

F = TypeVar("F")
S = TypeVar("S")
X = TypeVar("X")

# Steps that are taken without a recording before the first one is made: libraries choose algorithms in them.
_WARM = 2
# Recordings with memory of their own that are kept; the oldest is dropped for another one.
_KEPT = 8
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
    if recorder is None or not _is_recorded(state):
        for x in inputs:
            state = step(fixed, state, x)
            yield state
        return
    for held in _replayed(step, fixed, state, inputs, recorder, key):
        yield tree.tmap(torch.clone, held)


def after(
    step: Callable[[F, S, X], S],
    fixed: F,
    state: S,
    inputs: Iterable[X],
    recorder: Recorder | None = None,
    key: Hashable = None,
) -> S:
    """The state after the last step: see ``repeated``."""
    if recorder is None or not _is_recorded(state):
        for x in inputs:
            state = step(fixed, state, x)
        return state
    for held in _replayed(step, fixed, state, inputs, recorder, key):
        state = held
    return tree.tmap(torch.clone, state)


def _replayed(
    step: Callable[[F, S, X], S], fixed: F, state: S, inputs: Iterable[X], recorder: Recorder, key: Hashable
) -> Iterator[S]:
    """The state after each step, in memory that the next one overwrites."""
    tape = _tapes(recorder.owner).tape(key, recorder.constants, fixed, state)
    tape.load(fixed, state)
    for x in inputs:
        tape.advance(step, x)
        yield tape.state


def recording_notes(owner: Any) -> tuple[str, ...]:
    """What became of the steps of this owner."""
    return tuple(_OF[owner].notes) if owner in _OF else ()


def _is_recorded(state: Any) -> bool:
    return any(leaf.device.type == "cuda" for leaf in tree.leaves(state))


class _Tapes:
    """The recordings of one owner."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._held: dict[Any, _Tape] = {}

    def tape(self, key: Hashable, constants: tuple[Tensor, ...], fixed: Any, state: Any) -> _Tape:
        """The recordings of the step ``key`` on tensors of these shapes."""
        full = (key, _layout(fixed), _layout(state), tuple(each.data_ptr() for each in constants))
        found = self._held.pop(full, None)
        if found is None:
            while len(self._held) >= _KEPT:
                del self._held[next(iter(self._held))]
            found = _Tape(self.notes, constants, fixed, state)
        self._held[full] = found
        return found


_OF: weakref.WeakKeyDictionary[Any, _Tapes] = weakref.WeakKeyDictionary()


def _tapes(owner: Any) -> _Tapes:
    return _OF.setdefault(owner, _Tapes())


def _layout(value: Any) -> tuple[Any, ...]:
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree.leaves(value))


class _Tape:
    """The memory of a step at fixed addresses, and its recording for each layout of inputs."""

    def __init__(self, notes: list[str], constants: tuple[Tensor, ...], fixed: Any, state: Any) -> None:
        self.fixed, self.state = tree.tmap(torch.clone, fixed), tree.tmap(torch.clone, state)
        self._notes, self._constants = notes, constants  # held, so that their addresses are not used again
        self._warm: dict[Any, int] = {}
        self._recorded: dict[Any, tuple[Any, Callable[[], None]]] = {}
        self._refused = False
        self._pool: Any = None
        self._stream: Any = torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]

    def load(self, fixed: Any, state: Any) -> None:
        _write(self.fixed, fixed)
        _write(self.state, state)

    def advance(self, step: Callable[[Any, Any, Any], Any], x: Any) -> None:
        """One step of the state."""
        kind = _layout(x)
        if kind in self._recorded:
            held, replay = self._recorded[kind]
            _write(held, x)
            replay()
            return
        taken = self._warm[kind] = self._warm.get(kind, 0) + 1
        if self._refused or taken <= _WARM:
            _write(self.state, step(self.fixed, self.state, x))
            return
        self._record(step, x, kind)

    def _record(self, step: Callable[[Any, Any, Any], Any], x: Any, kind: Any) -> None:
        """Record the step for inputs like this one, and take it with this one."""
        began, before = time.perf_counter(), tree.tmap(torch.clone, self.state)
        expected, held = self._beside(lambda: tree.tmap(torch.clone, (step(self.fixed, before, x), x)))
        try:
            replay = self._captured(lambda: _write(self.state, step(self.fixed, self.state, held)))
            replay()
            if not _close(self.state, expected):
                raise RuntimeError("it does not repeat the step")
        except RuntimeError as error:  # an operation that cannot be recorded, or no memory for it
            self._refused = True
            self._recorded.clear()
            self._notes.append(f"a step of the server is not recorded: {str(error).strip().splitlines()[0][:200]}")
            _write(self.state, expected)
            return
        self._recorded[kind] = held, replay
        self._notes.append(f"a step of the server was recorded in {time.perf_counter() - began:.1f} s")

    def _beside(self, compute: Callable[[], S]) -> S:
        """What this computes, on the stream that is recorded: some libraries prepare for a stream at its first use."""
        if self._stream is None:
            return compute()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            found = compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        return found

    def _captured(self, operations: Callable[[], None]) -> Callable[[], None]:
        """These operations as one call."""
        if self._stream is None:
            return operations
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            operations()
        self._pool = graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay


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
