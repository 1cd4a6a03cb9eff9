"""Networks in this process: each node in a thread of its own, with real keys, sockets and files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedloom.core import tree
from fedloom.deploy.ends import Population, population_of, rows_of_client
from fedloom.deploy.peers import start
from fedloom.deploy.peers.bundles import initialise_peers, read_bundle, read_secret
from fedloom.deploy.peers.peer import Peer, PeerPlace
from fedloom.deploy.peers.records import read_node_rounds
from fedloom.engine.peer import OwnWork
from fedloom.engine.state import RunState
from fedloom.runs.prepare import share
from fedloom.runs.settings import Config, parse
from support.federation import table_of
from support.ports import free_ports

NAMES = ("Ada", "Bea", "Cem")
_one_at_a_time = threading.Lock()
Hook = Callable[[], None]
_hooks: dict[tuple[Path, int], Hook] = {}  # what happens in a node's folder before it trains a round


class TestedPeer(Peer):
    """A node that can be held up before it trains."""

    def __init__(self, place: PeerPlace, population: Population) -> None:
        """Nodes compute in turn: real ones do not share a process, and torch's random generator with it."""
        with _one_at_a_time:
            super().__init__(place, population)

    def train(self) -> OwnWork:
        _hooks.pop((self._place.folder, self.state.round), lambda: None)()
        with _one_at_a_time:
            return super().train()

    def advance(self, rounds: int = 1, **more: Any) -> None:
        """A round that is skipped, because the others are further, is not trained: its hook is not forgotten."""
        before = self.state.round
        super().advance(rounds, **more)
        for skipped in range(before, self.state.round):
            _hooks.pop((self._place.folder, skipped), lambda: None)()

    def evaluated(self) -> dict[str, float]:
        with _one_at_a_time:
            return super().evaluated()


start.Peer = TestedPeer  # type: ignore[misc]
GOSSIP = ("dpsgd", "dfedavg", "dfedavgm", "dfedsam", "dfedgam")


def network_of(kind: str, **more: Any) -> Config:
    table = table_of(kind, **({"topology": {"kind": "ring"}} | more))
    return parse({name: value for name, value in table.items() if name != "cohort"})


class Network:
    """Nodes that can be started, stopped and started again."""

    def __init__(self, folder: Path, config: Config, names: tuple[str, ...] = NAMES) -> None:
        hosts = [f"127.0.0.1:{port}" for port in free_ports(len(names))]
        self.slugs = initialise_peers(config, list(names), hosts, folder, Path())
        self.folder, self.names = folder, names
        self.processes: dict[int, start.PeerProcess] = {}
        self.said: dict[int, list[str]] = {k: [] for k in range(len(names))}
        self.failed: dict[int, BaseException] = {}
        self._shared = None

    def process(
        self, k: int, *, alter: Callable[[Any], Any] = lambda bundle: bundle, **rules: Any
    ) -> start.PeerProcess:
        """A node that is ready to run."""
        bundle = read_bundle(self.folder / self.slugs[k])
        bundle = alter(bundle._replace(patience=bundle.patience.model_copy(update=rules)))
        self._shared = self._shared or share(bundle.contract.config, Path())
        place = PeerPlace(bundle.contract, k, rows_of_client(self._shared, k), bundle.folder)
        self.processes[k] = start.PeerProcess(
            bundle, place, read_secret(bundle), threading.Event(), self.said[k].append
        )
        return self.processes[k]

    def before(self, k: int, round_: int, hook: Hook) -> None:
        """Let a node do something before it trains a round, counted from 0."""
        _hooks[self.folder / self.slugs[k], round_] = hook

    def stop(self, k: int) -> None:
        """What Ctrl-C does."""
        self.processes[k]._stop.set()

    def begin(self, k: int, **how: Any) -> threading.Thread:
        return self.run(k, self.process(k, **how))

    def run(self, k: int, process: start.PeerProcess) -> threading.Thread:
        def body() -> None:
            try:
                process.run()
            except BaseException as error:
                self.failed[k] = error

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread

    def completed(self, **how: Any) -> list[RunState]:
        """Run all nodes to their end; the state of each."""
        self.ended([self.begin(k, **how) for k in range(len(self.names))])
        return [self.state(k) for k in range(len(self.names))]

    def ended(self, threads: list[threading.Thread]) -> None:
        """Wait for nodes to end by themselves."""
        for thread in threads:
            thread.join(600)
            assert not thread.is_alive()
        for error in self.failed.values():
            raise error

    def lines(self, k: int) -> list[dict[str, Any]]:
        """What a node has logged of its rounds."""
        return list(read_node_rounds(self.folder / self.slugs[k]))

    def peer(self, k: int) -> Peer:
        """A node as its last checkpoint has it."""
        process = self.processes[k]
        rows = [process.station.rows[i] for i in range(len(self.names))]
        peer = Peer(process._place, population_of(rows))
        peer.load()
        return peer

    def state(self, k: int) -> RunState:
        return self.peer(k).state


def wait_until(true: Callable[[], Any]) -> None:
    until = time.monotonic() + 600
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def furthest(nodes: list[RunState], simulated: RunState) -> float:
    """The largest difference between nodes and the rows of a simulation; exactly 0 where they are bit for bit alike."""
    far = 0.0
    for k, node in enumerate(nodes):
        pairs = zip(
            tree.leaves((node.server, node.buffers)), tree.leaves((simulated.server, simulated.buffers)), strict=True
        )
        for mine, rows in pairs:
            if mine.numel() and not torch.equal(mine, rows[k]):
                far = max(far, float((mine.double() - rows[k].double()).abs().max()))
    return far
