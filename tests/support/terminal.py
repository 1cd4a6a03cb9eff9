"""The command line as a user meets it: real processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from support import warm

# A picture takes longer than most runs of tests, and few tests are about it.
SMALL = ("partition.clients=6", "cohort.size=3", "model.kind=logistic", "checkpoint.curves=false")


class Done(NamedTuple):
    """A process that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The last line of stdout."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """One thread for each process, and no data but what a test puts there."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("FEDLOOM") and k != "PYTHONUNBUFFERED"}
    fixed = {"OMP_NUM_THREADS": "1", "HOME": "/nonexistent", "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**plain, **fixed, **(extra or {})}


HANG = 600.0  # seconds after which a process will not end any more, however busy the machine is


def started(
    *words: object, cwd: Path, env: Mapping[str, str] | None = None, fresh: bool = False, **options: Any
) -> subprocess.Popen[str]:
    """``python -m fedloom words...``, still running; forked from a warm process unless it is to be a ``fresh`` one."""
    command = [sys.executable, "-m", "fedloom", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    kind: Any = warm.FRESH if fresh else warm.Popen
    process: subprocess.Popen[str] = kind(command, cwd=cwd, env=environment(env), **pipes, **options)
    return process


def fedloom(*words: object, cwd: Path, **options: Any) -> Done:
    """The same from start to end."""
    with started(*words, cwd=cwd, **options) as process:
        try:
            out, err = process.communicate(timeout=HANG)
        except BaseException:
            process.kill()
            raise
    return Done(process.returncode, out, err)


class Quick:
    """Many short commands: each is a process of its own, forked from one that has imported torch already."""

    def __call__(self, *words: object, cwd: Path, **options: Any) -> Done:
        """One command; with ``crash_at``, killed just before it touches a file below ``place`` that many times."""
        return fedloom(*words, cwd=cwd, **options)

    def close(self) -> None:
        """Nothing to do: the server lives as long as the tests."""


def files(folder: Path) -> set[str]:
    """Everything below a folder."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}
