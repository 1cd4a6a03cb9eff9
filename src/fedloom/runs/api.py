"""Running experiments from Python: ``run``, ``resume`` and the loop that the command line drives, too."""

from __future__ import annotations

import errno
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedloom.algorithm import Algorithm
from fedloom.core import disk, tree, usercode
from fedloom.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    Fault,
    LostRankError,
    StorageError,
)
from fedloom.data.arrays import Arrays
from fedloom.data.files import default_root
from fedloom.data.sources import from_arrays, from_torch
from fedloom.engine import captured, checkpoint
from fedloom.engine.evaluate import Judged, evaluate, everyones_models, living
from fedloom.engine.local import AnyAlgorithm
from fedloom.engine.ranks import Ranks, joined, take_device
from fedloom.engine.run import Experiment, RunState, begin, names_of, rounds, specimen
from fedloom.engine.store import ClientStore, DiskStore, RamStore
from fedloom.engine.topology import Grid, Moment, Topology, facts, shape_of
from fedloom.runs import record
from fedloom.runs.config import (
    Config,
    InMemory,
    as_table,
    as_toml,
    config_hash,
    name_of,
    override,
    parse,
    read_toml,
    without_idle,
)
from fedloom.runs.experiment import Prepared, pick_device, prepare
from fedloom.runs.history import History
from fedloom.runs.record import RunFolder, Timing
from fedloom.trust import noise
from fedloom.trust.noise import Key

_ONE_SIGNAL = 2.0  # seconds within which several ranks may be told of one signal more than once


class Progress(NamedTuple):
    """How far a run is."""

    round: int
    rounds: int
    metrics: dict[str, float]  # of the newest evaluation
    excluded: tuple[int, ...]  # clients left out of this round because their work was not finite
    clients: int  # that trained in this round
    seconds: float  # that this round took
    late: int = 0  # of these clients, how many missed the deadline
    notes: tuple[str, ...] = ()  # what the engine has to say of this round, in words


class Listener(Protocol):
    """Somebody who watches a run; the run itself never prints."""

    def started(self, prepared: Prepared, folder: Path | None, done: int) -> None: ...

    def advanced(self, progress: Progress) -> None: ...

    def stopping(self) -> None: ...


class Silence:
    """A listener that says nothing."""

    def started(self, prepared: Prepared, folder: Path | None, done: int) -> None: ...

    def advanced(self, progress: Progress) -> None: ...

    def stopping(self) -> None: ...


class Resumption(NamedTuple):
    """How a run goes on."""

    at: int | None = None  # the round of the checkpoint; None: the newest that there is
    revised: bool = False  # with settings that are not those of its config.toml
    repair: bool = False  # without lines of metrics.jsonl that are damaged
    changes: tuple[str, ...] = ()  # what decides numbers and is not what it was, in words


class InterruptedRun(KeyboardInterrupt):
    """A run that was asked to stop, and was saved."""

    def __init__(self, run_dir: Path | None, round_: int) -> None:
        super().__init__(f"stopped after round {round_}")
        self.run_dir, self.round = run_dir, round_


def run(
    algorithm: str | Mapping[str, Any] | AnyAlgorithm | type[AnyAlgorithm] = "fedavg",
    *,
    data: Any = "digits",
    out: str | Path | None = None,
    data_root: str | Path | None = None,
    listener: Listener | None = None,
    **settings: Any,
) -> History:
    """Run one experiment and return its history.

    ``algorithm`` is a name, a table such as ``{"kind": "fedprox", "mu": 0.1}``, or an Algorithm.
    ``data`` is the name of a source, a path, a table of settings, ``(x, y)`` arrays, ``Arrays`` or a
    torch Dataset. Other keywords are the sections and keys of an experiment file: ``rounds=20``,
    ``partition={"kind": "iid"}``, ``local={"lr": 0.05}``. Nothing is written unless ``out`` names a folder.
    """
    table: dict[str, Any] = dict(settings)
    table["data"] = {"source": InMemory.kind} if _is_handed_over(data) else data
    table["algorithm"] = algorithm() if isinstance(algorithm, type) else algorithm
    usercode.vouch(table)
    if isinstance(table["algorithm"], Algorithm):
        usercode.adopt(name_of(type(table["algorithm"])))
    config, folder = parse(table), Path(out) if out is not None else None
    arrays = _as_arrays(data, config.basics.seed)
    return start(config, out=folder, root=_root(data_root), arrays=arrays, listener=listener)


def load_config(path: Path | None, overrides: Iterable[str] = (), *, trust: bool = False) -> Config:
    """The experiment in a file (or the default one), with overrides; ``trust``: code that the file names may run."""
    given = read_toml(path) if path is not None else {}
    if trust:
        usercode.vouch(given)
    table, notes = override(given, overrides)
    return parse(table, notes)


def start(
    config: Config,
    *,
    out: Path | None,
    root: Path,
    numbered: bool = False,
    arrays: Arrays | None = None,
    listener: Listener | None = None,
) -> History:
    """Run a new experiment from its first round; ``numbered``: if ``out`` is taken, in ``out-2`` and so on."""
    prepared, ranks = _prepared(config, root, arrays), joined()

    def new(path: Path) -> RunFolder:
        return record.create(record.unused(path) if numbered else path, as_toml(config))

    with _held(out, new, ranks) as folder:
        with ranks.agreed(), _storage(out):
            if folder is not None:
                _lay_out(folder, prepared)
                folder.seal()
        return _drive(prepared, folder, None, listener or Silence())


def resume(
    run_dir: str | Path,
    *,
    data: Any = None,
    data_root: str | Path | None = None,
    at: int | None = None,
    rounds: int | None = None,
    forget: Sequence[int] = (),
    repair: bool = False,
    trust: bool = False,
    accept_changes: bool = False,
    listener: Listener | None = None,
) -> History:
    """Continue a run from its newest checkpoint (or the one ``at`` a round), perhaps to more ``rounds``.

    ``forget``: clients that a closed form is to unlearn, in the rounds in which they come next. ``repair``: go on
    although metrics.jsonl is damaged, without the lines that are. ``trust``: code that the run folder names may run,
    although you have not run it before. ``accept_changes``: go on although this code, or ``model.weights``, is not what
    the run began with. A run that is refused is left as it was.
    """
    path, ranks = Path(run_dir), joined()
    with _held(path, record.opened, ranks) as folder:
        with ranks.agreed():
            changed = _changes_since(path, accept_changes)
            config = _resumed_config(path, data, at, rounds, forget, trust=trust)
            _refuse_other_noise(path, config)
            key = _key_of(path, config)
        root, arrays = _root(data_root), _as_arrays(data, config.basics.seed)
        prepared = _prepared(config, root, arrays, key)
        if forget:
            with ranks.agreed():
                config = _until_forgotten(config, prepared.experiment, path, at, forget, given=rounds is not None)
            prepared = _prepared(config, root, arrays, key)
        with ranks.agreed():
            if (path / "partition.json").is_file():
                _same_data(path, prepared)
                if not accept_changes:
                    _same_net(path, prepared)
        how = Resumption(at, rounds is not None or bool(forget), repair, tuple(changed))
        return _drive(prepared, folder, how, listener or Silence())


def _changes_since(path: Path, accept: bool) -> list[str]:
    """What decides numbers and is not what it was when the run began, in words.

    Other versions are told, since they mostly differ by rounding; other code or weights are refused unless accepted.
    """
    if not (path / "partition.json").is_file():  # the run was killed before its first round
        return []
    changed = [f"{file} {what}" for file, what in usercode.changes(_recorded(path, "files")).items()]
    if changed and not accept:
        fix = "put it back as it was, or go on with what is there now: --accept-changes"
        raise CheckpointError(
            f"{path}: what this run began with is not what it would go on with: {'; '.join(changed)} ({fix})"
        )
    return changed + other_versions(path)


def _changed(path: Path, prepared: Prepared, done: int, what: Sequence[str]) -> dict[str, Any]:
    """What a run folder says of itself once it has gone on with something else, and since when."""
    then = _environment(path)
    before = found if isinstance(found := then.get("changes"), list) else []
    return then | {
        "net_sha256": prepared.net_sha256,
        "versions": record.versions(),
        "files": files_of(prepared.config),
        "changes": [*before, *(f"after round {done}: {each}" for each in what)],
    }


def _resumed_config(
    path: Path, data: Any, at: int | None, rounds: int | None, forget: Sequence[int], *, trust: bool
) -> Config:
    """The experiment of a run folder, perhaps with more ``rounds``, and with clients to ``forget``."""
    given = read_toml(path / "config.toml")
    if trust:
        usercode.vouch(given)
    table, _ = without_idle(given)  # which older versions wrote, too
    began = _environment(path).get("config_hash")
    edited = began is not None and began != config_hash(parse(table))
    notes = ["config.toml is not as it was when the run began; what follows is as it says now"] if edited else []
    notes += [f"{word}, so the rounds that follow may differ" for word in other_versions(path)]
    if at is not None:
        checkpoint.chosen(path / "checkpoints", at)
    if forget:
        table["algorithm"]["forget"] = _to_forget(table, forget)
    if rounds is not None:
        if table.get("local", {}).get("schedule") == "cosine" and rounds != table["rounds"]:
            why = f"the cosine schedule of this run was laid out for {table['rounds']} rounds"
            raise ConfigError([Fault("--rounds", why)])
        private = table.get("privacy", {})  # what is released of a closed form is released once
        if "epsilon" in private and "clip" in private and rounds != table["rounds"]:
            why = f"the noise of this run was calibrated for {table['rounds']} rounds (privacy.epsilon)"
            raise ConfigError([Fault("--rounds", why)])
        if at is None and rounds < max(checkpoint.rounds(path / "checkpoints"), default=0):
            raise ConfigError([Fault("--rounds", f"{rounds}, but this run has done more", "see --from")])
        table["rounds"] = rounds
    if not _is_handed_over(data) and table.get("data", {}).get("source") == InMemory.kind:
        raise CheckpointError(f"{path}: its data came from Python; resume it there: fedloom.resume(run_dir, data=...)")
    return parse(table, notes)


# Settings on which no upload depends.
_BESIDE = ("rounds", "name", "checkpoint", "evaluate", "engine", "data.limit_gb", "algorithm.forget")


def _promised(config: Config) -> dict[str, Any]:
    """The settings on which depends what the clients of a private run send, and so what its noise is worth."""
    table = as_table(config)
    flat = {name: value for name, value in table.items() if not isinstance(value, dict)}
    sections = {name: part for name, part in table.items() if isinstance(part, dict)}
    flat |= {f"{name}.{key}": value for name, part in sections.items() for key, value in part.items()}
    beside = {key for key in flat if key in _BESIDE or key.partition(".")[0] in _BESIDE}
    if config.privacy.epsilon is not None and config.privacy.clip is not None:
        beside.discard("rounds")  # for which the noise was calibrated
    return {key: value for key, value in flat.items() if key not in beside}


def _refuse_other_noise(path: Path, config: Config) -> None:
    """A private run goes on as it began.

    What was released cannot be taken back. With other settings the same noise would be added to other numbers, and the
    difference of the two would have none.
    """
    began, private = path / "privacy.json", config.privacy.on
    if not (path / "partition.json").is_file():  # killed before the first round: nothing was released
        return
    if not began.is_file():
        if private:
            what = "this run began without privacy, and has released what no noise can hide any more"
            raise ConfigError([Fault("privacy", what, "start a new run")])
        return
    try:
        then = dict(json.loads(began.read_text())["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "does not say with which settings this run began; it is damaged, or of an earlier version"
        raise CheckpointError(f"{began}: {what}: start a new run") from error
    now = _promised(config)
    faults = []
    for key in sorted(then.keys() | now.keys()):
        old, new = (found.get(key, "unset") for found in (then, now))
        if old != new:
            what = f"was {_worded(old)} when this private run began, and is {_worded(new)} now"
            faults.append(Fault(key, what, f"set it back to {_worded(old)}, or start a new run"))
    if faults:
        raise ConfigError(faults)


def _worded(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _key_of(path: Path, config: Config) -> Key | None:
    """The key from which the noise of this run is drawn, where that is a secret."""
    if not config.privacy.on or config.privacy.noise_from != "secret":
        return None
    key = record.read_key(path)
    if key is None and (path / "partition.json").is_file():
        what = "is gone, and with it the noise of this private run: no other noise may be added to the same numbers"
        raise CheckpointError(f"{path / 'noise.key'}: {what}; put it back, or start a new run")
    return key


def _privacy(prepared: Prepared) -> dict[str, Any]:
    """What a run folder says of its privacy, and the settings with which it must go on."""
    assert prepared.experiment.guard is not None
    return prepared.experiment.guard.described() | {"settings": _promised(prepared.config)}


def _environment(path: Path) -> dict[str, Any]:
    """What a run folder says of the machine and of the choices that were made; nothing if it cannot be read."""
    try:
        found = json.loads((path / "environment.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _recorded(path: Path, key: str) -> dict[str, str]:
    """A table of texts in what a run folder says of itself; nothing if it is not there, or is something else."""
    found = _environment(path).get(key, {})
    fits = isinstance(found, dict) and all(isinstance(value, str) for value in found.values())
    return found if fits else {}


def changed_files(path: Path) -> list[str]:
    """The files of the user's own, code and weights, that are no longer what a run folder was made with."""
    return list(usercode.changes(_recorded(path, "files")))


def other_versions(path: Path) -> list[str]:
    """The programs that decide numbers and are not of the version with which a run began, in words."""
    then, now = _recorded(path, "versions"), record.versions()
    differ = [name for name in ("fedloom", "torch", "numpy") if then.get(name, now[name]) != now[name]]
    return [f"{name} was {then[name]} when the run began and is {now[name]} now" for name in differ]


def _to_forget(table: dict[str, Any], clients: Sequence[int]) -> list[int]:
    """Whom a run is to forget, those who had been named before among them."""
    kind, before = table["algorithm"]["kind"], table["algorithm"].get("forget", [])
    if kind != "analytic":
        why = f"what a client gave cannot be taken out of {kind} exactly"
        raise ConfigError([Fault("--forget", why, "take algorithm.kind=analytic, or run it without the client")])
    return list(dict.fromkeys([*before, *clients]))


_FAR = 10_000  # rounds in which a client should have come again


def _until_forgotten(
    config: Config, exp: Experiment, path: Path, at: int | None, forget: Sequence[int], *, given: bool
) -> Config:
    """The experiment with as many rounds as it takes until these clients have come once more."""
    folder, store = path / "checkpoints", RamStore(exp.federation.clients)
    state = checkpoint.load(folder, begin(exp), store, at=at, blank=_blank(exp)).state
    alg: Any = exp.algorithm
    if why := alg.cannot_forget(state.server, forget):
        raise ConfigError([Fault("--forget", why)])
    missing, needed = set(forget), state.round
    while missing and needed < state.round + _FAR:
        missing -= set(exp.present(needed).drawn.ids.tolist())
        needed += 1
    if missing:
        raise ConfigError([Fault("--forget", f"client {min(missing)} does not come in the next {_FAR:,} rounds")])
    if given and config.basics.rounds < needed:
        why = f"the clients to be forgotten come until round {needed} (got {config.basics.rounds})"
        raise ConfigError([Fault("--rounds", why, f"give {needed}, or leave it out")])
    rounds = max(config.basics.rounds, needed)
    return config._replace(basics=config.basics.model_copy(update={"rounds": rounds}))


def _prepared(config: Config, root: Path, arrays: Arrays | None, key: Key | None = None) -> Prepared:
    """The experiment, ready to run, as one of however many ranks there are; ``key``: of its noise, if it has one."""
    ranks = joined()
    if ranks.size == 1:
        return prepare(config, root, arrays, key)
    key = noise.from_text(ranks.told(noise.as_text(key or noise.drawn())))
    with ranks.agreed():
        take_device(pick_device(config.engine.device))
        prepared = prepare(config, root, arrays, key)
        exp = replace(prepared.experiment, ranks=ranks)
        if config.engine.store == "disk" and exp.keeps_state(begin(exp)):
            what = f"'disk' is for one process: each of {ranks.size} ranks keeps the states of its own clients"
            raise ConfigError([Fault("engine.store", what, "set engine.store=ram, or run without ranks")])
        shared = prepared.shared.described()
        here = [config_hash(config), shared["data_sha256"], shared["sha256"], prepared.net_sha256]
    there = ranks.told(here)
    with ranks.agreed():
        for mine, first, what in zip(here, there, ("experiment", "data", "partition", "net"), strict=True):
            if mine != first:
                raise DataError(f"the {what} is not that of rank 0 ({mine[:12]}, there {first[:12]})")
    return prepared._replace(experiment=exp)


@contextmanager
def _held(path: Path | None, opened: Callable[[Path], RunFolder], ranks: Ranks) -> Iterator[RunFolder | None]:
    """The run folder, where there is one, for as long as the run lasts; only rank 0 has it."""
    folder = None
    with ranks.agreed(), _storage(path):
        if path is not None and ranks.leads:
            folder = opened(path)
    try:
        yield folder
    finally:
        if folder is not None:
            folder.close()


def _drive(prepared: Prepared, folder: RunFolder | None, how: Resumption | None, listener: Listener) -> History:
    """The loop over rounds, from the first one or as a run that goes on."""
    told = prepared.experiment.ranks.told(str(folder.path) if folder else None)
    path = Path(told) if told is not None else None
    try:
        with _storage(path):
            return _rounds(prepared, folder, path, how, listener)
    except LostRankError as error:
        raise LostRankError(f"{error}{_intact(path)}") from error
    except DivergedError:
        if folder is not None:
            with _storage(path):
                folder.end()
        raise


def _rounds(
    prepared: Prepared, folder: RunFolder | None, path: Path | None, how: Resumption | None, listener: Listener
) -> History:
    """The rounds, on each rank; ``path`` is the run folder, where there is one, and ``folder`` only rank 0 has."""
    exp, config, ranks = prepared.experiment, prepared.config, prepared.experiment.ranks
    store = _store(config, exp, folder.path if folder else None)
    state, records, told = _entry(prepared, store, folder, path, how)
    prepared = prepared._replace(config=config._replace(notes=(*config.notes, *told)))
    listener.started(prepared, path, state.round)
    earlier = folder.spent() if folder else 0.0
    saved, clock, newest = state.round, time.perf_counter(), records[-1] if records else {}
    with _interruptible(listener, ranks) as stop:
        if not records or (state.round == exp.rounds and not _is_judged(records[-1], state.round)):
            newest = _evaluated(exp, state, store)
            records.append(newest)
            if folder:
                folder.metrics(newest)
        coming, said = rounds(exp, state, store), 0
        while state.round < exp.rounds:
            began = time.perf_counter()
            state, excluded, found, did, _ = next(coming)
            trained = time.perf_counter()
            lines = _lines(exp, state, store, excluded, found)
            records += lines
            newest = lines[-1] if lines and _is_judged(lines[-1], state.round) else newest
            evaluated = time.perf_counter()
            if folder:
                for line in lines:
                    folder.metrics(line)
                if exp.evaluate.work:
                    folder.work(state.round, did)
            ended = ranks.anybody(stop.is_set()) or state.round == exp.rounds
            if path and (ended or state.round - saved >= config.checkpoint.every):
                checkpoint.save(path / "checkpoints", state, store, folder.lengths() if folder else {}, ranks)
                saved = state.round
            clients = len(exp.present(state.round - 1).drawn.ids)
            now = time.perf_counter()
            if folder:
                folder.timing(Timing(state.round, trained - began, evaluated - trained, now - evaluated, clients))
            late = sum(each.late for each in did)
            notes, said = captured.built(exp.task).notes[said:], len(captured.built(exp.task).notes)
            listener.advanced(Progress(state.round, exp.rounds, newest, excluded, clients, now - began, late, notes))
            if ended and state.round < exp.rounds:
                raise InterruptedRun(path, state.round)
    model = _model(exp, state, store)
    seconds = earlier + time.perf_counter() - clock
    history = History(
        algorithm=config.kinds["algorithm"],
        rounds=state.round,
        seconds=seconds,
        records=records,
        model=exp.task.module(*model) if model is not None else None,
        run_dir=path,
    )
    if path:
        _finish(prepared, folder, state, store, history, model)
    return history


def _entry(
    prepared: Prepared, store: ClientStore, folder: RunFolder | None, path: Path | None, how: Resumption | None
) -> tuple[RunState, list[dict[str, Any]], list[str]]:
    """Where the loop enters: the first round, or a checkpoint with the metrics written up to it; and what to tell."""
    exp = prepared.experiment
    state, records, notes = begin(exp), list[dict[str, Any]](), list[str]()
    if path is None or how is None:
        return state, records, notes
    loaded, place = checkpoint.Loaded(state, {}), path / "checkpoints"
    with exp.ranks.agreed():
        if how.at is not None or checkpoint.rounds(place):
            loaded = checkpoint.load(place, state, store, at=how.at, ranks=exp.ranks, blank=_blank(exp))
            _same_ledger(path, exp, loaded.state)
        damage = folder.fault(loaded.lengths) if folder is not None else ""
        if damage and not how.repair:
            assert folder is not None
            raise CheckpointError(f"{damage}{_ways_out(folder, loaded.state.round)}")
    with exp.ranks.agreed():
        if folder is not None:
            folder.unseal()
            if damage:
                loaded, *notes = _repaired(folder, loaded)
            records = _accepted(prepared, folder, loaded, how)
    return loaded.state, list(exp.ranks.told(records)), notes


def _ways_out(folder: RunFolder, done: int) -> str:
    """How a run goes on whose metrics are damaged before the checkpoint after ``done`` rounds."""
    known = checkpoint.readable(folder.checkpoints).items()
    before = [r for r, meta in known if r < done and not folder.fault(meta["lengths"])]
    back = [f"fedloom resume {folder.path} --from {r} goes back to before the damage" for r in before[-1:]]
    return "; ".join(["", *back, f"fedloom resume {folder.path} --repair goes on without the damaged lines"])


def _repaired(folder: RunFolder, loaded: checkpoint.Loaded) -> tuple[checkpoint.Loaded, str]:
    """Leave damaged lines out of the metrics, and say so.

    A crash on the way leaves metrics and checkpoint at odds, which is again damage that can be repaired.
    """
    kept, all_of_them = folder.sound(loaded.lengths), len(loaded.lengths.get(f"{record.METRICS} lines", "")) // 8
    lengths = record.Sums(kept).told()
    checkpoint.retell(folder.checkpoints, loaded.state.round, lengths)
    folder.mend(kept)
    told = f"{len(kept)} of {all_of_them} lines are kept; what was there is in {record.DAMAGED}"
    return loaded._replace(lengths=lengths), f"metrics.jsonl was damaged: {told}"


def _accepted(
    prepared: Prepared, folder: RunFolder, loaded: checkpoint.Loaded, how: Resumption
) -> list[dict[str, Any]]:
    """The metrics up to a checkpoint that the run goes on from; what comes after it is forgotten.

    Settings that were revised come last, so that a crash on the way leaves the run as it was, at an earlier round.
    """
    checkpoint.forget_after(folder.checkpoints, loaded.state.round)
    records = _rewound(prepared.experiment, folder, loaded)
    if how.revised:
        record.write_text(folder.path / "config.toml", as_toml(prepared.config))
    if not (folder.path / "partition.json").is_file():  # the run was killed before its first round
        _lay_out(folder, prepared)
    elif how.revised:
        folder.write("environment.json", _environment(folder.path) | {"config_hash": config_hash(prepared.config)})
        if prepared.experiment.guard is not None:
            folder.write("privacy.json", _privacy(prepared))
    if how.changes:
        folder.write("environment.json", _changed(folder.path, prepared, loaded.state.round, how.changes))
    folder.seal()
    return records


def _blank(exp: Experiment) -> Any:
    """What is kept of one client, for its form."""
    return exp.blank(exp.algorithm.send(exp.algorithm.init(exp.task.w0)))


def _same_ledger(path: Path, exp: Experiment, state: RunState) -> None:
    """Refuse a run whose rounds to come are not of the kind of those that have been accounted for."""
    then, now = state.ledger, None if exp.guard is None else exp.guard.opened()
    if then is None and now is None:
        return
    if then is None or now is None or len(then.uses) != len(now.uses):
        raise CheckpointError(f"{path}: its checkpoint has no ledger of what this privacy has spent; start a new run")
    old = {**then.release._asdict(), "delta": then.delta, "reach": then.reach}
    new = {**now.release._asdict(), "delta": now.delta, "reach": now.reach}
    for name, value in old.items():
        if value != new[name]:
            what = f"{name} of its noise was {value}, and would be {new[name]} now"
            raise CheckpointError(f"{path}: {what}; go on with the settings and the dp-accounting it began with")


def _rewound(exp: Experiment, folder: RunFolder, loaded: checkpoint.Loaded) -> list[dict[str, Any]]:
    """The metrics up to a checkpoint, once the run folder has forgotten those after it."""
    folder.rewind(loaded.lengths, loaded.state.round)
    if not loaded.state.round:
        return []
    records = record.read_metrics(folder.path)
    done = loaded.state.round
    if records and _is_judged(records[-1], done) and not exp.evaluate.due(done, exp.rounds):
        # The run ended here once and is to go on: had it never ended, this evaluation would not be there. The
        # checkpoint is told first, so that a crash leaves it with what it needs.
        shorter = folder.before_last()
        checkpoint.retell(folder.checkpoints, done, shorter)
        folder.rewind(shorter, done)
        records.pop()
    return records


def _evaluated(
    exp: Experiment,
    state: RunState,
    store: ClientStore,
    excluded: tuple[int, ...] = (),
    found: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """The line of an evaluation, with what was ``found`` during the round."""
    metrics = evaluate(exp, state, store)
    bad = ", ".join(name for name, value in (metrics | dict(found)).items() if not math.isfinite(value))
    if bad:
        lr = exp.local.lr_at(max(0, state.round - 1), exp.rounds)
        ids = exp.present(max(0, state.round - 1)).drawn.ids.tolist()
        raise DivergedError(
            f"round {state.round}: the evaluation is not finite ({bad}); clients of the round: {names_of(ids)}; "
            f"the local learning rate was {lr:g} (try local.lr={lr / 10:g}, or local.clip=10)"
        )
    line = {
        "round": state.round,
        **metrics,
        "bytes/up": state.up,
        "bytes/down": state.down,
        "bytes/busiest": state.busiest,
        "work/gradients": state.gradients,
        "time/simulated": state.seconds,
        **_spent(exp, state),
    }
    # JSON has no word for a number that is not finite, such as the time of devices that are slow beyond measure.
    line = {name: value for name, value in line.items() if math.isfinite(value)}
    return line | dict(found) | ({"excluded": list(excluded)} if excluded else {})


def _spent(exp: Experiment, state: RunState) -> dict[str, float]:
    """Epsilon so far, where uploads are private."""
    if exp.guard is None or state.ledger is None:
        return {}
    return {exp.guard.metric: state.ledger.epsilon()}


def _lines(
    exp: Experiment, state: RunState, store: ClientStore, excluded: tuple[int, ...], found: dict[str, float]
) -> list[dict[str, Any]]:
    """What is recorded of a round: its evaluation, or only who was excluded, or nothing.

    Where a run ends between two evaluations, the last one has a line of its own, which can be taken away
    again if the run goes on.
    """
    if state.round % exp.evaluate.every == 0:
        return [_evaluated(exp, state, store, excluded, found)]
    lines: list[dict[str, Any]] = [{"round": state.round, "excluded": list(excluded)}] if excluded else []
    if exp.evaluate.due(state.round, exp.rounds):
        lines.append(_evaluated(exp, state, store, (), found))
    return lines


def _is_judged(line: dict[str, Any], round_: int) -> bool:
    """Whether a line is the evaluation after so many rounds."""
    return line["round"] == round_ and "bytes/up" in line


def _model(exp: Experiment, state: RunState, store: ClientStore) -> tuple[Tensor, Tensor] | None:
    """The common model of a finished run: the server's, or the average of a network's nodes."""
    if not (exp.algorithm.communicates and exp.algorithm.common):
        return None
    if exp.is_network:
        left = living(exp, state).nonzero().squeeze(1)
        total = sum((part.w.double().sum(0) for part in everyones_models(exp, state, store, left)), torch.zeros(()))
        return (total / len(left)).to(exp.task.w0.dtype), state.buffers[left.to(exp.device)].mean(0)
    return exp.algorithm.judged(state.server), state.buffers


def _everyone(exp: Experiment, state: RunState, store: ClientStore) -> Iterator[Judged]:
    return everyones_models(exp, state, store, torch.arange(exp.federation.clients))


def _finish(
    prepared: Prepared,
    folder: RunFolder | None,
    state: RunState,
    store: ClientStore,
    history: History,
    model: tuple[Tensor, Tensor] | None,
) -> None:
    """What a run folder holds after the last round; other ranks than 0 have a part in it, and write nothing."""
    exp = prepared.experiment
    parts = list(_everyone(exp, state, store)) if model is None else []
    if folder is None:
        return
    notes = {"algorithm": history.algorithm, "round": str(state.round), "config_hash": config_hash(prepared.config)}
    if model is not None:
        checkpoint.save_model(folder.path / "model.safetensors", exp.task.tensors(*model), notes)
    else:
        ids = torch.cat([p.ids for p in parts])
        order = ids.argsort()
        tensors = {"ids": ids[order], "w": torch.cat([p.w for p in parts])[order.to(exp.device)]}
        layout = json.dumps(
            {name: list(x.shape) for name, x in exp.task.tensors(exp.task.w0, exp.task.buffers0).items()}
        )
        checkpoint.save_model(folder.path / "personal.safetensors", tensors, notes | {"layout": layout})
    if exp.captures:
        folder.write("steps.json", captured.built(exp.task)._asdict())
    disk.write_bytes(folder.path / "curves.png", history.picture())
    folder.end(history.as_json())


def _store(config: Config, exp: Experiment, folder: Path | None) -> ClientStore:
    if config.engine.store == "disk":
        return DiskStore(folder / "clients" if folder is not None else None, exp.federation.clients)
    return RamStore(exp.federation.clients)


def _lay_out(folder: RunFolder, prepared: Prepared) -> None:
    """What a run folder holds before the first round."""
    folder.write("environment.json", record.environment(prepared.experiment.device) | _choices(prepared))
    shared, topology, exp = prepared.shared, prepared.config.topology, prepared.experiment
    if exp.guard is not None:
        if not exp.guard.key.public:
            record.write_key(folder.path, exp.guard.key)
        folder.write("privacy.json", _privacy(prepared))
    if topology is not None:
        folder.write(
            "topology.json", described(topology, shared.clients, exp.seed, exp.federation.train.sizes.tolist())
        )
        disk.write_bytes(folder.path / "topology.png", picture(topology, shared.clients, exp.seed))
    # Last, since it says that all of this is there.
    record.save_partition(folder, shared.owner, shared.held_out, shared.described())


def described(topology: Topology, nodes: int, seed: int, sizes: Iterable[int] | None = None) -> dict[str, Any]:
    """What a run folder says of its network: the numbers, and the graph of the first round."""
    found = facts(topology, nodes, seed, None if sizes is None else tuple(sizes))
    return found._asdict() | {"first_round": topology.edges(nodes, Moment(seed)).tolist()}


def draw_topology(topology: Topology, nodes: int, seed: int, path: Path) -> None:
    """The graph of the first round as a picture."""
    from fedloom.report.topology import draw

    draw(topology.edges(nodes, Moment(seed)), nodes, path, **_shown(topology, nodes))


def picture(topology: Topology, nodes: int, seed: int) -> bytes:
    """The same as a PNG file."""
    from fedloom.report.topology import rendered

    return rendered(topology.edges(nodes, Moment(seed)), nodes, **_shown(topology, nodes))


def _shown(topology: Topology, nodes: int) -> dict[str, Any]:
    """How a graph is drawn."""
    rows = shape_of(nodes, topology.rows)[0] if isinstance(topology, Grid) else 0
    when = ", first round" if topology.redrawn else ""
    return {"title": f"{topology.kind}, {nodes} nodes{when}", "directed": topology.directed, "rows": rows}


def _choices(prepared: Prepared) -> dict[str, Any]:
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
    code = usercode.files([*config.kinds.values(), config.local.optimizer])
    return code | {path: disk.digest(Path(path)) for path in weights}


def _message(exp: Experiment) -> dict[str, dict[str, int]]:
    """What a client is sent and sends in the first round, in bytes of each type; see the metrics for the whole."""
    if not exp.algorithm.communicates:
        return {}
    state = begin(exp)
    if exp.is_network:
        state = state._replace(server=tree.take(state.server, 0), buffers=state.buffers[0])
    with torch.no_grad():
        # In a network nobody but the neighbours sends anything, and each message is counted at its sender.
        parts = {"down": () if exp.is_network else exp.algorithm.send(state.server), "up": specimen(exp, state)}
    return {way: _by_type(part) for way, part in parts.items()}


def _by_type(message: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for leaf in tree.leaves(message):
        name = str(leaf.dtype).removeprefix("torch.")
        found[name] = found.get(name, 0) + leaf.numel() * leaf.element_size()
    return {name: size for name, size in found.items() if size}


def _same_data(path: Path, prepared: Prepared) -> None:
    """Refuse to go on with other data than the run began with."""
    try:
        then = json.loads((path / "partition.json").read_text())
        pairs = {key: (str(then[key]), prepared.shared.described()[key]) for key in ("data_sha256", "sha256")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path / 'partition.json'}: is damaged ({error})") from error
    for key, what in (("data_sha256", "the data"), ("sha256", "the partition")):
        old, new = pairs[key]
        if old != new:
            raise CheckpointError(f"{path}: {what} is not what this run began with ({old[:12]}, now {new[:12]})")


def _same_net(path: Path, prepared: Prepared) -> None:
    """Refuse to go on with another net than the run began with, where parts of it are not in the checkpoint."""
    model, old, new = prepared.config.model, str(_environment(path).get("net_sha256", "")), prepared.net_sha256
    if (model.weights or model.freeze) and old and old != new:
        where = f" (model.weights: {model.weights})" if model.weights else ""
        raise CheckpointError(f"{path}: the net{where} is not what this run began with ({old[:12]}, now {new[:12]})")


def _is_handed_over(data: Any) -> bool:
    """Whether ``data`` is the data itself, and not where to find it."""
    return isinstance(data, Arrays | Dataset) or (isinstance(data, tuple) and len(data) == 2)


def _as_arrays(data: Any, seed: int) -> Arrays | None:
    if isinstance(data, Arrays) or not _is_handed_over(data):
        return data if isinstance(data, Arrays) else None
    return from_torch(data, seed=seed) if isinstance(data, Dataset) else from_arrays(*data, seed=seed)


def _root(data_root: str | Path | None) -> Path:
    return Path(data_root) if data_root is not None else default_root()


@contextmanager
def _storage(path: Path | None) -> Iterator[None]:
    """A disk that is full or refuses a write ends the run with one clear error."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigError([Fault(str(path), "a name in this path is too long", "choose a shorter one")]) from error
        where = path or "a temporary folder"
        raise StorageError(f"writing below {where} failed: {error.strerror}{_intact(path)}") from error


def _intact(path: Path | None) -> str:
    """What is left of a run that ends early, in words."""
    saved: dict[int, Any] = {}
    with suppress(OSError):  # what cannot be read is of no help
        saved = checkpoint.readable(path / "checkpoints") if path is not None else {}
    return f"; the last checkpoint is intact: fedloom resume {path}" if saved else ""


@contextmanager
def _interruptible(listener: Listener, ranks: Ranks) -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM finish the round, so that it can be saved; a second one stops at once.

    Who starts several ranks may pass on a signal that has reached them already: that is not a second one.
    """
    stop, asked = threading.Event(), 0.0
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(_number: int, _frame: Any) -> None:
        nonlocal asked
        if stop.is_set() and (ranks.size == 1 or time.perf_counter() - asked > _ONE_SIGNAL):
            raise KeyboardInterrupt
        if stop.is_set():
            return
        asked = time.perf_counter()
        stop.set()
        listener.stopping()

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)
