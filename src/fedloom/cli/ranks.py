"""Runs of several processes: which of them prints, and starting them with ``--ranks``."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import typer

from fedloom.core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from fedloom.runs.settings import Config


def follows() -> bool:
    """Whether this is a rank that neither prints nor writes, since rank 0 does."""
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size)):
        return False  # or the variables are set by mistake, and there is no rank 0 to report it
    from fedloom.engine.ranks import MEETING

    return "MASTER_ADDR" in os.environ or MEETING in os.environ


def launch_ranks(wanted: str | None, experiment: Config) -> None:
    """Start the ranks that ``--ranks`` requests and end when they have ended; a single rank is this process."""
    if wanted is None:
        return
    from fedloom.engine.ranks import is_rank
    from fedloom.runs import launch
    from fedloom.runs.prepare import pick_device

    if is_rank():
        raise ConfigError([Fault("--ranks", f"torchrun has started the ranks already (got {wanted})", "leave it out")])
    cohort = experiment.cohort.size if experiment.algorithm.family != "gossip" else None
    clients = getattr(experiment.partition, "clients", None)
    ranks = launch.count(wanted, pick_device(experiment.engine.device), cohort, clients)
    if ranks > 1:
        code, lost = launch.launch(launch.without_ranks(sys.argv[1:]), ranks)
        if lost:
            print(lost, file=sys.stderr)
        raise typer.Exit(code)
