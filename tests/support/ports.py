"""Ports for servers that are told where to listen before they are started."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_claimed: list[int] = []  # descriptors of locks, held until this process ends


def free_ports(count: int) -> list[int]:
    """Ports on the loopback interface that nobody uses, and that neither the kernel nor another test will give away.

    The kernel takes the ports of connections from above; between tests, a locked file says whose a port is.
    """
    folder = Path(tempfile.gettempdir(), f"fedloom-test-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = list(range(10_000, lowest))
    random.Random(os.getpid()).shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            return found
        if _claim(folder / str(port)) and _is_free(port):
            found.append(port)
    raise AssertionError(f"there are no {count} free ports below {lowest}")


def _claim(path: Path) -> bool:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    _claimed.append(file)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
