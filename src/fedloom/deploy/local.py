"""A whole federation on one machine: a server and nodes as separate processes, with real keys and certificates."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedloom.deploy import flower
from fedloom.deploy.fleet import read_rounds
from fedloom.deploy.own_data import EXPERIMENT_DATA
from fedloom.deploy.serve import ENDED, start_run, status_of
from fedloom.deploy.site import SERVER, Listens, initialise, is_conducted, log_file, read_listens, read_state
from fedloom.deploy.waits import until_stopped
from fedloom.runs.loop import InterruptedRun
from fedloom.runs.settings import Config

_LOOK = 30.0  # seconds between two questions to Flower: a run that was killed has written nothing


def run_local(
    config: Config, count: int, out: Path, root: Path, say: Callable[[str], None], *, secure_sum: bool = False
) -> dict[str, Any]:
    """Set up a federation of ``count`` nodes in ``out``, run it to its end, and stop it; its last status."""
    names = [f"Node {number + 1}" for number in range(count)]
    listens = Listens(host="127.0.0.1", bind="127.0.0.1", port=flower.free_port())
    slugs = initialise(config, names, listens, out, root, secure_sum=secure_sum, shared_disk=True)
    say(f"{out}: a server and {count} nodes, each a process with its own key")
    with until_stopped() as stop:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes.append(_fedloom(out, "server", "server", str(out.absolute()), root=root))
            log = out / "server.log"
            flower.wait_for_port(read_listens(out / SERVER).port, processes[0], log)
            for slug in slugs:
                words = ("node", str((out / slug).absolute()), f"data={EXPERIMENT_DATA}")
                processes.append(_fedloom(out, slug, *words, root=root))
            start_run(out)
            return _watched(out, dict(zip(("server", *slugs), processes, strict=True)), stop, say)
        finally:
            flower.ended(processes, 60.0)


def _fedloom(out: Path, name: str, *words: str, root: Path) -> subprocess.Popen[bytes]:
    # Own code may run: it did so when the folders were made.
    command = [sys.executable, "-P", "-m", "fedloom", "deploy", *words, "--trust", "--data-root", str(root)]
    return flower.started(command, out, out / f"{name}.log")


def _watched(
    out: Path, processes: dict[str, subprocess.Popen[bytes]], stop: threading.Event, say: Callable[[str], None]
) -> dict[str, Any]:
    """The status of the run once it has ended; meanwhile its files say how far it is."""
    home, shown, last = out / SERVER, 0, time.monotonic()
    while not stop.wait(0.2):
        for name, process in processes.items():
            if process.poll() is not None:
                raise flower.FlowerError(f"{name} has ended: {flower.last_words(out / f'{name}.log')}")
        shown = _show_new(log_file(home, 1), shown, say)
        state = read_state(home).get("state")
        unclear = time.monotonic() - last > _LOOK and not (state == "running" and is_conducted(home))
        if state in ENDED or unclear:
            found, last = status_of(out), time.monotonic()
            if found["state"] in ENDED:
                _show_new(log_file(home, 1), shown, say)
                return found
    raise InterruptedRun(out, len({line["round"] for line in read_rounds(home) if line["kind"] == "train"}))


def _show_new(log: Path, shown: int, say: Callable[[str], None]) -> int:
    """Print the lines of a log after the first ``shown``, without their times; how many there are now."""
    lines = log.read_text(encoding="utf-8").split("\n")[:-1] if log.is_file() else []
    for line in lines[shown:]:
        say(line.partition(" ")[2])
    return len(lines)
