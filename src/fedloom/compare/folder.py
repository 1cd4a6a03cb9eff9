"""The folder of a comparison: for one process at a time, and for one comparison."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedloom.compare.equal_terms import equalised
from fedloom.compare.plan import ComparisonPlan, plan
from fedloom.compare.table import dotted
from fedloom.core import disk, usercode
from fedloom.core.errors import ConfigError, Fault, StorageError
from fedloom.runs.environment import changed_files, other_versions
from fedloom.runs.settings import read_toml

_STATES = {"done": "summary.json", "diverged": "diverged.json"}


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Errors of the file system as one that names the folder."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"writing below {folder} failed: {error.strerror or error}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder of a comparison for this process alone, made if it does not exist."""
    if folder.exists() and (not folder.is_dir() or not _is_ours(folder)):
        raise ConfigError([Fault("--out", f"{folder} already exists and is not of a comparison", "choose another")])
    with alone(folder, "--out"):
        yield


@contextmanager
def cells_of(planned: ComparisonPlan, folder: Path) -> Iterator[Path]:
    """The folder of the cells: in the comparison's own folder, or one that it shares with other comparisons."""
    if not planned.spec.cells:
        disk.make_folder(folder / "cells")
        yield folder / "cells"
        return
    shared = Path(planned.spec.cells)
    with alone(shared, "compare.cells"):
        yield shared


@contextmanager
def alone(folder: Path, at: str) -> Iterator[None]:
    """A folder that one process uses at a time."""
    disk.make_folder(folder)
    try:
        lock = disk.lock(folder / ".lock")
    except BlockingIOError as error:
        raise ConfigError([Fault(at, f"another process is using {folder}")]) from error
    try:
        disk.refuse_links(folder)
        yield
    finally:
        os.close(lock)


def _is_ours(folder: Path) -> bool:
    inside = {p.name for p in folder.iterdir()}
    return "compare.toml" in inside or inside <= {".lock", "compare.toml.part"}


def refuse_another(planned: ComparisonPlan, folder: Path, root: Path, *, trust: bool) -> None:
    """A folder keeps its tables: a comparison may grow there, but another one may not replace it."""
    if not (folder / "compare.toml").is_file():
        return
    there = _read(folder, root, trust=trust)
    mine = {cell.hash for cell in planned.cells}
    lost = sum(cell.hash not in mine for cell in there.cells)
    if lost:
        labels = ", ".join(m.label for m in there.methods)
        what = f"{folder} holds another comparison, of {labels} with seeds {', '.join(map(str, there.spec.seeds))}"
        gone = f"{lost} of its {len(there.cells)} cells are not in this one"
        apart = "".join(f"; {word}" for word in _differences(there.base, planned.base))
        raise ConfigError([Fault("--out", f"{what}: {gone}{apart}", "choose another folder, or delete that one")])


def _read(folder: Path, root: Path, *, trust: bool) -> ComparisonPlan:
    """The comparison that the folder holds."""
    try:
        table = read_toml(folder / "compare.toml")
        if trust:
            usercode.vouch(table)
        return equalised(plan(table), root)
    except ConfigError as error:
        for fault in error.faults:
            if usercode.NEEDS_TRUST in str(fault):
                raise ConfigError([Fault(f"{folder}/compare.toml", str(fault))]) from error
        what = f"{folder} holds a comparison that can no longer be read ({error.faults[0]})"
        raise ConfigError([Fault("--out", what, "choose another folder, or delete that one")]) from error


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The first settings in which two experiments differ, in words."""
    a, b = dotted(there), dotted(here)
    differ = [key for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)]
    return [f"{key} is {a.get(key, 'unset')} there and {b.get(key, 'unset')} here" for key in differ[:3]]


def clear_stale(planned: ComparisonPlan, cells: Path) -> list[str]:
    """Delete the cells that were made with other code or weights of the user's, so that they run again; say so."""
    homes = [home for home in dict.fromkeys(cells / cell.hash for cell in planned.cells) if home.is_dir()]
    stale = {home: changed for home in homes if (changed := changed_files(home))}
    for home in stale:
        shutil.rmtree(home)
    files = sorted({file for changed in stale.values() for file in changed})
    notes = [f"{_counted(len(stale), 'cell')} begun with other {', '.join(files)}: run again"] if stale else []
    words = [word for home in homes if home not in stale for word in other_versions(home)]
    return notes + [f"{word} in {_counted(words.count(word), 'cell')}" for word in dict.fromkeys(words)]


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def state_of(home: Path) -> str:
    """The state of a cell: done, diverged, or neither."""
    return next((state for state, file in _STATES.items() if (home / file).is_file()), "")
