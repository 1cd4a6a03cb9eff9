"""The table of a comparison as plain numbers, for CSV and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedloom.core.metrics import Summary, rounds_to_convergence
from fedloom.report.comparison.notes import caveats_about, gain_label
from fedloom.report.comparison.question import Question, Result
from fedloom.report.comparison.statistics import Cost, Row, gains, reached, series, summary_of
from fedloom.report.tables import csv_text, curve_table


def as_dict(question: Question, row: Row) -> dict[str, Any]:
    """A row as plain numbers; what is unknown is None."""
    out: dict[str, Any] = dict(zip(question.axes, row.place, strict=True))
    out |= {"algorithm": row.method, "metric": row.metric}
    out |= {"seeds": row.seeds, "diverged": row.diverged, "failed": row.failed}
    for name, value in (("last", row.last), ("best", row.best), ("mean_last_10", row.tail)):
        out |= {name: value.mean if value else None, f"{name}_std": value.std if value else None}
    for name, cost in (("rounds", row.rounds), ("bytes", row.bytes), ("simulated_seconds", row.seconds)):
        of = cost.cost if cost else None
        out |= {f"{name}_to_target": of.mean if of else None, f"{name}_to_target_std": of.std if of else None}
    if question.selected_by:
        seen = row.validation
        out |= {"validation": seen.mean if seen else None, "validation_std": seen.std if seen else None}
        out |= {"chosen": row.chosen, "chosen_by": question.selected_by[row.method]}
    out["reached_target"] = row.rounds.seeds if row.rounds else None
    out["rank"] = row.rank
    gap = row.difference
    out |= {"difference": gap.mean if gap else None, "difference_std": gap.std if gap else None}
    out |= dict(zip(("difference_low", "difference_high"), row.interval, strict=True))
    why = " ".join(question.caveats[number - 1].why for number in caveats_about(question, row))
    out |= {"p": row.p, "paper": row.paper, "caveats": why}
    scale = {"bytes": 1e6, "busiest": 1e6}  # bytes in files, megabytes in tables
    spent = row.spent._asdict() if row.spent else dict.fromkeys(Cost._fields)
    return out | {f"{k}_spent": v.mean * scale.get(k, 1.0) if v else None for k, v in spent.items()}


def as_dicts(question: Question, table: Sequence[Row]) -> list[dict[str, Any]]:
    """All rows, and the gain of each place below those of its methods."""
    out, better = [], {gain.place: gain for gain in gains(question, table)}
    for place in question.places:
        here = [as_dict(question, row) for row in table if row.place == place]
        out += here
        if place in better:
            gain = better[place]
            blank = dict.fromkeys(here[0]) | dict(zip(question.axes, place, strict=True))
            what = {"algorithm": gain_label(question), "metric": f"relative gain, {question.metric}"}
            out.append(
                blank | what | {"last": gain.last, "best": gain.best, "mean_last_10": gain.tail, "paper": gain.paper}
            )
    return out


def table_csv(question: Question, table: Sequence[Row]) -> str:
    """The table with one number in each column."""
    return csv_text(as_dicts(question, table))


def cells_csv(question: Question, results: Sequence[Result], folder: str) -> str:
    """One line for each cell; their run folders are in ``folder``."""
    return csv_text([_cell(question, result, folder) for result in results])


def curves_csv(question: Question, results: Sequence[Result]) -> str:
    """One line for each evaluation of each cell, with all of its metrics."""
    lines = [
        dict(zip(question.axes, result.place, strict=True)) | {"algorithm": result.method, "seed": result.seed} | line
        for result in results
        for line in curve_table(result.records)
    ]
    names = dict.fromkeys(name for line in lines for name in line)
    return csv_text([{name: line.get(name, "") for name in names} for line in lines]) if lines else ""


def _cell(question: Question, result: Result, folder: str) -> dict[str, Any]:
    metric = question.metrics[result.method]
    found = summary_of(result, metric)
    hit = reached(result, metric, question.target) if question.target is not None else None
    end = result.records[-1] if result.records else {}
    place = dict(zip(question.axes, result.place, strict=True))
    out: dict[str, Any] = {"algorithm": result.method, "kind": result.kind, "seed": result.seed, "state": result.state}
    out |= {"metric": metric, **(found._asdict() if found else dict.fromkeys(Summary._fields))}
    out |= {"rounds": end.get("round"), "bytes_up": end.get("bytes/up"), "bytes_down": end.get("bytes/down")}
    out |= {"bytes_busiest": end.get("bytes/busiest"), "gradients": end.get("work/gradients")}
    out |= {"rounds_to_target": hit["round"] if hit else None}
    points = [(round_, value) for round_, value in series(result.records, metric) if round_ > 0]
    out |= {"rounds_to_convergence": rounds_to_convergence(metric, points) if result.state == "done" else None}
    out |= {"partition_sha256": result.partition[:16], "folder": f"{folder}/{result.hash}"}
    return place | {name: value for name, value in out.items() if name not in place}  # rounds can be an axis
