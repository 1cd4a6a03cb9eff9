"""Repeated steps: what is recorded computes what the steps do.

On a CPU a recording is the step itself, on the memory that a recording has: what is tested is that memory. On a GPU the
same tests record CUDA graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedloom.core import replay, tree
from fedloom.core.replay import Recorder, after, record_graph, recording_notes, repeated

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"))


class Owner:
    """Anything that recordings may belong to."""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record on every device."""
    monkeypatch.setattr(replay, "can_record", lambda value: True)


def step(fixed: Any, state: Any, x: Any) -> Any:
    """The parts of the state change places, which a recording must not mix up."""
    a, (b, count) = state
    return b * fixed + x.sum(), (a.clone(), count + 1)


def world(device: str = "cpu", sizes: tuple[int, ...] = (3, 3, 2, 3, 3, 2, 3, 3, 2, 3)) -> tuple[Any, Any, list[Any]]:
    made = torch.Generator().manual_seed(1)
    fixed, a, b = (torch.randn(4, generator=made).to(device) for _ in range(3))
    inputs = [torch.randn(n, generator=made).to(device) for n in sizes]
    return fixed, (a, (b, torch.zeros((), dtype=torch.int64, device=device))), inputs


def plain(fixed: Any, state: Any, inputs: list[Any]) -> list[Any]:
    found = []
    for x in inputs:
        state = step(fixed, state, x)
        found.append(state)
    return found


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_states_are_those_of_the_steps(recorded: None, device: str) -> None:
    """With inputs of two lengths, and in a second call with other values, in which nothing needs to be recorded."""
    fixed, state, inputs = world(device)
    recorder = Recorder(Owner())
    before = tree.tmap(torch.clone, (fixed, state, inputs[0]))
    a, (b, count) = state
    for scale in (1.0, -0.5):
        start = fixed * scale, (a * scale, (b * scale, count))
        want, found = plain(*start, inputs), list(repeated(step, *start, inputs, recorder, "key"))
        assert same(tuple(found), tuple(want))  # none was overwritten by a later step
        assert same(after(step, *start, inputs, recorder, "key"), want[-1])
    assert same(before, (fixed, state, inputs[0]))
    assert [note[:33] for note in recording_notes(recorder.owner)] == ["a step of the server was recorded"] * 2


def test_without_a_recorder_and_on_a_cpu_steps_are_taken_as_they_are() -> None:
    world_, owner = world(), Owner()
    assert same(tuple(repeated(step, *world_)), tuple(plain(*world_)))
    assert same(after(step, *world_, Recorder(owner), "key"), plain(*world_)[-1])
    assert same(after(step, *world_[:2], []), world_[1])
    assert recording_notes(owner) == ()


def test_few_steps_are_not_recorded(recorded: None) -> None:
    recorder = Recorder(Owner())
    fixed, state, inputs = world(sizes=(3, 2, 3, 2))
    assert same(after(step, fixed, state, inputs, recorder, "key"), plain(fixed, state, inputs)[-1])
    assert recording_notes(recorder.owner) == ()


def breaks(_: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("operation not permitted when stream is capturing\nmore of it")


def does_nothing(_: Callable[[], None]) -> Callable[[], None]:
    return lambda: None


@pytest.mark.parametrize(("captured", "why"), [(breaks, "not permitted"), (does_nothing, "does not repeat the step")])
def test_what_cannot_be_recorded_is_computed_all_the_same(
    recorded: None, monkeypatch: pytest.MonkeyPatch, captured: Any, why: str
) -> None:
    monkeypatch.setattr(replay._Tape, "_captured", lambda self, operations: captured(operations))
    recorder, world_ = Recorder(Owner()), world()
    assert same(tuple(repeated(step, *world_, recorder, "key")), tuple(plain(*world_)))
    (note,) = recording_notes(recorder.owner)
    assert why in note
    assert "\n" not in note


def test_a_diverging_step_is_recorded_like_any_other(recorded: None) -> None:
    recorder, (fixed, state, inputs) = Recorder(Owner()), world()
    fixed = fixed * torch.nan
    assert all(t[0].isnan().all() for t in repeated(step, fixed, state, inputs, recorder, "key"))
    assert "recorded in" in recording_notes(recorder.owner)[0]


def test_steps_with_other_keys_constants_and_shapes_are_apart(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    tape = replay._Tape
    monkeypatch.setattr(replay, "_Tape", lambda *given: made.append(given) or tape(*given))
    owner, (fixed, state, inputs) = Owner(), world()
    one, other = (Recorder(owner, (torch.full((3,), n),)) for n in (0.0, 1.0))
    for key in ("one", "other"):
        for _ in range(2):
            after(step, fixed, state, inputs, one, key)
    assert len(made) == 2
    after(step, fixed, state, inputs, other, "one")
    assert len(made) == 3
    a, (b, count) = state
    fewer = fixed[:1], (a[:1], (b[:1], count))
    assert same(after(step, *fewer, inputs, other, "one"), plain(*fewer, inputs)[-1])
    assert len(made) == 4
    assert len(replay._tapes(owner)._held) == 2  # of each key the last layout


def test_large_steps_and_no_steps_are_not_recorded(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, (fixed, state, inputs) = Owner(), world()
    after(step, fixed, state, [], Recorder(owner), "key")
    assert owner not in replay._OF
    monkeypatch.setattr(replay, "_LARGE", 8)
    assert same(after(step, fixed, state, inputs, Recorder(owner), "key"), plain(fixed, state, inputs)[-1])
    assert owner not in replay._OF


def test_where_memory_is_full_steps_are_taken_as_they_are(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    recorder, world_ = Recorder(Owner()), world()
    monkeypatch.setattr(replay._Tape, "_beside", full)  # in the middle of the steps
    assert same(tuple(repeated(step, *world_, recorder, "key")), tuple(plain(*world_)))
    monkeypatch.setattr(replay._Tape, "load", full)  # before the first one
    assert same(tuple(repeated(step, *world_, recorder, "key")), tuple(plain(*world_)))
    assert not replay._tapes(recorder.owner)._held


def test_what_a_recording_has_kept_of_its_first_values_is_found_with_the_next(recorded: None) -> None:
    """A number of the first call, which is not in the state and not in the input."""
    owner, (fixed, state, inputs) = Owner(), world()
    for rate in (2.0, 1.0, 1.0):  # a recording goes on with the rate that it was made with

        def scaled(fixed: Any, state: Any, x: Any, rate: float = rate) -> Any:
            return step(fixed * rate, state, x)

        found = after(scaled, fixed, state, inputs, Recorder(owner), "key")
        assert same(found, plain(fixed * rate, state, inputs)[-1])
    assert "does not repeat the step" in recording_notes(owner)[-1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_recording_that_fails_leaves_no_trace() -> None:
    x, before = torch.ones(2, device="cuda"), torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        record_graph(torch.cuda.CUDAGraph(), lambda: x.add_(float(x.sum())), torch.cuda.graph_pool_handle())
    assert torch.cuda.current_stream() == before
    torch.cuda.empty_cache()
    assert torch.randn(3, device="cuda").isfinite().all()
    graph = torch.cuda.CUDAGraph()
    record_graph(graph, lambda: x.add_(1), torch.cuda.graph_pool_handle())
    graph.replay()
    assert x.tolist() == [2, 2]


def test_recordings_are_forgotten_with_their_owner(recorded: None) -> None:
    owner = Owner()
    after(step, *world(), Recorder(owner), "key")
    known = len(replay._OF)
    del owner
    gc.collect()
    assert len(replay._OF) == known - 1
