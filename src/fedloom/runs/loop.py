"""The loop over rounds: train, evaluate, record, checkpoint, until the last round or a request to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedloom.core.errors import (
    DivergedError,
    LostRankError,
)
from fedloom.engine import checkpoint, graphs
from fedloom.engine.ranks import Ranks
from fedloom.engine.rounds import rounds
from fedloom.engine.state import Experiment
from fedloom.engine.store import ClientStore, DiskStore, RamStore
from fedloom.runs.entry import Resumption, enter
from fedloom.runs.evaluation import evaluates, evaluation_line, lines_of
from fedloom.runs.finish import common_model, finish
from fedloom.runs.folder import RunFolder, Timing, intact, storage
from fedloom.runs.prepare import Prepared
from fedloom.runs.result import History
from fedloom.runs.settings import Config

_ONE_SIGNAL = 2.0  # seconds within which several ranks may be told of one signal more than once


class Progress(NamedTuple):
    """How far a run is."""

    round: int
    rounds: int
    metrics: dict[str, float]  # of the newest evaluation
    excluded: tuple[int, ...]  # clients left out of this round because their work was not finite
    clients: int  # that trained in this round
    seconds: float  # that this round took
    late: int = 0  # of these clients, how many missed the deadline
    notes: tuple[str, ...] = ()  # what the engine has to say of this round, in words


class Listener(Protocol):
    """Somebody who watches a run; the run itself never prints."""

    def started(self, prepared: Prepared, folder: Path | None, done: int) -> None: ...

    def advanced(self, progress: Progress) -> None: ...

    def stopping(self) -> None: ...


class Silence:
    """A listener that says nothing."""

    def started(self, prepared: Prepared, folder: Path | None, done: int) -> None: ...

    def advanced(self, progress: Progress) -> None: ...

    def stopping(self) -> None: ...


class InterruptedRun(KeyboardInterrupt):
    """A run that was asked to stop, and was saved."""

    def __init__(self, run_dir: Path | None, round_: int) -> None:
        super().__init__(f"stopped after round {round_}")
        self.run_dir, self.round = run_dir, round_


def drive(prepared: Prepared, folder: RunFolder | None, how: Resumption | None, listener: Listener) -> History:
    """The loop over rounds, from the first one or as a run that goes on."""
    told = prepared.experiment.ranks.broadcast(str(folder.path) if folder else None)
    path = Path(told) if told is not None else None
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


def _rounds(
    prepared: Prepared, folder: RunFolder | None, path: Path | None, how: Resumption | None, listener: Listener
) -> History:
    """The rounds, on each rank; ``path`` is the run folder, where there is one, and ``folder`` only rank 0 has."""
    exp, config, ranks = prepared.experiment, prepared.config, prepared.experiment.ranks
    store = _store(config, exp, folder.path if folder else None)
    state, records, told = enter(prepared, store, folder, path, how)
    prepared = prepared._replace(config=config._replace(notes=(*config.notes, *told)))
    listener.started(prepared, path, state.round)
    earlier = folder.spent() if folder else 0.0
    saved, clock, newest = state.round, time.perf_counter(), records[-1] if records else {}
    with _interruptible(listener, ranks) as stop:
        if not records or (state.round == exp.rounds and not evaluates(records[-1], state.round)):
            newest = evaluation_line(exp, state, store)
            records.append(newest)
            if folder:
                folder.metrics(newest)
        coming, said = rounds(exp, state, store), 0
        while state.round < exp.rounds:
            began = time.perf_counter()
            state, excluded, found, did = next(coming)
            trained = time.perf_counter()
            lines = lines_of(exp, state, store, excluded, found)
            records += lines
            newest = lines[-1] if lines and evaluates(lines[-1], state.round) else newest
            evaluated = time.perf_counter()
            if folder:
                for line in lines:
                    folder.metrics(line)
                if exp.evaluate.work:
                    folder.work(state.round, did)
            ended = ranks.any_rank(stop.is_set()) or state.round == exp.rounds
            if path and (ended or state.round - saved >= config.checkpoint.every):
                checkpoint.save(path / "checkpoints", state, store, folder.lengths() if folder else {}, ranks)
                saved = state.round
            clients = len(exp.present(state.round - 1).drawn.ids)
            now = time.perf_counter()
            if folder:
                folder.timing(Timing(state.round, trained - began, evaluated - trained, now - evaluated, clients))
            late = sum(each.late for each in did)
            notes, said = graphs.built(exp.task).notes[said:], len(graphs.built(exp.task).notes)
            listener.advanced(Progress(state.round, exp.rounds, newest, excluded, clients, now - began, late, notes))
            if ended and state.round < exp.rounds:
                raise InterruptedRun(path, state.round)
    model = common_model(exp, state, store)
    seconds = earlier + time.perf_counter() - clock
    history = History(
        algorithm=config.kinds["algorithm"],
        rounds=state.round,
        seconds=seconds,
        records=records,
        model=exp.task.module(*model) if model is not None else None,
        run_dir=path,
    )
    if path:
        finish(prepared, folder, state, store, history, model)
    return history


def _store(config: Config, exp: Experiment, folder: Path | None) -> ClientStore:
    if config.engine.store == "disk":
        return DiskStore(folder / "clients" if folder is not None else None, exp.federation.clients)
    return RamStore(exp.federation.clients)


@contextmanager
def _interruptible(listener: Listener, ranks: Ranks) -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM finish the round, so that it can be saved; a second one stops at once.

    Who starts several ranks may pass on a signal that has reached them already: that is not a second one.
    """
    stop, asked = threading.Event(), 0.0
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(_number: int, _frame: Any) -> None:
        nonlocal asked
        if stop.is_set() and (ranks.size == 1 or time.perf_counter() - asked > _ONE_SIGNAL):
            raise KeyboardInterrupt
        if stop.is_set():
            return
        asked = time.perf_counter()
        stop.set()
        listener.stopping()

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)
