"""Programs that run until somebody stops them."""

from __future__ import annotations

import threading
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
