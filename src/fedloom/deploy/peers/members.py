"""The membership file of a network: its nodes, their addresses and their keys.

It is the same file at every node, distributed before the start, and part of what nodes must agree on.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedloom.core import disk
from fedloom.core.errors import ConfigError, DataError, Fault
from fedloom.deploy.contract import AgreedTerms, Contract
from fedloom.engine.topology.network import START, Topology

MEMBERS = "members.toml"
PROTOCOL = "2"  # of messages between peers
_ADDRESS = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.%]+\]|[^\s\[\]:/]+):([0-9]{1,5})")
_KEY = re.compile(r"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")  # 32 bytes in Z85


class Member(NamedTuple):
    """A node of the network."""

    name: str
    address: str  # tcp://host:port
    key: str  # its public key, in Z85


class Members(NamedTuple):
    """All nodes, in the order of their numbers."""

    nodes: tuple[Member, ...]
    sha256: str  # of the file


def is_address(text: str) -> bool:
    """Whether a node can listen, or be reached, there."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match[1]) <= 65535


def write_members(path: Path, campaign: str, nodes: list[Member], topology: Topology) -> None:
    """Write the membership file."""
    table = {
        "federation": campaign,
        "node": [{"number": number, **node._asdict()} for number, node in enumerate(nodes)],
        "graph": graph_of(topology, len(nodes)),
    }
    disk.write_bytes(path, tomli_w.dumps(table).encode())


def graph_of(topology: Topology, count: int) -> dict[str, Any]:
    """The links of the first gossip step with their weights, for the reader."""
    by_data = topology.weights == "data_weighted"
    weights = topology.weigh(count, START)
    links = [
        [int(to), int(by)] + ([] if by_data else [float(value)])
        for to, by, value in zip(weights.to, weights.by, weights.value, strict=True)
        if to != by
    ]
    said = "by training examples, known once all nodes are connected" if by_data else "receiver, sender, weight"
    return {"kind": topology.kind, "redrawn": topology.redrawn, "columns": said, "links": links}


def read_members(folder: Path, contract: Contract) -> Members:
    """The membership file of a bundle; refused if it does not match its contract."""
    path = folder / MEMBERS
    try:
        data = path.read_bytes()
        table = tomllib.loads(data.decode("utf-8-sig"))
        nodes = tuple(Member(str(n["name"]), str(n["address"]), str(n["key"])) for n in table["node"])
        graph, federation = table["graph"], str(table["federation"])
    except FileNotFoundError as error:
        raise DataError(f"{path}: is missing (make one with: fedloom peers init)") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: is damaged ({type(error).__name__}: {error})") from error
    assert contract.config.topology is not None
    faults = []
    if tuple(node.name for node in nodes) != contract.nodes or federation != contract.campaign:
        faults.append(Fault(str(path), "names other nodes than the contract", "take both from one bundle"))
    elif graph != json.loads(json.dumps(graph_of(contract.config.topology, len(nodes)))):
        faults.append(Fault(f"{path}, graph", "is not that of the experiment", "take both from one bundle"))
    for node in nodes:
        if not is_address(node.address):
            what = f"'{node.address}', of {node.name}, is not an address"
            faults.append(Fault(f"{path}, address", what, "as tcp://a.example.org:9444, and the same at all nodes"))
        if not _KEY.fullmatch(node.key):
            faults.append(Fault(f"{path}, key", f"'{node.key}', of {node.name}, is not a key", "take it from a bundle"))
    if len({node.key for node in nodes}) < len(nodes):
        faults.append(Fault(str(path), "two nodes have the same key"))
    if faults:
        raise ConfigError(faults)
    return Members(nodes, hashlib.sha256(data).hexdigest())


def agreed_terms(contract: Contract, members: Members) -> AgreedTerms:
    """What must be the same at all nodes."""
    terms = AgreedTerms.of(contract)
    return terms._replace(parts=terms.parts | {"members": members.sha256, "protocol": PROTOCOL})


def agreement(parts: dict[str, str]) -> str:
    """One hash of all that nodes have agreed on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
