"""Checkpoints: a folder for each, written atomically, each file with its checksum.

checkpoints/00000020/state.safetensors      the server's state
checkpoints/00000020/clients.safetensors    the clients' states, if they are kept in memory
checkpoints/00000020/meta.json              round, checksums (its own, too), lengths of the run's append-only files

Loading changes nothing: the caller may still refuse the content.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedloom import __version__
from fedloom.core import disk, tree
from fedloom.core.errors import CheckpointError
from fedloom.engine.ranks import ALONE, Ranks
from fedloom.engine.state import RunState
from fedloom.engine.store import ClientStore, Memo, form_of, is_on_disk, memo_for
from fedloom.trust.accountant import Release
from fedloom.trust.ledger import Ledger

KEEP = 2  # the newest, and one to fall back to
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


def _is_hexadecimal(text: str) -> str:
    try:
        float.fromhex(text)
    except OverflowError as error:
        raise ValueError(str(error)) from error
    return text


class _Entries(BaseModel):
    """Some entries of a record, each of its type; which are required is checked elsewhere."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Release(_Entries):
    noise: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    local: bool = False
    sampling: str = ""
    clients: _Count = 0
    size: _Count = 0
    histogram_epsilon: Annotated[FiniteFloat, Field(ge=0)] = 0.0


class _Ledger(_Entries):
    release: _Release = _Release()
    delta: Annotated[float, Field(ge=0, le=1)] = 0.0
    reach: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    uses: Annotated[list[_Count], Field(min_length=1)] = [0]


class _Store(_Entries):
    rows: _Count = 0
    lines: _Count = 0
    crc: _Count = 0
    form: list[Any] = []


class _Lengths(_Entries):
    metrics: _Count = Field(0, alias="metrics.jsonl")
    checksum: _Count = Field(0, alias="metrics.jsonl crc32")
    lines: str = Field("", alias="metrics.jsonl lines")
    links: dict[str, Any] = {}  # the memory of a peer's links, and the order of their corrections
    corrections: list[Any] = []
    sent: list[Any] = []  # the turns in which a peer sent what a neighbour may need again
    line: dict[str, Any] = {}  # of a peer's last round


class _Record(_Entries):
    """The content of meta.json: a forged record may have a forged checksum."""

    round: _Count
    fedloom: str = ""
    up: _Count
    down: _Count
    seconds: Annotated[str, AfterValidator(_is_hexadecimal)]
    gradients: FiniteFloat = 0.0
    ledger: _Ledger | None = None
    store: _Store
    lengths: _Lengths
    sha256: dict[Literal["state.safetensors", "clients.safetensors"], str]


class OtherFormError(CheckpointError):
    """A checkpoint whose tensors are not those of this version of fedloom."""


class Loaded(NamedTuple):
    state: RunState
    lengths: dict[str, Any]  # of the run's append-only files at that moment, and their checksums


def save(folder: Path, state: RunState, store: ClientStore, lengths: dict[str, Any], ranks: Ranks = ALONE) -> None:
    """Write a checkpoint, then delete all but the newest ones; rank 0 writes for all.

    No rank continues before it is written: a user who ends one rank of an interrupted run may end the others, too.
    """
    memo, clients = store.commit(), store.tensors()
    if ranks.size > 1:
        clients = ranks.collected(clients)
        memo |= {"rows": len(clients["ids"])} if clients else {}
    if ranks.leads:
        _write(folder, state, memo, clients, lengths)
    ranks.any_rank()
    store.release()


def _write(folder: Path, state: RunState, memo: Memo, clients: dict[str, Tensor], lengths: dict[str, Any]) -> None:
    final = folder / f"{state.round:08d}"
    scratch = folder / f".{final.name}.part"
    for leftover in (*folder.glob(".*.part"), *folder.glob(".*.gone")):  # left by a crash
        shutil.rmtree(leftover, ignore_errors=True)
    with suppress(FileExistsError):  # not its parents: a run folder that was deleted is not made again
        folder.mkdir(mode=0o700)
    scratch.mkdir(mode=0o700)
    write_tensors(scratch / "state.safetensors", _tensors(state))
    if clients:
        write_tensors(scratch / "clients.safetensors", clients)
    meta = {
        "round": state.round,
        "fedloom": __version__,
        "up": state.up,
        "down": state.down,
        "seconds": state.seconds.hex(),
        "gradients": state.gradients,
        "ledger": None
        if state.ledger is None
        else state.ledger._asdict() | {"release": state.ledger.release._asdict()},
        "store": memo,
        "lengths": lengths,
        "sha256": {p.name: disk.digest(p) for p in sorted(scratch.glob("*.safetensors"))},
    }
    _write_record(scratch / "meta.json", meta)
    _forget(final)
    os.replace(scratch, final)
    disk.sync(folder)
    for old in saved_rounds(folder)[:-KEEP]:
        _forget(folder / f"{old:08d}")


def rewrite_lengths(folder: Path, round_: int, lengths: dict[str, Any]) -> None:
    """Record other lengths in the checkpoint of a round; a crash leaves its old record or the new one."""
    home = folder / f"{round_:08d}"
    meta = _record(home)
    _write_record(home / "meta.json", meta | {"lengths": meta["lengths"] | lengths})
    disk.sync(home)


def saved_rounds(folder: Path) -> list[int]:
    """The rounds with a checkpoint, oldest first."""
    return sorted(int(p.name) for p in folder.glob("[0-9]" * 8) if p.is_dir())


def round_to_load(folder: Path, at: int | None) -> int:
    """The round ``at``, if it has a checkpoint, or the newest one."""
    have = saved_rounds(folder)
    newest = max(have, default=0) if at is None else at
    if newest not in have:
        raise CheckpointError(f"{folder}: has no checkpoint of round {newest} (there are: {have or 'none'})")
    return newest


def readable(folder: Path) -> dict[int, dict[str, Any]]:
    """The records of the checkpoints whose record is intact, by round, oldest first."""
    found = {}
    for round_ in saved_rounds(folder):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError):
            found[round_] = _record(folder / f"{round_:08d}")
    return found


def ledgers(folder: Path) -> list[Ledger]:
    """What was released according to the checkpoints with an intact record, oldest first."""
    found = []
    for round_, meta in readable(folder).items():
        with suppress(TypeError, KeyError, AttributeError, CheckpointError):
            found.append(_ledger(meta, folder / f"{round_:08d}"))
    return [ledger for ledger in found if ledger is not None]


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of the checkpoints; those of large ones are in their records."""
    found = {}
    for round_, meta in readable(folder).items():
        found[f"{round_:08d}/meta.json"] = disk.digest(folder / f"{round_:08d}" / "meta.json")
        found |= {f"{round_:08d}/{name}": digest for name, digest in meta["sha256"].items()}
    return found


def load_state(
    folder: Path,
    like: RunState,
    store: ClientStore,
    *,
    at: int | None = None,
    ranks: Ranks = ALONE,
    blank: Any = (),
) -> Loaded:
    """The newest checkpoint, or the one ``at`` a round; a damaged one is refused by name.

    Each rank loads the clients' states that it keeps, however many ranks wrote the checkpoint. They are converted if
    the checkpoint has them in another kind of store; ``blank`` is the state of one client, for its structure.
    """
    have, newest = saved_rounds(folder), round_to_load(folder, at)
    older = [r for r in have if r < newest]
    try:
        meta, tensors, clients = _read(folder / f"{newest:08d}", store)
        state = _state(like, meta, tensors, folder / f"{newest:08d}")
        _refuse_other_clients(meta, clients, blank, folder / f"{newest:08d}")
        memo, clients = memo_for(meta["store"], clients, store, folder.parent / "clients", blank)
        if ranks.size > 1 and clients:
            rows = (ranks.owner(clients["ids"]) == ranks.rank).nonzero().squeeze(1)
            clients, memo = {name: x[rows] for name, x in clients.items()}, {"rows": len(rows)}
        # A store on disk writes what it loads from a checkpoint, and must not overwrite what newer ones need.
        others = [r for r in have if r != newest] if not is_on_disk(memo) else older
        store.restore(memo, [meta["store"] for r, meta in readable(folder).items() if r in others], clients)
    except OtherFormError:
        raise  # older checkpoints have the same structure
    except CheckpointError as error:
        offer = f"; the one of round {older[-1]} can be tried: fedloom resume RUN --from {older[-1]}" if older else ""
        raise CheckpointError(f"{error}{offer.replace('RUN', str(folder.parent))}") from error
    return Loaded(state, meta["lengths"])


def forget_after(folder: Path, round_: int) -> None:
    """Delete the checkpoints of later rounds, the last one first: the user continues from this one."""
    for newer in reversed([r for r in saved_rounds(folder) if r > round_]):
        _forget(folder / f"{newer:08d}")


def _tensors(state: RunState) -> dict[str, Tensor]:
    server = {f"server.{name}": x for name, x in tree.named_leaves(state.server)}
    nodes = {f"nodes.{name}": x for name, x in tree.named_leaves(state.nodes)}
    under_way = {f"under_way.{name}": x for name, x in tree.named_leaves(state.under_way)}
    return {**server, "buffers": state.buffers, **nodes, **under_way}


def write_tensors(path: Path, tensors: dict[str, Tensor], notes: dict[str, str] | None = None) -> None:
    """Write a safetensors file durably; the same tensors and notes give the same bytes."""
    plain = _apart({name: x.detach().cpu().contiguous() for name, x in tensors.items()})
    try:
        # safetensors stores several notes in no particular order, so there is only one
        save_file(plain, path, metadata={"fedloom": json.dumps(notes)} if notes else None)
        os.chmod(path, 0o600)  # as in newer versions of safetensors
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    disk.sync(path)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, each in its own memory: a method may keep a model and, in a stack of models, the same one again."""
    known: set[int] = set()
    found = {}
    for name, x in tensors.items():
        where = x.untyped_storage().data_ptr()
        found[name] = x.clone() if where in known else x
        known.add(where)
    return found


def _forget(checkpoint: Path) -> None:
    """Delete a checkpoint so that a crash leaves it complete or gone."""
    gone = checkpoint.with_name(f".{checkpoint.name}.gone")
    if checkpoint.exists():
        os.replace(checkpoint, gone)
        shutil.rmtree(gone)


def _sum(meta: dict[str, Any]) -> str:
    """The checksum of a checkpoint's record, without the checksum itself."""
    rest = {key: value for key, value in meta.items() if key != "self"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _write_record(path: Path, meta: dict[str, Any]) -> None:
    disk.write_bytes(path, json.dumps(meta | {"self": _sum(meta)}, indent=1).encode())


def _record(folder: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
    if meta["self"] != _sum(meta):
        raise CheckpointError(f"checkpoint {folder} is damaged: meta.json has changed since it was written")
    try:
        named = _Record(**meta).round
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise CheckpointError(f"checkpoint {folder} is damaged: '{where}' in meta.json is invalid") from error
    if named != int(folder.name):
        raise CheckpointError(f"checkpoint {folder} is damaged: its meta.json is of round {named}")
    return meta


def _read(folder: Path, store: ClientStore) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    try:
        meta = _record(folder)
        expected = dict(meta["sha256"])
        for name, digest in expected.items():
            found = disk.digest(folder / name)
            if found != digest:
                raise CheckpointError(
                    f"checkpoint {folder} is damaged: {name} has checksum {found[:12]}, its record says {digest[:12]}"
                )
        clients = load_file(folder / "clients.safetensors") if "clients.safetensors" in expected else {}
        # Copies, with the alignment of a run's tensors: the file's alignment would change the last bits of a product.
        there = load_file(folder / "state.safetensors")
        state = {name: store.room(tuple(x.shape), x.dtype, x.device).copy_(x) for name, x in there.items()}
        return meta, state, clients
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise CheckpointError(f"checkpoint {folder} is damaged: {why}") from error
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged ({type(error).__name__}): {error}") from error


def _state(like: RunState, meta: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> RunState:
    device, expected = like.buffers.device, _tensors(like)
    if set(tensors) != set(expected):
        raise _other_form(folder, meta, expected, tensors)
    for name, x in expected.items():
        if tensors[name].shape != x.shape or tensors[name].dtype != x.dtype:
            found = f"{tuple(tensors[name].shape)} {tensors[name].dtype}"
            raise CheckpointError(f"checkpoint {folder}: '{name}' should be {tuple(x.shape)} {x.dtype}, it is {found}")
    names = [f"server.{name}" for name, _ in tree.named_leaves(like.server)]
    server = tree.unflatten(like.server, [tensors[n].to(device) for n in names])
    nodes = tree.unflatten(like.nodes, [tensors[f"nodes.{name}"] for name, _ in tree.named_leaves(like.nodes)])
    return RunState(
        meta["round"],
        server,
        tensors["buffers"].to(device),
        meta["up"],
        meta["down"],
        float.fromhex(meta["seconds"]),
        meta.get("gradients", 0.0),  # runs of earlier versions did not count them
        nodes,
        _ledger(meta, folder),
        tree.unflatten(
            like.under_way, [tensors[f"under_way.{name}"].to(x.device) for name, x in tree.named_leaves(like.under_way)]
        ),
    )


def _other_form(folder: Path, meta: dict[str, Any], expected: Iterable[str], found: Iterable[str]) -> OtherFormError:
    """The refusal of a checkpoint that has other tensors, or other entries, than this version reads."""
    lacks, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    said = [f"{word} '{names[0]}'{_and_more(names)}" for word, names in (("lacks", lacks), ("has", extra)) if names]
    differs = f"it {' and '.join(said)}"
    if meta.get("fedloom") == __version__:  # then it is the experiment that is another one
        what = f"does not fit the settings of the run, which were other ones when it was written ({differs})"
        return OtherFormError(f"checkpoint {folder}: {what}; undo the changes of config.toml, or start a new run")
    by = f"fedloom {meta['fedloom']}" if "fedloom" in meta else "an earlier version of fedloom"
    what = f"was written by {by} with another state (this is {__version__}; {differs})"
    return OtherFormError(f"checkpoint {folder}: {what}; resume it with that version, or start a new run")


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _refuse_other_clients(meta: dict[str, Any], clients: dict[str, Tensor], blank: Any, folder: Path) -> None:
    """Refuse clients' states whose structure is not that of ``blank``, if that is known."""
    expected = {f"state.{k:03d}": form_of(x) for k, x in enumerate(tree.leaves(blank))}
    found = {name: form_of(x[0]) for name, x in clients.items() if name.startswith("state.") and len(x)}
    if is_on_disk(meta["store"]):
        found = {f"state.{k:03d}": form for k, form in enumerate(meta["store"].get("form", []))}
    if not expected or not found:
        return
    if set(found) != set(expected):
        raise _other_form(folder, meta, expected, found)
    for name, form in expected.items():
        if found[name] != form:
            raise _other_form(folder, meta, [f"{name} {form}"], [f"{name} {found[name]}"])


def _ledger(meta: dict[str, Any], folder: Path) -> Ledger | None:
    """What was released according to a checkpoint."""
    written = meta.get("ledger")
    if written is None:
        return None
    entries = {*written, *(f"release.{name}" for name in written.get("release", {}))}
    expected = {*Ledger._fields, *(f"release.{name}" for name in Release._fields)}
    if entries != expected:
        raise _other_form(folder, meta, (f"ledger.{n}" for n in expected), (f"ledger.{n}" for n in entries))
    release = Release(**written["release"])
    return Ledger(release, written["delta"], written["reach"], tuple(written["uses"]))


def save_model(path: Path, tensors: dict[str, Tensor], notes: dict[str, str] | None = None) -> None:
    """Write tensors as a safetensors file, atomically.

    In a folder of its own, which the next attempt empties: safetensors writes under a random name beside the file.
    """
    scratch = path.with_name(f".{path.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a crash
    scratch.mkdir(mode=0o700)
    write_tensors(scratch / path.name, tensors, notes)
    os.replace(scratch / path.name, path)
    scratch.rmdir()
