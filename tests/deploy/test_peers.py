"""A network of real links computes what the simulation of it computes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("zmq")

from fedloom.deploy.audit import read_audit
from fedloom.deploy.peers.status import status_of_peer
from support.federation import simulated
from support.peers import GOSSIP, Network, furthest, network_of


@pytest.mark.parametrize("kind", GOSSIP)
def test_simulation_is_a_network_of_peers(kind: str, tmp_path: Path) -> None:
    config = network_of(kind)
    network = Network(tmp_path / "site", config)
    nodes = network.completed()
    assert [node.round for node in nodes] == [3, 3, 3]
    assert furthest(nodes, simulated(config)[1]) == 0.0
    found = status_of_peer(tmp_path / "site" / "bea")
    assert (found["state"], found["round"], found["closed"], found["skipped"]) == ("completed", 3, {}, 0)
    assert found["last_round"]["up"] == ["Ada", "Cem"]
    assert [line["round"] for line in read_audit(tmp_path / "site" / "bea")] == [0, 1, 2]
