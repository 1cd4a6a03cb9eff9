"""Cells side by side on one GPU, through NVIDIA's MPS.

Without MPS the processes on a GPU take turns, and several cells are no faster than one. A comparison has its
own daemon: it uses a private folder, serves only the comparison's workers, and ends with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_CONTROL = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"


def can_share() -> bool:
    """Whether several processes can compute on a GPU of this machine at the same time."""
    return sys.platform == "linux" and shutil.which(_CONTROL) is not None


@contextmanager
def shared(jobs: int) -> Iterator[Mapping[str, str]]:
    """The environment in which ``jobs`` workers share the GPU; empty if they cannot, or if there is only one."""
    if jobs < 2 or not can_share() or _PIPES in os.environ:  # the user's own daemon serves all processes
        yield {}
        return
    # With a short name: it contains sockets.
    with tempfile.TemporaryDirectory(prefix="fedloom-mps-", ignore_cleanup_errors=True) as folder:
        keeper = subprocess.Popen(
            [sys.executable, "-P", __file__],  # this file alone: the package would import torch first
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_places(folder)},
            start_new_session=True,  # Ctrl-C reaches only the comparison, which still needs the daemon
        )
        assert keeper.stdout is not None
        assert keeper.stdin is not None
        try:
            yield _places(folder) if keeper.stdout.readline() == b"ready\n" else {}
        finally:
            keeper.stdin.close()
            keeper.wait()
            keeper.stdout.close()


def _places(folder: str) -> dict[str, str]:
    return {_PIPES: folder, _LOGS: folder}


def serve_until_parent_ends() -> None:
    """Run the daemon until the comparison closes our stdin, or is gone."""
    started = subprocess.run([_CONTROL, "-d"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
    if started.returncode:
        return
    os.write(1, b"ready\n")
    sys.stdin.read()
    subprocess.run([_CONTROL], input=b"quit\n", stdout=subprocess.DEVNULL, check=False)
    shutil.rmtree(os.environ[_PIPES], ignore_errors=True)  # for a comparison that was killed


if __name__ == "__main__":
    serve_until_parent_ends()
