"""The user's own functions: rules of aggregation, metrics, samplings and losses, with settings of their own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.algorithm import Update
from fedloom.core import usercode
from fedloom.core.errors import ConfigError
from fedloom.deploy.contract import only_simulated
from fedloom.deploy.own_files import own_files
from fedloom.engine.plan import Cohort, draw_cohort
from fedloom.runs.overrides import override
from fedloom.runs.prepare import prepare, share
from fedloom.runs.settings import as_table, config_hash, parse
from fedloom.trust.robust import Aggregation, robust

OWN = """
import numpy as np
import torch


def mean(uploads, weights):
    return (weights[:, None] * uploads).sum(0) / weights.sum()


def geometric_median(uploads, weights, iterations=5):
    z = mean(uploads, weights)
    for _ in range(iterations):
        near = weights / (uploads - z).norm(dim=1).clamp(min=1e-6)
        z = mean(uploads, near)
    return z


def short(uploads, weights):
    return uploads[0, 1:]


def broken(uploads, weights):
    return uploads.no_such_thing


def clash(uploads, weights, bad=0.1):
    return uploads[0]


def right(outputs, y):
    return (outputs.argmax(1) == y).double().mean()


def rows(outputs, y):
    return (outputs.argmax(1) == y).double()


def accuracy(outputs, y):
    return 0.0


def largest(clients, size, sizes, skip=0):
    return np.argsort(-sizes, kind="stable")[skip : skip + size]


def like_uniform(rng, size, sizes):
    able = np.flatnonzero(sizes)
    return rng.choice(len(able), size, replace=False)


def in_turn(round, clients, size):
    return [(round * size + k) % clients for k in range(size)]


def later_twice(round, clients):
    return [0] if round == 0 else [0, 0]


def twice(size):
    return [0, 0]


def beyond(clients):
    return [clients]


def half(clients):
    return [0.5]


def focal(outputs, y, gamma=2.0):
    p = torch.log_softmax(outputs, -1).gather(-1, y[:, None]).squeeze(-1)
    return -((1 - p.exp()) ** gamma) * p


def must(outputs, y, gamma):
    return focal(outputs, y, gamma)


def by_feature(x, y, clients, rng):
    return np.argsort(np.argsort(x.reshape(len(x), -1).mean(1))) * clients // len(y)


def rows_of_each(y, clients):
    return [np.arange(k, len(y), clients) for k in range(clients)]


def lists_of_each(y, clients):
    return [rows.tolist() for rows in rows_of_each(y, clients)]


def by_number(y, clients):
    return dict(enumerate(rows_of_each(y, clients)))


def owner_of_each(y, clients):
    return np.arange(len(y)) % clients


def row_twice(y, clients):
    return [[0, *rows] for rows in rows_of_each(y, clients)]


def row_beyond(y, clients):
    return [rows + 1 for rows in rows_of_each(y, clients)]


def too_few(y, clients):
    return rows_of_each(y, clients)[1:]


def by_name(y, clients):
    return {"a": [0], "b": [1]}


def in_numpy(outputs, y):
    return np.zeros(len(y))


def forgotten(outputs, y):
    focal(outputs, y)


def outside(y, clients):
    return np.arange(len(y)) % (clients + 3) - 1


def wants(y, clients, q):
    return np.zeros(len(y), dtype=int)
"""
SAME = ("own.py:like_uniform", "uniform")
FEW: dict[str, Any] = {
    "algorithm": "fedavg",
    "rounds": 2,
    "partition": {"clients": 5},
    "cohort": {"size": 3},
    "model": "logistic",
}


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)


def run(**settings: Any) -> Any:
    return fedloom.run(**{**FEW, **settings})


def last(history: Any, name: str = "global/test/loss") -> float:
    return float(history.records[-1][name])


def refused(message: str, **settings: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        run(**settings, out="refused")
    assert not Path("refused").exists()  # even if only the first round revealed it


# -- aggregation -----------------------------------------------------------------------------------
def test_a_rule_that_is_the_weighted_mean_changes_nothing_but_rounding() -> None:
    own, plain = run(aggregation={"rule": "own.py:mean"}), run()
    assert last(own) == pytest.approx(last(plain), rel=1e-5)
    assert last(run(aggregation={"rule": "own.py:geometric_median"})) != pytest.approx(last(plain), rel=1e-5)


def test_a_rule_withstands_what_the_mean_does_not_and_has_settings_of_its_own() -> None:
    usercode.vouch("own.py:geometric_median")
    uploads = Update(torch.tensor([[0.0, 1], [0, 1.1], [0.1, 1], [100, -100]]))
    median = robust(Aggregation(rule="own.py:geometric_median", iterations=50), uploads).mean.dw  # type: ignore[call-arg]
    assert median.tolist() == pytest.approx([0.03, 1.03], abs=0.1)
    once = robust(Aggregation(rule="own.py:geometric_median", iterations=0), uploads).mean.dw  # type: ignore[call-arg]
    assert once.tolist() == pytest.approx([25.025, -24.225])


def test_faults_of_a_rule_are_named() -> None:
    refused(r"should make one row of 650 numbers of 3 uploads \(got a tensor of", aggregation={"rule": "own.py:short"})
    refused(r"'own.py:broken' failed: AttributeError: .*own.py, line", aggregation={"rule": "own.py:broken"})
    refused("has an argument 'bad', which is another setting", aggregation={"rule": "own.py:clash"})
    refused("there is no rule 'medain', did you mean 'median'", aggregation={"rule": "medain"})
    refused(
        r"aggregation.iteration: is neither a setting nor an argument .*did you mean 'iterations'",
        aggregation={"rule": "own.py:geometric_median", "iteration": 3},
    )
    refused(r"aggregation.iterations: unknown key", aggregation={"iterations": 3})
    refused("has no 'none'", aggregation={"rule": "own.py:none"})


# -- metrics ---------------------------------------------------------------------------------------
def test_a_metric_is_computed_over_all_rows_that_are_evaluated_together() -> None:
    history = run(evaluate={"metrics": ["own.py:right", "auc"]})
    line = history.records[-1]
    for place in ("global/test", "personal/pre_fit/test"):
        assert line[f"{place}/right"] == pytest.approx(line[f"{place}/accuracy"])
    assert line["personal/pre_fit/test/right_worst10"] == line["personal/pre_fit/test/accuracy_worst10"]
    assert history.summary["global/test/right"].best == max(r["global/test/right"] for r in history.records)


def test_faults_of_a_metric_are_named() -> None:
    refused(
        r"'own.py:rows' should return one number for \d+ rows \(got a tensor", evaluate={"metrics": ["own.py:rows"]}
    )
    refused("'accuracy' is a metric of fedloom: rename the function", evaluate={"metrics": ["own.py:accuracy"]})
    refused("has no 'none'", evaluate={"metrics": ["own.py:none"]})
    Path("other.py").write_text(OWN)
    refused("two of them would be recorded as 'right'", evaluate={"metrics": ["own.py:right", "other.py:right"]})


# -- sampling --------------------------------------------------------------------------------------
def test_a_sampling_is_a_function_of_the_round_and_of_random_numbers_of_the_seed() -> None:
    sizes = torch.tensor([4, 0, 9, 7, 1])
    usercode.vouch([*SAME, "own.py:largest"])
    for seed in (0, 1):
        own, plain = (draw_cohort(Cohort(size=2, sampling=s), torch.ones(9).long(), seed, 3) for s in SAME)
        assert own.ids.tolist() == plain.ids.tolist()
    cohort = Cohort(size=2, sampling="own.py:largest", skip=1)  # type: ignore[call-arg]
    assert draw_cohort(cohort, sizes, 0, 0).ids.tolist() == [0, 3]
    assert draw_cohort(cohort, sizes, 0, 0).times.tolist() == [1, 1]


def test_cohorts_of_a_sampling_are_those_of_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(cohort={"sampling": "own.py:in_turn", "size": 2}, evaluate={"work": True}, out=out)
    lines = (out / "work.jsonl").read_text().splitlines()
    assert [sorted(json.loads(line)["clients"]) for line in lines] == [[0, 1], [2, 3]]
    again = fedloom.resume(out, rounds=3)
    straight = run(cohort={"sampling": "own.py:in_turn", "size": 2}, rounds=3)
    assert again.records[-1]["global/test/loss"] == straight.records[-1]["global/test/loss"]


def test_a_fault_of_a_later_round_leaves_the_rounds_before(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match="in round 2"):
        run(cohort={"sampling": "own.py:later_twice"}, out=out)
    assert [json.loads(line)["round"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [0, 1]


def test_faults_of_a_sampling_are_named() -> None:
    refused(r"should return each client once \(got \[0, 0\]\), in round 1", cohort={"sampling": "own.py:twice"})
    refused(r"should return clients in 0\.\.4 \(got 5 to 5\)", cohort={"sampling": "own.py:beyond"})
    refused(r"should return the numbers of clients \(got float64", cohort={"sampling": "own.py:half"})
    refused("there is no sampling 'unifrom', did you mean", cohort={"sampling": "unifrom"})
    private = {"clip": 1.0, "noise": 1.0, "delta": 1e-3}
    refused("which is not accounted for", cohort={"sampling": "own.py:in_turn"}, privacy=private)


# -- losses ----------------------------------------------------------------------------------------
def test_a_loss_has_settings_of_its_own() -> None:
    none, two, three = (last(run(task={"loss": "own.py:focal", "gamma": g})) for g in (0.0, 2.0, 3.0))
    assert none == pytest.approx(last(run()), rel=1e-4)
    assert none > two > three
    assert two == last(run(task={"loss": "own.py:focal"}))
    refused(r"task.gama: is neither a setting nor .*did you mean 'gamma'", task={"loss": "own.py:focal", "gama": 1})
    refused(r"task.gamma: required: it is an argument of 'own.py:must'", task={"loss": "own.py:must"})
    refused(r"task.gamma: unknown key", task={"gamma": 1.0})


@pytest.mark.parametrize(("section", "key"), [("task", "loss"), ("aggregation", "rule"), ("cohort", "sampling")])
def test_what_is_nearly_a_function_s_name_is_refused_with_the_name(
    section: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(rf"{section}\.{key}: .*is a file.*name a function of it: own\.py:NAME", **{section: {key: "own.py"}})
    message = rf"{section}\.{key}: should be a name \(got the function last\) \(write '{{}}:last'\)"
    refused(message.format(r"file\.py"), **{section: {key: last}})
    monkeypatch.setattr(last, "__module__", "__main__")
    refused(message.format("__main__"), **{section: {key: last}})


def test_only_what_a_file_defines_itself_is_suggested() -> None:
    refused(r"'own.py' has no 'npp' \(known: ", aggregation={"rule": "own.py:npp"})
    refused(r"'own.py' has no 'torhc' \(known: ((?!torch).)*$", aggregation={"rule": "own.py:torhc"})
    refused(r"'own.py' has no 'brokn' \(did you mean 'broken'", aggregation={"rule": "own.py:brokn"})


# -- partitions ------------------------------------------------------------------------------------
def test_a_partition_may_read_the_inputs() -> None:
    usercode.vouch("own.py:by_feature")
    shared = share(parse({"partition": {"kind": "own.py:by_feature", "clients": 5}}), Path())
    bright = shared.arrays.x[~shared.arrays.test].reshape(len(shared.owner), -1).mean(1)
    means = [bright[shared.owner == k].mean() for k in range(5)]
    assert means == sorted(means)


def test_faults_of_a_partition_are_named() -> None:
    refused(r"a client in 0\.\.4 \(got -1 to 6\)", partition={"kind": "own.py:outside", "clients": 5})
    refused(
        r"partition.q: required: 'own.py:wants' has an argument 'q' \(set it, .* y, clients, classes, rng, client\)",
        partition={"kind": "own.py:wants", "clients": 5},
    )


# -- all of them -----------------------------------------------------------------------------------
def test_the_command_line_names_them_and_their_settings() -> None:
    given = ["task.loss=own.py:focal", "task.gamma=3", "evaluate.metrics=own.py:right,auc", "cohort.skip=1"]
    given += ["aggregation.rule=own.py:mean", "cohort.sampling=own.py:largest"]
    config = parse(override({}, given)[0])
    table = as_table(config)
    assert table["task"]["gamma"] == 3
    assert table["cohort"]["skip"] == 1
    assert parse(table) == config
    other = parse(override({}, [*given, "task.gamma=4"])[0])
    assert config_hash(other) != config_hash(config)


def test_files_are_kept_with_a_run_and_go_with_a_deployment(tmp_path: Path) -> None:
    out = tmp_path / "kept"
    run(aggregation={"rule": "own.py:mean"}, out=out)
    assert (out / "code" / "own.py").read_text() == OWN
    config = parse(override({}, ["aggregation.rule=own.py:mean", "cohort.sampling=own.py:largest"])[0])
    own = own_files(config)
    assert list(own.files) == ["code/own.py"]
    assert own.named(as_table(config))["cohort"]["sampling"] == "code/own.py:largest"
    assert not only_simulated(config)
    measured = parse(override({}, ["evaluate.metrics=own.py:right"])[0])
    assert [fault.where for fault in only_simulated(measured)] == ["evaluate.metrics"]


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregation": {"rule": "theirs.py:mean"}},
        {"cohort": {"sampling": "theirs.py:mean"}},
        {"task": {"loss": "theirs.py:mean"}},
        {"evaluate": {"metrics": ["theirs.py:right"]}},
    ],
)
def test_a_file_of_someone_else_is_refused_when_it_would_run(settings: dict[str, Any]) -> None:
    Path("theirs.py").write_text(OWN)
    with pytest.raises(ConfigError, match=r"code .* that you have not run before"):
        prepare(parse(settings), Path())


HIDDEN = """
import random

import numpy as np
import torch
from torch import nn


def drawn(y, clients):
    torch.rand(1)
    return np.random.permutation(np.arange(len(y)) % clients)


def some(clients, size):
    return random.sample(range(clients), size)


def rows():
    x = np.random.normal(size=(60, 4)).astype("f")
    return x, np.arange(60) % 3


class Own(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(np.random.normal(size=(shape[0], classes)), dtype=torch.float32))

    def forward(self, x):
        return x @ self.w
"""


def test_code_that_is_given_no_numbers_still_draws_the_same_for_the_same_seed() -> None:
    """What else the program draws does not depend on it."""
    Path("hidden.py").write_text(HIDDEN)
    settings: dict[str, Any] = {
        "data": {"source": "hidden.py:rows"},
        "partition": {"kind": "hidden.py:drawn", "clients": 4},
        "cohort": {"sampling": "hidden.py:some", "size": 2},
        "model": {"kind": "hidden.py:Own"},
    }

    def losses(seed: int) -> list[float]:
        history = fedloom.run("fedavg", rounds=3, seed=seed, **settings)
        return [line["global/test/loss"] for line in history.records]

    np.random.seed(5)
    before = np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()
    first = losses(0)
    assert (np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()) == before
    np.random.seed(6)
    random.seed(6)
    assert losses(0) == first
    assert losses(1) != first


@pytest.mark.parametrize("name", ["rows_of_each", "lists_of_each", "by_number"])
def test_a_partition_may_return_the_rows_of_each_client(name: str) -> None:
    usercode.vouch([f"own.py:{name}", "own.py:owner_of_each"])
    ours, same = (
        share(parse({"partition": {"kind": f"own.py:{each}", "clients": 7}}), Path()).owner
        for each in (name, "owner_of_each")
    )
    assert ours.tolist() == same.tolist()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("row_twice", r"must give each of the \d+ rows to one client \(row 0 has 6\)"),
        ("row_beyond", r"must return rows in 0..\d+ \(got 1 to \d+\)"),
        ("too_few", r"must return for each of the \d+ rows a client in 0..4 .*or a list of 5 arrays"),
        ("by_name", "returned neither the rows of each client nor the client of rows"),
    ],
)
def test_rows_that_cannot_be_dealt_out_are_refused(name: str, said: str) -> None:
    refused(said, partition={"kind": f"own.py:{name}", "clients": 5})


@pytest.mark.parametrize(
    ("name", "said"), [("in_numpy", "got a numpy.ndarray.*compute with torch"), ("forgotten", "got nothing.*return")]
)
def test_a_loss_that_is_no_tensor_is_refused(name: str, said: str) -> None:
    refused(said, task={"loss": f"own.py:{name}"})
