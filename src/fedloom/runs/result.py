"""What a run returns: its metrics as a small table, its model, and a picture of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedloom.core.metrics import Summary, once_trained, summary_of_records
from fedloom.core.vocabulary import SPREAD, accuracies


class Frame:
    """A table of numbers by column name, one row for each evaluation; missing values are NaN."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.columns = list(dict.fromkeys(k for r in records for k, v in r.items() if not isinstance(v, list)))
        self._data = {c: np.array([r.get(c, np.nan) for r in records], dtype=np.float64) for c in self.columns}
        self._rows = len(records)

    def __getitem__(self, column: str) -> NDArray[np.float64]:
        if column not in self._data:
            raise KeyError(f"no column '{column}' (there are: {', '.join(self.columns)})")
        return self._data[column]

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __contains__(self, column: str) -> bool:
        return column in self._data

    def row(self, index: int) -> dict[str, float]:
        """One evaluation."""
        return {c: float(self._data[c][index]) for c in self.columns}

    def to_pandas(self) -> Any:
        """The same table as a pandas DataFrame, where pandas is installed."""
        import pandas as pd

        return pd.DataFrame(self._data)

    def __repr__(self) -> str:
        shown = [c for c in self.columns if not c.endswith(tuple(SPREAD))]
        lines = ["  ".join(f"{c:>12}" for c in shown)]
        for i in [*range(min(5, self._rows)), *range(max(5, self._rows - 5), self._rows)]:
            if i == self._rows - 5 and self._rows > 10:
                lines.append("  ".join(f"{'...':>{max(12, len(c))}}" for c in shown))
            lines.append("  ".join(f"{self._data[c][i]:>{max(12, len(c))}.6g}" for c in shown))
        return "\n".join([*lines, f"[{self._rows} rows x {len(self.columns)} columns]"])


class Summaries(dict[str, Summary]):
    """The summary of each metric by its name."""

    def __missing__(self, name: str) -> Summary:
        raise KeyError(f"no metric '{name}' (there are: {', '.join(self)})")


class History(NamedTuple):
    """A finished run.

    Attributes:
        algorithm: name of the method.
        rounds: number of rounds.
        seconds: their time on this machine.
        records: one table for each evaluation: its round and its metrics.
        model: the common model; None where every client has only its own.
        run_dir: the run folder; None where nothing was written.
    """

    algorithm: str
    rounds: int
    seconds: float
    records: list[dict[str, Any]]
    model: nn.Module | None
    run_dir: Path | None

    @property
    def metrics(self) -> Frame:
        return Frame(self.records)

    @property
    def summary(self) -> dict[str, Summary]:
        """Of each metric the last value, the best and the mean of the last ten, once training has begun."""
        lines = [
            {name: float(v) for name, v in line.items() if isinstance(v, int | float) and not np.isnan(v)}
            for line in self.records
        ]
        names = dict.fromkeys(name for line in once_trained(lines) for name in line if name != "round")
        return Summaries({name: found for name in names if (found := summary_of_records(name, lines)) is not None})

    def __repr__(self) -> str:
        found = self.summary
        names = accuracies(found)[:2]
        shown = "".join(f", {name} {found[name].last:.4f}" for name in names)
        place = f", in {self.run_dir}" if self.run_dir is not None else ""
        return f"<History of {self.algorithm}: {self.rounds} rounds in {self.seconds:.1f} s{shown}{place}>"

    def plot(self, path: str | Path | None = None) -> Any:
        """The curves of accuracy and loss as a matplotlib figure, saved where ``path`` says."""
        from fedloom.report import curves

        return curves.draw(self.records, title=self.algorithm, path=Path(path) if path is not None else None)

    def picture(self) -> bytes:
        """The same as a PNG file."""
        from fedloom.report.figure import as_file

        return as_file(self.plot(), ".png")

    def as_json(self) -> dict[str, Any]:
        """What ``fedloom run --json`` prints."""
        return {
            "run_dir": str(self.run_dir) if self.run_dir is not None else None,
            "algorithm": self.algorithm,
            "rounds": self.rounds,
            "seconds": round(self.seconds, 3),
            "rounds_per_second": round(self.rounds / self.seconds, 3) if self.seconds else None,
            "metrics": {name: value._asdict() for name, value in self.summary.items()},
        }
