"""The folders of a network: one for each node, with the contract, the membership file and the node's own key.

site/hospital-a/   experiment.toml, federation.json, members.toml: the same at every node
                   node.key: the secret key of only this node; node.toml: the settings of its owner
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import NamedTuple

import tomli_w
from pydantic import Field, field_validator

from fedloom.algorithm.capabilities import gossip_facts
from fedloom.core import disk
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.schema import Spec
from fedloom.deploy.contract import Contract, Form, only_simulated, read_contract, without_folder, write_contract
from fedloom.deploy.node import Policy
from fedloom.deploy.own_files import own_files
from fedloom.deploy.peers.edges import Patience
from fedloom.deploy.peers.members import MEMBERS, Member, Members, is_address, read_members, write_members
from fedloom.deploy.services import unit_of_peer
from fedloom.deploy.site import NODE_TOML, read_section, refuse_open_key, slugs_of, with_absolute_data, with_clients
from fedloom.deploy.waits import writing
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import Config

KEY = "node.key"
PORT = 9444
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::([0-9]{1,5}))?")


class Seat(Spec):
    """Which node this is; in ``[node]`` of node.toml."""

    name: str = Field(description="its name in the contract")
    bind: str = Field(description="the address on which it listens, as tcp://0.0.0.0:9444")
    data: str = Field("", description="its file of data; experiment: its part of the experiment's own data")

    @field_validator("bind")
    @classmethod
    def _is_an_address(cls, given: str) -> str:
        if not is_address(given):
            raise ValueError(f"should be tcp://host:port, as tcp://0.0.0.0:{PORT} (got '{given}')")
        return given


class Bundle(NamedTuple):
    """The bundle of a node, read and checked."""

    folder: Path
    contract: Contract
    members: Members
    seat: Seat
    policy: Policy
    patience: Patience

    @property
    def me(self) -> int:
        return self.contract.nodes.index(self.seat.name)


def not_for_peers(config: Config) -> list[Fault]:
    """Settings without a meaning between real machines without a server."""
    topology = config.topology
    if config.algorithm.family != "gossip" or topology is None:
        return [Fault("algorithm.kind", "is a method with a server", "use fedloom deploy")]
    faults = []
    for name in ("link_loss", "node_loss", "node_death", "deaths"):
        if getattr(topology, name):
            faults.append(
                Fault(f"topology.{name}", "simulates failures; real links fail by themselves", "leave it out")
            )
    if topology.link_policy != "self":
        what = f"a link that fails gives its weight back to both ends (got '{topology.link_policy}')"
        faults.append(Fault("topology.link_policy", what, "leave it out"))
    if topology.directed or topology.mixing == "push_sum":
        what = "links between real machines go both ways, and both ends agree whether one was up"
        faults.append(Fault("topology", what, "use an undirected graph, and mixing = 'average'"))
    if gossip_facts(config.algorithm).sends_once:
        what = "quantised numbers are sent as float32, so nothing would be saved"
        faults.append(Fault("algorithm.scheme", what, "leave it at none"))
    return faults + only_simulated(config)


def refuse_for_peers(config: Config) -> None:
    faults = not_for_peers(config)
    if faults:
        raise ConfigError(faults)


def addresses(hosts: list[str], count: int) -> list[str]:
    """Where the nodes listen: host or host:port for each; without any, all of them on this machine."""
    if not hosts:
        return [f"tcp://127.0.0.1:{PORT + k}" for k in range(count)]
    faults = []
    if len(hosts) != count:
        faults.append(Fault("--hosts", f"one for each node is needed (got {len(hosts)} for {count} nodes)"))
    found = []
    for host in hosts:
        match = _HOST.fullmatch(host)
        port = int(match[2]) if match is not None and match[2] else PORT
        if match is None or not 1 <= port <= 65535:
            faults.append(Fault("--hosts", f"'{host}' is not a host or host:port", "as a.example.org:9444"))
        else:
            found.append(f"tcp://{match[1]}:{port}")
    if len(set(found)) < len(found):
        faults.append(Fault("--hosts", "two nodes have the same address", "give each its own host or port"))
    if faults:
        raise ConfigError(faults)
    return found


def initialise_peers(
    config: Config, names: list[str], hosts: list[str], out: Path, root: Path, *, shared_disk: bool = False
) -> list[str]:
    """Make the folders of a network; returns their names.

    ``shared_disk``: the nodes read the experiment's own data, where it is now.
    """
    from fedloom.deploy.peers.links import new_curve_keys

    refuse_for_peers(config)
    slugs, places = slugs_of(names), addresses(hosts, len(names))
    if out.exists() and any(out.iterdir()):
        raise ConfigError([Fault("--out", f"{out} already exists and is not empty", "choose another")])
    config = with_absolute_data(config._replace(partition=with_clients(config, len(names))))
    prepared = prepare(config, root)  # which refuses experiments that cannot run
    if prepared.shared.clients != len(names):
        what = f"the data has {prepared.shared.clients} clients, but there are {len(names)} nodes"
        raise ConfigError([Fault("--nodes", what, "name as many nodes")])
    contract = Contract(config, Form.of(prepared.shared.arrays), tuple(names), secrets.token_hex(8), own_files(config))
    pairs = [new_curve_keys() for _ in names]
    members = [Member(n, at, pair.public) for n, at, pair in zip(names, places, pairs, strict=True)]
    assert config.topology is not None
    with writing(out.absolute().parent, "try again"):
        for slug, member, pair in zip(slugs, members, pairs, strict=True):
            folder = out / slug
            disk.make_folder(folder)
            disk.write_bytes(folder / KEY, pair.secret.encode() + b"\n")
            write_members(folder / MEMBERS, contract.campaign, members, config.topology)
            write_contract(folder, contract if shared_disk else contract._replace(config=without_folder(config)))
            seat = Seat(name=member.name, bind=_bind(member.address))
            table = {"node": dict(seat), "policy": dict(Policy()), "rules": dict(Patience())}
            disk.write_bytes(folder / NODE_TOML, tomli_w.dumps(table).encode())
            disk.write_bytes(folder / "fedloom-peer.service", unit_of_peer(slug))
    return slugs


def _bind(address: str) -> str:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if host in ("127.0.0.1", "localhost", "[::1]"):
        return f"tcp://{'127.0.0.1' if host == 'localhost' else host}:{port}"
    return f"tcp://[::]:{port}" if host.startswith("[") else f"tcp://0.0.0.0:{port}"


def read_bundle(folder: Path, *, trust: bool = False) -> Bundle:
    """The bundle of a node; ``trust``: the code in it may run."""
    path = folder / NODE_TOML
    _refuse_folder_with_server(folder)
    contract = read_contract(folder, trust=trust, made_by="peers")
    refuse_for_peers(contract.config)
    members = read_members(folder, contract)
    sections = (
        read_section(path, Seat, "node"),
        read_section(path, Policy, "policy"),
        read_section(path, Patience, "rules"),
    )
    if sections[0].name not in contract.nodes:
        raise ConfigError([Fault(f"{path}, node.name", f"'{sections[0].name}' is not in the contract")])
    return Bundle(folder, contract, members, *sections)


def read_seat(folder: Path) -> Seat:
    """Which node a folder is of."""
    _refuse_folder_with_server(folder)
    return read_section(folder / NODE_TOML, Seat, "node")


def _refuse_folder_with_server(folder: Path) -> None:
    if (folder / "ca.crt").is_file():
        fix = f"fedloom deploy node {folder}"
        raise ConfigError([Fault(str(folder), "is the folder of a node in a federation with a server", fix)])


def read_secret(bundle: Bundle) -> str:
    """The secret key of a node; refused if others can read it, or if it does not match the membership file."""
    from fedloom.deploy.peers.links import public_of

    path = bundle.folder / KEY
    refuse_open_key(path)
    secret = path.read_text(encoding="utf-8").strip()
    try:
        fits = public_of(secret) == bundle.members.nodes[bundle.me].key
    except (OSError, ValueError):  # no key at all
        fits = False
    if not fits:
        what = f"is not the key of '{bundle.seat.name}' in {MEMBERS}"
        raise ConfigError([Fault(str(path), what, "take both from this node's bundle")])
    return secret
