"""Trackers receive every evaluation, read back here by their own libraries, and no number of a run depends on them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.core.errors import ConfigError
from fedloom.runs import tracking
from fedloom.runs.settings import config_hash, parse

SMALL: dict[str, Any] = {"partition": {"clients": 4}, "model": "logistic", "rounds": 2, "progress": False}
SMALL["checkpoint"] = {"curves": False}
ACCURACY = "global/test/accuracy"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def curve(history: fedloom.History) -> list[tuple[int, float]]:
    return [(line["round"], line[ACCURACY]) for line in history.records]


def test_tensorboard_has_the_curve_of_a_run_and_of_its_continuation() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plain = fedloom.run(out="plain", **SMALL)
    history = fedloom.run(out="run", track="tensorboard", **SMALL)
    assert history.records == plain.records
    more = fedloom.resume("run", rounds=4)
    events = EventAccumulator("run/tensorboard").Reload()
    found = [(event.step, event.value) for event in events.Scalars(ACCURACY)]
    assert [step for step, _ in found] == [0, 1, 2, 3, 4]
    assert [value for _, value in found] == pytest.approx([value for _, value in curve(more)])
    assert "personal/pre_fit/test/loss_worst10" in events.Tags()["scalars"]
    assert b'kind = "logistic"' in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


def test_mlflow_has_settings_curve_and_outcome() -> None:
    from mlflow import MlflowClient

    history = fedloom.run(out="run", track=["mlflow"], **SMALL)
    more = fedloom.resume("run", rounds=3)
    client = MlflowClient(f"sqlite:///{Path('mlflow.db').absolute()}")
    (home,) = [each for each in client.search_experiments() if each.name == "fedloom"]
    (run,) = client.search_runs([home.experiment_id])  # one, though it was resumed
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert (run.data.params["model.kind"], run.data.params["rounds"]) == ("logistic", "2")
    points = client.get_metric_history(run.info.run_id, ACCURACY)
    assert sorted((point.step, point.value) for point in points) == curve(more)
    assert curve(more)[:3] == curve(history)


def test_wandb_writes_offline() -> None:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    history = fedloom.run(out="run", track="wandb", **SMALL)
    wandb.teardown()  # waits, as the end of a program does, until its own process has written everything
    (file,) = Path("wandb").glob("offline-run-*/run-*.wandb")
    found, name = [], ""
    for data in wandb_records(file.read_bytes()):
        record = Record.FromString(data)
        name = record.run.display_name or name
        items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        if ACCURACY in items:
            found.append((record.history.step.num, json.loads(items[ACCURACY])))
    assert name == "run"
    assert found == curve(history)


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a file of Weights & Biases: a header of 7 bytes, then the log format of LevelDB."""
    block, at, whole = 1 << 15, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # no header fits into the rest of a block
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the record is whole, or this was the last part of it
            yield whole
            whole = b""


def test_tracking_is_no_part_of_what_is_computed() -> None:
    one, other = parse({}), parse({"track": "tensorboard, wandb"})
    assert other.basics.track == ("tensorboard", "wandb")
    assert config_hash(one) == config_hash(other)
    with pytest.raises(ConfigError, match=r"track\.0: .*tensorbord"):
        parse({"track": "tensorbord"})


def test_a_tracker_that_is_missing_is_refused_and_one_that_fails_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(tracking._MODULES, "wandb", "no_such_module")
    with pytest.raises(ConfigError, match=r"track: wandb is not installed \(pip install 'fedloom\[wandb\]'\)"):
        fedloom.run(out="run", track="wandb", **SMALL)
    assert not Path("run").exists()

    def refuse(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(tracking._TensorBoard, "log", refuse)
    said: list[str] = []
    history = fedloom.run(out="run", track="tensorboard", on_round=lambda at: said.extend(at.notes), **SMALL)
    assert said == ["tensorboard has failed; the run continues without it: the disk is full"]
    assert len(history.records) == 3


def test_a_tracker_that_cannot_end_or_begin_is_named_and_what_is_known_of_it_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no host answers\n(a long story)")

    said: list[str] = []
    monkeypatch.setattr(tracking._TensorBoard, "end", refuse)
    fedloom.run(out="run", track="tensorboard", on_round=lambda at: said.extend(at.notes), **SMALL)
    assert said == ["tensorboard has failed; the run continues without it: no host answers"]
    known = json.loads(Path("run/tracking.json").read_text())
    shutil.rmtree("run/tensorboard")
    Path("run/tensorboard").write_text("a file, not a folder")
    said.clear()
    with pytest.warns(UserWarning, match="tensorboard has failed"):
        more = fedloom.resume("run", rounds=4, on_round=lambda at: said.extend(at.notes))
    assert [line["round"] for line in more.records] == [0, 1, 2, 3, 4]
    assert len(said) == 1
    assert said[0].startswith("tensorboard has failed; the run continues without it: ")
    assert json.loads(Path("run/tracking.json").read_text()) == known == {"tensorboard": "run/tensorboard"}
