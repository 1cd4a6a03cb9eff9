"""A run folder as it is shown: read without a lock and without running any code, also while the run is running."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedloom.core import disk
from fedloom.core.errors import CheckpointError, ConfigError, Fault
from fedloom.core.metrics import Verdicts
from fedloom.core.schema import dotted
from fedloom.data.arrays import Ints
from fedloom.report.tables import client_table
from fedloom.report.view import RunStatus, RunView
from fedloom.runs.folder import refuse_cut_metrics
from fedloom.runs.settings import read_toml

_ENDED: dict[str, RunStatus] = {"summary.json": "done", "diverged.json": "diverged"}
_LOCKS = (".lock", ".run.lock", ".node.lock")  # of runs and comparisons, of a server and of a node of a deployment
_GROWING = ("metrics.jsonl", "timings.jsonl")
_KINDS: dict[str, dict[str, type]] = {  # what is shown of these files, and of which type it is
    "partition.json": {"labels": list, "notes": list, "clients": int},
    "topology.json": {"first_round": list},
}
_NEEDED = (".toml", ".json", ".jsonl", ".safetensors")  # of the files of a run that cannot be made again
_MOST = (1 << 24, 1 << 16)  # clients and classes that a page can be asked to count
_SHOWN = ("metrics.jsonl", "partition.json", "privacy.json", "clients.csv", "confusion.json")


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / "config.toml").is_file()


def refuse_file_of_run(path: Path) -> None:
    """Refuse to write a result over a file that a run needs: it could not be resumed or used any more."""
    place = path.resolve()
    needed = place.suffix in _NEEDED or place.name in ("clients.csv", "curves.csv")
    if needed and place.is_file() and any(is_run(folder) for folder in list(place.parents)[:2]):
        raise ConfigError([Fault("--out", f"{path} is a file of a run, which would be lost", "choose another")])


def look_at_run(folder: Path, name: str = "", method: str = "", place: tuple[str, ...] = ()) -> RunView:
    """The current contents of a run folder."""
    if not is_run(folder):
        raise ConfigError([Fault(str(folder), "is not a run folder (it has no config.toml)", "see fedloom show runs/")])
    state: RunStatus = next((state for file, state in _ENDED.items() if (folder / file).is_file()), "unfinished")
    records = json_lines(folder / "metrics.jsonl")
    refuse_cut_metrics(folder)
    partition, counts = _facts(folder / "partition.json"), _counts(folder / "partition.safetensors")
    return RunView(
        name=name or folder.name,
        folder=str(folder),
        state=state,
        settings=dotted(read_toml(folder / "config.toml")),
        records=records,
        timings=json_lines(folder / "timings.jsonl"),
        environment=json_file(folder / "environment.json"),
        partition=partition,
        counts=counts,
        clients=csv_lines(folder / "clients.csv", ("client", "rows")) or _unmeasured(counts, partition),
        topology=_facts(folder / "topology.json"),
        privacy=json_file(folder / "privacy.json"),
        confusion=json_file(folder / "confusion.json"),
        written=max(filter(None, (_written(folder / file) for file in _GROWING)), default=None),
        method=method,
        place=place,
        changed=_changed(folder),
        stopped=_how_to_continue(folder) if state == "unfinished" else "",
    )


def is_held(folder: Path) -> bool:
    """Whether a process uses a folder; unknown counts as yes, so that nobody starts what may be running."""
    try:
        return any(disk.is_locked(folder / name) for name in _LOCKS)
    except (OSError, CheckpointError):
        return True


def _how_to_continue(folder: Path) -> str:
    """The command that continues a run, if no process runs it; of a comparison or a search it is their own."""
    home = folder.absolute()
    owner = next(
        (p for p in list(home.parents)[:2] if any((p / f).is_file() for f in ("compare.toml", "tune.toml"))), None
    )
    if any(map(is_held, (home, *list(home.parents)[:2]))):
        return ""
    return "repeat the command" if owner is not None else f"fedloom resume {shlex.quote(str(folder))}"


def _changed(folder: Path) -> tuple[str, ...]:
    """The files with shown numbers that have changed since the run wrote them; known only after the run has ended."""
    try:
        known = json_file(folder / "manifest.json").get("sha256", {})
    except CheckpointError:
        return ("manifest.json",)
    if not isinstance(known, Mapping):
        return ("manifest.json",)
    return tuple(name for name in _SHOWN if name in known and _digest(folder / name) != known[name])


def _digest(path: Path) -> str:
    try:
        return disk.digest(path)
    except OSError:
        return ""


def json_file(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none yet."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: was not written by fedloom (it is not a JSON object)")
    return found


def _facts(path: Path) -> dict[str, Any]:
    """The same for a file of which parts are shown: each of them has its type."""
    found = json_file(path)
    wrong = [key for key, kind in _KINDS[path.name].items() if key in found and not isinstance(found[key], kind)]
    if wrong:
        raise CheckpointError(f"{path}: was not written by fedloom (see '{wrong[0]}')")
    return found


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a growing file: a round and numbers in each; an incomplete last line is skipped."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return [_line(path, number, line) for number, line in enumerate(lines, 1)]


def _line(path: Path, number: int, text: bytes) -> dict[str, Any]:
    found: Any = None
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
    if not (isinstance(found, dict) and isinstance(found.get("round"), int) and all(map(_is_value, found.values()))):
        raise CheckpointError(f"{path}: line {number} is not a record of a round")
    return found


def _is_value(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, list) and all(isinstance(x, int) for x in value))


def csv_lines(path: Path, needed: tuple[str, ...]) -> list[dict[str, str]]:
    """The lines of a CSV file by the names of its columns, among which must be those ``needed``."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file, restval="", restkey=None))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, csv.Error) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if any(name not in line for line in lines[:1] for name in needed):
        raise CheckpointError(f"{path}: was not written by fedloom (it has no column '{needed[0]}')")
    return [{str(k): str(v) for k, v in line.items() if k is not None} for line in lines]


def _counts(path: Path) -> Ints | None:
    """How many rows of each class a client has; runs of earlier versions did not say."""
    if not path.is_file():
        return None
    try:
        found = load_file(path).get("counts")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    least = (0, -1, 0)  # a server of a deployment does not know the classes of its nodes
    if found is not None and (
        found.ndim != 2
        or found.shape[1] != 3
        or found.dtype.kind != "i"
        or (found < least).any()
        or (found[:, :2] >= _MOST).any()
    ):
        raise CheckpointError(f"{path}: was not written by fedloom (see 'counts')")
    return found


def _unmeasured(counts: Ints | None, partition: Mapping[str, Any]) -> list[dict[str, str]]:
    """The clients of a run that has not ended; only their partition is known."""
    labels = partition.get("labels")
    if counts is None or not len(counts) or not isinstance(labels, list) or len(labels) <= counts[:, 1].max():
        return []
    if counts[:, 1].min() < 0:
        return []
    names = [str(k) for k in range(int(counts[:, 0].max()) + 1)]
    lines = client_table(counts, names, [str(label) for label in labels], Verdicts.cat([]))
    return [{name: str(value) for name, value in line.items()} for line in lines]


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
