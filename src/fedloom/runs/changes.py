"""What must be unchanged when a run is resumed: code, weights, data, net, and the settings of a private run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.core import usercode
from fedloom.core.errors import (
    CheckpointError,
    ConfigError,
    Fault,
)
from fedloom.engine.state import Experiment, RunState
from fedloom.runs.environment import _recorded, code_hash, files_of, other_versions, read_environment, versions
from fedloom.runs.find import KEYS
from fedloom.runs.folder import read_key
from fedloom.runs.prepare import Prepared
from fedloom.runs.settings import SECTIONS, Config, as_table, idle_in
from fedloom.trust.noise import Key


def changes_since(path: Path, accept: bool) -> list[str]:
    """What has changed since the run began and may change its numbers, in words.

    Other versions are reported, as they mostly differ by rounding; other code or weights are refused unless accepted.
    A private run never continues with them: it would add the noise of rounds that it may have released already to other
    numbers, and the difference of the two has no noise.
    """
    if not (path / "partition.json").is_file():  # the run was killed before its first round
        return []
    changed = [f"{file} {what}" for file, what in usercode.changes(_recorded(path, "files")).items()]
    private = is_private(path)
    if changed and (private or not accept):
        fix = "restore it, or continue with the new version: --accept-changes"
        if private:
            fix = "restore it, or start a new run: a private run cannot continue with different code or weights"
        raise CheckpointError(f"{path}: cannot resume: changed since the run started: {'; '.join(changed)} ({fix})")
    return changed + other_versions(path)


def is_private(path: Path) -> bool:
    """Whether the run of this folder began with privacy."""
    return (path / "privacy.json").is_file()


def with_changes(path: Path, prepared: Prepared, done: int, what: Sequence[str]) -> dict[str, Any]:
    """What a run folder records of changes that it was resumed with, and since when."""
    then = read_environment(path)
    before = found if isinstance(found := then.get("changes"), list) else []
    return then | {
        "net_sha256": prepared.net_sha256,
        "versions": versions(),
        "code": code_hash(),
        "files": files_of(prepared.config),
        "changes": [*before, *(f"after round {done}: {each}" for each in what)],
    }


def changed_data(path: Path, prepared: Prepared, accept: bool) -> list[str]:
    """How the data or its partition has changed since the run began, in words; refused unless accepted.

    A private run never continues with other data. Another number of clients is another run.
    """
    now = prepared.shared.described()
    try:
        then = json.loads((path / "partition.json").read_text())
        pairs = {key: (str(then[key]), str(now[key])) for key in ("data_sha256", "sha256", "clients")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path / 'partition.json'}: is damaged ({error})") from error
    named = (("data_sha256", "the data"), ("sha256", "the partition"))
    found = [(what, *pairs[key]) for key, what in named if pairs[key][0] != pairs[key][1]]
    words = [f"{what} has changed since this run began ({old[:12]}, now {new[:12]})" for what, old, new in found]
    if found and pairs["clients"][0] != pairs["clients"][1]:
        raise CheckpointError(
            f"{path}: {words[0]}: there were {then['clients']} clients, now there are {now['clients']}"
        )
    if found and prepared.experiment.guard is not None:
        raise CheckpointError(f"{path}: {words[0]}; a private run cannot continue with different data")
    if found and not accept:
        fix = "restore it, or continue with the new version: --accept-changes"
        raise CheckpointError(f"{path}: {words[0]} ({fix})")
    return words


def refuse_other_net(path: Path, prepared: Prepared) -> None:
    """Refuse to continue with another net if parts of it are not in the checkpoint."""
    model, old, new = prepared.config.model, str(read_environment(path).get("net_sha256", "")), prepared.net_sha256
    if (model.weights or model.freeze) and old and old != new:
        where = f" (model.weights: {model.weights})" if model.weights else ""
        raise CheckpointError(f"{path}: the net{where} has changed since this run began ({old[:12]}, now {new[:12]})")


def refuse_other_ledger(path: Path, exp: Experiment, state: RunState) -> None:
    """Refuse a run whose remaining rounds differ in kind from those that have been accounted for."""
    then, now = state.ledger, None if exp.guard is None else exp.guard.opened()
    if then is None and now is None:
        return
    if then is None or now is None or len(then.uses) != len(now.uses):
        raise CheckpointError(f"{path}: its checkpoint has no ledger of the privacy budget spent; start a new run")
    old = {**then.release._asdict(), "delta": then.delta, "reach": then.reach}
    new = {**now.release._asdict(), "delta": now.delta, "reach": now.reach}
    for name, value in old.items():
        if value != new[name]:
            what = f"{name} of its noise was {value}, now it would be {new[name]}"
            raise CheckpointError(
                f"{path}: {what}; continue with the settings and the dp-accounting version it began with"
            )


# -- private runs --------------------------------------------------------------------------------
# Settings that do not change an upload, or only by the order of float32 sums.
_BESIDE = ("rounds", "name", "checkpoint", "evaluate", "engine", "data.limit_gb", "algorithm.forget")
_NOT_BESIDE = ("engine.precision",)  # bf16 changes an upload by far more than the last bits


def _promised(config: Config) -> dict[str, Any]:
    """The settings that decide what the clients of a private run send, and so what its noise protects."""
    table = as_table(config)
    flat = {name: value for name, value in table.items() if not isinstance(value, dict)}
    sections = {name: part for name, part in table.items() if isinstance(part, dict)}
    flat |= {f"{name}.{key}": value for name, part in sections.items() for key, value in part.items()}
    beside = {key for key in flat if key in _BESIDE or key.partition(".")[0] in _BESIDE} - set(_NOT_BESIDE)
    if config.privacy.epsilon is not None and config.privacy.clip is not None:
        beside.discard("rounds")  # for which the noise was calibrated
    return {key: value for key, value in flat.items() if key not in beside}


def refuse_other_noise(path: Path, config: Config) -> None:
    """A private run continues with the settings it began with.

    What was released cannot be taken back. With other settings the same noise would be added to other numbers, and the
    difference of the two would have no noise.
    """
    began, private = path / "privacy.json", config.privacy.on
    if not (path / "partition.json").is_file():  # killed before the first round: nothing was released
        return
    if not began.is_file():
        if private:
            what = "this run started without privacy; what it has already released cannot be protected"
            raise ConfigError([Fault("privacy", what, "start a new run")])
        return
    try:
        then = dict(json.loads(began.read_text())["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "does not record the settings of this run; it is damaged, or of an earlier version"
        raise CheckpointError(f"{began}: {what}: start a new run") from error
    now = _promised(config)
    idle = {f"{section}.{key}" for section in (*KEYS, *SECTIONS) for key in idle_in(config, section)}
    faults = []
    for key in sorted((then.keys() - idle) | now.keys()):  # earlier versions also recorded settings without effect
        old, new = (found.get(key, "unset") for found in (then, now))
        if old != new:
            what = f"was {_worded(old)} when this private run began, now it is {_worded(new)}"
            faults.append(Fault(key, what, f"set it back to {_worded(old)}, or start a new run"))
    if faults:
        raise ConfigError(faults)


def _worded(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def key_of(path: Path, config: Config) -> Key | None:
    """The key from which the noise of this run is drawn, if it is secret; None: draw a new one.

    A key in the folder of a run that has not begun is not used: nothing was released with it, and the creator of the
    folder may know it.
    """
    secret = config.privacy.on and config.privacy.noise_from == "secret"
    if not secret or not (path / "partition.json").is_file():
        return None
    key = read_key(path)
    if key is None:
        what = "is missing; without it the noise of this private run cannot be continued"
        raise CheckpointError(f"{path / 'noise.key'}: {what}; restore it, or start a new run")
    return key


def privacy_record(prepared: Prepared) -> dict[str, Any]:
    """What a run folder records of its privacy, and the settings with which it must continue."""
    assert prepared.experiment.guard is not None
    return prepared.experiment.guard.described() | {"settings": _promised(prepared.config)}
