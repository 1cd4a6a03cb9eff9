"""Flower's programs: how they are started, where they write, and what their command line says.

Every program has the folder of its side as FLWR_HOME, sends nothing to anybody else, and installs nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.core import disk
from fedloom.core.errors import ConfigError, Fault, FedloomError

CONNECTION = "fedloom"  # the name of the SuperLink in Flower's configuration
_TAIL = 1 << 16  # bytes at the end of a log that are looked at
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PATIENCE = 600.0  # seconds until a program must be there; a busy machine is no fault
_POLL = "0.2"  # seconds until Flower begins with a message that has arrived; Flower's own default is 1


class FlowerError(FedloomError):
    """One of Flower's programs has failed."""

    exit_code = 5


def refuse_missing() -> None:
    """Raise an error if the optional packages of a deployment are not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        what = "Flower is not installed"
        raise ConfigError([Fault("fedloom deploy", what, "pip install 'fedloom[deploy]'")]) from None


def world(home: Path) -> dict[str, str]:
    """The environment of Flower's programs."""
    here = str(Path(sys.executable).parent)
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1,localhost"]))
    own = {
        "NO_PROXY": direct,  # on one machine they talk to each other without the proxy of the organisation
        "no_proxy": direct,
        "FLWR_HOME": str(home.absolute() / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": _POLL,
        "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **own}


def started(words: list[str], home: Path, log: Path) -> subprocess.Popen[bytes]:
    """One of the programs, which ends when this process does; what it says goes to ``log``."""
    disk.make_folder(home / "flwr")
    file = disk.open_own(log, os.O_WRONLY | os.O_APPEND)
    try:
        return subprocess.Popen(
            [_program(words[0]), *words[1:]],
            env=world(home),
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            preexec_fn=_die_with_parent,  # noqa: PLW1509  (this process has one thread then)
            start_new_session=True,  # a group of its own, with all that it starts
        )
    finally:
        os.close(file)


def _program(name: str) -> str:
    return name if os.sep in name else str(Path(sys.executable).parent / name)


def _die_with_parent() -> None:
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def ended(processes: list[subprocess.Popen[bytes]], seconds: float = 15.0) -> None:
    """End programs that were started here and all that they have started, with force where they do not end themselves.

    Flower's apps can hang when what started them has ended.
    """
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    """A port on the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path, host: str = "127.0.0.1") -> None:
    """Until a program listens; an error with its last words where it has ended instead."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        if process.poll() is not None:
            raise FlowerError(f"{Path(str(process.args[0])).name} has ended: {last_words(log)}")  # type: ignore[index]
        try:
            with socket.create_connection((host, port), timeout=1.0):
                return
        except OSError:
            time.sleep(0.1)
    raise FlowerError(f"nothing listens on port {port} after {_PATIENCE:g} s; see {log}")


def last_words(log: Path, lines: int = 5, since: int = 0) -> str:
    """The end of a log, of what was written after its first ``since`` bytes."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - _TAIL))
            text = _COLOURS.sub("", file.read().decode(errors="replace"))
    except OSError:
        return "it has no log"
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(said[-lines:])


# -- the command line of Flower -------------------------------------------------------------------
def write_connection(home: Path, port: int) -> None:
    """Tell Flower's command line where the SuperLink is."""
    table = {
        "superlink": {
            "default": CONNECTION,
            CONNECTION: {"address": f"127.0.0.1:{port}", "root-certificates": str(home.absolute() / "ca.crt")},
        }
    }
    disk.make_folder(home / "flwr")
    disk.write_bytes(home / "flwr" / "config.toml", tomli_w.dumps(table).encode())


def call(home: Path, *words: str) -> dict[str, Any]:
    """What Flower's command line answers; an error where it refuses."""
    (found,) = calls(home, words)
    return unrefused(home, found)


def calls(home: Path, *commands: tuple[str, ...]) -> list[dict[str, Any]]:
    """What Flower's command line answers to each of these, as JSON; its exit code does not tell how it went."""
    if not (home / "flwr" / "config.toml").is_file():
        raise FlowerError(f"the server has never run; start it with: fedloom deploy server {home.parent}")
    asked = json.dumps([[*words, CONNECTION, "--format", "json"] for words in commands])
    said = _said(home, [sys.executable, "-P", "-m", "fedloom.deploy.flower_commands"], asked)
    answers = said.stdout.split("\0")[:-1]
    try:
        if len(answers) < len(commands):
            raise ValueError("an answer is missing")
        return [json.loads(answer) for answer in answers]
    except ValueError as error:
        details = " / ".join(line.strip() for line in (said.stdout + said.stderr).splitlines()[-3:])
        raise FlowerError(
            f"the server does not answer ({details[:500]}); is it running? fedloom deploy server {home.parent}"
        ) from error


def unrefused(home: Path, answer: dict[str, Any]) -> dict[str, Any]:
    """An answer that is no refusal."""
    if answer.get("success"):
        return answer
    why = str(answer.get("error-message", answer))
    if "SuperLink is unavailable" in why:
        raise FlowerError(f"the server does not run; start it with: fedloom deploy server {home.parent}")
    said = [line.strip() for line in why.splitlines() if line.strip() and not line.startswith("Using SuperLink")]
    raise FlowerError(f"Flower refuses: {' / '.join(said)[:500]}")


def log_of(home: Path, run_id: str) -> str:
    """The log of a run."""
    said = _said(home, [_program("flwr"), "log", run_id, CONNECTION, "--show"])
    if said.returncode:
        raise FlowerError(f"the server does not answer ({said.stderr.strip()[-300:]})")
    return said.stdout


def _said(home: Path, command: list[str], asked: str = "") -> subprocess.CompletedProcess[str]:
    how: dict[str, Any] = {"env": world(home), "cwd": home, "timeout": _PATIENCE}
    return subprocess.run(command, input=asked, capture_output=True, text=True, check=False, **how)


# -- the app --------------------------------------------------------------------------------------
_APP = {
    "project": {
        "name": "federation",
        "version": "1.0.0",
        "description": "a federation of fedloom",  # Flower warns without one
        "license": "Apache-2.0",
        "dependencies": [],
    },
    "tool": {
        "flwr": {
            "app": {
                "publisher": "fedloom",
                "components": {
                    "serverapp": "fedloom.deploy.server_app:app",
                    "clientapp": "fedloom.deploy.client_app:app",
                },
                "config": {"home": "", "run": 0},
            }
        }
    },
}


def run_app(home: Path, run: int) -> str:
    """Ask the SuperLink to start a run; Flower's number of it.

    The app is a file that names two modules of the installed package: no code travels to nodes.
    """
    with tempfile.TemporaryDirectory(prefix="fedloom-app-") as folder:
        disk.write_bytes(Path(folder) / "pyproject.toml", tomli_w.dumps(_APP).encode())
        config = f"home={json.dumps(str(home.absolute()))} run={run}"
        return str(call(home, "run", folder, "-c", config)["run-id"])
