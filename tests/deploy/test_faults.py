"""Nodes that are killed, frozen or out of space, as real processes.

Flower starts a process for each message and asks for messages every few seconds, so that twenty rounds would take
minutes. Here the rounds reach the nodes' processes directly; ``test_flower.py`` kills nodes below Flower.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.errors import StorageError
from fedloom.deploy.conduct import conduct
from fedloom.deploy.contract import read_contract
from fedloom.deploy.fleet import Failed, LostNodesError, read_rounds
from fedloom.deploy.site import NODES, SERVER_TOML, read_state
from support.apart import Apart
from support.federation import Here, Tamper, a_site, config_of, here, same, weights

FILES = range(4, 17)  # those before which a node is killed, one in each round
QUIET = {"evaluate": {"personal": False, "every": 20}}


def with_rules(home: Path, **rules: float) -> None:
    """Other rules than `init` writes."""
    path = home / SERVER_TOML
    text = path.read_text()
    for name, value in rules.items():
        before = next(line for line in text.splitlines() if line.startswith(f"{name} ="))
        text = text.replace(before, f"{name} = {value}")
    path.write_text(text)


def conducted(home: Path, nodes: Apart) -> None:
    """Go on after too few nodes have answered, as an operator would."""
    for _ in range(20):
        try:
            assert conduct(home, nodes, 1, print) is not None
            return
        except LostNodesError as error:
            print(error)
    pytest.fail("the run did not come to its end")


def answered(home: Path) -> dict[int, list[str]]:
    """Who answered in each round; of one that was done again, the last time counts."""
    return {line["round"]: line["answered"] for line in read_rounds(home) if line["kind"] == "train"}


def as_logged(home: Path) -> Tamper:
    """Nodes of which the server hears no more than a log says; a run greets first, then trains round after round."""
    names, rounds = read_contract(home).nodes, answered(home)

    def tamper(count: int, client: int, answer: bytes) -> bytes | Failed:
        heard = rounds.get(count - 2, names)
        return answer if names[client] in heard else Failed("was killed")

    return tamper


def test_a_third_of_the_nodes_is_killed_in_every_round(tmp_path: Path) -> None:
    """Ten nodes, of which three are killed while they answer or between two rounds, time and again; one is frozen too.

    One of the three is killed just before it touches its fourth file, fifth, and so on to the sixteenth. The server
    mirrors the clients' states, and the result is that of nodes which lost nothing but these answers.
    """
    names = tuple(f"Node {k}" for k in range(10))
    config = config_of("scaffold", rounds=len(FILES), local={"steps": 2, "batch": 8}, **QUIET)
    home = a_site(tmp_path / "site", config, names)
    with_rules(home, quorum=0.5, deadline=0.2)
    shutil.copytree(tmp_path / "site", tmp_path / "again")
    draw, nodes, files = random.Random(1), Apart(home), iter(FILES)
    nodes.start(*range(10))
    frozen = 4

    def trouble(count: int, ids: list[int]) -> None:
        if len(ids) < 10 or count < 2:
            return
        (nodes.freeze if count in (4, 5) else nodes.thaw)(frozen)  # it may have answered the first of these before
        victims = draw.sample([k for k in ids if k != frozen], 3)
        crashed = [k for k in ids if nodes.processes[k].poll() is not None]
        nodes.kill(*victims)  # while they work, or just before or after
        nodes.start(*({*victims[:2], *crashed} - {victims[2]}))
        nodes.start(victims[2], crash_at=next(files, 0))  # before it touches so many of its files

    nodes.sent = trouble
    try:
        conducted(home, nodes)
    finally:
        nodes.kill(*range(10))
    lines = [line for line in read_rounds(home) if line["kind"] == "train"]
    assert len(answered(home)) == len(FILES)
    assert nodes.starts >= 10 + 3 * len(FILES)
    assert any("Node 4" in line["late"] for line in lines)
    assert sum(len(line["answered"]) for line in lines) < 9 * len(lines)
    again = here(tmp_path / "again" / "server")
    again.tamper = as_logged(home)
    conduct(tmp_path / "again" / "server", again, 1, print)
    assert same(weights(home / "runs" / "1"), weights(tmp_path / "again" / "server" / "runs" / "1"))


def test_disks_that_are_full_at_a_node_and_then_at_the_server_lose_nothing(tmp_path: Path) -> None:
    """The node refuses in words, and is back in the next round; the run ends with an error, and goes on later."""
    pytest.importorskip("flwr")
    from fedloom.deploy.serve import resume_run

    home = a_site(tmp_path / "site", config_of("scaffold", **QUIET))
    with_rules(home, quorum=0.6)
    shutil.copytree(tmp_path / "site", tmp_path / "again")
    (home / NODES).write_text(json.dumps(dict.fromkeys(read_contract(home).nodes, "0")))  # as if all were registered
    nodes, usual = Apart(home), resource.getrlimit(resource.RLIMIT_FSIZE)
    nodes.start(*range(3))

    class Filled(Here):
        """The same nodes, on disks that fill up before a message is sent."""

        def exchange(self, *given: Any) -> dict[int, bytes | Failed]:
            full = 1 if nodes.count == 2 else usual[0]
            resource.prlimit(nodes.processes[1].pid, resource.RLIMIT_FSIZE, (full, usual[1]))
            if nodes.count == 3:  # smaller than a checkpoint, larger than what tells of it
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, usual[1]))
            return nodes.exchange(*given)

    try:
        with pytest.raises(StorageError, match=rf"File too large.*make room, then fedloom deploy resume {home.parent}"):
            conduct(home, Filled([]), 1, print)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, usual[1]))
        with pytest.raises(StorageError, match="what was saved before is intact: make room, then try again"):
            resume_run(home.parent)
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        assert read_state(home)["state"] == "failed"
        assert conduct(home, nodes, 1, print) is not None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        nodes.kill(*range(3))
    trained = [line for line in read_rounds(home) if line["kind"] == "train"]
    assert [line["round"] for line in trained] == [0, 1, 2, 2]
    assert "File too large" in trained[1]["failed"]["Bea"]
    assert [len(line["answered"]) for line in trained] == [3, 2, 3, 3]
    again = here(tmp_path / "again" / "server")
    again.tamper = as_logged(home)
    conduct(tmp_path / "again" / "server", again, 1, print)
    assert same(weights(home / "runs" / "1"), weights(tmp_path / "again" / "server" / "runs" / "1"))
