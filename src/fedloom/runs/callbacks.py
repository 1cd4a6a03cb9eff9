"""User functions that are called during a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from fedloom.runs.loop import Listener, Progress
from fedloom.runs.prepare import Prepared

OnRound: TypeAlias = Callable[[Progress], object]
OnEvaluate: TypeAlias = Callable[[int, Mapping[str, float]], object]


class Calling:
    """A listener that also calls ``on_round`` after each round and ``on_evaluate`` after each evaluation."""

    def __init__(self, listener: Listener, on_round: OnRound | None, on_evaluate: OnEvaluate | None) -> None:
        self._listener, self._on_round, self._on_evaluate = listener, on_round, on_evaluate

    def started(self, prepared: Prepared, folder: Path | None, done: int) -> None:
        self._listener.started(prepared, folder, done)

    def advanced(self, progress: Progress) -> None:
        self._listener.advanced(progress)
        if self._on_round is not None:
            self._on_round(progress)
        if self._on_evaluate is not None and progress.metrics.get("round") == progress.round:
            self._on_evaluate(progress.round, progress.metrics)

    def stopping(self) -> None:
        self._listener.stopping()
