"""environment.json: the versions, machine, code and choices of a run."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom import __version__
from fedloom.core import disk, tree, usercode
from fedloom.engine.rounds import begin
from fedloom.engine.state import Experiment
from fedloom.engine.uploads import example_upload
from fedloom.runs.prepare import Prepared
from fedloom.runs.settings import Config, code_names, config_hash

_DECIDE = ("core", "maths", "algorithm", "algorithms", "models", "data", "trust", "engine", "runs")


def environment(device: torch.device) -> dict[str, Any]:
    """The versions, machine and commit of a run."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        "versions": versions(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        **gpu,
        "commit": _commit(),
        "code": code_hash(),
    }


def versions() -> dict[str, str]:
    """The versions of Python and of packages that affect numbers."""
    packages = {"fedloom": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return {"python": platform.python_version(), **packages}


def _cpu() -> str:
    try:
        lines: Iterable[str] = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _commit() -> str:
    """The commit of fedloom's sources, or nothing if they are not a checkout."""
    here = Path(__file__).parents[1]
    command = ["git", "-C", str(here), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return ""
    return found[1] if Path(found[0]) / "src" / "fedloom" == here else ""


@cache
def code_hash() -> str:
    """One hash of the sources that affect numbers: it also covers uncommitted changes and installed packages."""
    root, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for group in _DECIDE for path in (root / group).rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def choices(prepared: Prepared) -> dict[str, Any]:
    exp = prepared.experiment
    return {
        "executor": exp.executor,
        "executor_reason": prepared.reason,
        "lanes": exp.lanes,
        "steps": exp.task.capture,
        "precision": "fp32" if (exp.device.type, exp.task.precision) == ("cpu", "tf32") else exp.task.precision,
        "ranks": exp.ranks.size,
        "message_bytes": _message(exp),
        "parameters": exp.task.size,
        "parameters_whole": exp.task.whole,
        "net_sha256": prepared.net_sha256,
        "config_hash": config_hash(prepared.config),
        "files": files_of(prepared.config),
    }


def files_of(config: Config) -> dict[str, str]:
    """The user's own code and weights that an experiment uses, each file with its hash."""
    weights = [config.model.weights] if config.model.weights else []
    return code_of(config) | {path: disk.digest(Path(path)) for path in weights}


def code_of(config: Config) -> dict[str, str]:
    """The files of the user's own code that an experiment uses, each with its hash."""
    return usercode.files(code_names(config))


def keep_code(folder: Path, config: Config) -> None:
    """Copy the user's own code into a separate folder, so that it is kept with the result."""
    for name, sha in code_of(config).items():
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        target = folder / (name if inside else f"{sha[:8]}-{Path(name).name}")
        disk.make_folder(target.parent)
        disk.write_bytes(target, Path(name).read_bytes())


def _message(exp: Experiment) -> dict[str, dict[str, int]]:
    """What a client is sent and sends in the first round, in bytes of each type; see the metrics for the whole."""
    if not exp.algorithm.traits.communicates:
        return {}
    state = begin(exp)
    if exp.is_network:
        state = state._replace(server=tree.take(state.server, 0), buffers=state.buffers[0])
    with torch.no_grad():
        # In a network only neighbours send messages, and each message is counted at its sender.
        parts = {"down": () if exp.is_network else exp.algorithm.send(state.server), "up": example_upload(exp, state)}
    return {way: _by_type(part) for way, part in parts.items()}


def _by_type(message: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for leaf in tree.leaves(message):
        name = str(leaf.dtype).removeprefix("torch.")
        found[name] = found.get(name, 0) + leaf.numel() * leaf.element_size()
    return {name: size for name, size in found.items() if size}


# -- reading it again ----------------------------------------------------------------------------
def read_environment(path: Path) -> dict[str, Any]:
    """What a run folder records of the machine and of the choices made; empty if it cannot be read."""
    try:
        found = json.loads((path / "environment.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _recorded(path: Path, key: str) -> dict[str, str]:
    """A table of strings from environment.json; empty if it is missing or malformed."""
    found = read_environment(path).get(key, {})
    fits = isinstance(found, dict) and all(isinstance(value, str) for value in found.values())
    return found if fits else {}


def changed_files(path: Path) -> list[str]:
    """The user's own files (code, weights) that have changed since the run folder was made."""
    return list(usercode.changes(_recorded(path, "files")))


def other_versions(path: Path) -> list[str]:
    """The packages that affect numbers and whose version has changed since the run began, in words."""
    then, now = _recorded(path, "versions"), versions()
    code, mine = read_environment(path).get("code", ""), code_hash()
    differ = [name for name in ("fedloom", "torch", "numpy") if then.get(name, now[name]) != now[name]]
    words = [f"{name} was {then[name]} when the run began and is {now[name]} now" for name in differ]
    other = f"the code of fedloom was {code} when the run began and is {mine} now"
    return [*words, other] if code and code != mine else words
