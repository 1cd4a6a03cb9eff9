"""Where the loop begins: at the first round, or at a checkpoint with the metrics written up to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fedloom.core import disk
from fedloom.core.errors import (
    CheckpointError,
)
from fedloom.engine import checkpoint
from fedloom.engine.rounds import begin
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.store import ClientStore
from fedloom.runs.changes import privacy_record, refuse_other_ledger, with_changes
from fedloom.runs.environment import choices, environment, keep_code, read_environment
from fedloom.runs.evaluation import evaluates
from fedloom.runs.folder import RunFolder, read_metrics, save_partition, write_key, write_text
from fedloom.runs.network import described, picture
from fedloom.runs.origin import whereabouts
from fedloom.runs.prepare import Prepared
from fedloom.runs.repair import repaired, ways_out
from fedloom.runs.settings import as_toml, config_hash
from fedloom.runs.spent import remember_spent, rewrite_privacy


class Resumption(NamedTuple):
    """How a run is resumed."""

    at: int | None = None  # the round of the checkpoint; None: the newest
    revised: bool = False  # with settings that are not those of its config.toml
    repair: bool = False  # without lines of metrics.jsonl that are damaged
    changes: tuple[str, ...] = ()  # what has changed and may change numbers, in words
    other_data: bool = False  # whether the data is among them


def enter(
    prepared: Prepared, store: ClientStore, folder: RunFolder | None, path: Path | None, how: Resumption | None
) -> tuple[RunState, list[dict[str, Any]], list[str]]:
    """Where the loop starts: the first round, or a checkpoint with the metrics up to it; and notes for the user."""
    exp = prepared.experiment
    state, records, notes = begin(exp), list[dict[str, Any]](), list[str]()
    if path is None or how is None:
        return state, records, notes
    loaded, place = checkpoint.Loaded(state, {}), path / "checkpoints"
    with exp.ranks.agreed():
        if how.at is not None or checkpoint.saved_rounds(place):
            loaded = checkpoint.load_state(place, state, store, at=how.at, ranks=exp.ranks, blank=blank_client(exp))
            refuse_other_ledger(path, exp, loaded.state)
        damage = folder.fault(loaded.lengths) if folder is not None else ""
        if damage and not how.repair:
            assert folder is not None
            raise CheckpointError(f"{damage}{ways_out(folder, loaded.state.round)}")
    with exp.ranks.agreed():
        if folder is not None:
            folder.unseal()
            if damage:
                loaded, *notes = repaired(folder, loaded)
            records = _accepted(prepared, folder, loaded, how)
    return loaded.state, list(exp.ranks.broadcast(records)), notes


def _accepted(
    prepared: Prepared, folder: RunFolder, loaded: checkpoint.Loaded, how: Resumption
) -> list[dict[str, Any]]:
    """The metrics up to the checkpoint from which the run continues; later ones are dropped.

    Settings that were revised come last, so that a crash on the way leaves the run as it was, at an earlier round.
    """
    remember_spent(folder, prepared, loaded.state)
    checkpoint.forget_after(folder.checkpoints, loaded.state.round)
    records = _rewound(prepared.experiment, folder, loaded)
    if how.revised:
        write_text(folder.path / "config.toml", as_toml(prepared.config))
    if not (folder.path / "partition.json").is_file():  # the run was killed before its first round
        write_first_files(folder, prepared)
    elif how.revised:
        folder.write("environment.json", read_environment(folder.path) | {"config_hash": config_hash(prepared.config)})
        rewrite_privacy(folder, prepared)
    if how.other_data:
        write_partition(folder, prepared)
    if how.changes:
        keep_code(folder.path / f"code-after-round-{loaded.state.round}", prepared.config)
        folder.write("environment.json", with_changes(folder.path, prepared, loaded.state.round, how.changes))
    folder.seal()
    return records


def _rewound(exp: Experiment, folder: RunFolder, loaded: checkpoint.Loaded) -> list[dict[str, Any]]:
    """The metrics up to a checkpoint, after those that follow it are dropped from the run folder."""
    folder.rewind(loaded.lengths, loaded.state.round)
    if not loaded.state.round:
        return []
    records = read_metrics(folder.path)
    done = loaded.state.round
    if records and evaluates(records[-1], done) and not exp.evaluate.due(done, exp.rounds):
        # The run ended here before and continues: had it never ended, this evaluation would not exist. The
        # checkpoint is written first, so that a crash leaves it with what it needs.
        shorter = folder.before_last()
        checkpoint.rewrite_lengths(folder.checkpoints, done, shorter)
        folder.rewind(shorter, done)
        records.pop()
    elif records and evaluates(records[-1], done) and done == exp.rounds:
        records.append(_last_line(exp, folder, records.pop()))
    return records


def _last_line(exp: Experiment, folder: RunFolder, line: dict[str, Any]) -> dict[str, Any]:
    """The evaluation with which a run ends at this checkpoint; it includes all that a private run has spent."""
    name, spent = ("", 0.0) if exp.guard is None else (exp.guard.metric, exp.guard.spent)
    if line.get(name, spent) >= spent:
        return line
    shorter = folder.before_last()
    checkpoint.rewrite_lengths(folder.checkpoints, line["round"], shorter)
    folder.rewind(shorter, line["round"])
    folder.metrics(line | {name: spent})
    checkpoint.rewrite_lengths(folder.checkpoints, line["round"], folder.lengths())
    return line | {name: spent}


def blank_client(exp: Experiment) -> Any:
    """The kept state of one client, for its structure."""
    return exp.blank(exp.algorithm.send(exp.algorithm.init(exp.task.w0)))


def write_first_files(folder: RunFolder, prepared: Prepared) -> None:
    """Write what a run folder contains before the first round."""
    began = environment(prepared.experiment.device) | whereabouts(prepared.root) | choices(prepared)
    folder.write("environment.json", began)
    topology, exp = prepared.config.topology, prepared.experiment
    if exp.guard is not None:
        if not exp.guard.key.public:
            write_key(folder.path, exp.guard.key)
        folder.write("privacy.json", privacy_record(prepared))
    if topology is not None:
        folder.write(
            "topology.json", described(topology, prepared.shared.clients, exp.seed, exp.federation.train.sizes.tolist())
        )
        disk.write_bytes(folder.path / "topology.png", picture(topology, prepared.shared.clients, exp.seed))
    keep_code(folder.path / "code", prepared.config)
    # Last, since it says that everything else is complete.
    write_partition(folder, prepared)


def write_partition(folder: RunFolder, prepared: Prepared) -> None:
    """What a run folder records of the data: its columns, the client of each row, and the fingerprints."""
    shared = prepared.shared
    if shared.arrays.recipe is not None:
        folder.write("columns.json", shared.arrays.recipe.model_dump(mode="json"))
    save_partition(folder, shared.owner, shared.held_out, shared.validation, shared.counts(), shared.described())
