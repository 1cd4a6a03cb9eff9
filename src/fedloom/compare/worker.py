"""A worker process of a comparison: it reads cells from stdin, runs them, and answers on stdout."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from fedloom.core import usercode
from fedloom.core.errors import DivergedError, FedloomError
from fedloom.core.signals import handling
from fedloom.engine.together import together
from fedloom.runs.folder import write_text
from fedloom.runs.loop import InterruptedRun, Progress, SilentListener
from fedloom.runs.resume import resume
from fedloom.runs.settings import parse
from fedloom.runs.start import start
from fedloom.runs.tracking import is_tracker_failure


class Reporter(SilentListener):
    """Reports rounds to the parent, a few times a second."""

    def __init__(self, answers: IO[str], cell: str) -> None:
        self._answers, self._cell, self._reported = answers, cell, 0.0
        self.asked_to_stop = False
        self.failures: list[str] = []  # of trackers of this cell

    def started(self, prepared: Any, folder: Path | None, done: int) -> None:  # noqa: ARG002
        self.failures.clear()
        self.send({"round": done, "resumed": True})

    def advanced(self, progress: Progress) -> None:
        self.failures += filter(is_tracker_failure, progress.notes)
        now = time.perf_counter()
        if now - self._reported > 0.2:
            self._reported = now
            self.send({"round": progress.round})

    def stopping(self) -> None:
        self.asked_to_stop = True

    def send(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps({"cell": self._cell, **message}) + "\n")
        self._answers.flush()


def work() -> None:
    """Run the cells that arrive as lines of stdin, and answer on stdout, until the parent is gone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a user's algorithm must not mix with the answers
    arriving: queue.SimpleQueue[list[dict[str, Any]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(arriving,), daemon=True).start()
    stopping = False
    while not stopping:  # a cell that was in its last round has ended: the parent waits for this process
        jobs = arriving.get()
        reporters = [Reporter(answers, job["cell"]) for job in jobs]
        runs = [partial(_run, job, reporter) for job, reporter in zip(jobs, reporters, strict=True)]
        stopping = runs[0]() if len(runs) == 1 else _run_together(runs)
    os._exit(130)


def _listen(arriving: queue.SimpleQueue[list[dict[str, Any]]]) -> None:
    for line in sys.stdin:
        arriving.put(json.loads(line))
    os._exit(1)  # every state on disk can be resumed, so do not wait


def _run_together(runs: Sequence[Callable[[], bool]]) -> bool:
    """Run cells in turns, with the same steps where they can be shared; whether they were asked to stop."""
    stop = threading.Event()

    def handle(*_: object) -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    with handling(handle):
        together(runs, stop)
    return stop.is_set()


def _run(job: dict[str, Any], reporter: Reporter) -> bool:
    """Run one cell and report how it ended, unless it was stopped; whether it was asked to stop."""
    outcome = _outcome(job, reporter)
    if outcome is not None:
        reporter.send(outcome)
    return outcome is None or reporter.asked_to_stop


def _outcome(job: dict[str, Any], reporter: Reporter) -> dict[str, Any] | None:
    """Run one cell, or resume it; how it ended, None if it was stopped."""
    folder, root = Path(job["folder"]), Path(job["root"])
    # The parent has loaded this code, and remembers what the user named; a cell's config.toml may name other code.
    usercode.vouch(job["config"], lasting=False)
    try:
        if (folder / "config.toml").is_file():
            resume(folder, data_root=root, alike=job["alike"], listener=reporter)
        else:
            start(parse(job["config"])._replace(alike=job["alike"]), out=folder, root=root, listener=reporter)
    except InterruptedRun:
        return None
    except DivergedError as error:
        write_text(folder / "diverged.json", json.dumps({"message": str(error)}) + "\n")
        return {"state": "diverged", "message": str(error)}
    except FedloomError as error:
        return {"state": "failed", "message": str(error)}
    except Exception as error:  # one broken cell must not stop the others
        return {"state": "failed", "message": f"{type(error).__name__}: {error}"}
    return {"state": "done", "message": "; ".join(reporter.failures)}


if __name__ == "__main__":
    work()
