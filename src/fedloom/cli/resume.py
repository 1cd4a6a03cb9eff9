"""``fedloom resume``: continue a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.options import JsonResult, NoUserCode, Ranks, Root, Trust, refuse_user_code
from fedloom.cli.ranks import launch_ranks
from fedloom.cli.startup import importing
from fedloom.core.errors import ConfigError, Fault

Forget = Annotated[
    list[int] | None,
    typer.Option(
        min=0,
        metavar="CLIENT",
        help="Unlearn this client exactly the next time it takes part (closed forms only; may be repeated).",
    ),
]


def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    from_: Annotated[int | None, typer.Option("--from", help="Take the checkpoint of this round.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Continue until this total number of rounds.")] = None,
    forget: Forget = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Drop damaged lines of metrics.jsonl and continue."),
    ] = False,
    json_: JsonResult = False,
    ranks: Ranks = None,
    trust: Trust = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="Continue if your code, weights or data has changed; private runs never do."
        ),
    ] = False,
    no_user_code: NoUserCode = False,
    data_root: Root = None,
) -> None:
    """Continue a run from its newest checkpoint.

    The results are those of a run that was never stopped. The number of ranks may differ.
    """
    with importing():
        from fedloom.cli.screen import show_run
        from fedloom.runs import resume as runs
        from fedloom.runs.origin import from_its_folder
        from fedloom.runs.start import load_config

    refuse_user_code(no_user_code)
    if not run_dir.is_dir():
        raise ConfigError([Fault(str(run_dir), "there is no such folder", "see fedloom show runs/")])
    if ranks is not None and (run_dir / "config.toml").is_file():
        with from_its_folder(run_dir) as run:
            config = load_config(run / "config.toml", trust=trust)
        launch_ranks(ranks, config)
    show_run(
        json_,
        lambda screen: runs.resume(
            run_dir,
            at=from_,
            rounds=rounds,
            forget=forget or (),
            repair=repair,
            trust=trust,
            accept_changes=accept_changes,
            data_root=data_root,
            listener=screen,
        ),
    )
