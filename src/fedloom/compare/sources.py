"""Where finished cells lie: run folders and kept results, anywhere below a folder or inside a tar archive."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fedloom.compare.cells import Cell
from fedloom.compare.folder import state_of
from fedloom.compare.kept import Document, document_of, read_document
from fedloom.core.errors import ConfigError, Fault

_HASH = re.compile(r"[0-9a-f]{16}")
_MOST = 64 << 20  # bytes of a file in an archive; a kept result has some thousand
TERMS = "equal.json"


class FinishedCells(NamedTuple):
    """What a source holds, by the hash of the cell."""

    homes: tuple[tuple[str, Path], ...]  # run folders that ended
    files: tuple[tuple[str, str, bytes | Path], ...]  # kept results: where, and the text or its file
    terms: tuple[bytes, ...] = ()  # files that say what methods may spend on equal terms


def look(source: Path) -> FinishedCells:
    """Everything finished that lies below a folder, or in an archive of kept results."""
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
        for name, at, text in each.files:
            if name in cells:
                yield name, read_document(text.read_bytes() if isinstance(text, Path) else text, name, at)


def _below(folder: Path) -> FinishedCells:
    homes, files, terms = [], [], []
    for place, inner, names in os.walk(folder):
        here = Path(place)
        homes += [(name, here / name) for name in sorted(inner) if _HASH.fullmatch(name) and state_of(here / name)]
        inner[:] = sorted(name for name in inner if not _HASH.fullmatch(name))
        kept = [name for name in sorted(names) if _is_kept(name)]
        files += [(name.removesuffix(".json"), str(here / name), here / name) for name in kept]
        terms += [(here / name).read_bytes() for name in names if name == TERMS]
    return FinishedCells(tuple(homes), tuple(files), tuple(terms))


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
                    files.append((name.removesuffix(".json"), f"{archive}/{member.name}", text))
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ConfigError([Fault("--from", f"{archive} is not a folder or tar archive: {error}")]) from error
    return FinishedCells((), tuple(files), tuple(terms))


def _is_kept(name: str) -> bool:
    return name.endswith(".json") and _HASH.fullmatch(name.removesuffix(".json")) is not None
