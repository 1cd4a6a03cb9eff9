"""However many ranks share out the clients, the result is that of one process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.algorithm.capabilities import takes_steps
from fedloom.core.errors import ConfigError
from fedloom.engine.ranks import ALONE, Ranks, is_rank, joined, ranks_by_cost, take_device
from fedloom.runs.find import algorithms
from fedloom.runs.launch import _what_is_left, count, meeting, rank_environment, without_ranks
from support import crew, warm

KINDS = algorithms(own=False)
LOOP, LANES = {"executor": "loop"}, {"executor": "lanes"}
# One of each kind of state and exchange; laws hold lanes and loop equal for every algorithm.
IN_LANES = ("fedavg", "scaffold", "ditto", "analytic", "law_afl", "pfedala", "async_sgd", "dfedavgm")
IMAGES = {"shape": (1, 6, 6), "model": {"kind": "support.crew:Normed"}}
AUC = ["micro_logits", "micro_softmax", "macro_present"]


def job(algorithm: Any = "fedavg", **settings: Any) -> crew.Job:
    """A small experiment with very unequal clients."""
    cls = KINDS[algorithm if isinstance(algorithm, str) else algorithm["kind"]]
    table: crew.Job = {
        "algorithm": algorithm,
        "rounds": 2,
        "seed": 1,
        "model": {"kind": "mlp", "widths": [6]},
        "partition": {"kind": "natural", "holdout": 0.2},
        "engine": LOOP,
        "evaluate": {"every": 2},
    }
    if takes_steps(cls()):
        momentum = {} if cls().traits.plain_sgd else {"momentum": 0.5}
        table["local"] = {"lr": 0.05, "batch": 10, "epochs": 1} | momentum
    if cls.family != "gossip":
        table["cohort"] = {"size": 5}
    return table | settings


MEASURED = {"participants": True, "train": True, "auc": AUC, "clients": 5, "diagnostics": ["updates", "gamma"]}
FEATURES: dict[str, crew.Job] = {
    "one client a round": job(cohort={"size": 1}),
    "batches of one": job(model={"kind": "mlp", "widths": [51, 27]}, local={"lr": 0.05, "batch": 1}),
    "fitted one by one": job("perfedavg", model={"kind": "mlp", "widths": [51, 27]}, local={"lr": 0.05, "batch": 1}),
    "groups of one": job(engine={**LOOP, "lanes": 1}),
    "groups of two that keep state": job("scaffold", engine={**LOOP, "lanes": 2}, cohort={"sampling": "all"}),
    "memory that is kept": job(local={"lr": 0.05, "batch": 4, "momentum": 0.9, "state": "persist"}),
    "everything measured": job("fedprox", evaluate=MEASURED),
    "everything measured of personal models": job("ditto", evaluate={**MEASURED, "diagnostics": []}),
    "averaged statistics": job(**IMAGES, evaluate={"participants": True}),
    "local statistics": job(**IMAGES | {"model": {"kind": "support.crew:Normed", "buffers": "local"}}),
    "draws with replacement": job(
        {"kind": "fedavg", "weighting": "uniform"}, cohort={"size": 6, "sampling": "proportional"}
    ),
    "late clients": job("scaffold", system={"deadline": 0.02, "speed": 1000}),
    "bad clients and a robust rule": job(
        corruption={"kind": "model_sign_flip", "share": 0.3}, aggregation={"rule": "median"}
    ),
    "privacy": job(
        {"kind": "fedavg", "weighting": "uniform"}, privacy={"clip": 0.5, "noise": 0.5, "noise_from": "seed"}
    ),
    "a network": job("dfedavgm", topology={"kind": "ring"}, evaluate={"participants": True, "nodes": 3}),
    "a network that fails": job("dfedavg", topology={"kind": "ring", "node_loss": 0.3, "mixing": "push_sum"}),
    "nodes that keep memory": job("dfedavg", local={"lr": 0.05, "batch": 4, "momentum": 0.9, "state": "persist"}),
    "models of everybody": job("local_only", written=True),
    "disk without states": job(engine={**LOOP, "store": "disk"}),
}
FAILURES: dict[str, tuple[crew.Job, str]] = {
    "states on disk": (job("ditto", engine={**LOOP, "store": "disk"}), "set engine.store=ram"),
    "a batch that one client cannot normalise": (
        job(**IMAGES | {"shape": (1, 3, 3)}, local={"lr": 0.05, "batch": 5}),
        "which BatchNorm cannot normalise",
    ),
    "divergence": (job(local={"lr": 1e30, "batch": 4, "epochs": 3}), "try local.lr="),
}


def alone(jobs: dict[str, crew.Job], folder: Path) -> Any:
    """What one process makes of these experiments."""
    return json.loads(json.dumps({name: crew.done(one, folder / name) for name, one in jobs.items()}))


# -- the law ---------------------------------------------------------------------------------------
@pytest.mark.slow
def test_two_ranks_are_one_process_to_the_bit(tmp_path: Path) -> None:
    """Every algorithm in a loop, some in lanes up to rounding; and what fails on one rank fails on both."""
    jobs = {kind: job(kind) for kind in KINDS}
    lanes = {f"{kind} in lanes": job(kind, engine=LANES) for kind in IN_LANES}
    failing = {name: fails for name, (fails, _) in FAILURES.items()}
    crews = crew.together(2, jobs | lanes | failing, tmp_path / "crew")
    same(jobs, tmp_path, crews)
    want = alone(lanes, tmp_path / "lanes")
    for name in lanes:
        assert crews[1][name] == crews[0][name], name
        for got, line in zip(crews[0][name]["records"], want[name]["records"], strict=True):
            assert got == pytest.approx(line, rel=1e-6, abs=1e-6), name
    for name, (_, words) in FAILURES.items():
        said = [got[name]["error"] for got in crews]
        assert all(words in text for text in said), said


@pytest.mark.slow
def test_three_ranks_are_one_process(tmp_path: Path) -> None:
    """To the bit, whatever is measured and kept."""
    crews = crew.together(3, FEATURES, tmp_path / "crew")
    same(FEATURES, tmp_path, crews)
    assert "personal.safetensors" in crews[0]["models of everybody"]["files"]


def same(jobs: dict[str, crew.Job], folder: Path, crews: list[dict[str, crew.Job]]) -> None:
    """Every rank has the numbers of one process, and rank 0 has written the same bytes."""
    want = alone(jobs, folder / "alone")
    for name in jobs:
        assert "error" not in want[name], name
        for rank, got in enumerate(crews):
            assert got[name] == want[name] | ({"files": {}} if rank else {}), (name, rank)


@pytest.mark.slow
def test_ranks_share_a_secret_key(tmp_path: Path) -> None:
    """Where noise is no seed's, all ranks draw it, and who takes part, from the key of rank 0."""
    private = {"clip": 0.5, "noise": 0.5}
    jobs = {
        name: job(
            {"kind": "fedavg", "weighting": "uniform"}, privacy=private, cohort={"size": 4, "sampling": "poisson"}
        )
        for name in ("one", "two")
    }
    first, second = crew.together(2, jobs, tmp_path / "crew")
    assert first == second
    assert first["one"]["model"] != first["two"]["model"]  # each run has its own


# -- strangers -------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("knows", [True, False], ids=["a friend", "a stranger"])
def test_who_does_not_know_the_secret_is_not_met(tmp_path: Path, knows: bool) -> None:
    """A stranger who has found the meeting place of two ranks all the same, and comes instead of the second."""
    ours, theirs = meeting(), tmp_path / "theirs"
    assert (ours.stat().st_mode & 0o777) == 0o700
    theirs.mkdir()
    (theirs / "store").symlink_to(ours / "store")
    (theirs / "secret").write_bytes((ours / "secret").read_bytes() if knows else b"guessed")
    both = [
        warm.Popen(
            [sys.executable, "-m", "support.join"],
            env=rank_environment(rank, 2, folder),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, folder in enumerate((ours, theirs))
    ]
    said = [process.communicate(timeout=600)[0].strip() for process in both]
    refused = "a process that was not started with the others has joined them; nothing was exchanged"
    assert said == ["hello" if knows else refused] * 2
    shutil.rmtree(ours, ignore_errors=True)  # what remains if the other, whose store is a link to ours, left last


def test_a_meeting_place_without_a_secret_is_refused_before_anybody_is_met(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"FEDLOOM_MEETING: the secret of the ranks cannot be read: No such"):
        joined({"RANK": "0", "WORLD_SIZE": "2", "FEDLOOM_MEETING": str(tmp_path)})
    assert not list(tmp_path.iterdir())


# -- small parts -----------------------------------------------------------------------------------
def test_one_process_meets_nobody() -> None:
    assert joined({}) == ALONE == Ranks(0, 1)
    assert joined({"WORLD_SIZE": "1", "RANK": "0"}) == ALONE
    assert is_rank({"WORLD_SIZE": "2", "RANK": "1"})
    rows = (torch.arange(3.0), ())
    assert ALONE.gathered(rows, [0, 0, 0]) is rows
    assert ALONE.merged(rows[0]) is rows[0]
    assert ALONE.own(rows[0]) is rows[0]
    assert ALONE.broadcast("x") == "x"
    assert ALONE.any_rank(True)
    assert not ALONE.any_rank(False)
    with pytest.raises(ValueError, match="here"), ALONE.agreed():
        raise ValueError("here")


@pytest.mark.parametrize(
    ("world", "said"),
    [
        ({"RANK": "x"}, r"RANK: should be a whole number \(got 'x'\)"),
        ({"RANK": "-1"}, r"RANK: should be a whole number \(got '-1'\)"),
        ({"RANK": "2"}, r"RANK: should be below WORLD_SIZE, which is 2 \(got 2\)"),
        ({"WORLD_SIZE": "two"}, r"WORLD_SIZE: should be a whole number \(got 'two'\)"),
        ({"MASTER_PORT": ""}, r"MASTER_PORT: should be a whole number \(got ''\)"),
        ({"MASTER_ADDR": ""}, r"MASTER_ADDR: is not set"),
    ],
)
def test_a_world_that_cannot_be(world: dict[str, str], said: str) -> None:
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(ConfigError, match=said):
        joined(whole | world)


def test_the_longest_work_goes_first_to_who_has_least() -> None:
    assert ranks_by_cost([5, 4, 3, 3, 3], 2) == [0, 1, 1, 0, 1]
    assert ranks_by_cost([1, 1, 9], 2) == [1, 1, 0]
    assert ranks_by_cost([2, 2, 2], 5) == [0, 1, 2]
    assert ranks_by_cost([], 3) == []


def test_every_client_has_one_owner() -> None:
    ids = torch.arange(10)
    owned = torch.cat([Ranks(rank, 3).own(ids) for rank in range(3)])
    assert sorted(owned.tolist()) == ids.tolist()


def test_a_rank_takes_its_own_gpu_or_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    take_device(torch.device("cpu"), there)
    with pytest.raises(ConfigError, match="start 2 on this machine"):
        take_device(torch.device("cuda"), there)
    with pytest.raises(ConfigError, match="use cuda or auto"):
        take_device(torch.device("cuda:1"), there)


def test_how_many_ranks_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr("fedloom.runs.launch.cores", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert count("3", cpu) == 3
    assert count("3", cpu, clients=3) == 3
    with pytest.raises(ConfigError, match="there are only 2 clients"):
        count("3", cpu, clients=2)
    with pytest.raises(ConfigError, match="this machine has only 8 cores"):
        count("129", cpu)
    assert count("auto", cpu) == 8
    assert count("auto", cpu, cohort=5) == 5
    assert count("auto", torch.device("cuda")) == 4
    for wrong in ("0", "-1", "two", "1.5", ""):
        with pytest.raises(ConfigError, match="--ranks"):
            count(wrong, cpu)


def test_what_is_left_of_a_run_whose_ranks_were_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for words in (["run", "--out", "run"], ["run", "--out=run"]):
        assert _what_is_left(words) == "nothing had been saved"
    (tmp_path / "run" / "config.toml").touch()
    for words in (["run", "--out", "run"], ["run", "a.toml", "--out=run"], ["resume", "--from", "3", "run"]):
        assert _what_is_left(words).endswith("fedloom resume run")
    assert _what_is_left(["run", "a.toml"]).endswith("fedloom resume RUN")  # it has a name of its own


def test_ranks_are_started_with_the_same_words_but_for_their_number() -> None:
    assert without_ranks(["run", "--ranks", "2", "a.toml", "seed=1"]) == ["run", "a.toml", "seed=1"]
    assert without_ranks(["resume", "x", "--ranks=auto", "--json"]) == ["resume", "x", "--json"]
