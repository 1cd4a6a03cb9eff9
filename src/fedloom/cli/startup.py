"""How a command starts fast, and leaves the CPU to other processes while it waits."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


def wait_passively() -> None:
    """Let idle threads of torch sleep, unless the user has chosen otherwise; call it before torch is imported.

    By default they spin. On a busy machine they then take the core that the thread they wait for needs: a run of
    seconds took more than a minute.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextmanager
def importing() -> Iterator[None]:
    """Import without collecting garbage: imported modules stay, and scanning them takes a third of a second."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
