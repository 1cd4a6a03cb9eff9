"""Finding finished cells: run folders and kept results, anywhere below a folder or inside a tar archive."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fedloom.compare.cells import Cell, hash_of_settings
from fedloom.compare.folder import state_of
from fedloom.compare.kept import Document, document_of, read_document
from fedloom.core.errors import ConfigError, Fault
from fedloom.runs.settings import as_table

_HASH = re.compile(r"[0-9a-f]{16}")
_MOST = 64 << 20  # bytes of a file in an archive; a kept result has some thousand
TERMS = "equal.json"


_MAIN = (("algorithm", "kind"), ("data", "source"), ("model", "kind"))


class KeptFile(NamedTuple):
    """A kept result: a file, or one inside an archive."""

    name: str  # the hash of the cell when it was kept
    at: str
    text: bytes | Path

    @property
    def content(self) -> bytes:
        return self.text.read_bytes() if isinstance(self.text, Path) else self.text


class FinishedCells(NamedTuple):
    """What a source contains, by the hash of the cell."""

    homes: tuple[tuple[str, Path], ...]  # run folders that ended
    files: tuple[KeptFile, ...]
    terms: tuple[bytes, ...] = ()  # files with what methods may spend on equal terms


def look(source: Path) -> FinishedCells:
    """All finished cells below a folder, or in an archive of kept results."""
    if source.is_dir():
        return _below(source)
    if source.is_file():
        return _inside(source)
    raise ConfigError([Fault("--from", f"there is no folder or archive {source}")])


def documents(found: Sequence[FinishedCells], cells: Mapping[str, Cell]) -> Iterator[tuple[str, Document]]:
    """The results of these cells in all sources."""
    for each in found:
        for name, home in each.homes:
            if name in cells:
                yield name, document_of(cells[name], home)
    yield from kept_documents([file for each in found for file in each.files], cells)


def kept_documents(files: Sequence[KeptFile], cells: Mapping[str, Cell]) -> Iterator[tuple[str, Document]]:
    """The kept results of these cells, also those whose settings had another hash in an earlier version."""
    others = []
    for file in files:
        if file.name in cells:
            yield file.name, read_document(file.content, file.name, file.at)
        else:
            others.append(file)
    if not others:
        return
    missing = {_main(as_table(cells[name].config)) for name in set(cells) - {file.name for file in files}}
    for file in others:
        settings = _settings(file)
        if settings is not None and _main(settings) in missing and (now := hash_of_settings(settings)) in cells:
            yield now, read_document(file.content, file.name, file.at) | {"hash": now}


def superseded(folder: Path, found: Collection[str]) -> list[Path]:
    """Kept results in this folder whose hash has changed, and that also exist under the new hash."""
    files = [file for file in kept_files(folder, (path.name for path in folder.iterdir())) if file.name not in found]
    pairs = [(folder / f"{file.name}.json", _settings(file)) for file in files]
    return [path for path, settings in pairs if settings is not None and hash_of_settings(settings) in found]


def _settings(file: KeptFile) -> dict[str, Any] | None:
    """The settings of a kept result; None if the file is damaged."""
    try:
        settings = json.loads(file.content)["settings"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return settings if isinstance(settings, dict) else None


def _main(settings: Mapping[str, Any]) -> str:
    """The settings that every version hashes: results that differ in these are of different cells."""
    kinds = [settings[part].get(key) for part, key in _MAIN if isinstance(settings.get(part), Mapping)]
    return repr((settings.get("seed"), settings.get("rounds"), kinds))


def _below(folder: Path) -> FinishedCells:
    homes, files, terms = [], [], []
    for place, inner, names in os.walk(folder):
        here = Path(place)
        homes += [(name, here / name) for name in sorted(inner) if _HASH.fullmatch(name) and state_of(here / name)]
        inner[:] = sorted(name for name in inner if not _HASH.fullmatch(name))
        files += kept_files(here, names)
        terms += [(here / name).read_bytes() for name in names if name == TERMS]
    return FinishedCells(tuple(homes), tuple(files), tuple(terms))


def kept_files(folder: Path, names: Iterable[str]) -> list[KeptFile]:
    """The files among these that are kept results by their names."""
    found = [name for name in sorted(names) if _is_kept(name)]
    return [KeptFile(name.removesuffix(".json"), str(folder / name), folder / name) for name in found]


def _inside(archive: Path) -> FinishedCells:
    """Kept results in an archive; nothing is unpacked."""
    files, terms = [], []
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if not member.isfile() or not (_is_kept(name) or name == TERMS):
                    continue
                if member.size > _MOST:
                    raise ConfigError([Fault(f"{archive}/{member.name}", f"has {member.size:,} bytes: not a result")])
                stream = tar.extractfile(member)
                text = stream.read() if stream is not None else b""
                if name == TERMS:
                    terms.append(text)
                else:
                    files.append(KeptFile(name.removesuffix(".json"), f"{archive}/{member.name}", text))
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ConfigError([Fault("--from", f"{archive} is not a folder or tar archive: {error}")]) from error
    return FinishedCells((), tuple(files), tuple(terms))


def _is_kept(name: str) -> bool:
    return name.endswith(".json") and _HASH.fullmatch(name.removesuffix(".json")) is not None
