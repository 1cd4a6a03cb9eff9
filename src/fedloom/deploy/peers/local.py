"""A whole network on one machine: every node is a separate process, with its own key."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedloom.core import disk
from fedloom.deploy import flower
from fedloom.deploy.fleet import LostNodesError
from fedloom.deploy.own_data import EXPERIMENT_DATA
from fedloom.deploy.peers.bundles import initialise_peers
from fedloom.deploy.peers.records import read_node_rounds
from fedloom.deploy.peers.status import status_of_peer
from fedloom.deploy.waits import until_stopped
from fedloom.runs.launch import PARENT
from fedloom.runs.loop import InterruptedRun
from fedloom.runs.settings import Config


def run_peers(config: Config, count: int, out: Path, root: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Set up a network of ``count`` nodes in ``out``, run it to its end, and stop it; the last status of each node."""
    names = [f"Node {number + 1}" for number in range(count)]
    hosts = [f"127.0.0.1:{port}" for port in _free_ports(count)]
    slugs = initialise_peers(config, names, hosts, out, root, shared_disk=True)
    say(f"{out}: {count} nodes, each a process with its own key")
    with until_stopped() as stop:
        processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for slug in slugs:
                processes[slug] = _started(out, slug, root)
            _watched(out, processes, stop, say)
        finally:
            flower.ended(list(processes.values()), 60.0)
    return [status_of_peer(out / slug) for slug in slugs]


def _free_ports(count: int) -> list[int]:
    found: set[int] = set()
    while len(found) < count:
        found.add(flower.free_port())
    return sorted(found)


def _started(out: Path, slug: str, root: Path) -> subprocess.Popen[bytes]:
    """A node, which ends with this process; Ctrl-C on the terminal reaches this process alone, which passes it on."""
    words = [
        "peers",
        "start",
        str((out / slug).absolute()),
        f"data={EXPERIMENT_DATA}",
        "--trust",  # own code may run: it did so when the folders were made
        "--data-root",
        str(root.absolute()),
    ]
    file = disk.open_own(out / f"{slug}.log", os.O_WRONLY | os.O_APPEND)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "fedloom", *words],
            env={"OMP_NUM_THREADS": "1", **os.environ, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    finally:
        os.close(file)


def _watched(
    out: Path, processes: dict[str, subprocess.Popen[bytes]], stop: threading.Event, say: Callable[[str], None]
) -> None:
    """Until all nodes have ended; a round is reported once the last of them has done it."""
    reported = 0
    while any(process.poll() is None for process in processes.values()):
        stopped = stop.wait(0.1)
        for slug, process in processes.items():
            if process.poll() not in (None, 0):
                raise LostNodesError(
                    f"{slug} has ended with code {process.poll()}: {flower.last_words(out / f'{slug}.log')}"
                )
        lines = [list(read_node_rounds(out / slug)) for slug in processes]
        done = min(max((line["round"] for line in of), default=0) for of in lines)
        for round_ in range(reported + 1, done + 1):
            say(f"round {round_}: done by all nodes")
        reported = max(reported, done)
        if stopped:
            raise InterruptedRun(out, reported)
