"""Tables of a run for other programs: a line for each client, and one for each evaluation."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedloom.core.metrics import Verdicts, measure_name
from fedloom.data.arrays import Ints


def csv_text(lines: Sequence[dict[str, Any]]) -> str:
    """A header and a line for each of ``lines``, which have the same keys."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def curve_table(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every evaluation with all of its metrics; empty where one was not measured."""
    names = dict.fromkeys(name for line in records for name, value in line.items() if not isinstance(value, list))
    return [{name: line.get(name, "") for name in names} for line in records if len(line) > 2]


def client_table(counts: Ints, names: Sequence[str], labels: Sequence[str], measured: Verdicts) -> list[dict[str, Any]]:
    """Each client: its rows and classes, and how its own model does on its own held-out rows where that was measured.

    ``counts``: client, class, rows.  ``[k, 3]``
    """
    clients = len(names)
    rows = np.bincount(counts[:, 0], counts[:, 2], minlength=clients).astype(np.int64)
    classes = np.bincount(counts[:, 0], minlength=clients)
    largest = dict(sorted(((int(c), (int(n), int(k))) for c, k, n in counts), key=lambda pair: pair[1][0]))
    scores = _scores(measured)
    columns = dict.fromkeys(name for each in scores.values() for name in each)
    out = []
    for client in range(clients):
        most, label = largest.get(client, (0, 0))
        line: dict[str, Any] = {"client": client, "name": names[client], "rows": int(rows[client])}
        line["classes"] = int(classes[client])
        line |= {"largest_class": labels[label] if most else "", "largest_share": most / max(1, int(rows[client]))}
        if label < 0:  # nobody but the client knows its classes
            line |= dict.fromkeys(("classes", "largest_class", "largest_share"), "")
        out.append(line | {name: scores.get(client, {}).get(name, "") for name in columns})
    return out


def _scores(measured: Verdicts) -> dict[int, dict[str, float]]:
    """What was measured of each client, by its number."""
    ids, rows, correct, loss = (column.double().cpu().tolist() for column in measured[:4])
    areas = {measure_name(name): area.double().cpu().tolist() for name, area in measured.auc.items()}
    return {
        int(client): {"test_rows": int(rows[k]), measured.first: correct[k] / rows[k], "loss": loss[k] / rows[k]}
        | {name: column[k] for name, column in areas.items()}
        for k, client in enumerate(ids)
        if rows[k]
    }
