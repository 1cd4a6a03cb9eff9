"""Unlearning: the clients that a run is to forget, and the rounds it takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.algorithm import Unlearns
from fedloom.core.errors import ConfigError, Fault
from fedloom.engine import checkpoint
from fedloom.engine.rounds import begin
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.runs.entry import blank_client
from fedloom.runs.find import algorithms, find_algorithm
from fedloom.runs.settings import Config


def clients_to_forget(table: dict[str, Any], clients: Sequence[int]) -> list[int]:
    """The clients that a run is to forget, with those that were named before."""
    kind, before = table["algorithm"]["kind"], table["algorithm"].get("forget", [])
    if not issubclass(find_algorithm(kind, "algorithm.kind"), Unlearns):
        able = " or ".join(name for name, cls in algorithms(own=False).items() if issubclass(cls, Unlearns))
        why = f"{kind} cannot unlearn a client exactly"
        raise ConfigError([Fault("--forget", why, f"use algorithm.kind={able}, or train again without the client")])
    return list(dict.fromkeys([*before, *clients]))


_FAR = 10_000  # rounds within which a client should take part again


def until_forgotten(
    config: Config, exp: Experiment, path: Path, at: int | None, forget: Sequence[int], *, given: bool
) -> Config:
    """The experiment with as many rounds as it takes until these clients have taken part once more."""
    folder, store = path / "checkpoints", RamStore(exp.federation.clients)
    state = checkpoint.load_state(folder, begin(exp), store, at=at, blank=blank_client(exp)).state
    assert isinstance(exp.algorithm, Unlearns)
    if why := exp.algorithm.cannot_forget(state.server, forget):
        raise ConfigError([Fault("--forget", why)])
    missing, needed = set(forget), state.round
    while missing and needed < state.round + _FAR:
        missing -= set(exp.present(needed).drawn.ids.tolist())
        needed += 1
    if missing:
        raise ConfigError([Fault("--forget", f"client {min(missing)} does not take part in the next {_FAR:,} rounds")])
    if given and config.basics.rounds < needed:
        why = f"the clients to forget have all taken part only by round {needed} (got {config.basics.rounds})"
        raise ConfigError([Fault("--rounds", why, f"give {needed}, or leave it out")])
    rounds = max(config.basics.rounds, needed)
    return config._replace(basics=config.basics.model_copy(update={"rounds": rounds}))
