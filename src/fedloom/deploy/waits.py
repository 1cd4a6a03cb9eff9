"""Programs that run until somebody stops them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedloom.core.signals import handling


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


def end_with_parent() -> None:
    """End this process when the one that started it is gone.

    Flower's apps outlive their SuperLink or SuperNode, and try for ever to reach it. Nothing is lost: what has ended is
    saved, and what has not is done again.
    """
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
