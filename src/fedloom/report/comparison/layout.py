"""The layout of a paper's table: one key down, others across, one or more metrics in a cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, NonNegativeFloat

from fedloom.core.errors import Fault, nearest
from fedloom.core.schema import Spec
from fedloom.core.vocabulary import is_share, leaf


class CellPart(Spec):
    """One number of a cell."""

    metric: str
    statistic: Literal["last", "best", "mean_last_10"] = "best"
    label: str = ""

    @property
    def name(self) -> str:
        what = self.label or leaf(self.metric)
        unit = " (%)" if is_share(self.metric) else ""
        return f"{self.statistic.replace('mean_last_10', 'mean of last 10')} {what}{unit}"


class TableLayout(Spec):
    """Which keys go down and across, and the content of a cell; ``algorithm`` is a key, too."""

    rows: str
    columns: list[str] = Field(min_length=1)
    cell: list[CellPart] = Field(min_length=1)
    tolerance: NonNegativeFloat = 0.01  # of the difference to the paper, in the unit of the metric

    def faults(self, keys: Sequence[str]) -> list[Fault]:
        """Faults: names that are not keys of the comparison, or are repeated."""
        used = [("compare.layout.rows", self.rows), *(("compare.layout.columns", key) for key in self.columns)]
        found = [Fault(at, f"'{key}' is not an axis of the grid", nearest(key, keys)) for at, key in used]
        found = [fault for fault, (_, key) in zip(found, used, strict=True) if key not in keys]
        twice = {key for _, key in used if [k for _, k in used].count(key) > 1}
        return found + [Fault("compare.layout", f"'{key}' is named twice") for key in sorted(twice)]
