"""``fedloom list``: what there is, by name."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from fedloom.cli.console import plain_console
from fedloom.cli.options import Json
from fedloom.core.errors import ConfigError, Fault, nearest

_FAMILIES = ("algorithms", "optimizers", "datasets", "partitions", "models", "topologies")


def list_(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help=f"One of: {', '.join(_FAMILIES)}.")] = "",
    json_: Json = False,
) -> None:
    """List algorithms, data sets, models and more by name."""
    from fedloom.runs import catalogue

    if not family:
        fix = f"name one of {', '.join(_FAMILIES)}"
        raise ConfigError([Fault("fedloom list", "what is to be listed?", fix)])
    if family not in _FAMILIES:
        raise ConfigError([Fault(family, "there is no such list", nearest(family, _FAMILIES))])
    found = catalogue.entries(family)
    if json_:
        print(json.dumps([entry._asdict() for entry in found]))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for entry in found:
        table.add_row(entry.name, entry.summary + (f"  [{entry.origin}]" if entry.origin != "fedloom" else ""))
    plain_console().print(table)
