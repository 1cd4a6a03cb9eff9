"""``fedloom peers``: methods without a server between real machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.console import harmless, in_one_line
from fedloom.cli.nodes import (
    CheckData,
    NewFolder,
    NodeCount,
    OwnData,
    own_data,
    root_or_default,
    say,
    settings_and_folder,
    show_columns,
)
from fedloom.cli.options import Json, JsonResult, Root, Settings, Trust, file_and_overrides
from fedloom.core.errors import ConfigError, Fault

app = typer.Typer(
    help="Run a method without a server between real machines.", no_args_is_help=True, rich_markup_mode=None
)
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that this node was handed.")]
_SHOWN = {"test/accuracy": "accuracy", "test/mae": "mean absolute error"}  # by metric: how status names it
_FINE = ("idle", "joining", "running", "waiting", "completed", "stopped")


def _ready() -> None:
    try:
        import zmq  # noqa: F401
    except ImportError:
        what = "ZeroMQ is not installed"
        raise ConfigError([Fault("fedloom peers", what, "pip install 'fedloom[peers]'")]) from None


@app.command()
def init(
    settings: Settings = None,
    nodes: Annotated[str, typer.Option(help="The names of the nodes, separated by commas.")] = "",
    hosts: Annotated[
        str, typer.Option(help="host or host:port of each node, separated by commas; by default this machine.")
    ] = "",
    out: Annotated[Path, typer.Option(help="The folder to make.")] = Path("site"),
    trust: Trust = False,
    data_root: Root = None,
) -> None:
    """Make a bundle for each node.

    It contains the contract, the membership file, and the node's own key.
    """
    _ready()
    from fedloom.deploy.peers.bundles import initialise_peers
    from fedloom.runs.start import load_config

    config = load_config(*file_and_overrides(settings or []), trust=trust)
    names, places = ([word.strip() for word in words.split(",") if word.strip()] for words in (nodes, hosts))
    for slug in initialise_peers(config, names, places, out, root_or_default(data_root)):
        print(f"{out}/{slug}: hand it to this node, over a trusted channel, and delete it here; it contains its key")


@app.command()
def start(
    folder: Folder,
    data: OwnData = None,
    check: CheckData = False,
    trust: Trust = False,
    data_root: Root = None,
) -> None:
    """Take part in a network with this node's data.

    A node ends when all rounds are done. Started again after a stop or a crash, it resumes.
    """
    _ready()
    from fedloom.deploy.own_data import refuse_wrong_columns
    from fedloom.deploy.peers.bundles import read_bundle
    from fedloom.deploy.peers.start import rows_of_seat, start_peer

    if not check:
        start_peer(folder, own_data(data), root_or_default(data_root), say, trust=trust)
        return
    bundle = read_bundle(folder, trust=trust)
    own = rows_of_seat(bundle, own_data(data), root_or_default(data_root))
    show_columns(own)
    refuse_wrong_columns(own, bundle.policy.accept_columns, folder)


@app.command()
def status(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A node's folder, or a folder of several.")],
    json_: Json = False,
) -> None:
    """Show the state of a node.

    The exit code is 5 if it has failed.
    """
    from fedloom.deploy.peers.status import bundles_in, status_of_peer

    folders = bundles_in(folder)
    _show([status_of_peer(each) for each in folders], json_, single=folders == [folder])


def _show(found: list[dict[str, Any]], as_json: bool, *, single: bool = False) -> None:
    """Print the status of nodes; exit code 5 if one has failed."""
    if as_json:
        print(json.dumps(found[0] if single else found))
    else:
        for one in found:
            _print_status(one)
    if any(one["state"] not in _FINE for one in found):
        raise typer.Exit(5)


def _print_status(found: dict[str, Any]) -> None:
    from fedloom.report.words import plural

    print(f"{found['node']}: {found['state']}, round {found['round']} of {found['rounds']}")
    last = found.get("last_round", {})
    for name, state in found["neighbours"].items():
        closed = found["closed"].get(name, 0)
        why = last.get("down", {}).get(name, "in doubt" if name in last.get("doubt", []) else "")
        often = f", closed in {plural(closed, 'round')}" if closed else ""
        print(in_one_line(f"  {name}: {state}{often}" + (f": {why}" if why else "")))  # why: in the neighbour's words
    if found["skipped"]:
        print(f"  skipped {plural(found['skipped'], 'round')}")
    for metric, words in _SHOWN.items():
        if metric in last:
            print(f"  {words} on its own held-out rows {last[metric]:.4f}")
    if found.get("why"):
        print(harmless(f"  why: {found['why']}"))


@app.command()
def local(
    settings: Settings = None,
    nodes: NodeCount = 3,
    out: NewFolder = None,
    json_: JsonResult = False,
    trust: Trust = False,
    data_root: Root = None,
) -> None:
    """Run a whole network on this machine.

    Processes, keys and encrypted links are real.
    """
    _ready()
    from fedloom.deploy.peers.local import run_peers

    config, folder = settings_and_folder(settings, out, of="peers", trust=trust)
    _show(run_peers(config, nodes, folder, root_or_default(data_root), say), json_)
