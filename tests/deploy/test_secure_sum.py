"""Secure sums: the server learns the sum of the uploads of a round, and no upload; nodes may be lost on the way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from fedloom.core.errors import ConfigError
from fedloom.deploy.conduct import conduct
from fedloom.deploy.contract import AgreedTerms, read_contract
from fedloom.deploy.fleet import Failed, LostNodesError, read_rounds
from fedloom.deploy.messages import Envelope, MessageError, packed, unpacked
from fedloom.deploy.site import SERVER_TOML
from fedloom.runs.start import start
from support.federation import Tamper, a_site, config_of, here, weights

pytest.importorskip("flwr")
from fedloom.deploy import keys
from fedloom.deploy.secure_sum import BITS, Parties, Session, fixed_point, new_session, unmasked

QUIET = {"evaluate": {"personal": False}}
NAMES = ("Ada", "Bea", "Cem", "Dan")


@pytest.fixture(scope="module")
def seals(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], dict[int, str]]:
    _, key, certificate = authority = keys.new_authority("test")
    folders, shown = [], {}
    for k, name in enumerate(NAMES):
        folder = tmp_path_factory.mktemp(name)
        pair = keys.new_seal(name, key, certificate)
        (folder / "seal.key").write_bytes(pair.private)
        (folder / "ca.crt").write_bytes(authority[0].public)
        folders.append(folder)
        shown[k] = pair.public.decode()
    return folders, shown


def sessions(seals: tuple[list[Path], dict[int, str]], threshold: int = 3) -> list[Session]:
    folders, shown = seals
    parties = Parties("a sum", tuple(range(len(NAMES))), threshold, NAMES)
    return [new_session(folder, parties, k, shown) for k, folder in enumerate(folders)]


def shares_of(each: list[Session], left: list[int]) -> dict[int, dict[int, bytes]]:
    """What these nodes give once they have agreed that their uploads have arrived."""
    codes = {k: each[k].vouched(left) for k in left}
    return {k: each[k].shares_of({j: codes[j][k] for j in left if j != k}) for k in left}


@pytest.mark.parametrize("lost", [(), (2,), (0,)])
def test_masks_cancel_out_and_those_of_lost_nodes_are_taken_away(seals: Any, lost: tuple[int, ...]) -> None:
    each = sessions(seals)
    sealed = {k: one.sealed() for k, one in enumerate(each)}
    vectors = np.random.default_rng(1).normal(0, 100, (len(each), 50))
    masked = {
        k: one.masked(vectors[k], {j: sealed[j].boxes[k] for j in sealed if j != k}) for k, one in enumerate(each)
    }
    left = [k for k in masked if k not in lost]
    given = dict(list(shares_of(each, left).items())[-3:])  # no more than must be
    total = unmasked(each[0].parties, {k: masked[k] for k in left}, sealed, given)
    assert np.abs(total - vectors[left].sum(0)).max() <= len(left) * 2.0 ** -(BITS + 1) + 1e-12
    for k, words in masked.items():  # what the server has of one node is no nearer to its vector than to another
        seen = words.view(np.int64) / 2.0**BITS
        assert np.abs(np.corrcoef(seen, vectors[k])[0, 1]) < 0.6
        assert np.abs(seen).mean() > 1e7


def test_a_node_masks_once_and_gives_shares_once(seals: Any) -> None:
    each = sessions(seals)
    sealed = {k: one.sealed() for k, one in enumerate(each)}
    boxes = {j: sealed[j].boxes[0] for j in (1, 2, 3)}
    with pytest.raises(MessageError, match="no share to give"):
        each[0].shares_of({})
    with pytest.raises(MessageError, match="cannot vouch for uploads: it sent none in this sum"):
        each[0].vouched([0, 1, 2])
    each[0].masked(np.ones(3), boxes)
    with pytest.raises(MessageError, match="a second one under the same masks"):
        each[0].masked(np.zeros(3), boxes)
    with pytest.raises(MessageError, match="2 uploads arrived, and a secure sum needs 3"):
        each[0].vouched([0, 1])
    for one in each[1:]:
        one.masked(np.ones(3), {k: sealed[k].boxes[one.me] for k in sealed if k != one.me})
    shares_of(each, [0, 1, 2])
    with pytest.raises(MessageError, match="has vouched for some already"):
        each[0].vouched([0, 1, 3])
    with pytest.raises(MessageError, match="has given them already"):
        each[0].shares_of({})


def test_a_server_that_names_other_uploads_to_each_node_gets_no_share(seals: Any) -> None:
    """Otherwise some nodes would give a share of the one seed of a node, and others of its other seed."""
    each = sessions(seals)
    sealed = {k: one.sealed() for k, one in enumerate(each)}
    for one in each:
        one.masked(np.ones(3), {k: sealed[k].boxes[one.me] for k in sealed if k != one.me})
    told = {0: [0, 1, 2], 1: [0, 1, 3], 2: [0, 2, 3], 3: [0, 1, 3]}
    codes = {k: each[k].vouched(left) for k, left in told.items()}
    for k in told:
        with pytest.raises(MessageError, match=r"vouch for the same uploads, this one included: [12]; a secure"):
            each[k].shares_of({j: codes[j][k] for j in told if j != k})
    forged = {j: codes[j][3] for j in (0, 1, 2)}  # for another node
    with pytest.raises(MessageError, match="this one included: 1;"):
        each[1].shares_of(forged)


def test_forged_boxes_certificates_and_shares_are_noticed(seals: Any) -> None:
    folders, shown = seals
    each = sessions(seals)
    sealed = {k: one.sealed() for k, one in enumerate(each)}
    with pytest.raises(MessageError, match="the box of Bea was not sealed by it"):  # Bea's box for Cem, shown to Ada
        each[0].masked(np.ones(3), {1: sealed[1].boxes[2]})
    _, key, certificate = keys.new_authority("another")
    forged = shown | {1: keys.new_seal("Bea", key, certificate).public.decode()}
    swapped = shown | {1: shown[2]}
    for others, why in ((forged, "is not the authority's"), (swapped, "is that of 'Cem'"), ({}, "not the authority's")):
        with pytest.raises(MessageError, match=why):
            new_session(folders[0], each[0].parties, 0, others)
    for members, threshold in (((0, 1, 2, 3), 2), ((0,), 1), ((1, 2, 3), 3), ((0, 1, 1), 2)):
        with pytest.raises(MessageError, match=r"threshold should be more than half|needs two nodes"):
            new_session(folders[0], Parties("a sum", members, threshold, NAMES), 0, shown)
    vectors = {k: each[k].masked(np.ones(3), {j: sealed[j].boxes[k] for j in sealed if j != k}) for k in (1, 2, 3)}
    given = shares_of(each, [1, 2, 3])
    given[2] = {member: bytes(16) for member in given[2]}
    with pytest.raises(MessageError, match="a node has sent a wrong one"):
        unmasked(each[0].parties, vectors, sealed, given)


def test_a_node_that_sends_no_public_key_is_named(seals: Any) -> None:
    """Zeros are a point of small order, with which there is no common key."""
    each = sessions(seals)
    sealed = {k: one.sealed() for k, one in enumerate(each)}
    vectors = {k: each[k].masked(np.ones(3), {j: sealed[j].boxes[k] for j in sealed if j != k}) for k in (0, 1, 2)}
    given = shares_of(each, [0, 1, 2])
    sealed[1] = sealed[1]._replace(public=bytes(32))
    with pytest.raises(MessageError, match="Bea has sent a public key that is none"):
        unmasked(each[0].parties, vectors, sealed, given)


def test_the_refusal_of_a_vector_names_no_number_of_it() -> None:
    with pytest.raises(MessageError, match=r"^has a number that is too large .* below 3\.58e\+08$"):
        fixed_point(np.array([1.0, 4.56e8]), 3)


def test_only_the_node_with_a_wrong_certificate_is_refused(tmp_path: Path) -> None:
    """Any other node would refuse a sum with it: the round would be lost, and only those named that are right."""
    home = a_site(tmp_path / "site", config_of("fedavg", rounds=1, **QUIET), secure_sum=True)
    transport = here(home)
    other = (home.parent / "ada" / "seal.crt").read_text()
    transport.tamper = lambda n, k, answer: (
        packed(Envelope("welcome", unpacked(answer, len(answer)).facts | {"seal": other}, {}))
        if (n, k) == (1, 1)
        else answer
    )
    with pytest.raises(LostNodesError, match=r"not complete; Bea: the certificate of 'Bea' .* is that of 'Ada'$"):
        conduct(home, transport, 1, print)


def seen_by(to: dict[str, list[bytes]]) -> Tamper:
    def tamper(_: int, client: int, answer: bytes) -> bytes:
        to.setdefault(unpacked(answer, len(answer)).kind, []).append(answer)
        return answer

    return tamper


@pytest.mark.parametrize("kind", ["scaffold", "fedavg", "analytic"])
def test_a_run_of_secure_sums_computes_what_the_laboratory_does(kind: str, tmp_path: Path) -> None:
    home = a_site(tmp_path / "site", config_of(kind, **QUIET), secure_sum=True)
    transport, seen = here(home), dict[str, list[bytes]]()
    transport.tamper = seen_by(seen)
    conduct(home, transport, 1, print)
    start(read_contract(home).config, out=tmp_path / "lab", root=Path())
    for found, expected in zip(weights(home / "runs" / "1"), weights(tmp_path / "lab"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert "trained" not in seen  # no upload in the clear
    assert [len(seen[kind]) for kind in ("sealed", "masked", "agreed", "unmasked")] == [3 * 3] * 4
    vectors = [load(answer)["masked"].double() for answer in seen["masked"]]
    for words in vectors[:3]:  # of the first round
        assert float(words.abs().mean()) > 2.0**60  # all of 64 bits: nothing is left of numbers below 2**40


def lost_in(kind: str, *clients: int) -> Tamper:
    """Nodes that are not heard any more from a stage of each round on."""
    exchanges = ("sealed", "masked", "agreed", "unmasked")

    def tamper(_: int, client: int, answer: bytes) -> bytes | Failed:
        gone = client in clients and unpacked(answer, len(answer)).kind in exchanges[exchanges.index(kind) :]
        return Failed("was killed") if gone else answer

    return tamper


@pytest.mark.parametrize("stage", ["sealed", "masked", "agreed", "unmasked"])
def test_a_node_that_is_lost_in_a_round_is_left_out_of_the_sum(stage: str, tmp_path: Path) -> None:
    home = a_site(tmp_path / "site", config_of("fedavg", rounds=1, **QUIET), secure_sum=True)
    plain = a_site(tmp_path / "plain", config_of("fedavg", rounds=1, **QUIET))
    for at in (home, plain):
        text = (at / SERVER_TOML).read_text()
        (at / SERVER_TOML).write_text(text.replace("quorum = 1.0", "quorum = 0.6"))
    transport, other = here(home), here(plain)
    transport.tamper = lost_in(stage, 1)
    late = stage in ("agreed", "unmasked")  # its upload was heard, and counts
    other.tamper = None if late else (lambda n, k, answer: Failed("was killed") if (n, k) == (2, 1) else answer)
    conduct(home, transport, 1, print)
    conduct(plain, other, 1, print)
    (line,) = (line for line in read_rounds(home) if line["kind"] == "train")
    assert line["answered"] == (["Ada", "Bea", "Cem"] if late else ["Ada", "Cem"])
    for found, expected in zip(weights(home / "runs" / "1"), weights(plain / "runs" / "1"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        ("masked", r"round 1: 1 of 3 nodes answered, 2 are needed; Bea: was killed; Cem: was killed"),
        ("agreed", r"round 1: the masks of 3 uploads cannot be taken away: 1 of 3 nodes vouched for them, 2 are"),
        ("unmasked", r"round 1: the masks of 3 uploads cannot be taken away: 1 of 3 nodes gave their shares, 2 are"),
    ],
)
def test_below_the_threshold_nothing_is_learned(stage: str, why: str, tmp_path: Path) -> None:
    home = a_site(tmp_path / "site", config_of("fedavg", rounds=1, **QUIET), secure_sum=True)
    (home / SERVER_TOML).write_text((home / SERVER_TOML).read_text().replace("quorum = 1.0", "quorum = 0.1"))
    transport = here(home)
    transport.tamper = lost_in(stage, 1, 2)
    with pytest.raises(LostNodesError, match=why):
        conduct(home, transport, 1, print)


def test_two_sums_of_a_round_have_noise_of_their_own(tmp_path: Path) -> None:
    """With the same noise, a sum with a node and one without it would show its upload with its share of noise alone."""
    privacy = {"clip": 1.0, "noise": 10.0, "mechanism": "distributed"}
    method = {"kind": "fedavg", "weighting": "uniform"}
    config = config_of("fedavg", rounds=1, algorithm=method, privacy=privacy, **QUIET)
    home, found = a_site(tmp_path / "site", config, secure_sum=True), []
    for _ in range(2):  # the server has lost the round
        conduct(home, here(home), 1, print)
        found.append(torch.cat([part.flatten() for part in weights(home / "runs" / "1")]))
        shutil.rmtree(home / "runs" / "1")
    assert float((found[0] - found[1]).std()) == pytest.approx(10.0 * 2**0.5 / 3, rel=0.15)


def test_nodes_demand_it_and_methods_that_need_each_upload_are_refused(tmp_path: Path) -> None:
    home = a_site(tmp_path / "site", config_of("fedavg", rounds=1, **QUIET), secure_sum=True)
    (home / SERVER_TOML).write_text((home / SERVER_TOML).read_text().replace("secure_sum = true", "secure_sum = false"))
    with pytest.raises(
        LostNodesError, match=r"Ada: refuses: policy\.require_secure_sum: the server asks for uploads in"
    ):
        conduct(home, here(home), 1, print)
    contract, node = read_contract(home), here(home).nodes[0]
    facts = AgreedTerms.of(contract)._asdict() | {
        "campaign": contract.campaign,
        "run": 1,
        "round": 0,
        "secure_sum": True,
    }
    facts["left"] = [0, 1]
    answer = node.answer(packed(Envelope("unmask", facts, {})))
    assert "has sealed nothing for this secure sum" in str(unpacked(answer, len(answer)).facts["why"])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kind": "fedmgda"}, r"algorithm\.kind: its server needs every upload, but a secure sum shows only their sum"),
        ({"kind": "pfedala"}, r"algorithm\.kind: the size of its uploads"),
        (
            {"kind": "fedavg", "aggregation": {"rule": "median"}},
            r"aggregation\.rule: this rule needs every upload, .* \(got 'median'\) \(set aggregation\.rule=mean, or",
        ),
        ({"kind": "fedavg", "cohort": {"size": 1}}, r"cohort\.size: the sum of one node is its upload"),
    ]
    for number, (more, why) in enumerate(cases):
        with pytest.raises(ConfigError, match=why):
            a_site(tmp_path / str(number), config_of(more.pop("kind"), **more, **QUIET), secure_sum=True)


def test_noise_is_in_the_sum_and_all_of_it_also_if_a_node_is_lost(tmp_path: Path) -> None:
    """Nodes add their shares of the noise for as few nodes as must be heard."""
    uniform = {"kind": "fedavg", "weighting": "uniform"}
    privacy = {"clip": 1e-6, "noise": 1e6, "mechanism": "distributed"}
    home = a_site(tmp_path / "site", config_of("fedavg", rounds=1, algorithm=uniform, privacy=privacy, **QUIET))
    text = (home / SERVER_TOML).read_text()
    (home / SERVER_TOML).write_text(text.replace("quorum = 1.0", "quorum = 0.6").replace("sum = false", "sum = true"))
    transport = here(home)
    transport.tamper = lost_in("masked", 1)
    conduct(home, transport, 1, print)
    moved = torch.cat([x.flatten() for x in weights(home / "runs" / "1")])
    assert float(moved.std()) * 2 == pytest.approx(1.0, rel=0.15)
