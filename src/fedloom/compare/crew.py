"""Worker processes that run the cells of a comparison side by side."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeAlias

from fedloom.compare.cells import Cell, step_settings
from fedloom.compare.plan import ComparisonPlan
from fedloom.runs.settings import as_table


class Standing(NamedTuple):
    """How far a comparison is."""

    done: int
    cells: int
    reused: int
    running: tuple[tuple[str, int, int], ...]  # name, round and rounds of each running cell
    seconds_left: float | None
    ended: str = ""  # the cell that has just ended, and how
    cells_an_hour: float | None = None


class Watcher(Protocol):
    """Follows a comparison, which never prints anything itself."""

    def started(self, plan: ComparisonPlan, folder: Path, jobs: int, standing: Standing) -> None: ...

    def moved(self, standing: Standing) -> None: ...

    def stopping(self) -> None: ...


class Unwatched:
    """A watcher that shows nothing."""

    def started(self, plan: ComparisonPlan, folder: Path, jobs: int, standing: Standing) -> None: ...

    def moved(self, standing: Standing) -> None: ...

    def stopping(self) -> None: ...


class InterruptedComparison(KeyboardInterrupt):
    """A comparison that was stopped on request; its cells were saved."""

    def __init__(self, folder: Path, done: int, cells: int) -> None:
        super().__init__(f"stopped with {done} of {cells} cells done")
        self.folder, self.done, self.cells = folder, done, cells


def job_of(cell: Cell, folder: Path, root: Path) -> dict[str, Any]:
    """What a worker is told of a cell; its answers name the cell by its hash."""
    where = {"folder": str(folder), "root": str(root)}
    return {"cell": cell.hash, "config": as_table(cell.config), "alike": cell.config.alike, **where}


class Worker:
    """A process that runs one cell after another, or some at once; it ends with this one, even if that is killed."""

    def __init__(self, events: Events, threads: int, beside: Mapping[str, str]) -> None:
        threads_of = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  read if the process dies
        # -P: no module of the working folder hides an installed one. Its own session: Ctrl-C on the terminal reaches
        # the parent alone, which asks each worker once.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fedloom.compare.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **beside, **threads_of},
            start_new_session=True,
        )
        self.cells: dict[str, Cell] = {}  # by hash, those that have not ended
        self.rounds: dict[str, int] = {}
        self._thread = threading.Thread(target=self._listen, args=(events,), daemon=True)
        self._thread.start()

    def _listen(self, events: Events) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            events.put((self, json.loads(line)))
        events.put((self, None))

    def give(self, cells: Sequence[Cell], below: Path, root: Path) -> None:
        """Have these cells run together, each in its folder."""
        self.cells, self.rounds = {cell.hash: cell for cell in cells}, {cell.hash: 0 for cell in cells}
        jobs = [job_of(cell, below / cell.hash, root) for cell in cells]
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a dead worker is reported by its listener
            self._process.stdin.write(json.dumps(jobs).encode() + b"\n")
            self._process.stdin.flush()

    def exit_reason(self) -> str:
        """Why the process of a worker ended, with the last line of its log."""
        code = self._process.wait()
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        ended = (
            f"ended with code {code}" if code != -9 else "was killed, perhaps because memory ran out: try fewer --jobs"
        )
        return ": ".join([f"its process {ended}", *last])

    def ask_to_stop(self) -> None:
        self._process.terminate()

    def wait(self) -> None:
        self._process.wait()

    def close(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()


Events: TypeAlias = "queue.SimpleQueue[tuple[Worker, dict[str, Any] | None]]"


class Crew:
    """Workers that run a list of cells side by side."""

    def __init__(
        self,
        folder: Path,
        cells: Path,
        root: Path,
        missing: Sequence[Cell],
        *,
        done: int,
        watcher: Watcher,
        together: int = 1,
        more: Callable[[Cell, str], Sequence[Cell]] | None = None,
    ) -> None:
        """``together``: cells that one worker runs at once; ``more``: further cells to run after one has ended."""
        self._more, self._together = more, together
        self._folder, self._cells, self._root, self._watcher = folder, cells, root, watcher
        self._environment: Mapping[str, str] = {}
        self._waiting = deque(missing)
        self._reused, self._done, self._all = done, done, done + len(missing)
        self._rounds_left = sum(c.config.basics.rounds for c in missing)
        self._rounds_done, self._began = 0, time.perf_counter()
        self._events: Events = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._failures: dict[str, str] = {}

    def standing(self, ended: str = "") -> Standing:
        busy = [
            (cell.name, worker.rounds[hash_], cell.config.basics.rounds)
            for worker in self._workers
            for hash_, cell in worker.cells.items()
        ]
        spent = time.perf_counter() - self._began
        left = self._rounds_left * spent / self._rounds_done if self._rounds_done else None
        fresh = self._done - self._reused
        pace = 3600 * fresh / spent if fresh else None
        return Standing(self._done, self._all, self._reused, tuple(busy), left, ended, pace)

    def work(self, jobs: int, environment: Mapping[str, str]) -> dict[str, str]:
        """Run until no cell is left, in processes with these additional environment variables; the failures by cell."""
        self._environment = environment
        try:
            for _ in range(jobs):
                self._hire()
            while any(worker.cells for worker in self._workers):
                self._handle(*self._events.get())
        except KeyboardInterrupt as stop:
            self._stop()
            raise InterruptedComparison(self._folder, self._done, self._all) from stop
        finally:
            for worker in self._workers:
                worker.close()
        return self._failures

    def _hire(self) -> None:
        cells = self._next()
        if cells:
            worker = Worker(self._events, cells[0].config.engine.threads or 1, self._environment)
            self._workers.append(worker)
            worker.give(cells, self._cells, self._root)

    def _next(self) -> list[Cell]:
        """The next cell, and others with the same steps that run together with it."""
        if not self._waiting:
            return []
        first = self._waiting.popleft()
        if self._together == 1:
            return [first]
        same = step_settings(first.config)
        others = (cell for cell in self._waiting if step_settings(cell.config) == same)
        cells = [first, *islice(others, self._together - 1)]
        taken = {cell.hash for cell in cells}
        self._waiting = deque(cell for cell in self._waiting if cell.hash not in taken)
        return cells

    def _handle(self, worker: Worker, message: dict[str, Any] | None) -> None:
        """One message of a worker; None: it has died."""
        if not worker.cells:
            return
        if message is None:
            self._workers.remove(worker)
            reason = worker.exit_reason()
            for hash_ in list(worker.cells):
                self._ended(worker, hash_, "failed", reason)
            worker.close()
            self._hire()
        elif "round" in message:
            step = message["round"] - worker.rounds[message["cell"]]
            worker.rounds[message["cell"]] = message["round"]
            self._rounds_left -= step
            self._rounds_done += 0 if message.get("resumed") else step
            self._watcher.moved(self.standing())
        else:
            self._ended(worker, message["cell"], message["state"], message.get("message", ""))
            self._give_work()

    def _give_work(self) -> None:
        """Give waiting cells to idle workers."""
        for worker in (each for each in self._workers if not each.cells):
            if cells := self._next():
                worker.give(cells, self._cells, self._root)

    def _ended(self, worker: Worker, hash_: str, state: str, message: str) -> None:
        cell = worker.cells.pop(hash_)
        self._rounds_left -= cell.config.basics.rounds - worker.rounds[hash_]
        self._done += 1
        if state == "failed":
            self._failures[cell.name] = message
        if self._more is not None:
            self._waiting.extend(self._more(cell, state))
        why = "; ".join(" ".join(line.split()).removesuffix(":") for line in message.splitlines()[:2])
        self._watcher.moved(self.standing(f"{cell.name}: {state}" + (f" ({why})" if why else "")))

    def _stop(self) -> None:
        """Let every worker finish its round and save; after a second Ctrl-C, do not wait."""
        self._watcher.stopping()
        for worker in self._workers:
            worker.ask_to_stop()
        with suppress(KeyboardInterrupt):
            for worker in self._workers:
                worker.wait()
