"""A comparison in the layout of a paper's table, as plain numbers."""

from __future__ import annotations

from typing import Any

from fedloom.report.comparison.layout import CellPart
from fedloom.report.comparison.sheet import Number, Sheet
from fedloom.report.tables import csv_text


def as_dicts(found: Sheet) -> list[dict[str, Any]]:
    """Every number of the tables on a separate line."""
    out = []
    for block in found.blocks:
        for row, cells in zip(found.rows, block.cells, strict=True):
            for column, numbers in zip(found.columns, cells, strict=True):
                spot = {**block.where, found.layout.rows: row, **dict(zip(found.layout.columns, column, strict=True))}
                out += [spot | _as_dict(found, part, n) for part, n in zip(found.layout.cell, numbers, strict=True)]
        for column, parts in zip(found.columns, block.gains, strict=False):
            spot = {**block.where, "algorithm": found.gain, **dict(zip(found.layout.columns, column, strict=True))}
            for part, gained in zip(found.layout.cell, parts, strict=True):
                what = {"metric": f"relative gain, {part.metric}", "statistic": part.statistic}
                out.append(dict.fromkeys(out[0]) | spot | what | {"mean": gained.value, "paper": gained.paper})
    return out


def _as_dict(found: Sheet, part: CellPart, number: Number) -> dict[str, Any]:
    mean, std = number.value or (None, None)
    gap = mean - number.paper if mean is not None and number.paper is not None else None
    return {
        "metric": part.metric,
        "statistic": part.statistic,
        "mean": mean,
        "std": std,
        "seeds": number.seeds,
        "diverged": number.diverged,
        "failed": number.failed,
        "best": number.best,
        "paper": number.paper,
        "difference": gap,
        "missed": number.missed,
        "caveats": " ".join(found.caveats[k - 1].why for k in number.caveats),
    }


def table_csv(found: Sheet) -> str:
    """Every number of the tables, accuracies as shares of one."""
    return csv_text(as_dicts(found))
