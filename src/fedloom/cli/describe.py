"""``fedloom describe``: one thing, its settings and its costs; or the numbers of a network."""

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


def describe(
    name: Annotated[str, typer.Argument(help="An algorithm, optimizer, data set, partition, model or topology.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KIND KEY=VALUE...]", help="Only of the network: describe topology.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Draw the network here (.png or .svg).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    no_user_code: NoUserCode = False,
) -> None:
    """Say what something is: its paper and pseudo-code, its settings with bounds and defaults, what it costs.

    The word topology and a kind measure a network: fedloom describe topology ring nodes=16 --out ring.png
    """
    from fedloom.runs import catalogue

    own_code(no_user_code, name, *(settings or []))
    if name == "topology":
        _describe_topology(settings or [], out, json_)
        return
    if settings or out is not None:
        given = (settings or ["--out"])[0]
        raise ConfigError([Fault(given, "is only for networks", f"as in fedloom describe topology {name} nodes=16")])
    page = catalogue.describe(name)
    if json_:
        print(json.dumps(page.as_json()))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{page.name} ({page.family})\n")
    console.print(page.text.rstrip())
    if page.settings:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("setting", "type", "default", "meaning"):
            least = {"type": 16, "meaning": 28}.get(column)
            table.add_column(column, overflow="fold", no_wrap=column == "setting", min_width=least)
        for setting in page.settings:
            table.add_row(setting.name, setting.kind, setting.default, setting.meaning)
        console.print()
        console.print(table)
    for line in page.costs:
        console.print(line)


def _describe_topology(words: list[str], out: Path | None, json_: bool) -> None:
    from fedloom.engine.topology import faults
    from fedloom.report import topology as report
    from fedloom.runs import network as networks
    from fedloom.runs.overrides import override
    from fedloom.runs.settings import topology_of

    kinds, pairs = [w for w in words if "=" not in w], [w for w in words if "=" in w]
    if len(kinds) > 1:
        raise ConfigError([Fault(kinds[1], "a second kind", "settings are written key=value")])
    given, _ = override({}, [w.removeprefix("topology.") for w in pairs])
    nodes, seed = (given.pop(key, usual) for key, usual in (("nodes", 16), ("seed", 0)))
    if not isinstance(nodes, int) or not isinstance(seed, int) or nodes < 2 or seed < 0:
        raise ConfigError([Fault("nodes", f"nodes=2 or more, and seed=0 or more (got {nodes!r} and {seed!r})")])
    network = topology_of(given | ({"kind": kinds[0]} if kinds else {}))
    wrong = faults(network, nodes, seed)
    if wrong:
        raise ConfigError(wrong)
    described = networks.described(network, nodes, seed)
    if out is not None:
        networks.draw_topology(network, nodes, seed, out)
    if json_:
        print(json.dumps(described | ({"picture": str(out)} if out is not None else {})))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in report.table(described):
        table.add_row(name, value)
    console = Console(highlight=False, markup=False)
    console.print(table)
    for note in described["notes"]:
        console.print(f"note: {note}")
    if out is not None:
        console.print(f"drawn in {out}")
