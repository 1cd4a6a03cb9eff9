"""``fedloom list``: what there is, by name."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer
from rich.table import Table

from fedloom.cli.console import plain_console
from fedloom.cli.options import Json


def list_(
    family: Annotated[
        Literal["algorithms", "optimizers", "datasets", "partitions", "models", "topologies"],
        typer.Argument(
            metavar="FAMILY", help="One of: algorithms, optimizers, datasets, partitions, models, topologies."
        ),
    ],
    json_: Json = False,
) -> None:
    """List algorithms, data sets, models and more by name."""
    from fedloom.runs import catalogue

    found = catalogue.entries(family)
    if json_:
        print(json.dumps([entry._asdict() for entry in found]))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for entry in found:
        table.add_row(entry.name, entry.summary + (f"  [{entry.origin}]" if entry.origin != "fedloom" else ""))
    plain_console().print(table)
