"""Comparisons, and folders of runs, as they are shown: read without a lock, also while they are running."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedloom.compare.kept import Document, read_document, records_of
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.schema import dotted
from fedloom.report.view import AnyView, ComparisonView, FolderView, RunView
from fedloom.runs.look import csv_lines, is_held, is_run, json_file, look_at_run
from fedloom.runs.settings import read_toml

_DEEPEST = 3  # depth of folders that are searched


def is_comparison(folder: Path) -> bool:
    """Whether a folder is that of a comparison."""
    return (folder / "compare.toml").is_file()


def look_at(folders: Iterable[Path]) -> AnyView:
    """What these folders contain: one run, one comparison, or several of both."""
    given = list(folders)
    for folder in given:
        if not folder.is_dir():
            raise ConfigError([Fault(str(folder), "there is no such folder", "see fedloom show runs/")])
    found = [each for folder in given for each in _below(folder, _DEEPEST)]
    if not found:
        where = ", ".join(map(str, given))
        raise ConfigError([Fault(where, "contains neither a run nor a comparison", "start one with: fedloom run")])
    names = _names([parts for _, parts in found])
    views = [_one(folder, name) for (folder, _), name in zip(found, names, strict=True)]
    if len(views) == 1:
        return views[0]
    runs = tuple(view for view in views if isinstance(view, RunView))
    comparisons = tuple(view for view in views if isinstance(view, ComparisonView))
    return FolderView(given[0].resolve().name if len(given) == 1 else "", runs, comparisons)


def _below(folder: Path, depth: int) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The runs and comparisons in a folder, and the parts of their names; cells belong to their comparison."""
    if is_run(folder) or is_comparison(folder):
        yield folder, folder.resolve().parts
    elif (folder / "tune.toml").is_file():
        yield from _trials(folder)
    elif depth:
        for inner in sorted(folder.iterdir()):
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
                yield from _below(inner, depth - 1)


def _trials(folder: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The runs of a search, trial by trial; an earlier version listed none, and folders name them."""
    lines = csv_lines(folder / "cells.csv", ("trial", "seed", "folder"))
    several = len({line["seed"] for line in lines}) > 1
    known = {line["folder"]: f"trial {line['trial']}" + several * f", seed {line['seed']}" for line in lines}
    homes = [*known, *(f"cells/{home.name}" for home in _unlisted(folder, set(known)))]
    for home in homes:
        if is_run(folder / home):
            yield folder / home, (*folder.resolve().parts, known.get(home, home))


def _names(paths: list[tuple[str, ...]]) -> list[str]:
    """The shortest ends of the paths that distinguish all of them."""
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    raise ConfigError([Fault(str(Path(*paths[0])), "is named twice")])


def _one(folder: Path, name: str) -> RunView | ComparisonView:
    return look_at_run(folder, name) if is_run(folder) else comparison(folder, name)


def comparison(folder: Path, name: str) -> ComparisonView:
    """The comparison in a folder, with all of its cells that have begun."""
    table = read_toml(folder / "compare.toml")
    spec = table["compare"] if isinstance(table.get("compare"), Mapping) else {}
    axes = tuple(dotted(_table(spec.get("grid"))))
    lines = csv_lines(folder / "cells.csv", ("algorithm", "seed", "state", "folder"))
    listed = {line["folder"]: line for line in lines}
    cells = [_cell(folder, line, axes) for line in listed.values()]
    cells += [_begun(home, axes) for home in _unlisted(folder, set(listed))]
    planned = max(len(cells), _planned(spec))
    summary = json_file(folder / "summary.json")
    layout = _table(spec.get("layout"))
    gone = not is_held(folder) and all(cell.stopped or cell.state != "unfinished" for cell in cells)
    gone = gone and not (folder / "missing.txt").is_file()  # kept results may come from anywhere
    return ComparisonView(name, str(folder), axes, tuple(cells), planned, summary, layout, gone)


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _planned(spec: Mapping[str, Any]) -> int:
    """The planned number of cells of a comparison."""
    counted = (spec.get("algorithms"), spec.get("seeds"), *dotted(_table(spec.get("grid"))).values())
    return math.prod(len(values) for values in counted if isinstance(values, list))


def _cell(folder: Path, line: Mapping[str, str], axes: tuple[str, ...]) -> RunView:
    """A cell that the tables list; it may have continued since, or be a kept result."""
    place, method = tuple(line.get(axis, "") for axis in axes), line["algorithm"]
    home, name = folder / line["folder"], f"{method}, seed {line['seed']}"
    if is_run(home):
        view = look_at_run(home, name, method, place)
        return view._replace(state="failed") if line["state"] == "failed" and view.state == "unfinished" else view
    kept = _kept(home.with_name(f"{home.name}.json"))
    if kept is not None:
        settings, records = dotted(_table(kept["settings"])), records_of(kept)
        return RunView(
            name, str(home), kept["state"], settings, records, (), kept["origin"], method=method, place=place
        )
    known = {"seed": int(line["seed"]), "algorithm.kind": line.get("kind", method)}
    return RunView(name, str(home), "missing", known, method=method, place=place)


def _kept(path: Path) -> Document | None:
    """A kept result; None: there is none, or it is damaged."""
    try:
        return read_document(path.read_bytes(), path.stem, str(path))
    except (OSError, ConfigError):
        return None


def _unlisted(folder: Path, listed: set[str]) -> list[Path]:
    """Run folders of cells that began after the tables were last written."""
    own = folder / "cells"
    homes = sorted(own.iterdir()) if own.is_dir() else []
    return [home for home in homes if is_run(home) and f"cells/{home.name}" not in listed]


def _begun(home: Path, axes: tuple[str, ...]) -> RunView:
    view = look_at_run(home)
    place = tuple(str(view.settings.get(axis, "")) for axis in axes)
    return view._replace(name=f"{view.algorithm}, seed {view.seed}", method=view.algorithm, place=place)
