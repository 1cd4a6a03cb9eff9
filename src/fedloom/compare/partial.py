"""Tables of a comparison that has not ended: written as its cells end, and when it is interrupted."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from fedloom.compare.crew import Standing, Watcher
from fedloom.compare.folder import state_of
from fedloom.compare.plan import ComparisonPlan
from fedloom.compare.read import as_result, result_of
from fedloom.compare.write import drawn, write_tables
from fedloom.core.errors import FedloomError
from fedloom.core.signals import deferred

_SHARE = 20  # of the time is left for other things than tables
_FIRST = 10.0  # seconds before the first tables: a comparison that has ended by then writes and draws them once


class TablesAsCellsEnd:
    """Follows a comparison for another watcher, and writes the tables of the cells that have ended."""

    def __init__(self, planned: ComparisonPlan, folder: Path, cells: Path, watcher: Watcher) -> None:
        self._planned, self._folder, self._cells, self._watcher = planned, folder, cells, watcher
        self._due = time.monotonic() + _FIRST

    def started(self, plan: ComparisonPlan, folder: Path, jobs: int, standing: Standing) -> None:
        self._watcher.started(plan, folder, jobs, standing)

    def moved(self, standing: Standing) -> None:
        self._watcher.moved(standing)
        if standing.ended and standing.done < standing.cells and time.monotonic() >= self._due:
            self.write()

    def stopping(self) -> None:
        self._watcher.stopping()

    def write(self) -> None:
        """Write the tables of the finished cells; errors are reported when all cells have ended."""
        began = time.monotonic()
        with deferred(), suppress(FedloomError):  # half an import of Matplotlib cannot be repeated
            write_so_far(self._planned, self._folder, self._cells)
        self._due = time.monotonic() + _SHARE * (time.monotonic() - began)


def write_so_far(planned: ComparisonPlan, folder: Path, cells: Path) -> None:
    """Write the tables of the cells that have ended, with the number of missing ones; nothing if none has."""
    ended = {cell.hash for cell in planned.cells if state_of(cells / cell.hash)}
    every = {cell.hash for cell in planned.cells}
    if not ended:
        return
    results = [
        result_of(cell, cells / cell.hash) if cell.hash in ended else as_result(cell, "missing")
        for cell in planned.cells
    ]
    remark = f"{len(every) - len(ended)} of {len(every)} cells are missing: the comparison has not ended"
    write_tables(planned, drawn(planned, folder, cells, results, {}, [remark]))
