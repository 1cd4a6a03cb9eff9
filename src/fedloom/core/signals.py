"""Handlers of Ctrl-C and SIGTERM within a block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handling(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call ``handle``; afterwards they do what they did before."""
    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of the block, for code that must not be left halfway, such as an import."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is interrupted
        yield
        return
    seen: list[int] = []
    with handling(lambda number, _frame: seen.append(number)):
        yield
    if seen:
        signal.raise_signal(seen[0])
