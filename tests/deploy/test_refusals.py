"""What a node refuses, whatever its server sends: another contract, other rows, more rounds, sums of too few."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedloom.cli.main import app
from fedloom.core.errors import ConfigError
from fedloom.deploy.conduct import conduct
from fedloom.deploy.contract import AgreedTerms, differences
from fedloom.deploy.fleet import LostNodesError
from fedloom.deploy.messages import Envelope, packed, unpacked
from fedloom.deploy.node import Node, Place, Policy
from fedloom.deploy.site import SERVER_TOML, Listens, slugs_of
from support.federation import Federation, a_site, config_of, contract_of, here, weights

Change = Callable[[Envelope], Envelope]


def why(answer: bytes) -> str:
    """Why a node refuses; empty if it does not."""
    return str(unpacked(answer, len(answer)).facts.get("why", ""))


def heard(node: Node, kind: str) -> list[Envelope]:
    """The messages of one kind that a node is sent from now on."""
    found, answer = list[Envelope](), node.answer

    def listening(data: bytes) -> bytes:
        message = unpacked(data, len(data))
        found.extend([message] if message.kind == kind else [])
        return answer(data)

    node.answer = listening  # type: ignore[method-assign]
    return found


def with_facts(**facts: Any) -> Change:
    return lambda message: message._replace(facts=message.facts | facts)


def asked_with(answer: Callable[[bytes], bytes], kind: str, change: Change, told: list[str] | None = None) -> Any:
    """What a node answers to a server that changes messages of one kind; ``told``: gets its reasons to refuse them."""

    def asked(data: bytes) -> bytes:
        message = unpacked(data, len(data))
        if message.kind != kind:
            return answer(data)
        reply = answer(packed(change(message)))
        if told is not None:
            told.append(why(reply))
        return reply

    return asked


# -- one that starts again during a run ------------------------------------------------------------
def other_settings(place: Place) -> Place:
    return place._replace(contract=contract_of(config_of("fedavg", local={"batch": 32, "lr": 5.0})))


def other_labels(place: Place) -> Place:
    arrays = place.own.arrays
    return place._replace(own=place.own._replace(arrays=arrays._replace(y=arrays.y[::-1].copy())))


def other_test_rows(place: Place) -> Place:
    return place._replace(own=place.own._replace(held_out=place.own.held_out[::-1].copy()))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            other_settings,
            r"experiment differs \(local\.lr: at this node 5\.0, at the server 0\.\d+; all sides need",
        ),
        (other_labels, "rows are not those with which the run began, although there are as many: restore its data"),
        (other_test_rows, "rows are not those with which the run began"),
    ],
)
def test_a_node_that_starts_again_with_something_else_is_refused(
    changed: Callable[[Place], Place], reason: str, tmp_path: Path
) -> None:
    federation = Federation(tmp_path, config_of("fedavg"))
    state = federation.advanced(rounds=1)
    federation.transport.nodes[1] = Node(changed(federation.places[1]))
    with pytest.raises(LostNodesError, match=f"round 2: 2 of 3 nodes answered, 3 are needed; Bea: refuses: .*{reason}"):
        federation.advanced(state, rounds=1)
    federation.restart(1)
    federation.advanced(state, rounds=1)


def test_a_node_gives_no_scores_if_none_were_agreed_on(tmp_path: Path) -> None:
    home = a_site(tmp_path / "site", config_of("fedavg", rounds=1, evaluate={"personal": False}))
    transport = here(home)
    orders = heard(transport.nodes[0], "train")
    conduct(home, transport, 1, print)
    answer = transport.nodes[0].answer(packed(orders[0]._replace(kind="evaluate")))
    assert why(answer).startswith("evaluate.personal: no scores of nodes were agreed on")


UNFIT = {
    "twice": (["A", "A", "B"], "'A' is taken twice"),
    "alike": (["Ward 1", "ward-1"], "'Ward 1' and 'ward-1' would have the same folder, ward-1"),
    "reserved": (["A", "Server"], "'Server' is reserved for a folder of the federation's own"),
    "empty": (["A", " ", ""], "a name is empty"),
}


@pytest.mark.parametrize(("names", "told"), UNFIT.values(), ids=list(UNFIT))
def test_names_that_nodes_cannot_have_are_refused_once(names: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        slugs_of(names)
    assert [*map(str, caught.value.faults)] == [f"--nodes: {told} (choose another name)"]
    assert slugs_of(["Ada", "Bea B"]) == ["ada", "bea-b"]


def test_settings_that_differ_are_named_and_others_are_compared_by_hash() -> None:
    ours = AgreedTerms({"experiment": "a" * 64, "torch": "2.0"}, {"rounds": "3", "local.lr": "0.1", "name": '"x"'})
    theirs = AgreedTerms({"experiment": "b" * 64, "torch": "2.0"}, {"rounds": "3", "local.lr": "0.2", "seed": "1"})
    told = 'local.lr: here 0.1, there 0.2, name: here "x", there not set, seed: here not set, there 1'
    assert differences(ours, theirs._asdict()) == [
        f"experiment differs ({told}; all sides need the experiment.toml that `init` made)"
    ]
    assert differences(ours, ours._asdict()) == []
    assert differences(ours, {"parts": theirs.parts}) == [f"experiment differs (here {'a' * 12}, there {'b' * 12})"]
    many = theirs._replace(settings={f"s{k}": "1" for k in range(6)})
    assert ", 6 more settings; all sides" in differences(ours, many._asdict())[0]


# -- a server that asks for more than was agreed ----------------------------------------------------
ASKED: dict[str, tuple[Change, dict[str, Any]]] = {
    "experiment differs": (with_facts(parts={}), {}),
    r"policy\.algorithms: 'fedavg' is not allowed here": (with_facts(), {"algorithms": ("fedprox",)}),
    r"policy\.require_privacy: the experiment adds no noise": (with_facts(), {"require_privacy": True}),
    r"'round' should be 2 at most: the experiment has 3 \(got 50000\)": (with_facts(round=50000), {}),
    "'round' should be 3 at most": (lambda m: with_facts(round=4)(m._replace(kind="evaluate")), {}),
}


@pytest.mark.parametrize("reason", ASKED)
def test_limits_bind_a_server_that_sends_no_greeting(reason: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, config_of("fedavg"))
    orders = heard(federation.transport.nodes[0], "train")
    federation.advanced(rounds=1)
    change, policy = ASKED[reason]
    place = federation.places[0]._replace(policy=Policy(**policy))
    assert re.search(reason, why(Node(place).answer(packed(change(orders[0])))))
    assert why(Node(federation.places[0]).answer(packed(orders[0]))) == ""


def a_sum_of_one(message: Envelope) -> Envelope:
    """Only the boxes of the node itself: it would add no mask that it has in common with another."""
    boxes = message.tensors["boxes"][:1]
    return with_facts(sealed=[0])(message._replace(tensors=message.tensors | {"boxes": boxes}))


def a_sum_of_two(message: Envelope) -> Envelope:
    boxes = message.tensors["boxes"][:2]
    return with_facts(sealed=[0, 1])(message._replace(tensors=message.tensors | {"boxes": boxes}))


SUMS: dict[str, tuple[str, Change, int]] = {
    r"'sealed' should name 2 nodes or more, this one included \(got \[0\]\): with fewer": ("train", a_sum_of_one, 0),
    r"policy\.min_cohort: 'members' should name 3 nodes or more \(got 2\)": ("seal", with_facts(members=[0, 1]), 3),
    r"policy\.min_cohort: 'sealed' should name 3 nodes or more \(got 2\)": ("train", a_sum_of_two, 3),
    r"policy\.min_cohort: 'left' should name 3 nodes or more \(got 2\)": ("agree", with_facts(left=[0, 1, 1]), 3),
}


@pytest.mark.parametrize("reason", SUMS)
def test_a_secure_sum_of_too_few_is_refused(reason: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    kind, change, least = SUMS[reason]
    config = config_of("fedavg", rounds=1, evaluate={"personal": False})
    home = a_site(tmp_path / "site", config, secure_sum=True)
    (home / SERVER_TOML).write_text((home / SERVER_TOML).read_text().replace("quorum = 1.0", "quorum = 0.6"))
    settings = home.parent / "ada" / "node.toml"
    settings.write_text(settings.read_text().replace("min_cohort = 0", f"min_cohort = {least}"))
    transport = here(home)
    told = list[str]()
    transport.nodes[0].answer = asked_with(transport.nodes[0].answer, kind, change, told)  # type: ignore[method-assign]
    conduct(home, transport, 1, print)
    assert re.search(reason, told[0])


def test_a_server_cannot_make_the_noise_of_a_secure_sum_smaller(tmp_path: Path) -> None:
    """Shares of common noise are for as many nodes as the threshold, whatever number the server names."""
    pytest.importorskip("flwr")
    uniform, privacy = {"kind": "fedavg", "weighting": "uniform"}, {"clip": 1e-6, "noise": 1e6}
    more = {"algorithm": uniform, "privacy": privacy | {"mechanism": "distributed"}, "evaluate": {"personal": False}}
    home = a_site(tmp_path / "site", config_of("fedavg", rounds=1, **more), secure_sum=True)
    transport = here(home)
    for node in transport.nodes:
        node.answer = asked_with(node.answer, "train", with_facts(senders=10**6, least=10**6))  # type: ignore[method-assign]
    conduct(home, transport, 1, print)
    moved = torch.cat([x.flatten() for x in weights(home / "runs" / "1")])
    assert float(moved.std()) * 3 == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize(
    "host", ["https://fed.example.org", "fed.example.org:9443", "köln.example", "fed example", "::1", ""]
)
def test_a_host_that_no_node_could_reach_is_refused_before_any_bundle_is_made(host: str, tmp_path: Path) -> None:
    words = ["deploy", "init", "--nodes", "Ada, Bea", "--host", host, "--out", str(tmp_path / "site")]
    said = CliRunner().invoke(app, [*words, "data=digits", "algorithm=fedavg"])
    assert isinstance(said.exception, ConfigError)
    assert [fault.where for fault in said.exception.faults] == ["--host"]
    assert "a name (in ASCII) or an IPv4 address alone" in str(said.exception)
    assert not (tmp_path / "site").exists()
    assert Listens(host="10.0.0.3").host == "10.0.0.3"
