"""``fedloom collect``: keep the results of a comparison, and draw its tables again without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.options import JsonResult, NoUserCode, Root, Trust, refuse_user_code


def collect(
    recipe: Annotated[Path, typer.Argument(metavar="COMPARISON.toml", help="The comparison.")],
    out: Annotated[Path, typer.Option(help="The folder of the results, as in results/relaxation/figure1_loss.")],
    from_: Annotated[
        list[Path] | None,
        typer.Option("--from", help="A folder with finished cells (may be repeated); by default that of compare."),
    ] = None,
    json_: JsonResult = False,
    trust: Trust = False,
    no_user_code: NoUserCode = False,
    data_root: Root = None,
) -> None:
    """Gather the finished cells of a comparison as small JSON files, and draw its tables and curves from them.

    Nothing is trained. Cells of several machines and days meet by the hash of their settings.
    """
    from rich.console import Console

    from fedloom.compare.collect import collect as gather
    from fedloom.compare.plan import plan
    from fedloom.core import usercode
    from fedloom.core.disk import as_name
    from fedloom.report.comparison.text import markdown
    from fedloom.runs.settings import read_toml

    refuse_user_code(no_user_code)
    table = read_toml(recipe)
    usercode.vouch(table if trust else {})
    planned = plan(table)
    usual = Path("runs") / f"compare-{as_name(table.get('name') or recipe.stem)}"
    places = [usual, *([Path(planned.spec.cells)] if planned.spec.cells else [])]
    done = gather(planned, out, from_ or [place for place in places if place.is_dir()], data_root=data_root)
    if json_:
        print(json.dumps(done.comparison.as_json() | {"new": done.new, "missing": list(done.missing)}))
        return
    screen = Console(highlight=False, soft_wrap=True)
    screen.print(markdown(done.comparison.question, done.comparison.rows), markup=False)
    screen.print(f"{done.cells - len(done.missing)} of {done.cells} cells, {done.new} of them new: {out}", markup=False)
