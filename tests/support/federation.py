"""RemoteNodes in this process, reached through bytes: all of a deployment but the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from fedloom.core import tree
from fedloom.deploy.contract import Contract, Form, read_contract
from fedloom.deploy.ends import rows_of_client, server_end
from fedloom.deploy.fleet import Failed, RemoteNodes, Rules
from fedloom.deploy.node import Node, Place, Policy
from fedloom.deploy.site import Listens, folder_name, initialise, read_node
from fedloom.engine.rounds import advance, begin
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.store import RamStore
from fedloom.runs.overrides import without_idle
from fedloom.runs.prepare import prepare, share
from fedloom.runs.settings import Config, parse

Tamper = Callable[[int, int, bytes], bytes | Failed]  # (message number, node, answer) -> what arrives


class Here:
    """A transport that calls the nodes of this process."""

    def __init__(self, nodes: list[Node], tamper: Tamper | None = None) -> None:
        self.nodes, self.tamper, self.count = nodes, tamper, 0

    def exchange(self, data: bytes, ids: list[int], seconds: float, needed: int) -> dict[int, bytes | Failed]:
        self.count += 1
        answers: dict[int, bytes | Failed] = {}
        for client in ids:
            answer = self.nodes[client].answer(data)
            answers[client] = answer if self.tamper is None else self.tamper(self.count, client, answer)
        return answers


_HEADED = ("fedkd", "fedrep", "moon")  # methods for which a net needs a body


def table_of(kind: str, **more: Any) -> dict[str, Any]:
    """Three clients with very unequal digits; one client after another, so that no bit depends on the others."""
    table = {
        "rounds": 3,
        "seed": 5,
        "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5, "holdout": 0.2},
        "data": {"source": "digits", "test": 0.7},
        "model": {"kind": "mlp", "widths": [8]} if kind in _HEADED else {"kind": "logistic"},
        "local": {"batch": 32},
        "cohort": {"sampling": "all"},
        "engine": {"executor": "loop"},
        "algorithm": {"kind": kind},
    }
    return without_idle(table | more)[0]


def contract_of(config: Config) -> Contract:
    shared = share(config, Path())
    return Contract(config, Form.of(shared.arrays), ("Ada", "Bea", "Cem"), "test")


class Federation:
    """A server and three nodes."""

    def __init__(self, folder: Path, config: Config, tamper: Tamper | None = None, **rules: Any) -> None:
        self.folder, self.config, self.contract = folder, config, contract_of(config)
        shared = share(config, Path())
        self.places = [
            Place(self.contract, k, rows_of_client(shared, k), folder / name, Policy())
            for k, name in enumerate(self.contract.nodes)
        ]
        self.transport = Here([Node(place) for place in self.places], tamper)
        self.nodes = RemoteNodes(self.contract, self.transport, folder, Rules(**rules))
        population = self.nodes.greet()
        self.exp: Experiment = server_end(config, shared, population, self.nodes).experiment

    def restart(self, client: int) -> None:
        """End the process of a node, and start it again."""
        self.transport.nodes[client] = Node(self.places[client])

    def advanced(self, state: RunState | None = None, rounds: int = 3) -> RunState:
        state, store = state or begin(self.exp), RamStore(3)
        for _ in range(rounds):
            state, _ = advance(self.exp, state, store)
        return state


def simulated(config: Config, rounds: int = 3) -> tuple[Experiment, RunState, RamStore]:
    exp = prepare(config, Path()).experiment
    state, store = begin(exp), RamStore(3)
    for _ in range(rounds):
        state, _ = advance(exp, state, store)
    return exp, state, store


def config_of(kind: str, **more: Any) -> Config:
    return parse(table_of(kind, **more))


def same(a: Any, b: Any) -> bool:
    return all(bool((x == y).all()) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def a_site(folder: Path, config: Config, nodes: tuple[str, ...] = ("Ada", "Bea", "Cem"), **more: Any) -> Path:
    """The folders of a federation; returns the server's."""
    initialise(config, list(nodes), Listens(), folder, Path(), **more)
    return folder / "server"


def here(home: Path, *, trust: bool = False) -> Here:
    """The nodes of a site, in this process, each with its part of the experiment's data."""
    contract = read_contract(home)
    shared = share(contract.config, Path())
    folders = [home.parent / folder_name(name) for name in contract.nodes]
    places = [
        Place(read_contract(folder, trust=trust), k, rows_of_client(shared, k), folder, read_node(folder).policy)
        for k, folder in enumerate(folders)
    ]
    return Here([Node(place) for place in places])


def weights(folder: Path) -> tuple[Tensor, ...]:
    """The model that a folder holds."""
    found = load_file(folder / "model.safetensors")
    return tuple(found[name] for name in sorted(found))
