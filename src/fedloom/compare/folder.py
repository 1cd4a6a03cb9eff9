"""The folder of a comparison: for one process at a time, and for one comparison."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedloom.algorithm.capabilities import needs_proxy
from fedloom.compare.cells import Cell
from fedloom.compare.equal_terms import equalised
from fedloom.compare.plan import ComparisonPlan, plan
from fedloom.core import disk, usercode
from fedloom.core.errors import ConfigError, Fault, FedloomError, StorageError
from fedloom.core.schema import dotted
from fedloom.data.sources import Digits, PublishedSet, Synthetic
from fedloom.runs.environment import changed_files, other_versions
from fedloom.runs.folder import unused
from fedloom.runs.prepare import data_fingerprint, share
from fedloom.runs.settings import read_toml

_ASIDE = "replaced"  # the old versions of cells that were run again
_CELL = re.compile(r"[0-9a-f]{16}")  # the name of a cell
_STATES = {"done": "summary.json", "diverged": "diverged.json"}


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into one that names the folder."""
    try:
        yield
    except OSError as error:
        disk.refuse_long_name(error, folder)
        raise StorageError(f"writing below {folder} failed: {error.strerror or error}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder of a comparison, locked for this process, made if it does not exist."""
    if folder.exists() and (not folder.is_dir() or not _is_ours(folder)):
        raise ConfigError([Fault("--out", f"{folder} already exists and is not a comparison", "choose another")])
    with alone(folder, "--out"):
        yield


def cells_folder(planned: ComparisonPlan, folder: Path) -> Path:
    """Where the cells are: in the comparison's own folder, or in one that it shares with other comparisons."""
    return Path(planned.spec.cells or folder / "cells")


@contextmanager
def cells_of(planned: ComparisonPlan, folder: Path) -> Iterator[Path]:
    """The folder of the cells, for this process alone."""
    shared = cells_folder(planned, folder)
    if not planned.spec.cells:
        disk.make_folder(shared)
        yield shared
        return
    _refuse_other_files(shared)
    with alone(shared, "compare.cells"):
        yield shared


def _refuse_other_files(shared: Path) -> None:
    """Refuse a folder that is not one of cells: a recipe of others may name any folder of the user's."""
    for inside in sorted(shared.iterdir()) if shared.is_dir() else ():
        if not _CELL.fullmatch(inside.name) and not inside.name.startswith("."):
            what = f"{shared} is not a folder of cells (it contains {inside.name})"
            raise ConfigError([Fault("compare.cells", what, "choose another")])


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
    """Protect the tables of a folder: a comparison may grow, but another one may not replace it."""
    if not (folder / "compare.toml").is_file():
        return
    there = _read(folder, root, trust=trust)
    mine = {cell.hash for cell in planned.cells}
    lost = sum(cell.hash not in mine for cell in there.cells)
    if lost:
        labels = ", ".join(m.label for m in there.methods)
        what = f"{folder} contains another comparison, of {labels} with seeds {', '.join(map(str, there.spec.seeds))}"
        gone = f"{lost} of its {len(there.cells)} cells are not in this one"
        apart = "".join(f"; {word}" for word in _differences(there.base, planned.base))
        raise ConfigError([Fault("--out", f"{what}: {gone}{apart}", "choose another folder, or delete that one")])


def _read(folder: Path, root: Path, *, trust: bool) -> ComparisonPlan:
    """The comparison in the folder."""
    try:
        table = read_toml(folder / "compare.toml")
        if trust:
            usercode.vouch(table)
        return equalised(plan(table), root)
    except ConfigError as error:
        for fault in error.faults:
            if usercode.NEEDS_TRUST in str(fault):
                raise ConfigError([Fault(f"{folder}/compare.toml", str(fault))]) from error
        what = f"{folder} contains a comparison that can no longer be read ({error.faults[0]})"
        raise ConfigError([Fault("--out", what, "choose another folder, or delete that one")]) from error


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The first settings in which two experiments differ, in words."""
    a, b = dotted(there), dotted(here)
    differ = [key for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)]
    return [f"{key} is {a.get(key, 'unset')} there and {b.get(key, 'unset')} here" for key in differ[:3]]


def move_stale_aside(planned: ComparisonPlan, folder: Path, cells: Path, root: Path) -> list[str]:
    """Set aside the cells whose data, code or versions have changed, so that they run again; returns a note.

    A cell depends on its settings, which name its folder, its data, the user's own code and weights, and the versions
    of the packages that compute it.
    """
    here = {cells / cell.hash: cell for cell in planned.cells if (cells / cell.hash).is_dir()}
    data = Fingerprints(root)
    reasons = {home: stale_reasons(home, cell, data) for home, cell in here.items()}
    stale = {home: why for home, why in reasons.items() if why}
    for home in stale:
        disk.make_folder(folder / _ASIDE)
        shutil.move(home, unused(folder / _ASIDE / home.name) / "run")
    each = [word for why in stale.values() for word in why]
    listed = "; ".join(f"{word} ({_counted(each.count(word), 'cell')})" for word in dict.fromkeys(each))
    aside = f"the old ones are in {folder / _ASIDE}"
    notes = [f"{_counted(len(stale), 'cell')} to be run again, since {listed}; {aside}"] if stale else []
    return notes + data.unknown()


def stale_reasons(home: Path, cell: Cell, data: Fingerprints) -> list[str]:
    """What has changed since the run in this folder began, in words."""
    found = [f"{file} has changed" for file in changed_files(home)] + other_versions(home)
    return found + (["the data has changed"] if data.differs(home, cell) else [])


class Fingerprints:
    """The current data of cells, without the server's rows as a run records them; each is read once for a seed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, str] = {}  # empty if it cannot be read
        self._missing: dict[str, str] = {}

    def differs(self, home: Path, cell: Cell) -> bool:
        """Whether the data of a cell differs from that of the run in this folder.

        Sets that fedloom draws, or checks against their publisher's checksums, cannot differ.
        """
        config = cell.config
        if isinstance(config.data, Digits | Synthetic | PublishedSet):
            return False
        then = _read_json(home / "partition.json").get("data_sha256")
        given = (config.kinds["data"], config.data, config.task, config.proxy, needs_proxy(config.algorithm))
        key = repr((*given, config.basics.seed))
        if then is not None and key not in self._known:
            try:
                self._known[key] = data_fingerprint(share(config, self._root).arrays)
            except FedloomError as error:
                self._known[key], self._missing[config.data.name] = "", str(error)
        return then is not None and bool(self._known[key]) and self._known[key] != then

    def unknown(self) -> list[str]:
        """The data sets that could not be read, in words."""
        what = "whether existing cells were made with the same data was not checked"
        return [f"{what}: {why}" for why in self._missing.values()]


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON of a run folder's file, or nothing; reading the results reports the error."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def state_of(home: Path) -> str:
    """The state of a cell: done, diverged, or neither."""
    return next((state for state, file in _STATES.items() if (home / file).is_file()), "")
