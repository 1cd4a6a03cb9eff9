"""The run folder: everything a run leaves behind, and nothing that is not plain TOML, JSON or safetensors.

config.toml  environment.json  partition.safetensors  partition.json     written once
metrics.jsonl   one line for each evaluation; the same bytes whenever the run is repeated or resumed
timings.jsonl   how long rounds took; never the same twice, hence apart
work.jsonl      who took part in each round and what each did, where evaluate.work asks for it
checkpoints/    model.safetensors  curves.png  summary.json
noise.key       of a private run, for its owner alone: who has it can subtract the noise
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import platform
import subprocess
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom import __version__, noise
from fedloom.data.arrays import Ints
from fedloom.engine.checkpoint import write_tensors
from fedloom.errors import CheckpointError, ConfigError, Fault
from fedloom.noise import Key

_STREAMS = ("metrics.jsonl", "timings.jsonl")


class Timing(NamedTuple):
    """How long the parts of a round took, in seconds."""

    round: int
    train: float
    evaluate: float
    record: float
    clients: int


class RunFolder:
    """A run's folder, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = open(path / ".lock", "w")  # noqa: SIM115  held for as long as the run lives
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise CheckpointError(f"{path}: another process is using this run folder") from error
        self._files: dict[str, BinaryIO] = {name: open(path / name, "ab") for name in _STREAMS}  # noqa: SIM115
        self._crc = 0  # of the metrics

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def close(self) -> None:
        held: list[IO[Any]] = [*self._files.values(), self._lock]
        for file in held:
            with suppress(OSError):  # what a full disk did not take was reported when it was written
                file.close()

    def metrics(self, record: dict[str, Any]) -> None:
        """Append one evaluation, and have it on its way to disk before going on."""
        self._crc = zlib.crc32(self._append("metrics.jsonl", record), self._crc)

    def work(self, round_: int, did: Iterable[tuple[int, int, int, bool]]) -> None:
        """Append what each client of a round did: number, steps, epochs while it waited, and whether it was late."""
        columns = zip(("clients", "steps", "extra", "late"), zip(*did, strict=True), strict=False)
        self._append("work.jsonl", {"round": round_, **{name: list(column) for name, column in columns}})

    def timing(self, timing: Timing) -> None:
        self._append("timings.jsonl", {k: round(v, 6) for k, v in timing._asdict().items()})

    def lengths(self) -> dict[str, int]:
        """How long the metrics are, and how they sum, once all of them are on disk."""
        file = self._files["metrics.jsonl"]
        os.fsync(file.fileno())
        return {"metrics.jsonl": file.tell(), "metrics.jsonl crc32": self._crc}

    def before_last(self) -> dict[str, int]:
        """The lengths as they were before the last line of the metrics was written."""
        metrics = (self.path / "metrics.jsonl").read_bytes()
        keep = metrics.rfind(b"\n", 0, -1) + 1
        return {"metrics.jsonl": keep, "metrics.jsonl crc32": zlib.crc32(metrics[:keep])}

    def rewind(self, lengths: dict[str, int], done: int) -> None:
        """Forget what was appended after the checkpoint of round ``done``; those rounds will be done again."""
        path = self.path / "metrics.jsonl"
        keep, metrics = lengths.get("metrics.jsonl", 0), path.read_bytes()
        if len(metrics) < keep:
            raise CheckpointError(f"{path}: has {len(metrics)} bytes, the checkpoint needs {keep}")
        self._crc = zlib.crc32(metrics[:keep])
        if self._crc != lengths.get("metrics.jsonl crc32", 0):
            raise CheckpointError(f"{path}: is damaged (its checksum is not the checkpoint's)")
        # A round is timed with its checkpoint, hence after it: the rounds, not the length, say what to keep.
        self._cut("metrics.jsonl", keep)
        for name in ("timings.jsonl", "work.jsonl"):
            self._cut(name, sum(len(line) for line, entry in self._entries(name) if entry["round"] <= done))

    def spent(self) -> float:
        """How many seconds the rounds so far took."""
        return sum(took["train"] + took["evaluate"] + took["record"] for _, took in self._entries("timings.jsonl"))

    def _entries(self, name: str) -> Iterator[tuple[bytes, dict[str, float]]]:
        if not (self.path / name).exists():
            return
        for line in (self.path / name).read_bytes().splitlines(keepends=True):
            try:
                yield line, json.loads(line)
            except ValueError:  # cut short by a crash; what these files tell is not worth a refusal
                return

    def _cut(self, name: str, size: int) -> None:
        if (self.path / name).exists():
            self._file(name).truncate(size)
            self._file(name).seek(0, os.SEEK_END)

    def _file(self, name: str) -> BinaryIO:
        if name not in self._files:
            self._files[name] = open(self.path / name, "ab")  # noqa: SIM115
        return self._files[name]

    def write(self, name: str, value: Any) -> None:
        """A JSON file, whole or not at all."""
        write_text(self.path / name, json.dumps(value, indent=1, sort_keys=False) + "\n")

    def _append(self, name: str, record: dict[str, Any]) -> bytes:
        line = json.dumps(record).encode() + b"\n"
        self._file(name).write(line)
        self._file(name).flush()
        return line


def create(path: Path, config: str) -> RunFolder:
    """A new run folder; one that already holds anything (but a start that was cut short) is refused."""
    if path.exists() and (not path.is_dir() or any(p.name != "config.toml.part" for p in path.iterdir())):
        fix = f"choose another, or continue it with: fedloom resume {path}" if (path / "config.toml").exists() else ""
        raise ConfigError([Fault("--out", f"{path} already exists and is not empty", fix or "choose another")])
    path.mkdir(parents=True, exist_ok=True)
    write_text(path / "config.toml", config)
    return RunFolder(path)


def unused(path: Path) -> Path:
    """A new folder ``path``, or ``path-2`` and so on; two processes never get the same."""
    for count in itertools.count(1):
        new = path if count == 1 else path.with_name(f"{path.name}-{count}")
        with suppress(FileExistsError):
            new.mkdir(parents=True)
            break
    return new


def write_text(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


_KEY = "noise.key"


def write_key(folder: Path, key: Key) -> None:
    """Keep the key of a run's noise, where only its owner can read it; one that is there stays."""
    if (folder / _KEY).exists():
        return
    part = folder / f"{_KEY}.part"
    part.unlink(missing_ok=True)  # of a start that was cut short
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(noise.as_text(key))
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, folder / _KEY)


def read_key(folder: Path) -> Key | None:
    """The key of a run's noise, if it has been written."""
    path = folder / _KEY
    try:
        return noise.from_text(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # without what stands there
        raise CheckpointError(f"{path}: is damaged ({type(error).__name__}): the noise of this run is lost") from None


def save_partition(folder: RunFolder, owner: Ints, held_out: NDArray[np.bool_], described: dict[str, Any]) -> None:
    """Who has which row, and its fingerprint."""
    part = folder.path / "partition.safetensors.part"
    write_tensors(part, {"owner": torch.from_numpy(owner), "held_out": torch.from_numpy(held_out.astype(np.uint8))})
    os.replace(part, folder.path / "partition.safetensors")
    folder.write("partition.json", described)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, in order; a last line that a crash cut short is left out."""
    lines = (path / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def environment(device: torch.device) -> dict[str, Any]:
    """With what a run was made: versions, machine, commit."""
    packages = {"fedloom": __version__, "torch": torch.__version__, "numpy": np.__version__}
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        "versions": {"python": platform.python_version(), **packages},
        "device": str(device),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        **gpu,
        "commit": _commit(),
    }


def _cpu() -> str:
    try:
        lines: Iterable[str] = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _commit() -> str:
    """The commit of fedloom's own sources, or nothing where they are not a checkout."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return ""
    return found[1] if Path(found[0]) / "src" / "fedloom" == here else ""
