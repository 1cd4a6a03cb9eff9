"""Results that stay: the finished cells of a comparison as small files of JSON, gathered from wherever they ran.

A result is named by the hash of its cell's configuration, so that cells of several machines and days meet in one
folder. It says with which code, versions and device it was made. Tables and curves are drawn from these files alone:
neither the run folders nor the data are needed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.compare.cells import Cell
from fedloom.compare.equal_terms import equalised
from fedloom.compare.folder import state_of, storage_errors
from fedloom.compare.plan import ComparisonPlan
from fedloom.compare.read import as_result, result_of
from fedloom.compare.write import Comparison, write_tables
from fedloom.core import disk
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.vocabulary import is_evaluation
from fedloom.data.files import default_root
from fedloom.report.comparison.question import PrivacyCost, Result
from fedloom.runs.folder import as_json, write_text
from fedloom.runs.settings import as_table

_FORMAT = 1
_KINDS = {"hash": str, "state": str, "origin": dict, "partition": str, "metrics": list}
_ORIGIN = ("commit", "versions", "device", "gpu", "cpu", "precision")


class Collected(NamedTuple):
    """A comparison drawn from results that were kept."""

    comparison: Comparison
    cells: int  # that the comparison has
    new: int  # results that were not there before
    missing: tuple[str, ...]  # names of cells without a result


def collect(planned: ComparisonPlan, out: Path, sources: Sequence[Path], *, data_root: Path | None = None) -> Collected:
    """Gather the finished cells below ``sources`` into ``out``, and draw the tables of all that are there.

    A source is the folder of a comparison, one of cells, or one of results. A result that is there already stays; if
    another one of the same cell differs from it, that is said.
    """
    planned = equalised(planned, data_root or default_root())
    kept, cells = out / "cells", {cell.hash: cell for cell in planned.cells}
    with storage_errors(out):
        found = {name: each for name in cells if (each := _read(kept / f"{name}.json")) is not None}
        before, remarks = set(found), []
        for name, document in _below(sources, cells):
            if name not in found:
                found[name] = document
            elif found[name]["metrics"] != document["metrics"]:
                remarks.append(_differs(cells[name], found[name], document))
        if not found:
            where = ", ".join(map(str, sources)) or "no folder"
            fix = "run it with fedloom compare, or name the folder of its cells"
            raise ConfigError([Fault("--from", f"no finished cell of this comparison is below {where}", fix)])
        disk.make_folder(out)
        disk.make_folder(kept)
        for name in set(found) - before:
            write_text(kept / f"{name}.json", as_json(found[name], indent=1) + "\n")
        write_text(out / "compare.toml", planned.as_toml())
        results = [_result(cell, found.get(cell.hash)) for cell in planned.cells]
        missing = tuple(dict.fromkeys(cell.name for cell in planned.cells if cell.hash not in found))
        write_text(out / "missing.txt", "".join(f"{name}\n" for name in missing))
        remarks = [*_origins(found.values()), *_incomplete(len(cells), len(found)), *remarks]
        comparison = write_tables(planned, out, kept, results, {}, remarks)
    return Collected(comparison, len(cells), len(set(found) - before), missing)


# -- one result ------------------------------------------------------------------------------------
def _document(cell: Cell, home: Path) -> dict[str, Any]:
    """All that is kept of a cell: settings, origin, and every evaluation; no model."""
    result = result_of(cell, home)
    made = _environment(home / "environment.json")
    return {
        "format": _FORMAT,
        "hash": cell.hash,
        "method": cell.method.label,
        "place": list(cell.place),
        "seed": cell.seed,
        "state": result.state,
        "origin": {key: made[key] for key in _ORIGIN if made.get(key)},
        "settings": as_table(cell.config),
        "partition": result.partition,
        "privacy": None if result.spent is None else result.spent._asdict(),
        "metrics": [record for record in result.records if is_evaluation(record)],
    }


def _environment(path: Path) -> dict[str, Any]:
    """With what a run was made, as its folder says."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        fix = f"delete {path.parent}, and the same comparison runs it again"
        raise ConfigError([Fault(str(path), f"cannot be read: {error}", fix)]) from error


def _result(cell: Cell, document: Mapping[str, Any] | None) -> Result:
    if document is None:
        return as_result(cell, "missing")
    spent = PrivacyCost(**document["privacy"]) if document.get("privacy") else None
    return as_result(cell, document["state"], document["metrics"], document["partition"], spent)


def _read(path: Path) -> dict[str, Any] | None:
    """A result that was kept, if there is one; a damaged one is refused."""
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        document, fault = {}, f"is not JSON: {error}"
    else:
        fault = _fault(document, path.stem)
    if fault:
        raise ConfigError([Fault(str(path), fault, "delete it, and collect it again")])
    return dict(document)


def _fault(document: Any, name: str) -> str:
    """What is wrong with a result that was kept under this name, if anything is."""
    if not isinstance(document, dict) or "format" not in document:
        return "is not a result"
    if document["format"] != _FORMAT:
        return f"has format {document['format']}, and this version reads format {_FORMAT}"
    wrong = [key for key, kind in _KINDS.items() if not isinstance(document.get(key), kind)]
    if wrong:
        return f"has no valid '{wrong[0]}' (got {str(document.get(wrong[0]))[:100]})"
    if not all(isinstance(record, dict) and isinstance(record.get("round"), int) for record in document["metrics"]):
        return "has metrics without a round"
    return "" if document["hash"] == name else f"is the result of another cell, {document['hash']}"


# -- where they come from --------------------------------------------------------------------------
def _below(sources: Sequence[Path], cells: Mapping[str, Cell]) -> Iterable[tuple[str, dict[str, Any]]]:
    """The results of these cells in each source: in run folders that ended, or in files that were kept."""
    for source in sources:
        if not source.is_dir():
            raise ConfigError([Fault("--from", f"there is no folder {source}")])
        for place in (source, source / "cells"):
            for name, cell in cells.items():
                if state_of(place / name):
                    yield name, _document(cell, place / name)
                elif (document := _read(place / f"{name}.json")) is not None:
                    yield name, document


def _origin(document: Mapping[str, Any]) -> str:
    """Code and machine of a result, in words."""
    origin = document["origin"]
    where = origin.get("gpu") or origin.get("cpu") or origin.get("device", "an unknown device")
    torch = origin.get("versions", {}).get("torch", "?")
    return f"commit {origin.get('commit', '')[:7] or 'unknown'}, torch {torch}, {where}, {origin.get('precision', '?')}"


def _origins(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """With what the cells were run; several are all named, since numbers may differ between them."""
    counts = Counter(_origin(document) for document in found)
    if not counts:
        return []
    if len(counts) == 1:
        return [f"all cells were run with {next(iter(counts))}"]
    listed = "; ".join(f"{count} with {origin}" for origin, count in sorted(counts.items()))
    return [f"cells were run with different code or machines: {listed}"]


def _incomplete(cells: int, found: int) -> list[str]:
    return [f"{found} of {cells} cells are there; the others are listed in missing.txt"] if found < cells else []


def _differs(cell: Cell, kept: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return f"{cell.name} has another result by {_origin(other)}; the one by {_origin(kept)} was kept"
