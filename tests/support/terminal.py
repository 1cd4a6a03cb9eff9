"""The command line as a user meets it: real processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

SMALL = ("partition.clients=6", "cohort.size=3", "model.kind=logistic")


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


def fedloom(*words: object, cwd: Path, env: Mapping[str, str] | None = None, **options: Any) -> Done:
    """``python -m fedloom words...``, from start to end."""
    command = [sys.executable, "-m", "fedloom", *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, env=environment(env), capture_output=True, text=True, timeout=120, check=False, **options
    )
    return Done(done.returncode, done.stdout, done.stderr)


def started(*words: object, cwd: Path, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """The same, but still running."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedloom", *map(str, words)],
        cwd=cwd,
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


_SERVER = """
import json, os, signal, sys, time
import fedloom.runs.start, fedloom.runs.resume, fedloom.cli.main, fedloom.runs.catalogue, fedloom.report.curves

def crash_at(number, place):
    # Die like a power cut just before the process touches a file below `place` for the given time.
    touched = 0
    def hook(event, arguments):
        nonlocal touched
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod"):
            if any(place in str(a) for a in arguments[:2]):
                touched += 1
                if touched == number:
                    os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(job["cwd"])
        os.environ.update(job["env"])
        sys.argv = ["fedloom", *job["words"]]
        sys.path.insert(0, "")
        code = 1
        if job["crash_at"]:
            crash_at(job["crash_at"], job["place"])
        try:
            fedloom.cli.main.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Quick:
    """Many short commands: each is a process of its own, forked from one that has imported torch already."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self, *words: object, cwd: Path, env: Mapping[str, str] | None = None, crash_at: int = 0, place: str = ""
    ) -> Done:
        """One command; with ``crash_at``, killed just before it touches a file below ``place`` that many times."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            job = {"words": [str(w) for w in words], "cwd": str(cwd), "env": dict(env or {})}
            job |= {"crash_at": crash_at, "place": place}
            self._server.stdin.write(json.dumps(job | {"out": str(out), "err": str(err)}) + "\n")
            self._server.stdin.flush()
            code = int(self._server.stdout.readline())
            return Done(code, out.read_text(), err.read_text())

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)


def files(folder: Path) -> set[str]:
    """Everything below a folder."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}
