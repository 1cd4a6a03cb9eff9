"""The run folder: all files of a run, each of them plain TOML, JSON, CSV or safetensors.

config.toml  environment.json  partition.safetensors  partition.json  columns.json     written once
metrics.jsonl   one line for each evaluation; the same bytes whenever the run is repeated or resumed
timings.jsonl   how long rounds took; a separate file, since it differs from run to run
work.jsonl      which clients took part in each round and what each did, if evaluate.work is set
checkpoints/    model.json  model.safetensors  personal.safetensors  clients.csv  curves.csv  curves.png
noise.key       of a private run, readable by its owner only: with it, the noise can be subtracted
manifest.json   the SHA-256 of these files, so that a changed one is noticed
summary.json    written last: the run has ended

A run that is killed at any moment can be resumed. The manifest therefore never lists a file that is about to change: it
is deleted before, and written again after.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.core import disk
from fedloom.core.errors import CheckpointError, ConfigError, Fault, StorageError
from fedloom.data.arrays import Ints
from fedloom.engine import checkpoint
from fedloom.engine.ranks import Ranks
from fedloom.trust import noise
from fedloom.trust.noise import Key

METRICS = "metrics.jsonl"
DAMAGED = "metrics.damaged.jsonl"  # the damaged file, kept after a repair
_MANIFEST, _SUMMARY, _LOCK, _CONFIG = "manifest.json", "summary.json", ".lock", "config.toml"
# Written before the first round. A run continues only if they are unchanged; config.toml may be edited.
_KEY = "noise.key"
_SETTINGS = (
    *("environment.json", "privacy.json", _KEY, "topology.json", "columns.json"),
    *("partition.safetensors", "partition.json"),
)
_GROWING = (METRICS, "timings.jsonl", "work.jsonl")  # written in place, line by line
# Written while a run lasts, or at its end.
_RESULTS = (
    *(*_GROWING, DAMAGED),
    *("model.json", "model.safetensors", "personal.safetensors", "steps.json", "curves.png", "topology.png"),
    *("clients.csv", "confusion.json", "curves.csv"),
)


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
        try:
            self._lock = disk.lock(path / _LOCK)  # for as long as the run lives
        except BlockingIOError as error:
            raise CheckpointError(f"{path}: another process is using this run folder") from error
        self._files: dict[str, BinaryIO] = {}
        self._sums = Checksums()  # of the metrics
        try:
            disk.refuse_links(path)
            for name in self._present(*_GROWING):
                self._there(name)
        except BaseException:
            self.close()
            raise

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # a full disk was reported when the write failed
                file.close()
        os.close(self._lock)

    def metrics(self, record: dict[str, Any]) -> None:
        """Append one evaluation, and flush it."""
        self._sums.add(self._append(METRICS, record))

    def work(self, round_: int, did: Iterable[tuple[int, int, int, bool]]) -> None:
        """Append what each client of a round did: number, steps, epochs while it waited, and whether it was late."""
        columns = zip(("clients", "steps", "extra", "late"), zip(*did, strict=True), strict=False)
        self._append("work.jsonl", {"round": round_, **{name: list(column) for name, column in columns}})

    def timing(self, timing: Timing) -> None:
        self._append("timings.jsonl", {k: round(v, 6) for k, v in timing._asdict().items()})

    def lengths(self) -> Lengths:
        """The length and checksums of the metrics, once all of them are on disk."""
        os.fsync(self._there(METRICS).fileno())
        return self._sums.lengths()

    def before_last(self) -> Lengths:
        """The lengths as they were before the last line of the metrics was written."""
        return Checksums(_lines(_bytes(self.path / METRICS))[:-1]).lengths()

    def fault(self, lengths: Lengths) -> str:
        """What is wrong with the metrics, compared with these lengths of a checkpoint; empty if nothing is."""
        return _fault(self.path / METRICS, lengths)

    def intact_lines(self, lengths: Lengths) -> list[bytes]:
        """The lines of damaged metrics that still have the checksums of the checkpoint."""
        sums, at, kept = str(lengths.get(f"{METRICS} lines", "")), 0, []
        expected = [sums[k : k + 8] for k in range(0, len(sums), 8)]
        for line in _lines(_bytes(self.path / METRICS)):
            with suppress(ValueError):
                at = expected.index(_sum(line), at) + 1
                kept.append(line)
        return kept

    def mend(self, kept: Iterable[bytes]) -> None:
        """Replace damaged metrics by these lines; the damaged file is kept under another name."""
        disk.write_bytes(self.path / DAMAGED, _bytes(self.path / METRICS))
        disk.write_bytes(self.path / METRICS, b"".join(kept))
        if METRICS in self._files:
            self._files.pop(METRICS).close()

    def rewind(self, lengths: Lengths, done: int) -> None:
        """Drop what was appended after the checkpoint of round ``done``; those rounds will be repeated."""
        keep = lengths.get(METRICS, 0)
        self._sums = Checksums(_lines(_bytes(self.path / METRICS)[:keep]))
        # The timing of a round includes its checkpoint and is written after it: keep lines by round, not by length.
        self._cut(METRICS, keep)
        for name in _GROWING[1:]:
            self._cut(name, sum(len(line) for line, entry in self._entries(name) if entry["round"] <= done))

    def withdraw(self) -> None:
        """Remove a folder in which no round was completed, after a fault that only the first round reveals."""
        if not any(self._entries("timings.jsonl")):
            shutil.rmtree(self.path, ignore_errors=True)

    def spent(self) -> float:
        """How many seconds the rounds so far took."""
        parts = ("train", "evaluate", "record")
        took = [entry.get(part) for _, entry in self._entries("timings.jsonl") for part in parts]
        return sum(seconds for seconds in took if isinstance(seconds, float))

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file atomically."""
        disk.write_bytes(self.path / name, _indented(value))

    def seal(self) -> None:
        """Record the hashes of the files that a new run starts with; resuming requires the same ones."""
        self._write_manifest({name: disk.digest(self.path / name) for name in self._present(_CONFIG, *_SETTINGS)})

    def unseal(self) -> None:
        """Delete the manifest, since files are about to change."""
        if (self.path / _MANIFEST).exists():
            (self.path / _MANIFEST).unlink()
            disk.sync(self.path)

    def end(self, summary: dict[str, Any] | None = None) -> None:
        """Record the hashes of all files of a run that has ended, then write its ``summary``, if there is one."""
        if METRICS in self._files:
            self._there(METRICS)
        known = {name: disk.digest(self.path / name) for name in self._present(_CONFIG, *_SETTINGS, *_RESULTS)}
        known |= {f"checkpoints/{name}": digest for name, digest in checkpoint.digests(self.checkpoints).items()}
        last = {} if summary is None else {_SUMMARY: _indented(summary)}
        self._write_manifest(known | {name: disk.digest_of(data) for name, data in last.items()})
        for name, data in last.items():
            disk.write_bytes(self.path / name, data)

    def _write_manifest(self, digests: Mapping[str, str]) -> None:
        self.write(_MANIFEST, {"sha256": digests})

    def _present(self, *names: str) -> list[str]:
        return [name for name in names if (self.path / name).is_file()]

    def _entries(self, name: str) -> Iterator[tuple[bytes, dict[str, Any]]]:
        if not (self.path / name).exists():
            return
        for line in (self.path / name).read_bytes().splitlines(keepends=True):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            if not isinstance(entry, dict) or not isinstance(entry.get("round"), int):
                return  # cut short by a crash, or damaged; these files are not essential
            yield line, entry

    def _cut(self, name: str, size: int) -> None:
        if (self.path / name).exists():
            self._there(name).truncate(size)
            self._there(name).seek(0, os.SEEK_END)

    def _there(self, name: str) -> BinaryIO:
        """A file that grows with the run; an error if it was moved or replaced."""
        path = self.path / name
        if name not in self._files:
            self._files[name] = os.fdopen(disk.open_own(path, os.O_WRONLY | os.O_APPEND), "ab")
        disk.still_there(self._files[name].fileno(), path)
        return self._files[name]

    def _append(self, name: str, record: dict[str, Any]) -> bytes:
        line = as_json(record).encode() + b"\n"
        file = self._there(name)
        file.write(line)
        file.flush()
        return line


Lengths = dict[str, Any]  # of the metrics, as recorded in a checkpoint


class Checksums:
    """The length of the metrics and their checksums: of the whole, and of each line, to find damaged ones."""

    def __init__(self, lines: Iterable[bytes] = ()) -> None:
        self._length, self._crc, self._lines = 0, 0, list[str]()
        for line in lines:
            self.add(line)

    def add(self, line: bytes) -> None:
        self._length, self._crc = self._length + len(line), zlib.crc32(line, self._crc)
        self._lines.append(_sum(line))

    def lengths(self) -> Lengths:
        return {METRICS: self._length, f"{METRICS} crc32": self._crc, f"{METRICS} lines": "".join(self._lines)}


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _fault(path: Path, lengths: Lengths) -> str:
    metrics, keep = _bytes(path), lengths.get(METRICS, 0)
    if len(metrics) < keep:
        return f"{path}: has {len(metrics)} bytes, the checkpoint needs {keep}"
    if zlib.crc32(metrics[:keep]) != lengths.get(f"{METRICS} crc32", 0):
        return f"{path}: is damaged (its checksum is not the checkpoint's)"
    return ""


def _sum(line: bytes) -> str:
    return f"{zlib.crc32(line):08x}"


def _lines(text: bytes) -> list[bytes]:
    """The lines with their ends; what comes after the last end was cut short by a crash."""
    return [line + b"\n" for line in text.split(b"\n")[:-1]]


def as_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: null for a number that is not finite."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if type(value) is str or type(value) is int:  # as nearly all are where there are many
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _indented(value: Any) -> bytes:
    return as_json(value, indent=1).encode() + b"\n"


# -- folders -------------------------------------------------------------------------------------
def create(path: Path, config: str) -> RunFolder:
    """A new run folder; one that is not empty (except after a start that was cut short) is refused.

    It is locked before anything is written: of two runs that start at once, one is refused and changes nothing.
    """
    if path.exists():
        _refuse_used(path)
    disk.make_folder(path)
    folder = RunFolder(path)
    try:
        _refuse_used(path)  # another run may have started and ended meanwhile
        write_text(path / _CONFIG, config)
    except BaseException:
        folder.close()
        raise
    return folder


def _refuse_used(path: Path) -> None:
    if not path.is_dir() or any(p.name not in (_LOCK, f"{_CONFIG}.part") for p in path.iterdir()):
        fix = f"choose another, or continue it with: fedloom resume {path}" if (path / _CONFIG).exists() else ""
        raise ConfigError([Fault("--out", f"{path} already exists and is not empty", fix or "choose another")])


def opened(path: Path) -> RunFolder:
    """An existing run folder, to continue: no other process uses it, and its files are unchanged."""
    if not (path / _CONFIG).is_file():
        raise CheckpointError(f"{path}: is not a run folder (it has no config.toml)")
    folder = RunFolder(path)
    try:
        verify(path, _SETTINGS)
    except BaseException:
        folder.close()
        raise
    return folder


def unused(path: Path) -> Path:
    """A new folder ``path``, or ``path-2`` and so on; two processes never get the same."""
    for count in itertools.count(1):
        new = path if count == 1 else path.with_name(f"{path.name}-{count}")
        with suppress(FileExistsError):
            disk.make_folder(new, exist_ok=False)
            break
    return new


def write_text(path: Path, text: str) -> None:
    disk.write_bytes(path, text.encode())


def write_key(folder: Path, key: Key) -> None:
    """Write the key of a run's noise, readable by its owner only, replacing an existing one."""
    write_text(folder / _KEY, noise.as_text(key))


def read_key(folder: Path) -> Key | None:
    """The key of a run's noise, if it has been written."""
    path = folder / _KEY
    try:
        return noise.from_text(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # the message must not show the key
        raise CheckpointError(f"{path}: is damaged ({type(error).__name__}): the noise of this run is lost") from None


def save_partition(
    folder: RunFolder,
    owner: Ints,
    held_out: NDArray[np.bool_],
    validation: NDArray[np.bool_] | None,
    counts: Ints,
    described: dict[str, Any],
) -> None:
    """The client and the use of each row, the number of rows of each class, and the fingerprint."""
    tensors = {
        "owner": torch.from_numpy(owner),
        "held_out": torch.from_numpy(held_out.astype(np.uint8)),
        "counts": torch.from_numpy(counts),
    }
    if validation is not None:
        tensors["validation"] = torch.from_numpy(validation.astype(np.uint8))
    checkpoint.save_model(folder.path / "partition.safetensors", tensors)
    folder.write("partition.json", described)


# -- reading -------------------------------------------------------------------------------------
def verify(path: Path, names: Iterable[str]) -> None:
    """Refuse files of a run folder that have changed since the run wrote them; the manifest may lack some."""
    known = _digests(path)
    for name in (name for name in names if name in known):
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name}: is missing (restore it, or start a new run)")
        found = disk.digest(path / name)
        if found != known[name]:
            what = f"has changed since the run wrote it (sha256 {found[:12]}, manifest.json says {known[name][:12]})"
            raise CheckpointError(f"{path / name}: {what}")


def _digests(path: Path) -> dict[str, str]:
    if not (path / _MANIFEST).is_file():  # runs of earlier versions have none, nor has one that was killed just now
        return {}
    try:
        return {str(k): str(v) for k, v in json.loads((path / _MANIFEST).read_bytes())["sha256"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = "delete it to continue without checking the files"
        raise CheckpointError(f"{path / _MANIFEST}: is damaged ({why})") from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, in order; a last line that a crash cut short is left out."""
    return [json.loads(line) for line in _lines((path / METRICS).read_bytes())]


def read_ended(path: Path) -> list[dict[str, Any]]:
    """The evaluations of a run that has ended; they must be unchanged."""
    verify(path, (METRICS, "partition.json", "privacy.json"))
    if METRICS not in _digests(path):  # of earlier versions: the newest checkpoint has the checksums of the metrics
        refuse_cut_metrics(path)
    return read_metrics(path)


def refuse_cut_metrics(path: Path) -> None:
    """Refuse metrics that do not match the newest checkpoint; during a run they always match."""
    saved = checkpoint.readable(path / "checkpoints")
    fault = _fault(path / METRICS, saved[max(saved)]["lengths"]) if saved else ""
    if fault:
        raise CheckpointError(fault)


# -- during a run --------------------------------------------------------------------------------
@contextmanager
def held(path: Path | None, opened: Callable[[Path], RunFolder], ranks: Ranks) -> Iterator[RunFolder | None]:
    """The run folder, if there is one, for the duration of the run; only rank 0 has it."""
    folder = None
    with ranks.agreed(), storage(path):
        if path is not None and ranks.leads:
            folder = opened(path)
    try:
        yield folder
    finally:
        if folder is not None:
            folder.close()


@contextmanager
def storage(path: Path | None) -> Iterator[None]:
    """Turn a failed write, such as on a full disk, into one clear error that ends the run."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        where = path or Path("a temporary folder")
        disk.refuse_long_name(error, where)
        raise StorageError(f"writing below {where} failed: {error.strerror}{intact(path)}") from error


def intact(path: Path | None) -> str:
    """How to resume a run that ends early, in words; empty if there is no checkpoint."""
    saved: dict[int, Any] = {}
    with suppress(OSError):  # no hint for an unreadable folder
        saved = checkpoint.readable(path / "checkpoints") if path is not None else {}
    return f"; the last checkpoint is intact: fedloom resume {path}" if saved else ""
