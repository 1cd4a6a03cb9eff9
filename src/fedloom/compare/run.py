"""Run the missing cells of a comparison, and write its tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedloom.compare import gpu
from fedloom.compare.cells import counted_alike
from fedloom.compare.crew import Crew, InterruptedComparison, Unwatched, Watcher
from fedloom.compare.equal_terms import equalised
from fedloom.compare.folder import (
    cells_folder,
    cells_of,
    locked,
    move_stale_aside,
    refuse_another,
    state_of,
    storage_errors,
)
from fedloom.compare.left_out import Only, left_out
from fedloom.compare.memory import default_jobs, on_gpu
from fedloom.compare.partial import TablesAsCellsEnd
from fedloom.compare.plan import ComparisonPlan, plan
from fedloom.compare.read import LeftOut
from fedloom.compare.write import Comparison, write_results
from fedloom.core import usercode
from fedloom.core.errors import NothingToRunError
from fedloom.data.files import default_root
from fedloom.runs.folder import write_text
from fedloom.runs.prepare import refuse_wrong_data, refuse_wrong_functions
from fedloom.runs.tracking import refuse_missing_trackers


def run(
    table: Mapping[str, Any] | ComparisonPlan,
    out: str | Path | None = None,
    *,
    data_root: str | Path | None = None,
    jobs: int | None = None,
    together: int = 1,
    kept: str | Path | None = None,
    only: Only = MappingProxyType({}),
    trust: bool = False,
    watcher: Watcher | None = None,
) -> Comparison:
    """Run the missing cells of a comparison in the folder ``out``, and write its tables and curves.

    ``table`` is an experiment with an additional ``compare`` table. ``together``: runs of a method whose clients train
    in the same steps. ``kept``: a folder of collected results, whose cells are not run. ``only``: the methods and
    values of axes to which cells are restricted. ``trust``: run code that a comparison in this folder names even if
    you have never run it.
    """
    if not isinstance(table, ComparisonPlan):
        usercode.vouch(table)
    planned = table if isinstance(table, ComparisonPlan) else plan(table)
    refuse_wrong_functions(cell.config for cell in planned.cells)
    folder = Path(out) if out is not None else Path("runs") / f"compare-{planned.name}"
    root = Path(data_root) if data_root is not None else default_root()
    planned = equalised(planned, root)
    without = left_out(planned, kept, only)
    shared = cells_folder(planned, folder)
    _refuse_to_run_nothing(planned, shared, without)
    for cell in planned.cells:
        refuse_missing_trackers(cell.config)
    missing = (cell for cell in planned.cells if cell.hash not in without.hashes and not state_of(shared / cell.hash))
    refuse_wrong_data((cell.config for cell in missing), root)
    with storage_errors(folder), locked(folder):
        refuse_another(planned, folder, root, trust=trust)
        write_text(folder / "compare.toml", planned.as_toml())
        with cells_of(planned, folder) as cells:
            planned = planned._replace(notes=(*planned.notes, *move_stale_aside(planned, folder, cells, root)))
            tables = TablesAsCellsEnd(planned, folder, cells, watcher or Unwatched())
            try:
                failures = _run_missing(planned, folder, cells, root, (jobs, together), tables, without.hashes)
            except InterruptedComparison:
                tables.write()
                raise
            return write_results(planned, folder, cells, failures, without)


def _refuse_to_run_nothing(planned: ComparisonPlan, cells: Path, without: LeftOut) -> None:
    """Say so if all cells were left out and none was run here: there would be nothing in the tables."""
    if all(cell.hash in without.hashes and not state_of(cells / cell.hash) for cell in planned.cells):
        why = f"no cell is left ({without.why})"
        raise NothingToRunError(f"nothing to run: {why}; fedloom collect draws the tables of results that are kept")


def _run_missing(
    planned: ComparisonPlan,
    folder: Path,
    cells: Path,
    root: Path,
    side_by_side: tuple[int | None, int],
    watcher: Watcher,
    without: Collection[str],
) -> dict[str, str]:
    """Run every cell that has not ended yet and is not left out; the failures by the name of their cell.

    ``side_by_side``: processes, as many as fit if None, and cells of each.
    """
    # Finished cells count, too: whether steps are compiled must not depend on when a comparison was interrupted.
    wanted = counted_alike([cell for cell in planned.cells if cell.hash not in without])
    by_hash = {cell.hash: cell for cell in reversed(wanted)}  # two labels may have the same config
    missing = [c for c in wanted if by_hash[c.hash] is c and not state_of(cells / c.hash)]
    jobs, together = side_by_side
    if jobs is None:
        jobs = max(1, default_jobs(c.config for c in planned.cells) // together)
    jobs = min(jobs, max(1, len(missing)))
    done = len(by_hash) - len(missing)
    crew = Crew(folder, cells, root, missing, done=done, watcher=watcher, together=together)
    watcher.started(planned, folder, min(jobs * together, max(1, len(missing))), crew.standing())
    if not missing:
        return {}
    with gpu.shared(jobs if on_gpu(c.config for c in missing) else 1) as environment:
        return crew.work(jobs, environment)
