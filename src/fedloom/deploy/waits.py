"""Programs that run until they are stopped, or the disk is full."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedloom.core import disk
from fedloom.core.errors import CheckpointError, StorageError
from fedloom.core.signals import handling

_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextmanager
def until_stopped() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; a second one stops at once."""
    stop = threading.Event()

    def handle(_number: int, _frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with handling(handle):
        yield stop


@contextmanager
def writing(folder: Path, again: str) -> Iterator[None]:
    """End a program with one error if the disk is full or read-only; ``again``: the command that continues it."""
    try:
        yield
    except (OSError, StorageError) as error:
        cause = error.__cause__ if isinstance(error, StorageError) else error
        if not isinstance(cause, OSError) or not (cause.errno in _NO_ROOM or _is_refused(cause, folder)):
            raise
        what = f"writing below {folder} failed: {cause.strerror}; what was saved before is intact"
        fix = "make room" if cause.errno in _NO_ROOM else "let this user write there"
        raise StorageError(f"{what}: {fix}, then {again}") from cause


def _is_refused(error: OSError, folder: Path) -> bool:
    """Whether a file below this folder may not be written."""
    return error.errno in _REFUSED and folder.absolute() in Path(str(error.filename)).absolute().parents


def held_lock(path: Path, busy: str, again: str) -> int:
    """Hold a lock file until its descriptor is closed; one error if another process holds it, or it cannot be made."""
    with writing(path.parent, again):
        try:
            return disk.lock(path)
        except BlockingIOError as error:
            raise CheckpointError(f"{path.parent}: {busy}") from error


def end_with_parent() -> None:
    """End this process when the one that started it is gone.

    Flower's apps outlive their SuperLink or SuperNode, and try to reach it forever. Nothing is lost: finished work is
    saved, and the rest is repeated.
    """
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)
