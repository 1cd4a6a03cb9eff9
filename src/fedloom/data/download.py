"""Getting published sets: from the publisher, resumed and verified, or from files the user already has.

Nothing is downloaded unless ``get`` is called. A file gets its final name only when it is complete.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import re
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from fedloom.core.errors import DataError, StorageError, nearest
from fedloom.data.files import Layout, missing_files, places_below, read_published
from fedloom.data.published import PUBLISHED, Published, Remote, remember, unverified

Report: TypeAlias = Callable[[int, int], None]  # bytes so far, bytes in total
_BLOCK = 1 << 18
# URLError, timeouts and resets are OSErrors; an invalid address is a ValueError
_NETWORK_ERRORS = (OSError, http.client.HTTPException, ValueError)


def get(
    name: str,
    root: Path,
    report: Report | None = None,
    *,
    base_url: str | None = None,
    published: Mapping[str, Published] = PUBLISHED,
    timeout: float = 30.0,
) -> Path:
    """Downloads a published set below ``root``, unless it exists with the right checksums, and returns its folder.

    ``base_url`` replaces the publisher's addresses: files are taken from ``base_url/FILE``. What an interrupted
    download left in FILE.part is continued.
    """
    chosen = _known(name, published)
    layout, folder = chosen.layout, root / chosen.layout.folder
    if _is_whole(chosen, root):
        return folder
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    bases = (base_url.rstrip("/"),) if base_url else chosen.bases
    total = sum(remote.size for remote in chosen.remotes)
    before = 0
    for remote in chosen.remotes:
        part, final = folder / f"{remote.file}.part", folder / remote.file
        if chosen.archived or _fault(final, remote):
            urls = [f"{base}/{remote.file}" for base in bases]
            _download(layout.name, remote, urls, part, partial(_tell, report, before, total), timeout)
            if chosen.archived:
                _install(_unpacked(part, layout, folder))
                part.unlink()
            else:
                with _writing(final):
                    part.replace(final)
        before += remote.size
        _tell(report, before, total, 0)
    places = places_below(layout, root)
    read_published(layout, places)
    remember(places)
    return folder


def import_files(name: str, directory: Path, root: Path, *, published: Mapping[str, Published] = PUBLISHED) -> Path:
    """Copies a published set out of ``directory`` (or out of the publisher's archive), and returns its new folder.

    The files may be in the folder itself or in one of the usual sub-folders; idx files may be uncompressed.
    They are read and checked before anything is copied.
    """
    chosen = _known(name, published)
    layout, folder = chosen.layout, root / chosen.layout.folder
    if not directory.exists():
        raise DataError(f"{directory}: no such folder (looked for {directory.absolute()})")
    if directory.is_file() and not chosen.archived:
        raise DataError(f"{directory}: is a file; give the folder that contains {', '.join(layout.files)}")
    archive = directory if directory.is_file() else _archive_in(directory, chosen)
    found = {} if directory.is_file() else _found_in(directory, chosen)
    missing = [file for file in layout.files if file not in found]
    if missing and archive is None:
        raise DataError(_missing_message(chosen, directory, missing))
    if not missing:
        read_published(layout, found)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if missing:
        assert archive is not None
        _install(_unpacked(archive, layout, folder))
    else:
        _install(_copied(found, folder))
    remember(places_below(layout, root))
    return folder


def _tell(report: Report | None, before: int, total: int, here: int) -> None:
    if report is not None:
        report(before + here, total)


def _known(name: str, published: Mapping[str, Published]) -> Published:
    key = name.replace("-", "_")
    if key not in published:
        raise DataError(f"no published data set is called '{name}' ({nearest(key, published)})")
    return published[key]


def _is_whole(chosen: Published, root: Path) -> bool:
    """Whether all files exist with the publisher's checksums, or those that they had when they were imported."""
    if missing_files(chosen.layout, root):
        return False
    return not unverified(chosen, places_below(chosen.layout, root), anew=True)


# --------------------------------------------------------------------------------------------- downloading


def _download(
    name: str, remote: Remote, urls: list[str], part: Path, tell: Callable[[int], None], timeout: float
) -> None:
    """Makes ``part`` the whole and verified file, trying one address after the other."""
    if not _fault(part, remote):
        return
    if _size(part) >= remote.size:
        part.unlink()
    troubles: list[str] = []
    for url in urls:
        best, fresh, again = _size(part), False, True
        while again:
            before = _size(part)
            try:
                _receive(url, remote, part, tell, timeout)
                trouble = _fault(part, remote)
            except _NETWORK_ERRORS as error:
                trouble = _reason(error)
            if not trouble:
                return
            if _size(part) >= remote.size:  # all bytes, but wrong ones
                part.unlink()
            here = _size(part)
            # a broken connection is resumed as long as each attempt gets further than any before; if the bytes
            # turn out to be wrong, perhaps those of an earlier run, start from nothing once
            begin = before > 0 and here == 0 and not fresh
            again, best, fresh = here > best or begin, max(best, here), fresh or begin
        troubles.append(f"{url}: {trouble}")
    kept = f"\n  {_size(part)} bytes are kept; the same command continues from there" if _size(part) else ""
    raise DataError(
        f"data '{name}' could not be downloaded\n  " + "\n  ".join(troubles) + kept + "\n"
        f"  if you can get the files some other way:  fedloom data import {name} DIR"
    )


def _receive(url: str, remote: Remote, part: Path, tell: Callable[[int], None], timeout: float) -> None:
    """Appends the download to ``part``, from where it stopped if the server can, else from the beginning."""
    have = _size(part)
    headers = {"User-Agent": "fedloom"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink(missing_ok=True)
        raise
    with answer:
        resumed = answer.status == http.client.PARTIAL_CONTENT
        if resumed and not re.match(rf"bytes {have}-", answer.headers.get("Content-Range", "")):
            part.unlink(missing_ok=True)
            raise http.client.HTTPException(f"asked for bytes {have}-, got {answer.headers.get('Content-Range')}")
        have = have if resumed else 0
        length = answer.headers.get("Content-Length")
        if length is not None and have + int(length) != remote.size:
            raise http.client.HTTPException(f"expected {remote.size} bytes, the server offers {have + int(length)}")
        tell(have)
        with _writing(part):
            out = part.open("ab" if resumed else "wb")
        with out:
            while have <= remote.size and (block := answer.read1(_BLOCK)):
                with _writing(part):
                    out.write(block)
                    out.flush()  # here, so that a full disk is not mistaken for a broken network
                have += len(block)
                tell(min(have, remote.size))


def _fault(path: Path, remote: Remote) -> str:
    """What is wrong with a file that should be the publisher's; empty if nothing is."""
    size = _size(path)
    if size != remote.size:
        return f"expected {remote.size} bytes, got {size}{' or more' if size > remote.size else ''}"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if found == remote.sha256 else f"expected sha256 {remote.sha256}, got {found}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(reason) or type(reason).__name__


# ----------------------------------------------------------------------------------------------- importing


def _found_in(directory: Path, chosen: Published) -> dict[str, Path]:
    """The paths of the files of the set, in the usual folder that has the most of them."""
    finds = [_files_in(directory / name, chosen.layout) for name in chosen.folder_names]
    return max(finds, key=len)


def _files_in(folder: Path, layout: Layout) -> dict[str, Path]:
    near = {file: [folder / word for word in _spellings(file) if (folder / word).is_file()] for file in layout.files}
    return {file: paths[0] for file, paths in near.items() if paths}


def _spellings(file: str) -> list[str]:
    """The possible names of a file: as published, unpacked, and as some unpackers write it."""
    plain = file.removesuffix(".gz")
    return list(dict.fromkeys([file, plain, plain.replace("-idx", ".idx")]))


def _archive_in(directory: Path, chosen: Published) -> Path | None:
    if not chosen.archived:
        return None
    paths = [directory / name / chosen.remotes[0].file for name in chosen.folder_names]
    return next((path for path in paths if path.is_file()), None)


def _missing_message(chosen: Published, directory: Path, missing: list[str]) -> str:
    looked = ", ".join(str(directory / name) for name in chosen.folder_names)
    pickled = [path for path in sorted(directory.glob("cifar-*")) if re.search(r"python|-py$", path.name)]
    hint = f"\n  {pickled[0]} is the Python version; the binary version is needed" if pickled else ""
    archive = f" (or {chosen.remotes[0].file})" if chosen.archived else ""
    return (
        f"data '{chosen.layout.name}' cannot be imported: no {', '.join(missing)}{archive}\n  looked in {looked}{hint}"
    )


def _copied(found: Mapping[str, Path], folder: Path) -> dict[Path, Path]:
    """Copies next to their final paths; an uncompressed idx file is compressed, so that one layout is enough."""
    staged: dict[Path, Path] = {}
    try:
        for file, path in found.items():
            new, final = folder / f"{file}.new", folder / file
            if final.exists() and final.samefile(path):
                continue
            staged[new] = final
            with _writing(new), path.open("rb") as source, new.open("wb") as out:
                if file.endswith(".gz") and source.peek(2)[:2] != b"\x1f\x8b":
                    with gzip.GzipFile("", "wb", 6, out, mtime=0) as packed:
                        shutil.copyfileobj(source, packed, _BLOCK)
                else:
                    shutil.copyfileobj(source, out, _BLOCK)
    except BaseException:
        _discard(staged)
        raise
    return staged


class _Unpacked(gzip.GzipFile):
    """The content of a compressed file, in pieces: a header may claim any length, and is read in one piece."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _BLOCK:
            raise tarfile.ReadError(f"a header claims {size} bytes")
        return super().read(size)


def _unpacked(archive: Path, layout: Layout, folder: Path) -> dict[Path, Path]:
    """The set's files out of its archive, read and checked, next to their final paths.

    Members are chosen by exact name and copied as bytes: no name, link or mode in the archive is trusted.
    """
    sizes = {part.files[0]: part.rows * layout.record for part in layout.parts}
    members = {f"{layout.folder}/{file}": file for file in sizes}
    staged: dict[Path, Path] = {}
    try:
        with _Unpacked(archive) as plain, tarfile.open(fileobj=plain, mode="r:") as tar:
            for member in tar:
                file = members.get(member.name.removeprefix("./"))
                if file is None:
                    continue
                if not member.isreg() or member.size != sizes[file]:
                    raise DataError(
                        f"{archive}: '{member.name}' must be a plain file of {sizes[file]} bytes (found {member.size})"
                    )
                new = folder / f"{file}.new"
                staged[new] = folder / file
                _copy_member(tar, member, new)
        missing = [name for name, file in members.items() if folder / f"{file}.new" not in staged]
        if missing:
            raise DataError(f"{archive}: does not contain {', '.join(missing)}")
        try:
            read_published(layout, {file: folder / f"{file}.new" for file in sizes})
        except DataError as error:
            raise DataError(f"{archive}: {error}") from error
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        _discard(staged)
        raise DataError(f"{archive}: damaged ({_size(archive)} bytes): {error}") from error
    except BaseException:
        _discard(staged)
        raise
    return staged


def _copy_member(tar: tarfile.TarFile, member: tarfile.TarInfo, new: Path) -> None:
    content = tar.extractfile(member)
    assert content is not None
    with _writing(new):
        out = new.open("wb")
    with out:
        while block := content.read(_BLOCK):
            with _writing(new):
                out.write(block)
                out.flush()


def _install(staged: Mapping[Path, Path]) -> None:
    """Renames complete files to their final names, each atomically."""
    try:
        for new, final in staged.items():
            with _writing(final):
                new.replace(final)
    finally:
        _discard(staged)


def _discard(staged: Mapping[Path, Path]) -> None:
    for new in staged:
        new.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Errors of the disk inside are raised as a StorageError about ``path``."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {os.strerror(error.errno) if error.errno else error}"
        ) from error
