"""Files of run folders: private to their owner, written atomically, and never through a link.

A run folder may come from another person, or be in a place where others can write. Files are opened for writing without
following links, so that a name in the folder never refers to a file elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from fedloom.core.errors import CheckpointError, ConfigError, Fault, StorageError

_FILE, _FOLDER = 0o600, 0o700  # of new files and folders
_BLOCK = 4096  # bytes that are searched at once for the end of a line


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Make a folder that only its owner can open; parent folders are made as usual, an existing one is not changed."""
    _refuse_blocked(path if exist_ok else path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=_FOLDER, exist_ok=exist_ok)


def _refuse_blocked(folder: Path) -> None:
    """One error for a folder that cannot be made, since a part of its path is a file or a link that leads nowhere."""
    for part in (folder, *folder.parents):
        with suppress(OSError):
            mode = os.lstat(part).st_mode
            if not os.path.isdir(part):
                what = "is a link that leads to no folder" if stat.S_ISLNK(mode) else "is a file, not a folder"
                raise ConfigError([Fault(str(folder), f"{part} {what}", "choose another path, or rename it")])
            return


def state_home() -> Path:
    """The folder of fedloom's settings for this user, separate from runs and from files that others provide."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state", "fedloom").expanduser()


def as_name(words: str) -> str:
    """Text as the name of one file or folder, without path separators."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in words).strip(".-") or "run"


def open_own(path: Path, flags: int) -> int:
    """Open a file, or create it; refused unless it is one plain file.

    A file that is written in place must have only one name: with a second one (a hard link), another file would change.
    """
    file = _open(path, flags | os.O_CREAT)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(file)
        what = "has another name (a hard link)" if stat.S_ISREG(found.st_mode) else "is not a plain file"
        raise CheckpointError(f"{path}: {what}, so it is not written to (replace it by a copy)")
    return file


def write_bytes(path: Path, data: bytes) -> None:
    """A file that is written atomically, also if the power fails."""
    _write(new_part(path), path, data)


def write_result(path: Path, data: bytes) -> None:
    """The user's file, written atomically; a device or a pipe is written to, and a link is replaced.

    A link in a folder from another person could lead to any file. Those in /dev are the system's.
    """
    with result_at(path):
        if path.exists() and not path.is_file() and (not path.is_symlink() or path.parent == Path("/dev")):
            path.write_bytes(data)
            return
        with TemporaryDirectory(prefix=".fedloom-", dir=path.parent) as scratch:  # no file of the user has its name
            _write(Path(scratch, "new"), path, data)


def _write(part: Path, path: Path, data: bytes) -> None:
    file = _open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(file, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(part, path)


def write_at(file: int, data: bytes, at: int) -> None:
    """Write all of ``data`` into an open file: a write to a nearly full disk may be partial before it fails."""
    left = memoryview(data)
    while left:
        count = os.pwrite(file, left, at)
        left, at = left[count:], at + count


def append_line(path: Path, line: bytes) -> None:
    """Append to a file of lines; what a crash or a full disk has left of an unfinished last line is removed first."""
    with os.fdopen(open_own(path, os.O_RDWR), "r+b") as out:
        out.seek(_end_of_lines(out))
        out.truncate()
        out.write(line + b"\n")
        out.flush()
        os.fsync(out.fileno())


def _end_of_lines(file: IO[bytes]) -> int:
    """Where the last complete line ends."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


@contextmanager
def result_at(path: Path) -> Iterator[None]:
    """Write a result to the user's path and make its parent folders; one error if that fails."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        _refuse_blocked(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        refuse_long_name(error, path)
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def refuse_long_name(error: OSError, path: Path) -> None:
    """One error for a name that no file can have: the disk is not at fault, and another name is."""
    if error.errno == errno.ENAMETOOLONG:
        where = str(error.filename or path)
        raise ConfigError([Fault(where, "a name in this path is too long", "choose a shorter one")]) from error


def new_part(path: Path) -> Path:
    """The path of a file's next version before it is renamed; what a crash left is deleted."""
    part = path.with_name(f"{path.name}.part")
    with suppress(FileNotFoundError):
        part.unlink()
    return part


def lock(path: Path, *, wait: bool = False) -> int:
    """Hold a lock file until its descriptor is closed; if another process holds it, wait, or raise BlockingIOError.

    It is tried twice: ``is_locked`` may hold it for a moment.
    """
    file = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        if not wait and not _flocked(file, fcntl.LOCK_EX):
            time.sleep(0.02)
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(file)
        raise
    return file


def is_locked(path: Path) -> bool:
    """Whether a process holds this lock file; nothing is written, and others may ask at the same time."""
    try:
        file = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _flocked(file, fcntl.LOCK_SH)
    finally:
        os.close(file)


def _flocked(file: int, how: int) -> bool:
    """Lock a file unless another process holds it; whether it is locked now."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def refuse_links(folder: Path) -> None:
    """Refuse a folder that contains anything but plain files and folders, naming the first; no file is opened."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_symlink():
            raise CheckpointError(
                f"{entry.path}: is a link, and links are not followed (replace it by the file itself)"
            )
        if entry.is_dir(follow_symlinks=False):
            refuse_links(Path(entry.path))
        elif not entry.is_file(follow_symlinks=False):
            raise CheckpointError(f"{entry.path}: is neither a file nor a folder (take it out of the folder)")


def still_there(file: int, path: Path) -> None:
    """Refuse to continue with an open file that no longer has its name: what is written to it would be lost."""
    held = os.fstat(file)
    try:
        named = os.stat(path, follow_symlinks=False)
    except OSError:
        named = None
    if named is None or (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
        what = "was deleted" if named is None else "was replaced by another file"
        raise StorageError(f"{path}: {what} while the run was writing it")


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(data: bytes) -> str:
    """The SHA-256 of a file with this content."""
    return hashlib.sha256(data).hexdigest()


def sync(path: Path) -> None:
    """Make writes to a file, or renames in a folder, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open(path: Path, flags: int) -> int:
    """Open without following links and without waiting for the other end of a pipe."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, _FILE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path}: is a link, and links are not followed (delete it)") from error
        raise
