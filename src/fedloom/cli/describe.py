"""``fedloom describe``: one thing, its settings and its costs; or the numbers of a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedloom.cli.console import plain_console
from fedloom.cli.options import Json, NoUserCode, refuse_user_code
from fedloom.core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from fedloom.engine.topology.network import Topology


def describe(
    name: Annotated[str, typer.Argument(help="An algorithm, optimizer, data set, partition, model or topology.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KIND KEY=VALUE...]", help="Only for describe topology: the kind and its settings."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Draw the network here (.png, .svg or .pdf).")] = None,
    json_: Json = False,
    no_user_code: NoUserCode = False,
) -> None:
    """Show paper, pseudo-code, settings and costs of a method.

    Data sets, models, partitions and so on have pages as well.

    To measure a network, name its kind: fedloom describe topology ring nodes=16 --out ring.png
    """
    from fedloom.core import usercode
    from fedloom.runs import catalogue

    refuse_user_code(no_user_code)
    usercode.vouch([name, *(settings or [])], lasting=False)  # looking at code does not make it trusted
    if name == "topology":
        _describe_topology(settings or [], out, json_)
        return
    if settings or out is not None:
        raise ConfigError([_not_of_a_network(settings or [])])
    page = catalogue.describe(name)
    if json_:
        print(json.dumps(page.as_json()))
        return
    console = plain_console(soft_wrap=True)
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


def _not_of_a_network(words: list[str]) -> Fault:
    """What is wrong where more than a name is given for a thing that is not a network."""
    if words and "=" not in words[0]:
        return Fault(words[0], "a second name", f"name one: fedloom describe {words[0]}")
    given = words[0] if words else "--out"
    return Fault(given, "is only for networks", "as in fedloom describe topology ring nodes=16 --out ring.png")


def _describe_topology(words: list[str], out: Path | None, json_: bool) -> None:
    """The numbers and the picture of a network."""
    from fedloom.report import topology as report
    from fedloom.runs import network as networks

    network, nodes, seed = _network(words)
    described = networks.described(network, nodes, seed)
    if out is not None:
        networks.draw_topology(network, nodes, seed, out)
    if json_:
        print(json.dumps(described | ({"picture": str(out)} if out is not None else {})))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in report.table(described):
        table.add_row(name, value)
    console = plain_console()
    console.print(table)
    for note in described["notes"]:
        console.print(f"note: {note}")
    if out is not None:
        console.print(f"drawn in {out}")


def _network(words: list[str]) -> tuple[Topology, int, int]:
    """The topology that these arguments describe, its number of nodes and the seed."""
    from fedloom.core import usercode
    from fedloom.engine.topology.facts import faults
    from fedloom.runs.overrides import read_pairs
    from fedloom.runs.settings import topology_of

    kinds, pairs = [w for w in words if "=" not in w], [w for w in words if "=" in w]
    if len(kinds) > 1:
        raise ConfigError([Fault(kinds[1], "a second kind", "settings are written key=value")])
    given = read_pairs(w.removeprefix("topology.") for w in pairs)
    usercode.vouch(given, lasting=False)
    nodes, seed = (given.pop(key, usual) for key, usual in (("nodes", 16), ("seed", 0)))
    if not isinstance(nodes, int) or not isinstance(seed, int) or nodes < 2 or seed < 0:
        raise ConfigError([Fault("nodes", f"nodes=2 or more, and seed=0 or more (got {nodes!r} and {seed!r})")])
    network = topology_of(given | ({"kind": kinds[0]} if kinds else {}))
    wrong = faults(network, nodes, seed)
    if wrong:
        raise ConfigError(wrong)
    return network, nodes, seed
