"""The folders of a federation: one for the server, one for each node, and a separate one for the authority's key.

site/authority/    ca.key: signs certificates; keep it offline
site/server/       the contract, the server's certificate and key, the nodes' public keys; later runs and logs
site/hospital-a/   the contract, ca.crt, this node's key and node.toml: all that a node needs, and no secret of another
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tomli_w
from pydantic import Field, field_validator

from fedloom.core import disk
from fedloom.core.errors import ConfigError, DataError, Fault
from fedloom.core.schema import Spec, read
from fedloom.data.sources import File
from fedloom.deploy.contract import (
    Contract,
    Form,
    read_contract,
    refuse_undeployable,
    without_folder,
    write_contract,
)
from fedloom.deploy.fleet import Rules
from fedloom.deploy.node import Policy
from fedloom.deploy.services import server_files, unit_of_node
from fedloom.deploy.waits import held_lock
from fedloom.runs.prepare import share
from fedloom.runs.settings import Config

SERVER, AUTHORITY, CONTRACT = "server", "authority", "contract"
NODES, RUNS, STATE = "nodes.json", "runs", "state.json"
_LOCK = ".run.lock"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
SERVER_TOML, NODE_TOML = "server.toml", "node.toml"


SpecT = TypeVar("SpecT", bound=Spec)


class Listens(Spec):
    """Where the server listens; in ``[server]`` of server.toml."""

    host: str = Field("127.0.0.1", description="the name or address under which nodes reach the server")
    bind: str = Field("0.0.0.0", description="the address that the server listens on")
    port: int = Field(9443, ge=1, le=65535, description="the port that nodes connect to")
    proxied: int = Field(
        0, ge=0, le=65535, description="the port on 127.0.0.1 to which your reverse proxy forwards; 0: there is none"
    )

    @field_validator("host")
    @classmethod
    def _is_a_host(cls, host: str) -> str:
        """An error now, rather than in the bundles that all nodes already have."""
        if not _HOST.fullmatch(host):
            raise ValueError("should be a name (in ASCII) or an IPv4 address alone, without https:// and port")
        return host

    @property
    def place(self) -> tuple[str, int]:
        """Address and port of the gate: behind a reverse proxy, which has the port of the nodes, it needs another."""
        return ("127.0.0.1", self.proxied) if self.proxied else (self.bind, self.port)


class NodeIdentity(Spec):
    """Which node this is; in ``[node]`` of node.toml."""

    name: str = Field(description="its name in the contract")
    server: str = Field(description="host:port of the server")
    data: str = Field("", description="its file of data; 'experiment': its part of the experiment's own data")


class NodeSettings(NamedTuple):
    identity: NodeIdentity
    policy: Policy


def initialise(
    config: Config,
    nodes: list[str],
    listens: Listens,
    out: Path,
    root: Path,
    *,
    secure_sum: bool = False,
    shared_disk: bool = False,
) -> list[str]:
    """Make the folders of a federation; returns the names of the nodes' folders.

    ``secure_sum``: the server learns only sums of uploads, and nodes send nothing else. ``shared_disk``: the nodes read
    the experiment's own data, where the coordinator keeps it.
    """
    from fedloom.deploy import keys

    refuse_undeployable(config, secure_sum=secure_sum)
    slugs = slugs_of(nodes)
    if out.exists() and any(out.iterdir()):
        raise ConfigError([Fault("--out", f"{out} already exists and is not empty", "choose another")])
    config = with_absolute_data(config._replace(partition=with_clients(config, len(nodes))))
    shared = share(config, root)
    contract = Contract(config, Form.of(shared.arrays), tuple(nodes), secrets.token_hex(8))
    authority, key, certificate = keys.new_authority(f"fedloom {contract.campaign}")
    hosts = dict.fromkeys([listens.host, "localhost", "127.0.0.1"])
    server = keys.new_server(list(hosts), key, certificate)
    for name in (AUTHORITY, SERVER, *slugs):
        disk.make_folder(out / name)
    disk.write_bytes(out / AUTHORITY / "ca.key", authority.private)
    home = out / SERVER
    files = {"server.key": server.private, "server.pem": server.public, "ca.crt": authority.public}
    files[SERVER_TOML] = tomli_w.dumps({"server": dict(listens), "rules": dict(Rules(secure_sum=secure_sum))}).encode()
    for slug, name in zip(slugs, nodes, strict=True):
        pair, seal = keys.new_node(), keys.new_seal(name, key, certificate)
        files[f"{slug}.pub"] = pair.public
        identity = NodeIdentity(name=name, server=f"{listens.host}:{listens.port}")
        settings = NodeSettings(identity, Policy(require_secure_sum=secure_sum))
        own = keys.node_files(pair, seal) | {"ca.crt": authority.public}
        theirs = contract if shared_disk else contract._replace(config=without_folder(config))
        write_bundle(out / slug, theirs, settings, own)
    for name, data in (files | server_files(home.absolute(), listens.host, listens.port)).items():
        disk.write_bytes(home / name, data)
    write_contract(home, contract)
    read_contract(home, trust=True)  # anyone who has run the code before may run the server's copy of it
    return slugs


def write_bundle(folder: Path, contract: Contract, settings: NodeSettings, files: Mapping[str, bytes]) -> None:
    """Write the bundle of a node into a folder."""
    table = {"node": dict(settings.identity), "policy": dict(settings.policy)}
    more = {NODE_TOML: tomli_w.dumps(table).encode(), "fedloom-node.service": unit_of_node(folder.name)}
    for name, data in {**files, **more}.items():
        disk.write_bytes(folder / name, data)
    write_contract(folder, contract)


def with_clients(config: Config, count: int) -> Any:
    """The partition with as many clients as there are nodes, if that can be set."""
    if "clients" not in type(config.partition).model_fields:
        return config.partition
    return config.partition.model_copy(update={"clients": count})


def with_absolute_data(config: Config) -> Config:
    """The experiment with the absolute path of its data: the server reads it from another folder."""
    if not isinstance(config.data, File):
        return config
    return config._replace(data=config.data.model_copy(update={"path": str(config.data.place.absolute())}))


def folder_name(name: str) -> str:
    """The folder name of a node."""
    return disk.as_name(name.strip().lower().replace(" ", "-"))


def slugs_of(names: list[str]) -> list[str]:
    """The names of the nodes' folders."""
    slugs = [folder_name(name) for name in names]
    faults = []
    if len(names) < 2:
        fix = "names with commas between them, as in --nodes 'Hospital A, Hospital B'"
        faults.append(Fault("--nodes", f"names at least two nodes (got {', '.join(names)!r})", fix))
    by_slug: dict[str, list[str]] = {}
    for name, slug in zip(names, slugs, strict=True):
        by_slug.setdefault(slug, []).append(name)
    wrong = [_unfit(slug, alike) for slug, alike in by_slug.items()]
    faults += [Fault("--nodes", what, "choose another name") for what in wrong if what]
    if faults:
        raise ConfigError(faults)
    return slugs


def _unfit(slug: str, names: list[str]) -> str:
    """Why the nodes of these names cannot have the folder ``slug``; empty if one can."""
    first, *others = names
    if not first.strip():
        return "a name is empty"
    if slug in (SERVER, AUTHORITY, CONTRACT, "run"):
        return f"'{first}' is reserved for a folder of the federation's own"
    if set(others) - {first}:
        return f"{' and '.join(repr(name) for name in dict.fromkeys(names))} would have the same folder, {slug}"
    return f"'{first}' is taken twice" if others else ""


def read_rules(home: Path) -> Rules:
    return read_section(home / SERVER_TOML, Rules, "rules")


def read_listens(home: Path) -> Listens:
    return read_section(home / SERVER_TOML, Listens, "server")


def read_node(folder: Path) -> NodeSettings:
    path = folder / NODE_TOML
    return NodeSettings(read_section(path, NodeIdentity, "node"), read_section(path, Policy, "policy"))


def read_section(path: Path, cls: type[SpecT], section: str) -> SpecT:
    """One section of a settings file, checked."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: is missing, so this is not a folder of a federation") from error
    except (OSError, ValueError) as error:
        raise ConfigError([Fault(str(path), f"not readable as TOML: {error}")]) from error
    value, faults = read(cls, table.get(section, {}), section)
    if faults or value is None:
        raise ConfigError([fault._replace(where=f"{path}, {fault.where}") for fault in faults])
    return value


def refuse_open_key(path: Path) -> None:
    """Refuse a private key that is missing, or that other users can read."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError([Fault(str(path), "is missing", "it is in this node's bundle")]) from error
    if mode & 0o077:
        raise ConfigError([Fault(str(path), "can be read by other users", f"chmod 600 {path}")])


def read_state(home: Path) -> dict[str, Any]:
    """What a run, or a node of a network, has last recorded about itself; empty before the first."""
    try:
        found: dict[str, Any] = json.loads((home / STATE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found


def write_state(home: Path, run: int, state: str, **more: Any) -> None:
    """Record the state of a run."""
    disk.write_bytes(home / STATE, json.dumps({"run": run, "state": state, **more}).encode() + b"\n")


def log_file(home: Path, run: int) -> Path:
    """The log of a run, line by line."""
    return home / "logs" / f"{run}.log"


@contextmanager
def conducted(home: Path) -> Iterator[None]:
    """Hold the lock for conducting a run of this server; one process at a time can."""
    lock = held_lock(home / _LOCK, "another process conducts a run here", f"fedloom deploy resume {home.parent}")
    try:
        yield
    finally:
        os.close(lock)


def is_conducted(home: Path) -> bool:
    """Whether a process conducts a run of this server now."""
    return disk.is_locked(home / _LOCK)
