"""What a run will spend is known before it trains: the forecast is the ledger (of every algorithm in tests/golden)."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from fedloom.engine.forecast import Spent, forecast
from fedloom.engine.rounds import advance, begin
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse

ROUNDS = 3
LAW_AFL: dict[str, Any] = {"kind": "law_afl", "head_steps": 2}  # what a server computes is not what a run spends
TRAINED = LAW_AFL | {"server_epochs": 1}


def prepared(algorithm: Any, **more: Any) -> Experiment:
    table = {"rounds": ROUNDS, "partition": {"clients": 5, "alpha": 0.5}, "model": "mlp", "algorithm": algorithm}
    return prepare(parse(table | more), Path("unused")).experiment


def ledger(exp: Experiment) -> list[Spent]:
    """What the rounds really took."""
    state, store, found = begin(exp), RamStore(exp.federation.clients), []
    for _ in range(ROUNDS):
        state, _ = advance(exp, state, store)
        found.append(Spent(state.round, state.gradients, state.up + state.down, state.busiest))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("fedavg", {"cohort": {"size": 2}, "local": {"epochs": 2, "drop_last": True}}),
        ("fedavg", {"cohort": {"size": 2}, "system": {"stragglers": 0.5, "dropout": 0.3}}),
        ("fedprox", {"cohort": {"size": 3}, "system": {"stragglers": 0.5, "policy": "partial"}}),
        ("fedavg", {"system": {"deadline": 1.0, "speed": 100.0, "speed_spread": 1.0}}),
        ("fedavg", {"cohort": {"sampling": "poisson", "size": 2}}),
        ("analytic", {"model": "logistic", "cohort": {"sampling": "uniform", "size": 2}}),
        ({"kind": "analytic", "forget": [0, 3]}, {"model": "logistic"}),
        (LAW_AFL, {"model": "logistic", "cohort": {"sampling": "uniform", "size": 2}, "proxy": {"size": 20}}),
        (TRAINED | {"schedule": "warmup_then_analytic", "warmup": 1}, {"cohort": {"size": 3}}),
        (TRAINED | {"schedule": "per_round", "shrink_rule": "eq5"}, {"cohort": {"size": 3}}),
        (TRAINED | {"schedule": "per_round", "fresh": True, "quality": "report"}, {"cohort": {"size": 3}}),
        ({"kind": "ditto", "personal_epochs": 2}, {"cohort": {"size": 2}}),
        ("dfedavg", {"topology": {"kind": "random", "max_degree": 2, "gossip_steps": 2, "link_loss": 0.3}}),
        ("dfedgam", {"topology": {"kind": "ring", "node_loss": 0.4}}),
        ("dfedavg", {"topology": {"kind": "ring", "node_loss": 0.4, "rejoin": "pull", "stale_after": 0}}),
        ("dfedsam", {"topology": {"kind": "ring", "node_loss": 0.4, "train_offline": True}}),
        ("dfedavg", {"topology": {"kind": "exp", "mixing": "push_sum", "link_loss": 0.2}}),
        ({"kind": "dfedavgm", "scheme": "choco", "bits": 4}, {"topology": "ring"}),
        ("dfedavg", {"topology": {"kind": "ring", "deaths": [[1, 2], [3, 3]], "node_death": 0.1}}),
        ("dfedavg", {"topology": {"kind": "ring", "link_loss": 0.4, "link_policy": "stale"}}),
    ],
)
def test_failures_and_unequal_work_are_foreseen(algorithm: Any, more: dict[str, Any]) -> None:
    exp = prepared(algorithm, **more)
    assert list(islice(forecast(exp), ROUNDS)) == ledger(exp)


@pytest.mark.slow
def test_a_message_counts_once_with_a_server_and_without() -> None:
    """A server that sends 4 models and receives 4 takes as many bytes as 4 pairs of nodes that exchange theirs."""
    split = {"partition": {"kind": "iid", "clients": 8}}
    server = prepared("fedavg", cohort={"size": 4}, **split)
    pairs = prepared("dfedavg", topology={"kind": "matching", "pairs": 4}, **split)
    assert [spent.bytes for spent in ledger(server)] == [spent.bytes for spent in ledger(pairs)]
    assert [spent.bytes for spent in islice(forecast(pairs), ROUNDS)] == [spent.bytes for spent in ledger(pairs)]
