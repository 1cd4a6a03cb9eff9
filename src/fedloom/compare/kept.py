"""One kept result: a finished cell as a small JSON file.

It has the settings, the origin (code, versions, device, precision) and every evaluation, but no model. Metrics are
columns, one value for each evaluation; null if an evaluation does not have the metric.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.compare.cells import Cell
from fedloom.compare.read import as_result, result_of
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.metrics import summary_of_records
from fedloom.core.vocabulary import is_evaluation
from fedloom.report.comparison.question import PrivacyCost, Result
from fedloom.runs.folder import as_json
from fedloom.runs.settings import as_table

Document = dict[str, Any]

FORMAT = 2
_KINDS = {"hash": str, "seed": int, "state": str, "origin": dict, "settings": dict, "partition": str, "metrics": dict}
_ORIGIN = ("code", "changes", "commit", "versions", "device", "gpu", "cpu", "precision")
_DIGITS = 7  # digits of a number: more than two machines agree on


def document_of(cell: Cell, home: Path) -> Document:
    """The kept result of the cell that ended in this run folder."""
    result = result_of(cell, home)
    made, summary = _facts(home / "environment.json"), _facts(home / "summary.json")
    records = [record for record in result.records if is_evaluation(record)]
    metrics = _columns(records)
    return {
        "format": FORMAT,
        "hash": cell.hash,
        "method": cell.method.label,
        "place": list(cell.place),
        "seed": cell.seed,
        "state": result.state,
        "origin": {key: made[key] for key in _ORIGIN if made.get(key)},
        "settings": as_table(cell.config),
        "partition": result.partition,
        **({"repairs": list(result.repairs)} if result.repairs else {}),
        "privacy": None if result.spent is None else result.spent._asdict(),
        "seconds": summary.get("seconds"),
        "summary": _summary(records),
        "metrics": metrics,
    }


def _facts(path: Path) -> dict[str, Any]:
    """A file of a run folder; a run that diverged has no summary."""
    if path.name == "summary.json" and not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        fix = f"delete {path.parent} and repeat the comparison to rerun it"
        raise ConfigError([Fault(str(path), f"cannot be read: {error}", fix)]) from error


def _columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [_rounded(record.get(name)) for record in records] for name in names}


def _rounded(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value


def _summary(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Last, best and mean of the last ten of every numeric metric, once training has begun."""
    names = {name for record in records for name in record} - {"round"}
    return {
        name: {key: _rounded(value) for key, value in found._asdict().items()}
        for name in sorted(names)
        if (found := summary_of_records(name, records)) is not None
    }


def document_text(document: Document) -> str:
    """The file: a line for each key, and for each metric."""
    lines = []
    for key, value in document.items():
        if key in ("settings", "summary", "metrics"):
            inner = ",\n".join(f"  {json.dumps(name)}: {as_json(each)}" for name, each in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {as_json(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_document(text: str | bytes, name: str, at: str) -> Document:
    """The kept result of the cell with this hash; a damaged one is refused with its path."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        document, fault = {}, f"is not JSON: {error}"
    else:
        fault = _fault(document, name)
    if fault:
        raise ConfigError([Fault(at, fault, "delete it and collect it again")])
    return dict(document)


def _is_cost(spent: Any) -> bool:
    """Whether this is what a private run has spent; JSON has no infinite epsilon, which is null."""
    if not isinstance(spent, dict) or set(spent) != set(PrivacyCost._fields):
        return spent is None
    words = set(spent) - {"epsilon", "delta"}
    is_known = isinstance(spent["delta"], float) and isinstance(spent["epsilon"], int | float | None)
    return is_known and all(isinstance(spent[key], str) for key in words)


def _is_number(value: Any) -> bool:
    """Whether this can be in a column of metrics: a number, several whole ones, or none."""
    if isinstance(value, list):
        return all(isinstance(each, int) for each in value)
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "state": lambda state: state in ("done", "diverged"),
    "origin": lambda origin: isinstance(origin.get("versions", {}), dict),
    "privacy": _is_cost,
    "repairs": lambda notes: notes is None or isinstance(notes, list),
    "metrics": lambda columns: all(_is_number(value) for column in columns.values() for value in column),
}


def _fault(document: Any, name: str) -> str:
    """What is wrong with a kept result of this name, if anything."""
    if not isinstance(document, dict) or "format" not in document:
        return "is not a result"
    if document["format"] != FORMAT:
        return f"has format {document['format']}, but this version reads format {FORMAT}"
    wrong = [key for key, kind in _KINDS.items() if not isinstance(document.get(key), kind)]
    if wrong:
        return f"has no valid '{wrong[0]}' (got {str(document.get(wrong[0]))[:100]})"
    another = "" if document["hash"] == name else f"is the result of another cell, {document['hash']}"
    return _fault_inside(document) or another


def _fault_inside(document: Document) -> str:
    """What is wrong with the values of a kept result, if anything."""
    columns = document["metrics"].values()
    rounds = document["metrics"].get("round", [])
    if not all(isinstance(column, list) and len(column) == len(rounds) for column in columns):
        return "has metrics of different lengths"
    if not all(isinstance(number, int) for number in rounds):
        return "has metrics without a round"
    wrong = [key for key, is_right in _CHECKS.items() if not is_right(document.get(key))]
    if wrong:
        return f"has no valid '{wrong[0]}' (got {str(document.get(wrong[0]))[:100]})"
    return ""


def records_of(document: Document) -> list[dict[str, Any]]:
    """The evaluations, one after another."""
    columns = document["metrics"]
    lines = zip(*columns.values(), strict=True)
    return [{name: v for name, v in zip(columns, line, strict=True) if v is not None} for line in lines]


def kept_result(cell: Cell, document: Document | None) -> Result:
    """The cell as tables and curves take it; ``None``: it has not been run yet."""
    if document is None:
        return as_result(cell, "missing")
    given = document.get("privacy")
    if given is not None and given["epsilon"] is None:
        given = given | {"epsilon": math.inf}
    spent = PrivacyCost(**given) if given is not None else None
    repairs = document.get("repairs", [])
    return as_result(cell, document["state"], records_of(document), document["partition"], spent, map(str, repairs))


def origin_of(document: Document) -> str:
    """Code and machine of a result, in words."""
    origin = document["origin"]
    where = origin.get("gpu") or origin.get("cpu") or origin.get("device", "an unknown device")
    torch = origin.get("versions", {}).get("torch", "?")
    begun = " (begun with other code or versions)" if origin.get("changes") else ""
    commit = f"commit {origin['commit'][:7]}" if origin.get("commit") else "unknown code"
    code = f"code {origin['code']}" if origin.get("code") else commit
    return f"{code}{begun}, torch {torch}, {where}, {origin.get('precision', '?')}"
