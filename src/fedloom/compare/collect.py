"""Collected results: the finished cells of a comparison as small JSON files, gathered from wherever they ran.

A result is named by the hash of its cell's configuration, so that cells of several machines and days can share one
folder. It records the code, versions and device that made it. Tables and curves are drawn from these files only:
neither the run folders nor the data are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.compare.cells import Cell
from fedloom.compare.equal_terms import Terms, kept_terms, on_terms, terms_of, terms_text
from fedloom.compare.folder import storage_errors
from fedloom.compare.kept import Document, document_text, kept_result, origin_of
from fedloom.compare.plan import ComparisonPlan
from fedloom.compare.sources import TERMS, FinishedCells, documents, kept_documents, kept_files, superseded
from fedloom.compare.write import Comparison, drawn, write_tables
from fedloom.core import disk
from fedloom.data.files import default_root
from fedloom.runs.folder import write_text


class Collected(NamedTuple):
    """A comparison drawn from results that were kept."""

    comparison: Comparison
    cells: int  # number of cells of the comparison
    new: int  # new results
    missing: tuple[Cell, ...]  # cells without a result


class KeptResults(NamedTuple):
    """A comparison and the results of it that are kept in a folder."""

    planned: ComparisonPlan
    found: Mapping[str, Document]  # by the hash of the cell
    remarks: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[Cell, ...]:
        """The cells that remain to be run, each once."""
        return tuple({c.hash: c for c in self.planned.cells if c.hash not in self.found}.values())

    @property
    def cells(self) -> int:
        return len({cell.hash for cell in self.planned.cells})


class Coverage(NamedTuple):
    """Which cells of a comparison have a result in some folder, whichever comparison it was collected for."""

    cells: Mapping[str, Cell]  # all of them, by hash
    kept: frozenset[str]  # the hashes of those with a result

    @property
    def seeds(self) -> dict[int, tuple[int, int]]:
        """For each seed: how many cells are finished, of how many."""
        every = Counter(cell.seed for cell in self.cells.values())
        there = Counter(self.cells[name].seed for name in self.kept)
        return {seed: (there[seed], every[seed]) for seed in sorted(every)}

    @property
    def missing(self) -> tuple[Cell, ...]:
        return tuple(cell for name, cell in self.cells.items() if name not in self.kept)

    def as_json(self) -> dict[str, Any]:
        return {"cells": len(self.cells), "there": len(self.kept), "missing": [cell.name for cell in self.missing]}


def coverage(planned: ComparisonPlan, results: Path) -> Coverage:
    """Which cells of a comparison are kept below ``results``.

    Methods on equal terms are counted with the recorded rounds, and all as missing if none are recorded.
    """
    if planned.spec.equal != "rounds":
        terms = kept_terms(planned, [path.read_bytes() for path in results.rglob(TERMS)])
        planned = on_terms(planned, terms) if terms is not None else planned
    return Coverage({cell.hash: cell for cell in planned.cells}, kept_below(planned, results))


def kept_below(planned: ComparisonPlan, results: Path) -> frozenset[str]:
    """The hashes of the cells with a result in some folder below ``results``."""
    places = {path.parent for path in results.rglob("cells/*.json")}
    files = [file for place in sorted(places) for file in kept_files(place, (path.name for path in place.iterdir()))]
    return frozenset(name for name, _ in kept_documents(files, {cell.hash: cell for cell in planned.cells}))


def collect(
    planned: ComparisonPlan,
    out: Path,
    sources: Sequence[FinishedCells] = (),
    *,
    data_root: Path | None = None,
    replace: bool = False,
) -> Collected | None:
    """Gather the finished cells of ``sources`` into ``out``, and draw the tables of all results in it.

    An existing result stays, unless ``replace``; if another one of the same cell differs from it, a note says so.
    Nothing is written, and nothing returned, if no cell is finished.
    """
    with storage_errors(out):
        terms = _terms(planned, out, [text for source in sources for text in source.terms], data_root)
        kept = read_kept(planned if terms is None else on_terms(planned, terms), out)
        merged = _merged(kept, documents(sources, {cell.hash: cell for cell in kept.planned.cells}), replace=replace)
        if not merged.found:
            return None
        disk.make_folder(out)
        disk.make_folder(out / "cells")
        for name, document in merged.found.items():
            if kept.found.get(name) is not document or not (out / "cells" / f"{name}.json").is_file():
                write_text(out / "cells" / f"{name}.json", document_text(document))
        for path in superseded(out / "cells", merged.found):
            path.unlink()
        if terms is not None:
            write_text(out / TERMS, terms_text(planned, terms))
        write_text(out / "compare.toml", planned.as_toml())
        write_text(out / "missing.txt", "".join(f"{cell.name}\n" for cell in merged.missing))
        comparison = _drawn(merged, out)
        write_tables(planned, comparison)
    return Collected(comparison, merged.cells, len(set(merged.found) - set(kept.found)), merged.missing)


def redrawn(planned: ComparisonPlan, out: Path) -> tuple[KeptResults, Comparison] | None:
    """The results of a comparison in a folder, if any, and its tables; nothing is written, and no data are needed."""
    if planned.spec.equal != "rounds":
        terms = kept_terms(planned, _own_terms(out))
        if terms is None:
            return None
        planned = on_terms(planned, terms)
    kept = read_kept(planned, out)
    return (kept, _drawn(kept, out)) if kept.found else None


def _terms(planned: ComparisonPlan, out: Path, texts: Sequence[bytes], data_root: Path | None) -> Terms | None:
    """The rounds of each method if they differ: those that were recorded, else counted from the data."""
    if planned.spec.equal == "rounds":
        return None
    return kept_terms(planned, [*_own_terms(out), *texts]) or terms_of(planned, data_root or default_root())


def _own_terms(out: Path) -> list[bytes]:
    return [(out / TERMS).read_bytes()] if (out / TERMS).is_file() else []


def read_kept(planned: ComparisonPlan, out: Path) -> KeptResults:
    """The results of a comparison in a folder; a damaged one is refused."""
    names = [path.name for path in (out / "cells").glob("*.json")]
    found = dict(kept_documents(kept_files(out / "cells", names), {cell.hash: cell for cell in planned.cells}))
    others = len(names) - len(found)
    remark = f"{others} kept results are of other settings than this comparison's, and are not in the tables"
    return KeptResults(planned, found, (remark,) if others else ())


def _drawn(kept: KeptResults, out: Path) -> Comparison:
    """The tables of the kept results."""
    results = [kept_result(cell, kept.found.get(cell.hash)) for cell in kept.planned.cells]
    remarks = [*origin_words(kept), *missing_words(kept), *kept.remarks]
    return drawn(kept.planned, out, out / "cells", results, remarks=remarks)


def _merged(kept: KeptResults, others: Iterable[tuple[str, Document]], *, replace: bool) -> KeptResults:
    found, remarks = dict(kept.found), list(kept.remarks)
    names = {cell.hash: cell.name for cell in kept.planned.cells}
    for name, document in others:
        mine = found.get(name)
        if mine is None or (replace and mine["metrics"] != document["metrics"]):
            found[name] = document
        elif mine["metrics"] != document["metrics"]:
            remarks.append(
                f"{names[name]} has another result by {origin_of(document)}; the one by {origin_of(mine)} was kept"
            )
    return kept._replace(found=found, remarks=tuple(remarks))


# -- notes for the reader --------------------------------------------------------------------------
def origin_words(kept: KeptResults) -> list[str]:
    """The code and machines of the cells; if there are several, all are listed, since numbers may differ."""
    counts = Counter(origin_of(document) for document in kept.found.values())
    if not counts:
        return []
    if len(counts) == 1:
        return [f"All cells were run with {next(iter(counts))}"]
    listed = "; ".join(f"{count} with {origin}" for origin, count in sorted(counts.items()))
    return [f"Cells were run with different code or machines, so numbers may differ for that reason: {listed}"]


_NAMED = 12  # most missing cells that a note names


def missing_words(kept: KeptResults) -> list[str]:
    """How many cells are missing, and which."""
    missing = kept.missing
    if not missing:
        return []
    seeds: dict[tuple[str, ...], list[str]] = {}
    for cell in missing:
        seeds.setdefault((cell.method.label, *cell.place), []).append(str(cell.seed))
    by_seeds: dict[str, list[str]] = {}
    for spot, lacking in seeds.items():
        by_seeds.setdefault(", ".join(lacking), []).append(" · ".join(spot))
    spots = len({(cell.method.label, *cell.place) for cell in kept.planned.cells})
    words = [_of_seeds(lacking, where, spots) for lacking, where in by_seeds.items()]
    return [f"{len(kept.found)} of {kept.cells} cells are finished; missing: {'; '.join(words)}"]


def _of_seeds(seeds: str, where: Sequence[str], spots: int) -> str:
    word = f"seed{'s' if ',' in seeds else ''} {seeds}"
    if len(where) == spots:
        return f"{word} of every method"
    more = f" and {len(where) - _NAMED} more (missing.txt)" if len(where) > _NAMED else ""
    return f"{word} of {', '.join(where[:_NAMED])}{more}"
