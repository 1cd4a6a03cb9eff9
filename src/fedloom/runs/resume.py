"""Continuing a run from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.core import usercode
from fedloom.core.errors import (
    CheckpointError,
    ConfigError,
    Fault,
)
from fedloom.engine import checkpoint
from fedloom.engine.ranks import joined
from fedloom.runs.changes import changed_data, changes_since, is_private, key_of, refuse_other_net, refuse_other_noise
from fedloom.runs.entry import Resumption
from fedloom.runs.environment import other_versions, read_environment
from fedloom.runs.folder import held, opened
from fedloom.runs.forget import clients_to_forget, until_forgotten
from fedloom.runs.in_memory import GivenNet, InMemory, as_arrays, is_handed_over
from fedloom.runs.loop import Listener, SilentListener, drive
from fedloom.runs.origin import from_its_folder, root_of
from fedloom.runs.overrides import without_idle
from fedloom.runs.prepare import prepare_on_ranks
from fedloom.runs.result import History
from fedloom.runs.settings import Config, config_hash, parse, read_toml
from fedloom.runs.spent import with_spent
from fedloom.runs.tracking import refuse_missing_trackers

_ANEW = "or start a new run with fedloom run"


def resume(
    run_dir: str | Path,
    *,
    data: Any = None,
    model: nn.Module | None = None,
    data_root: str | Path | None = None,
    at: int | None = None,
    rounds: int | None = None,
    forget: Sequence[int] = (),
    repair: bool = False,
    trust: bool = False,
    accept_changes: bool = False,
    alike: int = 1,
    listener: Listener | None = None,
) -> History:
    """Continue a run; ``fedloom.resume`` is this with a display, and explains what it is given."""
    root, ranks = root_of(Path(run_dir), data_root), joined()
    with from_its_folder(Path(run_dir)) as path, held(path, opened, ranks) as folder:
        with ranks.agreed():
            changed = changes_since(path, accept_changes)
            config = _resumed_config(path, (data, model), at, rounds, forget, trust=trust)._replace(alike=alike)
            refuse_missing_trackers(config)
            refuse_other_noise(path, config)
            key = key_of(path, config)
        arrays = as_arrays(data, config.basics.seed, numbers=config.task.is_regression)
        prepared = prepare_on_ranks(config, root, arrays, key)
        if forget:
            with ranks.agreed():
                config = until_forgotten(config, prepared.experiment, path, at, forget, given=rounds is not None)
            prepared = prepare_on_ranks(config, root, arrays, key)
        other_data: list[str] = []
        with ranks.agreed():
            if (path / "partition.json").is_file():
                other_data = changed_data(path, prepared, accept_changes)
                if not accept_changes or is_private(path):
                    refuse_other_net(path, prepared)
                prepared = with_spent(path, prepared)
        revised = rounds is not None or bool(forget)
        how = Resumption(at, revised, repair, (*changed, *other_data), other_data=bool(other_data))
        return drive(prepared, folder, how, listener or SilentListener())


def _resumed_config(
    path: Path,
    handed: tuple[Any, nn.Module | None],
    at: int | None,
    rounds: int | None,
    forget: Sequence[int],
    *,
    trust: bool,
) -> Config:
    """The experiment of a run folder, perhaps with more ``rounds``, and with clients to ``forget``."""
    given = read_toml(path / "config.toml")
    if trust:
        usercode.vouch(given)
    table, _ = without_idle(given)  # which older versions wrote, too
    table |= {"model": GivenNet.of(handed[1])} if handed[1] is not None else {}
    began = read_environment(path).get("config_hash")
    edited = began is not None and began != config_hash(parse(table))
    changed = "config.toml has changed since the run began, or an earlier version wrote it; its current content is used"
    notes = [changed] if edited else []
    notes += [f"{word}, so the rounds that follow may differ" for word in other_versions(path)]
    if at is not None:
        checkpoint.round_to_load(path / "checkpoints", at)
    if forget:
        table["algorithm"]["forget"] = clients_to_forget(table, forget)
    if rounds is not None:
        _check_rounds(path, table, rounds, at)
        table["rounds"] = rounds
    if not is_handed_over(handed[0]) and table.get("data", {}).get("source") == InMemory.kind:
        raise CheckpointError(
            f"{path}: its data was passed in Python; resume it in Python: fedloom.resume(run_dir, data=...)"
        )
    config = parse(table, notes)
    done = max(checkpoint.saved_rounds(path / "checkpoints"), default=0)
    if rounds is None and at is None and config.basics.rounds < done:
        what = f"is {config.basics.rounds} in config.toml, but this run has done {done}"
        raise ConfigError([Fault("rounds", what, "set it back, or begin at an earlier round: see --from")])
    return config


def _check_rounds(path: Path, table: Mapping[str, Any], rounds: int, at: int | None) -> None:
    """Refuse another number of rounds where settings were made for the one that the run has."""
    if table.get("local", {}).get("schedule") == "cosine" and rounds != table["rounds"]:
        why = f"the cosine schedule of this run was planned for {table['rounds']} rounds"
        raise ConfigError([Fault("--rounds", why, f"leave it out, {_ANEW}")])
    private = table.get("privacy", {})  # a closed form releases its sums once
    if "epsilon" in private and "clip" in private and rounds != table["rounds"]:
        why = f"the noise of this run was calibrated for {table['rounds']} rounds (privacy.epsilon)"
        raise ConfigError([Fault("--rounds", why, f"leave it out, {_ANEW}")])
    done = max(checkpoint.saved_rounds(path / "checkpoints"), default=0)
    if at is None and rounds < done:
        raise ConfigError([Fault("--rounds", f"{rounds}, but this run has done {done}", "see --from")])
