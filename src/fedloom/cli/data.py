"""``fedloom data``: get, import and list data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn

from fedloom.cli.console import plain_console
from fedloom.cli.options import Json, Root

app = typer.Typer(help="Get, import and list data sets.", no_args_is_help=True)


@app.command("list")
def list_(data_root: Root = None, json_: Json = False) -> None:
    """List the published data sets, and which of them are installed."""
    from fedloom.data.files import default_root, missing_files
    from fedloom.data.published import PUBLISHED

    root = data_root or default_root()
    found = {"digits": True, **{name: not missing_files(p.layout, root) for name, p in PUBLISHED.items()}}
    if json_:
        print(json.dumps({"root": str(root), "present": found}))
        return
    print(f"data root: {root}")
    for name, here in found.items():
        print(f"  {name:15} {'here' if here else f'not here: fedloom data get {name}'}")


@app.command("get")
def get(name: Annotated[str, typer.Argument(help="Its name in fedloom data list.")], data_root: Root = None) -> None:
    """Download a data set from its publisher, and verify it.

    A download that was interrupted is resumed.
    """
    from fedloom.data import download
    from fedloom.data.files import default_root

    console = plain_console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task(name, total=None, amount="")

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, amount=f"{done / 1e6:.1f} of {total / 1e6:.1f} MB")

        where = download.get(name, data_root or default_root(), report=report)
    print(f"{name}: complete and checked, in {where}")


@app.command("import")
def import_(
    name: Annotated[str, typer.Argument(help="Its name in fedloom data list.")],
    directory: Annotated[Path, typer.Argument(help="The folder with the publisher's files.")],
    data_root: Root = None,
) -> None:
    """Import a data set from files on this machine."""
    from fedloom.data import download
    from fedloom.data.files import default_root

    where = download.import_files(name, directory, data_root or default_root())
    print(f"{name}: format, sizes and labels checked, in {where}")
