"""clients.csv and curves.csv: what other programs read of a run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import fedloom

SMALL = {"partition": {"clients": 6}, "cohort": {"size": 3}, "model": "logistic", "rounds": 2}
SMALL |= {"checkpoint": {"curves": False}}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "ditto"])
def test_clients_add_up_to_what_the_metrics_say(tmp_path: Path, algorithm: str) -> None:
    fedloom.run(algorithm, out=tmp_path / "run", **SMALL)
    with open(tmp_path / "run" / "clients.csv", newline="") as file:
        clients = list(csv.DictReader(file))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = np.array([int(line["test_rows"]) for line in clients])
    accuracy = np.array([float(line["accuracy"]) for line in clients])
    name = next(n for n in records[-1] if n.startswith("personal/") and n.endswith("/accuracy"))
    assert (accuracy * rows).sum() / rows.sum() == pytest.approx(records[-1][name], abs=1e-12)
    assert accuracy.min() == pytest.approx(records[-1][f"{name}_worst10"], abs=1e-12)
    parts = load_file(tmp_path / "run" / "partition.safetensors")
    assert [int(line["rows"]) for line in clients] == np.bincount(parts["owner"], minlength=6).tolist()
    assert [int(line["classes"]) for line in clients] == np.bincount(parts["counts"][:, 0], minlength=6).tolist()
    for line, client in zip(clients, range(6), strict=True):
        mine = parts["counts"][parts["counts"][:, 0] == client]
        assert float(line["largest_share"]) == pytest.approx(mine[:, 2].max() / mine[:, 2].sum())


def test_the_confusion_matrix_says_what_the_accuracy_says(tmp_path: Path) -> None:
    fedloom.run("fedavg", out=tmp_path / "run", **SMALL)
    found = json.loads((tmp_path / "run" / "confusion.json").read_text())
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    counts = np.array(found["counts"])
    assert counts.shape == (len(found["labels"]),) * 2
    assert counts.trace() / counts.sum() == pytest.approx(last["global/test/accuracy"])
    assert (counts.sum(1) > 0).all()  # every class of the test set, however it was predicted


@pytest.mark.slow
def test_curves_have_every_evaluation(tmp_path: Path) -> None:
    fedloom.run("fedavg", out=tmp_path / "run", evaluate={"personal": False}, **SMALL)
    with open(tmp_path / "run" / "curves.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [{k: float(v) for k, v in line.items()} for line in lines] == records
    with open(tmp_path / "run" / "clients.csv", newline="") as file:
        assert "accuracy" not in next(iter(csv.DictReader(file)))  # nobody was evaluated
