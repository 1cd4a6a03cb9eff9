"""A network of real links computes what the simulation of it computes, and keeps what is wrong out."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from fedloom.cli.peers import _print_status
from fedloom.core.errors import ConfigError, DataError
from fedloom.deploy.audit import read_audit
from fedloom.deploy.messages import Envelope, MessageError, packed, unpacked
from fedloom.deploy.node import Policy
from fedloom.deploy.own_data import EXPERIMENT_DATA
from fedloom.deploy.peers.bundles import addresses, not_for_peers, read_bundle, read_secret
from fedloom.deploy.peers.edges import Edges, Patience
from fedloom.deploy.peers.frames import PIECE, WireFrame
from fedloom.deploy.peers.peer import Peer
from fedloom.deploy.peers.start import missed, refuse_by_policy
from fedloom.deploy.peers.station import RefusedError
from fedloom.deploy.peers.status import status_of_peer
from fedloom.deploy.site import Listens, initialise
from fedloom.deploy.take_part import rows_of_node_at
from support.federation import config_of, simulated
from support.peers import GOSSIP, NAMES, Network, furthest, network_of, wait_until
from support.way import Way

SELDOM = {"kind": "matching", "pairs": 1}
SIX = ("Ada", "Bea", "Cem", "Dan", "Eve", "Fay")


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
    assert found["neighbours"] == {"Ada": "ended", "Cem": "ended"}
    assert [(line["round"], line["to"]) for line in read_audit(tmp_path / "site" / "bea")] == [
        (k, ["Ada", "Cem"]) for k in range(3)
    ]


VARIANTS: dict[str, dict[str, Any]] = {
    "steps": {"topology": {"kind": "full", "gossip_steps": 3}},
    "star, by data": {"topology": {"kind": "star", "weights": "data_weighted", "allow_row_stochastic": True}},
    "redrawn": {"topology": {"kind": "random", "max_degree": 1, "start": "independent"}},
    "memory": {"local": {"batch": 32, "momentum": 0.9, "state": "persist"}},
    "statistics": {
        "model": {"kind": "resnet20", "width": 4, "norm": "batch"},
        "data": {"source": "digits", "test": 0.99},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_mean_the_same_between_peers(variant: str, tmp_path: Path) -> None:
    config = network_of("dfedavg", rounds=2, **VARIANTS[variant])
    nodes = Network(tmp_path / "site", config).completed()
    assert furthest(nodes, simulated(config, 2)[1]) == 0.0


def test_six_nodes_compute_what_the_simulation_does_in_lanes(tmp_path: Path) -> None:
    """Sums of several clients side by side have another order than those of one."""
    config = network_of("dfedavg", engine={"executor": "lanes"}, rounds=2, partition={"kind": "iid", "clients": 6})
    nodes = Network(tmp_path / "site", config, SIX).completed()
    assert furthest(nodes, simulated(config, 2)[1]) <= 1e-6


# -- links that lose messages and stall -----------------------------------------------------------
def test_half_of_the_messages_are_lost_and_a_link_stalls_and_the_mean_stays(tmp_path: Path) -> None:
    """Six nodes that begin apart and barely train: whatever is lost, mixing alone must not move their mean."""
    still = {"topology": {"kind": "ring", "start": "independent"}, "local": {"steps": 1, "batch": 8, "lr": 1e-30}}
    config = network_of("dpsgd", rounds=8, partition={"kind": "iid", "clients": 6}, **still)
    network, chance = Network(tmp_path / "site", config, SIX), random.Random(2)
    before = simulated(config, 0)[1].server.w.double().sum(0)
    with Way(int(read_bundle(network.folder / "bea").members.nodes[0].address.rpartition(":")[2])) as way:

        def through(bundle: Any) -> Any:
            """Bea reaches Ada over a link that stalls."""
            nodes = bundle.members.nodes
            ada = nodes[0]._replace(address=f"tcp://127.0.0.1:{way.port}")
            return bundle._replace(members=bundle.members._replace(nodes=(ada, *nodes[1:])))

        processes = [network.process(k, deadline=0.2, alter=through if k == 1 else lambda b: b) for k in range(6)]
        for process in processes:
            process.station.edges.send = lossy(process.station.send, chance)
            patient = partial(setattr, process.station.edges, "patience", Patience(deadline=600.0))
            network.before(processes.index(process), 6, patient)  # from here on nothing is lost, and nobody is late
        network.before(1, 1, lambda: setattr(way, "stalls", True))
        network.before(1, 4, lambda: setattr(way, "stalls", False))
        network.ended([network.run(k, process) for k, process in enumerate(processes)])
    nodes = [network.state(k) for k in range(6)]
    after = torch.stack([node.server.w for node in nodes]).double().sum(0)
    assert not any(process.station.edges.doubts for process in processes)
    assert float((after - before).abs().max()) < 1e-5
    closed = [line["down"] for k in range(6) for line in network.lines(k)]
    assert sum(map(bool, closed)) > 6


def lossy(send: Callable[[int, WireFrame], None], chance: random.Random) -> Callable[[int, WireFrame], None]:
    """Half of what is said about a turn does not arrive, but for the last turns."""

    def sometimes(j: int, frame: WireFrame) -> None:
        if frame.facts.get("turn", 9) > 5 or frame.kind == "ask" or chance.random() < 0.5:
            send(j, frame)

    return sometimes


# -- nodes that are late, leave and come back ------------------------------------------------------
def test_a_late_node_is_closed_at_both_ends_and_nobody_else_waits(tmp_path: Path) -> None:
    network = Network(tmp_path / "site", network_of("dfedavg", rounds=2))

    def hold() -> None:
        others = [network.processes[k].station.edges for k in (0, 2)]
        ada, cem = others
        wait_until(lambda: ada.turn == 1 and ada.opened and ada.edges[2].up)
        wait_until(lambda: cem.turn == 1 and cem.opened and cem.edges[0].up)
        for edges in others:
            edges.since -= 1e6  # as if they had waited for so long
        wait_until(lambda: all(len(network.lines(k)) == 2 for k in (0, 2)))

    network.before(1, 1, hold)
    network.completed()
    found = [status_of_peer(tmp_path / "site" / slug) for slug in network.slugs]
    assert [(one["state"], one["closed"]) for one in found] == [
        ("completed", {"Bea": 1}),
        ("completed", {"Ada": 1, "Cem": 1}),
        ("completed", {"Bea": 1}),
    ]
    assert "is late" in network.lines(0)[1]["down"]["Bea"]
    assert network.lines(1)[1]["down"] == {"Ada": "its turn is past", "Cem": "its turn is past"}
    assert network.lines(0)[1]["up"] == ["Cem"]


def test_a_node_that_left_comes_back_and_leaves_out_what_it_missed(tmp_path: Path) -> None:
    network = Network(tmp_path / "site", network_of("dfedavg", rounds=6))
    network.before(1, 1, lambda: network.stop(1))
    network.before(0, 4, lambda: wait_until(lambda: 1 in network.processes[0].station.present()))
    network.before(2, 4, lambda: wait_until(lambda: 1 in network.processes[2].station.present()))
    threads = [network.begin(k) for k in range(3)]
    threads[1].join(600)
    assert status_of_peer(tmp_path / "site" / "bea")["state"] == "stopped"
    wait_until(lambda: len(network.lines(0)) == len(network.lines(2)) == 4)
    network.ended([threads[0], network.begin(1), threads[2]])
    found = status_of_peer(tmp_path / "site" / "bea")
    assert (found["state"], found["round"], found["skipped"]) == ("completed", 6, 3)
    assert [line["round"] for line in network.lines(1)] == [1, 5, 6]
    assert [line["down"] for line in network.lines(0)] == [{}, *[{"Bea": "has left"}] * 3, {}, {}]
    again = network.process(1)  # a node counts what it skipped over all its starts
    again.station.close()
    assert again._record("stopped")["skipped"] == 3


def test_a_slow_node_of_a_redrawn_graph_misses_nothing(tmp_path: Path) -> None:
    """One pair exchanges in a round: Bea gets to its round with Dan, the fifth, while Dan is still in the second."""
    config = network_of("dfedavg", rounds=8, partition={"kind": "iid", "clients": 6}, topology=SELDOM)
    network = Network(tmp_path / "site", config, SIX)
    network.before(3, 1, lambda: wait_until(lambda: network.processes[3].station.edges.at.get(1, 0) >= 4))
    nodes = network.completed()
    found = [status_of_peer(tmp_path / "site" / slug) for slug in network.slugs]
    assert [(one["skipped"], one["closed"]) for one in found] == [(0, {})] * 6
    assert furthest(nodes, simulated(config, 8)[1]) == 0


def test_a_node_has_missed_what_its_neighbours_have_done_without_it() -> None:
    pairs = {2: [1], 3: [], 4: [5], 5: [1]}

    def missing(**theirs: int) -> int:
        return missed(2, 6, {int(name[1:]): round_ for name, round_ in theirs.items()}, lambda r: pairs.get(r, []))

    assert missing() == 0
    assert missing(n1=2, n5=6) == 0  # node 1 waits
    assert missing(n1=3, n5=6) == 0  # the round can be repeated
    assert missing(n1=4, n5=4) == 1  # node 1 has done round 2, and node 5 waits in round 4
    assert missing(n1=5, n5=5) == 3
    assert missing(n1=9, n5=9) == 4


def test_two_nodes_that_are_killed_in_one_round_do_it_again_with_the_same_result(tmp_path: Path) -> None:
    """Bea has saved the second round, and Ada has not: Bea sends again what Ada needs, which is in its checkpoint."""
    site, killed = tmp_path / "site", tmp_path / "killed"
    config = network_of("dpsgd", rounds=3, topology={"kind": "ring", "gossip_steps": 2})
    network = Network(site, config)
    for k, round_ in ((0, 1), (1, 2), (2, 1)):
        network.before(k, round_, partial(shutil.copytree, site / network.slugs[k], killed / network.slugs[k]))
    undisturbed = network.completed()
    for slug in network.slugs:
        shutil.rmtree(site / slug)
        shutil.copytree(killed / slug, site / slug)
    again = network.completed()
    assert [[line["round"] for line in network.lines(k)] for k in range(3)] == [[1, 2, 3]] * 3
    assert [line["down"] for k in range(3) for line in network.lines(k)] == [{}] * 9
    assert all(torch.equal(one.server.w, other.server.w) for one, other in zip(undisturbed, again, strict=True))


def test_a_node_of_a_redrawn_graph_that_is_killed_repeats_what_its_partner_left_three_rounds_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bea exchanges with Dan, then with Cem, then with Ada, and Dan has not even saved the first of these."""
    site, killed = tmp_path / "site", tmp_path / "killed"
    config = network_of("dfedavg", rounds=5, partition={"kind": "iid", "clients": 4}, topology=SELDOM)
    network = Network(site, config, SIX[:4])
    for k in (0, 1, 2):
        network.before(k, 3, partial(shutil.copytree, site / network.slugs[k], killed / network.slugs[k]))
    save = Peer.save

    def held_up(peer: Peer, edges: Edges, line: dict[str, Any]) -> None:
        copy = killed / peer._place.folder.name
        if peer._place.me == 3 and not copy.exists():
            wait_until((killed / network.slugs[1]).exists)
            shutil.copytree(peer._place.folder, copy)
        save(peer, edges, line)

    monkeypatch.setattr(Peer, "save", held_up)
    network.completed()
    for slug in network.slugs:
        shutil.rmtree(site / slug)
        shutil.copytree(killed / slug, site / slug)
    nodes = network.completed()
    found = [status_of_peer(site / slug) for slug in network.slugs]
    assert [(one["skipped"], one["closed"]) for one in found] == [(0, {})] * 4
    assert furthest(nodes, simulated(config, 5)[1]) == 0


# -- intruders -------------------------------------------------------------------------------------
def altered(frame: WireFrame, body: bytes, **facts: Any) -> WireFrame:
    return frame._replace(body=body, facts={**frame.facts, "bytes": len(body), "crc": zlib.crc32(body), **facts})


def rewritten(frame: WireFrame, change: Callable[[torch.Tensor], torch.Tensor], **facts: Any) -> WireFrame:
    message = unpacked(frame.body, len(frame.body))
    tensors = {**message.tensors, "sent.upload.w": change(message.tensors["sent.upload.w"])}
    return altered(frame, packed(Envelope(message.kind, {**message.facts, **facts}, tensors)))


ATTACKS: dict[str, Callable[[WireFrame], WireFrame]] = {
    "'sent.upload.w' has numbers that are not finite": lambda f: rewritten(f, lambda w: w / 0),
    "'sent.upload.w' should be [650] float32 (got [649] float32)": lambda f: rewritten(f, lambda w: w[1:]),
    "'sent.upload.w' should be [650] float32 (got [650] float64)": lambda f: rewritten(f, torch.Tensor.double),
    "'node' should be 1 (got '2')": lambda f: rewritten(f, lambda w: w, node=2),
    "'turn' should be 4 (got '0')": lambda f: rewritten(f, lambda w: w, turn=0),  # one that was recorded
    "piece 0 of 1 is damaged": lambda f: f._replace(body=f.body[:-9]),
    "is cut short": lambda f: altered(f, f.body[:-9], bytes=len(f.body)),
    "is not a fedloom message": lambda f: altered(f, pickle.dumps(print)),
    "has 10,737,418,240 bytes where": lambda f: altered(f, f.body, bytes=10 << 30),
    "'turn' should be a whole number": lambda f: altered(f, f.body, turn="9"),
    "is of kind 'run', which this version does not know": lambda f: f._replace(kind="run"),
    "and 1,048,577 bytes where 65,536 and 1,048,576 are allowed": lambda f: f._replace(body=b"0" * (PIECE + 1)),
}


def test_what_a_member_sends_wrongly_is_refused_and_named_and_the_round_goes_on(tmp_path: Path) -> None:
    network = Network(tmp_path / "site", network_of("dfedavg", rounds=len(ATTACKS) + 1))
    attacks = list(ATTACKS.values())
    processes = [network.process(k) for k in range(3)]
    edges, honest = processes[1].station.edges, processes[1].station.send

    def tampered(j: int, frame: WireFrame) -> None:
        wrong = frame.kind == "pay" and frame.facts["turn"] < len(attacks) and not frame.facts["again"]
        honest(j, attacks[frame.facts["turn"]](frame) if wrong else frame)

    edges.send = tampered
    network.ended([network.run(k, process) for k, process in enumerate(processes)])
    for k in (0, 2):
        lines = network.lines(k)
        refused = "; ".join(why for line in lines for why in line["refused"].get("Bea", []))
        assert [why for why in ATTACKS if why not in refused] == []
        assert all(line["up"] == [NAMES[2 - k]] for line in lines[:-1])
        assert lines[-1]["up"] == [name for name in NAMES if name != NAMES[k]]


@pytest.mark.parametrize("rows", [None, {"1": 1e999}, {"1": [1e999, 1]}, {"1": [3]}, {"9": [3, 4]}, {"1": [3, -4]}])
def test_numbers_of_rows_that_cannot_be_are_refused_and_the_node_stays(rows: Any, tmp_path: Path) -> None:
    network = Network(tmp_path / "site", network_of("dfedavg"))
    station = network.process(0).station
    with pytest.raises(MessageError, match="'rows' "):
        station._handle(1, WireFrame("hello", {"rows": rows, "at": 0, **station.identity.terms._asdict()}))
    assert station.rows == {0: (178, 45)}
    station.close()


def test_strangers_are_refused_in_the_handshake_and_named(tmp_path: Path) -> None:
    network = Network(tmp_path / "site", network_of("dfedavg"))
    ada = network.process(0)
    bundle, context = read_bundle(tmp_path / "site" / "ada"), zmq.Context()
    bea = read_secret(read_bundle(tmp_path / "site" / "bea"))
    key = bundle.members.nodes[0].key.encode()
    public, secret = zmq.curve_keypair()
    sockets = []
    known = (zmq.curve_public(bea.encode()), bea.encode())
    for mine, server in (((public, secret), key), (known, public), (None, b"")):
        socket = context.socket(zmq.DEALER)
        if mine is not None:
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = *mine, server
        socket.connect(bundle.seat.bind)
        socket.send_multipart([b'{"kind": "hello"}', b""])
        sockets.append(socket)

    def all_named() -> bool:
        ada.station.pump(0.05)
        words = " ".join(network.said[0])
        return f"its key {public.decode()} is not known here" in words and "without encryption" in words

    wait_until(all_named)
    assert ada.station.rows == {0: (178, 45)}
    assert not ada.station.present()
    for socket in sockets:
        socket.close(0)
    context.term()
    ada.station.close()


def test_a_node_that_has_agreed_to_something_else_gets_an_error_that_says_what_differs(tmp_path: Path) -> None:
    network = Network(tmp_path / "site", network_of("dfedavg"))

    def other(bundle: Any) -> Any:
        form = bundle.contract.form._replace(mean=(9.0,))
        return bundle._replace(contract=bundle.contract._replace(form=form))

    threads = [network.begin(0), network.begin(1), network.begin(2, alter=other)]
    threads[2].join(600)
    assert isinstance(network.failed[2], RefusedError)
    assert "2 of 2 neighbours have not agreed to what this node has; Ada: data differs (here" in str(network.failed[2])
    assert status_of_peer(tmp_path / "site" / "cem")["state"] == "failed"
    for k in (0, 1):
        network.stop(k)
        threads[k].join(600)
        assert [line for line in network.said[k] if line.startswith("Cem: data differs")]
        assert status_of_peer(tmp_path / "site" / network.slugs[k])["state"] == "stopped"


def test_both_nodes_say_what_differs(tmp_path: Path) -> None:
    """Ada, which starts first, is told by Bea before Bea ends: it does not wait for a node that does not connect."""
    network = Network(tmp_path / "site", network_of("dfedavg", partition={"kind": "iid", "clients": 2}), NAMES[:2])

    def other(bundle: Any) -> Any:
        form = bundle.contract.form._replace(mean=(9.0,))
        return bundle._replace(contract=bundle.contract._replace(form=form))

    bea = network.begin(1, alter=other)
    wait_until(lambda: network.said[1])
    for thread in (network.begin(0), bea):
        thread.join(600)
    for k, name in ((0, "Bea"), (1, "Ada")):
        assert isinstance(network.failed[k], RefusedError)
        assert f"1 of 1 neighbours have not agreed to what this node has; {name}: data differs" in str(
            network.failed[k]
        )


def test_a_node_that_is_killed_before_its_line_is_logged_logs_it_when_it_is_started_again(tmp_path: Path) -> None:
    network = Network(tmp_path / "site", network_of("dfedavg", rounds=2))
    network.completed()
    log = tmp_path / "site" / "bea" / "rounds.jsonl"
    whole = log.read_bytes()
    assert b"test/accuracy" in whole.splitlines()[-1]
    log.write_bytes(whole.splitlines(keepends=True)[0])
    for _ in range(2):  # once, however often it is started
        network.ended([network.begin(1, grace=0.1)])
        assert log.read_bytes() == whole


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("population.json", "[[108, 27], [108", r"Expecting.*; delete it, and the next start waits"),
        ("population.json", "[[108, 27]]", "it has 1 of 3 nodes"),
        ("population.json", "7", "not iterable"),
        ("state.json", "[]", "state.json: is damaged; delete it, and the node continues"),
        ("state.json", '{"state": "running", "skipped": "many"}', "state.json: is damaged"),
        ("rounds.jsonl", '{"round": 1, "down": {}}\n{"ro\n', "line 2 is damaged; delete this line"),
    ],
)
def test_a_damaged_record_of_a_node_is_one_error_that_names_it(file: str, text: str, why: str, tmp_path: Path) -> None:
    network = Network(tmp_path / "site", network_of("dfedavg"))
    ada = tmp_path / "site" / "ada"
    (ada / file).write_text(text)
    with pytest.raises(DataError, match=why):
        _ = network.process(0).run() if file == "population.json" else status_of_peer(ada)


def test_a_node_that_corrects_its_contract_takes_part_from_the_first_round_on(tmp_path: Path) -> None:
    network = Network(tmp_path / "site", network_of("dfedavg", rounds=1))

    def other(bundle: Any) -> Any:
        form = bundle.contract.form._replace(mean=(9.0,))
        return bundle._replace(contract=bundle.contract._replace(form=form))

    threads = [network.begin(0), network.begin(1)]
    network.begin(2, alter=other).join(600)
    assert isinstance(network.failed.pop(2), RefusedError)
    for k in (0, 1):  # its farewell is of no agreement that they know
        wait_until(lambda k=k: "Cem: belongs to a different agreement" in network.said[k])  # type: ignore[misc]
    network.ended([*threads, network.begin(2)])
    assert [line["down"] for k in range(3) for line in network.lines(k)] == [{}, {}, {}]


def a_status(**more: Any) -> dict[str, Any]:
    found = {"node": "Ada", "state": "completed", "round": 3, "rounds": 3, "closed": {}, "skipped": 0}
    return {**found, "neighbours": {"Bea": "ended"}, "last_round": {"down": {}, "doubt": []}, **more}


def test_status_has_the_error_of_a_regression(capsys: pytest.CaptureFixture[str]) -> None:
    _print_status(a_status(last_round={"test/mae": 12.34567, "test/loss": 1.0}))
    assert "  mean absolute error on its own held-out rows 12.3457\n" in capsys.readouterr().out
    _print_status(a_status(last_round={"test/accuracy": 0.5, "test/loss": 1.0}))
    assert "  accuracy on its own held-out rows 0.5000\n" in capsys.readouterr().out


def test_status_counts_one_round_and_several(capsys: pytest.CaptureFixture[str]) -> None:
    _print_status(a_status(closed={"Bea": 1}, skipped=1))
    assert "  Bea: ended, closed in 1 round\n  skipped 1 round\n" in capsys.readouterr().out
    _print_status(a_status(closed={"Bea": 2}, skipped=3))
    assert "  Bea: ended, closed in 2 rounds\n  skipped 3 rounds\n" in capsys.readouterr().out


def test_status_prints_what_a_neighbour_says_without_control_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    said = "\x1b[2Jall is well\nBea: completed"
    _print_status(a_status(last_round={"down": {"Bea": said}}, why=said))
    assert "\x1b" not in (out := capsys.readouterr().out)
    assert "all is well\ufffdBea: completed\n" in out


# -- refused before anything is made ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"topology": {"kind": "ring", "link_loss": 0.1}}, "topology.link_loss"),
        ({"topology": {"kind": "exp", "mixing": "push_sum"}}, "topology"),
        ({"algorithm": {"kind": "dfedavgm", "scheme": "choco"}}, "algorithm.scheme"),
        ({"system": {"speed": 10.0}}, "system"),
    ],
)
def test_settings_without_a_meaning_between_peers_are_refused(more: dict[str, Any], where: str) -> None:
    assert where in [fault.where for fault in not_for_peers(network_of("dfedavg", **more))]


def test_bundles_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    assert not_for_peers(config_of("fedavg"))[0].fix == "use fedloom deploy"
    for hosts, why in ((["a"], "one for each node"), (["a", "a b"], "is not a host"), (["a", "a"], "the same address")):
        with pytest.raises(ConfigError, match=why):
            addresses(hosts, 2)
    assert addresses(["a", "[::1]:70"], 2) == ["tcp://a:9444", "tcp://[::1]:70"]
    Network(tmp_path / "site", network_of("dfedavg"))
    ada, bea = tmp_path / "site" / "ada", tmp_path / "site" / "bea"
    (ada / "node.key").write_bytes((bea / "node.key").read_bytes())
    with pytest.raises(ConfigError, match=r"is not the key of 'Ada' in members\.toml"):
        read_secret(read_bundle(ada))
    (bea / "node.key").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by other users"):
        read_secret(read_bundle(bea))
    with pytest.raises(ConfigError, match=r"policy\.require_secure_sum: without a server"):
        refuse_by_policy(read_bundle(ada)._replace(policy=Policy(require_secure_sum=True)))
    with pytest.raises(ConfigError, match=r"policy\.min_cohort: the network has 3 nodes; this node requires 4"):
        refuse_by_policy(read_bundle(ada)._replace(policy=Policy(min_cohort=4)))
    text = (ada / "members.toml").read_text()
    (ada / "members.toml").write_text(text.replace("0.33", "0.43", 1))
    with pytest.raises(ConfigError, match="graph: is not that of the experiment"):
        read_bundle(ada)
    assert json.loads((bea / "federation.json").read_text())["nodes"] == list(NAMES)


def test_a_folder_of_the_other_kind_is_refused_with_the_command_for_it(tmp_path: Path) -> None:
    network, federation = tmp_path / "network", tmp_path / "federation"
    Network(network, network_of("dfedavg"))
    initialise(config_of("fedavg"), ["Ada", "Bea"], Listens(), federation, Path())
    with pytest.raises(ConfigError, match=f"without a server .fedloom peers start {network / 'ada'}"):
        rows_of_node_at(network / "ada", EXPERIMENT_DATA, Path())
    for look in (read_bundle, status_of_peer):
        with pytest.raises(ConfigError, match=f"with a server .fedloom deploy node {federation / 'ada'}"):
            look(federation / "ada")


@pytest.mark.parametrize(
    ("file", "old", "new", "why"),
    [
        (
            "node.toml",
            "tcp://",
            "ipc://",
            r"node\.bind: should be tcp://host:port, as tcp://0\.0\.0\.0:9444 \(got 'ipc",
        ),
        (
            "node.toml",
            "tcp://127.0.0.1:",
            "tcp://*:9",
            "node.bind: should be",
        ),  # libzmq would take the port modulo 2^16
        ("members.toml", "tcp://", "", r"members\.toml, address: '127\.0\.0\.1:\d+', of Ada, is not an address"),
        ("members.toml", 'key = "', 'key = "a', r"members\.toml, key: 'a\S{40}', of Ada, is not a key"),
    ],
)
def test_an_address_or_a_key_that_was_mistyped_is_named(
    file: str, old: str, new: str, why: str, tmp_path: Path
) -> None:
    ada = tmp_path / "site" / "ada"
    Network(tmp_path / "site", network_of("dfedavg"))
    (ada / file).write_text((ada / file).read_text().replace(old, new))
    with pytest.raises(ConfigError, match=why):
        read_bundle(ada)
