"""python -m support.full_disk SIZE WORDS...: a command of fedloom on a disk of that size, which only it can see.

The disk is mounted over the folder ``disk``, where the command runs; what it leaves there is copied to ``left``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys

from fedloom.cli.main import main

_OWN_MOUNTS, _PRIVATE, _ALL = 0x20000, 1 << 18, 1 << 14  # CLONE_NEWNS, MS_PRIVATE, MS_REC


def mount(size: str) -> None:
    """Mount an empty disk; it is gone when the process ends, however it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.unshare(_OWN_MOUNTS),
        libc.mount(b"none", b"/", None, _ALL | _PRIVATE, None),
        libc.mount(b"tmpfs", b"disk", b"tmpfs", 0, f"size={size}".encode()),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    mount(sys.argv[1])
    os.chdir("disk")
    sys.argv = ["fedloom", *sys.argv[2:]]
    try:
        main()
    finally:
        shutil.copytree(".", "../left")
