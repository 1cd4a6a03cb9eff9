"""``fedloom run``: one experiment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.options import (
    JsonResult,
    NoUserCode,
    Ranks,
    Root,
    Settings,
    Trust,
    WithPage,
    file_and_overrides,
    refuse_user_code,
)
from fedloom.cli.ranks import follows, launch_ranks
from fedloom.cli.startup import importing
from fedloom.core.disk import as_name

if TYPE_CHECKING:
    from fedloom.runs.loop import Listener
    from fedloom.runs.result import History
    from fedloom.runs.settings import Config


def run(
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; by default a new one below runs/.")] = None,
    json_: JsonResult = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the complete experiment as TOML, and stop.")
    ] = False,
    watch: WithPage = False,
    ranks: Ranks = None,
    trust: Trust = False,
    no_user_code: NoUserCode = False,
    data_root: Root = None,
) -> None:
    """Run one experiment. Without a file: FedAvg on digits, Dirichlet 0.3, 20 clients."""
    with importing():
        from fedloom.cli.screen import show_run
        from fedloom.cli.watch import watched
        from fedloom.data.files import default_root
        from fedloom.engine.ranks import joined
        from fedloom.runs.settings import as_toml
        from fedloom.runs.start import load_config, start

    refuse_user_code(no_user_code)
    with joined().agreed():
        experiment = load_config(*file_and_overrides(settings or []), trust=trust)
    if print_config:
        if not follows():
            print(as_toml(experiment), end="")
        return
    launch_ranks(ranks, experiment)
    folder, root = out or Path("runs") / _run_name(experiment), data_root or default_root()

    def work(screen: Listener) -> History:
        with watched(screen, watch and not follows()) as listener:
            return start(experiment, out=folder, numbered=out is None, root=root, listener=listener)

    show_run(json_, work)


def _run_name(experiment: Config) -> str:
    kinds = experiment.kinds
    return as_name(experiment.basics.name or f"{kinds['algorithm']}-{kinds['data']}-seed{experiment.basics.seed}")
