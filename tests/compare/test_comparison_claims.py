"""Claims in a recipe: what is refused, where they are placed, and the files that have them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedloom.compare.claims import claims_of
from fedloom.compare.plan import plan
from fedloom.compare.run import run
from fedloom.core.errors import ConfigError
from support.comparisons import GRID, SMALL, question, table

CLAIM = {"says": "FedOpt is better", "source": "Table 1", "algorithm": "fedopt"}


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ({"test": "above"}, "compare.claims.0.over: is needed with test = 'above'"),
        ({"test": "best", "over": ["fedavg"]}, "compare.claims.0.over: has no effect with test = 'best'"),
        ({"test": "above", "over": ["fedagv"]}, "compare.claims.0.over: 'fedagv' is not one of the methods"),
        ({"test": "best", "algorithm": "moon"}, "compare.claims.0.algorithm: there is no method 'moon'"),
        ({"test": "trend", "along": "partition.alpha"}, "compare.claims.0.direction: is needed"),
        ({"test": "trend", "along": "local.lr", "direction": "rises"}, "'local.lr' is not a free axis of the grid"),
        ({"test": "trend", "direction": "rises"}, "needs either along, an axis, or among, a list of points"),
        (
            {"test": "best", "along": "partition.alpha"},
            "compare.claims.0.along: with test = 'best', along and value go",
        ),
        ({"test": "above", "along": "partition.alpha", "value": 0.1, "over": [2]}, "no '2' on 'partition.alpha'"),
        ({"test": "best", "among": [{"partition.alpha": 0.1}]}, "compare.claims.0.among: has no effect"),
        ({"test": "steadier", "over": ["fedavg"], "among": [{}]}, "each names one point, by all of partition.alpha"),
        ({"test": "best", "statistic": "rounds_to"}, "compare.claims.0.target: is needed with statistic = 'rounds_to'"),
        ({"test": "best", "target": 0.5}, "compare.claims.0.target: has no effect with statistic = 'mean_last_10'"),
        ({"test": "within", "by": 1, "statistic": "setbacks"}, "a paper's value is not of 'setbacks'"),
        ({"test": "better"}, "compare.claims.0.test"),
        ({"test": "within"}, "compare.claims.0: with test = 'within', 'by' is the largest distance"),
        ({"test": "within", "by": 0.01}, "compare.claims.0: needs a value of the paper at each of its points"),
        ({"test": "best", "metric": "global/test/acuracy"}, "no method records 'global/test/acuracy'"),
        ({"test": "best", "where": {"partition.alpha": 3}}, "compare.claims.0.where.partition.alpha: there is no '3'"),
    ],
)
def test_claims_that_cannot_be_decided_are_refused(claim: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        plan(table(grid=GRID, claims=[CLAIM | claim]))


def test_a_claim_is_about_the_places_that_it_names() -> None:
    trend = CLAIM | {"test": "trend", "along": "partition.alpha", "direction": "falls"}
    here = CLAIM | {"test": "best", "where": {"partition.alpha": 0.1}}
    grid = GRID | {"local.lr": [0.1, 0.2]}
    planned = plan(table(grid=grid, claims=[trend, here]))
    first, second = claims_of(planned, question(("fedavg", "fedprox", "fedopt"), 2))
    assert first.paths == ((("0.1", "0.1"), ("1.0", "0.1")), (("0.1", "0.2"), ("1.0", "0.2")))
    assert not first.rises
    assert second.places == (("0.1", "0.1"), ("0.1", "0.2"))
    assert plan(tomllib.loads(planned.as_toml())).spec.claims == planned.spec.claims


def test_a_claim_may_be_about_values_or_a_part_of_an_axis_or_about_named_places() -> None:
    grid = {"partition.alpha": [0.1, 0.5, 1.0], "local.lr": [0.1, 0.2]}
    at = {"local.lr": 0.1}
    part = CLAIM | {"test": "trend", "along": "partition.alpha", "direction": "rises"}
    part |= {"where": at | {"partition.alpha": [0.5, 1.0]}}
    values = CLAIM | {"along": "partition.alpha", "where": at}
    above = values | {"test": "above", "value": [0.5, 1.0], "over": [0.1]}
    best, order = values | {"test": "best", "value": 1.0}, values | {"test": "order", "value": 1.0, "over": [0.5, 0.1]}
    named = [{"partition.alpha": 1.0, "local.lr": 0.2}, {"partition.alpha": 0.1, "local.lr": 0.1}]
    steadier = CLAIM | {"test": "steadier", "over": ["fedavg"], "among": named}
    speed = CLAIM | {"test": "best", "statistic": "rounds_to", "target": 60}
    planned = plan(table(grid=grid, claims=[part, above, best, order, steadier, speed]))
    found = claims_of(planned, question(("fedavg", "fedprox", "fedopt"), 2))
    low, middle, high = (("0.1", "0.1"), ("0.5", "0.1"), ("1.0", "0.1"))
    assert found[0].paths == ((middle, high),)
    assert found[1].pairs == ((middle, low), (high, low))
    assert found[2].pairs == ((high, low), (high, middle))
    assert found[3].pairs == ((high, middle), (middle, low))
    assert found[4].paths == ((("1.0", "0.2"), ("0.1", "0.1")),)
    assert found[5].target == 0.6
    assert plan(tomllib.loads(planned.as_toml())).spec.claims == planned.spec.claims


def test_claims_are_in_every_file(tmp_path: Path) -> None:
    claims = [CLAIM | {"test": "above", "over": ["fedavg"]}, CLAIM | {"test": "within", "by": 0.001}]
    spec = {"algorithms": ["fedavg", "fedopt"], "seeds": 2, "claims": claims}
    paper = [{"algorithm": "fedopt", "value": 0.999}]
    done = run(SMALL | {"compare": spec | {"paper": paper}}, tmp_path / "c", jobs=1)
    verdicts = [d.verdict for d in done.decided]
    assert verdicts[1] == "does not hold"
    assert [x["verdict"] for x in json.loads((tmp_path / "c" / "summary.json").read_text())["claims"]] == verdicts
    for name in ("table.md", "claims.csv", "claims.tex"):
        text = (tmp_path / "c" / name).read_text()
        assert "FedOpt is better" in text
        assert all(verdict in text for verdict in verdicts)
