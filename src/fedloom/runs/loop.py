"""The loop over rounds: train, evaluate, record, checkpoint, until the last round or a request to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedloom.core.errors import (
    DivergedError,
    LostRankError,
)
from fedloom.core.signals import handling
from fedloom.engine import checkpoint, cuda_graphs
from fedloom.engine.ranks import Ranks
from fedloom.engine.rounds import rounds
from fedloom.engine.state import Experiment, Round, RunState
from fedloom.engine.store import ClientStore, DiskStore, RamStore
from fedloom.engine.together import asked_to_stop
from fedloom.runs.entry import Resumption, enter
from fedloom.runs.evaluation import evaluates, evaluation_line, lines_of
from fedloom.runs.finish import common_model, finish
from fedloom.runs.folder import RunFolder, Timing, intact, storage
from fedloom.runs.prepare import Prepared
from fedloom.runs.result import History
from fedloom.runs.settings import Config
from fedloom.runs.tracking import tracking

_ONE_SIGNAL = 2.0  # seconds within which several ranks may receive one signal more than once


class Progress(NamedTuple):
    """How far a run is."""

    round: int
    rounds: int
    metrics: dict[str, float]  # the newest evaluation
    excluded: tuple[int, ...]  # clients excluded from this round because their updates were not finite
    clients: int  # that trained in this round
    seconds: float  # that this round took
    late: int = 0  # of these clients, how many missed the deadline
    notes: tuple[str, ...] = ()  # notes of the engine on this round


class Listener(Protocol):
    """Follows a run, which never prints anything itself."""

    def started(self, prepared: Prepared, folder: Path | None, done: int) -> None: ...

    def advanced(self, progress: Progress) -> None: ...

    def stopping(self) -> None: ...


class SilentListener:
    """A listener that shows nothing."""

    def started(self, prepared: Prepared, folder: Path | None, done: int) -> None: ...

    def advanced(self, progress: Progress) -> None: ...

    def stopping(self) -> None: ...


class InterruptedRun(KeyboardInterrupt):
    """A run that was asked to stop, and was saved."""

    def __init__(self, run_dir: Path | None, round_: int) -> None:
        super().__init__(f"stopped after round {round_}")
        self.run_dir, self.round = run_dir, round_


def drive(prepared: Prepared, folder: RunFolder | None, how: Resumption | None, listener: Listener) -> History:
    """Run the loop, from the first round or from a checkpoint; errors say what was saved."""
    place = prepared.experiment.ranks.broadcast(str(folder.path) if folder else None)
    path = Path(place) if place is not None else None
    try:
        with storage(path):
            return _rounds(prepared, folder, path, how, listener)
    except LostRankError as error:
        raise LostRankError(f"{error}{intact(path)}") from error
    except DivergedError:
        if folder is not None:
            with storage(path):
                folder.end()
        raise


class _Run(NamedTuple):
    """What stays the same from the first round to the last."""

    prepared: Prepared
    store: ClientStore
    folder: RunFolder | None  # rank 0 has it, if there is one
    path: Path | None  # of the folder, on every rank

    @property
    def exp(self) -> Experiment:
        return self.prepared.experiment


def _rounds(
    prepared: Prepared, folder: RunFolder | None, path: Path | None, how: Resumption | None, listener: Listener
) -> History:
    """The rounds, on each rank: train, evaluate, write, save, report."""
    exp, config = prepared.experiment, prepared.config
    run = _Run(prepared, _store(config, exp, folder.path if folder else None), folder, path)
    state, records, notes = enter(prepared, run.store, folder, path, how)
    listener.started(prepared._replace(config=config._replace(notes=(*config.notes, *notes))), path, state.round)
    earlier = folder.spent() if folder else 0.0
    began = time.perf_counter()
    with _interruptible(listener, exp.ranks) as stop, tracking(prepared, path, state.round) as tracked:
        first = _first_line(run, state, records)
        records += first
        for line in first:
            tracked.track(line)
        newest, saved, reported = records[-1], state.round, set[str]()
        coming = rounds(exp, state, run.store)
        while state.round < exp.rounds:
            clock = [time.perf_counter()]
            done = next(coming)
            state = done.state
            clock.append(time.perf_counter())
            lines = lines_of(exp, state, run.store, done.excluded, done.found)
            records += lines
            newest = lines[-1] if lines and evaluates(lines[-1], state.round) else newest
            clock.append(time.perf_counter())
            _write(run, done, lines)
            for line in lines:
                tracked.track(line)
            ends = exp.ranks.any_rank(stop.is_set()) or state.round == exp.rounds
            saved = _save(run, state, saved, ends=ends)
            if ends:
                tracked.end("FINISHED" if state.round == exp.rounds else "KILLED")
            clock.append(time.perf_counter())
            noted = cuda_graphs.built(exp.task).notes
            said = (*(note for note in noted if note not in reported), *tracked.new_notes())
            listener.advanced(_progress(run, done, newest, clock, said))
            reported.update(noted)
            if ends and state.round < exp.rounds:
                raise InterruptedRun(path, state.round)
    return _result(run, state, records, earlier + time.perf_counter() - began)


def _first_line(run: _Run, state: RunState, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The evaluation before the first round, or the last one of a run that was stopped before it was evaluated."""
    if records and (state.round < run.exp.rounds or evaluates(records[-1], state.round)):
        return []
    line = evaluation_line(run.exp, state, run.store)
    if run.folder:
        run.folder.metrics(line)
    return [line]


def _write(run: _Run, done: Round, lines: list[dict[str, Any]]) -> None:
    """Append the lines of a round, and the work of its clients where that is recorded."""
    if run.folder:
        for line in lines:
            run.folder.metrics(line)
        if run.exp.evaluate.work:
            run.folder.work(done.state.round, done.work)


def _save(run: _Run, state: RunState, saved: int, *, ends: bool) -> int:
    """Write a checkpoint if one is due or the run ends, on every rank; returns the round of the newest one."""
    if run.path is None or not (ends or state.round - saved >= run.prepared.config.checkpoint.every):
        return saved
    lengths = run.folder.lengths() if run.folder else {}
    checkpoint.save(run.path / "checkpoints", state, run.store, lengths, run.exp.ranks)
    return state.round


def _progress(
    run: _Run, done: Round, newest: dict[str, Any], clock: Sequence[float], notes: tuple[str, ...]
) -> Progress:
    """The report of a round, whose timing is written; ``clock``: the times between its stages."""
    exp, number, clients = run.exp, done.state.round, len(done.work)
    train, evaluate, record = (end - begin for begin, end in pairwise(clock))
    if run.folder:
        run.folder.timing(Timing(number, train, evaluate, record, clients))
    late = sum(each.late for each in done.work)
    return Progress(number, exp.rounds, newest, done.excluded, clients, clock[-1] - clock[0], late, notes)


def _result(run: _Run, state: RunState, records: list[dict[str, Any]], seconds: float) -> History:
    """The finished run, after the model, the curves and the summary are written."""
    exp, config = run.exp, run.prepared.config
    model = common_model(exp, state, run.store)
    history = History(
        algorithm=config.kinds["algorithm"],
        rounds=state.round,
        seconds=seconds,
        records=records,
        model=exp.task.module(*model) if model is not None else None,
        run_dir=run.path,
    )
    if run.path:
        finish(run.prepared, run.folder, state, run.store, history, model)
    return history


def _store(config: Config, exp: Experiment, folder: Path | None) -> ClientStore:
    if config.engine.store == "disk":
        return DiskStore(folder / "clients" if folder is not None else None, exp.federation.clients)
    return RamStore(exp.federation.clients)


@contextmanager
def _interruptible(listener: Listener, ranks: Ranks) -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM finish the round, so that it can be saved; a second one stops at once.

    The launcher of several ranks may forward a signal that has reached them already: this is not a second one.
    """
    stop, asked, at_once = asked_to_stop() or threading.Event(), 0.0, False
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(_number: int, _frame: Any) -> None:
        nonlocal asked, at_once
        if stop.is_set() and (ranks.size == 1 or time.perf_counter() - asked > _ONE_SIGNAL):
            at_once = True
            raise KeyboardInterrupt
        if stop.is_set():
            return
        asked = time.perf_counter()
        stop.set()
        listener.stopping()

    try:
        with handling(handle):
            yield stop
    except RuntimeError as error:
        if at_once:  # torch makes an error of an interruption that passes through its C++ code
            raise KeyboardInterrupt from error
        raise
