"""Checkpoints: whole or not there, checked on the way back, and never a silent fall back."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedloom.algorithms.dpsgd import DPSGD
from fedloom.algorithms.fedopt import FedOpt
from fedloom.algorithms.local_only import LocalOnly
from fedloom.core import tree
from fedloom.core.errors import CheckpointError
from fedloom.engine import checkpoint
from fedloom.engine.rounds import advance, begin
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.store import ClientStore, DiskStore, RamStore
from fedloom.engine.topology.kinds import Ring
from support.worlds import experiment, federation

SIZES = (5, 9, 7, 6)
KINDS = ("fedopt", "local_only/ram", "local_only/disk", "dpsgd")


class Saved:
    """A run that is saved after every round into ``folder``."""

    def __init__(self, kind: str, folder: Path) -> None:
        name, _, self.where = kind.partition("/")
        algorithm: Any = {"fedopt": FedOpt(), "local_only": LocalOnly(), "dpsgd": DPSGD()}[name]
        torch.manual_seed(0)
        ring = {"topology": Ring()} if name == "dpsgd" else {}
        self.exp: Experiment = experiment(federation(SIZES), nn.Linear(5, 3), algorithm, **ring)
        self.folder = folder
        self.store = self.new_store()
        self.state = begin(self.exp)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def new_store(self) -> ClientStore:
        return DiskStore(self.folder / "clients", len(SIZES)) if self.where == "disk" else RamStore(len(SIZES))

    def go(self, rounds: int) -> None:
        for _ in range(rounds):
            self.state, _ = advance(self.exp, self.state, self.store)
            checkpoint.save(self.checkpoints, self.state, self.store, {"metrics.jsonl": 10 * self.state.round})

    def load(self, at: int | None = None) -> checkpoint.Loaded:
        """As after a crash: with a new store."""
        self.store = self.new_store()
        loaded = checkpoint.load_state(self.checkpoints, begin(self.exp), self.store, at=at)
        self.state = loaded.state
        return loaded

    def everything(self) -> tuple[RunState, Any]:
        return self.state, self.exp.given(self.state, self.store, torch.arange(len(SIZES)))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.fixture(params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Saved:
    run = Saved(request.param, tmp_path)
    run.go(3)
    return run


def newest(run: Saved, name: str) -> Path:
    return run.checkpoints / "00000003" / name


# -- there and back --------------------------------------------------------------------------------
def test_what_is_loaded_is_what_was_saved(saved: Saved) -> None:
    want = saved.everything()
    loaded = saved.load()
    assert loaded.lengths == {"metrics.jsonl": 30}
    assert equal(saved.everything(), want)
    assert type(saved.state.server) is type(want[0].server)


@pytest.mark.slow
def test_a_loaded_run_goes_on_as_if_it_had_never_stopped(saved: Saved) -> None:
    saved.load()
    saved.go(2)
    resumed = saved.everything()
    shutil.rmtree(saved.checkpoints)
    saved.state, saved.store = begin(saved.exp), RamStore(len(SIZES))
    for _ in range(5):
        saved.state, _ = advance(saved.exp, saved.state, saved.store)
    assert equal(saved.everything(), resumed)


def test_the_newest_two_are_kept(saved: Saved) -> None:
    assert checkpoint.saved_rounds(saved.checkpoints) == [2, 3]
    assert sorted(p.name for p in saved.checkpoints.iterdir()) == ["00000002", "00000003"]


def test_an_older_one_can_be_asked_for_and_supersedes_the_newer(saved: Saved) -> None:
    end = saved.everything()
    assert saved.load(at=2).state.round == 2
    assert checkpoint.saved_rounds(saved.checkpoints) == [2, 3]  # whoever asked may still refuse it
    checkpoint.forget_after(saved.checkpoints, 2)
    assert checkpoint.saved_rounds(saved.checkpoints) == [2]
    saved.go(1)
    assert equal(saved.everything(), end)
    saved.load()
    assert equal(saved.everything(), end)


def test_a_round_that_was_not_kept_is_refused_with_what_there_is(saved: Saved) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint of round 1 \(there are: \[2, 3\]\)"):
        saved.load(at=1)
    assert checkpoint.saved_rounds(saved.checkpoints) == [2, 3]


# -- damage ----------------------------------------------------------------------------------------
def refused(run: Saved) -> str:
    with pytest.raises(CheckpointError) as caught:
        run.load()
    message = str(caught.value)
    assert "00000003" in message or "journal" in message
    assert f"fedloom resume {run.folder} --from 2" in message
    assert checkpoint.saved_rounds(run.checkpoints) == [2, 3]
    return message


def files_of(run: Saved) -> list[Path]:
    return sorted((run.checkpoints / "00000003").iterdir())


def test_a_file_with_a_flipped_bit_is_refused_and_the_previous_offered(saved: Saved) -> None:
    end = saved.everything()
    for path in files_of(saved):
        good = path.read_bytes()
        for at in {0, len(good) // 3, len(good) // 2, len(good) - 5}:
            bad = bytearray(good)
            bad[at] ^= 4
            path.write_bytes(bad)
            message = refused(saved)
            assert "damaged" in message
        path.write_bytes(good)
    saved.load()
    assert equal(saved.everything(), end)


@pytest.mark.slow
def test_every_byte_of_the_record_counts(tmp_path: Path) -> None:
    """A digit of the round or of a length can change without the record ceasing to be JSON."""
    run = Saved("fedopt", tmp_path)
    run.go(3)
    path = newest(run, "meta.json")
    good = path.read_bytes()
    for at, byte in enumerate(good):
        if chr(byte).isdigit():
            path.write_bytes(good[:at] + str((int(chr(byte)) + 1) % 10).encode() + good[at + 1 :])
            refused(run)


@pytest.mark.parametrize(
    "forged",
    [
        {"sha256": {"../../../dev/zero": ""}},
        {"seconds": "0x1p99999"},
        {"round": -1},
        {"round": 2},
        {"lengths": {"metrics.jsonl": "nine"}},
        {"lengths": {"metrics.jsonl": [9]}},
        {"up": "many"},
        {"store": []},
        {"lengths": {"metrics.jsonl": None}},
        {"ledger": {"uses": []}},
    ],
    ids=str,
)
def test_a_forged_record_is_refused(tmp_path: Path, forged: dict[str, Any]) -> None:
    """With the checksum that belongs to it; a file that it names elsewhere is not read."""
    run = Saved("fedopt", tmp_path)
    run.go(3)
    path = newest(run, "meta.json")
    checkpoint._write_record(path, json.loads(path.read_text()) | forged)
    assert f"00000003 is damaged: {'its meta.json is of round 2' if forged == {'round': 2} else ''}" in refused(run)


def test_a_file_that_was_cut_off_or_is_missing_is_refused(saved: Saved) -> None:
    for path in files_of(saved):
        good = path.read_bytes()
        path.write_bytes(good[: len(good) // 2])
        refused(saved)
        path.write_bytes(b"")
        refused(saved)
        path.unlink()
        assert path.name in refused(saved)
        path.write_bytes(good)


@pytest.mark.slow
def test_after_a_refusal_the_offered_one_works(saved: Saved) -> None:
    end = saved.everything()
    newest(saved, "state.safetensors").write_bytes(b"nonsense")
    refused(saved)
    saved.load(at=2)
    saved.go(1)
    assert equal(saved.everything(), end)


def test_the_only_one_damaged_offers_nothing(tmp_path: Path) -> None:
    run = Saved("fedopt", tmp_path)
    run.go(1)
    (run.checkpoints / "00000001" / "state.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="00000001 is damaged") as caught:
        run.load()
    assert "--from" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["no record", "no json", "half gone"])
def test_a_damaged_previous_one_does_not_stand_in_the_way(saved: Saved, how: str) -> None:
    """A crash while an old checkpoint was being deleted leaves it half there."""
    end = saved.everything()
    record = saved.checkpoints / "00000002" / "meta.json"
    if how == "no json":
        record.write_text("{")
    else:
        record.unlink()
    if how == "half gone":
        (saved.checkpoints / "00000002" / "state.safetensors").unlink()
    saved.load()
    assert equal(saved.everything(), end)
    saved.go(2)
    assert checkpoint.saved_rounds(saved.checkpoints) == [4, 5]
    saved.load()


def test_a_checkpoint_of_another_net_is_refused(saved: Saved, tmp_path: Path) -> None:
    kind = saved.exp.algorithm
    ring = {"topology": Ring()} if kind.family == "gossip" else {}
    wider = experiment(federation(SIZES), nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), kind, **ring)
    with pytest.raises(CheckpointError, match=r"'server\.w' should be"):
        checkpoint.load_state(saved.checkpoints, begin(wider), saved.new_store())


# -- whole or not there ----------------------------------------------------------------------------
def test_a_leftover_of_an_interrupted_save_is_ignored_and_then_replaced(saved: Saved) -> None:
    end = saved.everything()
    for name in (".00000004.part", ".00000009.part", ".00000001.gone"):
        (saved.checkpoints / name).mkdir()
        (saved.checkpoints / name / "state.safetensors").write_bytes(b"half")
    saved.load()
    assert equal(saved.everything(), end)
    saved.go(1)
    assert sorted(p.name for p in saved.checkpoints.iterdir()) == ["00000003", "00000004"]
    assert checkpoint.saved_rounds(saved.checkpoints) == [3, 4]


def test_a_save_that_fails_leaves_the_earlier_ones_readable(saved: Saved) -> None:
    end = saved.everything()
    unserialisable: Any = {"metrics.jsonl": object()}
    with pytest.raises(TypeError):
        checkpoint.save(saved.checkpoints, saved.state._replace(round=4), saved.store, unserialisable)
    saved.load()
    assert equal(saved.everything(), end)


def test_the_record_says_what_is_in_it(saved: Saved) -> None:
    meta = json.loads(newest(saved, "meta.json").read_text())
    assert meta["round"] == 3
    assert set(meta["sha256"]) == {p.name for p in files_of(saved)} - {"meta.json"}


def test_other_lengths_can_be_recorded_and_nothing_else_changes(saved: Saved) -> None:
    end, before = saved.everything(), json.loads(newest(saved, "meta.json").read_text())
    checkpoint.rewrite_lengths(saved.checkpoints, 3, {"metrics.jsonl": 1})
    after = json.loads(newest(saved, "meta.json").read_text())
    assert after["lengths"] == before["lengths"] | {"metrics.jsonl": 1}
    assert {k: v for k, v in after.items() if k not in ("lengths", "self")} == {
        k: v for k, v in before.items() if k not in ("lengths", "self")
    }
    saved.load()
    assert equal(saved.everything(), end)


# -- models ----------------------------------------------------------------------------------------
def test_models_round_trip_and_the_same_model_is_the_same_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    notes = {"algorithm": "fedavg", "round": "5", "config_hash": "f00", "more": "x"}
    files = [tmp_path / f"{k}.safetensors" for k in range(6)]
    for path in files:
        checkpoint.save_model(path, tensors, notes)
    back = load_file(files[0])
    assert all(equal(back[name], x) for name, x in tensors.items())
    assert len({path.read_bytes() for path in files}) == 1
    assert list(tmp_path.glob("*.part")) == []
    assert files[0].stat().st_mode & 0o777 == 0o600


KILLED = """
import resource, signal, torch
from pathlib import Path
from fedloom.engine import checkpoint

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
checkpoint.save_model(Path("model.safetensors"), {"a": torch.zeros(1 << 16)})
"""


def test_killed_while_a_model_is_written_the_next_attempt_leaves_nothing_else(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGXFSZ  # in the middle of the file
    assert not (tmp_path / "model.safetensors").exists()
    checkpoint.save_model(tmp_path / "model.safetensors", {"a": torch.zeros(4)})
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_nothing_is_shared_with_the_state_that_was_saved(saved: Saved) -> None:
    state = saved.state
    before = tree.tmap(torch.clone, state.server)
    saved.load()
    for leaf in tree.leaves(saved.state.server):
        leaf.zero_()
    assert equal(before, state.server)


def test_parts_of_a_state_may_share_memory(tmp_path: Path) -> None:
    """As a server's model, and a stack of models that has it, too."""
    stack = torch.arange(6.0).view(2, 3)
    tensors = {"w": stack[0], "all": stack, "again": stack, "none": torch.zeros(0), "nothing": torch.zeros(0)}
    checkpoint.write_tensors(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
