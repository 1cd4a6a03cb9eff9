"""The epsilon that a private run has recorded: it never ends with less, even after going back to a checkpoint.

Rounds that are repeated send the same numbers with the same noise, and cost nothing new. A run that goes back and ends
earlier has released the later rounds nevertheless. During the run, privacy.json records what they cost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from fedloom.engine import checkpoint
from fedloom.engine.state import RunState
from fedloom.runs.changes import privacy_record
from fedloom.runs.folder import METRICS, RunFolder
from fedloom.runs.prepare import Prepared

_FILE, _BEFORE = "privacy.json", "epsilon_before"


def with_spent(path: Path, prepared: Prepared) -> Prepared:
    """The same run, with a guard that knows the largest epsilon recorded in its folder."""
    exp = prepared.experiment
    if exp.guard is None:
        return prepared
    spent = max((value for value in _recorded(path, exp.guard.metric) if isfinite(value)), default=0.0)
    return prepared._replace(experiment=replace(exp, guard=exp.guard._replace(spent=spent)))


def remember_spent(folder: RunFolder, prepared: Prepared, state: RunState) -> None:
    """Record what the later rounds have cost, before they are dropped from the run folder."""
    guard = prepared.experiment.guard
    if guard is not None and state.ledger is not None and guard.spent > state.ledger.epsilon():
        folder.write(_FILE, _record(folder.path) | {_BEFORE: guard.spent})


def rewrite_privacy(folder: RunFolder, prepared: Prepared) -> None:
    """Describe the privacy of a run that continues; the recorded cost stays."""
    if prepared.experiment.guard is not None:
        before = {name: value for name, value in _record(folder.path).items() if name == _BEFORE}
        folder.write(_FILE, privacy_record(prepared) | before)


def settle_spent(folder: RunFolder, prepared: Prepared) -> None:
    """Delete the recorded cost once the last line of the metrics contains it."""
    if prepared.experiment.guard is not None and _BEFORE in _record(folder.path):
        folder.write(_FILE, privacy_record(prepared))


def _recorded(path: Path, metric: str) -> Iterator[float]:
    """Each epsilon recorded in a run folder: in its metrics, its checkpoints, and from before it went back."""
    lines = (path / METRICS).read_bytes().splitlines() if (path / METRICS).is_file() else []
    for found, name in (*((_table(line), metric) for line in lines), (_record(path), _BEFORE)):
        if isinstance(value := found.get(name), int | float):
            yield float(value)
    for ledger in checkpoint.ledgers(path / "checkpoints"):
        yield ledger.epsilon()


def _record(path: Path) -> dict[str, Any]:
    return _table((path / _FILE).read_bytes()) if (path / _FILE).is_file() else {}


def _table(text: bytes) -> dict[str, Any]:
    """A JSON object; empty if it was cut short or damaged, which is refused elsewhere."""
    with suppress(ValueError, RecursionError):
        return found if isinstance(found := json.loads(text), dict) else {}
    return {}
