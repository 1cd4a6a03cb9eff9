"""Nodes with tables of their own: columns that do not mean what the contract says, statistics, what bundles reveal."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.errors import ConfigError, DataError
from fedloom.data.column_check import suspicions
from fedloom.data.columns import Recipe
from fedloom.deploy.audit import read_audit, write_audit
from fedloom.deploy.conduct import conduct
from fedloom.deploy.contract import AgreedTerms, read_contract
from fedloom.deploy.ends import OwnRows, rows_of_client
from fedloom.deploy.messages import Envelope, packed
from fedloom.deploy.node import Node, Place
from fedloom.deploy.own_data import own_rows, refuse_wrong_columns, rows_for
from fedloom.runs.prepare import share
from support.federation import Here, a_site, config_of
from support.patients import patients
from support.terminal import Quick

HOSPITALS = tuple(f"Hospital {letter}" for letter in "ABCDEF")
Change = Callable[[dict[str, str]], dict[str, str]]


def a_hospital_site(folder: Path, **data: Any) -> Path:
    """A federation of the six hospitals of a table; returns the server's folder."""
    table = {"source": str(patients(folder)), "label": "ill", "client": "hospital", "drop": ("patient",), **data}
    config = config_of("fedavg", data=table, partition={"kind": "natural", "holdout": 0.2}, rounds=2)
    return a_site(folder / "site", config, HOSPITALS)


def a_table(folder: Path, change: Change = dict, hospital: str = "Hospital A") -> str:
    """The rows of one hospital, each changed."""
    with (folder / "patients.csv").open() as file:
        rows = [change(row) for row in csv.DictReader(file) if row["hospital"] == hospital]
    path = folder / "mine.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def times(column: str, factor: float) -> Change:
    return lambda row: row | {column: str(float(row[column]) * factor) if row[column] not in ("", "NA") else ""}


def in_words(row: dict[str, str]) -> dict[str, str]:
    return row | {"sex": {"f": "female", "m": "male"}[row["sex"]]}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_hospital_site(tmp_path_factory.mktemp("hospitals")).parent


def own(site: Path, change: Change = dict) -> OwnRows:
    return own_rows(read_contract(site / "hospital-a"), a_table(site.parent, change))


WRONG: dict[str, tuple[Change, str]] = {
    "sex": (in_words, r"column 'sex': 100% of its words are unknown, such as '(fe)?male', '(fe)?male' \(known: f, m\)"),
    "marker": (
        times("marker", 1000),
        r"column 'marker': its mean, \d+(\.\d+)?, is \d,\d{3}\.\d standard deviations from",
    ),
    "age": (lambda row: row | {"age": "-999"}, r"column 'age': its mean, -999, is \d+\.\d standard deviations"),
}


@pytest.mark.parametrize("column", WRONG)
def test_a_column_that_means_something_else_is_refused_unless_its_owner_accepts_it(site: Path, column: str) -> None:
    change, what = WRONG[column]
    rows = own(site, change)
    fix = rf'correct the file, or accept it: in \[policy\] of .*node.toml write accept_columns = \["{column}"\]'
    with pytest.raises(DataError, match=rf"(?s)mine.csv: 1 column does not mean .*{what}.*{fix}"):
        refuse_wrong_columns(rows, (), site / "hospital-a")
    refuse_wrong_columns(rows, (column,), site / "hospital-a")


def without(*columns: str) -> Change:
    return lambda row: {name: cell for name, cell in row.items() if name not in columns}


def test_what_a_table_lacks_is_said_in_the_words_of_the_contract(site: Path) -> None:
    lost = r"mine.csv: lacks columns which the contract requires: 'age', 'marker' \(others in it: .*\)$"
    with pytest.raises(DataError, match=lost):
        own(site, without("marker", "age"))
    with pytest.raises(DataError, match=r"requires: 'marker' \(did you mean 'markers'\?\)$"):
        own(site, lambda row: without("marker")(row) | {"markers": row["marker"]})
    with pytest.raises(DataError, match=r"requires: 'marker'$"):  # all others are required themselves
        own(site, without("marker", "patient"))
    other = r"mine.csv: its columns differ from those of the contract\n  column 'age': has words, but the contract has"
    with pytest.raises(DataError, match=other):
        own(site, lambda row: row | {"age": "old"})


def test_a_check_prints_every_column_and_ends(site: Path) -> None:
    pytest.importorskip("flwr")
    quick = Quick()
    try:
        words = ("deploy", "node", str(site / "hospital-a"))
        told = quick(*words, f"data={a_table(site.parent)}", "--check", cwd=site)
        assert (told.code, told.err) == (0, "")
        lines = {line.split()[0]: line.split()[1:] for line in told.out.splitlines()}
        assert lines["column"] == ["missing", "unknown", "words", "mean", "shift", "spread"]
        assert lines["sex"] == ["0.0%", "0.0%"]
        assert [abs(float(number)) < 2 for number in lines["age"][2:]] == [True, True]
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", lines["admitted"][1])  # the mean of a column of dates
        told = quick(*words, f"data={a_table(site.parent, in_words)}", "--check", cwd=site)
        assert told.code == 2
        assert "100.0%" in told.out
        assert "1 column does not mean what the contract says" in told.err
        told = quick(*words, "data=experiment", "--check", cwd=site.parent)  # where the coordinator's table is
        assert told.out.endswith("its data has no columns to compare, or is a part of the experiment's own\n")
    finally:
        quick.close()


def test_a_node_without_a_server_checks_its_columns_too(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    from fedloom.deploy.peers.bundles import initialise_peers
    from fedloom.deploy.peers.start import start_peer

    data = {"source": str(patients(tmp_path)), "label": "ill", "drop": ("patient", "hospital")}
    config = config_of("dfedavg", data=data, partition={"kind": "iid", "clients": 2}, cohort={})
    (ada, _) = initialise_peers(config, ["Ada", "Bea"], [], tmp_path / "net", Path())
    folder = tmp_path / "net" / ada
    assert str(tmp_path) not in (folder / "experiment.toml").read_text()
    with pytest.raises(DataError, match="1 column does not mean what the contract says"):
        start_peer(folder, a_table(tmp_path, in_words), tmp_path, print)
    quick = Quick()
    try:
        told = quick("peers", "start", str(folder), f"data={a_table(tmp_path)}", "--check", cwd=tmp_path)
        assert (told.code, "admitted" in told.out) == (0, True)
        message = packed(Envelope("model", {"turn": 0}, {"sent": torch.zeros(3)}))
        write_audit(folder, message, asked="gossip", round_=0, to=["Bea", "Cem"])
        told = quick("deploy", "audit", str(folder), cwd=tmp_path)
        assert f"model round 1  {len(message)} bytes  to Bea, Cem  turn, sent [3] float32" in told.out
    finally:
        quick.close()


def test_what_is_only_suspicious_is_pointed_out(site: Path) -> None:
    def some(row: dict[str, str]) -> dict[str, str]:
        odd = int(row["patient"]) % 10 == 0
        return row | {"smoker": "ex" if odd else row["smoker"], "age": "999" if odd else row["age"], "pressure": ""}

    rows = own(site, some)
    refuse_wrong_columns(rows, (), site / "hospital-a")
    smoker, age, pressure = suspicions(rows.checks)
    assert smoker.startswith("column 'smoker': ")
    assert smoker.endswith("of its words are unknown, such as 'ex' (known: current, former, never)")
    assert "column 'age': its " in age
    assert pressure == "column 'pressure': 100% of its values are missing"
    assert suspicions(own(site).checks) == []


def test_other_units_are_no_fault_where_each_node_scales_its_own_rows(tmp_path: Path) -> None:
    home = a_hospital_site(tmp_path, statistics="own")
    contract = read_contract(home)
    rows = own_rows(contract, a_table(tmp_path, times("marker", 1000)))
    refuse_wrong_columns(rows, (), home)
    plain = own_rows(contract, a_table(tmp_path))
    assert np.allclose(rows.arrays.x, plain.arrays.x, atol=1e-4)


def test_a_node_with_its_own_statistics_has_the_numbers_of_the_simulation(tmp_path: Path) -> None:
    home = a_hospital_site(tmp_path, statistics="own", test=0.0)
    contract = read_contract(home)
    shared = share(contract.config, Path())
    for name in ("Hospital A", "Hospital C"):
        client = shared.names.index(name)
        of_file = own_rows(contract, a_table(tmp_path, hospital=name))
        of_experiment = rows_of_client(shared, client)
        assert np.array_equal(of_file.arrays.x, of_experiment.arrays.x)
        assert of_file.arrays.recipe.scaling == of_experiment.arrays.recipe.scaling


def test_the_model_of_a_node_scales_as_the_node_did(tmp_path: Path) -> None:
    """And that of the last run is also in its folder, each with the run that it is of."""
    home = a_hospital_site(tmp_path, statistics="own")
    said: list[str] = []
    nodes = []
    for k, name in enumerate(HOSPITALS):
        folder = home.parent / name.lower().replace(" ", "-")
        contract = read_contract(folder)
        rows = own_rows(contract, a_table(tmp_path, hospital=name))
        nodes.append(Node(Place(contract, k, rows, folder), said.append if k == 0 else lambda _: None))
    for run in (1, 2):
        assert conduct(home, Here(nodes), run, print) is not None
    bundle = home.parent / "hospital-a"
    recipe = Recipe.model_validate_json((bundle / "columns.json").read_bytes())
    assert recipe.scaling == nodes[0]._place.own.arrays.recipe.scaling != read_recipe(bundle).scaling
    path = a_table(tmp_path)
    models = fedloom.load(bundle)
    assert np.array_equal(models.predict_proba(path), fedloom.load(bundle / "runs" / "2").predict_proba(path))
    for folder, run in ((bundle, 2), (bundle / "runs" / "2", 2), (bundle / "runs" / "1", 1)):
        origin = json.loads((folder / "model.json").read_text())["origin"]
        assert origin == {"campaign": read_contract(home).campaign, "run": run, "rounds": 2}
    assert said[0].startswith("the server has the same contract; sent ")
    first = [line.partition(" bytes")[0] for line in said[1:7]]
    assert [line.partition(": ")[0] for line in first] == [
        "after round 0 of 2",
        "round 1 of 2",
        "after round 1 of 2",
        "round 2 of 2",
        "after round 2 of 2",
        "after round 2 of 2",
    ]
    assert "test/accuracy 0." in first[2]
    assert f"model saved: fedloom predict {bundle} FILE; sent " in first[5]
    log = read_audit(bundle)
    assert {line["run"] for line in log if line["sent"] != "welcome"} == {1, 2}
    assert {line["algorithm"] for line in log} == {"fedavg"}
    assert all(len(line["sha256"]) == 64 for line in log)
    assert {"test", "train", "name"} <= set(log[0]["facts"])


def read_recipe(folder: Path) -> Recipe:
    return Recipe.model_validate(read_contract(folder).form.recipe)


@pytest.mark.parametrize("statistics", ["all", "own"])
def test_a_bundle_says_nothing_of_single_hospitals_or_of_the_coordinators_disk(tmp_path: Path, statistics: str) -> None:
    home = a_hospital_site(tmp_path, statistics=statistics)
    recipe = read_recipe(home.parent / "hospital-b")
    assert (recipe.own, {feature.missing for feature in recipe.features}) == ({}, {None})
    for path in (home.parent / "hospital-b").iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()
    assert str(tmp_path / "patients.csv") in (home / "experiment.toml").read_text()  # the server reads it
    contract = read_contract(home.parent / "hospital-b")
    assert AgreedTerms.of(read_contract(home)) == AgreedTerms.of(contract)  # which every message has
    with pytest.raises(ConfigError, match=r"needs the experiment's own data, and patients.csv is not in this folder"):
        rows_for(contract, 1, "experiment", tmp_path)
