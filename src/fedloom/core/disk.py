"""Files of run folders: private to their owner, written whole or not at all, and never through a link.

A run folder may come from another person, or lie where others can write. What is opened for writing here is opened
without following links, so that a name in the folder can never stand for a file elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedloom.core.errors import CheckpointError, StorageError

_FILE, _FOLDER = 0o600, 0o700  # of what is made here


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """A folder for its owner alone; the folders above it are made as usual, and one that is there stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=_FOLDER, exist_ok=exist_ok)


def state_home() -> Path:
    """The folder for what fedloom remembers for this user, apart from runs and from all that others hand over."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state", "fedloom").expanduser()


def as_name(words: str) -> str:
    """Words as the name of one file or folder: nothing in it leads elsewhere."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in words).strip(".-") or "run"


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file, made where it is not there; refused where it is anything but one plain file.

    What is written in place must have one name only: through a second one (a hard link), another file would change.
    """
    file = _open(path, flags | os.O_CREAT)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(file)
        what = "has another name (a hard link)" if stat.S_ISREG(found.st_mode) else "is not a plain file"
        raise CheckpointError(f"{path}: {what}, so it is not written to (put a copy in its place)")
    return file


def write_bytes(path: Path, data: bytes) -> None:
    """A file that is there whole or not at all, also after a power cut."""
    part = new_part(path)
    file = _open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(file, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(part, path)


@contextmanager
def result_at(path: Path) -> Iterator[None]:
    """Write a result where a user wants it, with the folders above it; where that fails, one error says so."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def new_part(path: Path) -> Path:
    """Where the next version of a file is written before it takes its name; what a crash left there is gone."""
    part = path.with_name(f"{path.name}.part")
    with suppress(FileNotFoundError):
        part.unlink()
    return part


def lock(path: Path, *, wait: bool = False) -> int:
    """Hold a lock file until its descriptor is closed; where another process does, wait, or BlockingIOError."""
    file = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(file)
        raise
    return file


def refuse_links(folder: Path) -> None:
    """Refuse a folder with anything in it but plain files and folders, by the name of the first; nothing is opened."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_symlink():
            raise CheckpointError(f"{entry.path}: is a link, and links are not followed (put the file itself there)")
        if entry.is_dir(follow_symlinks=False):
            refuse_links(Path(entry.path))
        elif not entry.is_file(follow_symlinks=False):
            raise CheckpointError(f"{entry.path}: is neither a file nor a folder (take it out of the folder)")


def still_there(file: int, path: Path) -> None:
    """Refuse to go on with an open file that no longer has its name: what is written to it would be lost."""
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
    """The SHA-256 that a file with this in it will have."""
    return hashlib.sha256(data).hexdigest()


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open(path: Path, flags: int) -> int:
    """Without links, and without waiting for the other end of a pipe."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, _FILE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path}: is a link, and links are not followed (delete it)") from error
        raise
