"""The results of cells, read from their run folders, and refused if a folder has changed since its run."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.compare.cells import Cell
from fedloom.compare.folder import state_of
from fedloom.compare.plan import ComparisonPlan
from fedloom.core.errors import CheckpointError
from fedloom.core.vocabulary import is_evaluation, is_privacy
from fedloom.data.partition import Natural
from fedloom.data.sources import Synthetic
from fedloom.report.comparison.question import PrivacyCost, Result
from fedloom.runs.folder import read_ended

_PARTITION = {"sha256": str, "data_sha256": str, "notes": list}
_PRIVACY = {"unit": str, "relation": str, "delta": float}


class LeftOut(NamedTuple):
    """The hashes of cells that were not run, and why they were not."""

    hashes: Collection[str]
    why: str


def read_results(planned: ComparisonPlan, cells: Path, without: LeftOut) -> tuple[list[Result], dict[str, str]]:
    """The result of every cell; cells whose files have changed count as failed, with the reason.

    Cells that were left out have no result unless they were run here before.
    """
    results, damaged = [], {}
    for cell in planned.cells:
        home = cells / cell.hash
        if cell.hash in without.hashes and not state_of(home):
            results.append(as_result(cell, "missing"))
            continue
        try:
            results.append(result_of(cell, home))
        except CheckpointError as error:
            damaged[cell.name] = f"{error}; delete {home} and repeat the command to rerun it"
            results.append(as_result(cell, "failed"))
    return results, damaged


def as_result(
    cell: Cell,
    state: str,
    records: Sequence[dict[str, Any]] = (),
    partition: str = "",
    spent: PrivacyCost | None = None,
    repairs: Iterable[str] = (),
) -> Result:
    """A result of this cell."""
    own = (cell.place, cell.method.label, cell.method.kind, cell.seed, cell.hash)
    data, clients = cell.config.data, cell.config.partition
    source = "" if isinstance(data, Synthetic) else repr(data)
    natural = isinstance(clients, Natural) and clients.clients is None
    return Result(*own, state, list(records), partition, spent, tuple(repairs), source, natural)


def result_of(cell: Cell, home: Path) -> Result:
    """The contents of a cell's run folder."""
    state = state_of(home) or "failed"
    records = _records(home)
    shared = _facts(home / "partition.json", _PARTITION) or {"sha256": "", "data_sha256": "", "notes": []}
    spent = _spent(home, records, shared["data_sha256"])
    return as_result(cell, state, records, shared["sha256"], spent, map(str, shared["notes"]))


def _records(home: Path) -> list[dict[str, Any]]:
    """The evaluations of a cell, if it has any: a round and numbers in each."""
    path = home / "metrics.jsonl"
    if not path.exists():
        return []
    try:
        records = read_ended(home)
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(records, 1):
        if not (isinstance(line, dict) and isinstance(line.get("round"), int) and all(map(_is_value, line.values()))):
            raise CheckpointError(f"{path}: line {number} is not an evaluation")
    return records


def _is_value(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, list) and all(isinstance(x, int) for x in value))


def _facts(path: Path, keys: Mapping[str, type]) -> dict[str, Any]:
    """A JSON file with these keys and types; empty if it does not exist."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    wrong = [key for key, kind in keys.items() if not isinstance(found, dict) or not isinstance(found.get(key), kind)]
    if wrong:
        raise CheckpointError(f"{path}: was not written by a run (see '{wrong[0]}')")
    return dict(found)


def _spent(home: Path, records: Sequence[dict[str, Any]], data: str) -> PrivacyCost | None:
    """The privacy budget that a cell has spent so far, if it is private."""
    stated = _facts(home / "privacy.json", _PRIVACY) if records else {}
    if not stated:
        return None
    newest: dict[str, Any] = next((line for line in reversed(records) if is_evaluation(line)), {})
    found = [value for name, value in newest.items() if is_privacy(name)]
    epsilon = found[0] if found else math.inf  # which JSON cannot express
    return PrivacyCost(
        data, stated["unit"], stated["relation"], epsilon, stated["delta"], str(stated.get("warning", ""))
    )
