"""Start several ranks of one run on this machine, as torchrun would.

Each rank is a process. Ranks meet in a folder that no other user can open, and listen only on the loopback interface.
They run in a separate session, so that Ctrl-C reaches only the launcher, which forwards it once. They end when the
launcher dies.
"""

from __future__ import annotations

import ctypes
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import ConfigError, Fault, LostRankError
from fedloom.core.signals import handling

if TYPE_CHECKING:
    import torch

PARENT = "FEDLOOM_PARENT"  # the process that started this one
_PREFIX = "fedloom-ranks-"  # prefix of the rendezvous folders; the launcher's process number follows
_GRACE = 30.0  # seconds for the other ranks to end by themselves after one has failed
_LOOK = 0.05  # seconds between two checks of the ranks
_MOST = 16  # most ranks for each core: more would only wait


def count(wanted: str, device: torch.device, cohort: int | None = None, clients: int | None = None) -> int:
    """How many ranks ``--ranks`` means: a number, or with ``auto`` one for each core or GPU, up to one a client."""
    if wanted == "auto":
        import torch

        found = torch.cuda.device_count() if device.type == "cuda" else cores()
        return max(1, min(found, cohort or found))
    if not wanted.isdecimal() or int(wanted) < 1:
        raise ConfigError([Fault("--ranks", f"should be a number of processes or auto (got '{wanted}')")])
    if clients is not None and int(wanted) > clients:
        raise ConfigError([Fault("--ranks", f"there are only {clients} clients (got {wanted})")])
    if int(wanted) > _MOST * cores():
        raise ConfigError([Fault("--ranks", f"this machine has only {cores()} cores (got {wanted})", "use auto")])
    return int(wanted)


def cores() -> int:
    """The physical cores that this process may use: two threads of one core would wait for each other."""
    able = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    places = set()
    for cpu in able:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            places.add(siblings.read_text().strip())
        except OSError:
            places.add(str(cpu))
    return len(places)


def launch(words: list[str], ranks: int) -> tuple[int, str]:
    """Run ``fedloom words...`` as ``ranks`` processes; returns the exit code of rank 0 and what it could not report.

    If one of them fails, the others get a moment to report it, and are then stopped.
    """
    folder = meeting()
    processes = [_started(words, rank, ranks, folder) for rank in range(ranks)]
    try:
        with _passing_on(processes) as passed:
            failed = _watched(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
    code = processes[0].returncode
    if code < 0 and passed:  # before it could mistake it for a request to stop
        raise KeyboardInterrupt
    rank = failed or 0
    ended = f"rank {rank} of {ranks} {_end(processes[rank].returncode)}"
    if code < 0:
        raise LostRankError(f"{ended}; {_what_is_left(words)}")
    lost = rank > 0 and processes[rank].returncode < 0  # rank 0 only knows that it is gone
    return code, f"{ended}; {_what_is_left(words)}" if lost else ""


def _what_is_left(words: list[str]) -> str:
    """How to resume a run whose ranks were lost, if it can be."""
    given = words[1:]  # the first is the command
    named = [word.removeprefix("--out=") for word in given]
    runs = [word for word in named if (Path(word) / "config.toml").is_file()]
    if not runs and ("--out" in given or named != given):
        return "nothing had been saved"
    return f"continue from the last checkpoint with: fedloom resume {runs[0] if runs else 'RUN'}"


def meeting() -> Path:
    """The rendezvous folder of the ranks on this machine: only their user can open it, and it contains their secret."""
    from fedloom.engine.ranks import SECRET

    _remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))  # which is made with mode 0700
    (folder / SECRET).touch(mode=0o600)
    (folder / SECRET).write_bytes(secrets.token_bytes(32))
    return folder


def _remove_stale() -> None:
    """Remove the folders of launchers that were killed before they could do so themselves."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        launcher = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with suppress(OSError):
            ours = folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()
            if ours and launcher.isdecimal() and not _runs(int(launcher)):
                shutil.rmtree(folder, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def without_ranks(words: list[str]) -> list[str]:
    """The command-line arguments without the number of ranks."""
    found, skip = [], False
    for word in words:
        if skip or word == "--ranks" or word.startswith("--ranks="):
            skip = word == "--ranks" and not skip
            continue
        found.append(word)
    return found


def follow_parent(world: Mapping[str, str] = os.environ) -> None:
    """Stop a rank that was started here when its launcher dies, as by SIGTERM."""
    if PARENT in world and platform.system() == "Linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != int(world[PARENT]):  # it died before it was asked for
            os.kill(os.getpid(), signal.SIGTERM)


def rank_environment(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """The environment of a rank on this machine; one thread for each, unless it is set already."""
    from fedloom.engine.ranks import MEETING

    world = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        MEETING: folder,
        PARENT: os.getpid(),
    }
    # Never listen on a network, whatever this machine's name and the variables set for other programs.
    loopback = {"Linux": "lo", "Darwin": "lo0"}.get(platform.system())
    world |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback} if loopback else {}
    return {"OMP_NUM_THREADS": "1", **os.environ, **{key: str(value) for key, value in world.items()}}


def _started(words: list[str], rank: int, ranks: int, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "fedloom", *words],  # no module of the working folder hides an installed one
        env=rank_environment(rank, ranks, folder),
        stdin=subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        start_new_session=True,
    )


def _watched(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """The rank that failed first, once all have ended or run out of time."""
    failed, until = None, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        if failed is None:
            failed = _first_failed(processes)
            until = until if failed is None else time.monotonic() + _GRACE
        time.sleep(_LOOK)
    return _first_failed(processes) if failed is None else failed


def _first_failed(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """A rank that has failed: if several have, one that was killed, since the others fail when they lose it."""
    codes = {rank: code for rank, process in enumerate(processes) if (code := process.poll())}
    return min(codes, key=lambda rank: (codes[rank] > 0, rank), default=None)


@contextmanager
def _passing_on(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Forward signals from this process to every rank; the list has those that were forwarded."""
    passed: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        passed.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    with handling(handle):
        yield passed


def _end(code: int) -> str:
    return f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
