"""``fedloom deploy``: the same experiment between real machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

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

app = typer.Typer(
    help="Run an experiment between real machines, with Flower.", no_args_is_help=True, rich_markup_mode=None
)
Site = Annotated[Path, typer.Argument(metavar="SITE", help="The folder that `fedloom deploy init` made.")]
SecureSum = Annotated[bool, typer.Option("--secure-sum", help="Let the server learn only the sum of the uploads.")]
_UNDER_WAY = ("idle", "starting", "running", "completed", "stopped")


def _ready() -> None:
    from fedloom.deploy.flower import refuse_missing

    refuse_missing()


@app.command()
def init(
    settings: Settings = None,
    nodes: Annotated[str, typer.Option(help="The names of the nodes, separated by commas.")] = "",
    host: Annotated[str, typer.Option(help="The name or address under which nodes reach the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port that nodes connect to.")] = 9443,
    out: Annotated[Path, typer.Option(help="The folder to make.")] = Path("site"),
    secure_sum: SecureSum = False,
    trust: Trust = False,
    data_root: Root = None,
) -> None:
    """Make the folders of a federation.

    They contain the contract, a certificate authority, certificates, and a bundle for each node.
    """
    _ready()
    from fedloom.core.errors import ConfigError
    from fedloom.core.schema import read
    from fedloom.deploy.site import Listens, initialise
    from fedloom.runs.start import load_config

    config = load_config(*file_and_overrides(settings or []), trust=trust)
    names = [name.strip() for name in nodes.split(",") if name.strip()]
    bind = "127.0.0.1" if host in ("127.0.0.1", "localhost") else "0.0.0.0"
    listens, faults = read(Listens, {"host": host, "bind": bind, "port": port}, "-")
    if listens is None:
        raise ConfigError([fault._replace(where=fault.where.replace("-.", "--")) for fault in faults])
    slugs = initialise(config, names, listens, out, root_or_default(data_root), secure_sum=secure_sum)
    print(f"{out}/server: stays with the coordinator")
    for slug in slugs:
        print(f"{out}/{slug}: hand it to this node, over a trusted channel; it contains the node's key")
    print(f"{out}/authority: signs certificates; keep it offline")
    if bind == "127.0.0.1":
        print("note: only nodes on this machine can reach the server; for others, give its name: --host NAME")


@app.command()
def server(site: Site, trust: Trust = False, data_root: Root = None) -> None:
    """Serve a federation until stopped.

    This starts the SuperLink, and the gate through which nodes reach it.
    """
    _ready()
    import os

    from fedloom.deploy.serve import serve

    if data_root is not None:
        os.environ["FEDLOOM_DATA"] = str(data_root)
    serve(site, say, trust=trust)


@app.command()
def node(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that this node was handed.")],
    data: OwnData = None,
    check: CheckData = False,
    trust: Trust = False,
    data_root: Root = None,
) -> None:
    """Take part in a federation with this node's data, until stopped."""
    _ready()
    from fedloom.deploy.own_data import refuse_wrong_columns
    from fedloom.deploy.take_part import rows_of_node_at, take_part

    where = (folder, own_data(data), root_or_default(data_root))
    if not check:
        take_part(*where, say, trust=trust)
        return
    own, policy = rows_of_node_at(*where, trust=trust)
    show_columns(own)
    refuse_wrong_columns(own, policy.accept_columns, folder)


@app.command()
def start(site: Site) -> None:
    """Start a run in the background."""
    _ready()
    from fedloom.deploy.serve import start_run

    print(f"run {start_run(site)} has started: fedloom deploy status {site}")


@app.command()
def resume(site: Site) -> None:
    """Resume the last run from its last checkpoint."""
    _ready()
    from fedloom.deploy.serve import resume_run

    print(f"run {resume_run(site)} has resumed: fedloom deploy status {site}")


@app.command()
def stop(
    site: Site, now: Annotated[bool, typer.Option("--now", help="At once; the current round is lost.")] = False
) -> None:
    """Stop the current run after its round, or at once."""
    _ready()
    from fedloom.deploy.serve import stop_run

    stop_run(site, now=now)
    print("the run has been stopped" if now else "the run will stop after the current round")


@app.command()
def status(site: Site, json_: Json = False) -> None:
    """Show the state of a federation.

    The exit code is 5 if the last run has failed.
    """
    _ready()
    from fedloom.deploy.serve import status_of

    found = status_of(site)
    if json_:
        print(json.dumps(found))
    else:
        _print_status(found)
    if found["state"] not in _UNDER_WAY:
        raise typer.Exit(5)


def _print_status(found: dict[str, Any]) -> None:
    from fedloom.report.words import span

    print(f"server  {found['server']}")
    rows = found.get("rows", {})
    for name, state in found["nodes"].items():
        heard = found.get("heard", {}).get(name)
        more = [f"{rows[name]:,} training rows"] if name in rows else []
        more += [] if heard is None else [f"last heard {heard:.0f} s ago"]
        print(f"node    {name}: {', '.join([state, *more])}")
    pace = [f"{span(found['seconds_a_round'])} a round"] if "seconds_a_round" in found else []
    left = [f"{span(found['seconds_left'])} left"] if "seconds_left" in found else []
    print(", ".join([f"run     {_reached(found)}", *pace, *left]))
    if found.get("metrics"):
        print("        " + "  ".join(f"{name} {value:.4f}" for name, value in found["metrics"].items()))
    last = found.get("last_round", {})
    for name in last.get("late", []):
        print(f"        {name} was late")
    for name, why in last.get("failed", {}).items():
        print(f"        {name}: {why}")
    if found.get("why"):
        print(f"why     {found['why']}")
    if found.get("run_dir"):
        print(f"folder  {found['run_dir']}")


def _reached(found: dict[str, Any]) -> str:
    """The state of a run and how far it is; a round that failed does not count."""
    if "failed_round" in found:
        return f"failed in round {found['failed_round']} of {found['rounds']}"
    return f"{found['state']}, round {found['round']} of {found['rounds']}"


@app.command()
def logs(
    site: Site,
    follow: Annotated[bool, typer.Option("--follow", help="Print what is added, until the run ends.")] = False,
) -> None:
    """Print the log of the last run."""
    _ready()
    from fedloom.deploy.serve import followed_log, log_text
    from fedloom.deploy.waits import until_stopped

    if not follow:
        print(log_text(site), end="")
        return
    with until_stopped() as stop:
        for part in followed_log(site, stop):
            print(part, end="", flush=True)


@app.command()
def revoke(site: Site, name: Annotated[str, typer.Argument(help="The node's name.")]) -> None:
    """Revoke a node's key; it can never be used again."""
    _ready()
    from fedloom.deploy.serve import revoke as revoked

    revoked(site, name)
    print(f"{name}: its key has been revoked; runs continue without it, if rules.quorum of server.toml allows")
    print(f'to let it take part again: fedloom deploy renew {site} "{name}"')


@app.command()
def add(site: Site, name: Annotated[str, typer.Argument(help="The name of the new node.")]) -> None:
    """Add a node between two runs."""
    _ready()
    from fedloom.deploy.members import add_node

    slug = add_node(site, name)
    print(f"{site}/{slug}: hand it to this node, over a trusted channel; it contains the node's key")
    print(f"{site}/contract: hand it to all other nodes, to replace their copies; it contains no secret")
    print(f"then start a run: fedloom deploy start {site}")


@app.command()
def renew(
    site: Site, name: Annotated[str, typer.Argument(help="A node's name; none: the server's certificate.")] = ""
) -> None:
    """Make a new certificate for the server, or new keys for a node."""
    _ready()
    from fedloom.deploy.members import renew_node, renew_server

    if not name:
        renew_server(site)
        print(f"{site}/server has a new certificate: start the server again")
        return
    slug = renew_node(site, name)
    print(f"{site}/{slug}: hand node.key, node.pub, seal.key and seal.crt to this node; its old keys no longer work")
    print(f"a run that is under way continues without it until: fedloom deploy resume {site}")


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A node's folder.")], json_: Json = False
) -> None:
    """List what a node has sent.

    Each line says when, for which run and round, which facts and arrays, how many bytes, and to whom if not the server.
    """
    from fedloom.deploy.audit import read_audit

    lines = read_audit(folder)
    if json_:
        print(json.dumps(lines))
        return
    for line in lines:
        print(_audit_line(line))


def _audit_line(line: dict[str, Any]) -> str:
    from fedloom.deploy.audit import IN_ROUND

    run = "" if line.get("run") is None else f" run {line['run']}"
    round_ = "" if line["round"] is None else f" round {line['round'] + (line['asked'] in IN_ROUND)}"
    arrays = [f"{name} {shape} {kind}" for name, (shape, kind) in line["arrays"].items()]
    what = ", ".join([*(fact for fact in line.get("facts", []) if fact != "why"), *arrays])
    to = f"  to {', '.join(line['to'])}" if "to" in line else ""
    words = [line["time"], f"{line['sent']}{run}{round_}", f"{line['bytes']} bytes{to}", what, line["why"]]
    return "  ".join(word for word in words if word)


@app.command()
def local(
    settings: Settings = None,
    nodes: NodeCount = 3,
    out: NewFolder = None,
    secure_sum: SecureSum = False,
    json_: JsonResult = False,
    trust: Trust = False,
    data_root: Root = None,
) -> None:
    """Run a whole federation on this machine.

    Processes, keys and certificates are real.
    """
    _ready()
    from fedloom.deploy.local import run_local

    config, folder = settings_and_folder(settings, out, of="deploy", trust=trust)
    found = run_local(config, nodes, folder, root_or_default(data_root), say, secure_sum=secure_sum)
    if json_:
        print(json.dumps(found))
    else:
        _print_status(found)
    if found["state"] != "completed":
        raise typer.Exit(5)
