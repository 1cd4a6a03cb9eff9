"""Rounds in which something goes wrong: uploads that are refused, nodes that are late, rounds that the server loses."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

import fedloom
from fedloom.core.errors import CheckpointError, ConfigError, DataError
from fedloom.deploy.audit import read_audit
from fedloom.deploy.conduct import conduct
from fedloom.deploy.contract import AgreedTerms, read_contract, write_contract
from fedloom.deploy.fleet import Failed, LostNodesError, read_rounds
from fedloom.deploy.messages import HEADER, Envelope, MessageError, packed, unpacked
from fedloom.deploy.node import Node, Policy
from fedloom.deploy.own_data import own_rows
from fedloom.deploy.site import write_state
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.runs.folder import write_key
from fedloom.runs.look import look_at_run
from fedloom.runs.prepare import share
from fedloom.runs.start import start
from fedloom.trust.noise import fresh_key
from support.federation import Federation, Here, Tamper, a_site, config_of, contract_of, here, same, simulated, weights


def changed(data: bytes, **tensors: torch.Tensor) -> bytes:
    message = unpacked(data, len(data))
    return packed(message._replace(tensors=message.tensors | tensors))


def upload_of(data: bytes) -> tuple[str, torch.Tensor]:
    return next((name, x) for name, x in load(data).items() if x.dim() == 1 and len(x) == 650)


BAD: dict[str, Any] = {
    "not finite": lambda data, name, x: changed(data, **{name: torch.full_like(x, torch.nan)}),
    "should be": lambda data, name, x: changed(data, **{name: x[:-1].clone()}),
    "got \\[650\\] float64": lambda data, name, x: changed(data, **{name: x.double()}),
    "unexpected array": lambda data, name, x: changed(data, more=x),
    "are expected at most": lambda data, name, x: data + bytes(2 * HEADER),
    "not a fedloom message": lambda data, name, x: pickle.dumps({"w": np.ones(3)}),
    "of kind 'evaluated'": lambda data, name, x: packed(Envelope("evaluated", {}, {})),
    "its key belongs to another node": lambda data, name, x: packed(
        Envelope("trained", unpacked(data, len(data)).facts | {"name": "Ada"}, load(data))
    ),
    "of round 7": lambda data, name, x: packed(
        Envelope("trained", unpacked(data, len(data)).facts | {"round": 7}, load(data))
    ),
    "is negative": lambda data, name, x: changed(data, **{"sent.1": -load(data)["sent.1"]}),
}


@pytest.mark.parametrize("why", BAD)
def test_a_bad_upload_is_refused_and_named_and_the_round_goes_on(why: str, tmp_path: Path) -> None:
    def tamper(_: int, client: int, answer: bytes) -> bytes:
        is_upload = client == 1 and unpacked(answer, len(answer)).kind == "trained"
        return BAD[why](answer, *upload_of(answer)) if is_upload else answer

    federation = Federation(tmp_path, config_of("fedavg"), tamper, quorum=0.6)
    said: list[str] = []
    federation.nodes.say = said.append
    after = federation.advanced(rounds=1)
    (line,) = (line for line in read_rounds(tmp_path) if line["kind"] == "train")
    assert line["answered"] == ["Ada", "Cem"]
    assert list(line["failed"]) == ["Bea"]
    assert re.search(why, line["failed"]["Bea"])
    assert said == [f"train, round 1: Bea: {line['failed']['Bea']}"]
    assert not same(after.server, simulated(config_of("fedavg"), 1)[1].server)


def late_in(messages: set[int], client: int) -> Tamper:
    return lambda count, k, answer: Failed("is late", late=True) if k == client and count in messages else answer


def test_an_evaluation_waits_for_nodes_and_is_marked_where_it_lacks_some(tmp_path: Path) -> None:
    home = a_site(tmp_path / "site", config_of("fedavg", rounds=1))

    class Waiting(Here):
        needed: list[int] = []  # noqa: RUF012

        def exchange(self, data: bytes, ids: list[int], seconds: float, needed: int) -> dict[int, bytes | Failed]:
            if unpacked(data, len(data)).kind == "evaluate":
                self.needed.append(needed)
            return super().exchange(data, ids, seconds, needed)

    told: list[str] = []
    transport = Waiting(here(home).nodes, late_in({4}, 2))  # hello, evaluation, round 1, evaluation
    conduct(home, transport, 1, told.append)
    assert transport.needed == [3, 3]
    marked = [line.rpartition("  ")[2] for line in told if line.startswith("round ")]
    assert marked[-1] == "(personal: 2 of 3 nodes)"
    assert not any("(personal" in line for line in told if line.startswith("round 0"))
    lines = [line for line in read_rounds(home) if line["kind"] == "evaluate"]
    assert [(len(line["asked"]), len(line["answered"])) for line in lines] == [(3, 3), (3, 2)]


def test_a_node_whose_loss_is_not_finite_is_left_out_of_an_evaluation_and_named(tmp_path: Path) -> None:
    """Otherwise one node could end the run of all: the common model would seem to have diverged."""
    home = a_site(tmp_path / "site", config_of("fedavg", rounds=1))

    def tamper(_: int, client: int, answer: bytes) -> bytes:
        scores = client == 1 and unpacked(answer, len(answer)).kind == "evaluated"
        return changed(answer, loss=torch.tensor([torch.nan]).double()) if scores else answer

    transport, told = here(home), list[str]()
    transport.tamper = tamper
    assert conduct(home, transport, 1, told.append) is not None
    assert "evaluate, round 1: Bea: says that its scores are not finite" in told
    assert any(line.endswith("(personal: 2 of 3 nodes)") for line in told)


def test_the_run_of_a_deployment_calls_the_nodes_by_their_names(tmp_path: Path) -> None:
    home = a_site(tmp_path / "site", config_of("fedavg", rounds=1), ("Hospital A", "Hospital B", "Hospital C"))
    conduct(home, here(home), 1, print)
    lines = (home / "runs" / "1" / "clients.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in lines[1:]] == [[str(k), f"Hospital {name}"] for k, name in enumerate("ABC")]


def test_a_node_that_claims_more_rows_than_fit_into_memory_is_refused(tmp_path: Path) -> None:
    home = a_site(tmp_path / "site", config_of("fedavg", rounds=1))
    transport = here(home)
    transport.tamper = lambda n, k, answer: (
        packed(Envelope("welcome", unpacked(answer, len(answer)).facts | {"train": 10**12}, {}))
        if (n, k) == (1, 1)
        else answer
    )
    with pytest.raises(LostNodesError, match=r"Bea: says that it has 1,000,000,000,015 rows, where 100,000,000 are"):
        conduct(home, transport, 1, print)


def test_too_few_answers_are_an_error_that_names_the_nodes(tmp_path: Path) -> None:
    federation = Federation(tmp_path, config_of("fedavg"), late_in({2}, 2))
    with pytest.raises(LostNodesError, match=r"round 1: 2 of 3 nodes answered, 3 are needed; Cem: is late"):
        federation.advanced(rounds=1)


@pytest.mark.parametrize("kind", ["scaffold", "feddyn", "fedala"])
def test_a_round_that_the_server_lost_is_done_again_as_if_for_the_first_time(kind: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, config_of(kind))
    state, store = begin(federation.exp), RamStore(3)
    first, _ = advance(federation.exp, state, store)
    advance(federation.exp, first, store)  # the server is killed before it has saved this
    for client in range(3):
        federation.restart(client)
    after = federation.advanced(first, rounds=2)
    assert same(after.server, simulated(config_of(kind))[1].server)


def test_a_late_client_keeps_its_state_only_where_the_server_need_not_know_it(tmp_path: Path) -> None:
    """As in a simulation: the state of a mirrored method must agree with a server that did not receive the upload."""
    states = {}
    for kind in ("scaffold", "fedala"):
        federation = Federation(tmp_path / kind, config_of(kind), late_in({2}, 2), quorum=0.6)
        state = federation.advanced(rounds=1)
        sent: list[dict[str, Any]] = []
        federation.transport.tamper = lambda _, k, answer, to=sent: to.append({k: answer}) or answer
        federation.advanced(state, rounds=1)
        states[kind] = json.loads((tmp_path / kind / "Cem" / "runs" / "0" / "states.json").read_text())
    assert [p["round"] for p in states["scaffold"]] == [1]
    assert [p["round"] for p in states["fedala"]] == [0, 1]


def test_a_node_says_that_its_last_upload_did_not_count(tmp_path: Path) -> None:
    said: list[str] = []
    federation = Federation(tmp_path, config_of("fedavg"), late_in({2}, 2), quorum=0.6)
    federation.transport.nodes[2] = Node(federation.places[2], said.append)
    federation.advanced(rounds=2)
    lost = [line for line in said if "did not count" in line]
    assert lost == ["round 1: the server did not count what was sent: it was late, refused or lost; its log says which"]
    assert [line.partition(":")[0] for line in said if line.startswith("round")] == [
        "round 1 of 3",
        "round 1",
        "round 2 of 3",
    ]


@pytest.mark.parametrize(("kind", "told"), [("ditto", 1), ("fedavg", 0)])
def test_a_node_that_has_lost_its_state_says_so(kind: str, told: int, tmp_path: Path) -> None:
    """Otherwise its personal model would begin anew without a word; with FedAvg there is nothing to lose."""
    federation, said = Federation(tmp_path, config_of(kind)), list[str]()
    state = federation.advanced(rounds=1)
    shutil.rmtree(tmp_path / "Bea" / "runs")
    federation.transport.nodes[1] = Node(federation.places[1], said.append)
    federation.advanced(state, rounds=2)
    lost = "round 2: its state after round 1 is lost, so it began anew"
    assert [line for line in said if "lost" in line] == [lost] * told


def test_a_node_refuses_what_its_owner_does_not_allow(tmp_path: Path) -> None:
    federation = Federation(tmp_path, config_of("fedavg"))
    terms = AgreedTerms.of(federation.contract)
    hello = packed(Envelope("hello", terms._asdict(), {}))
    other = packed(Envelope("hello", terms._asdict() | {"parts": terms.parts | {"torch": "1.0"}}, {}))
    place = federation.places[0]

    def answer(data: bytes, **policy: Any) -> str:
        said = Node(place._replace(policy=Policy(**policy))).answer(data)
        return str(unpacked(said, len(said)).facts.get("why", ""))

    assert answer(hello) == ""
    assert "policy.algorithms: 'fedavg' is not allowed here" in answer(hello, algorithms=("fedprox",))
    assert "policy.require_privacy" in answer(hello, require_privacy=True)
    assert "torch differs (at this node" in answer(other)
    federation.transport.nodes[0] = Node(place._replace(policy=Policy(min_cohort=4)))
    with pytest.raises(
        LostNodesError, match=r"Ada: refuses: policy\.min_cohort: the round has 3 nodes; this node requires at least 4"
    ):
        federation.advanced(rounds=1)
    refused = read_audit(tmp_path / "Ada")[-1]
    assert (refused["asked"], refused["sent"], refused["run"]) == ("train", "refused", 0)
    assert {line["asked"] for line in read_audit(tmp_path / "Ada")} == {"hello", "train"}  # of which some were refused
    lines = [json.loads(line) for line in (tmp_path / "Bea" / "audit.jsonl").read_text().splitlines()]
    assert [line["sent"] for line in lines] == ["welcome", "trained"]
    assert lines[1]["arrays"]["sent.0.dw"] == [[650], "float32"]
    assert lines[1]["bytes"] > 4 * 650


def test_a_contract_survives_being_written(tmp_path: Path) -> None:
    contract = Federation(tmp_path / "f", config_of("fedprox")).contract
    write_contract(tmp_path, contract)
    assert read_contract(tmp_path).parts == contract.parts


@pytest.mark.parametrize("mechanism", ["local", "distributed"])
def test_noise_belongs_to_what_it_is_added_to(mechanism: str, tmp_path: Path) -> None:
    """A node that is asked for a round again sends the same, so that noise cannot be averaged away. For another model,
    or in another run, its noise is new: two uploads with the same noise would show how they differ."""
    uniform = {"kind": "fedavg", "weighting": "uniform"}
    privacy = {"clip": 1.0, "noise": 10.0, "mechanism": mechanism}
    federation = Federation(tmp_path, config_of("fedavg", algorithm=uniform, privacy=privacy))
    uploads: list[torch.Tensor] = []

    def tamper(_: int, client: int, answer: bytes) -> bytes:
        if client == 0 and unpacked(answer, len(answer)).kind == "trained":
            uploads.append(upload_of(answer)[1])
        return answer

    federation.transport.tamper = tamper
    state = begin(federation.exp)
    federation.advanced(state, rounds=1)
    federation.restart(0)
    federation.advanced(state, rounds=1)
    federation.advanced(state._replace(server=state.server._replace(w=state.server.w + 1e-3)), rounds=1)
    federation.nodes.run = 1
    federation.advanced(state, rounds=1)
    first, again, other, later = uploads
    assert torch.equal(first, again)
    scale = 10.0 if mechanism == "local" else 10.0 / 3**0.5
    for one in (other, later):
        assert float((first - one).std()) == pytest.approx(scale * 2**0.5, rel=0.15)
    assert float((other - later).std()) == pytest.approx(scale * 2**0.5, rel=0.15)


def test_the_key_of_noise_in_sums_is_the_nodes_own_and_stays(tmp_path: Path) -> None:
    """One that came with the folder may be known to the coordinator, who could subtract the noise."""
    config = config_of("analytic", rounds=1, privacy={"feature_clip": 1.0, "epsilon": 4.0})
    uploads: list[dict[str, torch.Tensor]] = []

    def tamper(_: int, client: int, answer: bytes) -> bytes:
        if client == 0 and unpacked(answer, len(answer)).kind == "trained":
            uploads.append(dict(unpacked(answer, len(answer)).tensors))
        return answer

    for name in ("one", "two"):
        federation = Federation(tmp_path / name, config, tamper)
        write_key(federation.places[0].folder, fresh_key())
        advance(federation.exp, begin(federation.exp), RamStore(3))
    assert uploads[0]
    assert all(torch.equal(sums, uploads[1][name]) for name, sums in uploads[0].items())


def test_a_message_is_never_code() -> None:
    with pytest.raises(MessageError, match="is not a fedloom message"):
        unpacked(pickle.dumps(print), HEADER)


@pytest.mark.parametrize("kind", ["fedavg", "fedala"])
def test_a_run_folder_is_that_of_the_laboratory(kind: str, tmp_path: Path) -> None:
    """Its metrics are the same, line by line; personal models stay with the nodes."""
    home = a_site(tmp_path / "site", config_of(kind))
    conduct(home, here(home), 1, print)
    lab = start(read_contract(home).config, out=tmp_path / "lab", root=Path())
    deployed = home / "runs" / "1"
    assert (deployed / "metrics.jsonl").read_text() == (tmp_path / "lab" / "metrics.jsonl").read_text()
    assert json.loads((home / "state.json").read_text()) == {"run": 1, "state": "completed"}
    assert (deployed / "summary.json").is_file()
    assert lab.model is not None
    assert same(weights(deployed), weights(tmp_path / "lab"))
    assert same(weights(tmp_path / "site" / "ada"), weights(tmp_path / "site" / "bea")) == (kind == "fedavg")
    digits = share(read_contract(home).config, Path()).arrays.x[:5]
    for folder in (deployed, tmp_path / "site" / "ada"):
        assert len(fedloom.load(folder).predict(digits)) == 5


def test_a_run_that_lost_its_nodes_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    home = a_site(tmp_path / "site", config_of("scaffold"))
    broken = here(home)
    broken.tamper = late_in({5}, 1)  # hello, evaluation, round 1, evaluation, round 2
    with pytest.raises(LostNodesError, match="round 2: 2 of 3 nodes answered, 3 are needed; Bea: is late"):
        conduct(home, broken, 1, print)
    assert json.loads((home / "state.json").read_text())["state"] == "failed"
    conduct(home, here(home), 1, print)
    start(read_contract(home).config, out=tmp_path / "lab", root=Path())
    same_bytes = [(at / "metrics.jsonl").read_bytes() for at in (home / "runs" / "1", tmp_path / "lab")]
    assert same_bytes[0] == same_bytes[1]


def test_the_server_finds_data_that_was_named_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower starts the run in the server's own folder."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{k},{('ill', 'well')[k % 2]}" for k in range(40)]
    (tmp_path / "lab.csv").write_text("\n".join(["age,outcome", *rows]))
    asked = {"data": {"source": "lab.csv", "label": "outcome"}, "partition": {"kind": "iid", "clients": 3}}
    home = a_site(tmp_path / "site", config_of("fedavg", rounds=1, **asked)).absolute()
    nodes = here(home)
    monkeypatch.chdir(home)
    assert conduct(home, nodes, 1, print) is not None
    look_at_run(home / "runs" / "1")  # as show and report do; the classes of the nodes are not known here


def test_bundles_hold_no_secret_of_others(tmp_path: Path) -> None:
    home = a_site(tmp_path / "site", config_of("fedavg"))
    secrets = {path: path.read_bytes() for path in (tmp_path / "site").rglob("*.key")}
    owners = ["ada", "ada", "authority", "bea", "bea", "cem", "cem", "server"]
    assert sorted(path.parent.name for path in secrets) == owners
    for path in (tmp_path / "site").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0 or path == tmp_path / "site"
        inside = [key for key, secret in secrets.items() if path.is_file() and secret.strip() in path.read_bytes()]
        assert inside == ([path] if path in secrets else [])
    assert "network" not in (home / "experiment.toml").read_text()


def test_a_node_reads_its_own_table_by_the_columns_of_the_contract(tmp_path: Path) -> None:
    header, draw = "age,colour,outcome", np.random.default_rng(3)
    rows = [f"{draw.normal(50, 9):.2f},{c},{o}" for c in ("red", "blue") for o in ("ill", "well") for _ in range(20)]
    (tmp_path / "lab.csv").write_text("\n".join([header, *rows]))
    data = {"source": str(tmp_path / "lab.csv"), "label": "outcome"}
    config = config_of("fedavg", data=data, partition={"kind": "iid", "clients": 3})
    contract = contract_of(config)
    (tmp_path / "mine.csv").write_text("outcome,colour,age\nwell,blue,40\nill,green,\nill,red,61\n")
    own = own_rows(contract, str(tmp_path / "mine.csv"))
    assert own.arrays.labels == ("ill", "well")
    assert own.arrays.y.tolist() == [1, 0, 0]
    assert own.arrays.x[:, 1:].round(3).tolist()[0] != own.arrays.x[:, 1:].round(3).tolist()[2]
    (tmp_path / "one.csv").write_text("outcome,colour,age\nill,blue,40\nill,red,61\n")  # a small hospital
    assert own_rows(contract, str(tmp_path / "one.csv")).arrays.y.tolist() == [0, 0]
    (tmp_path / "other.csv").write_text("outcome,colour,age\ndead,blue,40\nill,red,61\n")
    with pytest.raises(DataError, match="has the class 'dead', which the contract does not know"):
        own_rows(contract, str(tmp_path / "other.csv"))
    (tmp_path / "short.csv").write_text("outcome,age\nwell,40\nill,61\n")
    with pytest.raises((DataError, ConfigError), match="colour"):
        own_rows(contract, str(tmp_path / "short.csv"))


def test_a_run_that_was_asked_to_stop_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from fedloom.deploy.serve import status_of, stop_run

    home = a_site(tmp_path / "site", config_of("scaffold"))
    asked = here(home)
    with pytest.raises(CheckpointError, match="no run is under way"):
        stop_run(home.parent)

    def tamper(count: int, client: int, answer: bytes) -> bytes:
        if (count, client) == (3, 0):  # in the first round
            stop_run(home.parent)
        return answer

    asked.tamper = tamper
    assert conduct(home, asked, 1, print) is None
    assert status_of(home.parent)["state"] == "stopped"
    assert conduct(home, here(home), 1, print) is not None
    start(read_contract(home).config, out=tmp_path / "lab", root=Path())
    assert same(weights(home / "runs" / "1"), weights(tmp_path / "lab"))


def test_status_and_log_say_how_far_a_run_is(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from fedloom.deploy.serve import followed_log, log_text, status_of

    home = a_site(tmp_path / "site", config_of("fedavg", local={"steps": 1, "batch": 8}))
    (home / "flower.json").write_text('{"run": 1, "id": 7}')
    parts = followed_log(home.parent, threading.Event())
    seen: list[dict[str, Any]] = []
    read: list[str] = []

    def tamper(count: int, client: int, answer: bytes) -> bytes:
        if client == 0 and unpacked(answer, len(answer)).kind == "trained":
            seen.append(status_of(home.parent))
            read.append(next(parts))
        return answer

    nodes = here(home)
    nodes.tamper = tamper
    assert conduct(home, nodes, 1, print) is not None
    rows = dict(zip(("Ada", "Bea", "Cem"), (node._place.own.train for node in nodes.nodes), strict=True))
    assert [(found["state"], found["round"], found["rows"]) for found in seen] == [
        ("running", done, rows) for done in range(3)
    ]
    assert "seconds_left" not in seen[0]
    assert seen[1]["seconds_left"] == pytest.approx(2 * seen[1]["seconds_a_round"], abs=0.1)
    done = status_of(home.parent)
    assert "seconds_left" not in done
    last = json.loads((home / "runs" / "1" / "metrics.jsonl").read_text().splitlines()[-1])
    assert done["metrics"]["global/test/accuracy"] == last["global/test/accuracy"]
    assert "round 1 of 3" in "".join(read)
    assert "completed" not in "".join(read)
    assert "".join([*read, *parts]) == log_text(home.parent)


def test_status_names_a_folder_and_a_checkpoint_only_where_there_are_any(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from fedloom.deploy.serve import status_of

    home = a_site(tmp_path / "site", config_of("fedavg"))
    incomplete = here(home)
    incomplete.tamper = lambda _count, client, answer: Failed("is not connected") if client == 1 else answer
    with pytest.raises(LostNodesError):
        conduct(home, incomplete, 1, print)
    found = status_of(home.parent)
    assert (found["state"], found["round"]) == ("failed", 0)
    assert "is not connected" in found["why"]
    assert "run_dir" not in found

    def killed_now() -> dict[str, Any]:
        write_state(home, 1, "running")  # what a run that was killed leaves: nobody holds its lock
        return status_of(home.parent)

    gone = f"the process of the run is gone; fedloom deploy resume {home.parent} continues it"
    assert killed_now()["why"] == f"{gone} from the beginning, since nothing was saved before"
    assert conduct(home, here(home), 1, print) is not None
    assert killed_now()["why"] == f"{gone} from its last checkpoint"
    assert killed_now()["run_dir"] == str(home / "runs" / "1")


def test_status_does_not_count_a_round_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flwr")
    from fedloom.cli.deploy import _print_status
    from fedloom.deploy.serve import status_of

    home = a_site(tmp_path / "site", config_of("fedavg"))
    nodes, uploads = here(home), list[int]()

    def tamper(_: int, client: int, answer: bytes) -> bytes | Failed:
        if client == 1 and unpacked(answer, len(answer)).kind == "trained":
            uploads.append(client)
        return Failed("is not connected") if len(uploads) == 3 else answer

    nodes.tamper = tamper
    with pytest.raises(LostNodesError, match="round 3: 1 of 3 nodes answered"):
        conduct(home, nodes, 1, lambda _: None)
    found = status_of(home.parent)
    assert (found["state"], found["round"], found["failed_round"]) == ("failed", 2, 3)
    assert found["last_round"]["answered"] == ["Ada"]
    _print_status(found)
    assert "run     failed in round 3 of 3, " in capsys.readouterr().out
    assert conduct(home, here(home), 1, lambda _: None) is not None
    found = status_of(home.parent)
    assert (found["state"], found["round"], "failed_round" in found) == ("completed", 3, False)


def test_logs_are_readable_after_a_line_that_did_not_fit_on_the_disk(tmp_path: Path) -> None:
    home = a_site(tmp_path / "site", config_of("fedavg", rounds=2))
    logs = [home / "rounds.jsonl", home.parent / "ada" / "audit.jsonl"]

    def tamper(count: int, client: int, answer: bytes) -> bytes:
        if (count, client) == (1, 0):
            for path in logs:
                with path.open("ab") as log:
                    log.write(b'{"kind": "train", "answered": ["' + b"A" * 5000)  # longer than a block
        return answer

    broken = here(home)
    broken.tamper = tamper
    conduct(home, broken, 1, print)
    assert [line["round"] for line in read_rounds(home) if line["kind"] == "train"] == [0, 1]
    sent = [line["sent"] for line in read_audit(home.parent / "ada")]
    assert [kind for kind in sent if kind != "evaluated"] == ["welcome", "trained", "trained", "finished"]
