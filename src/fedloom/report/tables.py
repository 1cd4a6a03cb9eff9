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
    buffer, names = io.StringIO(), list(lines[0])
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([line[name] for name in names] for line in lines)
    return buffer.getvalue()


def curve_table(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every evaluation with all of its metrics; empty if one was not measured."""
    names = dict.fromkeys(name for line in records for name, value in line.items() if not isinstance(value, list))
    return [{name: line.get(name, "") for name in names} for line in records if len(line) > 2]


def client_table(counts: Ints, names: Sequence[str], labels: Sequence[str], measured: Verdicts) -> list[dict[str, Any]]:
    """Each client: its rows and classes, and the results of its model on its own held-out rows if measured.

    ``counts``: client, class, rows.  ``[k, 3]``
    """
    clients = len(names)
    rows = np.bincount(counts[:, 0], counts[:, 2], minlength=clients).astype(np.int64)
    classes = np.bincount(counts[:, 0], minlength=clients)
    by_size = counts[np.argsort(counts[:, 2], kind="stable")]
    most, largest = np.zeros((2, clients), np.int64)
    most[by_size[:, 0]], largest[by_size[:, 0]] = by_size[:, 2], by_size[:, 1]  # the last one, the largest, stays
    share = most / np.maximum(1, rows)
    facts = zip(rows.tolist(), classes.tolist(), most.tolist(), largest.tolist(), share.tolist(), strict=True)
    scores = _scores(measured)
    empty = dict.fromkeys((name for each in scores.values() for name in each), "")
    out = []
    for client, (held, kinds, top, label, part) in enumerate(facts):
        line: dict[str, Any] = {"client": client, "name": names[client], "rows": held}
        if label < 0:  # only the client knows its classes
            line |= dict.fromkeys(("classes", "largest_class", "largest_share"), "")
        else:
            line |= {"classes": kinds, "largest_class": labels[label] if top else "", "largest_share": part}
        out.append(line | empty | scores.get(client, {}))
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
