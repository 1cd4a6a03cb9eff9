"""``fedloom list``: what there is, by name."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from fedloom import __version__
from fedloom.core.disk import as_name
from fedloom.core.errors import ConfigError, Fault, FedloomError
from fedloom.runs.launch import follow_parent


def list_(
    family: Annotated[
        Literal["algorithms", "optimizers", "datasets", "partitions", "models", "topologies"], typer.Argument()
    ],
    json_: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List what there is: algorithms, optimizers, datasets, partitions, models or topologies."""
    from fedloom.runs import catalogue

    found = catalogue.entries(family)
    if json_:
        print(json.dumps([entry._asdict() for entry in found]))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for entry in found:
        table.add_row(entry.name, entry.summary + (f"  [{entry.origin}]" if entry.origin != "fedloom" else ""))
    Console().print(table, markup=False)
