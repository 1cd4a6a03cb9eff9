"""Where clients keep their state between rounds: in memory, or on disk if there are too many for memory.

Both stores have one interface. A client never seen reads as ``fresh``. ``commit`` makes what was
scattered durable and returns what a checkpoint must record; ``restore`` goes back to that point.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core import disk, tree
from fedloom.core.errors import CheckpointError

Memo = dict[str, Any]
EMPTY: Memo = {"lines": 0, "crc": 0}  # the record of an empty store on disk

_LARGE = 1 << 20  # bytes from which a tensor is put in a file


class ClientStore(Protocol):
    clients: int

    def gather(self, ids: Tensor, fresh: Any) -> Any:
        """The stacked states of ``ids``; ``fresh`` is the state of one client not seen before."""

    def scatter(self, ids: Tensor, states: Any) -> None:
        """Keep these stacked states."""

    def commit(self) -> Memo:
        """Make everything durable as far as this store can by itself."""

    def release(self) -> None:
        """The oldest checkpoint is gone: what only it referred to may be overwritten."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint itself must contain."""

    def restore(self, memo: Memo, others: list[Memo], tensors: Mapping[str, Tensor]) -> None:
        """Go back to a committed point; ``others`` are older points that must stay readable."""

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised large tensor for one round: the models of a network's nodes."""


def is_on_disk(memo: Memo) -> bool:
    """Whether the states of a committed point are in separate files, not in the checkpoint."""
    return "lines" in memo


def memo_for(
    memo: Memo, tensors: dict[str, Tensor], store: ClientStore, folder: Path, blank: Any
) -> tuple[Memo, dict[str, Tensor]]:
    """A committed point that ``store`` can restore: if it is on disk, in ``folder``, it is read into memory.

    ``blank`` is the state of one client, for the structure of the bytes on disk. The other direction needs no
    conversion: a store on disk accepts the states in a checkpoint.
    """
    if isinstance(store, DiskStore) or not is_on_disk(memo):
        return memo, tensors
    if not memo["lines"]:
        return {"rows": 0}, {}
    if not (folder / "journal.bin").is_file():
        raise CheckpointError(f"{folder / 'journal.bin'}: is missing, and so are the states of clients")
    source = DiskStore(folder, store.clients)
    source.restore(memo, [], {})
    target = RamStore(store.clients)
    target.scatter(source.known(), source.gather(source.known(), tree.on_device(blank, torch.device("cpu"))))
    return target.commit(), target.tensors()


def _scatter_all(store: ClientStore, tensors: Mapping[str, Tensor]) -> None:
    """Load the states in a checkpoint."""
    if tensors and len(tensors["ids"]):
        names = sorted(name for name in tensors if name.startswith("state."))
        store.scatter(tensors["ids"], tuple(tensors[name] for name in names))


class RamStore:
    """States in memory: one row for each client seen, in tensors that grow by doubling."""

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self._slot: NDArray[np.int64] = np.full(clients, -1, dtype=np.int64)
        self._ids: list[NDArray[np.int64]] = []
        self._used = 0
        self._rows: Any = None

    def gather(self, ids: Tensor, fresh: Any) -> Any:
        if not tree.leaves(fresh):
            return fresh
        slots = torch.from_numpy(self._slot[ids.numpy()])
        blank = tree.tmap(lambda x: x.expand(len(ids), *x.shape), fresh)
        if self._rows is None or bool((slots < 0).all()):
            return tree.tmap(torch.Tensor.contiguous, blank)
        self._rows = tree.unflatten(fresh, [r.to(f.device) for r, f in _pairs(self._rows, fresh)])
        at = slots.clamp(min=0)
        held = tree.tmap(lambda x: x[at.to(x.device)], self._rows)
        return tree.tmap(lambda h, b: tree.where((slots >= 0).to(h.device), h, b), held, blank)

    def scatter(self, ids: Tensor, states: Any) -> None:
        if not tree.leaves(states):
            return
        new = ids.numpy()[self._slot[ids.numpy()] < 0]
        self._slot[new] = np.arange(self._used, self._used + len(new))
        self._ids.append(new.copy())
        self._used += len(new)
        self._grow(states)
        slots = torch.from_numpy(self._slot[ids.numpy()])
        for row, state in _pairs(self._rows, states):
            row[slots.to(row.device)] = state

    def commit(self) -> Memo:
        return {"rows": self._used}

    def release(self) -> None:
        return

    def tensors(self) -> dict[str, Tensor]:
        if self._rows is None:
            return {}
        held = {f"state.{k:03d}": x[: self._used].cpu() for k, x in enumerate(tree.leaves(self._rows))}
        return {"ids": torch.from_numpy(np.concatenate(self._ids)), **held}

    def restore(self, memo: Memo, others: list[Memo], tensors: Mapping[str, Tensor]) -> None:
        self._slot[:] = -1
        self._ids, self._used, self._rows = [], 0, None
        _scatter_all(self, tensors)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def _grow(self, states: Any) -> None:
        room = 0 if self._rows is None else len(tree.leaves(self._rows)[0])
        if self._used <= room:
            return
        size = max(self._used, 2 * room)
        blank = tree.tmap(lambda x: torch.zeros(size, *x.shape[1:], dtype=x.dtype, device=x.device), states)
        if self._rows is not None:
            for wide, row in _pairs(blank, self._rows):
                wide[:room] = row.to(wide.device)
        self._rows = blank


class DiskStore:
    """States in a slot file; a journal records the slot of each client's row, and its checksum.

    A row that a checkpoint refers to is never overwritten: the client's next row goes to another slot,
    and a line in the journal says so. A checkpoint records only the length of the journal and its
    checksum, so that a crash at any moment loses only what came after it.
    """

    _LINE = np.dtype([("id", "<i8"), ("slot", "<i8"), ("crc", "<u4")])

    def __init__(self, folder: Path | None, clients: int) -> None:
        """In a folder, or, if the states need not outlive the process, in unnamed files."""
        self._folder = folder
        self._rows, self._journal = self._opened("rows.bin"), self._opened("journal.bin")
        for file in (self._rows, self._journal):
            weakref.finalize(self, os.close, file)
        self.clients = clients
        self._reset()

    def _opened(self, name: str) -> int:
        if self._folder is not None:
            disk.make_folder(self._folder)
            return disk.open_own(self._folder / name, os.O_RDWR)
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())

    def known(self) -> Tensor:
        """The clients that have a state here."""
        return torch.from_numpy(np.flatnonzero(self._slot >= 0))

    def _reset(self) -> None:
        self._slot: NDArray[np.int64] = np.full(self.clients, -1, dtype=np.int64)
        self._crc: NDArray[np.uint32] = np.zeros(self.clients, dtype=np.uint32)
        self._lines = 0  # in the journal
        self._sum = 0  # of the journal
        self._form: list[str] = []  # of a row: the shape and the type of each of its tensors
        self._next = 0  # the first slot never used
        self._free: list[int] = []
        self._loose: set[int] = set()  # slots written since the last commit: no checkpoint knows them
        self._stale: list[int] = []  # slots that the last checkpoint still needs
        self._older: list[int] = []  # slots that only the checkpoint before it still needs

    def gather(self, ids: Tensor, fresh: Any) -> Any:
        parts = tree.leaves(fresh)
        if not parts:
            return fresh
        width = sum(x.numel() * x.element_size() for x in parts)
        block = np.empty((len(ids), width), dtype=np.uint8)
        blank = np.frombuffer(b"".join(_raw(x) for x in parts), dtype=np.uint8)
        for k, client in enumerate(ids.tolist()):
            slot = int(self._slot[client])
            if slot < 0:
                block[k] = blank
                continue
            row = os.pread(self._rows, width, slot * width)
            if len(row) != width or zlib.crc32(row) != int(self._crc[client]):
                raise CheckpointError(f"{self._called('rows.bin')}: the state of client {client} is damaged")
            block[k] = np.frombuffer(row, dtype=np.uint8)
        return tree.unflatten(fresh, _columns(block, parts))

    def scatter(self, ids: Tensor, states: Any) -> None:
        parts = [x.detach().cpu().contiguous() for x in tree.leaves(states)]
        if not parts:
            return
        self._form = [form_of(x[0]) for x in parts] if len(ids) else self._form
        rows = np.concatenate([x.reshape(len(ids), -1).view(torch.uint8).numpy() for x in parts], axis=1)
        lines = np.empty(len(ids), dtype=self._LINE)
        for k, client in enumerate(ids.tolist()):
            row = rows[k].tobytes()
            slot = self._slot_for(client)
            disk.write_at(self._rows, row, slot * len(row))
            self._slot[client], self._crc[client] = slot, zlib.crc32(row)
            lines[k] = (client, slot, self._crc[client])
        disk.write_at(self._journal, lines.tobytes(), self._lines * self._LINE.itemsize)
        self._lines, self._sum = self._lines + len(lines), zlib.crc32(lines.tobytes(), self._sum)

    def commit(self) -> Memo:
        for name, file in (("rows.bin", self._rows), ("journal.bin", self._journal)):
            os.fsync(file)
            if self._folder is not None:
                disk.still_there(file, self._folder / name)
        return {"lines": self._lines, "crc": self._sum, "form": self._form}

    def release(self) -> None:
        self._free.extend(self._older)
        self._older, self._stale, self._loose = self._stale, [], set()

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def restore(self, memo: Memo, others: list[Memo], tensors: Mapping[str, Tensor]) -> None:
        """Also from a checkpoint that contains the states: they are written after what older ones still need."""
        others = [other for other in others if is_on_disk(other)]
        if not is_on_disk(memo):
            self._restart_after(others)
            _scatter_all(self, tensors)
            return
        lines = self._read(memo["lines"])  # older points are older lines of the same journal
        self._reset()
        upto = lines[: memo["lines"]]
        self._sum = zlib.crc32(upto.tobytes())
        if self._sum != memo["crc"]:
            raise CheckpointError(f"{self._called('journal.bin')}: is damaged (its checksum is not the checkpoint's)")
        self._slot[upto["id"]], self._crc[upto["id"]] = upto["slot"], upto["crc"]
        self._form = memo.get("form", [])  # earlier versions did not write it
        self._lines, self._next = memo["lines"], int(lines["slot"].max(initial=-1)) + 1
        needed = np.zeros(self._next, dtype=bool)
        needed[self._slot[self._slot >= 0]] = True
        older = np.zeros_like(needed)
        for other in others:
            held = np.full(self.clients, -1, dtype=np.int64)
            held[lines["id"][: other["lines"]]] = lines["slot"][: other["lines"]]
            older[held[held >= 0]] = True
        self._older = np.flatnonzero(older & ~needed).tolist()
        self._free = np.flatnonzero(~older & ~needed).tolist()

    def _restart_after(self, others: list[Memo]) -> None:
        """Empty, except for what these points need, as far as it can be read."""
        try:
            self.restore(max(others, key=lambda other: other["lines"], default=EMPTY), others, {})
        except CheckpointError:
            self._reset()
        self._stale = self._slot[self._slot >= 0].tolist()
        self._slot[:] = -1

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """On a CPU it is a memory-mapped file, of which the system keeps as much in memory as fits.

        The file has no name: its space is freed with the tensor, or when the process ends in any way.
        """
        count = math.prod(shape)
        if device.type != "cpu" or count * dtype.itemsize < _LARGE:
            return torch.empty(shape, dtype=dtype, device=device)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            try:
                # Otherwise a full disk would be a bus error.
                os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
                name = f"/proc/self/fd/{file.fileno()}"
                return torch.from_file(name, shared=True, size=count, dtype=dtype).view(shape)
            except RuntimeError as error:
                raise OSError(errno.ENOMEM, f"cannot map {count * dtype.itemsize} bytes: {error}") from error

    def _read(self, count: int) -> NDArray[Any]:
        raw = os.pread(self._journal, count * self._LINE.itemsize, 0)
        if len(raw) != count * self._LINE.itemsize:
            raise CheckpointError(
                f"{self._called('journal.bin')}: is cut off after line {len(raw) // self._LINE.itemsize} "
                f"(the checkpoint needs {count})"
            )
        return np.frombuffer(raw, dtype=self._LINE)

    def _called(self, name: str) -> Path:
        return (self._folder or Path(tempfile.gettempdir())) / name

    def _slot_for(self, client: int) -> int:
        held = int(self._slot[client])
        if held in self._loose:
            return held
        if held >= 0:
            self._stale.append(held)
        if self._free:
            slot = self._free.pop()
        else:
            slot, self._next = self._next, self._next + 1
        self._loose.add(slot)
        return slot


def form_of(x: Tensor) -> str:
    """The shape and the type of a tensor, in words."""
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _raw(x: Tensor) -> bytes:
    return x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _pairs(a: Any, b: Any) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tree.leaves(a), tree.leaves(b), strict=True))


def _columns(block: NDArray[np.uint8], like: list[Tensor]) -> list[Tensor]:
    """The bytes of stacked rows as stacked tensors."""
    out, at = [], 0
    for x in like:
        size = x.numel() * x.element_size()
        flat = torch.from_numpy(block[:, at : at + size].copy()).reshape(-1)
        out.append(flat.view(x.dtype).reshape(len(block), *x.shape).to(x.device))
        at += size
    return out
