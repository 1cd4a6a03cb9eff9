"""The user's own files in a contract: code and weights that the experiment names are copied into every bundle.

A bundle has them below ``code/`` and ``weights/``, and the contract names them by these paths, with their hashes. Each
side uses its own copy, if the hash is right. Code runs by consent, as anywhere: docs/adr/0017.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fedloom.core import disk, usercode
from fedloom.core.errors import ConfigError, DataError, Fault
from fedloom.core.schema import module_names
from fedloom.runs.find import KEYS
from fedloom.runs.settings import NAMED_CODE, Config

# The settings that may name a user's file, as (section, key).
_PLACES = (*KEYS.items(), *NAMED_CODE, ("model", "weights"))


class OwnFiles(NamedTuple):
    """Files that belong to a contract."""

    files: Mapping[str, Path] = {}
    names: Mapping[tuple[str, str], str] = {}

    def hashes(self) -> dict[str, str]:
        return {name: disk.digest(path) for name, path in sorted(self.files.items())}

    def named(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """A table of settings with the paths of the contract, which are the same on every machine."""
        return _renamed(table, lambda section, file: self.names.get((section, file), file))


def own_files(config: Config) -> OwnFiles:
    """The user's own code and weights that an experiment uses; what cannot be copied is refused."""
    files: dict[str, Path] = {}
    names: dict[tuple[str, str], str] = {}
    for section, key, value in _named_code(config):
        paths = _loaded(section, key, value)
        root = paths[0].parent
        for path in paths:
            _add(files, f"code/{_inside(path, root, section, key)}", path, f"{section}.{key}")
        names[section, _file_of(value)] = f"code/{paths[0].name}"
    if config.model.weights:
        path = Path(config.model.weights).absolute()
        _add(files, f"weights/{path.name}", path, "model.weights")
        names["model", config.model.weights] = f"weights/{path.name}"
    return OwnFiles(files, names)


def put_files(folder: Path, own: OwnFiles) -> None:
    """Copy the files of a contract into a bundle."""
    for name, path in own.files.items():
        disk.make_folder((folder / name).parent)
        disk.write_bytes(folder / name, path.read_bytes())


def files_here(folder: Path, hashes: Mapping[str, str]) -> OwnFiles:
    """The files of a bundle; refused if one is missing or differs from the contract."""
    files = {}
    for name, sha in hashes.items():
        parts = PurePosixPath(name)
        path = folder.absolute() / name
        if parts.is_absolute() or ".." in parts.parts:
            raise DataError(f"{folder}: the contract names a file outside its folder ('{name}')")
        if not path.is_file() or disk.digest(path) != sha:
            what = "has changed since the contract was made" if path.is_file() else "is missing"
            raise DataError(f"{path}: {what}; take the one from the bundle (SHA-256 {sha[:12]})")
        files[name] = path
    return OwnFiles(files, {(section, str(path)): name for name, path in files.items() for section, _ in _PLACES})


def placed(table: Mapping[str, Any], own: OwnFiles) -> dict[str, Any]:
    """A contract's table of settings with the paths of the files in this bundle."""
    return _renamed(table, lambda _, name: str(own.files.get(name, name)))


def _renamed(table: Mapping[str, Any], rename: Callable[[str, str], str]) -> dict[str, Any]:
    found = dict(table)
    for section, key in _PLACES:
        given = found.get(section)
        value = given.get(key) if isinstance(given, Mapping) else None
        if isinstance(given, Mapping) and isinstance(value, str):
            file = _file_of(value)
            found[section] = {**given, key: rename(section, file) + value[len(file) :]}
    return found


def _file_of(value: str) -> str:
    """The file in ``file.py:Name``; a name without a colon is a file."""
    place, colon, _ = value.rpartition(":")
    return place if colon and place.endswith(".py") else value


def _named_code(config: Config) -> Iterator[tuple[str, str, str]]:
    """The settings that name user code: section, key and value."""
    chosen = {**config.kinds, **{section: getattr(getattr(config, section), key) for section, key in NAMED_CODE}}
    for section, key in _PLACES:
        value = chosen.get(section, "")
        own = section == "algorithm" and value not in module_names("fedloom.algorithms")
        if key != "weights" and (own or usercode.is_reference(value)):
            yield section, key, value


def _loaded(section: str, key: str, value: str) -> list[Path]:
    """The file that a setting names, followed by the user's files that it imports."""
    at = f"{section}.{key}"
    if usercode.is_reference(value):
        if not _file_of(value).endswith(".py"):
            what = f"'{value}' is a module, whose files are not all known, so it cannot be copied to nodes"
            raise ConfigError([Fault(at, what, "name a file: file.py:Name")])
        usercode.load_code(value, at)
    return [Path(path).absolute() for path in usercode.files([value])]


def _inside(path: Path, root: Path, section: str, key: str) -> str:
    """A file's path below the folder from which it can be imported."""
    for folder in (root, *(Path(entry or ".").absolute() for entry in sys.path)):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    raise ConfigError([Fault(f"{section}.{key}", f"it imports {path}, which cannot be found by its name")])


def _add(files: dict[str, Path], name: str, path: Path, at: str) -> None:
    known = files.setdefault(name, path)
    if known != path and disk.digest(known) != disk.digest(path):
        raise ConfigError([Fault(at, f"{path} and {known} would have one name in a bundle", "rename one of them")])
