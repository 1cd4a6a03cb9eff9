"""Checkpoints: a folder for each, whole or not there at all, each file with its checksum.

checkpoints/00000020/state.safetensors      the server's state
checkpoints/00000020/clients.safetensors    the clients' states, where they are kept in memory
checkpoints/00000020/meta.json              round, checksums, lengths of the run's append-only files
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedloom import tree
from fedloom.engine.run import RunState
from fedloom.engine.store import ClientStore
from fedloom.errors import CheckpointError

KEEP = 2  # the newest, and one to fall back on


class Loaded(NamedTuple):
    state: RunState
    lengths: dict[str, int]  # of the run's append-only files at that moment


def save(folder: Path, state: RunState, store: ClientStore, lengths: dict[str, int]) -> None:
    """Write a checkpoint, then forget all but the newest ones."""
    final = folder / f"{state.round:08d}"
    scratch = folder / f".{final.name}.part"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    memo = store.commit()
    _write(scratch / "state.safetensors", _tensors(state))
    clients = store.tensors()
    if clients:
        _write(scratch / "clients.safetensors", clients)
    meta = {
        "round": state.round,
        "up": state.up,
        "down": state.down,
        "store": memo,
        "lengths": lengths,
        "sha256": {p.name: _digest(p) for p in sorted(scratch.glob("*.safetensors"))},
    }
    with open(scratch / "meta.json", "w") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    os.replace(scratch, final)
    sync(folder)
    for old in rounds(folder)[:-KEEP]:
        shutil.rmtree(folder / f"{old:08d}")
    store.release()


def rounds(folder: Path) -> list[int]:
    """The rounds of which there is a checkpoint, oldest first."""
    return sorted(int(p.name) for p in folder.glob("[0-9]" * 8) if p.is_dir())


def load(folder: Path, like: RunState, store: ClientStore, *, at: int | None = None) -> Loaded:
    """The newest checkpoint, or the one ``at`` a round; a damaged one is refused by name."""
    have = rounds(folder)
    newest = have[-1] if at is None else at
    if newest not in have:
        raise CheckpointError(f"{folder}: has no checkpoint of round {newest} (there are: {have or 'none'})")
    older = [r for r in have if r < newest]
    try:
        meta, tensors, clients = _read(folder / f"{newest:08d}")
        state = _state(like, meta, tensors, folder / f"{newest:08d}")
        memos = [json.loads((folder / f"{r:08d}" / "meta.json").read_text())["store"] for r in older]
        store.restore(meta["store"], memos, clients)
    except CheckpointError as error:
        offer = f"; the one of round {older[-1]} can be tried: fedloom resume RUN --from {older[-1]}" if older else ""
        raise CheckpointError(f"{error}{offer.replace('RUN', str(folder.parent))}") from error
    for newer in (r for r in have if r > newest):  # superseded by the user's own word
        shutil.rmtree(folder / f"{newer:08d}")
    return Loaded(state, meta["lengths"])


def sync(folder: Path) -> None:
    """Make renames in ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _tensors(state: RunState) -> dict[str, Tensor]:
    server = {f"server.{name}": x for name, x in tree.named(state.server)}
    return {**server, "buffers": state.buffers}


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, path)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        expected = dict(meta["sha256"])
        for name, digest in expected.items():
            found = _digest(folder / name)
            if found != digest:
                raise CheckpointError(
                    f"checkpoint {folder} is damaged: {name} has checksum {found[:12]}, its record says {digest[:12]}"
                )
        clients = load_file(folder / "clients.safetensors") if "clients.safetensors" in expected else {}
        return meta, load_file(folder / "state.safetensors"), clients
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {type(error).__name__}: {error}") from error


def _state(like: RunState, meta: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> RunState:
    device = like.buffers.device
    for name, x in _tensors(like).items():
        if name not in tensors or tensors[name].shape != x.shape or tensors[name].dtype != x.dtype:
            found = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise CheckpointError(f"checkpoint {folder}: '{name}' should be {tuple(x.shape)} {x.dtype}, it is {found}")
    names = [f"server.{name}" for name, _ in tree.named(like.server)]
    server = tree.unflatten(like.server, [tensors[n].to(device) for n in names])
    return RunState(meta["round"], server, tensors["buffers"].to(device), meta["up"], meta["down"])


def save_model(path: Path, tensors: dict[str, Tensor], notes: dict[str, str]) -> None:
    """A model as a safetensors file, written whole or not at all."""
    part = path.with_name(path.name + ".part")
    save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, part, metadata=notes)
    os.replace(part, path)


def load_model(path: Path) -> dict[str, Tensor]:
    """The tensors of a saved model."""
    try:
        return {name: torch.as_tensor(x) for name, x in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a readable model ({error})") from error
