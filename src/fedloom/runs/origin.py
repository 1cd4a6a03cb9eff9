"""Where a run began: the folder from which its relative paths are resolved, and the folder of its data sets."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any

from fedloom.data.files import default_root
from fedloom.runs.environment import read_environment


def whereabouts(root: Path | None) -> dict[str, str]:
    """What environment.json says of them."""
    return {"folder": str(Path.cwd())} | ({} if root is None else {"data_root": str(root.absolute())})


@contextmanager
def from_its_folder(run: Path) -> Iterator[Path]:
    """The run folder, and the working folder with the files of the run: the current one, or the one where it began.

    A run can thus be resumed from another folder than the one it was started from.
    """
    home = Path(str(read_environment(run).get("folder", "")))
    away = [name for name in _relative_names(run) if not Path(name).exists()]
    if not away or not home.is_absolute() or not all((home / name).exists() for name in away):
        yield run
        return
    run = run.absolute()
    with chdir(home):
        yield run


@contextmanager
def beside_its_code(run: Path) -> Iterator[None]:
    """In the folder with the user's own code of a run: the current one, the one where it began, or the run's copies."""
    files = read_environment(run).get("files", {})
    names = [str(name) for name in files if str(name).endswith(".py")] if isinstance(files, dict) else []
    home = Path(str(read_environment(run).get("folder", "")))
    places = [Path.cwd(), *([home] if home.is_absolute() else []), run.absolute() / "code"]
    with chdir(next((place for place in places if all((place / name).is_file() for name in names)), places[0])):
        yield


def learned_from(run: Path, data: Path) -> bool:
    """Whether this is the file that a run learned from."""
    home = Path(str(read_environment(run).get("folder", "")))
    named = _data_of(run).get("path")
    if not isinstance(named, str) or "\0" in f"{home}{named}":
        return False
    return os.path.realpath(home / os.path.expanduser(named)) == os.path.realpath(data)


def root_of(run: Path, given: str | Path | None) -> Path:
    """The folder of data sets: as given, else the one with which the run began, else the usual one."""
    if given is not None:
        return Path(given).absolute()
    then = read_environment(run).get("data_root")
    return Path(then) if isinstance(then, str) and Path(then).is_dir() else default_root()


def _relative_names(run: Path) -> list[str]:
    """The user's own files that a run needs and names by relative paths: code, weights and data."""
    files = read_environment(run).get("files", {})
    names = [str(name) for name in files] if isinstance(files, dict) else []
    data = _data_of(run)
    names += [str(data["path"])] if "path" in data else []
    return [name for name in names if name and not name.startswith("~") and not Path(name).is_absolute()]


def _data_of(run: Path) -> dict[str, Any]:
    """The section ``data`` of a run; empty if it is damaged, which is refused later if the data is needed."""
    with suppress(OSError, ValueError, RecursionError):
        data: Any = tomllib.loads((run / "config.toml").read_text(encoding="utf-8-sig")).get("data")
        return data if isinstance(data, dict) else {}
    return {}
