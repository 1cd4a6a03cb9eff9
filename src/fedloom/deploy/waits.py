"""Programs that run until somebody stops them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def until_stopped() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; a second one stops at once."""
    stop = threading.Event()

    def handle(_number: int, _frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)
